"""StyleGAN2 for NVIDIA's program: there and back, to the bit."""

import json
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn

from duetgan.commands import export as script
from duetgan.extras.official.convert import main as convert
from duetgan.extras.official.convert import read
from duetgan.inference.export.formats import FORMATS
from duetgan.inference.export.subject import generator_subject
from duetgan.models.stylegan2 import Discriminator, DiscriminatorConfig, Generator, GeneratorConfig
from duetgan.utils.checkpoint import load, resolve
from duetgan.utils.distributed.process import run_cli
from duetgan.utils.errors import UserError
from duetgan.utils.seeding import forked
from tests.conftest import assert_raises
from tests.extras.official import layouts
from tests.metrics.conftest import make_run

SIZES = {"channel_base": 64, "channel_max": 8}
STYLES = {"z_dim": 6, "w_dim": 6, "mapping_layers": 2}


def ours(folder, *, classes=3, side=16, discriminator=None, generator=None, **more):
    """A run of three networks with random weights of their own in every tensor, buffers included."""
    sections = {
        "generator": {**SIZES, **STYLES, **(generator or {})},
        "discriminator": {**SIZES, **(discriminator or {})},
    }
    shape = {"resolution": side, "channels": 3, "classes": classes}
    with forked(0, "init", "ours"):
        state = {
            "generator": Generator(GeneratorConfig(**sections["generator"]), **shape).state_dict(),
            "generator_ema": Generator(GeneratorConfig(**sections["generator"]), **shape).state_dict(),
            "discriminator": Discriminator(DiscriminatorConfig(**sections["discriminator"]), **shape).state_dict(),
        }
        state = {part: {name: torch.randn_like(x) for name, x in held.items()} for part, held in state.items()}
    state["generator"]["w_avg"] = state["generator_ema"]["w_avg"]  # as in training
    names = [str(n) for n in range(classes)]
    return make_run(folder, task="gan", config=sections, shape=shape, state=state, classes=names, **more)


def exported(run, folder):
    path = folder / "network.safetensors"
    FORMATS["nvidia"].write(generator_subject(load(resolve(run)), batch_size=4, psi=1.0, mean="class"), path)
    return path


def assert_same(found, expected):
    assert found.keys() == expected.keys()
    for name, x in expected.items():
        assert found[name].equal(x), name


@pytest.mark.parametrize("form_of_d", [{}, {"architecture": "plain", "minibatch_std_group": 1, "mapping_layers": 2}])
def test_ours_comes_back_to_the_bit(tmp_path, form_of_d):
    run = ours(tmp_path / "run", discriminator=form_of_d)
    found, expected = read(exported(run, tmp_path)), load(resolve(run))
    assert found.state.keys() == expected["state"].keys()
    for part, state in found.state.items():
        assert_same(state, expected["state"][part])
    assert found.shape == expected["shape"]
    assert found.generator.items() >= {**SIZES, **STYLES}.items()
    if form_of_d:
        assert found.discriminator.items() >= form_of_d.items()


def test_nvidias_comes_back_to_the_bit(tmp_path):
    arguments = {**layouts.D_ARGUMENTS, "mapping_kwargs": {"num_layers": 2}}
    average, discriminator = layouts.write_nvidia(tmp_path / "network.pkl", d=arguments)
    assert convert([str(tmp_path / "network.pkl"), str(tmp_path / "run")]) == 0
    path = exported(tmp_path / "run", tmp_path)
    networks = {"G": layouts.nvidia_generator(), "G_ema": average, "D": discriminator}
    assert_same(load_file(path), {f"{part}.{name}": x for part, held in networks.items() for name, x in held.items()})
    with safe_open(str(path), "pt") as file:
        told = json.loads(file.metadata()["nvidia"])
    assert told["G"]["synthesis_kwargs"] == layouts.G_ARGUMENTS["synthesis_kwargs"]
    assert told["D"]["epilogue_kwargs"] == {"mbstd_group_size": 2, "mbstd_num_channels": 1}
    before, after = read(tmp_path / "network.pkl"), read(path)
    assert (before.generator, before.discriminator, before.shape) == (after.generator, after.discriminator, after.shape)


def test_the_state_dicts_are_as_long_as_nvidias(tmp_path):
    """Counted in a file that their program wrote, at 32 px with two mapping layers: G 77, D (8 layers) 55."""
    path = exported(ours(tmp_path / "run", side=32, discriminator={"mapping_layers": 8}), tmp_path)
    names = [name.partition(".")[0] for name in load_file(path)]
    assert [names.count(part) for part in ("G", "D", "G_ema")] == [77, 55, 77]


def test_export_checks_what_it_wrote(tmp_path, capsys):
    run = ours(tmp_path / "run", classes=0)
    out = tmp_path / "network.safetensors"
    command = ["--checkpoint", str(run), "--format", "nvidia", "--out", str(out)]
    assert script.main([*command, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["passed"], told["rows"][-1]["largest_difference"]) == (True, 0)
    assert convert([str(out), str(tmp_path / "back")]) == 0
    assert "generator_ema" in load(resolve(tmp_path / "back"))["state"]
    command[command.index(str(out))] = str(tmp_path / "network.bin")  # `convert` would take it for another's
    assert run_cli(script.main, command) == 2
    assert "must end in .safetensors" in capsys.readouterr().err


def test_heads_of_the_discriminator_that_they_lack_are_left_out_and_told_of(tmp_path, capsys):
    checkpoint = load(resolve(ours(tmp_path / "run")))
    checkpoint["state"]["discriminator"]["auxiliary.weight"] = torch.zeros(3, 8)
    FORMATS["nvidia"].write(
        generator_subject(checkpoint, batch_size=4, psi=1.0, mean="class"), tmp_path / "x.safetensors"
    )
    assert "without the discriminator's auxiliary, which" in capsys.readouterr().err
    assert "discriminator" in read(tmp_path / "x.safetensors").state


def test_weights_alone_are_a_generator_alone(tmp_path):
    run = ours(tmp_path / "run")
    FORMATS["safetensors"].write(
        generator_subject(load(resolve(run)), batch_size=4, psi=1.0, mean="class"), tmp_path / "w.safetensors"
    )
    command = ["--checkpoint", str(tmp_path / "w.safetensors"), "--format", "nvidia"]
    assert script.main([*command, "--out", str(tmp_path / "n.safetensors")]) == 0
    assert list(read(tmp_path / "n.safetensors").state) == ["generator_ema"]


def test_the_pages_loader_builds_nvidias_classes(tmp_path, monkeypatch):
    """The lines of docs/extras/official.md, with classes that have the parameters of NVIDIA's and load strictly."""
    exported(ours(tmp_path / "run", generator={"clamp_always": True}), tmp_path)
    monkeypatch.chdir(tmp_path)
    built: list[dict[str, Any]] = []

    class Network(nn.Module):
        def __init__(self, **given):
            super().__init__()
            built.append(given)
            self.held: dict[str, torch.Tensor] = {}

        def load_state_dict(self, state: Any, *_: Any) -> None:
            self.held = state

    generator, discriminator = type("Generator", (Network,), {}), type("Discriminator", (Network,), {})
    page = (Path(__file__).parents[3] / "docs" / "extras" / "official.md").read_text()
    lines = page.split("```python\n")[1].split("```")[0]
    with layouts.programs(training__networks__Generator=generator, training__networks__Discriminator=discriminator):
        exec(lines, {})
        with open("network.pkl", "rb") as file:
            made = pickle.load(file)
    tensors = load_file("network.safetensors")
    ema = {name.removeprefix("G_ema."): x for name, x in tensors.items() if name.startswith("G_ema.")}
    assert_same(made["G_ema"].held, ema)
    assert built[0]["synthesis_kwargs"] == {**SIZES, "num_fp16_res": 4, "conv_clamp": 256.0}
    assert set(made) == {"G", "D", "G_ema", "training_set_kwargs", "augment_pipe"}


def test_what_they_cannot_be_is_refused_with_the_remedy(runs, tmp_path, refused):
    narrow = ours(tmp_path / "narrow", generator={"channel_base": 8})
    one = ours(tmp_path / "one", generator={"channel_base": 16}, discriminator={"channel_base": 16})
    exported(one, tmp_path)
    wide = ours(tmp_path / "wide", side="24x16")
    for run, told in (
        (runs["dcgan"], "the checkpoint has dcgan; choose safetensors"),
        (runs["classifier"], "is for checkpoints of task gan, this one is of classifier; choose"),
        (wide, "this format is for squares, the checkpoint draws 24x16 px"),
        (ours(tmp_path / "growing", stage=[8, 0.5]), "this one still grows; train it on"),
        (narrow, "channel_base 8 leaves NVIDIA's generator no channels"),
    ):
        out = tmp_path / "x.safetensors"
        assert told in refused(script.main, "--checkpoint", str(run), "--format", "nvidia", "--out", str(out))
        assert not out.exists()


@pytest.mark.parametrize(
    ("metadata", "told"),
    [
        (None, "it holds no networks in NVIDIA's names"),
        ({"nvidia": "[]"}, "it holds no networks"),
        ({"nvidia": '{"G": 3}'}, "are no dictionary"),
        ({"nvidia": "[" * 10**5}, "cannot be read"),
        ({"nvidia": '{"G": {"img_resolution": 16, "magic": 1}}'}, "which Duet does not know"),
        ({"nvidia": '{"G": {"img_resolution": 16}}'}, "G_ema has no synthesis.b4.const"),
    ],
)
def test_a_file_of_something_else_is_refused(tmp_path, metadata, told):
    path = tmp_path / "x.safetensors"
    save_file({"G_ema.a": torch.zeros(1)}, str(path), metadata)
    assert_raises(UserError, told, convert, [str(path), str(tmp_path / "run")])
    path.write_bytes(path.read_bytes()[:-3])
    assert_raises(UserError, "cannot be read", convert, [str(path), str(tmp_path / "run")])
