"""Every option of every command, away from its default, changes the parts of the outcome that table.txt says."""

import argparse
import hashlib
import importlib
import json
import re
import shlex
import shutil
from collections.abc import Iterator
from contextlib import nullcontext
from fnmatch import fnmatchcase
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import nn

from duetgan.commands import COMMANDS
from duetgan.utils.config.build import to_tree
from duetgan.utils.config.cli import Parser
from duetgan.utils.distributed import collectives
from duetgan.utils.distributed.launch import VISIBLE
from duetgan.utils.distributed.process import run_cli
from tests.commands.test_quickstart import Commands
from tests.conftest import REPOSITORY
from tests.mutation.recording import product_files
from tests.slim import make

TABLES = [Path(__file__).with_name("table.txt"), *sorted((REPOSITORY / "tests/extras").glob("*/options.txt"))]
GENERAL = {
    "help",
    "version",
    "debug",
}  # of every parser: tests/utils/config/test_cli.py, tests/utils/distributed/test_process.py
INTERNAL = {  # programs that others of ours call, and where their options are tested
    "quickstart-plan": "tests/commands/test_measure.py",
    "track": "tests/extras/trackers/test_trackers.py",
}
ELSEWHERE = {  # options of the table's commands that other files test
    "export.py": {"truncation_psi", "truncation_mean"},  # tests/inference/test_export_formats.py
    "quickstart.py": {  # tests/commands/test_survey.py
        *("path_column", "label_column", "label_separator", "split_column", "root", "suffix"),
        *("group_column", "group_from"),  # tests/data/packing/test_groups.py
    },
}
Outcome = dict[str, Any]


def rows() -> Iterator[tuple[str, str, str, list[str]]]:
    """Of each line of the table: command, base arguments, changed argument, changed parts of the outcome."""
    for line in [line for table in TABLES for line in table.read_text().splitlines()]:
        if line.startswith("["):
            command, _, base = line[1:].partition("]")
        elif line and not line.startswith("#"):
            argument, _, parts = re.sub(r" :$", " : ", line.strip()).partition(" : ")
            yield command, base.strip(), argument, parts.split()


def changed(base: str, argument: str) -> str:
    """The base arguments with another one; `NAME OLD=NEW` replaces a positional one."""
    if argument.startswith("-"):
        return f"{base} {argument}"
    before, _, after = argument.partition(" ")[2].partition("=")
    return base.replace(before, after, 1)


def module_of(command: str) -> Any:
    return importlib.import_module(COMMANDS[command.split()[0].removesuffix(".py")][0])


def document_parts(document: Any, name: str) -> Outcome:
    """The values of a JSON document by key; of a list of objects the columns."""
    if isinstance(document, list) and document:
        document = {key: [row.get(key) for row in document] for key in {key for row in document for key in row}}
    if not isinstance(document, dict):
        return {name: document}
    return {f"{name}{key}": value for key, value in document.items() if not key.endswith("_interval")}


def file_parts(folder: Path) -> Outcome:
    parts: Outcome = {}
    for path in sorted(folder.rglob("*")):
        name = str(path.relative_to(folder))
        if path.suffix == ".json":
            parts |= document_parts(json.loads(path.read_bytes()), f"{name.removesuffix('.json')}:")
        elif path.suffix in (".txt", ""):
            parts |= {name: path.read_text()} if path.is_file() else {}
        elif path.suffix == ".safetensors":
            with safe_open(path, "pt") as file:  # the order of metadata is not fixed
                names = file.keys()
                content = {name: file.get_tensor(name).tolist() for name in names}, file.metadata()
            parts[name] = content
        else:
            parts[name] = hashlib.sha256(path.read_bytes()).hexdigest()
    return parts


def wide(name: str, **options: Any) -> Any:
    """A slim backbone; of ResNet-50 with as many features as that has."""
    network: Any = make(name, **options)
    if name == "resnet50":
        network.avgpool = nn.Sequential(network.avgpool, Repeated())
    return network


class Repeated(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.repeat(1, 2048 // x.shape[1], 1, 1)


class Stubs:
    """Replace what takes long or leaves this process, by what notes its arguments in the folder of the outcome."""

    def __init__(
        self, patch: pytest.MonkeyPatch, out: Path, command: str, arguments: str, world: dict[str, Path]
    ) -> None:
        self.out = out
        for name in ("DUET_WEIGHTS", "CUDA_DEVICE_ORDER", *VISIBLE):
            patch.setenv(name, "")  # put back afterwards: train.py sets some
            patch.delenv(name)
        places = (world["resnet50"],) if "resnet50" in arguments else ()
        patch.setattr("duetgan.metrics.features.extractors.PLACES", places)
        patch.setattr("duetgan.metrics.images.save_figure", lambda figure, path: Path(path).write_bytes(b""))
        patch.setattr("duetgan.utils.config.plugins.load", lambda names=(): self.note("imported", *names))
        patch.setattr("duetgan.utils.distributed.launch.launch", self.launch)
        patch.setattr("duetgan.models.backbones.base.make", wide)

        patch.setattr("duetgan.training.engine.run._find_rate", self.find_rate)
        if command == "study":
            patch.setattr("duetgan.extras.studies.runner.Study.run", lambda study: self.study(study))
        if command == "quickstart.py":
            self.commands = Commands()
            patch.setattr("duetgan.commands.planning.steps.call", self.call)
        if command == "explore":
            patch.setattr("waitress.server.create_server", self.server)
            patch.setattr("secrets.token_urlsafe", lambda _: "token")
            patch.setattr("signal.signal", lambda *_: None)
            patch.setattr("duetgan.extras.explorer.command.leave_threads", lambda: None)

    def call(self, command: list[str]) -> int:
        with open(self.out / "commands.txt", "a") as file:
            print(*command, file=file)
        return self.commands(command)

    def find_rate(self, loop: Any, sweep: Any) -> int:
        self.note("searched", sweep.steps, sweep.first, sweep.last)
        return 0

    def study(self, study: Any) -> dict[str, Any]:
        """Its subject, device and resolved recipe."""
        document = {"words": ["done"], "arms": [], "subject": study.name, "device": study.subject.device}
        config = to_tree(study.subject.config)
        (self.out / "study.json").write_text(json.dumps(document | config | {"folder": str(study.folder)}))
        return document

    def server(self, app: Any, *, sockets: Any, **options: Any) -> Any:
        shown = [(run.name, run.checkpoint["step"]) for run in app.runs]
        self.note("served", shown, sockets[0].getsockname()[0])
        return SimpleNamespace(run=lambda: None)

    def note(self, name: str, *values: Any) -> dict[str, str]:
        if values:
            (self.out / name).write_text(",".join(map(str, values)))
        return {}

    def launch(self, words: list[str], count: int, *, resumes: bool) -> int:
        import os

        self.note("launched", count, os.environ.get("CUDA_VISIBLE_DEVICES", ""))
        return 0


@pytest.fixture(scope="module")
def outcome(world, tmp_path_factory, slim_module):
    """What a command leaves: exit code, largest batch of a network, printed text or document, files."""
    out = tmp_path_factory.mktemp("outcome")

    def run(command: str, arguments: str, capsys: pytest.CaptureFixture[str]) -> Outcome:
        shutil.rmtree(out)
        out.mkdir()
        shutil.copy(world["few"], out / "old.lmdb")
        calls, gathered, gather = 0, 0, collectives.gather_to_main

        def count(work: Any) -> Any:
            nonlocal gathered
            gathered += 1
            return gather(work)

        def watch(module: Any, inputs: Any) -> None:
            nonlocal calls
            calls += 1

        words = [*command.split()[1:], *shlex.split(arguments.format(out=out, **world))]
        capsys.readouterr()
        follow = nn.modules.module.register_module_forward_pre_hook
        hook = nullcontext() if command == "export.py" else follow(watch)  # programs are made without hooks
        with hook, pytest.MonkeyPatch.context() as patch:
            patch.setattr(collectives, "gather_to_main", count)
            Stubs(patch, out, command, arguments, world)
            code = run_cli(module_of(command).main, words)
        text, errors = capsys.readouterr()
        try:
            parts = document_parts(json.loads(text), "")
        except ValueError:
            parts = {"text": re.sub(r"[\d.,e+]+(?= ?(s|ms|min|MiB|images/s)\b)", "#", text)}
        parts |= {
            "code": code,
            "error": errors.splitlines()[-1] if code else "",
            "calls": calls,
            "gathered": gathered,
            **file_parts(out),
        }
        return {name: part for name, part in parts.items() if name != "command.txt"}  # the arguments themselves

    return run


def wrong(base: Outcome, found: Outcome, parts: list[str]) -> str:
    """How the difference of two outcomes departs from a row; empty: it does not.

    A row names parts that must change, `-NAME` ones that must be missing, NAME=VALUE the value it must have; no further
    part changes, unless the row begins with `+`. `=`: nothing changes.
    """
    differing = {name for name in base.keys() | found.keys() if base.get(name) != found.get(name)}
    if found["code"] != base["code"]:
        differing = {"code"}
    exact = parts[:1] != ["+"]
    for part in parts if exact else parts[1:]:
        name, _, value = part.partition("=")
        if part == "=":
            continue
        matching = {each for each in differing if fnmatchcase(each, name.removeprefix("-"))}
        if not matching or (name.startswith("-") and matching & found.keys()):
            return f"{part} is as without the option"
        if value and str(found[name]).replace(" ", "") != value:
            return f"{name} is {found[name]}"
        differing -= matching
    return f"{sorted(differing)} changed, too" if exact and differing else ""


@pytest.mark.parametrize("command", dict.fromkeys(row[0] for row in rows()))
def test_each_option_changes_its_parts(command, outcome, capsys):
    bases: dict[str, Outcome] = {}
    faults = []
    for _, base, argument, parts in (row for row in rows() if row[0] == command):
        if base not in bases:
            bases[base] = outcome(command, base, capsys)
        if why := wrong(bases[base], outcome(command, changed(base, argument), capsys), parts):
            faults.append(f"{base} | {argument}: {why}")
    assert not faults, "\n".join(faults)


class Built(Exception):
    """A parser is complete."""


def parsers() -> Iterator[Parser]:
    """The parser of each program, and of each of its subcommands."""

    def stop(self: Parser, *_: Any) -> None:
        raise Built(self)

    for file in product_files(REPOSITORY):
        for prog in re.findall(r"Parser\(\s*prog=\"([^\"]+)\"", (REPOSITORY / file).read_text()):
            name = prog.removeprefix("duet ")
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(Parser, "parse_args", stop)
                patch.setattr(Parser, "parse_known", stop)
                with pytest.raises(Built) as built:
                    module_of(name).main(name.split()[1:])
            parser = built.value.args[0]
            commands = [each.choices for each in parser._actions if isinstance(each, argparse._SubParsersAction)]
            yield from commands[0].values() if commands else [parser]


def test_every_option_is_in_the_table():
    known: dict[str, set[str]] = {}
    for command, _, argument, _ in rows():
        known.setdefault(command, set()).add(argument.split()[0].lstrip("-").replace("-", "_"))
    there: dict[str, set[str]] = {}
    for parser in parsers():
        actions = [each for each in parser._actions if each.dest not in GENERAL]
        names = {(each.option_strings or [each.dest])[0].lstrip("-") for each in actions}
        program = parser.prog.removeprefix("duet ")
        there[program] = names - ELSEWHERE.get(program, set())
    for name in INTERNAL:
        del there[name]
    assert known == there
