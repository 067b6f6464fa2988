"""An extra can be deleted: the rest imports, lists its commands, and collects and passes its tests without it."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

from duetgan.commands import COMMANDS
from duetgan.utils import extras
from tests.test_project import LINKS, ROOT, imported, project_files

EXTRAS = dict(zip(extras.names(), extras.packages(), strict=True))
# module that an extra attaches to -> a test of it
NEAREST = {
    "duetgan.commands.evaluate": "tests/metrics/test_scripts.py",
    "duetgan.commands.generate": "tests/inference/test_generate_commands.py",
    "duetgan.commands.train": "tests/training/engine/test_start.py",
    "duetgan.data.images.values": "tests/data/images/test_values.py",
    "duetgan.data.packing.sources": "tests/data/packing/sources/test_sources.py",
    "duetgan.data.packing.sources.lmdb_files": "tests/data/packing/sources/test_sources.py",
    "duetgan.inference.additions": "tests/inference/test_reported.py",
    "duetgan.inference.export.formats": "tests/inference/test_export_formats.py",
    "duetgan.metrics.evaluate_classifier": "tests/metrics/test_evaluate_classifier.py",
    "duetgan.metrics.features.extractors": "tests/metrics/features/test_extractors.py",
    "duetgan.metrics.tables": "tests/metrics/test_figures.py",
    "duetgan.models.classifier": "tests/models/test_classifier.py",
    "duetgan.extras.official.nvidia": "tests/extras/official/test_export.py",
    "duetgan.models.registry": "tests/models/test_restore.py",
    "duetgan.models.restore": "tests/models/test_restore.py",
    "duetgan.training.classifier.network": "tests/training/classifier/test_task.py",
    "duetgan.training.engine.run": "tests/training/engine/test_start.py",
    "duetgan.training.engine.tasks": "tests/training/engine/test_tasks.py",
}
# keys.md and schema.json hold the extras' keys
GENERATED = "tests/training/test_reference.py::test_markdown_and_repository_have_every_key"
IMPORT_ALL = """
import importlib, pkgutil, duetgan
for module in pkgutil.walk_packages(duetgan.__path__, "duetgan."):
    if not module.name.endswith("__main__"):
        importlib.import_module(module.name)
from duetgan.commands import COMMANDS
print(*COMMANDS)
"""


def test_an_extra_is_light_and_declares_what_exists():
    assert len(EXTRAS) > 5
    for package in EXTRAS.values():
        assert imported(Path(str(package.__file__))) == set(), package.__name__
        for module, _ in getattr(package, "COMMANDS", {}).values():
            assert importlib.util.find_spec(module)
        for registry, module in getattr(package, "ATTACHES", {}).items():
            assert (ROOT / NEAREST[registry]).is_file(), registry
            assert "extras.attach(__name__)" in Path(str(importlib.util.find_spec(registry).origin)).read_text()
            assert importlib.util.find_spec(module)


def run(folder: Path, *arguments: str) -> str:
    command = [sys.executable, *arguments]
    environ = {**os.environ, "PYTHONPATH": str(folder)}
    done = subprocess.run(command, cwd=folder, env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", ["all", *(pytest.param(name, marks=pytest.mark.slow) for name in EXTRAS)])
def test_the_rest_works_without(name, tmp_path):
    deleted = {
        extra for extra, package in EXTRAS.items() if name in ("all", extra) or name in getattr(package, "NEEDS", ())
    }
    gone = tuple(f"{folder}/extras/{extra}/" for extra in deleted for folder in ("duetgan", "tests"))
    for path in project_files():
        place = path.relative_to(ROOT)
        if not place.as_posix().startswith(gone):
            (tmp_path / place).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / place).symlink_to(path)
    for link in LINKS:
        (tmp_path / link).symlink_to(f"duetgan/{link}")
    modules = tuple(f"duetgan.extras.{extra}." for extra in deleted)
    left = {command for command, (module, _) in COMMANDS.items() if not module.startswith(modules)}
    assert set(run(tmp_path, "-c", IMPORT_ALL).split()) == left
    if name != "all":
        run(tmp_path, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider")
        nearest = {NEAREST[registry] for registry in getattr(EXTRAS[name], "ATTACHES", {})}
        nearest.add("tests/test_start.py")
        options = ["-q", "-p", "no:cacheprovider", "-m", "not slow", "--deselect", GENERATED]
        run(tmp_path, "-m", "pytest", *options, *sorted(nearest))
