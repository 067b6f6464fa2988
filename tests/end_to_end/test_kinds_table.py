"""docs/your-data.md says which kinds of images each part takes: each cell is tried, and a refusal is one line."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from duetgan.commands import evaluate, export, generate
from duetgan.data.lmdb.record import Layout
from duetgan.data.lmdb.writer import LMDBWriter
from duetgan.data.packing.records import add_image
from duetgan.extras.explorer import models as explorer
from duetgan.extras.studies.images import StudyData, make_parts
from duetgan.models.classifier import Classifier, ModelConfig
from duetgan.models.registry import architecture_of
from duetgan.utils.distributed.process import run_cli
from duetgan.utils.errors import UserError
from duetgan.utils.image_spec import ImageSpec
from duetgan.utils.images import save_image
from tests.end_to_end.test_kinds import spec_of, stored
from tests.metrics.conftest import TINY, make_run

PAGE = Path(__file__).resolve().parents[2] / "docs" / "your-data.md"
CLASSES = ["a", "b", "c"]
SETS = [[0], [0, 1], [2]]
KINDS: dict[str, ImageSpec] = {  # column of the table -> images of that kind
    "rectangles": ImageSpec(3, 8, 16),
    "alpha": spec_of(4, alpha=True),
    "16 bits": spec_of(3, depth="uint16"),
    "other than 1 or 3 channels": spec_of(5),
    "several labels per image": spec_of(3),
}


def made(folder: Path, kind: str) -> Path:
    """Packed images, a generator's run with its discriminator, and a classifier's, untrained."""
    spec, several = KINDS[kind], kind == "several labels per image"
    data = {}
    for part, seed in (("path", 1), ("val_path", 2)):
        data[part] = str(folder / f"{part}.lmdb")
        more: dict[str, Any] = {"label_sets": SETS} if several else {}
        with LMDBWriter(data[part], Layout.of(spec), classes=CLASSES, source=part, **more) as writer:
            for number, image in enumerate(stored(spec, 70, seed).numpy()):
                add_image(writer, np.ascontiguousarray(image.transpose(1, 2, 0)), number % 3)
            writer.finish()
    shape: dict[str, Any] = {"channels": spec.channels, "classes": 3, "resolution": spec.resolution}
    shape |= {} if spec.pixel_format is None else {"pixel_format": spec.pixel_format}
    parts, sizes = architecture_of("stylegan2"), {"channel_base": 64, "channel_max": 8, "minibatch_std_group": 1}
    torch.manual_seed(0)
    state = {"generator_ema": parts.build("generator", TINY, **shape).state_dict()}
    state["discriminator"] = parts.build("discriminator", sizes, **shape).state_dict()
    config: dict[str, Any] = {"generator": TINY, "discriminator": sizes, "data": data}
    sets: dict[str, Any] = {"sets": SETS} if several else {}
    make_run(folder / "gan", task="gan", config=config, shape=shape, state=state, classes=CLASSES, **sets)
    model = {"stem": "small-stride2"}
    classifier = Classifier(ModelConfig(stem="small-stride2"), **shape)
    if several:
        classifier.add_thresholds()
    trained: dict[str, Any] = {"config": {"model": model, "data": data}, "shape": shape, "classes": CLASSES}
    make_run(folder / "classifier", task="classifier", state={"model_ema": classifier.state_dict()}, **trained)
    save_image(stored(spec, 1)[0].permute(1, 2, 0).numpy(), spec, folder / "x", {})
    return folder


def explored(folder: Path) -> None:
    (shown,) = explorer.open_runs([str(folder / "gan")], which="last", device=torch.device("cpu"))
    explorer.draw(shown, [explorer.Source(0, 1)])


def studied(folder: Path) -> None:
    make_parts(StudyData(path=str(folder / "path.lmdb"), test_path=str(folder / "val_path.lmdb")), folder)


Command = tuple[Any, list[str]]
ROWS: dict[str, Callable[[Path], Any] | Command] = {
    "`generate.py project`": (
        generate.main,
        ["project", "--checkpoint", "{0}/gan", "--image", "{0}/x.*", "--features", "pixels", "--steps", "2"],
    ),
    "`generate.py edit`": (
        generate.main,
        [
            *("edit", "--checkpoint", "{0}/gan", "--classifier", "{0}/classifier", "--from", "a", "--to", "b"),
            *("--samples", "2", "--n", "1"),
        ],
    ),
    "`export.py --format nvidia`": (export.main, ["--checkpoint", "{0}/gan", "--format", "nvidia"]),
    "`export.py --format folder`": (export.main, ["--checkpoint", "{0}/gan", "--format", "folder"]),
    "`evaluate.py --robustness`": (
        evaluate.main,
        ["--checkpoint", "{0}/classifier", "--robustness", "--data", "{0}/val_path.lmdb", "--n", "6"],
    ),
    "`evaluate.py --audit`": (
        evaluate.main,
        [
            *("--checkpoint", "{0}/gan", "--audit", "--data", "{0}/val_path.lmdb", "--n", "8"),
            *("--extractor", "pixels", "--searched", "40"),
        ],
    ),
    "`duet explore`": explored,
    "studies": studied,
}
REFUSED = re.compile("is for 8-bit (grey or RGB|images)|several labels|one label|for squares")
OUT = {"project": "p.png", "edit": "e.png", "nvidia": "w.safetensors"}


def refusals() -> dict[str, set[str]]:
    """Kind of images -> what does not take them, as the page says."""
    section = PAGE.read_text().split("## Other kinds of images\n")[1].split("\n## ")[0]
    lines = [line.split("|")[1:-1] for line in section.splitlines() if line.startswith("|")]
    rows = [[{cell.strip() for cell in cells.split(",")} for cells in line] for line in lines[2:]]
    return {kind: parts for kinds, parts in rows for kind in kinds}


def test_the_table_has_these_kinds_and_parts():
    assert set(refusals()) - {"floats"} == set(KINDS)  # floats are as 16 bits
    assert set.union(*refusals().values()) == set(ROWS)


@pytest.mark.usefixtures("slim")
@pytest.mark.parametrize("kind", [pytest.param(k, marks=pytest.mark.slow) if k == "rectangles" else k for k in KINDS])
def test_each_cell(kind, tmp_path, capsys):
    folder = made(tmp_path, kind)
    for name, action in ROWS.items():
        works = name not in refusals()[kind]
        capsys.readouterr()
        if callable(action):
            try:
                action(folder)
                told, code = "", 0
            except UserError as error:
                told, code = f"error: {error}", 2
        else:
            main, options = action
            out = next((file for word, file in OUT.items() if word in name), "out")
            code = run_cli(
                main,
                [str(next(folder.glob("x.*"))) if "x.*" in option else option.format(folder) for option in options]
                + ["--out", str(folder / out)],
            )
            told = capsys.readouterr().err
        errors = [line for line in told.splitlines() if line.startswith("error")]
        refused = [line for line in errors if REFUSED.search(line)]
        assert bool(refused) != works, (name, kind, told)
        # an untrained classifier may name no sample as is wanted: then the edit got that far
        assert (code, errors) in ((0, []), (2, refused)) or "the classifier predicts only" in errors[0], (
            name,
            kind,
            told,
        )
