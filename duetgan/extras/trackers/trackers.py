"""Send a run's metrics to Weights & Biases or trackio.

Set `log.tracker: wandb` to send them during training; use `duet track RUN --to wandb` for a
finished run. Both send the rows of metrics.jsonl up to the last checkpoint, because a resume may
delete later ones. RUN/tracker.json holds the last step that each tracker has, so that rows are not
sent twice; only a kill or an error during the sending can repeat them. Nothing leaves this machine
unless the tracker's own settings say so: WANDB_MODE=online, TRACKIO_SPACE_ID.
"""

import importlib.util
import json
import os
import uuid
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch
from pydantic import TypeAdapter

from duetgan.training.base.config import RunConfig
from duetgan.training.base.monitors import MetricWindow
from duetgan.training.engine.loop import Callback, Loop
from duetgan.training.engine.run import CALLBACKS
from duetgan.utils import checkpoint, files
from duetgan.utils.config.cli import Parser
from duetgan.utils.config.model import NonNegativeInt, Stored
from duetgan.utils.config.yaml_files import Tree, read_yaml
from duetgan.utils.distributed import collectives
from duetgan.utils.errors import UserError
from duetgan.utils.files import replace_file
from duetgan.utils.runlog.run_log import Metrics, say


class Session(NamedTuple):
    """An open run of a tracker."""

    id: str  # the tracker's id of the run, with which to open it again
    run: Any  # wandb's or trackio's; both have `log(values, step=...)` and `finish()`


def _wandb(run: Path, config: Tree, run_id: str | None) -> Session:
    """Open a run of wandb, offline unless WANDB_MODE is set.

    If `run_id` is given, the run with this id is continued. `wandb sync RUN/wandb/offline-*` sends
    an offline run later.
    """
    import wandb

    name = run_id or uuid.uuid4().hex[:12]
    mode: Any = os.environ.get("WANDB_MODE", "offline")
    session = wandb.init(
        project=os.environ.get("WANDB_PROJECT", "duet"),
        name=run.name,
        dir=str(run),
        config=config,
        id=name,
        resume="allow",
        mode=mode,
        settings=wandb.Settings(console="off", silent=True, save_code=False, x_disable_stats=True),
    )
    return Session(name, session)


def _trackio(run: Path, config: Tree, run_id: str | None) -> Session:
    """Open a run in trackio's own database (TRACKIO_DIR).

    If `run_id` is given, the run with this name is continued. `trackio show --project duet` shows
    the database.
    """
    import trackio

    name = run_id or f"{run.name}-{uuid.uuid4().hex[:6]}"
    session = trackio.init(project="duet", name=name, config=config, resume="allow", embed=False)
    return Session(name, session)


Open = Callable[[Path, Tree, str | None], Session]
SESSIONS: dict[str, Open] = {"wandb": _wandb, "trackio": _trackio}


class Sent(Stored):
    """The state of a run in a tracker: its id there, and the last step whose rows were sent."""

    id: str  # the tracker's id of the run
    step: NonNegativeInt  # the last step that the tracker has


STATE = TypeAdapter(dict[str, Sent])  # RUN/tracker.json: tracker -> sent rows


def require(name: str) -> None:
    """Raise UserError if a tracker's package is missing."""
    spec = importlib.util.find_spec(name)
    # A folder of that name, such as wandb's own, has a spec but no origin.
    if spec is None or spec.origin is None:
        raise UserError(f"the tracker {name}: its package is not installed; pip install {name}")


class Tracker:
    """A sender of the rows of a run's metrics.jsonl to the tracker `name`, one of SESSIONS.

    Raises UserError if the tracker's package is missing.
    """

    def __init__(self, run: Path, name: str) -> None:
        require(name)
        self.name, self._run = name, run
        self._session: Session | None = None
        self._sent_step = 0  # step of the checkpoint up to which this object has sent

    def send(self) -> int:
        """Send the rows that the tracker lacks, up to the last checkpoint; return their number.

        Raises the tracker's own exceptions.
        """
        saved = checkpoint.newest_first(self._run / "checkpoints")
        last = checkpoint.step_of(saved[0]) if saved else 0
        if last <= self._sent_step:
            return 0
        state = self._run / "tracker.json"
        sent: dict[str, Sent] = {}
        with suppress(OSError, ValueError):
            sent = STATE.validate_json(files.read_file(state, files.TABLE))
        previous = sent.get(self.name, Sent(id="", step=0))
        if rows := self._rows(previous.step, last):
            if self._session is None:
                self._session = SESSIONS[self.name](
                    self._run, read_yaml(self._run / "config.yaml"), previous.id or None
                )
            for row in rows:
                step = row.pop("step")
                if values := {k: v for k, v in row.items() if isinstance(v, int | float)}:
                    self._session.run.log(values, step=step)
            sent[self.name] = Sent(id=self._session.id, step=step)
            replace_file(state, STATE.dump_json(sent))
        self._sent_step = last
        return len(rows)

    def _rows(self, sent: int, last: int) -> list[dict[str, Any]]:
        """Return the rows of the steps after `sent`, up to step `last`.

        Leaves out rows that are marked as partial, and lines that were not written completely.
        """
        rows = []
        for line in files.read_file(self._run / "metrics.jsonl", files.TABLE).splitlines():
            with suppress(ValueError, LookupError, TypeError):
                row = json.loads(line)
                if sent < row["step"] <= last and not row.get("partial"):
                    rows.append(row)
        return rows

    def close(self) -> None:
        """End the tracker's session; a later session continues the same run."""
        session, self._session = self._session, None
        if session is not None:
            session.run.finish()


class Tracking(Callback):
    """A callback that sends the rows of metrics.jsonl to the tracker `name` during training.

    An error ends the tracking, but not the training.
    """

    def __init__(self, name: str) -> None:
        require(name)
        self.name = name
        self._tracker: Tracker | None = None
        self._run: Path | None = None

    def before_step(self, loop: Loop) -> None:
        if self._run is None:
            self._run = loop.folder.path
            self._tracker = Tracker(self._run, self.name)

    def after_row(self, loop: Loop, row: Metrics, window: MetricWindow) -> None:
        self._send()

    def close(self) -> None:
        self._send(close=True)

    def _send(self, *, close: bool = False) -> None:
        if self._tracker is None:
            return
        try:
            self._tracker.send()
            if close:
                self._tracker.close()
        except Exception as error:
            say(
                f"warning: {self.name}: {error}; training continues without it; `duet track "
                f"{self._run} --to {self.name}` sends the rows later"
            )
            self._tracker = None


def callbacks(config: RunConfig, device: torch.device) -> list[Callback]:
    """Return a list with the callback for the tracker that `log.tracker` names.

    The list is empty for "none", and on all ranks but the main one. Raises UserError if the tracker
    is not installed.
    """
    if config.log.tracker == "none" or not collectives.is_main():
        return []
    return [Tracking(config.log.tracker)]


CALLBACKS.append(callbacks)


def main(argv: list[str]) -> None:
    parser = Parser(prog="duet track", description="Send the rows of a run to a tracker.")
    parser.add_argument("run", metavar="RUN", type=Path, help="run folder")
    parser.add_argument("--to", required=True, choices=SESSIONS, help="the tracker")
    options = parser.parse_args(argv)
    for name in ("metrics.jsonl", "config.yaml"):
        if not (options.run / name).is_file():
            raise UserError(f"{options.run}: no {name}; give the folder of a run")
    tracker = Tracker(options.run, options.to)
    try:
        count = tracker.send()
        tracker.close()
    except UserError:
        raise
    except Exception as error:  # a tracker's own: no network, no login, a full disk
        raise UserError(
            f"{options.to}: {error}; nothing of {options.run} is lost, give the command again"
        ) from error
    print(
        f"{count} rows of {options.run} to {options.to}"
        if count
        else f"{options.to} has all rows of {options.run}"
    )
