"""Transfer: a fresh run that starts from another run's weights (`--init-from FILE|RUN`).

What fits by name and shape is taken, network by network, and the rest is listed. Optimizers,
schedules, counters and augmentation are not taken. A resume resumes from its own checkpoint and
takes nothing.
"""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor, nn

from duetgan.models.by_class import class_parts, copy_by_name, matched
from duetgan.models.registry import DEFAULT
from duetgan.models.restore import passed_on
from duetgan.training.base.config import RunConfig
from duetgan.training.optim.ema import EMA
from duetgan.training.optim.updater import Updater
from duetgan.utils import checkpoint as checkpoints
from duetgan.utils.checkpoint.state_schema import check_tensors
from duetgan.utils.config.build import to_tree
from duetgan.utils.config.recipes import shipped_file
from duetgan.utils.distributed import collectives
from duetgan.utils.errors import UserError, explained
from duetgan.utils.image_spec import ImageSpec
from duetgan.utils.provenance import Lineage
from duetgan.utils.runlog.run_folder import RunFolder
from duetgan.utils.runlog.run_log import say
from duetgan.utils.text import listed

# parts that do not fit, or are new, that are listed for a network; the others are counted
LINES = 4

# A discriminator's lists begin at the top resolution (a generator's at 4 px), and these belong to
# the top resolution.
FROM_THE_TOP = re.compile(r"(blocks|stages)\.(\d+)\.")
AT_THE_TOP = re.compile(r"(from_rgb|to_rgb)\.")


class Donor(NamedTuple):
    """The checkpoint that a run starts from; the run's own checkpoints name it."""

    file: str
    step: int
    sha256: str
    lineage: Lineage = Lineage.of()  # what its weights have seen


@dataclass
class Fit:
    """What becomes of one network's tensors; names are our own network's, those of `unused` the
    donor's.
    """

    taken: dict[str, Tensor] = field(default_factory=dict)  # name -> the donor's tensor
    # name -> shape there, shape here
    misfits: dict[str, tuple[list[int], list[int]]] = field(default_factory=dict)
    # nothing of the donor has this name, or its layer does not fit
    new: list[str] = field(default_factory=list)
    unused: list[str] = field(default_factory=list)

    def lines(self) -> list[str]:
        parts = {"does not fit": [f"{name} {sizes(*pair)}" for name, pair in self.misfits.items()]}
        for label, names in (("stays new", self.new), ("left out", self.unused)):
            # counted by members of a list, or layers
            counts = Counter(
                m[0] if (m := re.match(r"\w+\.\d+(?=\.)", n)) else _layer(n) for n in names
            )
            parts[label] = [f"{part} ({count})" for part, count in counts.items()]
        return [f"{label}: {listed(texts, LINES)}" for label, texts in parts.items() if texts]


def sizes(there: Sequence[int], here: Sequence[int]) -> str:
    there_text, here_text = (" x ".join(map(str, shape)) or "one number" for shape in (there, here))
    return f"{there_text} there, {here_text} here"


def find_donor(config: RunConfig, folder: RunFolder) -> Donor | None:
    """The checkpoint that a fresh run starts from, read and checked; None for a resume and without
    `init_from`.

    Sets `config.init_from`: of a fresh run to the checkpoint's file, of one that goes on to what it
    was at its start, whatever is asked for now. Raises UserError for a file that is missing,
    damaged or of another task.
    """

    def find() -> tuple[str | None, Donor | None]:
        asked = config.init_from
        if checkpoints.newest_first(folder.checkpoints):
            if asked is not None:
                say(
                    f"--init-from {asked} is ignored: {folder.path} resumes from its own checkpoint"
                )
            return (folder.saved_config() or {}).get("init_from"), None
        if asked is None:
            return None, None
        path = checkpoints.resolve(shipped_file(asked))
        content = checkpoints.load(path)
        if content["task"] != config.task:
            raise UserError(
                f"--init-from {path}: is a checkpoint of task {content['task']!r}, but this run trains a "
                f"{config.task!r}; give a checkpoint of a {config.task!r}"
            )
        there, here = (
            tree.get("architecture", DEFAULT) for tree in (content["config"], to_tree(config))
        )
        if there != here:
            raise UserError(
                f"--init-from {path}: its networks are of architecture {there!r}, this run's of {here!r}; give a "
                f"checkpoint of {here!r}, or set architecture to {there!r}"
            )
        return str(path), Donor(
            str(path), content["step"], checkpoints.file_sha256(path), passed_on(content)
        )

    config.init_from, donor = collectives.from_main_process(find)
    return donor


def transfer(
    donor: Donor, registry: Mapping[str, Any], *, resolution: int | str, classes: Sequence[str]
) -> str:
    """Copy what fits of the donor's weights into the networks of `registry`, whose images have this
    resolution and `classes`; returns what was taken and what was not, for a person.

    Raises UserError when no weight of any network fits; then nothing is changed.
    """
    # find_donor has checked its checksum
    content = checkpoints.load(Path(donor.file), verify=False)
    resolutions = (ImageSpec.read(content["shape"]).side, ImageSpec.of(1, resolution).side)
    models = {
        name: part.model if isinstance(part, EMA) else part for name, part in registry.items()
    }
    networks = {
        n: m
        for n, m in models.items()
        if isinstance(m, nn.Module) and next(m.parameters(), None) is not None
    }
    fits = {}
    for name, network in networks.items():
        state = content["state"].get(name, {})
        words = "--init-from {}: its state of {!r} is not a network's ({}); give a checkpoint of train.py"
        with explained(ValueError, partial(words.format, donor.file, name)):
            check_tensors(f"state.{name}", state)
        own, theirs = network.state_dict(), content["classes"]
        for tensor, part in class_parts(network).items():
            if tensor in state:
                state[tensor] = copy_by_name(own[tensor], state[tensor], part, classes, theirs)
        fits[name] = plan(state, own, name, resolutions)
    # a matrix or a filter: numbers and biases that happen to fit are no transfer
    weights = {
        name: {n for n, p in net.named_parameters() if p.ndim > 1} for name, net in networks.items()
    }
    if not any(weights[name] & fit.taken.keys() for name, fit in fits.items()):
        misfits = (
            f"e.g. {name} {n}: {sizes(*pair)}"
            for name, fit in fits.items()
            for n, pair in fit.misfits.items()
        )
        raise UserError(
            f"--init-from {donor.file}: none of its weights fit the networks of this run "
            f"({next(misfits, 'it has no tensors of their names')}); give a checkpoint of networks of the same size, "
            "or leave --init-from out"
        )
    lines = [f"weights from {donor.file}, step {donor.step}:"]
    for name, fit in fits.items():
        own = networks[name].state_dict()
        for tensor, source in fit.taken.items():
            own[tensor].copy_(source)
        lines.append(f"  {name}: {len(fit.taken)} of {len(own)} tensors taken")
        lines += [f"    {line}" for line in fit.lines()]
    for part in registry.values():
        if isinstance(part, Updater):
            part.reset()  # a schedule-free one keeps weights of its own
    if said := matched(classes, content["classes"]):
        lines.append(f"  {said}")
    return "\n".join(lines)


def plan(
    there: Mapping[str, Tensor],
    here: Mapping[str, Tensor],
    network: str,
    resolutions: tuple[int, int],
) -> Fit:
    """What of the donor's tensors fits a network, layers whole or not at all: a bias is of no use
    without its filter. `resolutions`: the donor's and ours, by which the parts of a discriminator
    are matched.
    """
    donors = {by_resolution(name, network, resolutions[0]): name for name in there}
    sources = {
        name: donors.pop(by_resolution(name, network, resolutions[1]), None) for name in here
    }
    fit = Fit(unused=list(donors.values()))
    alike = {
        n
        for n, source in sources.items()
        if source is not None and there[source].shape == here[n].shape
    }
    broken = {_layer(name) for name in here.keys() - alike}
    for name, source in sources.items():
        if source is not None and name not in alike:
            fit.misfits[name] = (list(there[source].shape), list(here[name].shape))
        elif source is None or _layer(name) in broken:
            fit.new.append(name)
        else:
            fit.taken[name] = there[source]
    return fit


def _layer(name: str) -> str:
    """What a tensor is taken or left with; a tensor of the network itself stands alone."""
    return name.rpartition(".")[0] or name


def by_resolution(name: str, network: str, resolution: int) -> str:
    """A tensor's name with pixels instead of what depends on the network's top resolution."""
    listed, top = FROM_THE_TOP.match(name), AT_THE_TOP.match(name)
    if network == "discriminator" and listed:
        return f"{listed[1]}@{resolution >> int(listed[2])}.{name[listed.end() :]}"
    # as progressive growing names the others
    return f"{top[1]}s.{resolution}.{name[top.end() :]}" if top else name
