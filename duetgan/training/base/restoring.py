"""Restore the image history and the states of a checkpoint, with checks.

The checks: the run's present images are those on which the checkpoint was trained, and each saved
state fits its object.
"""

from collections.abc import Callable, Mapping
from textwrap import shorten
from typing import Any

from torch import Tensor, nn

from duetgan.data.lmdb.format import Meta
from duetgan.training.base.task import Stateful
from duetgan.utils.checkpoint import Checkpoint
from duetgan.utils.checkpoint.provenance import TrainedOn, data_history
from duetgan.utils.checkpoint.state_schema import FAULTS, check_tensors
from duetgan.utils.errors import UserError
from duetgan.utils.runlog.run_folder import RunFolder
from duetgan.utils.runlog.run_log import say_main


class ImageHistory:
    """The list of the sets of images that a run was trained on, in order (`periods`).

    `path` and `meta` describe the last one, on which the run trains now.
    """

    def __init__(self, path: str, meta: Meta) -> None:
        self.path = path
        self.meta = meta
        self.periods = [self._present(0)]  # The present images are last.
        # Changes a checkpoint of other images so that the run continues with the present ones.
        self.adapt: Callable[[Checkpoint], str] | None = None
        self.new_data = False  # False: a checkpoint of other images is refused

    def _present(self, step: int) -> TrainedOn:
        meta = self.meta
        return TrainedOn(
            step=step, content_hash=meta.content_hash, count=meta.count, path=self.path
        )

    def document(self) -> dict[str, object]:
        """Return the content of the entry `data` of a checkpoint."""
        return {
            "content_hash": self.meta.content_hash,
            "count": self.meta.count,
            "resize_filter": self.meta.resize_filter,
            "history": [images.model_dump() for images in self.periods],
        }

    def restore(self, content: Checkpoint, folder: RunFolder) -> None:
        """Take over the list in `content`, which is a checkpoint of the run in `folder`.

        If the checkpoint was trained on other images than the present ones, `adapt` changes
        `content`, and the present images are appended to the list. If `adapt` is None or
        `new_data` is False, UserError is raised instead.
        """
        self.periods = data_history(content)
        earlier = self.periods[-1]
        if earlier.content_hash != self.meta.content_hash:
            if self.adapt is None or not self.new_data:
                raise UserError(
                    f"{folder.path}: was trained on other images ({earlier.count} then, "
                    f"{self.meta.count} in {self.path} now); set data.path to its images, add "
                    "--new-data to continue with these, or choose another --run-dir"
                )
            say_main(self.adapt(content))
            self.periods.append(self._present(content["step"]))
        # A later roll-back may reach a checkpoint of the earlier images.
        self.new_data |= len(self.periods) > 1


def load_states(registry: Mapping[str, Stateful], states: Mapping[str, Any], path: str) -> None:
    """Check the states of a checkpoint, then load them into the objects of `registry`.

    An object with a true attribute `optional` may have no state. Raises UserError if a state does
    not fit. The message has the file's `path` and the object's name.
    """
    parts = {
        name: part
        for name, part in registry.items()
        if name in states or not getattr(part, "optional", False)
    }
    name = ""
    try:
        for name, part in parts.items():
            _check_part(f"state.{name}", part, states[name])
        for name, part in parts.items():
            part.load_state_dict(states[name])
    except UserError:
        raise
    except FAULTS as error:
        # The text of a LookupError is only the key.
        kind = type(error).__name__ if isinstance(error, LookupError) else ""
        problem = shorten(" ".join(f"{kind} {error}".split()), 160)
        raise UserError(
            f"{path}: the state of {name!r} does not fit ({problem}); data.resolution or another "
            "setting of the networks has changed, or the file is damaged: restore the run's settings, "
            "or choose another --run-dir"
        ) from error


def _check_part(name: str, part: Stateful, state: object) -> None:
    """Check the saved tensors of a network. Other objects check their state as they load it."""
    current = part.state_dict()
    is_network = isinstance(getattr(part, "model", part), nn.Module)
    if is_network and current and all(isinstance(value, Tensor) for value in current.values()):
        check_tensors(name, state, current)
