"""The choice of a quickstart's recipes, resolutions and lengths of training.

Nothing is measured here: a `Machine` returns the speeds, so that tests can plan for any machine.
"""

from itertools import pairwise

from duetgan.commands.planning.given import Machine, Speed, Survey
from duetgan.commands.planning.sizes import (
    LADDER,
    MUON,
    READOUT,
    SIZES,
    START,
    WIDTHS,
    Size,
    cadence,
    nearness,
    side_for,
    work,
)
from duetgan.metrics.protocol import GAN_IMAGES, PER_CLASS, SEARCHED
from duetgan.utils.config.model import Stored
from duetgan.utils.text import duration

GAN, SCRATCH = "configs/quickstart_gan.yaml", "configs/quickstart_classifier.yaml"
# A GAN that is better in the same time with many classes and images
# (docs/measurements/quickstart.md).
PAIRS = "configs/gan_32_pairs.yaml"
STARTED = "configs/gan_64_cpu.yaml"  # a GAN that starts from START's networks
TUNED, LAST = "configs/finetune_resnet50.yaml", "configs/finetune_resnet50_last.yaml"
BATCH = {GAN: 32, PAIRS: 32, STARTED: 16, SCRATCH: 64, TUNED: 32, LAST: 32}
FILLED = 0.93  # fraction of --minutes that a plan uses, because measured speeds are not exact
# Fraction of the images to hold out; VAL_SHARE_FEW applies to fewer than FEW images.
VAL_SHARE, VAL_SHARE_FEW = 0.1, 0.2
FEW = 500
OBLONG_FROM = 0.05  # smallest fraction of images far from square that is worth a note
# The GAN uses ADA with fewer training images than this (2006.06676, figure 1).
ADA_BELOW = 10_000
EVALUATION = 0.1  # largest fraction of --minutes for the GAN's evaluation
# Sample grids, checkpoints and an evaluation on pixels add 2 % to the time of a GAN's training.
GRIDS = 1.02
# Largest fraction of the training time for a classifier from scratch, and for a fine-tuned one.
SCRATCH_SHARE, TUNED_SHARE = 0.32, 0.35
TUNED_SIDE = 128  # largest side in px if all layers of the classifier are fine-tuned
SCRATCH_FROM = 5000  # training images that suffice without pretrained weights
LAST_STEPS = 10  # smallest number of steps of a head that starts from a logistic regression
TUNED_FROM = 1000  # training images from which all layers are fine-tuned, if there is time
HEAD_ALONE = "[backbone]"  # value of finetune.freeze if there is only time for the head
# Limits of a training behind frozen stages: fraction of its time for the features; epochs.
FEATURES, EPOCHS = 0.8, 10
PACKING = 2.5  # seconds that packing takes in addition to reading the images
STEPS = {"classifier": 60, "gan": 200}  # smallest number of steps of each training
QUICK_STEPS = 12  # steps of each training with --quick, which are too few to learn anything


class Training(Stored):
    """The plan of one training."""

    config: str  # recipe file
    overrides: list[str]  # command-line options
    steps: int
    batch_size: int
    resolution: int  # px
    precision: str
    images_per_second: float  # measured
    seconds: float  # expected
    why: str
    is_longest: bool = False  # True if more training would make no visible difference
    features: float = 0.0  # seconds per image in the frozen stages, if they are computed once

    @property
    def weights(self) -> str:
        """The file of weights that the classifier is fine-tuned from; empty if there is none."""
        return dict(pairwise(self.overrides)).get("--model.weights", "")

    @property
    def judging(self) -> float:
        """Estimated seconds to classify an image in fp32: a third of its training time."""
        slowdown = 2.0 if self.precision == "bf16" else 1.0
        return slowdown / (3 * self.images_per_second) + 2.0 * self.features


class Plan(Stored):
    """The settings of a quickstart, which plan.json stores for a resume."""

    survey: Survey
    request: list[str]  # command-line arguments, see `request_words`
    minutes: float
    quick: bool
    seed: int = 0  # seed of the choice of held-out images and of both trainings
    size: int  # side in px of the packed images
    smallest: int  # side in px of the smallest scaled copies in the packed files
    val_share: float | None  # fraction to hold out; None if the source has a held-out part
    training_images: int
    held_out: int
    classifier: Training | None
    gan: Training
    evaluation: list[str]  # command-line options of the GAN's evaluation
    seconds: dict[str, float]  # step, such as "train gan" -> expected seconds
    notes: list[str]  # the settings with their reasons

    @property
    def total(self) -> float:
        return sum(self.seconds.values())

    @property
    def trainings(self) -> dict[str, Training]:
        if self.classifier is None:
            return {"gan": self.gan}
        return {"classifier": self.classifier, "gan": self.gan}


def val_share(count: int) -> float:
    """Return the fraction of `count` images to hold out."""
    return VAL_SHARE_FEW if count < FEW else VAL_SHARE


def choose(
    survey: Survey, machine: Machine, *, minutes: float, quick: bool = False, spent: float = 0.0
) -> Plan:
    """Return the plan of a quickstart.

    Args:
        quick: True to train a few steps of the smallest size, whatever the time.
        spent: seconds that the survey and measurements took.
    """
    return _Choice(survey, machine, minutes, quick).plan(spent)


class _Choice:
    def __init__(self, survey: Survey, machine: Machine, minutes: float, quick: bool) -> None:
        self.survey = survey
        self.machine = machine
        self.minutes = minutes
        self.quick = quick
        self.val_share: float | None = None
        self.held_out = survey.held_out
        self.images = survey.count
        self.labelled = survey.classes > 1
        self.notes = [f"held out: the {survey.held_out:,} images of the source's own held-out part"]
        if not survey.held_out:
            self.val_share = val_share(survey.count)
            self.held_out = max(1, survey.classes, round(survey.count * self.val_share))
            self.held_out = min(self.held_out, survey.count - survey.classes)
            self.images -= self.held_out
            note = (
                f"held out: {self.val_share:.0%}{' of each class' * self.labelled}, "
                f"about {self.held_out:,} images in all; similar images stay in the same part"
            )
            if self.val_share == VAL_SHARE_FEW:
                note += f" (20 % because there are fewer than {FEW})"
            if survey.groups:
                note += f"; each of the {survey.groups:,} groups stays whole"
            self.notes = [note]
        self.ada = self.images < ADA_BELOW
        # side in px above which samples would have more detail than the images
        self.gan_side = side_for(survey.side, SIZES[0].side)
        if survey.unreadable:
            self.notes.append(
                f"images that cannot be read are left out, for example: {survey.unreadable}"
            )
        if survey.oblong >= OBLONG_FROM:
            self.notes.append(
                f"{survey.oblong:.0%} of the images are far from square: their sides are cut off"
            )
        if survey.unlabelled:
            self.notes.append(
                f"{survey.unlabelled:,} images without labels are left out; docs/classifier.md "
                "(few labels) says how to use them"
            )
        if not self.labelled:
            reason = "are of one class" if survey.classes else "have no labels"
            self.notes.append(
                f"no classifier: the images {reason}; put them into a folder for each class"
            )

    def plan(self, spent: float) -> Plan:
        """Plan the classifier, which needs less time, then the GAN with the remaining time."""
        survey = self.survey
        start = self.machine.start
        read = survey.count + survey.held_out
        packing = survey.seconds * read / max(1, self.machine.cores)
        seconds = {"plan": spent} if spent else {}
        seconds["pack"] = packing + PACKING * (2 if survey.held_out else 1)
        left = FILLED * 60 * self.minutes - sum(seconds.values())
        left -= start * (4 if self.labelled else 2)
        most = EVALUATION * 60 * self.minutes  # largest time of the GAN's evaluation
        judging = 0.0
        classifier = None
        if self.labelled:
            classifier = self._classifier(max(0.0, left - most))
            self.notes.append(f"classifier: {classifier.why}")
            judging = classifier.judging
            seconds["train classifier"] = classifier.seconds + 2 * judging * self.held_out + start
            left -= classifier.seconds + 3 * judging * self.held_out
        size, speed = self._gan_size(left - most)
        options, evaluation = self._evaluation(size, speed, judging, most)
        gan = self._gan(size, speed, left - evaluation)
        self.notes.append(f"GAN: {gan.why}")
        seconds["train gan"] = gan.seconds + start
        if self.labelled:
            seconds["evaluate classifier"] = judging * self.held_out + start
        seconds["evaluate gan"] = evaluation + start
        if sum(seconds.values()) > 63 * self.minutes:
            self.notes.append(
                f"this takes longer than {self.minutes:g} minutes on this machine, even with the smallest settings"
            )
        sides = [training.resolution for training in (gan, classifier) if training]
        return Plan(
            survey=survey,
            request=[],  # `measure.make_plan` sets it
            minutes=self.minutes,
            quick=self.quick,
            size=max(sides),
            smallest=min(sides),
            val_share=self.val_share,
            training_images=self.images,
            held_out=self.held_out,
            classifier=classifier,
            gan=gan,
            evaluation=options,
            seconds={name: round(value, 1) for name, value in seconds.items()},
            notes=self.notes,
        )

    def _training(
        self,
        config: str,
        options: list[str],
        side: int,
        speed: Speed,
        images: float,
        reason: str,
    ) -> Training:
        gan = config in (GAN, PAIRS, STARTED)
        batch = BATCH[config]
        rate = speed.images_per_second
        min_steps = STEPS["gan" if gan else "classifier"] if config != LAST else LAST_STEPS
        steps = max(min_steps, int(images / batch))
        if self.quick:
            steps = QUICK_STEPS
            options = [*options, "--log.every", str(QUICK_STEPS // 2)]
        if not gan:
            warmup = str(max(1, steps // 10))
            options = [*options, "--data.resolution", str(side), "--optimizer.warmup-steps", warmup]
        return Training(
            config=config,
            overrides=[*options, *cadence(steps, batch / rate, evaluations=1 if gan else 2)],
            steps=steps,
            batch_size=batch,
            resolution=side,
            precision=speed.precision,
            images_per_second=rate,
            seconds=(GRIDS if gan else 1) * steps * batch / rate,
            why=reason,
        )

    # --- the classifier

    def _classifier(self, budget: float) -> Training:
        """Return the classifier's training.

        Pretrained weights are fine-tuned in all layers, or in the last ones if there are few images
        or little time. The training sees a target number of images, or up to three times as many if
        these take at most half of the classifier's part of the budget.

        Args:
            budget: seconds for the GAN's and the classifier's trainings.
        """
        if self.machine.weights is None:
            config = SCRATCH
            budget *= SCRATCH_SHARE
            side = side_for(self.survey.side, 32)
            if self.survey.side > 48 and self.images < 20_000:
                side = 64
            options: list[str] = []
            reason = "from scratch"
            if self.survey.source != "sample":
                reason += ", because no ImageNet weights were found (--weights FILE)"
            judgement = "few for that" if self.images < SCRATCH_FROM else "enough for that"
            reason += f"; {self.images:,} images are {judgement}"
            target_images = max(7 * self.images, min(100 * self.images, 40_000))
            speed = self.machine.speed(config, options, side, self.survey)
        else:
            config = TUNED
            budget *= TUNED_SHARE
            file, name, he_strides = self.machine.weights
            side = side_for(self.survey.side, TUNED_SIDE)
            options = [
                "--model.name",
                name,
                "--model.weights",
                file,
                "--model.he-strides",
                str(he_strides).lower(),
            ]
            reason = f"fine-tuned from {name}'s ImageNet weights, {file}"
            target_images = max(3200, 6 * self.images, min(20 * self.images, 25_600))
            has_few = self.images < TUNED_FROM
            if has_few and (training := self._behind_frozen(budget, options, name, reason)):
                return training
            speed = self.machine.speed(config, options, side, self.survey)
            if budget * speed.images_per_second < target_images / 2:
                if training := self._behind_frozen(budget, options, name, reason):
                    return training
                options += ["--finetune.freeze", HEAD_ALONE]
                reason += "; only the head is trained, because there is no time for more"
                speed = self.machine.speed(config, options, side, self.survey)
        most = budget * speed.images_per_second
        images = max(min(target_images, most), min(3 * target_images, most / 2))
        return self._training(config, options, side, speed, images, reason)

    def _behind_frozen(
        self, budget: float, options: list[str], name: str, reason: str
    ) -> Training | None:
        """Return a training of only the last stage or the head of a pretrained network; None if
        there is no time for it.

        Features of the frozen stages are computed once; the head starts from a logistic regression.
        """
        from duetgan.models.registry import backbone_of  # imports torch

        last = list(backbone_of(name).stages)[-1]
        side = side_for(int(1.5 * self.survey.side), 2 * TUNED_SIDE)

        def sized(inside: int, views: int) -> list[str]:
            trained = f"{{head: 0, {last}: 0}}" if views > 1 else "{head: 0}"
            result = [*options, "--finetune.unfreeze", trained, "--model.input-size", str(inside)]
            if views == 1 and name.startswith("resnet"):
                result += READOUT
            return [*result, "--augment.flip", str(views > 1).lower()]

        def speed(options: list[str]) -> Speed:
            return self.machine.speed(LAST, options, side, self.survey)

        uncached = ["--finetune.cache", "0"]
        # seconds to compute the features of one view of every image at 128 px
        seconds = self.images / speed([*sized(128, 1), *uncached]).images_per_second
        for inside, views in LADDER:
            if views * seconds * (inside / 128) ** 2 < FEATURES * budget:
                break
        else:
            return None
        options = sized(inside, views)
        whole = speed([*options, *uncached]).images_per_second
        behind = speed(options)
        features = max(0.0, 1 / whole - 1 / behind.images_per_second)
        # The preparation includes a pass through the trained stages.
        preparation = views * self.images * (features + 1 / (3 * behind.images_per_second))
        left = max(0.0, budget - preparation)
        images = min(EPOCHS * self.images, left * behind.images_per_second)
        part = "its last stage" if views > 1 else "its head"
        cause = "there are few images" if self.images < TUNED_FROM else "there is no time for more"
        reason += f"; {part} alone is trained, from a regression at {inside} px, because {cause}"
        training = self._training(LAST, options, side, behind, images, reason)
        return training.model_copy(
            update={"features": features, "seconds": training.seconds + preparation}
        )

    # --- the GAN

    def _gan_size(self, budget: float) -> tuple[Size, Speed]:
        """Return the largest size whose samples become recognisable within `budget` seconds of
        training, and its training speed.
        """
        sizes = [size for size in SIZES if size.side <= self.gan_side] or [SIZES[-1]]
        base = next((size for size in sizes if size.side <= 32 or self._starts(size)), sizes[-1])
        base_rate = 0.0 if self.quick else self._gan_speed(base).images_per_second
        for size in sizes[:-1]:
            estimate = base_rate * work(base) / work(size) * budget
            kimg = size.started if self._starts(size) else size.kimg
            if self.quick or estimate < 600 * kimg:  # The size is far too slow to be measured.
                continue
            speed = self._gan_speed(size)
            if speed.images_per_second * budget >= 1000 * kimg:
                return self._of_width(size, budget) if self._by_law(size) else (size, speed)
        return sizes[-1], self._gan_speed(sizes[-1])

    def _of_width(self, size: Size, budget: float) -> tuple[Size, Speed]:
        """Return `size` with the network width that should give the best samples after `budget`
        seconds of training, and its speed.
        """
        candidates: list[tuple[float, Size, Speed]] = []
        for wide in (size._replace(channel_base=base, channel_max=base // 4) for base in WIDTHS):
            speed = self._gan_speed(wide)
            near = nearness(wide, min(speed.images_per_second * budget, 1000 * size.most))
            if candidates and near <= candidates[-1][0]:
                break
            candidates.append((near, wide, speed))
        return candidates[-1][1:]

    def _by_law(self, size: Size) -> bool:
        return size.channel_base in WIDTHS and self._recipe(size)[0] == PAIRS and not self.quick

    def _gan_speed(self, size: Size) -> Speed:
        return self.machine.speed(*self._recipe(size), size.side, self.survey)

    def _starts(self, size: Size) -> bool:
        """Return True if a GAN of this size starts from START, which was measured to be better for
        few images in colour.
        """
        return bool(size.started) and self.survey.channels == 3 and self.ada

    def _gan(self, size: Size, speed: Speed, budget: float) -> Training:
        """Return the GAN's training, which lasts `budget` seconds, or less if more training would
        make no visible difference.
        """
        images = min(budget * speed.images_per_second / GRIDS, 1000 * size.most)
        reason = f"{size.side} px, "
        reason += "one network for all classes" if self.survey.classes > 1 else "without labels"
        if self._by_law(size):
            reason += f"; for {duration(budget)} {size.channel_base // size.side} channels"
        if size.side < self.gan_side and not self.quick:
            reason += f"; {size.side * 2} px need more time (--minutes)"
        if self.ada:
            reason += f"; with ADA, because there are fewer than {ADA_BELOW:,} training images"
        if self._starts(size):
            reason += f"; it starts from a GAN of drawings, {START}"
        is_longest = images == 1000 * size.most and not self.quick
        if is_longest:
            reason += "; longer training would make no visible difference"
        recipe, options = self._recipe(size)
        if recipe == PAIRS and images > MUON:
            options += ["--generator-optimizer.name", "adam"]
        training = self._training(recipe, options, size.side, speed, images, reason)
        return training.model_copy(update={"is_longest": is_longest})

    def _recipe(self, size: Size) -> tuple[str, list[str]]:
        options = ["--data.resolution", str(size.side)]
        for network in ("generator", "discriminator"):
            options += [f"--{network}.channel-base", str(size.channel_base)]
            options += [f"--{network}.channel-max", str(size.channel_max)]
        has_classes = self.survey.classes > 1
        if has_classes and not self.ada and size.side <= 32:
            return PAIRS, options
        if not has_classes:
            options += ["--loss.mismatch-weight", "0"]
        starts = self._starts(size)
        if starts:
            options += ["--init-from", START, "--ema.ema-kimg", "5", "--augment.flip", "false"]
        if starts and has_classes:
            options += ["--loss.auxiliary-weight", "0.5"]
        if self.ada:
            options += ["--ada.mode", "adaptive", "--ada.kimg", "100"]
        return STARTED if starts else GAN, options

    def _evaluation(
        self, size: Size, speed: Speed, judging: float, most: float
    ) -> tuple[list[str], float]:
        """Return the command-line options of the GAN's evaluation, and its expected seconds.

        If these would exceed `most`, fewer images are evaluated and searched for copies.
        `judging` is the classifier's seconds per image. ResNet-50 processes images above 64 px at
        224 px.
        """
        features = self.machine.features_per_second
        features /= (224 / 64) ** 2 if size.side > 64 else 1
        options: list[str] = [] if features or self.labelled else ["--extractor", "pixels"]
        classes = max(1, self.survey.classes)

        def seconds(n: int, searched: int, per_class: int) -> float:
            images = max(n, min(self.held_out, per_class * classes))
            extraction = 1 / features if features else 0.0
            per_image = 0.4 / speed.images_per_second + 2 * (judging + extraction)
            return images * per_image + 2 * n * judging + max(n, searched) * extraction

        n, searched = min(GAN_IMAGES, self.held_out), min(SEARCHED, self.images)
        expected = seconds(n, searched, PER_CLASS)
        if expected <= most:
            return options, expected
        searched = max(n, int(searched * most / expected))
        n = max(min(n, 200), int(n * most / expected))
        per_class = max(10, min(PER_CLASS, n // classes))
        options += ["--n", str(n), "--per-class", str(per_class), "--searched", str(searched)]
        return options, seconds(n, searched, per_class)
