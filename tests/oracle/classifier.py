"""A classifier's training step in float64: plain autograd on the task's own network, the whole batch at once.

The draws of mixup and CutMix are inputs; what trains at which rate, the loss, the update and the average are written
out here.
"""

import copy
import math
from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from duetgan.data.augment.transforms import Augment, draw_and_apply, draw_mixing
from duetgan.utils.seeding import numpy_generator
from tests.oracle.gan import label_frequencies
from tests.oracle.optimizer import Optimizer, in_updates

DEFAULTS: dict[str, dict[str, Any]] = {
    "finetune": {
        **{"freeze": [], "unfreeze": {}, "freeze_at": {}, "unfreeze_by": "step", "freeze_bn": False, "stage_lr": {}},
        **{"layer_decay": 1.0, "layer_decay_by": "block"},
    },
    "loss": {
        "kind": "cross-entropy",
        "label_smoothing": 0.1,
        "label_smoothing_final": None,
        "focal_gamma": 2.0,
        "gce_q": 0.7,
        "class_weights": None,
        "logit_adjustment": 0.0,
        "teacher": None,
        "teacher_share": 1.0,
        "temperature": 2.0,
    },
    "ema": {"decay": 0.999},
    "augment": {"mixup": 0.0, "cutmix": 0.0},
    "optimizer": {"name": "sgd", "lr": 0.1, "weight_decay": 5e-4, "warmup_steps": 200, "schedule": "cosine"},
    "unlabelled": {"path": None, "ratio": 4, "spread": 0.0, "weight": 1.0, "threshold": 0.95, "adaptive": True},
}


class ClassifierReference:
    """The network of a task that has not trained yet, and all state of its training, apart from the task."""

    def __init__(self, task: Any, tree: Mapping[str, Any]) -> None:
        tree = in_updates(tree, len(task.dataset), tree["batch_size"])
        self.tree = {name: given | tree.get(name, {}) for name, given in DEFAULTS.items()}
        self.batch, self.seed, self.augment = tree["batch_size"], tree["seed"], task.config.augment
        self.steps = tree["steps"]
        self.synthetic_weight = tree["data"].get("synthetic", {}).get("weight", 1.0)
        self.model, self.average = copy.deepcopy(task.model), copy.deepcopy(task.ema.model)
        epoch = len(task.dataset) / self.batch if self.tree["finetune"]["unfreeze_by"] == "epoch" else 1
        self.names = dict(self.model.named_parameters())
        given = self.tree["finetune"]
        starts, ends = ({part: math.ceil(when * epoch) for part, when in given[key].items()}
                        for key in ("unfreeze", "freeze_at"))  # fmt: skip
        self.span = {
            name: (
                math.inf if self.last(dict.fromkeys(given["freeze"], True), name, False)
                else self.last(starts, name, math.inf if starts else 0),
                self.last(ends, name, math.inf),
            )
            for name in self.names
        }  # fmt: skip
        head = frozenset(name for name in self.names if self.model.stage_of(name) == "head")
        self.optimizer = Optimizer(self.names, self.tree["optimizer"], tree["steps"], self.batch, self.factors(), head)
        self.teacher: Any = task.criterion.teacher
        frequencies = torch.tensor(label_frequencies(task.dataset, tree["data"]))
        self.prior = (frequencies / frequencies.max()).log()
        unlabelled = getattr(task, "unlabelled", None)
        self.unlabelled: Any = None if unlabelled is None else unlabelled.images
        self.said: Any = None if unlabelled is None else unlabelled.propagated_labels
        self.thought = torch.full((self.model.classes + 1,), 1 / self.model.classes)
        self.weights = self.class_weights(task.dataset.classes, frequencies)
        self.metrics: dict[str, Tensor] = {}

    def last(self, parts: Mapping[str, Any], name: str, otherwise: Any) -> Any:
        """The value of the last part (a stage, `backbone`, or a pattern) that holds a parameter."""
        stage, plain = self.model.stage_of(name), name.removeprefix("network.")
        for part, value in parts.items():
            if part == stage or (part == "backbone" and stage != "head") or fnmatchcase(plain, part):
                otherwise = value
        return otherwise

    def factors(self) -> dict[str, float]:
        """Of the rate: a stage's own, and `layer_decay` for every layer further from the head."""
        given, layer = self.tree["finetune"], self.model.block_of
        if given["layer_decay_by"] == "stage":
            layer = {name: self.model.stage_of(name) for name in layer}
        depth = {each: number for number, each in enumerate(reversed(dict.fromkeys(layer.values())))}
        return {n: self.last(given["stage_lr"], n, 1.0) * given["layer_decay"] ** depth[layer[n]] for n in self.names}

    def class_weights(self, classes: list[str], frequencies: Tensor) -> Tensor:
        """Of each class, with mean 1 over the images that are seen."""
        given = self.tree["loss"]["class_weights"] or {}
        if given == "balanced":
            weights = 1 / frequencies
        else:
            weights = torch.tensor([given.get(name, 1.0) for name in classes])
        return weights / ((weights * frequencies).sum() / frequencies.sum())

    def state(self) -> dict[str, Tensor]:
        """What a step changes, by name; see `test_classifier.state`."""
        networks = {"model": self.model, "average": self.average}
        named = {f"{n}.{key}": value for n, network in networks.items() for key, value in network.state_dict().items()}
        return named | {f"metric {name}": value.detach() for name, value in self.metrics.items()}

    def step(self, batch: Any, step: int) -> None:
        """One update, and the average's."""
        trained = [name for name, (begin, end) in self.span.items() if begin <= step < end]
        for prefix, module in self.model.named_modules():
            if isinstance(module, nn.BatchNorm2d):  # statistics of frozen ones stay
                own = [f"{prefix}.{name}" for name, _ in module.named_parameters()]
                frozen = self.tree["finetune"]["freeze_bn"] or not set(own) & set(trained)
                module.train(not frozen)
        self.metrics = {}
        total = self.loss(batch, step)
        gradients = torch.autograd.grad(total, [self.names[name] for name in trained])
        norm = torch.cat([gradient.flatten() for gradient in gradients]).norm()
        zeros = {f"{kind}_updates/classifier": torch.zeros([]) for kind in ("skipped", "nonfinite")}
        self.metrics |= {"loss/classifier": total, "gradient_norm/classifier": norm} | zeros
        self.optimizer.update(step, dict(zip(trained, gradients, strict=True)))
        decay = min(self.tree["ema"]["decay"], (1 + step) / (10 + step))
        with torch.no_grad():
            for mine, theirs in zip(self.average.state_dict().values(), self.model.state_dict().values(), strict=True):
                mine.copy_(decay * mine + (1 - decay) * theirs if mine.is_floating_point() else theirs)

    def loss(self, batch: Any, step: int) -> Tensor:
        drawn_as: Any = {"seed": self.seed, "step": step, "start": 0, "global_batch": self.batch}
        images = draw_and_apply(batch.images, self.augment, **drawn_as).to(torch.get_default_dtype()) / 127.5 - 1
        labels = batch.labels
        targets = F.one_hot(labels, self.model.classes).to(images)
        pairs: list[tuple[Any, Tensor]] = [(1.0, targets)]  # each label by its share
        counted = torch.ones(len(images))
        if batch.synthetic is not None:
            counted = torch.where(batch.synthetic, self.synthetic_weight, 1.0).to(images)
        if self.tree["augment"]["mixup"] or self.tree["augment"]["cutmix"]:
            size = (images.shape[2], images.shape[3])
            how: Any = {"seed": self.seed, "step": step, "start": 0, "count": len(images), "global_batch": self.batch}
            drawn = draw_mixing(self.augment, size=size, device=images.device, **how)
            pair = torch.arange(len(images)) ^ 1  # rows 2k and 2k + 1
            share = drawn.label_weights.to(images)
            mixed = []
            for row, is_pasted in enumerate(drawn.is_pasted):
                blend = 1.0 if drawn.blend is None else float(drawn.blend[row])
                image = blend * images[row] + (1 - blend) * images[pair[row]]
                mixed.append(torch.where(is_pasted, images[pair[row]], image))
            images = torch.stack(mixed)
            pairs = [(share, targets), (1 - share, targets[pair])]
            counted = share * counted + (1 - share) * counted[pair]
        if self.unlabelled is not None and self.tree["unlabelled"]["weight"]:
            more, named, used = self.sure_of(step)
            images, pairs = torch.cat([images, more]), [(1.0, torch.cat([targets, named]))]
            counted = torch.cat([counted, used])
        given = self.tree["loss"]
        smoothing, end = given["label_smoothing"], given["label_smoothing_final"]
        if end is not None:
            smoothing = end + (smoothing - end) * (1 + math.cos(math.pi * step / self.steps)) / 2
        logits = plain = self.model(images)
        chosen = plain[: len(labels)].argmax(1)  # counts as right by its part of the label
        right = (part * label[torch.arange(len(labels)), chosen] for part, label in pairs)
        self.metrics["accuracy/train"] = sum(right).mean()
        prior = self.tree["loss"]["logit_adjustment"] * self.prior
        logits = plain + prior
        losses, weight = torch.zeros(len(images)), torch.zeros(len(images))
        for part, label in pairs:
            smooth = (1 - smoothing) * label + smoothing * prior.softmax(0)
            p = logits.softmax(1)
            if given["kind"] == "squared-error":
                loss = ((plain - smooth) ** 2).mean(1)
            elif given["kind"] == "focal":
                loss = -(smooth * (1 - p) ** given["focal_gamma"] * p.log()).sum(1)
            elif given["kind"] == "generalised-cross-entropy":
                loss = (smooth * (1 - p ** given["gce_q"])).sum(1) / given["gce_q"]
            else:
                loss = -(smooth * logits.log_softmax(1)).sum(1)
            losses = losses + part * (label @ self.weights) * loss
            weight = weight + part * (label @ self.weights)
        if self.teacher is not None:
            given = self.tree["loss"]
            told, own = ((each / given["temperature"]).softmax(1) for each in (self.teacher(images).detach(), plain))
            taught = given["temperature"] ** 2 * (told * (told / own).log()).sum(1)
            losses = (1 - given["teacher_share"]) * losses + given["teacher_share"] * weight * taught
        return (counted * losses).sum() / self.batch

    def sure_of(self, step: int) -> tuple[Tensor, Tensor, Tensor]:
        """FixMatch with FreeMatch's thresholds: images under strong augmentation, what the average says of them under
        weak one, and what each counts.
        """
        given, count = self.tree["unlabelled"], len(self.unlabelled)
        size = self.batch * given["ratio"]
        places = [divmod(place, count) for place in range(step * size, (step + 1) * size)]
        orders = {e: numpy_generator(self.seed, "unlabelled", "order", e).permutation(count) for e, _ in places}
        records = [int(orders[epoch][place]) for epoch, place in places]
        images = torch.from_numpy(self.unlabelled.read(records)[0])
        how: Any = {"seed": self.seed, "step": step, "start": 0, "global_batch": size}
        weakly = Augment(flip=bool(self.augment.flip), shift=self.augment.shift, shift_edge=self.augment.shift_edge)
        strongly = weakly.changed(trivial_augment=True, erase=1.0)
        weak, strong = (
            draw_and_apply(images, augment, phase=phase, **how).to(torch.get_default_dtype()) / 127.5 - 1
            for augment, phase in ((weakly, "weak"), (strongly, "strong"))
        )
        with torch.no_grad():
            p = self.average.eval()(weak).softmax(1)
        if given["spread"]:
            p = (1 - given["spread"]) * p + given["spread"] * self.said[records]
        least = torch.full((self.model.classes,), given["threshold"])
        if given["adaptive"]:
            now = torch.tensor([*p.mean(0).tolist(), p.amax(1).mean().item()])
            self.thought = 0.99 * self.thought + 0.01 * now
            least = given["threshold"] * self.thought[-1] * self.thought[:-1] / self.thought[:-1].max()
        named = F.one_hot(p.argmax(1), self.model.classes).to(p)
        used = p.amax(1) >= named @ least
        self.metrics["unlabelled/used"] = used.to(p).mean()
        return strong, named, used * given["weight"] / given["ratio"]
