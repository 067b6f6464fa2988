"""A home of their own for the tests and for the processes that they start, and what shows that they stay in it."""

import os
import shutil
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
SITE = Path(__file__).parent
HOME = Path.home()
CACHE = Path(os.environ.get("XDG_CACHE_HOME") or HOME / ".cache")
FOLDER = "DUET_TESTS"  # as in sitecustomize.py, which must not be imported before the folder is there
PLACES = ("XDG_CACHE_HOME", "TORCH_HOME", "HF_HOME", "MPLCONFIGDIR", "DUET_CACHE", "DUET_RUNS")
PRIVATE = tuple(Path(os.environ[name]) for name in PLACES if os.environ.get(name))  # as the user has set them
MOVED = ("XDG_CONFIG_HOME", "XDG_DATA_HOME", "XDG_STATE_HOME", "HF_HUB_CACHE", "HF_DATASETS_CACHE", "DUET_WEIGHTS")
OURS = ("runs", "datasets", "weights", "build")  # of the checkout: what a user has there is not for tests
TOOLS = ("build/pycache", ".pytest_cache", ".hypothesis")
BYTECODE = (REPOSITORY / "build", REPOSITORY / "build" / "pycache")
CACHES = ("duet", "torch", "matplotlib", "huggingface")
SYSTEM = ("/dev", "/proc", "/sys")


def isolate() -> dict[str, float] | None:
    """Give this process and its children an empty home, caches and runs/ and return `names()`; once a session."""
    if os.environ.get(FOLDER) and Path(os.environ[FOLDER]).is_dir():
        return None
    before = names()
    folder = Path(tempfile.mkdtemp(prefix="duet-tests-"))
    home = folder / "home"
    home.mkdir()
    (home / ".gitconfig").write_text("[safe]\n\tdirectory = *\n")  # whoever the checkout belongs to
    lines = [f"{rights}\t{path}\n" for path, rights in rules(folder / "runs")]
    (folder / "rules").write_text("".join(lines))
    if (HOME / ".npmrc").is_file():  # how this machine reaches npm, for a test that does
        os.environ.setdefault("NPM_CONFIG_USERCONFIG", str(HOME / ".npmrc"))
    for name in (*PLACES, *MOVED):
        os.environ.pop(name, None)
    os.environ |= {
        FOLDER: str(folder),
        "HOME": str(home),
        "DUET_RUNS": str(folder / "runs"),
        "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor"),
        "PYTHONPATH": on_path(os.environ.get("PYTHONPATH", "")),
    }
    return before


def on_path(*folders: str | Path) -> str:
    """Return a PYTHONPATH of these folders for a process that is watched, too."""
    return os.pathsep.join(filter(None, [str(SITE), *map(str, folders)]))


def rules(runs: Path) -> Iterator[tuple[str, str]]:
    """Yield folders and what may be done there: r, rw or nothing; of two rules for a folder the first counts.

    The default `runs` must not be used either: one test would see what another has left there.
    """
    temporary = (tempfile.gettempdir(), os.environ.get("PYTEST_DEBUG_TEMPROOT") or tempfile.gettempdir())
    writable = [Path(path) for path in (*temporary, *SYSTEM)] + [REPOSITORY / name for name in TOOLS]
    python = [Path(path) for path in (sys.prefix, sys.base_prefix, *filter(None, sys.path))]
    readable = [REPOSITORY, REPOSITORY.parent / "shared", *python]
    forbidden = [runs, *(REPOSITORY / name for name in OURS), *PRIVATE, *([HOME] if Path("/") != HOME else [])]
    for paths, rights in ((writable, "rw"), (readable, "r"), (forbidden, "")):
        for path in paths:
            yield os.path.abspath(path), rights
            yield os.path.realpath(path), rights


def names() -> dict[str, float]:
    """Return what is in the checkout beside the project and in the user's caches, and when it was written.

    Of whole folders of such files only the first level: somebody may train in runs/.
    """
    command = ["git", "ls-files", "-z", "--others", "--directory", "--exclude=.*", "--exclude=__pycache__"]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    paths = [REPOSITORY / name for name in done.stdout.split("\0") if name]  # none where it is no git checkout
    for folder in (*(path for path in paths if not path.is_symlink()), *(CACHE / name for name in CACHES), *PRIVATE):
        paths += folder.glob("*")
    modes = {path: path.lstat() for path in paths if path not in BYTECODE}
    return {str(path): mode.st_mtime if stat.S_ISREG(mode.st_mode) else 0.0 for path, mode in modes.items()}


def remove() -> None:
    """Remove the folder of the session."""
    shutil.rmtree(os.environ.pop(FOLDER), ignore_errors=True)
