"""A run's rows for Weights & Biases, trackio or MLflow: `log.tracker: wandb` for a run that trains,
`duet track RUN --to wandb` for one that is over.

Both send the rows of metrics.jsonl up to the last checkpoint: a resume cuts none of them back.
RUN/tracker.json says how far each tracker has them, so that none is sent twice, unless a kill or an
error comes while they are sent. Nothing leaves this machine unless the tracker's own settings say
so: WANDB_MODE=online, TRACKIO_SPACE_ID, MLFLOW_TRACKING_URI.
"""

import importlib.util
import json
import os
import re
import uuid
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import TypeAdapter

from duetgan.utils import bounded
from duetgan.utils.config.cli import Parser
from duetgan.utils.config.model import NonNegativeInt, Stored
from duetgan.utils.config.yaml_files import read_yaml
from duetgan.utils.errors import UserError
from duetgan.utils.files import replace_file

Values = Mapping[str, float]


class Session(NamedTuple):
    """An open run of a tracker."""

    id: str  # with which the run is opened again
    # the values of one step, which is none before that of the call before
    log: Callable[[int, Values], object]
    close: Callable[[], object]  # sends or writes what is left


def _logging(name: str, run: Any) -> Session:
    """Of a run of wandb, or of trackio, which has taken over its words."""
    return Session(name, lambda step, values: run.log(dict(values), step=step), run.finish)


def _wandb(run: Path, config: dict[str, Any], known: str | None) -> Session:
    """WANDB_MODE is offline unless it is set: `wandb sync RUN/wandb/offline-*` sends the run later."""
    import wandb

    name = known or uuid.uuid4().hex[:12]
    quiet = wandb.Settings(console="off", silent=True, save_code=False, x_disable_stats=True)
    about = {"project": os.environ.get("WANDB_PROJECT", "duet"), "name": run.name, "dir": str(run)}
    mode: Any = os.environ.get("WANDB_MODE", "offline")
    return _logging(
        name, wandb.init(**about, config=config, id=name, resume="allow", mode=mode, settings=quiet)
    )


def _trackio(run: Path, config: dict[str, Any], known: str | None) -> Session:
    """In trackio's own database (TRACKIO_DIR); `trackio show --project duet` shows it."""
    import trackio

    name = known or f"{run.name}-{uuid.uuid4().hex[:6]}"
    return _logging(
        name, trackio.init(project="duet", name=name, config=config, resume="allow", embed=False)
    )


def _mlflow(run: Path, config: dict[str, Any], known: str | None) -> Session:
    """In `mlflow.db` beside the run's folder unless MLFLOW_TRACKING_URI is set."""
    from mlflow.tracking import MlflowClient

    beside = run.absolute().parent
    client = MlflowClient(
        os.environ.get("MLFLOW_TRACKING_URI", f"sqlite:///{beside / 'mlflow.db'}")
    )
    if known is None:
        there, artifacts = client.get_experiment_by_name("duet"), (beside / "mlruns").as_uri()
        experiment = there.experiment_id if there else client.create_experiment("duet", artifacts)
        name: str = client.create_run(experiment, run_name=run.name).info.run_id
        for key, value in _flat(config).items():
            client.log_param(name, key, value)
    else:
        name = known
        client.update_run(name, status="RUNNING")

    def log(step: int, values: Values) -> None:
        for key, value in values.items():
            client.log_metric(name, re.sub(r"[^\w./ -]", "_", key), value, step=step)

    return Session(name, log, lambda: client.set_terminated(name))


Open = Callable[[Path, dict[str, Any], str | None], Session]
TRACKERS: dict[str, Open] = {"wandb": _wandb, "trackio": _trackio, "mlflow": _mlflow}


def _flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    leaves: dict[str, Any] = {}
    for key, value in tree.items():
        leaves |= (
            _flat(value, f"{prefix}{key}.")
            if isinstance(value, Mapping)
            else {f"{prefix}{key}": value}
        )
    return leaves


class Sent(Stored):
    """What a tracker has of a run."""

    id: str  # of the run there
    step: NonNegativeInt  # up to which it has the rows


STATE = TypeAdapter(dict[str, Sent])  # RUN/tracker.json, by tracker


class Tracker:
    """Sends the rows of a run's metrics.jsonl to one of TRACKERS. Raises UserError where its
    package is missing.
    """

    def __init__(self, run: Path, name: str) -> None:
        spec = importlib.util.find_spec(name)
        # a folder of that name, such as wandb's own, is no package
        if spec is None or spec.origin is None:
            raise UserError(f"the tracker {name}: its package is not installed; pip install {name}")
        self.name, self._run = name, run
        self._session: Session | None = None
        self._looked = 0  # the checkpoint up to which this object has sent

    def send(self) -> int:
        """Send the rows up to the last checkpoint that were not sent; returns how many. Raises what
        a tracker does.
        """
        from duetgan.utils import checkpoint  # imports torch

        saved = checkpoint.newest_first(self._run / "checkpoints")
        last = checkpoint.step_of(saved[0]) if saved else 0
        if last <= self._looked:
            return 0
        state = self._run / "tracker.json"
        sent: dict[str, Sent] = {}
        with suppress(OSError, ValueError):
            sent = STATE.validate_json(bounded.read_file(state, bounded.TABLE))
        known = sent.get(self.name, Sent(id="", step=0))
        if rows := self._rows(known.step, last):
            if self._session is None:
                self._session = TRACKERS[self.name](
                    self._run, read_yaml(self._run / "config.yaml"), known.id or None
                )
            for row in rows:
                if values := {
                    k: v for k, v in row.items() if isinstance(v, int | float) and k != "step"
                }:
                    self._session.log(row["step"], values)
            sent[self.name] = Sent(id=self._session.id, step=rows[-1]["step"])
            replace_file(state, STATE.dump_json(sent))
        self._looked = last
        return len(rows)

    def _rows(self, after: int, last: int) -> list[dict[str, Any]]:
        """Those of steps after one and up to another, but for partial ones and what a crash left
        half written.
        """
        rows = []
        for line in bounded.read_file(self._run / "metrics.jsonl", bounded.TABLE).splitlines():
            with suppress(ValueError, LookupError, TypeError):
                row = json.loads(line)
                if after < row["step"] <= last and not row.get("partial"):
                    rows.append(row)
        return rows

    def close(self) -> None:
        """End the tracker's session; a later one goes on with the same run."""
        session, self._session = self._session, None
        if session is not None:
            session.close()


def main(argv: list[str]) -> None:
    parser = Parser(prog="duet track", description="Send the rows of a run to a tracker.")
    parser.add_argument("run", metavar="RUN", type=Path, help="run folder")
    parser.add_argument("--to", required=True, choices=TRACKERS, help="the tracker")
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
    except Exception as error:  # whatever a tracker raises: no network, no login, a full disk
        raise UserError(
            f"{options.to}: {error}; nothing of {options.run} is lost, give the command again"
        ) from error
    print(
        f"{count} rows of {options.run} to {options.to}"
        if count
        else f"{options.to} has all rows of {options.run}"
    )
