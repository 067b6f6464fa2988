"""A run's folder: its lock, its status file and its config."""

import contextlib
import json
import os
import re
import time
from collections.abc import Mapping
from pathlib import Path

from duetgan.utils.config.build import differences
from duetgan.utils.config.yaml_files import Tree, read_yaml, save_yaml
from duetgan.utils.errors import UserError, explained
from duetgan.utils.files import as_json, hold, replace_file

# A change of these keys breaks the saved state. A resume accepts changes of all other keys, with a
# notice.
BREAKING = re.compile(
    r"(task|seed|architecture|progressive\.start)$|"
    r"(generator|discriminator|model)\.(?!weights$|inplace$|activation_|split\b)|"
    r"finetune\.(freeze$|unfreeze)|(\w+_)?optimizer\.name$"
)
RUNS = "DUET_RUNS"  # environment variable: the parent of default run folders
SEARCHED = ("lr_find.png", "lr_find.json")  # results of a learning rate search, which is no run yet


def runs_folder() -> Path:
    """Return the parent of default run folders: $DUET_RUNS, else runs/ in the current folder."""
    return Path(os.environ.get(RUNS) or "runs")


def default_folder(config_file: Path) -> Path:
    """Return the default run folder of a config file.

    The config.yaml in a run folder belongs to that folder. For any other file NAME.yaml the default
    is the folder NAME in `runs_folder()`.
    """
    folder = config_file.parent
    of_a_run = config_file.name == "config.yaml" and any(
        (folder / m).exists() for m in ("checkpoints", "status.json")
    )
    return folder if of_a_run else runs_folder() / config_file.stem


def is_finished(run: Path, max_steps: int | None) -> bool:
    """Return True if a run's training has ended, or has stopped at step `max_steps`."""
    file = run / "status.json"
    if not file.is_file():
        return False
    status = json.loads(file.read_text())
    reached_end = max_steps is not None and status.get("step") == max_steps
    return status["state"] == "finished" or (reached_end and status["state"] != "running")


class RunFolder:
    """A run's folder, with a lock against other processes.

    Methods raise UserError if the folder cannot be written, is in use or holds something other than
    a run.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.checkpoints = self.path / "checkpoints"
        self.samples = self.path / "samples"
        self._lock: int | None = None
        self._created: list[Path] = []  # the lock and the folders that `open` created
        self._opened = time.monotonic()
        # time that earlier processes have spent on the run
        self._earlier_seconds = self._recorded_seconds()

    def open(self) -> None:
        """Create the folder if it is missing, and lock it.

        Does nothing if this object already holds the lock. The lock of a killed process does not
        count. If no run has begun when `close` is called, `close` removes what this method has
        created.
        """
        if self._lock is not None:
            return
        file = self.path / ".lock"
        text = f"{self.path}: cannot be written ({{}}); choose another --run-dir"
        with (
            explained(OSError, lambda error: text.format(error.strerror)),
            contextlib.ExitStack() as failed,
        ):
            self._created = [path for path in (file, *file.parents) if not path.exists()]
            self.path.mkdir(parents=True, exist_ok=True)
            lock = os.open(file, os.O_RDWR | os.O_CREAT, 0o644)
            if not hold(lock):
                owner = os.read(lock, 32).decode(errors="replace").strip()
                os.close(lock)
                raise UserError(
                    f"{self.path}: another run (process {owner}) is writing here; choose another --run-dir"
                )
            # The owner may have just removed the file.
            if not file.exists() or not os.path.samestat(os.fstat(lock), file.stat()):
                os.close(lock)
                return self.open()
            self._lock = lock
            failed.callback(self.close)
            os.truncate(lock, 0)
            os.pwrite(lock, str(os.getpid()).encode(), 0)  # a full disk refuses this
            failed.pop_all()
        self._earlier_seconds = self._recorded_seconds()

    def _recorded_seconds(self) -> float:
        """Return the seconds in status.json; 0 if there is none, or only that of an older version."""
        with contextlib.suppress(OSError, ValueError, LookupError, TypeError):
            status = json.loads((self.path / "status.json").read_text())
            return float(status["seconds"])
        return 0.0

    def close(self) -> None:
        if self._lock is None:
            return
        if self._created and not (self.path / "config.yaml").is_file():
            with contextlib.suppress(OSError):  # the folder may hold something else
                self._created[0].unlink()
                for folder in self._created[1:]:
                    folder.rmdir()
        os.close(self._lock)
        self._lock = None

    def saved_config(self) -> Tree | None:
        """Return the config of the run in the folder, or None if it holds no run.

        Raises UserError if a folder without a run holds files, except hidden ones and the results
        of a learning rate search.
        """
        config = self.path / "config.yaml"
        if config.is_file():
            return read_yaml(config)
        names = sorted(path.name for path in self.path.iterdir()) if self.path.is_dir() else []
        foreign = [name for name in names if name not in SEARCHED and not name.startswith(".")]
        if foreign:
            raise UserError(
                f"{self.path}: is not empty and holds no run (found {', '.join(foreign[:3])}); "
                "choose another --run-dir"
            )
        return None

    def accept_config(self, config: Tree, *, defaults: Tree | None) -> list[str]:
        """Compare a config with the saved one; return a line for each harmless difference.

        Raises UserError for a difference that would break the saved state, such as another task,
        model or seed.

        Args:
            defaults: a config of default values. They replace missing keys of the saved config,
                which may come from an older version. Saved keys that are not in `defaults` are
                ignored.
        """
        if (saved := self.saved_config()) is None:
            return []
        changed = differences(_aligned(saved, defaults or {}), config)
        breaking = []
        for key, (old, new) in changed.items():
            if BREAKING.match(key) and old != "auto":
                breaking.append(f"{key}: {old!r} there, {new!r} now")
        if breaking:
            raise UserError(
                f"{self.path}: holds another run ({'; '.join(breaking[:4])}); choose another "
                "--run-dir, or give the run's own config"
            )
        return [
            f"config changed since the last start: {key} was {old!r}, is {new!r}"
            + "; not the same to the bit from here on" * (key == "threads" and old != "auto")
            for key, (old, new) in changed.items()
        ]

    def save_config(self, config: Tree, data: Mapping[str, object] | None) -> None:
        """Write the resolved `config` to config.yaml, which train.py accepts.

        If `data` is given, a description of the run's images, it is written to data.json.
        """
        save_yaml(config, self.path / "config.yaml")
        if data is not None:
            replace_file(self.path / "data.json", as_json(data))

    def write_status(
        self,
        state: str,
        step: int,
        reason: str,
        exit_code: int | None,
    ) -> None:
        """Write `status.json`, with the seconds that the run has taken in all its starts.

        `state` is running, finished, stopped or failed.
        """
        status: dict[str, object] = {
            "state": state,
            "step": step,
            "reason": reason,
            "exit_code": exit_code,
        }
        status["seconds"] = round(self._earlier_seconds + time.monotonic() - self._opened, 1)
        status |= {"pid": os.getpid(), "time": time.strftime("%Y-%m-%dT%H:%M:%S%z")}
        replace_file(self.path / "status.json", as_json(status))


def _aligned(tree: Tree, defaults: Tree) -> Tree:
    """Return a copy of `tree` that has exactly the keys of `defaults`, in nested sections too.

    Missing keys get their default. An empty section in `defaults` accepts any keys.
    """
    if not defaults:
        return tree
    result = {key: tree.get(key, default) for key, default in defaults.items()}
    for key, value in defaults.items():
        saved = result[key]
        if isinstance(value, dict) and isinstance(saved, dict):
            result[key] = _aligned(saved, value)
    return result
