"""The documentation as a site: it builds without a warning, shows what GitHub shows, and needs no network."""

import ast
import re
import subprocess
import sys

import pytest
from markdown_it import MarkdownIt

from tests.conftest import REPOSITORY
from tests.test_project import modules_of, tree_of

DOCS = REPOSITORY / "docs"
PAGES = sorted(DOCS.rglob("*.md"))
BLOCKS = ("ul", "ol", "li", "table", "tr", "pre", "h2", "h3", "img", "strong", "em")


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)]
    ended = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    return folder


def counts(html: str) -> dict[str, int]:
    """Return how often each element occurs."""
    return {tag: len(re.findall(rf"<{tag}[ >]", html)) for tag in BLOCKS}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_page_has_the_lists_tables_and_fences_that_github_shows(site, page):
    html = MarkdownIt("commonmark").enable("table").render(page.read_text())
    shown = (site / page.relative_to(DOCS).with_suffix(".html")).read_text()
    assert counts(shown.partition("<article")[2].partition("</article>")[0]) == counts(html)


def test_nothing_is_fetched_and_images_are_small(site):
    for page in site.rglob("*.html"):
        tags = re.findall(r"<(?:script|img|iframe|source|link)\b[^>]*>", page.read_text())
        loads = [tag for tag in tags if not re.search(r'rel="?(canonical|next|prev)\b', tag)]
        assert [tag for tag in loads if re.search(r'(src|href)="?(https?:)?//', tag)] == [], page
    for sheet in [*site.rglob("*.css")]:
        assert "@import" not in sheet.read_text()
        assert not re.findall(r"url\(\"?https?:", sheet.read_text()), sheet
    assert [path.name for path in (DOCS / "images").iterdir() if path.stat().st_size > 300_000] == []


PAGE = (REPOSITORY / "docs" / "reading.md").read_text()
STOP = re.compile(r"^\*\*(\d+)\. `([\w/]+\.py)`\.\*\*(.*?)(?=^\*\*\d|^## |\Z)", re.MULTILINE | re.DOTALL)
STOPS = [(int(number), path, text) for number, path, text in STOP.findall(PAGE)]
FILES = [path for _, path, _ in STOPS]


def imported(path: str) -> set[str]:
    """Return the modules that a file imports, without `duetgan`; a name of a package counts as its module, too."""
    modules = modules_of(tree_of(REPOSITORY / path))
    packages = {module.rpartition(".")[0] for module in modules}
    return {module.removeprefix("duetgan.") for module in modules | packages}


def test_the_walk_is_short_and_uses_few_names_of_other_modules():
    assert [number for number, *_ in STOPS] == list(range(1, len(STOPS) + 1))
    assert 10 <= len(STOPS) <= 14
    assert len(set(FILES)) == len(FILES)
    assert sum(len((REPOSITORY / path).read_text().splitlines()) for path in FILES) <= 2500
    walk = {"duetgan." + path.removesuffix(".py").removeprefix("duetgan/").replace("/", ".") for path in FILES}
    names = {
        (node.module, alias.name)
        for path in FILES
        for node in ast.walk(tree_of(REPOSITORY / path))
        if isinstance(node, ast.ImportFrom) and node.module.startswith("duetgan") and node.module not in walk
        for alias in node.names
    }
    assert len(names) <= 60
    assert len({module for module, _ in names}) <= 30


def test_no_file_imports_one_that_comes_later_and_names_are_in_their_files():
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
