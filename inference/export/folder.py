"""A model folder to hand on: the weights, programs that take them, a page of Python that needs torch and safetensors
alone, config.json and a model card. Nothing in it names a place on this machine.
"""

import importlib.util
import inspect
import json
from pathlib import Path

from inference.export.card import described, readme
from inference.export.pages import classifier, generator
from inference.export.programs import noise_names, programs
from inference.export.subject import Drawing, Runner, Subject
from inference.export.weights_file import write_weights
from inference.samples import Sampler, draw_grid
from utils.runlog.run_log import say

PAGE = "duet_model.py"
GRID = 64  # samples; a quarter above 64 px


def write_folder(subject: Subject, path: Path) -> None:
    """Make the folder."""
    path.mkdir()
    write_weights(path / "model.safetensors", subject.checkpoint)
    (path / "model.safetensors").chmod(0o644)  # safetensors lets nobody else read it
    found = programs(subject)
    for name, program in found.items():
        program.write(path / f"{name}.pt2")
    more = {"programs": {name: program.stored for name, program in found.items()}} | _sizes(subject)
    config = described(subject.checkpoint, licence=subject.licence, more=more)
    if not config["figures"]:
        say("note: the card has no figures; evaluate.py --checkpoint RUN finds some, which the next export takes up")
    _write(path / "config.json", json.dumps(config, indent=1, allow_nan=False) + "\n")
    _write(path / PAGE, inspect.getsource(classifier if subject.is_classifier else generator))
    seed = None if subject.is_classifier else _draw_samples(subject, path / "samples.png")
    _write(path / "README.md", readme(subject.title, config, seed=seed))


def _sizes(subject: Subject) -> dict[str, object]:
    """What a generator's page must know."""
    if subject.is_classifier:
        return {}
    assert isinstance(subject.network, Drawing)
    network = subject.network.generator
    sizes = {"z_dim": network.z_dim, "noise": noise_names(subject)}
    return sizes | ({"num_ws": network.num_ws} if network.has_styles else {})


def _draw_samples(subject: Subject, path: Path) -> int:
    """A grid of samples, as `generate.py grid` draws them; returns its seed."""
    assert isinstance(subject.network, Drawing)
    network = subject.network.generator
    most = GRID if network.resolution <= 64 else GRID // 4
    shown = list(range(min(network.classes, most)))
    each = min(8, most // max(1, len(shown)))
    draw_grid(Sampler(generator=network, chosen=shown), path, count=each * len(shown) or most)
    return 0


def _write(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8")


def open_folder(_subject: Subject, path: Path) -> Runner:
    """The folder as its own page loads it."""
    spec = importlib.util.spec_from_file_location("duet_model_of_a_folder", path / PAGE)
    assert spec is not None
    assert spec.loader is not None
    page = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(page)
    model = page.load(path)
    return lambda inputs: model(*inputs)
