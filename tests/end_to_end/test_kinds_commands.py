"""Images of other kinds and shapes through the commands: trained, judged, drawn, packed, exported, predicted."""

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import duetgan
from duetgan.commands import evaluate, export, generate, predict, train
from duetgan.data.lmdb.record import Layout
from duetgan.data.lmdb.writer import LMDBWriter
from duetgan.data.packing.records import add_image
from duetgan.data.reading.dataset import Dataset
from duetgan.utils.distributed.process import run_cli
from duetgan.utils.image_spec import ImageSpec
from tests.end_to_end.test_kinds import spec_of, stored
from tests.end_to_end.test_rectangles import SMALL

SPEC = dataclasses.replace(spec_of(4, alpha=True, side=16), width=24)
RECIPE = """task: gan
generator: {generator}
discriminator: {discriminator}
loss: {{r1_interval: 2, style_mixing: 0, feature_matching_weight: 0.1, feature_matching_group: 2}}
ada: {{mode: fixed, p: 0.5, operations: {{blit: 1, geometry: 1, colour: 1, filter: 1, noise: 1, cutout: 1}}}}
"""


def pack(path: Path, spec: ImageSpec, n: int, seed: int) -> None:
    with LMDBWriter(path, Layout.of(spec), classes=["a", "b"], source=path.stem) as writer:
        for number, image in enumerate(stored(spec, n, seed).numpy()):
            add_image(writer, np.ascontiguousarray(image.transpose(1, 2, 0)), number % 2)
        writer.finish()


@pytest.mark.usefixtures("slim")
def test_from_the_file_to_what_is_made_of_it(tmp_path, capsys):
    for part, count in (("train", 24), ("val", 12)):
        pack(tmp_path / f"{part}.lmdb", SPEC, count, len(part))
    nets = dict(zip(("generator", "discriminator"), map(json.dumps, SMALL["stylegan2"]), strict=True))
    recipes = {
        "gan": RECIPE.format(**nets),
        "classifier": "task: classifier\nmodel: {stem: small}\noptimizer: {lr: 0.02, warmup_steps: 1}\n",
    }
    data = f"data: {{path: {tmp_path}/train.lmdb, val_path: {tmp_path}/val.lmdb}}\n"
    more = "steps: 4\nbatch_size: 8\nlog: {every: 2, samples_every: 2}\ncheckpoint: {every: 2}\n"
    for task, recipe in recipes.items():
        (tmp_path / f"{task}.yaml").write_text(recipe + more + data + "evaluation: {every: 4, n: 8}\n")
        options = ["--config", str(tmp_path / f"{task}.yaml"), "--run-dir", str(tmp_path / task)]
        options += ["--evaluation.extractor", "pixels"] * (task == "gan")
        assert run_cli(train.main, [*options, "--max-steps", "2"]) == 0
        assert run_cli(train.main, options) == 0
    gan, judge = ["--checkpoint", str(tmp_path / "gan")], str(tmp_path / "classifier")
    judged = ["--data", str(tmp_path / "val.lmdb"), "--classifier", judge, "--n", "8"]
    judged += ["--extractor", "pixels,classifier"]
    capsys.readouterr()
    assert run_cli(evaluate.main, [*gan, *judged, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert all(np.isfinite(row["frechet"]) for row in document["distances"])
    assert document["size"] == "24x16"
    assert run_cli(evaluate.main, ["--checkpoint", judge, "--data", str(tmp_path / "val.lmdb")]) == 0
    content = torch.load(tmp_path / "gan" / "checkpoints" / "step-00000004.pt", weights_only=True)
    assert content["shape"]["resolution"] == SPEC.resolution
    for command in ("grid", "truncation", "mix"):
        out = tmp_path / f"{command}.png"
        assert run_cli(generate.main, [command, *gan, "--out", str(out), "--classes", "a"]) == 0
        assert out.is_file()
    assert run_cli(generate.main, ["grid", *gan, "--out", str(tmp_path / "one"), "--n", "4"]) == 0
    assert len(list((tmp_path / "one").iterdir())) == 4
    film = ["interpolate", *gan, "--out", str(tmp_path / "x.gif"), "--frames", "2", "--n", "2"]
    assert run_cli(generate.main, film) == 0
    assert run_cli(generate.main, ["dataset", *gan, "--out", str(tmp_path / "drawn.lmdb"), "--n", "6"]) == 0
    with Dataset(tmp_path / "drawn.lmdb") as drawn:
        assert drawn.spec == SPEC
        samples = duetgan.load_generator(tmp_path / "gan", device="cpu").sample(6).images
        difference = torch.from_numpy(drawn.read(range(6))[0]).double() - samples.double()
        assert difference.abs().max() <= 1
    for task in ("gan", "classifier"):
        hub = ["--checkpoint", str(tmp_path / task), "--format", "folder", "--out", str(tmp_path / f"{task}-hub")]
        hub += ["--n", "8"]
        assert run_cli(export.main, hub) == 2
    sample = next((tmp_path / "one").iterdir())
    with Image.open(sample) as image:
        assert image.size == (24, 16)
    named = ["--checkpoint", judge, str(sample), "--json", "--gradcam", str(tmp_path / "maps")]
    assert run_cli(predict.main, named) == 0
