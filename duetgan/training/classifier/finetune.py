"""Fine-tuning of a classifier: freezing, gradual unfreezing, learning rates by stage and layer.

Everything is a function of the config and the step, so there is no state.
"""

import math
from collections.abc import Mapping
from fnmatch import fnmatchcase
from itertools import chain
from typing import Literal, TypeVar

from torch.nn.modules.batchnorm import _BatchNorm

from duetgan.models.classifier import Classifier
from duetgan.training.optim.optimizers import Group
from duetgan.utils.config.model import (
    Config,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveFraction,
    PositiveInt,
)
from duetgan.utils.errors import UserError
from duetgan.utils.text import did_you_mean

T = TypeVar("T")

BACKBONE = "backbone"  # all stages but the head


class FineTuneConfig(Config):
    """Settings that say which parameters train, and with which learning rates.

    A part is a stage (stem, layer1 ... layer4, head, or backbone for all but the head) or a pattern
    of parameter names (`layer4.*.conv?.weight`).
    """

    freeze: list[str] = []  # parts that never train; overrides unfreeze
    # {part: step or epoch at which it starts to train}; other parts never train; {}: all train
    unfreeze: dict[str, NonNegativeInt] = {}
    freeze_at: dict[str, PositiveInt] = {}  # {part: step or epoch at which it stops training}
    unfreeze_by: Literal["step", "epoch"] = "step"  # unit of unfreeze and freeze_at
    # freeze the statistics of every BatchNorm; those of frozen layers are always frozen
    freeze_bn: bool = False
    # {part: factor of the learning rate}; the last part that contains a parameter counts
    stage_lr: dict[str, PositiveFloat] = {}
    # factor of the learning rate for each layer further from the head, in addition to stage_lr
    layer_decay: PositiveFraction = 1.0
    layer_decay_by: Literal["stage", "block"] = "block"  # unit that layer_decay counts as a layer
    # GiB of memory to store outputs of frozen stages, which are then computed once; 0: compute
    # them in each step
    cache: NonNegativeFloat = 16.0
    # start with a logistic regression on the features of all images as the head (2202.10054)
    probe: bool = False

    @property
    def regrouped(self) -> bool:
        """True if some parameters never train, start later, or have another learning rate."""
        return bool(self.freeze or self.unfreeze or self.stage_lr or self.layer_decay < 1)

    @property
    def is_active(self) -> bool:
        """True if any setting differs from training all parameters with one learning rate."""
        return bool(self.regrouped or self.freeze_bn or self.freeze_at)


def plain(name: str) -> str:
    """Return a parameter's name as in torchvision, without the prefix `network.`."""
    return name.removeprefix("network.")


class FineTuning:
    """The schedule of fine-tuning: the parameters that train at each step, and learning rates.

    It consists of three dicts with parameter names as keys:

    - `begins`: the first update (from 0) that changes the parameter; None if it never trains, for
      example because the backbone freezes it.
    - `ends`: the update from which on the parameter does not train; None if it trains to the end.
    - `factors`: the factor of the parameter's learning rate.

    The `model` is not changed before `at` is called. Raises UserError for a part that matches no
    parameter, and for steps in which nothing trains.
    """

    def __init__(
        self, model: Classifier, config: FineTuneConfig, *, steps_per_epoch: float
    ) -> None:
        self.model = model
        self.config = config
        self.parameters = dict(model.named_parameters())
        self._check_parts()
        unit = steps_per_epoch if config.unfreeze_by == "epoch" else 1.0
        starts = {part: math.ceil(at * unit - 1e-9) for part, at in config.unfreeze.items()}
        stops = {part: math.ceil(at * unit - 1e-9) for part, at in config.freeze_at.items()}
        frozen = dict.fromkeys([*model.backbone.frozen, *config.freeze], True)
        self.begins: dict[str, int | None] = {}
        self.ends: dict[str, int | None] = {}
        for name in self.parameters:
            is_frozen = self._last(frozen, name, False)
            begin = self._last(starts, name, None if starts else 0)
            self.begins[name] = None if is_frozen else begin
            self.ends[name] = self._last(stops, name, None)
        for step in (0, *sorted(filter(None, self.ends.values()))):
            if not any(self.trains(name, step) for name in self.parameters):
                raise UserError(
                    f"finetune: nothing trains at step {step}; leave a part, such as head, out of "
                    "freeze and freeze_at, or let it begin at 0: unfreeze {head: 0}"
                )
        layers = model.block_of
        if config.layer_decay_by == "stage":
            layers = {name: model.stage_of(name) for name in model.block_of}
        from_head = list(reversed(dict.fromkeys(layers.values())))  # layers from the head backwards
        self.factors: dict[str, float] = {}
        for name in self.parameters:
            decay = config.layer_decay ** from_head.index(layers[name])
            self.factors[name] = self._last(config.stage_lr, name, 1.0) * decay
        # Each BatchNorm with the names of its parameters.
        self.norms: list[tuple[_BatchNorm, list[str]]] = []
        for prefix, module in model.named_modules():
            if isinstance(module, _BatchNorm):
                parameters = module.named_parameters(recurse=False)
                self.norms.append((module, [f"{prefix}.{name}" for name, _ in parameters]))

    def matches(self, part: str, name: str) -> bool:
        """Return True if `part` (see FineTuneConfig) contains the parameter `name`."""
        if part == BACKBONE:
            return self.model.stage_of(name) != "head"
        if part in self.model.stages:
            return self.model.stage_of(name) == part
        return fnmatchcase(plain(name), part) or fnmatchcase(name, part)

    def _last(self, values: Mapping[str, T], name: str, default: T) -> T:
        """Return the value of the last part in `values` that contains the parameter `name`.

        `values` is a dict from part to value. Return `default` if no part contains the parameter.
        """
        for part, value in reversed(list(values.items())):
            if self.matches(part, name):
                return value
        return default

    def _check_parts(self) -> None:
        stages = [*self.model.stages, BACKBONE]
        names = [plain(name) for name in self.parameters]
        for key in ("freeze", "unfreeze", "freeze_at", "stage_lr"):
            for part in getattr(self.config, key):
                if not any(self.matches(part, name) for name in self.parameters):
                    suggestion = did_you_mean(part, stages) or did_you_mean(part, names)
                    raise UserError(
                        f"finetune.{key}: {part!r} is neither a stage nor a parameter's name{suggestion}; stages are "
                        f"{', '.join(stages)}"
                    )

    def trains(self, name: str, step: int) -> bool:
        """Return True if update number `step` (from 0) changes the parameter `name`."""
        begin, end = self.begins[name], self.ends[name]
        return begin is not None and step >= begin and (end is None or step < end)

    def border(self, step: int) -> int:
        """Return how many stages, counted from the input, can be skipped in update number `step`.

        Training can read cached outputs of these stages, because their outputs for an image do not
        change: in them nothing trains, is random, or depends on other images of the batch.
        """
        if not self.config.is_active or self._draws():
            return 0
        if not self.config.freeze_bn and not all(names for _, names in self.norms):
            return 0  # A BatchNorm without parameters is never frozen.
        stages = self.model.stages[:-1]
        trained = {self.model.stage_of(name) for name in self.parameters if self.trains(name, step)}
        frozen = 0
        while frozen < len(stages) and stages[frozen] not in trained:
            frozen += 1
        if frozen == len(stages):
            return frozen
        if not self.model.backbone.in_turn:
            return 0
        config, used = self.model.config, 1
        if config.head == "readout":
            used = min(config.readout_stages or len(stages), len(stages))
        # The head uses the outputs of the last stages, so only those up to the first of these can
        # be skipped.
        return min(frozen, len(stages) + 1 - used)

    def _draws(self) -> bool:
        """Return True if the network has random layers: dropout or stochastic depth."""
        for module in self.model.network.modules():
            if getattr(module, "p", 0) or getattr(module, "drop_prob", 0):
                return True
        return False

    def at(self, step: int) -> None:
        """Prepare the model for update number `step`.

        Parameters that do not train get `requires_grad` False, all others True. A BatchNorm is put
        in evaluation mode, so that its statistics do not change, if all its parameters are frozen
        or if `freeze_bn` is set.
        """
        if not self.config.is_active:
            return
        for name, parameter in self.parameters.items():
            parameter.requires_grad_(self.trains(name, step))
        for norm, names in self.norms:
            is_frozen = bool(names) and not any(self.trains(name, step) for name in names)
            norm.train(not (self.config.freeze_bn or is_frozen))

    def groups(self, weight_decay: float) -> list[Group] | None:
        """Return the optimizer's parameter groups.

        All parameters of a group have the same factor of the learning rate (`lr_scale`) and the
        same first update, because an optimizer may count a group's updates. Matrices and filters
        are in groups with `weight_decay`, vectors in groups without. `params` holds pairs (name,
        parameter). Parameters that never train are in no group.

        Return None if all parameters train from the first update on with one learning rate.
        """
        if not self.config.regrouped:
            return None
        pairs: dict[tuple[float, int], tuple[Group, Group]] = {}
        for name, begin in self.begins.items():
            if begin is None:
                continue
            scale, parameter = self.factors[name], self.parameters[name]
            if (scale, begin) not in pairs:
                pairs[scale, begin] = (
                    {"params": [], "weight_decay": weight_decay, "lr_scale": scale},
                    {"params": [], "weight_decay": 0.0, "lr_scale": scale},
                )
            matrices, vectors = pairs[scale, begin]
            group = matrices if parameter.ndim > 1 else vectors
            group["params"].append((name, parameter))
        return [group for group in chain(*pairs.values()) if group["params"]]

    def describe(self) -> list[str]:
        """Return lines for the printed plan: the step from which on each part trains.

        Return [] if no setting of fine-tuning is active.
        """
        if not self.config.is_active:
            return []
        rows = []
        for begin in sorted(set(self.begins.values()), key=lambda step: (step is None, step)):
            names = [name for name in self.parameters if self.begins[name] == begin]
            stages = dict.fromkeys(map(self.model.stage_of, names))
            count = sum(self.parameters[name].numel() for name in names)
            start = "never" if begin is None else f"from step {begin}"
            rows.append(f"{start}: {', '.join(stages)} ({count:,} parameters)")
        return rows
