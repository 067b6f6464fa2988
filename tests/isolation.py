"""A home of their own for the tests and for the processes that they start, and what shows that they stay in it."""

import os
import shutil
import stat
import subprocess
import tempfile
from pathlib import Path

REPOSITORY = Path(__file__).parents[1]
HOME = Path.home()
CACHE = Path(os.environ.get("XDG_CACHE_HOME") or HOME / ".cache")
FOLDER = "DUET_TESTS"  # the environment's variable for the folder of a session, which holds the tests' home
PLACES = ("XDG_CACHE_HOME", "TORCH_HOME", "HF_HOME", "MPLCONFIGDIR", "DUET_CACHE", "DUET_RUNS")
PRIVATE = tuple(Path(os.environ[name]) for name in PLACES if os.environ.get(name))  # as the user has set them
MOVED = ("XDG_CONFIG_HOME", "XDG_DATA_HOME", "XDG_STATE_HOME", "HF_HUB_CACHE", "HF_DATASETS_CACHE", "DUET_WEIGHTS")
BYTECODE = (REPOSITORY / "build", REPOSITORY / "build" / "pycache")
CACHES = ("duet", "torch", "matplotlib", "huggingface")


def isolate() -> dict[str, float] | None:
    """Give this process and its children an empty home, caches and runs/ and return `names()`; once a session."""
    if os.environ.get(FOLDER) and Path(os.environ[FOLDER]).is_dir():
        return None
    before = names()
    folder = Path(tempfile.mkdtemp(prefix="duet-tests-"))
    home = folder / "home"
    home.mkdir()
    (home / ".gitconfig").write_text("[safe]\n\tdirectory = *\n")  # whoever the checkout belongs to
    if (HOME / ".npmrc").is_file():  # how this machine reaches npm, for a test that does
        os.environ.setdefault("NPM_CONFIG_USERCONFIG", str(HOME / ".npmrc"))
    for name in (*PLACES, *MOVED):
        os.environ.pop(name, None)
    os.environ |= {
        FOLDER: str(folder),
        "HOME": str(home),
        "DUET_RUNS": str(folder / "runs"),
        "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor"),
    }
    return before


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


def changes(before: dict[str, float]) -> list[str]:
    """Return a line for each file that was written or removed since `before`, and remove the session's folder."""
    after = names()
    shutil.rmtree(os.environ.pop(FOLDER), ignore_errors=True)
    changed = [name for name in sorted(before | after) if before.get(name) != after.get(name)]
    return [f"{name}: was written or removed while the tests ran" for name in changed]
