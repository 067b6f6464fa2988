"""Per-sample gradients against loops of backward passes, influence against its definition, and wrong labels found."""

import json
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

from duetgan.data.packing.records import pack_arrays
from duetgan.data.reading.dataset import Dataset
from duetgan.extras.influence import command
from duetgan.extras.influence.scores import (
    Snapshot,
    head_gradients,
    influence,
    label_issues,
    label_probabilities,
    rate_of,
    top_records,
)
from duetgan.models.restore import classifier_from
from duetgan.utils.checkpoint import load, newest_first
from duetgan.utils.distributed.process import run_cli
from duetgan.utils.errors import UserError
from duetgan.utils.seeding import forked, generator, numpy_generator
from tests.conftest import sample_images
from tests.end_to_end.helpers import train_in_process
from tests.metrics.conftest import gan_run

pytestmark = pytest.mark.usefixtures("slim_module")
CHOSEN = ["trouser", "sneaker", "bag", "dress"]
FLIPPED = 0.05


class Net(nn.Module):
    """Convolution, BatchNorm with statistics of its own, and two linear layers."""

    def __init__(self, *, bias: bool = True) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(1, 3, 3, stride=2), nn.BatchNorm2d(3)
        self.hidden, self.fc = nn.Linear(3, 5), nn.Linear(5, 4, bias=bias)
        with torch.no_grad():
            self.norm.running_mean.uniform_(-1, 1)
            self.norm.running_var.uniform_(0.5, 2)

    def forward(self, x):
        return self.fc(self.hidden(self.norm(self.conv(x)).relu().mean((2, 3))).tanh())


def net(**options) -> Net:
    with forked(0, "init", "influence"):
        return Net(**options).double().eval()


def batch(count=5):
    draw = generator(0, "test", "influence")
    return torch.randn(count, 1, 8, 8, dtype=torch.float64, generator=draw), torch.arange(count) % 4


def loop_of_backwards(model, images, labels, names):
    rows = []
    for image, label in zip(images, labels, strict=True):
        model.zero_grad()
        nn.functional.cross_entropy(model(image[None]), label[None]).backward()
        rows.append(torch.cat([model.get_parameter(name).grad.flatten() for name in names]))
    return torch.stack(rows)


def full(found):
    """The gradients themselves, [n, P]: K F of the weight, then K of the bias."""
    weight = (found.errors[:, :, None] * found.inputs[:, None]).flatten(1)
    return torch.cat([weight, found.errors], 1) if found.bias else weight


@pytest.mark.parametrize("bias", [True, False])
def test_the_heads_closed_form_is_what_backward_passes_find(bias):
    model, (images, labels) = net(bias=bias), batch()
    expected = loop_of_backwards(model, images, labels, ["fc.weight", "fc.bias"][: 1 + bias])
    found = head_gradients(model, images, labels)
    torch.testing.assert_close(full(found), expected, rtol=1e-10, atol=1e-14)
    torch.testing.assert_close(found.dot(found), expected @ expected.T, rtol=1e-10, atol=1e-14)


def test_logits_that_no_linear_layer_gives_are_refused():
    convolution, short = nn.Sequential(nn.Conv2d(1, 4, 8), nn.Flatten()), nn.Sequential(net(), nn.ZeroPad1d(1))
    for model in (convolution.double().eval(), short.eval()):
        with pytest.raises(UserError, match="no linear layer"):
            head_gradients(model, *batch())


@pytest.fixture(scope="module")
def flipped(tmp_path_factory, slim_module):
    """A run on 240 images of which 12 have another class's label; (run, data, numbers of the wrong ones)."""
    folder = tmp_path_factory.mktemp("flipped")
    images, labels, names = sample_images("train", 60)
    kept = [names.index(next(n for n in names if n.lower() == name)) for name in CHOSEN]
    rows = np.isin(labels, kept)
    images, labels = images[rows], np.array([kept.index(label) for label in labels[rows]])
    draw = numpy_generator(0, "test", "flipped")
    wrong = np.sort(draw.choice(len(labels), round(FLIPPED * len(labels)), replace=False))
    labels[wrong] = (labels[wrong] + draw.integers(1, len(kept), len(wrong))) % len(kept)
    pack_arrays(folder / "train.lmdb", images, labels=labels, classes=CHOSEN)
    (folder / "recipe.yaml").write_text(f"""
task: classifier
steps: 60
batch_size: 24
data: {{path: {folder}/train.lmdb}}
model: {{stem: small-stride2}}
optimizer: {{lr: 0.02, warmup_steps: 5}}
ema: {{decay: 0.9}}
log: {{tensorboard: false, samples_every: 0}}
checkpoint: {{every: 20, keep: 5}}
evaluation: {{every: 0}}
""")
    assert train_in_process(folder / "recipe.yaml", folder / "run") == 0
    return folder / "run", folder / "train.lmdb", wrong


def snapshots_of(run) -> list[Snapshot]:
    checkpoints = map(load, newest_first(run / "checkpoints")[::-1])
    return [Snapshot(rate_of(checkpoint), partial(classifier_from, checkpoint)) for checkpoint in checkpoints]


def test_influence_is_its_definition(flipped):
    """Checkpoint by checkpoint, rate times the product of gradients, the rates scaled to a sum of 1."""
    run, data, _ = flipped
    snapshots = snapshots_of(run)
    assert len(snapshots) == 3
    rates = [load(path)["state"]["optimizer"]["param_groups"][0]["lr"] for path in newest_first(run / "checkpoints")]
    assert len(set(rates)) == 3
    with Dataset(data) as reader:
        images, labels = (torch.from_numpy(part) for part in reader.read([3, 100, 201]))
        scores = influence(snapshots, reader, images[1], 2, batch_size=100)
        expected = torch.zeros(3, dtype=torch.float64)
        for snapshot, rate in zip(snapshots, rates[::-1], strict=True):
            model, names = snapshot.load().double().requires_grad_(), ["network.fc.weight", "network.fc.bias"]
            inputs = images.double() / 127.5 - 1
            own = loop_of_backwards(model, inputs[1:2], torch.tensor([2]), names)[0]
            expected += rate / sum(rates) * (loop_of_backwards(model, inputs, labels, names) @ own)
        torch.testing.assert_close(scores[[3, 100, 201]], expected, rtol=1e-3, atol=1e-6 * scores.abs().max().item())
        still, equal = ([replace(snapshot, rate=rate) for snapshot in snapshots] for rate in (0.0, 1.0))
        assert torch.equal(influence(still, reader, images[1], 2), influence(equal, reader, images[1], 2))


def test_confident_learning_by_hand():
    """Thresholds are the mean probability of each class in the images labelled so: 0.5 and 0.8."""
    own, labels = [[0.8, 0.2], [0.2, 0.8], [0.1, 0.9], [0.35, 0.65], [0.05, 0.95]], torch.tensor([0, 0, 1, 1, 1])
    found = torch.tensor(own).double()
    assert label_probabilities(found, labels).tolist() == pytest.approx([0.8, 0.2, 0.9, 0.65, 0.95])
    # image 1: class 1 has 0.8, below its threshold (0.9 + 0.65 + 0.95) / 3 = 0.833, so that it is not an issue
    assert label_issues(found, labels).tolist() == [-1, -1, -1, -1, -1]
    own[1] = [0.1, 0.9]
    assert label_issues(torch.tensor(own).double(), labels).tolist() == [-1, 1, -1, -1, -1]
    unused = torch.tensor([*([a, b, 0] for a, b in own[1:]), [0, 0.1, 0.9]])  # no image is labelled class 2
    assert 2 not in label_issues(unused.double(), torch.tensor([0, 1, 1, 1, 0]))
    assert rate_of({"state": {}}) == 1
    assert top_records(torch.tensor([0.5, -1, 2, 0]), 3) == [2, 0]


def run(capsys, *arguments):
    assert run_cli(command.main, [*map(str, arguments), "--device", "cpu"]) == 0
    return capsys.readouterr()


def test_the_command_lists_wrong_labels(flipped, tmp_path, capsys):
    folder, data, wrong = flipped
    common = ["--checkpoint", folder, "--data", data, "--mislabelled", "--out", tmp_path / "x" / "wrong.png"]
    out, err = run(capsys, *common, "--top", 12, "--json")
    document = json.loads(out)
    assert len(document["checkpoints"]) == 3
    assert len({item["record"] for item in document["mislabelled"]} & set(wrong.tolist())) >= 7
    for item in document["mislabelled"]:
        assert item["label"] != item["named"]
    assert "not what the classifier was trained on" not in err
    with Image.open(tmp_path / "x" / "wrong.png") as sample_image:
        assert sample_image.width > 1000
    assert len(run(capsys, *common, "--top", 2)[0].splitlines()) == 3


def test_the_command_explains_a_prediction(flipped, tmp_path, capsys):
    folder, data, _ = flipped
    with Dataset(data) as reader:
        Image.fromarray(reader.image(5)[0][:, :, 0]).save(tmp_path / "shown.png")
    common = ["--checkpoint", folder, "--data", data, "--image", tmp_path / "shown.png", "--out", tmp_path / "why.png"]
    document = json.loads(run(capsys, *common, "--top", 3, "--json")[0])
    assert document["label"] == document["named"]
    for kind, sign in (("helped", 1), ("hurt", -1)):
        scores = [sign * item["score"] for item in document[kind]]
        assert scores == sorted(scores, reverse=True)
        assert all(score > 0 for score in scores)
    assert len(document["helped"]) == 3
    assert {item["label"] for item in document["helped"]} == {document["label"]}
    other = next(name for name in CHOSEN if name != document["label"])
    assert f"influence on {other}" in run(capsys, *common, "--label", other)[0].splitlines()[0]
    with Image.open(tmp_path / "why.png") as sample_image:
        assert sample_image.width > 9 * 100


def test_refusals(flipped, tmp_path, refused):
    folder, data, _ = flipped
    gan = gan_run(tmp_path / "gan", data={})
    pack_arrays(tmp_path / "other.lmdb", np.zeros((2, 1, 16, 16), np.uint8), labels=[0, 1], classes=["a", "b"])
    (tmp_path / "broken.png").write_bytes(b"no")
    out = ["--out", tmp_path / "o.png"]
    good = ["--checkpoint", folder, "--data", data]
    cases = [
        ([*good, *out], "give either --image FILE or --mislabelled"),
        ([*good, *out, "--mislabelled", "--image", "x.png"], "give either"),
        ([*good, *out, "--mislabelled", "--label", "bag"], "--label belongs to --image"),
        ([*good, "--out", tmp_path / "o.jpg", "--mislabelled"], "must end in .png"),
        ([*good, *out, "--image", tmp_path / "broken.png"], "give another image"),
        ([*good, *out, "--image", tmp_path / "none.png"], "cannot be read"),
        (["--checkpoint", gan, "--data", data, *out, "--mislabelled"], "task 'gan'; give one of a classifier"),
        (["--checkpoint", folder, "--data", tmp_path / "other.lmdb", *out, "--mislabelled"], "classes are not those"),
    ]
    for arguments, told in cases:
        assert told in refused(command.main, *arguments, "--device", "cpu")
    assert not (tmp_path / "o.png").exists()
