"""A GAN's training step in float64, from the papers' formulas: the oracle of the task's joints.

Plain autograd on the task's own networks, one process, the whole batch at once. The draws (docs/randomness.md) and what
adaptive augmentation does to an image at a given strength are inputs; everything between them is written out here.
"""

import copy
from collections.abc import Iterator, Mapping
from itertools import combinations, count
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from duetgan.data.augment.transforms import Augment, draw_and_apply
from duetgan.models.layers import upsample_fir
from duetgan.models.preparation import fit_images
from duetgan.training.gan.ada import Ada, AdaConfig
from duetgan.training.gan.draws import GanDraws
from tests.oracle.optimizer import Optimizer, half_cosine, in_updates

DEFAULTS: dict[str, dict[str, Any]] = {
    "loss": {
        **{"objective": "nonsaturating", "r1_gamma": 1.0, "r2_gamma": 0.0, "gamma_final": None, "r1_interval": 16},
        **{"gradient_penalty_weight": 0.0, "style_mixing": 0.9, "mismatch_weight": 0.0, "path_length_weight": 0.0},
        **{"path_length_interval": 4, "path_length_decay": 0.01, "classifier_weight": 1.0, "auxiliary_weight": 0.0},
        **{"same_pairs": False, "auxiliary_fakes": False, "feature_matching_weight": 0.0, "feature_matching_group": 8},
        "gradients_every": 0,
    },
    "ema": {"ema_kimg": None, "ema_kimg_start": None, "ema_rampup": 0.05},
    "ada": {"mode": "off", "p": 0.0, "p_final": 0.0, "target": 0.6, "kimg": None, "interval": 4},
    "generator_optimizer": {"name": "adam", "lr": 0.0025, "betas": [0.0, 0.99]},
    "discriminator_optimizer": {"name": "adam", "lr": 0.0025, "betas": [0.0, 0.99]},
    "progressive": {"start": None, "fade_kimg": 600, "stable_kimg": 600, "batch_sizes": {}, "reset_optimizer": True},
}
R3_ADAM = {"lr": 2e-4, "betas": [0.0, 0.9], "beta2_final": 0.99, "schedule": "cosine", "final_lr": 0.25}
DCGAN_ADAM = {"lr": 2e-4, "betas": [0.5, 0.999]}
RECIPES: dict[str, dict[str, dict[str, Any]]] = {  # what an architecture changes of the defaults
    "r3gan": {
        "loss": {"objective": "relativistic", "r2_gamma": 1.0, "r1_interval": 1, "style_mixing": 0.0},
        **{"generator_optimizer": R3_ADAM, "discriminator_optimizer": R3_ADAM},
    },
    "dcgan": {
        "loss": {"objective": "hinge", "r1_gamma": 0.0, "style_mixing": 0.0},
        **{"generator_optimizer": DCGAN_ADAM, "discriminator_optimizer": DCGAN_ADAM},
    },
}
LOSSES: dict[str, Any] = {  # objective -> (the generator's, the discriminator's) of samples' logits f and images' r
    "nonsaturating": (lambda f, r: F.softplus(-f), lambda f, r: F.softplus(-r) + F.softplus(f)),  # 1406.2661
    "relativistic": (lambda f, r: F.softplus(r - f), lambda f, r: F.softplus(f - r)),  # 1807.00734
    "hinge": (lambda f, r: -f, lambda f, r: (1 - r).clamp(min=0) + (1 + f).clamp(min=0)),  # 1705.02894
    "wasserstein": (lambda f, r: -f, lambda f, r: f - r),  # 1701.07875
}
FAKE: dict[str, Any] = {  # the discriminator's of samples alone
    **{"nonsaturating": F.softplus, "hinge": lambda f: (1 + f).clamp(min=0), "wasserstein": lambda f: f},
}


def label_frequencies(dataset: Any, data: Mapping[str, Any]) -> list[float]:
    """How often each label is seen in training, relative to the others."""
    counts = np.bincount(dataset.label_numbers()).astype(float)
    rates = [data.get("class_rates", {}).get(name, 1.0) for name in dataset.classes]
    seen = np.ones(len(counts)) if data.get("sampling") == "balanced" else counts
    seen = seen * rates if "class_rates" in data else seen
    if "synthetic" in data:
        share, drawn = data["synthetic"]["share"], np.bincount(dataset.synthetic.label_numbers())
        seen = (1 - share) * seen / seen.sum() + share * drawn / drawn.sum()
    return list(seen)


class Stage(NamedTuple):
    """What a step trains."""

    side: int  # px
    alpha: float
    batch: int
    seen: int  # images before the step
    begins: bool  # the first step of a stage after the first


class GanReference:
    """The networks of a task that has not trained yet, and all state of its training, apart from the task."""

    def __init__(self, task: Any, tree: Mapping[str, Any]) -> None:
        tree = in_updates(tree, len(task.dataset), tree["batch_size"])
        recipe = RECIPES.get(tree.get("architecture", ""), {})
        self.tree = {name: DEFAULTS[name] | recipe.get(name, {}) | tree.get(name, {}) for name in DEFAULTS}
        self.loss, self.seed, self.steps = self.tree["loss"], tree["seed"], tree["steps"]
        self.transfer = "init_from" in tree
        self.batch, self.full = tree["batch_size"], task.shape["resolution"]
        self.g, self.d = copy.deepcopy(task.generator), copy.deepcopy(task.discriminator)
        self.average, self.teacher = copy.deepcopy(task.ema.model), copy.deepcopy(task.teacher)
        self.sets, self.names = task.dataset.meta.sets, list(task.dataset.classes)
        self.path_mean = torch.zeros([])
        self.p, self.signs, self.counted = float(self.tree["ada"]["p"]), 0.0, 0
        kimg = tree.get("schedule_kimg")
        self.over = self.stage(self.steps).seen if kimg is None else kimg * 1000
        length = self.steps
        if kimg is not None:
            length = next(step for step in count() if self.stage(step).seen + self.stage(step).batch / 2 > self.over)
        self.g_optimizer, self.d_optimizer = (
            Optimizer(dict(network.named_parameters()), self.tree[f"{name}_optimizer"], length, self.batch)
            for name, network in (("generator", self.g), ("discriminator", self.d))
        )
        device, frequencies = torch.device("cpu"), label_frequencies(task.dataset, tree.get("data", {}))
        self.draws = GanDraws(self.seed, device, frequencies)
        self.augment = Augment(**tree.get("augment", {}))
        ada = AdaConfig(**tree.get("ada", {}))
        self.ada = Ada(ada, seed=self.seed, channels=1, device=device, schedule_images=1, alpha=False, transfer=False)
        self.metrics: dict[str, Tensor] = {}

    def stage(self, step: int) -> Stage:
        """Stages one after the other: each takes whole batches until its images are seen; alpha rises over the fade."""
        given = self.tree["progressive"]
        first, seen, side = 0, 0, given["start"] or self.full
        while True:
            batch = given["batch_sizes"].get(side, self.batch)
            fade = 0 if side == (given["start"] or self.full) else round(given["fade_kimg"] * 1000)
            length = -(-(fade + round(given["stable_kimg"] * 1000)) // batch)
            if side == self.full or step < first + length:
                own = (step - first) * batch
                alpha = 1.0 if own >= fade else own / fade
                return Stage(side, alpha, batch, seen + own, first > 0 and step == first)
            first, seen, side = first + length, seen + length * batch, side * 2

    # --- labels

    def asked(self, labels: Tensor) -> Tensor:
        """Several labels an image: 1 for every class of its set, one by one."""
        if self.sets is None:
            return labels
        rows = [[float(place in self.sets[label]) for place in range(len(self.names))] for label in labels.tolist()]
        return torch.tensor(rows)

    def naming(self, logits: Tensor, labels: Tensor) -> Tensor:
        """-log of the class's probability; of several labels -log of each decision's, their mean."""
        if self.sets is None:
            return F.cross_entropy(logits, labels)
        right = torch.where(self.asked(labels) == 1, logits.sigmoid(), 1 - logits.sigmoid())
        return -right.log().mean(1).mean()

    def accuracy(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Images whose class has the largest logit; of several labels the decisions that are right."""
        if self.sets is None:
            return (logits.argmax(1) == labels).to(logits).mean()
        return ((logits > 0) == (self.asked(labels) == 1)).to(logits).mean()

    # --- what both players do

    def sample(self, step: int, phase: str, count: int, labels: Tensor | None = None) -> tuple[Tensor, ...]:
        """Samples, their labels, their ws and the first style's w (of a generator without styles: z)."""
        styled = self.g.has_styles
        layers = self.g.num_ws if styled else 0
        mixing = self.loss["style_mixing"] if styled else 0.0
        drawn = self.draws.latents(step, phase, count, self.g.z_dim, mixing=mixing, num_ws=layers)
        noise = self.draws.noise(step, phase, count, self.g.noise_shapes())
        labels = drawn.labels if labels is None else labels
        asked = self.asked(labels) if self.g.classes else None
        if not styled:
            return self.g(drawn.z, asked, noise=noise), labels, drawn.z, drawn.z
        w = self.g.mapping(drawn.z, asked)
        ws = [w] * layers
        if drawn.z_mixed is not None and drawn.crossover is not None:  # the second style from that layer on
            other = self.g.mapping(drawn.z_mixed, asked)
            ws = [torch.where((layer < drawn.crossover)[:, None], w, other) for layer in range(layers)]
        stacked = torch.stack(ws, 1)
        return self.g.synthesis(stacked, noise), labels, stacked, w

    def hidden(self, images: Tensor, step: int, key: str) -> Tensor:
        """The discriminator's last hidden activations of augmented images."""
        if self.tree["ada"]["mode"] != "off":
            self.ada.p = torch.tensor(self.p)
            images = self.ada.apply(
                images, self.ada.draw(step, key, images.shape[2:], len(images)), slice(0, len(images))
            )
        return self.d.hidden(images)

    def logits(self, hidden: Tensor, labels: Tensor) -> Tensor:
        return self.d.project(self.d.output(hidden), self.asked(labels))

    def reals(self, batch: Any, step: int, phase: str | None = None) -> tuple[Tensor, Tensor]:
        """Images in [-1, 1], blended with those of the stage before while a stage fades in (1710.10196, A.1)."""
        stage = self.stage(step)
        key: Any = {"seed": self.seed, "step": step, "start": 0, "phase": phase, "global_batch": stage.batch}
        pixels, alpha = draw_and_apply(batch.images, self.augment, **key), stage.alpha
        images = pixels.to(torch.get_default_dtype()) / 127.5 - 1
        if alpha < 1:
            images = (1 - alpha) * upsample_fir(F.avg_pool2d(images, 2)) + alpha * images
        return images, batch.labels

    def state(self) -> dict[str, Tensor]:
        """What a step changes, by name; see `test_gan.state`."""
        networks = {"generator": self.g, "discriminator": self.d, "average": self.average}
        named = {f"{n}.{key}": value for n, network in networks.items() for key, value in network.state_dict().items()}
        metrics = {f"metric {name}": value.detach() for name, value in self.metrics.items()}
        return named | {"path_length": self.path_mean, "p": torch.tensor(self.p)} | metrics

    # --- a step

    def step(self, batches: Iterator[Any], step: int) -> None:
        """The generator's update, its averages, the discriminator's update, and ADA's."""
        loss, stage = self.loss, self.stage(step)
        self.metrics = {}
        if self.tree["progressive"]["start"]:
            for network in (self.g, self.d, self.average):
                network.enter(stage.side, stage.alpha)
        if stage.begins and self.tree["progressive"]["reset_optimizer"]:
            self.g_optimizer.reset()
            self.d_optimizer.reset()
        reals = self.reals(next(batches), step)
        paired = loss["objective"] == "relativistic"
        fakes, labels, _, w = self.sample(step, "generator", stage.batch, reals[1] if paired else None)
        terms = self.generator_terms(step, fakes, labels, reals)
        if loss["path_length_weight"] and step % loss["path_length_interval"] == 0:
            gain = loss["path_length_weight"] * loss["path_length_interval"]
            terms["path_length"] = gain * self.path_penalty(step)
        if loss["gradients_every"] and step % loss["gradients_every"] == 0:
            self.compare_gradients(terms)
        self.update("generator", step, self.gradients(sum(terms.values(), torch.zeros([])), self.g))
        with torch.no_grad():
            if self.g.has_styles:
                self.g.w_avg.lerp_(w.mean(0), 1 - 0.995)
            self.follow(step)
        fakes = fakes.detach()
        if paired and not loss["same_pairs"]:  # pairs of D's own, with the labels of their images
            reals = self.reals(next(batches), step, "discriminator")
            labels = reals[1]
            fakes = self.sample(step, "discriminator", stage.batch, labels)[0].detach()
        total, signs = self.discriminator_loss(step, fakes, labels, *reals)
        self.update("discriminator", step, self.gradients(total, self.d))
        self.d.after_update()
        self.adapt(step, signs)

    @staticmethod
    def gradients(total: Tensor, network: torch.nn.Module) -> dict[str, Tensor | None]:
        named = dict(network.named_parameters())
        found = torch.autograd.grad(total, list(named.values()), allow_unused=True, retain_graph=True)
        return dict(zip(named, found, strict=True))

    def update(self, name: str, step: int, gradients: dict[str, Tensor | None]) -> None:
        norm = torch.cat([g.flatten() for g in gradients.values() if g is not None]).norm()
        zeros = {f"{kind}_updates/{name}": torch.zeros([]) for kind in ("skipped", "nonfinite")}
        self.metrics |= {f"gradient_norm/{name}": norm} | zeros
        {"generator": self.g_optimizer, "discriminator": self.d_optimizer}[name].update(step, gradients)

    def compare_gradients(self, terms: Mapping[str, Tensor]) -> None:
        """The norm of each weighted loss's gradient, and the cosine between each two."""
        flat: dict[str, Tensor] = {}
        for name, value in terms.items():
            pairs = zip(self.gradients(value, self.g).values(), self.g.parameters(), strict=True)
            flat[name] = torch.cat([(0 * p if g is None else g).flatten() for g, p in pairs])
            self.metrics[f"gradient_norm/generator/{name}"] = flat[name].norm()
        for a, b in combinations(flat, 2):
            cosine = F.cosine_similarity(flat[a], flat[b], dim=0)
            self.metrics[f"gradient_cosine/generator/{a}~{b}"] = cosine

    def generator_terms(
        self, step: int, fakes: Tensor, labels: Tensor, reals: tuple[Tensor, Tensor]
    ) -> dict[str, Tensor]:
        """The generator's losses by name, weighted."""
        loss = self.loss
        hidden = self.hidden(fakes, step, "generator")
        with torch.no_grad():
            real_hidden = self.hidden(reals[0], step, "generator/real")
            partners = self.logits(real_hidden, reals[1])
        adversarial = LOSSES[loss["objective"]][0](self.logits(hidden, labels), partners).mean()
        terms = {"adversarial": adversarial}
        self.metrics["loss/generator"] = adversarial
        if self.teacher is not None and loss["classifier_weight"]:
            seen = fit_images(fakes, self.teacher.network.resolution, self.teacher.network.channels)
            self.metrics["loss/classifier"] = self.naming(self.teacher.network(seen), labels)
            terms["classifier"] = loss["classifier_weight"] * self.metrics["loss/classifier"]
        if loss["auxiliary_weight"]:
            self.metrics["loss/auxiliary"] = self.naming(self.d.auxiliary(hidden), labels)
            terms["auxiliary"] = loss["auxiliary_weight"] * self.metrics["loss/auxiliary"]
        if loss["feature_matching_weight"]:  # |E f(G) - E f(x)|^2 without bias: pairs of different samples of a group
            groups = (hidden - real_hidden).split(loss["feature_matching_group"])
            products = [group @ group.T for group in groups]
            means = [(p.sum() - p.diagonal().sum()) / (len(p) * (len(p) - 1)) for p in products]
            self.metrics["loss/feature_matching"] = torch.stack(means).mean()
            terms["feature_matching"] = loss["feature_matching_weight"] * self.metrics["loss/feature_matching"]
        return terms

    def path_penalty(self, step: int) -> Tensor:
        """E (|J_w^T y| - a)^2 over half a batch (1912.04958, equation 4); a moves first, the batch's share is part of
        the graph, as in the official code.
        """
        stage, half = self.stage(step), self.stage(step).batch // 2
        images, _, ws, _ = self.sample(step, "path", half)
        noise = self.draws.path_noise(step, half, images.shape[1:])
        product = (images * noise / stage.side).sum()  # y = noise / sqrt(H W)
        (gradient,) = torch.autograd.grad(product, ws, create_graph=True)
        lengths = (gradient**2).sum(2).mean(1).sqrt()
        mean = self.path_mean + self.loss["path_length_decay"] * (lengths.mean() - self.path_mean)
        self.path_mean = mean.detach()
        self.metrics["path_length/mean"] = mean
        self.metrics["loss/path_length"] = ((lengths - mean) ** 2).mean()
        return self.metrics["loss/path_length"]

    def discriminator_loss(
        self, step: int, fakes: Tensor, labels: Tensor, images: Tensor, real_labels: Tensor
    ) -> tuple[Tensor, Tensor]:
        loss, stage = self.loss, self.stage(step)
        fakes, images = fakes.clone().requires_grad_(), images.clone().requires_grad_()
        real_hidden, hidden = self.hidden(images, step, "real"), self.hidden(fakes, step, "fake")
        r, f = self.logits(real_hidden, real_labels), self.logits(hidden, labels)
        total = LOSSES[loss["objective"]][1](f, r).mean()
        means = {"real": r.mean(), "fake": f.mean(), "margin": (r - f).mean(), "real_sign": r.sign().mean()}
        self.metrics |= {"loss/discriminator": total} | {f"logits/{name}": value for name, value in means.items()}
        if loss["mismatch_weight"] and self.d.classes:  # 1605.05396: real images with wrong labels count as fakes
            wrong = (real_labels + self.draws.label_offsets(step, stage.batch)) % len(self.sets or self.names)
            total = total + loss["mismatch_weight"] * FAKE[loss["objective"]](self.logits(real_hidden, wrong)).mean()
        if loss["auxiliary_weight"]:
            named = self.naming(self.d.auxiliary(real_hidden), real_labels)
            self.metrics["loss/auxiliary_real"] = named
            self.metrics["accuracy/auxiliary"] = self.accuracy(self.d.auxiliary(real_hidden), real_labels)
            if loss["auxiliary_fakes"]:
                named = named + self.naming(self.d.auxiliary(hidden), labels)
            total = total + loss["auxiliary_weight"] * named
        if loss["r1_interval"] and step % loss["r1_interval"] == 0:  # lazily, with the gain of the interval
            total = total + loss["r1_interval"] * self.penalties(step, (f, fakes), (r, images), real_labels)
        return total, r.detach().sign().mean()

    def penalties(self, step: int, fake: tuple[Tensor, Tensor], real: tuple[Tensor, Tensor], labels: Tensor) -> Tensor:
        """gamma / 2 E |grad D|^2 at images (R1, 1801.04406) and samples (R2), of the images before augmentation; and
        (|grad D| - 1)^2 between both (1704.00028).
        """
        loss, stage, total = self.loss, self.stage(step), torch.zeros([])
        for name, (logits, images) in (("r1", real), ("r2", fake)):
            gamma = loss[f"{name}_gamma"]
            if gamma:
                if loss["gamma_final"] is not None:
                    gamma = half_cosine(gamma, loss["gamma_final"], stage.seen / self.over)
                (slope,) = torch.autograd.grad(logits.sum(), images, create_graph=True)
                self.metrics[f"loss/{name}"] = gamma / 2 * (slope**2).sum((1, 2, 3)).mean()
                total = total + self.metrics[f"loss/{name}"]
        if loss["gradient_penalty_weight"]:
            share = self.draws.interpolation_weights(step, stage.batch)[:, None, None, None]
            mixed = (share * real[1] + (1 - share) * fake[1]).detach().requires_grad_()
            logits = self.logits(self.hidden(mixed, step, "between"), labels)
            (slope,) = torch.autograd.grad(logits.sum(), mixed, create_graph=True)
            penalty = ((slope.flatten(1).norm(dim=1) - 1) ** 2).mean()
            self.metrics["loss/gradient_penalty"] = loss["gradient_penalty_weight"] * penalty
            total = total + self.metrics["loss/gradient_penalty"]
        return total

    def follow(self, step: int) -> None:
        """The average: beta = 0.5^(batch / half-life), which is at most `ema_rampup` of the images seen before."""
        ema, stage = self.tree["ema"], self.stage(step)
        images = 1000 * ema["ema_kimg"] if ema["ema_kimg"] is not None else 1000 * stage.batch * 10 / 32
        if ema["ema_kimg_start"] is not None:
            images = half_cosine(1000 * ema["ema_kimg_start"], images, stage.seen / self.over)
        if ema["ema_rampup"] is not None and not self.transfer:
            images = min(images, ema["ema_rampup"] * stage.seen)
        beta = 0.5 ** (stage.batch / images) if images else 0.0
        for mine, theirs in zip(self.average.parameters(), self.g.parameters(), strict=True):
            mine.copy_(beta * mine + (1 - beta) * theirs)
        for mine, theirs in zip(self.average.buffers(), self.g.buffers(), strict=True):
            mine.copy_(theirs)

    def adapt(self, step: int, sign: Tensor) -> None:
        """ADA (2006.06676, section 2.2): p moves by the images since the last time, towards E sign D(x) = target."""
        ada, stage = self.tree["ada"], self.stage(step)
        if ada["mode"] == "scheduled":
            self.p = half_cosine(ada["p"], ada["p_final"], (stage.seen + stage.batch) / self.over)
        if ada["mode"] == "adaptive":
            self.signs, self.counted = self.signs + float(sign) * stage.batch, self.counted + stage.batch
            if (step + 1) % ada["interval"] == 0:
                kimg = ada["kimg"] or (100 if self.transfer else 500)
                up = 1 if self.signs / self.counted > ada["target"] else -1
                self.p = min(1.0, max(0.0, self.p + up * self.counted / (1000 * kimg)))
                self.signs, self.counted = 0.0, 0
        if ada["mode"] != "off":
            self.metrics["ada/p"] = torch.tensor(self.p)
