"""Transfer: the start of a new run from another run's weights (`--init-from FILE|RUN`).

The checkpoint with these weights is called the donor. Its tensors that fit a network of the new run
by name and shape are copied; the others are listed. Optimizers, schedules, counters and
augmentation are not copied. A resumed run loads its own checkpoint and ignores the option.

`NewImages` serves another purpose: it continues a run, with all of its state, on other images.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from duetgan.data.reading.sampler import Position
from duetgan.models.by_class import class_parts, copy_by_name, describe_match
from duetgan.models.registry import DEFAULT
from duetgan.models.restore import inherited_lineage
from duetgan.training.base.config import RunConfig
from duetgan.training.engine.loop import Loop
from duetgan.training.optim.ema import EMA
from duetgan.training.optim.updater import Updater
from duetgan.utils import checkpoint as checkpoints
from duetgan.utils.checkpoint.provenance import Lineage
from duetgan.utils.checkpoint.state_schema import check_tensors
from duetgan.utils.config.build import to_tree
from duetgan.utils.config.recipes import shipped_file
from duetgan.utils.distributed import collectives
from duetgan.utils.errors import UserError, explained, refuse
from duetgan.utils.image_spec import ImageSpec
from duetgan.utils.runlog.run_folder import RunFolder
from duetgan.utils.runlog.run_log import say
from duetgan.utils.text import listed

LINES = 4  # number of tensors that a message lists; further ones are only counted

# Module lists of a discriminator start at its highest resolution, those of a generator at 4 px.
FROM_THE_TOP = re.compile(r"(blocks|stages)\.(\d+)\.")
# layers that convert from and to RGB at the highest resolution
AT_THE_TOP = re.compile(r"(from_rgb|to_rgb)\.")

# Optimizer state -> the power of s with which it scales if weights are multiplied by s. As the
# outputs stay the same, gradients are divided by s.
POWERS = {"z": 1, "momentum_buffer": -1, "exp_avg": -1, "exp_avg_sq": -2}


@dataclass(kw_only=True)
class Fit:
    """The result of matching the tensors of a donor checkpoint with those of a network.

    The names in `unused` are the donor's; all other names are the network's.
    """

    copied: dict[str, Tensor] = field(default_factory=dict)  # name -> the donor's tensor
    misfits: list[str] = field(default_factory=list)  # have another shape in the donor
    # not in the donor, or another tensor of the layer does not fit
    new: list[str] = field(default_factory=list)
    unused: list[str]  # the donor's names

    def lines(self) -> list[str]:
        parts = {"does not fit": self.misfits, "stays new": self.new, "left out": self.unused}
        return [f"{label}: {listed(names, LINES)}" for label, names in parts.items() if names]


def find_donor(config: RunConfig, folder: RunFolder) -> dict[str, Any] | None:
    """Check the donor, the checkpoint from whose weights a new run starts.

    Sets `config.init_from`: for a new run, to the donor's file; for a resumed run, to the value
    with which the run was started.

    Returns: A dict of the donor's file, step and sha256, which the run's own checkpoints record.
    None for a resumed run, or if `init_from` is None.

    Raises UserError if the file is missing or damaged, or if its task or architecture differs from
    the run's.
    """

    def find() -> tuple[str | None, dict[str, Any] | None]:
        requested = config.init_from
        if checkpoints.newest_first(folder.checkpoints):
            if requested is not None:
                say(
                    f"--init-from {requested} is ignored: {folder.path} resumes from its own checkpoint"
                )
            return (folder.saved_config() or {}).get("init_from"), None
        if requested is None:
            return None, None
        path = checkpoints.resolve(shipped_file(requested))
        content = checkpoints.load(path)
        if content["task"] != config.task:
            raise UserError(
                f"--init-from {path}: is a checkpoint of task {content['task']!r}, but this run "
                f"trains a {config.task!r}; give a checkpoint of a {config.task!r}"
            )
        donor_architecture = content["config"].get("architecture", DEFAULT)
        architecture = to_tree(config).get("architecture", DEFAULT)
        if donor_architecture != architecture:
            raise UserError(
                f"--init-from {path}: its networks are of architecture {donor_architecture!r}, this "
                f"run's of {architecture!r}; give a checkpoint of {architecture!r}, or set "
                f"architecture to {donor_architecture!r}"
            )
        sha256 = checkpoints.file_sha256(path)
        return str(path), {"file": str(path), "step": content["step"], "sha256": sha256}

    config.init_from, donor = collectives.from_main_process(find)
    return donor


def transfer(
    file: str, registry: Mapping[str, object], *, resolution: int | str, classes: Sequence[str]
) -> tuple[str, Lineage]:
    """Copy the donor's weights into the networks of `registry`, where they fit; reset optimizers.

    A tensor fits if the network has one of the same name and shape (`plan`).

    Args:
        file: The donor's checkpoint, which `find_donor` has checked.
        registry: The task's objects by name; those that are networks, averages or optimizers count.
        resolution: The resolution of this run's images.
        classes: The class names of this run's images.

    Returns: A text for the user, which lists the tensors that were copied and that were not; and
    the lineage, the data that the donor's weights were trained on.

    Raises UserError, and changes nothing, if a network's state in the file is invalid or no weight
    of any network fits.
    """
    content = checkpoints.load(Path(file), verify=False)
    lineage = inherited_lineage(content)  # of the donor's own tensors, before any is changed
    resolutions = (ImageSpec.read(content["shape"]).side, ImageSpec.of(1, resolution).side)
    networks: dict[str, nn.Module] = {}
    for name, part in registry.items():
        model = part.model if isinstance(part, EMA) else part
        if isinstance(model, nn.Module) and next(model.parameters(), None) is not None:
            networks[name] = model
    fits = {}
    for name, network in networks.items():
        donor_state = content["state"].get(name, {})
        words = "--init-from {}: its state of {!r} is not a network's ({}); give a checkpoint of train.py"
        with explained(ValueError, partial(words.format, file, name)):
            check_tensors(f"state.{name}", donor_state)
        state = network.state_dict()
        for tensor, class_part in class_parts(network).items():
            if tensor in donor_state:
                donor_state[tensor] = copy_by_name(
                    state[tensor], donor_state[tensor], class_part, classes, content["classes"]
                )
        fits[name] = plan(donor_state, state, name, resolutions)
    # Scalars and biases may fit by chance, matrices and filters do not.
    if not any(tensor.ndim > 1 for fit in fits.values() for tensor in fit.copied.values()):
        raise UserError(
            f"--init-from {file}: none of its weights fit the networks of this run; give a "
            "checkpoint of networks of the same size, or leave --init-from out"
        )
    lines = [f"weights from {file}, step {content['step']}:"]
    for name, fit in fits.items():
        state = networks[name].state_dict()
        for tensor, source in fit.copied.items():
            state[tensor].copy_(source)
        lines.append(f"  {name}: {len(fit.copied)} of {len(state)} tensors taken")
        lines += [f"    {line}" for line in fit.lines()]
    for part in registry.values():
        if isinstance(part, Updater):
            part.reset()  # A schedule-free optimizer holds a copy of the previous weights.
    if match := describe_match(classes, content["classes"]):
        lines.append(f"  {match}")
    return "\n".join(lines), lineage


def plan(
    donor_state: Mapping[str, Tensor],
    state: Mapping[str, Tensor],
    network: str,
    resolutions: tuple[int, int],
) -> Fit:
    """Choose which tensors of a donor are to be copied into the network named `network`.

    Nothing is copied here. A layer is chosen whole or not at all, since a bias is of no use without
    its filter.

    Args:
        donor_state: The donor's state dict of this network.
        state: The network's own state dict.
        resolutions: The resolutions of the donor and of the network in px, to match the blocks of
            discriminators (`by_resolution`).
    """
    donors = {by_resolution(name, network, resolutions[0]): name for name in donor_state}
    sources = {
        name: donors.pop(by_resolution(name, network, resolutions[1]), None) for name in state
    }
    fit = Fit(unused=list(donors.values()))
    fitting = set()
    for name, source in sources.items():
        if source is not None and donor_state[source].shape == state[name].shape:
            fitting.add(name)
    broken = {_layer(name) for name in state.keys() - fitting}
    for name, source in sources.items():
        if source is not None and name not in fitting:
            fit.misfits.append(name)
        elif source is None or _layer(name) in broken:
            fit.new.append(name)
        else:
            fit.copied[name] = donor_state[source]
    return fit


def _layer(name: str) -> str:
    """Return the name of a tensor's layer; a tensor outside all layers is its own layer."""
    return name.rpartition(".")[0] or name


def by_resolution(name: str, network: str, resolution: int) -> str:
    """Return a name for a tensor that does not depend on the network's highest `resolution`.

    `name` is the tensor's name in the state dict of the network named `network`. The blocks of a
    discriminator are numbered from the highest resolution down, so their number is replaced by
    their resolution: with 64 px, `blocks.1.` becomes `blocks@32.`. The layers from and to RGB get
    their resolution too: `to_rgb.` becomes `to_rgbs.64.`. Other names do not change.
    """
    member = FROM_THE_TOP.match(name)
    if network == "discriminator" and member:
        return f"{member[1]}@{resolution >> int(member[2])}.{name[member.end() :]}"
    top = AT_THE_TOP.match(name)
    if top:  # Use the name that such a layer has with progressive growing.
        return f"{top[1]}s.{resolution}.{name[top.end() :]}"
    return name


# --- other images for a run that is resumed


class NewImages:
    """An adapter that lets a run continue on other images (`train.py --new-data`).

    `adapt` changes the content of the run's checkpoint, which is then loaded as on any resume.
    Networks, averages, optimizers, counters and ADA's strength are kept. The order of the images,
    the best evaluation and early stopping start again, because they depend on the images.
    """

    def __init__(self, loop: Loop) -> None:
        self.loop = loop
        dataset = loop.loader.dataset
        self.path = dataset.path
        # empty for an unconditional generator, even if its images have classes
        self.classes = list(dataset.classes)[: loop.task.shape["classes"]]
        self.has_label_sets = dataset.meta.sets is not None
        # Id of a network -> its initial weights of all classes, with which new classes begin.
        self.initial: dict[int, dict[str, Tensor]] = {}
        for part in loop.task.registry().values():
            model = part.model if isinstance(part, EMA) else part
            if isinstance(model, nn.Module):
                state = model.state_dict()
                self.initial[id(model)] = {
                    name: state[name].detach().clone() for name in class_parts(model)
                }

    def adapt(self, content: checkpoints.Checkpoint) -> str:
        """Change a checkpoint's content in place so that training continues with the new images.

        Weights and optimizer moments that belong to a class are matched by class name.

        Returns a message for the user. Raises UserError if images or classes do not fit the
        networks.
        """
        self._check(content)
        state = content["state"]
        if self.classes != list(content["classes"]):
            for name, part in self.loop.task.registry().items():
                model = part.model if isinstance(part, EMA) else part
                if isinstance(part, Updater):
                    self._match_moments(part, state[name]["state"], content["classes"])
                elif isinstance(model, nn.Module):
                    for key, class_part in class_parts(model).items():
                        initial = self.initial[id(model)][key]
                        state[name][key] = copy_by_name(
                            initial, state[name][key], class_part, self.classes, content["classes"]
                        )
        loader = self.loop.loader
        first = Position(batches=content["step"] * loader.batches_per_step)
        state["loader"] = loader.state_dict(first)
        state["loop"] |= {"best": {}, "stopping": {"best": None, "waited": 0}}
        message = f"step {content['step']}: continuing with other images, those of {self.path}"
        if match := describe_match(self.classes, content["classes"]):
            message += f"; {match}"
        return message

    def _check(self, content: checkpoints.Checkpoint) -> None:
        spec, expected = ImageSpec.read(self.loop.task.shape), ImageSpec.read(content["shape"])
        saved = content["classes"]
        had_label_sets = content.get("sets") or "thresholds" in content["state"].get("model", {})
        where = f"--new-data: {self.path}"
        refuse(
            (
                spec != expected,
                f"{where}: its images are of {spec}, {spec.words}, the run's networks are for {expected}, "
                f"{expected.words}; pack them alike, or set --data.resolution {expected.resolution}",
            ),
            (
                self.classes and not saved,
                f"{where}: its images have classes, the run has none; set --conditional false",
            ),
            (
                saved and set(saved).isdisjoint(self.classes),
                f"{where}: has none of the run's classes ({listed(saved)}), its own are "
                f"{listed(self.classes) or 'none'}; give images of at least one of them",
            ),
            (
                saved and self.has_label_sets != bool(had_label_sets),
                f"{where}: either its images or the run's earlier ones have several labels; pack both alike",
            ),
        )

    def _match_moments(
        self, updater: Updater, state: dict[int, dict[str, Tensor]], saved: Sequence[str]
    ) -> None:
        parts = class_parts(updater.model)
        names = {id(parameter): name for name, parameter in updater.model.named_parameters()}
        for index, parameter in enumerate(updater.parameters):
            name, moments = names[id(parameter)], state.get(index, {})
            if name not in parts:
                continue
            for key in POWERS.keys() & moments.keys():
                initial = self.initial[id(updater.model)][name]
                if key != "z":  # z is a copy of the parameter (schedule-free optimizers)
                    initial = initial.new_zeros(initial.shape)
                part = parts[name]._replace(exponent=parts[name].exponent * POWERS[key])
                moments[key] = copy_by_name(initial, moments[key], part, self.classes, saved)
