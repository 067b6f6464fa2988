from typing import Any

import pytest
import torch
from torch import nn

from duetgan.models.dcgan import DcganConfig, DcganDiscriminator
from duetgan.models.growing import GrowingDiscriminator
from duetgan.models.r3gan import R3Discriminator, R3DiscriminatorConfig, R3Generator, R3GeneratorConfig
from duetgan.models.stylegan2 import Discriminator, DiscriminatorConfig, Generator, GeneratorConfig
from duetgan.training.classifier.config import ClassifierConfig
from duetgan.training.engine.transfer import Fit, find_donor, plan, transfer
from duetgan.training.gan.config import GanConfig, config_of
from duetgan.training.optim.config import OptimizerConfig
from duetgan.training.optim.ema import EMA
from duetgan.training.optim.updater import Precision, Updater
from duetgan.utils import checkpoint as checkpoints
from duetgan.utils.checkpoint.provenance import Lineage
from duetgan.utils.config.build import to_tree
from duetgan.utils.config.yaml_files import save_yaml
from duetgan.utils.errors import UserError
from duetgan.utils.runlog.run_folder import RunFolder

# the same width at every resolution, so that shapes cannot tell resolutions apart
FLAT: dict[str, Any] = {"channel_base": 1024, "channel_max": 8}


def generator(resolution=16, classes=3, **more):
    config = GeneratorConfig(z_dim=4, w_dim=6, mapping_layers=2, **(FLAT | more))
    return Generator(config, resolution=resolution, channels=1, classes=classes)


def discriminator(resolution=16, classes=3, progressive=False):
    config = DiscriminatorConfig(**FLAT, mapping_layers=1)
    kind = GrowingDiscriminator if progressive else Discriminator
    return kind(config, resolution=resolution, channels=1, classes=classes)


def planned(donor: nn.Module, own: nn.Module, name: str, resolutions=(16, 16)):
    return plan(donor.state_dict(), own.state_dict(), name, resolutions)


def test_a_layer_is_taken_whole_or_not_at_all():
    there = {"a.weight": torch.ones(2, 3), "a.bias": torch.ones(2), "free": torch.ones(4), "mean": torch.ones(1)}
    here = {"a.weight": torch.zeros(2, 5), "a.bias": torch.zeros(2), "free": torch.zeros(4), "mean": torch.zeros(2)}
    misfits = ["a.weight", "mean"]
    fit = plan(there, here, "model", (8, 8))
    assert fit == Fit(copied={"free": there["free"]}, misfits=misfits, new=["a.bias"], unused=[])
    assert fit.lines() == ["does not fit: a.weight, mean", "stays new: a.bias"]
    assert Fit(unused=list("abcdef")).lines() == ["left out: a, b, c, d and 2 more"]


def test_a_generator_of_another_resolution_and_other_classes():
    donor, own = generator(16, classes=3), generator(32, classes=5)
    fit = planned(donor, own, "generator", (16, 32))
    assert fit.misfits == ["mapping.embed.weight"]
    # the embedding's bias belongs to its weight
    assert {name for name in fit.new if not name.startswith("blocks.3.")} == {"mapping.embed.bias"}
    assert all(name in fit.new for name in own.state_dict() if name.startswith("blocks.3."))
    assert fit.unused == []
    kept = {name for name in own.state_dict() if not name.startswith(("blocks.3.", "mapping.embed."))}
    assert fit.copied.keys() == kept
    assert all(torch.equal(value, donor.state_dict()[name]) for name, value in fit.copied.items())
    smaller = planned(generator(32), generator(16), "generator", (32, 16))
    assert (smaller.misfits, smaller.new) == ([], [])
    assert smaller.unused == [name for name in own.state_dict() if name.startswith("blocks.3.")]


@pytest.mark.parametrize(("there", "here"), [(16, 32), (16, 64), (32, 16), (64, 16)])
def test_discriminator_blocks_are_matched_by_resolution(there, here):
    donor, own = discriminator(there), discriminator(here)
    fit = planned(donor, own, "discriminator", (there, here))
    blocks = {there: len(donor.blocks), here: len(own.blocks)}
    common = min(blocks.values())
    for from_the_end in range(1, common + 1):
        for key, value in donor.blocks[-from_the_end].state_dict().items():
            assert torch.equal(fit.copied[f"blocks.{blocks[here] - from_the_end}.{key}"], value)
    above = [f"blocks.{i}." for i in range(blocks[here] - common)]
    assert {name for name in own.state_dict() if name.startswith((*above, "from_rgb."))} == set(fit.new)
    unused = [f"blocks.{i}." for i in range(blocks[there] - common)]
    assert {name for name in donor.state_dict() if name.startswith((*unused, "from_rgb."))} == set(fit.unused)


def test_from_rgb_is_taken_by_its_resolution():
    donor, own = discriminator(16), discriminator(32, progressive=True)
    taken = planned(donor, own, "discriminator", (16, 32)).copied
    assert torch.equal(taken["from_rgbs.16.weight"], donor.from_rgb.weight)
    assert "from_rgb.weight" not in taken
    back = planned(own, donor, "discriminator", (32, 16)).copied
    assert torch.equal(back["from_rgb.weight"], own.from_rgbs["16"].weight)


def test_r3gan_is_matched_by_resolution_too():
    sizes: dict[str, Any] = {"width": 8, "cardinality": 4, "blocks": 1}
    shape = {"channels": 1, "classes": 3}
    donor = R3Discriminator(R3DiscriminatorConfig(**sizes), resolution=16, **shape)
    own = R3Discriminator(R3DiscriminatorConfig(**sizes), resolution=32, **shape)
    fit = planned(donor, own, "discriminator", (16, 32))
    assert {name.split(".blocks.")[0] for name in fit.new} == {"stages.0", "from_rgb.weight"}
    block = donor.state_dict()["stages.0.blocks.0.expand.weight"]
    assert torch.equal(fit.copied["stages.1.blocks.0.expand.weight"], block)
    small, large = (R3Generator(R3GeneratorConfig(**sizes), resolution=size, **shape) for size in (16, 32))
    fit = planned(small, large, "generator", (16, 32))
    # the last layer of a generator belongs to its top resolution
    assert {name.split(".blocks.")[0] for name in fit.new} == {"stages.3", "to_rgb.weight"}
    block = small.state_dict()["stages.0.blocks.0.expand.weight"]
    assert torch.equal(fit.copied["stages.0.blocks.0.expand.weight"], block)


class Counter:
    """Something in a registry that is no network."""

    def state_dict(self):
        return {"n": 1}


class Buffers(nn.Module):
    """State of an augmentation, say: a module without weights."""

    def __init__(self):
        super().__init__()
        self.register_buffer("p", torch.ones(()))


def registry(resolution=16, classes=3, **more):
    model = generator(resolution, classes, **more)
    ema = EMA(model, buffers="copy")
    nn.init.constant_(ema.model.constant, 7.0)  # an average is not its model
    return {
        "generator": model,
        "discriminator": discriminator(resolution, classes),
        "generator_ema": ema,
        "augment": Buffers(),
        "loop": Counter(),
    }


LINEAGE = {"trained_on": ["f00d"], "synthetic": []}


def saved(folder, parts, *, resolution=16, classes=("a", "b", "c"), step=40, **more):
    """A run with one checkpoint; `more` replaces entries."""
    content = {
        "schema": checkpoints.SCHEMA,
        "task": "gan",
        "step": step,
        "config": {"task": "gan"},
        "classes": list(classes),
        "shape": {"channels": 1, "classes": len(classes), "resolution": resolution},
        "state": {name: part.state_dict() for name, part in parts.items()},
    }
    path = checkpoints.save(folder / "checkpoints", content | more)
    checkpoints.point(folder / "checkpoints", "last", path)
    return path


def taken_from(path, ours, resolution=16, classes="abc"):
    return transfer(str(path), ours, resolution=resolution, classes=list(classes))[0]


def test_every_network_takes_its_own_weights(tmp_path):
    theirs, ours = registry(), registry()
    path = saved(tmp_path, theirs)
    ours["augment"].p.zero_()
    text = taken_from(path, ours)
    for name in ("generator", "discriminator", "generator_ema"):
        assert all(torch.equal(a, b) for a, b in both(theirs[name], ours[name]))
    assert not torch.equal(ours["generator"].constant, ours["generator_ema"].model.constant)
    assert ours["augment"].p == 0  # not a network
    names = ("generator", "discriminator", "generator_ema")
    counts = [(name, len(ours[name].state_dict())) for name in names]
    expected = [f"weights from {path}, step 40:", *(f"  {name}: {n} of {n} tensors taken" for name, n in counts)]
    assert text.splitlines() == expected


def test_an_optimizer_with_weights_of_its_own_starts_from_the_donors(tmp_path):
    """Found by review: a schedule-free one went back to the weights of before the transfer in its first step."""
    theirs, ours = registry(), registry()
    model = ours["generator"]
    settings = OptimizerConfig(name="schedulefree-adamw", lr=1e-9, schedule="constant")
    ours["optimizer"] = Updater(model, settings, Precision("fp32", torch.device("cpu")), 10)
    taken_from(saved(tmp_path, theirs), ours)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    ours["optimizer"].step(0)
    for (name, now), then in zip(model.named_parameters(), theirs["generator"].parameters(), strict=True):
        torch.testing.assert_close(now, then, msg=name)


def both(a, b):
    return zip(a.state_dict().values(), b.state_dict().values(), strict=True)


def test_what_does_not_fit_is_told_and_keeps_its_values(tmp_path):
    theirs, ours = registry(), registry(32, 5)
    before = {name: value.clone() for name, value in ours["generator"].state_dict().items()}
    text = taken_from(saved(tmp_path, theirs), ours, 32, "abcde")
    after = ours["generator"].state_dict()
    assert torch.equal(after["blocks.1.first.conv.weight"], theirs["generator"].blocks[1].first.conv.weight)
    assert torch.equal(after["blocks.3.first.conv.weight"], before["blocks.3.first.conv.weight"])
    assert "    stays new: blocks.3." in text
    assert "    left out: from_rgb." in text
    assert text.splitlines()[-1] == "  3 of 5 classes taken by name: a, b, c; new: d, e"


@pytest.mark.parametrize("classes", ["cab", "bd", "xyz", "abcdefg"])
def test_what_belongs_to_a_class_follows_its_name(tmp_path, classes):
    """K2: it went to the class of the same number."""
    theirs, ours = registry(), registry(classes=len(classes))
    for parts, count in ((theirs, 3), (ours, len(classes))):
        parts["discriminator"].add_auxiliary()
        parts["dcgan"] = DcganDiscriminator(DcganConfig(width=2), resolution=16, channels=1, classes=count)
    before = {name: {k: v.clone() for k, v in net.state_dict().items()} for name, net in ours.items() if name != "loop"}
    told = taken_from(saved(tmp_path, theirs), ours, classes=classes).splitlines()[-1]
    assert (
        told
        == {
            "cab": "  all 3 classes taken by name: c, a, b",
            "bd": "  1 of 2 classes taken by name: b; new: d; dropped: a, c",
            "xyz": "  0 of 3 classes taken by name; new: x, y, z; dropped: a, b, c",
            "abcdefg": "  3 of 7 classes taken by name: a, b, c; new: d, e, f, g",
        }[classes]
    )

    def embedded(network, number):
        network = getattr(network, "mapping", network)
        return network.embed(torch.eye(network.embed.weight.shape[1])[[number]]) - network.embed.bias

    for place, name in enumerate(classes):
        for part in ("generator", "discriminator"):
            if name in "abc":
                expected = embedded(theirs[part], "abc".index(name))
                torch.testing.assert_close(embedded(ours[part], place), expected)
            else:
                weight, old = ("mapping." * (part == "generator") + "embed.weight", before[part])
                assert torch.equal(ours[part].state_dict()[weight][:, place], old[weight][:, place])
        heads = [parts["discriminator"].auxiliary for parts in (theirs, ours)]
        same = name in "abc" and torch.equal(heads[1].weight[place], heads[0].weight["abc".index(name)])
        assert same == (name in "abc")
        if name in "abc":
            columns = [theirs["dcgan"].embed.weight[:, "abc".index(name)], ours["dcgan"].embed.weight[:, place]]
            assert torch.equal(*columns)


def test_a_network_that_the_donor_lacks_stays_new_and_other_names_of_classes_are_mentioned(tmp_path):
    path, ours = saved(tmp_path, {"generator": registry()["generator"]}), registry()
    before = ours["discriminator"].output.weight.clone()
    lines = taken_from(path, ours, classes="xbz").splitlines()
    assert torch.equal(ours["discriminator"].output.weight, before)
    assert f"  discriminator: 0 of {len(ours['discriminator'].state_dict())} tensors taken" in lines
    assert lines[-1] == "  1 of 3 classes taken by name: b; new: x, z; dropped: a, c"


def test_weights_keep_our_precision_and_layout(tmp_path):
    path = saved(tmp_path, registry())
    ours = registry()
    for name in ("generator", "discriminator"):
        ours[name].to(torch.float64, memory_format=torch.channels_last)
    taken_from(path, ours)
    weight = ours["discriminator"].blocks[0].first.weight
    assert weight.dtype == torch.float64
    assert weight.is_contiguous(memory_format=torch.channels_last)
    assert weight.requires_grad


def test_nothing_that_fits_is_refused_and_changes_nothing(tmp_path):
    """Only numbers and biases of one image channel fit."""
    config = GeneratorConfig(z_dim=5, w_dim=7, mapping_layers=1, channel_base=64, channel_max=3)
    ours = Generator(config, resolution=16, channels=1, classes=3)
    before = {name: value.clone() for name, value in ours.state_dict().items()}
    with pytest.raises(UserError, match=r"none of its weights fit .* --init-from"):
        taken_from(saved(tmp_path, registry()), {"generator": ours})
    assert all(torch.equal(value, before[name]) for name, value in ours.state_dict().items())
    with pytest.raises(UserError, match="state of 'generator' is not a network's"):
        taken_from(saved(tmp_path / "other", {"generator": Counter()}), {"generator": generator()})


def test_a_run_becomes_its_checkpoint(tmp_path):
    path, folder = saved(tmp_path / "donor", registry(), lineage=LINEAGE), RunFolder(tmp_path / "run")
    plain, config = GanConfig(), GanConfig(init_from=str(tmp_path / "donor"))
    assert (find_donor(plain, folder), plain.init_from) == (None, None)
    donor = find_donor(config, folder)
    assert donor == {"file": str(path), "step": 40, "sha256": checkpoints.file_sha256(path)}
    assert transfer(str(path), registry(), resolution=16, classes="abc")[1] == Lineage.read(LINEAGE)
    assert config.init_from == str(path)  # a donor that trains on does not change what this run came from
    assert not folder.path.exists()
    folder.path.mkdir()
    save_yaml(to_tree(config), folder.path / "config.yaml")  # killed before its first checkpoint it starts anew
    assert find_donor(config, folder) == donor


@pytest.mark.parametrize("at_the_start", [None, "elsewhere/step-00000007.pt"])
def test_a_resume_keeps_what_the_run_began_with(tmp_path, capsys, at_the_start):
    folder = RunFolder(tmp_path / "run")
    saved(folder.path, registry())
    save_yaml(to_tree(GanConfig(init_from=at_the_start)), folder.path / "config.yaml")
    config = GanConfig(init_from="nowhere")
    assert find_donor(config, folder) is None
    assert config.init_from == at_the_start
    lines = capsys.readouterr().err.splitlines()
    assert lines == [f"--init-from nowhere is ignored: {folder.path} resumes from its own checkpoint"]
    config = GanConfig()
    assert find_donor(config, folder) is None
    assert config.init_from == at_the_start
    assert capsys.readouterr().err == ""


def test_what_is_no_checkpoint_of_such_a_run_is_refused(tmp_path):
    def refusal(config):
        with pytest.raises(UserError) as refused:
            find_donor(config, RunFolder(tmp_path / "run"))
        return str(refused.value)

    path = saved(tmp_path, registry())
    (tmp_path / "empty").mkdir()
    newer = saved(tmp_path / "r3", registry(), config={"task": "gan", "architecture": "r3gan"})
    assert "task 'gan', but this run trains a 'classifier'" in refusal(ClassifierConfig(init_from=str(path)))
    assert "architecture 'stylegan2', this run's of 'r3gan'" in refusal(config_of("r3gan")(init_from=str(path)))
    assert "architecture 'r3gan', this run's of 'stylegan2'" in refusal(GanConfig(init_from=str(newer)))
    assert find_donor(config_of("r3gan")(init_from=str(newer)), RunFolder(tmp_path / "run")) is not None
    assert "no such run folder or checkpoint" in refusal(GanConfig(init_from=str(tmp_path / "nowhere")))
    assert "holds no checkpoint;" in refusal(GanConfig(init_from=str(tmp_path / "empty")))
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    assert "damaged" in refusal(GanConfig(init_from=str(path)))
