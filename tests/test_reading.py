"""docs/reading.md keeps its promises: files, their number and length, the direction of imports, and the names in it."""

import ast
import re

from tests.conftest import REPOSITORY

PAGE = (REPOSITORY / "docs" / "reading.md").read_text()
STOP = re.compile(r"^\*\*(\d+)\. `([\w/]+\.py)`\.\*\*(.*?)(?=^\*\*\d|^## |\Z)", re.MULTILINE | re.DOTALL)
STOPS = [(int(number), path, text) for number, path, text in STOP.findall(PAGE)]
FILES = [path for _, path, _ in STOPS]


def imported(path: str) -> set[str]:
    """The modules that a file imports, anywhere in it; a name imported from a package counts as its module, too."""
    modules: set[str] = set()
    for node in ast.walk(ast.parse((REPOSITORY / path).read_text())):
        if isinstance(node, ast.Import):
            modules |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            modules |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return {module.removeprefix("duetgan.") for module in modules}


def test_the_walk_is_of_at_most_16_files_and_3000_lines_and_all_files_exist() -> None:
    assert [number for number, *_ in STOPS] == list(range(1, len(STOPS) + 1))
    assert 12 <= len(STOPS) <= 16
    assert len(set(FILES)) == len(FILES)
    assert sum(len((REPOSITORY / path).read_text().splitlines()) for path in FILES) <= 3000
    for path in re.findall(r"`([\w/]+\.py)`", PAGE):
        assert (REPOSITORY / path).is_file(), path


def test_no_file_imports_one_that_comes_later_and_names_are_in_their_files() -> None:
    modules = [path.removesuffix(".py").replace("/", ".") for path in FILES]
    back = [
        (path, later) for place, path in enumerate(FILES) for later in modules[place + 1 :] if later in imported(path)
    ]
    assert back == []
    # the check sees imports: each of these files stands on files before it
    assert "data.reading.sampler" in imported("data/reading/loader.py")
    for _, path, text in STOPS:
        source = (REPOSITORY / path).read_text()
        names = [name for name in re.findall(r"`([^`]+)`", text) if not name.endswith(".py")]
        assert names, path
        missing = [name for name in names if not re.search(rf"\b{re.escape(name)}\b", source)]
        assert missing == [], f"{path}: {missing}"
