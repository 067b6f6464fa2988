"""README and docs: every page renders, its links and paths lead somewhere, and the commands it shows exist."""

import argparse
import functools
import importlib
import re
import runpy
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from markdown_it import MarkdownIt
from markdown_it.token import Token
from torch.distributed.run import get_args_parser

from duetgan.commands import COMMANDS
from duetgan.models.registry import ARCHITECTURES
from duetgan.training.engine.tasks import TASKS
from duetgan.utils.config.cli import normalise
from duetgan.utils.config.model import keys_of
from tests.test_project import LINKS, project_files

ROOT = Path(__file__).resolve().parent.parent
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"), *(ROOT / "docs" / "extras").glob("*.md")])
MEASUREMENTS = sorted((ROOT / "docs" / "measurements").glob("*.md"))  # the lab book: commands of their day
CONFIGS = {TASKS["classifier"].config(), *(TASKS["gan"].config(name) for name in ARCHITECTURES)}
KEYS = {key for config in CONFIGS for key in keys_of(config)}
TASKLESS = runpy.run_path(str(ROOT / "docs" / "keys.py"))["TASKLESS"]
STUDY_KEYS = {key for config in TASKLESS.values() for key in keys_of(config)}
OVERRIDDEN = {"train": KEYS, "study": STUDY_KEYS}  # scripts whose options are config keys too
OPTION = re.compile(r"(?<![\w-])--[a-z][\w.-]*")
PATH = re.compile(r"[\w.-]+(?:/[\w.-]+)*/(?:[\w-]+\.(?:py|md|yaml|sh))?")
SCRIPTS = [*COMMANDS, "benchmarks.scaling"]
FOREIGN = {"--shm-size", "--init", "--user", "--time", "--signal", "--build-arg"}  # of docker and SLURM
FOREIGN |= {"--resume"}  # which docs say does not exist
TEXTS = [path for path in project_files() if path.suffix in {".py", ".md", ".yaml", ".sh"}]
FOLDERS = {path.parent.name for path in TEXTS if path.parent.parent == ROOT}.union(LINKS)


@functools.cache
def tokens(page: Path) -> list[Token]:
    return MarkdownIt("commonmark").enable("table").parse(page.read_text())


def lines_of(block: Token) -> range:
    """The lines of a file that a block takes, from 0."""
    return range(*block.map) if block.map else range(0)


def inline(page: Path) -> Iterator[tuple[Token, int]]:
    """Every token of a line of text, and the line in the file where its paragraph begins."""
    for block in tokens(page):
        for token in block.children or []:
            yield token, lines_of(block).start + 1


def test_pages_use_the_terms_of_the_glossary():
    """The synonyms that its last column names are found in no text, code aside."""
    lines = (ROOT / "docs" / "glossary.md").read_text().splitlines()
    rows = [line.split("|")[3] for line in lines if line[:1] == "|"]
    synonyms = [word.strip() for row in rows[2:] for word in row.split(",") if word.strip()]
    assert len(synonyms) > 10
    pattern = re.compile(rf"\b({'|'.join(synonyms)})s?\b", re.IGNORECASE)
    pages = [ROOT / "README.md", *(ROOT / "docs").glob("*.md"), *(ROOT / "docs" / "extras").glob("*.md")]
    wrong = []
    for page in pages:
        if page.name != "glossary.md":
            texts = [(token.content, line) for token, line in inline(page) if token.type == "text"]
            wrong += [f"{page.name}, {line}: {match[0]}" for text, line in texts for match in pattern.finditer(text)]
    assert wrong == []


def test_each_technique_has_its_file_key_and_test():
    text = (ROOT / "docs" / "reading.md").read_text().partition("## Techniques")[2].partition("\n## ")[0]
    rows = [[cell.strip(" `") for cell in line.split("|")[1:-1]] for line in text.splitlines() if line[:1] == "|"][2:]
    assert len(rows) > 15
    options = option_names(parser_of("train"))
    for _, file, key, test in rows:
        assert (ROOT / file).is_file(), file
        assert "def test_" in (ROOT / test).read_text(), test
        assert key == "-" or normalise([key])[0] in options or any(f".{name}".endswith(f".{key}") for name in KEYS), key


def slugs(page: Path) -> set[str]:
    """The anchors that GitHub gives a page's headings."""
    blocks = tokens(page)
    headings = [blocks[place + 1].content for place, block in enumerate(blocks) if block.type == "heading_open"]
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


def fenced(page: Path) -> list[str]:
    """The lines of a page's fences, continued ones joined."""
    fences = [block.content.replace("\\\n", " ") for block in tokens(page) if block.type == "fence"]
    return [line for fence in fences for line in fence.splitlines()]


def code(page: Path) -> list[str]:
    """All code of a page: the lines of fences, and code within text."""
    return fenced(page) + [token.content for token, _ in inline(page) if token.type == "code_inline"]


@pytest.fixture(params=[*PAGES, *MEASUREMENTS], ids=lambda page: page.stem)
def page(request):
    return request.param


@pytest.fixture(params=[page for page in PAGES if page.stem != "CHANGELOG"], ids=lambda page: page.stem)
def current(request):
    """A page about today; the changelog also has names that are gone."""
    return request.param


def test_links_and_images_lead_somewhere(page):
    for token, line in inline(page):
        target = token.attrGet("src" if token.type == "image" else "href")
        if target is None or "://" in str(target) or str(target).startswith("mailto:"):
            continue
        path, _, anchor = str(target).partition("#")
        file = page.parent / path if path else page
        assert file.exists(), f"line {line}: {target}"
        assert not anchor or anchor in slugs(file), f"line {line}: no heading for {target}"


def test_paths_and_names_in_code_exist(current):
    """`path.py: name`, and tests as the pitfalls name theirs, `tests/folder/test_file.py::test_name`."""
    paths = [path for text in code(current) for path in PATH.findall(text) if path.partition("/")[0] in FOLDERS]
    assert [path for path in paths if not (ROOT / path).exists()] == []
    named = [re.fullmatch(r"([\w/]+\.py)(: |::)(\w+)", text) for text in code(current)]
    found = [(each[0], (ROOT / each[1]).read_text(), "def " * (each[2] == "::") + each[3]) for each in named if each]
    assert [text for text, source, name in found if name not in source] == []


def test_commands_take_their_options(current):
    for module, rest in commands(code(current)):
        keys = {f"--{key}" for key in OVERRIDDEN[module]} | {"--section.key"} if module in OVERRIDDEN else set()
        known = option_names(parser_of(module)) | keys
        unknown = [name for name in OPTION.findall(rest) if normalise([name])[0] not in known]
        assert unknown == [], f"{module}: {rest}"


class Reached(Exception):
    """A script has come to the parsing of its options."""

    def __init__(self, parser: argparse.ArgumentParser) -> None:
        self.parser = parser


@functools.cache
def main_of(name: str) -> Callable[[list[str]], int | None]:
    """Return the `main` of a command, by its name, or of another script, by its module."""
    return importlib.import_module(COMMANDS[name][0] if name in COMMANDS else name).main


def parser_of(name: str) -> argparse.ArgumentParser:
    """Return the parser that a command or script reads its options with."""
    patch = pytest.MonkeyPatch()

    def reached(parser, *_args, **_kwargs):
        raise Reached(parser)

    patch.setattr(argparse.ArgumentParser, "parse_known_args", reached)
    try:
        main_of(name)([])
    except Reached as found:
        return found.parser
    finally:
        patch.undo()
    raise AssertionError(f"{name} reads no options")


def commands(lines: list[str]) -> Iterator[tuple[str, str]]:
    """Yield the name and the options of every `python X.py`, `torchrun X.py`, `duet X` (also in the container) and
    `slurm.sh`.
    """
    pattern = re.compile(r"\b(?:python|torchrun)\b.*?(?:-m\s+data\.(\w+)|\b([\w/]+)\.py(?=\s|$))(.*)")
    for part in [part for line in lines for part in line.split("&&")]:
        if found := pattern.search(part):
            module, script, rest = found.groups()
            yield module or script.replace("/", "."), rest
        elif found := re.search(r"(?:^|\s)duet +([a-z][a-z-]+)(.*)", part):
            yield found[1], found[2]
        elif found := re.search(r"\bcluster/slurm\.sh(.*)", part):
            yield "train", found[1]


def option_names(parser: argparse.ArgumentParser) -> set[str]:
    """All options of a parser and of its commands, with underscores."""
    names = set(parser._option_string_actions)
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            names = names.union(*(option_names(command) for command in action.choices.values()))
    return names


def test_options_in_text_exist(current):
    """`--name` alone in code: some script's option, a key, or an option of torchrun, docker or SLURM."""
    known = {f"--{key}" for key in KEYS | STUDY_KEYS}.union(*(option_names(parser_of(script)) for script in SCRIPTS))
    known |= set(normalise(sorted(option_names(get_args_parser()) | FOREIGN)))
    for token, line in inline(current):
        if token.type == "code_inline" and token.content.startswith("--"):
            name = OPTION.match(token.content)
            assert name, f"line {line}: {token.content}"
            assert normalise([name[0]])[0] in known, f"line {line}: {token.content}"


def test_keys_in_text_exist(current):
    sections = {key.partition(".")[0] for key in KEYS if "." in key}
    for token, line in inline(current):
        found = re.fullmatch(r"([a-z_]+(?:\.[a-z_0-9]+)+)(:? .*)?", token.content)
        if token.type == "code_inline" and found and found[1].partition(".")[0] in sections and found[1][-3:] != ".py":
            module = ROOT / (found[1].replace(".", "/") + ".py")
            assert found[1] in KEYS | STUDY_KEYS or module.exists(), f"line {line}: {token.content}"
