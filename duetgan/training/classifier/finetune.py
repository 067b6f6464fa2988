"""Which parts of a classifier train, when, and how fast: freezing, gradual unfreezing, rates by
stage and by layer; and the table of layers that `train.py --dry-run` shows.

Everything here is a function of the config and the step, so there is nothing to save.
"""

import math
from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.module import register_module_forward_hook

from duetgan.models.classifier import Classifier
from duetgan.training.optim.config import OptimizerConfig
from duetgan.utils.config.model import (
    Config,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Share,
)
from duetgan.utils.errors import UserError
from duetgan.utils.text import columns, did_you_mean

BACKBONE = "backbone"  # every stage but the head
HEADINGS = ("layer", "kind", "output", "parameters", "peak lr", "weight decay", "trains")


class FineTuneConfig(Config):
    """Which parameters train. A part is a stage (stem, layer1 ... layer4, head, or backbone for all
    but the head) or a pattern of parameter names (`layer4.*.conv?.weight`).
    """

    freeze: list[str] = []  # parts that never train; stronger than unfreeze
    # part -> when it begins to train; what is not named never
    unfreeze: dict[str, NonNegativeInt] = {}
    freeze_at: dict[str, PositiveInt] = {}  # part -> when it stops training for good
    unfreeze_by: Literal["step", "epoch"] = "step"  # unit of unfreeze and freeze_at
    # every BatchNorm keeps its statistics; those of frozen layers always do
    freeze_bn: bool = False
    # part -> factor of the rate; the last that fits counts
    stage_lr: dict[str, PositiveFloat] = {}
    # factor of the rate a layer further from the head, on top of stage_lr; 1: none
    layer_decay: Share = 1.0
    layer_decay_by: Literal["stage", "block"] = "block"  # what counts as a layer there
    # GiB for outputs of frozen stages, computed once: in memory or, if large, on disk; 0: in each
    # step
    cache: NonNegativeFloat = 16.0
    # the head begins as a logistic regression on the features of all images (2202.10054)
    probe: bool = False

    @property
    def regrouped(self) -> bool:
        """Whether the optimizer's groups are other than those of a training of everything at one
        rate.
        """
        return bool(self.freeze or self.unfreeze or self.stage_lr or self.layer_decay < 1)

    @property
    def watched(self) -> bool:
        """Whether what trains, or its rate, is to be set and told."""
        return bool(self.regrouped or self.freeze_bn or self.freeze_at)


def plain(name: str) -> str:
    """A parameter's name as torchvision has it."""
    return name.removeprefix("network.")


class FineTuning:
    """Which parameters of `model` train at a step.

    `begins` maps every parameter's name to the update (from 0) in which it first trains, None for
    one that never does, as those that the backbone freezes; `ends` to the one from which on it no
    longer does, None: it goes on; `factors` to what its rate is multiplied by. Nothing of the model
    is changed before `at`.

    Raises UserError for a part that names nothing, and when nothing is left to train at the first
    update.
    """

    def __init__(
        self, model: Classifier, config: FineTuneConfig, *, steps_per_epoch: float = 1.0
    ) -> None:
        self.model, self.config = model, config
        self.parameters = dict(model.named_parameters())
        self._check_parts()
        unit = steps_per_epoch if config.unfreeze_by == "epoch" else 1.0
        starts, stops = (
            {part: math.ceil(when * unit - 1e-9) for part, when in given.items()}
            for given in (config.unfreeze, config.freeze_at)
        )
        never = dict.fromkeys([*model.backbone.frozen, *config.freeze], True)
        self.begins: dict[str, int | None] = {
            name: None
            if self._last(never, name, False)
            else self._last(starts, name, None if starts else 0)
            for name in self.parameters
        }
        if (
            first := min(
                (begin for begin in self.begins.values() if begin is not None), default=None
            )
        ) is None:
            raise UserError(
                "finetune.freeze: nothing is left to train; leave a part out of it, e.g. head"
            )
        if first:
            begin = "let a part begin at 0, e.g. head: 0"
            raise UserError(f"finetune.unfreeze: nothing trains before step {first}; {begin}")
        self.ends: dict[str, int | None] = {
            name: self._last(stops, name, None) for name in self.parameters
        }
        for step in sorted(filter(None, self.ends.values())):
            if not any(self.trains(name, step) for name in self.parameters):
                raise UserError(
                    f"finetune.freeze_at: nothing trains from step {step} on; leave a part out of it"
                )
        layer = (
            model.block_of
            if config.layer_decay_by == "block"
            else {n: model.stage_of(n) for n in model.block_of}
        )
        above = list(reversed(dict.fromkeys(layer.values())))  # layers, the head first
        self.factors = {
            name: self._last(config.stage_lr, name, 1.0)
            * config.layer_decay ** above.index(layer[name])
            for name in self.parameters
        }
        self.norms = [  # each BatchNorm and the names of its parameters
            (module, [f"{prefix}.{name}" for name, _ in module.named_parameters(recurse=False)])
            for prefix, module in model.named_modules()
            if isinstance(module, _BatchNorm)
        ]

    def matches(self, part: str, name: str) -> bool:
        """Whether a part (see FineTuneConfig) holds the parameter `name`."""
        if part == BACKBONE:
            return self.model.stage_of(name) != "head"
        if part in self.model.stages:
            return self.model.stage_of(name) == part
        return fnmatchcase(plain(name), part) or fnmatchcase(name, part)

    def _last(self, values: Mapping[str, Any], name: str, otherwise: Any) -> Any:
        """The value of the last part that holds the parameter."""
        return next(
            (value for part, value in reversed(list(values.items())) if self.matches(part, name)),
            otherwise,
        )

    def _check_parts(self) -> None:
        known = [*self.model.stages, BACKBONE]
        for key in ("freeze", "unfreeze", "freeze_at", "stage_lr"):
            for part in getattr(self.config, key):
                if not any(self.matches(part, name) for name in self.parameters):
                    near = did_you_mean(part, known) or did_you_mean(
                        part, [plain(name) for name in self.parameters]
                    )
                    raise UserError(
                        f"finetune.{key}: {part!r} is neither a stage nor a parameter's name{near}; stages are "
                        f"{', '.join(known)}"
                    )

    def trains(self, name: str, step: int) -> bool:
        """Whether update number `step` (from 0) changes the parameter."""
        begin, end = self.begins[name], self.ends[name]
        return begin is not None and step >= begin and (end is None or step < end)

    def border(self, step: int) -> int:
        """How many of the first stages give the same for an image whatever update `step` does and
        comes with it.
        """
        stages = self.model.stages[:-1]
        random = any(
            getattr(m, key, 0) for m in self.model.network.modules() for key in ("p", "drop_prob")
        )
        if (
            random
            or not self.config.watched
            or not (self.config.freeze_bn or all(names for _, names in self.norms))
        ):
            return 0
        trained = {self.model.stage_of(name) for name in self.parameters if self.trains(name, step)}
        first = next((place for place, stage in enumerate(stages) if stage in trained), len(stages))
        if first == len(stages) or not self.model.backbone.in_turn:
            return first if first == len(stages) else 0
        model = self.model.config
        read = (
            min(model.readout_stages or len(stages), len(stages)) if model.head == "readout" else 1
        )
        # what the first stage that is read gives may be kept
        return min(first, len(stages) + 1 - read)

    def at(self, step: int) -> None:
        """Set the model up for update number `step`: what does not train wants no gradient, and a
        BatchNorm all of whose parameters are frozen (or any, with `freeze_bn`) is in evaluation
        mode: its statistics stay.
        """
        if not self.config.watched:
            return
        for name, parameter in self.parameters.items():
            parameter.requires_grad_(self.trains(name, step))
        for norm, names in self.norms:
            frozen = self.config.freeze_bn or (
                bool(names) and not any(self.trains(name, step) for name in names)
            )
            norm.train(not frozen)

    def groups(self, weight_decay: float) -> list[dict[str, Any]] | None:
        """The optimizer's parameter groups: for each factor of the rate and beginning (an optimizer
        may count a group's updates), matrices and filters with `weight_decay`, then norms and
        biases without; what never trains is in none. `lr_scale` is the factor; parameters come with
        names.

        None where they are those of a training of everything at one rate.
        """
        if not self.config.regrouped:
            return None
        kinds = {
            name: (self.factors[name], begin)
            for name, begin in self.begins.items()
            if begin is not None
        }
        groups = []
        for kind in dict.fromkeys(kinds.values()):
            members = [(name, self.parameters[name]) for name in kinds if kinds[name] == kind]
            for decay, some in ((weight_decay, True), (0.0, False)):
                chosen = [(name, p) for name, p in members if (p.ndim > 1) is some]
                groups.append({"params": chosen, "weight_decay": decay, "lr_scale": kind[0]})
        return [group for group in groups if group["params"]]

    def describe(self) -> list[str]:
        """What the plan says, a row each; nothing where everything trains at one rate."""
        if not self.config.watched:
            return []
        rows = []
        for begin in sorted(
            set(self.begins.values()), key=lambda begin: math.inf if begin is None else begin
        ):
            names = [name for name, other in self.begins.items() if other == begin]
            stages = dict.fromkeys(map(self.model.stage_of, names))
            count = sum(self.parameters[name].numel() for name in names)
            rows.append(
                f"{'never' if begin is None else f'from step {begin}'}: {', '.join(stages)} ({count:,} parameters)"
            )
        for end in sorted({end for end in self.ends.values() if end is not None}):
            names = [
                plain(n)
                for n, other in self.ends.items()
                if other == end and self.begins[n] is not None
            ]
            rows.append(f"until step {end}: {', '.join(names)}")
        if self.config.freeze_bn:
            rows.append("BatchNorm statistics stay as they are")
        return rows


def layer_table(
    network: nn.Module, inputs: tuple[Any, ...], finetuning: FineTuning, config: OptimizerConfig
) -> str:
    """Every layer in the order of the forward pass: output shape, parameters, rate at the peak,
    weight decay, and from which update it trains. `network` is in evaluation mode, its parameters
    named as those of `finetuning`.
    """
    names = {
        module: prefix for prefix, module in network.named_modules() if not list(module.children())
    }
    shapes: dict[nn.Module, str] = {}  # in the order of the forward pass

    def note(module: nn.Module, _inputs: Any, output: Tensor) -> None:
        if module in names:
            shapes.setdefault(module, " x ".join(map(str, output.shape)))

    with register_module_forward_hook(note), torch.no_grad():
        network(*inputs)
    rows = [
        _layer_row(names[module], shape, module, finetuning, config)
        for module, shape in shapes.items()
    ]
    ever = sum(
        p.numel()
        for name, p in finetuning.parameters.items()
        if finetuning.begins[name] is not None
    )
    total = sum(p.numel() for p in finetuning.parameters.values())
    totals = (("Total", total), ("Trainable", ever), ("Non-trainable", total - ever))
    return "\n".join(
        [
            columns([HEADINGS, *rows], "<"),
            *(f"{label} params: {count:,}" for label, count in totals),
        ]
    )


def _layer_row(
    prefix: str, shape: str, module: nn.Module, finetuning: FineTuning, config: OptimizerConfig
) -> tuple[str, ...]:
    """Values that differ between a layer's parameters, one for each, in their order."""
    names = {f"{prefix}.{name}": p for name, p in module.named_parameters(recurse=False)}
    kind = type(module).__name__
    if not names:
        return plain(prefix), kind, shape, "", "", "", ""
    cells = []
    for name, parameter in names.items():
        begin = finetuning.begins[name]
        rate, decay = (
            config.lr * finetuning.factors[name],
            config.weight_decay if parameter.ndim > 1 else 0,
        )
        trains = "no" if begin is None else f"from step {begin}" if begin else "yes"
        end = finetuning.ends[name]
        trains += "" if begin is None or end is None else f", until step {end}"
        trains += ", statistics kept" * (
            finetuning.config.freeze_bn and isinstance(module, _BatchNorm)
        )
        cells.append(("-", "-", trains) if begin is None else (f"{rate:.3g}", f"{decay:g}", trains))
    count = f"{sum(p.numel() for p in names.values()):,}"
    return (
        plain(prefix),
        kind,
        shape,
        count,
        *("/".join(dict.fromkeys(column)) for column in zip(*cells, strict=True)),
    )
