"""The run folder: who may write into it, its status file, its config, its metrics."""

import contextlib
import json
import os
import re
import time
from pathlib import Path
from typing import Any

from duetgan.utils.config.build import differences
from duetgan.utils.config.yaml_files import Tree, read_yaml, save_yaml
from duetgan.utils.errors import UserError, explained
from duetgan.utils.files import as_json, hold, replace_file

# a change of these keys or sections breaks the saved state; all others are taken at a resume, with
# a notice
BREAKING = re.compile(
    r"(task|seed|architecture|progressive\.start)$|"
    r"(generator|discriminator|model)\.(?!weights$|inplace$|activation_|split\b)|"
    r"finetune\.(freeze$|unfreeze)|(\w+_)?optimizer\.name$"
)
RUNS = "DUET_RUNS"  # the environment's variable for the folder that default run folders are in
SEARCHED = ("lr_find.png", "lr_find.json")  # what a search of the learning rate leaves: no run yet


def runs_folder(home: Path = Path()) -> Path:
    """Return the folder that default run folders are in: $DUET_RUNS, else runs/ in `home`."""
    return Path(os.environ.get(RUNS) or home / "runs")


def default_folder(config_file: Path) -> Path:
    """Return <name of the config> in the folder of runs; for a run's own config.yaml return that
    run.
    """
    folder = config_file.parent
    of_a_run = config_file.name == "config.yaml" and any(
        (folder / m).exists() for m in ("checkpoints", "status.json")
    )
    return folder if of_a_run else runs_folder() / config_file.stem


def ended(run: Path, max_steps: int | None = None) -> bool:
    """Whether a run's training came to its end, or to the step where it was to stop."""
    file = run / "status.json"
    status = json.loads(file.read_text()) if file.is_file() else {"state": None}
    arrived = max_steps is not None and status.get("step") == max_steps
    return status["state"] == "finished" or (arrived and status["state"] != "running")


class RunFolder:
    """A run's folder, locked while open. Raises UserError when it cannot be written, is in use or
    holds no run.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.checkpoints = self.path / "checkpoints"
        self.samples = self.path / "samples"
        self._lock: int | None = None
        self._made: list[Path] = []  # by `open`: the lock and the folders that were not there
        # seconds that earlier processes have spent on the run
        self._opened, self._before = time.monotonic(), 0.0

    def open(self) -> None:
        """Create the folder where it is missing and take its lock, once; one left by a killed
        process does not block.

        Without a run in it, `close` removes what was made.
        """
        if self._lock is not None:
            return
        file, text = (
            self.path / ".lock",
            f"{self.path}: cannot be written ({{}}); choose another --run-dir",
        )
        with (
            explained(OSError, lambda why: text.format(why.strerror)),
            contextlib.ExitStack() as failed,
        ):
            self._made = [path for path in (file, *file.parents) if not path.exists()]
            self.path.mkdir(parents=True, exist_ok=True)
            lock = os.open(file, os.O_RDWR | os.O_CREAT, 0o644)
            if not hold(lock):
                owner = os.read(lock, 32).decode(errors="replace").strip()
                os.close(lock)
                raise UserError(
                    f"{self.path}: another run (process {owner}) is writing here; choose another --run-dir"
                )
            # its owner has just removed it
            if not file.exists() or not os.path.samestat(os.fstat(lock), file.stat()):
                os.close(lock)
                return self.open()
            self._lock = lock
            failed.callback(self.close)
            os.truncate(lock, 0)
            os.pwrite(lock, str(os.getpid()).encode(), 0)  # a full disk refuses this
            failed.pop_all()
        # a run of before, or none
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            self._before = float(json.loads((self.path / "status.json").read_text())["seconds"])

    def close(self) -> None:
        if self._lock is None:
            return
        if self._made and not (self.path / "config.yaml").is_file():
            with contextlib.suppress(OSError):  # something else is in it
                self._made[0].unlink()
                for folder in self._made[1:]:
                    folder.rmdir()
        os.close(self._lock)
        self._lock = None

    def saved_config(self) -> Tree | None:
        """The config of the run that is here, None in an empty folder. Raises UserError where other
        things are.
        """
        config = self.path / "config.yaml"
        if config.is_file():
            return read_yaml(config)
        there = {path.name for path in self.path.iterdir()} if self.path.is_dir() else set()
        if strangers := ", ".join(
            sorted(name for name in there.difference(SEARCHED) if not name.startswith("."))[:3]
        ):
            raise UserError(
                f"{self.path}: is not empty and holds no run (found {strangers}); choose another --run-dir"
            )
        return None

    def accept_config(self, config: Tree, *, defaults: Tree | None = None) -> list[str]:
        """Compare with the config of the run that is here; one line per harmless difference. A key
        that an older version did not write has its value of `defaults`.

        Raises UserError when a difference would break the saved state (another task, model or
        seed).
        """
        if (saved := self.saved_config()) is None:
            return []
        changed = differences(_filled(saved, defaults or {}), config)
        if breaking := {
            key: pair for key, pair in changed.items() if BREAKING.match(key) and pair[0] != "auto"
        }:
            text = "; ".join(
                f"{key}: {old!r} there, {new!r} now"
                for key, (old, new) in list(breaking.items())[:4]
            )
            rest = f" and {len(breaking) - 4} more" if len(breaking) > 4 else ""
            raise UserError(
                f"{self.path}: holds another run ({text}{rest}); choose another --run-dir, or give the run's own config"
            )
        return [
            f"config changed since the last start: {key} was {old!r}, is {new!r}"
            + "; not the same to the bit from here on" * (key == "threads" and old != "auto")
            for key, (old, new) in changed.items()
        ]

    def save_config(self, config: Tree, data: dict[str, Any] | None = None) -> None:
        """Write the resolved config, which can be given to train.py again, and `data.json`: what
        its images are.
        """
        save_yaml(config, self.path / "config.yaml")
        if data is not None:
            replace_file(self.path / "data.json", as_json(data))

    def write_status(
        self, state: str, step: int, reason: str = "", exit_code: int | None = None, **more: Any
    ) -> None:
        """`status.json`: state is running, finished, stopped or failed; `seconds` that its
        processes took in all.
        """
        status: dict[str, Any] = {
            "state": state,
            "step": step,
            "reason": reason,
            "exit_code": exit_code,
            **more,
        }
        status["seconds"] = round(self._before + time.monotonic() - self._opened, 1)
        status |= {"pid": os.getpid(), "time": time.strftime("%Y-%m-%dT%H:%M:%S%z")}
        replace_file(self.path / "status.json", as_json(status))


def _filled(tree: Tree, defaults: Tree) -> Tree:
    """`tree` with the keys of `defaults` that it lacks, in its sections too."""
    both = {
        key
        for key, value in defaults.items()
        if isinstance(value, dict) and isinstance(tree.get(key), dict)
    }
    return {**defaults, **tree, **{key: _filled(tree[key], defaults[key]) for key in both}}
