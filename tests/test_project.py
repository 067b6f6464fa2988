"""The project's own files: the locks, the import rule, make, CI and the container build."""

import ast
import functools
import os
import re
import shutil
import subprocess
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.version import Version

from duetgan.commands import COMMANDS

ROOT = Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]
LOCKS = {"requirements.lock": PROJECT["dependencies"] + EXTRAS["explore"], "requirements-dev.lock": EXTRAS["dev"]}
PACKAGE = ROOT / "duetgan"
# commands -> training -> metrics -> models, data -> utils: what each package may import of ours
MAY_IMPORT = {
    "utils": {"utils"},
    "data": {"data", "utils"},
    "models": {"models", "utils"},
    "metrics": {"metrics", "models", "data", "utils"},
    "reporting": {"reporting", "metrics", "utils"},
    "training": {"training", "metrics", "reporting", "models", "data", "utils"},
    "inference": {"inference", "metrics", "models", "data", "utils"},
}
MAY_IMPORT["commands"] = {"commands", *MAY_IMPORT}
MAY_IMPORT["extras"] = {"extras", *MAY_IMPORT}  # nothing else may import these
LINKS = ("configs", "data", "models", "utils")  # at the top of the checkout, into the package
STARTERS = ("pack.py", "inspect.py", "duplicates.py")  # in data/: `python -m data.pack` is `duet pack`
HOSTS = ("pypi" + ".org", "pythonhosted" + ".org", "download.pytorch" + ".org", "registry.npmjs" + ".org")


def pins(name: str) -> list[Requirement]:
    """The pinned requirements of a lock file."""
    lines = (ROOT / name).read_text().splitlines()
    return [Requirement(line) for line in lines if line and not line.lstrip().startswith("#")]


def canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


@functools.cache
def project_files() -> list[Path]:
    """Return every file that is in git or would be; the links at the top are left out."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\0")
    files = [ROOT / name for name in listed if name and (ROOT / name).is_file()]
    assert len(files) > 20
    return files


@pytest.mark.parametrize("lock", LOCKS)
def test_lock_pins_exact_versions_and_names_no_place(lock):
    """And it satisfies the lower bounds."""
    text = (ROOT / lock).read_text()
    assert [place for place in ("://", "index-url", str(ROOT)) if place in text] == []
    versions: dict[str, set[str]] = {}
    for pin in pins(lock):
        assert pin.url is None
        assert re.fullmatch(r"==[^*,]+", str(pin.specifier)), pin
        versions.setdefault(canonical(pin.name), set()).add(str(pin.specifier).removeprefix("=="))
    for wanted in map(Requirement, LOCKS[lock]):
        found = versions.get(canonical(wanted.name), set())
        assert found, f"{lock} lacks {wanted.name}"
        assert all(wanted.specifier.contains(Version(version)) for version in found), wanted


def test_dev_lock_contains_the_runtime_lock_with_accelerators_for_linux_only():
    """For the same platforms, or for all."""
    dev = {str(pin) for pin in pins("requirements-dev.lock")}
    missing = [pin for pin in pins("requirements.lock") if not {str(pin), f"{pin.name}{pin.specifier}"} & dev]
    assert missing == []
    for pin in pins("requirements.lock"):
        if pin.name.startswith(("nvidia-", "cuda-", "triton")):
            assert pin.marker is not None, pin
            assert not pin.marker.evaluate({"sys_platform": "darwin", "platform_machine": "arm64"}), pin


@functools.cache
def tree_of(path: Path) -> ast.Module:
    """Return the syntax tree of a file; several tests read each one."""
    return ast.parse(path.read_text())


def modules_of(tree: ast.AST) -> set[str]:
    """Return all absolute imports in a source, those inside functions too."""
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


@functools.cache
def imported(path: Path, within: str = "") -> set[str]:
    """First names of the absolute imports of a file; `within`: after this prefix."""
    names = modules_of(tree_of(path))
    return {name.removeprefix(within).partition(".")[0] for name in names if name.startswith(within)}


def test_our_packages_have_one_name_in_every_way_to_import():
    """A module that is imported as `data` and as `duetgan.data` exists twice, with two states."""
    source = "import a.b as c\ndef f():\n    from d.e import g\nfrom . import h\nfrom d import i"
    assert modules_of(ast.parse(source)) == {"a.b", "d.e.g", "d.i"}
    wrong = {
        str(path.relative_to(ROOT)): bare
        for path in project_files()
        if path.suffix == ".py" and (bare := imported(path) & set(MAY_IMPORT))
    }
    assert wrong == {}


@pytest.mark.parametrize("package", MAY_IMPORT)
def test_imports_point_one_way(package):
    ours = {*MAY_IMPORT, "library", "hub"}
    files = [path for path in sorted((PACKAGE / package).rglob("*.py")) if path.name not in STARTERS]
    assert files
    wrong = {
        str(path.relative_to(ROOT)): forbidden
        for path in files
        if (forbidden := imported(path, "duetgan.") & ours - MAY_IMPORT[package])
        or (forbidden := imported(path) & {"tests", "benchmarks"})
    }
    assert wrong == {}


def test_the_package_is_plain_and_the_short_names_are_links():
    """Editors and import graphs find every module where its name says; importing one neither exits nor moves paths."""
    links = {path.name: os.readlink(path) for path in ROOT.iterdir() if path.is_symlink() and path.name in LINKS}
    assert links == {name: f"duetgan/{name}" for name in LINKS}
    for path in ROOT.glob("*.py"):
        assert len(path.read_text().splitlines()) <= 10, path.name
    wrong = []
    for path in PACKAGE.rglob("*.py"):
        for node in tree_of(path).body:  # run on import
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                continue
            text = ast.unparse(node)
            if re.search(r"(?<!\.)__path__|sys\.(path|exit)", text):
                wrong.append(f"{path.relative_to(ROOT)}: {text}")
    assert wrong == []


def test_no_module_imports_itself_by_a_circle():
    """Imports at the head of modules, without those for type checkers."""
    modules = {path: ".".join(path.relative_to(ROOT).with_suffix("").parts) for path in PACKAGE.rglob("*.py")}
    names = {name.removesuffix(".__init__"): path for path, name in modules.items()}
    targets: dict[str, set[str]] = {}
    for name, path in names.items():
        found: set[str] = set()
        for node in tree_of(path).body:
            if isinstance(node, ast.ImportFrom):
                found |= {f"{node.module}.{alias.name}" for alias in node.names}
            elif isinstance(node, ast.Import):
                found |= {alias.name for alias in node.names}
        targets[name] = {each if each in names else each.rpartition(".")[0] for each in found} & set(names) - {name}
    while leaves := [name for name, found in targets.items() if not found & set(targets)]:
        for name in leaves:
            del targets[name]
    assert targets == {}


def test_no_registry_and_no_path_of_this_machine_in_any_file():
    found = []
    for path in project_files():
        content = path.read_bytes().decode(errors="replace")
        found += [f"{path.relative_to(ROOT)}: {host}" for host in HOSTS if host in content]
        found += [f"{path.relative_to(ROOT)}: {ROOT}"] if f"{ROOT}/" in content else []
    assert found == []


def test_no_file_is_too_large_for_git_or_dockers_context():
    assert [path for path in project_files() if path.stat().st_size > 6 * 2**20] == []
    lines = (ROOT / ".dockerignore").read_text().splitlines()
    for name in (".git", ".venv*", "runs", "**/*.lmdb", "**/*.pt", "**/*.pth", "**/*.safetensors"):
        assert name in lines
    assert lines.index("!duetgan/configs/*.pt") > lines.index("**/*.pt")  # the networks that the quickstart starts from


def dry_run(folder: Path, target: str) -> str:
    """What `make target` would run in the folder."""
    environ = {key: value for key, value in os.environ.items() if key not in ("VENV", "MAKEFLAGS", "MAKELEVEL")}
    command = ["make", "--dry-run", "--no-print-directory", target]
    return subprocess.run(command, cwd=folder, env=environ, capture_output=True, text=True, check=True).stdout


@pytest.fixture
def checkout(tmp_path):
    """A folder that holds only the Makefile, the locks and what an installation reads."""
    for name in ("Makefile", "pyproject.toml", *LOCKS):
        shutil.copy(ROOT / name, tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("target", "command"),
    [
        ("setup", "--no-build-isolation --editable ."),  # U4
        ("quickstart", ".venv/bin/python quickstart.py"),
        ("test", '--dist loadfile --no-loadscope-reorder -m "not slow"'),
        ("test-all", f".venv/bin/python -m pytest -n {(os.cpu_count() or 1) + 1} "),
        ("test-used", ".ci/used"),
        ("lint", ".venv/bin/mypy"),
    ],
)
def test_make_target_makes_the_environment_first(checkout, target, command):
    plan = dry_run(checkout, target)
    assert command in plan
    assert "-m venv .venv" in plan
    assert plan.index("-r requirements-dev.lock") <= plan.index(command) or target == "setup"


def test_compose_serves_this_machine_only_and_runs_commands_of_the_image():
    services = yaml.safe_load((ROOT / "compose.yaml").read_text())["services"]
    image = services.pop("image")  # U8: several services that build one image fail
    assert [name for name, service in services.items() if "build" in service] == []
    assert {service["image"] for service in services.values()} == {image["image"]}
    declared = re.findall(r"^ARG (\w+)=", (ROOT / "Dockerfile").read_text(), re.MULTILINE)
    assert sorted(image["build"]["args"]) == sorted(declared)
    for service in services.values():
        assert {volume.rpartition(":")[2] for volume in service["volumes"]} == {"/data", "/runs"}
        assert all(port.startswith("127.0.0.1:") for port in service.get("ports", []))
        command = re.sub(r"^\$\{\w+:-(\w+)\}", r"\1", service["command"]).split()[0]
        assert command in {"tensorboard", *COMMANDS}
    assert services["train-gpu"]["deploy"]["resources"]["reservations"]["devices"][0]["capabilities"] == ["gpu"]


# wing -> room -> the rooms of the same wing whose modules it may import; "" is the wing's own files
ROOMS = {
    # opening -> packing, reading -> lmdb -> images -> errors; packing -> tar_files
    "data": {
        "images": {"images", "errors"},
        "lmdb": {"lmdb", "images", "errors"},
        "reading": {"reading", "lmdb", "images", "errors"},
        "augment": {"augment"},
        "packing": {"packing", "lmdb", "images", "errors", "tar_files"},
    },
    # engine -> gan, classifier -> optim -> base: the engine knows no model, optimizer and EMA import none
    "training": {
        "base": {"base"},
        "optim": {"optim", "base"},
        "gan": {"gan", "optim", "base"},
        "classifier": {"classifier", "optim", "base"},
        "engine": {"engine", "gan", "classifier", "optim", "base"},
    },
    # evaluation -> comparison -> figures (the table) -> samples -> classification -> features; intervals at the ground
    "metrics": {
        "": {"", "comparison", "samples", "classification", "features"},
        "features": {"features"},
        "classification": {"classification", "intervals", "protocol"},
        "samples": {"samples", "classification", "features", "intervals", "protocol"},
        "comparison": {"comparison", "figures", "intervals", "protocol"},
    },
}


@pytest.mark.parametrize(("wing", "room"), [(wing, room) for wing, rooms in ROOMS.items() for room in rooms])
def test_imports_within_a_wing_point_one_way(wing, room):
    rooms = ROOMS[wing]
    inside = {path.name for path in (PACKAGE / wing).iterdir() if (path / "__init__.py").exists()}
    assert inside == set(rooms) - {""}
    files = sorted((PACKAGE / wing / room).rglob("*.py")) if room else sorted((PACKAGE / wing).glob("*.py"))
    allowed = {name for name in rooms[room] if name}
    if "" in rooms[room]:
        allowed |= {path.stem for path in (PACKAGE / wing).glob("*.py")}
    wrong = {
        str(path.relative_to(ROOT)): forbidden
        for path in files
        if (forbidden := imported(path, f"duetgan.{wing}.") - allowed)
    }
    assert wrong == {}


# utils/ from the ground up: a module or package may import those of the floors below, and its own
FLOORS = (
    {"errors", "text", "seeding", "machine", "extras"},
    {"files", "image_spec", "distributed"},
    {"config", "images"},
    {"checkpoint", "runlog"},
)


def test_utils_has_four_floors_and_eight_leaves():
    place = PACKAGE / "utils"
    packages = {path.name for path in place.iterdir() if (path / "__init__.py").exists()}
    leaves = {path.stem for path in place.glob("*.py")} - {"__init__"}
    assert packages | leaves == set().union(*FLOORS)
    assert (len(packages), len(leaves)) == (4, 8)
    below: set[str] = set()
    wrong = {}
    for floor in FLOORS:
        for name in floor:
            for path in (place / name).rglob("*.py") if name in packages else [place / f"{name}.py"]:
                if upward := imported(path, "duetgan.utils.") - below - {name}:
                    wrong[path.name] = upward
        below |= floor
    assert wrong == {}


def product_files() -> list[Path]:
    """The program's own Python files: neither tests nor benchmarks nor examples."""
    outside = {"tests", "benchmarks", "examples"}
    return [p for p in project_files() if p.suffix == ".py" and p.relative_to(ROOT).parts[0] not in outside]


def test_no_file_is_longer_than_580_lines_no_function_than_112_no_folder_fuller_than_14():
    folders = {path for path in (PACKAGE / "training").rglob("*") if path.is_dir() and path.name != "__pycache__"}
    modules = {folder.name: {path.name for path in folder.glob("*.py")} - {"__init__.py"} for folder in folders}
    assert [name for name, files in modules.items() if len(files) > 14] == []
    long = []
    for path in product_files():
        source, name = path.read_text(), path.relative_to(ROOT)
        long += [f"{name}: {length} lines"] if (length := len(source.splitlines())) > 580 else []
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                length = (node.end_lineno or node.lineno) - node.lineno + 1
                long += [f"{name}, {node.name}: {length} lines"] if length > 112 else []
    assert long == []


# Words that are no names: docs/glossary.md and CONTRIBUTING.md say what to use
VAGUE = frozenset(
    re.findall(
        r"\w+",
        """told said asked wanted found given taken kept known shown meant looked beside apart alike like here there
        then before after more less rest other others own each every some both what who why how which lack lacks began
        begun ended stays reads sets share shares""",
    )
)
# names that users and files rely on: a parameter of the library; keys of configurations and stored documents, options
ALLOWED = {
    "commands/planning/plan.py": {"why"},
    "data/augment/transforms.py": {"own"},
    "data/lmdb/format.py": {"share", "sets"},
    "data/packing/pack.py": {"apart"},
    "extras/studies/distil.py": {"share"},
    "extras/studies/results.py": {"asked", "why"},
    "training/base/config.py": {"every", "share"},
    "utils/checkpoint/__init__.py": {"sets"},
}


def identifiers(tree: ast.AST) -> Iterator[str]:
    """Yield every name that a module defines: variables, parameters, attributes, functions and classes."""
    for node in ast.walk(tree):
        if isinstance(node, ast.arg):
            yield node.arg
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.attr
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name


def test_identifiers_are_nouns_and_docstrings_begin_with_a_verb_or_a_noun():
    names, starts = [], []
    for path in product_files():
        tree, place = tree_of(path), path.relative_to(ROOT)
        allowed = ALLOWED.get(str(place).removeprefix("duetgan/"), set()) | {"which"}
        vague = {name for name in identifiers(tree) if name.strip("_").lower() in VAGUE - allowed}
        names += [f"{place}: {name}" for name in sorted(vague)]
        for node in ast.walk(tree):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
                text = (ast.get_docstring(node) or "").strip()
                starts += [f"{place}: {text[:60]}"] if re.match(r"(What|Whether|That|Of|How)\b", text) else []
    assert (names, starts) == ([], [])
