"""Choose the recipes, resolutions and lengths of training of a quickstart.

Nothing is measured here. A `Machine` supplies the speeds, so that tests can plan for any machine.
"""

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

from duetgan.metrics.protocol import GAN_IMAGES, SEARCHED
from duetgan.utils.config.model import Stored
from duetgan.utils.text import counted

SAMPLE = "sample"  # source of the embedded images
GAN, SCRATCH = "configs/quickstart_gan.yaml", "configs/quickstart_classifier.yaml"
# A GAN that is better in the same time with many classes and images
# (docs/measurements/quickstart.md).
PAIRS = "configs/gan_32_pairs.yaml"
STARTED = "configs/gan_64_cpu.yaml"  # a GAN that starts from START's networks
START = "configs/drawings_64.pt"  # trained GAN to start from; configs/drawings_64.md describes it
TUNED, LAST = "configs/finetune_resnet50.yaml", "configs/finetune_resnet50_last.yaml"
BATCH = {GAN: 32, PAIRS: 32, STARTED: 16, SCRATCH: 64, TUNED: 32, LAST: 32}
STEPS = {SCRATCH: 60, TUNED: 60, LAST: 10}  # smallest number of steps; GAN_STEPS for a GAN
GAN_STEPS = 200
QUICK_STEPS = 12  # steps of each training with --quick, which are too few to learn anything
FILLED = 0.93  # fraction of --minutes that a plan uses, because measured speeds are not exact
# Fraction of the images to hold out; VAL_SHARE_FEW applies to fewer than FEW images.
VAL_SHARE, VAL_SHARE_FEW = 0.1, 0.2
FEW = 500
# The GAN uses ADA with fewer training images than this (2006.06676, figure 1).
ADA_BELOW = 10_000
# The GAN's evaluation: fraction of --minutes, at most this many seconds.
EVALUATION, EVALUATION_SECONDS = 0.1, 300.0
# Images per minute of --minutes that are evaluated and searched for copies. ResNet-50 processes
# images above 64 px at 224 px.
EVALUATED, EVALUATED_LARGE = 1000, 100
# Sample grids, checkpoints and an evaluation on pixels add 2 % to the time of a GAN's training.
GRIDS = 1.02
# Largest fraction of the training time for a classifier from scratch, and for a fine-tuned one.
SCRATCH_SHARE, TUNED_SHARE = 0.32, 0.35
TUNED_SIDE = 128  # largest side in px if all layers of the classifier are fine-tuned
SCRATCH_FROM = 5000  # training images that suffice without pretrained weights
TUNED_FROM = 1000  # training images from which all layers are fine-tuned, if there is time
# Limits of a training behind frozen stages: fraction of its time for the features; epochs.
FEATURES, EPOCHS = 0.8, 10
PACKING = 2.5  # seconds that packing takes in addition to reading the images
# Longest training, in images, for which gan_32_pairs uses Muon, which is better than Adam after
# 155,000 images and worse after 640,000; no length between these was tried
# (docs/measurements/small-gan-recipe.md#muon-for-filters).
MUON = 200_000


class Size(NamedTuple):
    """A GAN's size, and the numbers of images, in thousands, that its training needs."""

    side: int  # px
    channel_base: int  # channels at a resolution: base / resolution, at most channel_max
    channel_max: int
    kimg: int  # thousands of images after which samples can be recognised
    most: int  # thousands of images after which more training makes no visible difference
    # as `kimg`, if training starts from START; 0 if START has another size
    started: int = 0


SIZES = (
    Size(16, 256, 64, 0, 400),
    Size(32, 512, 128, 20, 640),
    Size(64, 1024, 128, 80, 1500, started=6),
    Size(128, 2048, 128, 300, 3000),
)
# Settings of a classifier behind frozen stages, the slowest first: input size in px, and views per
# image. With two views, one of them mirrored, the last stage is trained, otherwise only the head.
LADDER = ((224, 2), (128, 2), (224, 1), (128, 1), (64, 1))
# Options for a ResNet of which only the head is trained; a head on averaged features is less
# accurate (docs/measurements/folders.md).
READOUT = ["--model.head", "readout", "--model.readout-stages", "2", "--model.readout-parts", "1"]


class Survey(Stored):
    """Properties of the user's images."""

    source: str  # path or name of the images, as the user typed it
    options: list[str] = []  # command-line options that name the columns of a table
    count: int  # images, without the source's own held-out ones
    held_out: int  # the source's own held-out images
    groups: int = 0  # number of groups that a split keeps whole; 0: no option defines groups
    classes: int  # 0 if the images have no labels
    smallest_class: int  # images of the rarest class
    side: int  # px: median of the shorter sides of the decoded images
    channels: int  # 1 if all decoded images are grey, else 3
    unreadable: str  # name and error of the first image that cannot be read, or empty
    seconds: float  # time to read and decode one image

    def text(self) -> str:
        """Return the survey as one line of text for the user."""
        text = f"images: {self.count:,}"
        if self.held_out:
            text += f", and {self.held_out:,} held out"
        if self.classes > 1:
            smallest = counted(self.smallest_class, "image")
            text += f"; {self.classes} classes with at least {smallest} each"
        else:
            text += "; one class" if self.classes else "; no labels"
        return f"{text}; about {self.side} px, {'grey' if self.channels == 1 else 'colour'}"


class Speed(NamedTuple):
    precision: str
    images_per_second: float


class Weights(NamedTuple):
    """A file of ImageNet weights, and the name of the network that they are for."""

    file: str
    network: str
    he_strides: bool  # True if a block's first convolution has the stride of 2, as in He's ResNet


class Machine:
    """A machine with an assumed speed, for `--quick`. `ThisMachine` measures speeds instead.

    The few training steps of `--quick` need no measurement.
    """

    start = 0.0  # seconds that a training or evaluation takes to start and to finish
    cores = 1
    weights: Weights | None = None  # ImageNet weights on this machine

    def speed(self, config: str, overrides: Sequence[str], side: int, images: Survey) -> Speed:
        """Return the training speed of a recipe with the options `overrides`.

        Args:
            config: the recipe file.
            side: height and width in px of the training images.
            images: the survey of the images, which says how many channels and classes they have.
        """
        return Speed("auto", 1000.0)


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
    judging: float  # estimated seconds to classify an image in fp32

    @property
    def weights(self) -> str:
        """The file of weights that the classifier is fine-tuned from; empty if there is none."""
        return dict(pairwise(self.overrides)).get("--model.weights", "")


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
    spent: float  # seconds that the survey and the measurements took
    seconds: float  # expected, with `spent`
    notes: list[str]  # the settings with their reasons

    @property
    def trainings(self) -> dict[str, Training]:
        if self.classifier is None:
            return {"gan": self.gan}
        return {"classifier": self.classifier, "gan": self.gan}


def choose(
    survey: Survey, machine: Machine, *, minutes: float, quick: bool = False, spent: float = 0.0
) -> Plan:
    """Return the plan of a quickstart on the images of `survey`.

    Args:
        machine: supplies the speeds of training.
        minutes: the user's time limit for the whole quickstart.
        quick: True to train a few steps of the smallest size, whatever the time.
        spent: seconds that the survey and measurements took.
    """
    return _Choice(survey, machine, quick).plan(minutes, spent)


def side_for(side: int, most: int) -> int:
    """Return the side in px to which images of `side` px are scaled.

    This is the smallest power of two that is at least two thirds of `side`, limited to 16..`most`.
    """
    return min(most, max(16, 2 ** math.ceil(math.log2(max(side, 16) / 1.5))))


class _Choice:
    def __init__(self, survey: Survey, machine: Machine, quick: bool) -> None:
        self.survey = survey
        self.machine = machine
        self.quick = quick
        self.labelled = survey.classes > 1
        self.val_share: float | None = None
        self.held_out = survey.held_out
        self.images = survey.count  # for training
        if not survey.held_out:
            self.val_share = VAL_SHARE_FEW if survey.count < FEW else VAL_SHARE
            held_out = max(1, survey.classes, round(survey.count * self.val_share))
            self.held_out = min(held_out, survey.count - survey.classes)
            self.images -= self.held_out
        self.ada = self.images < ADA_BELOW

    def plan(self, minutes: float, spent: float) -> Plan:
        """Return the plan: first of the classifier, then of the GAN in the remaining time.

        The arguments are those of `choose`.
        """
        survey = self.survey
        start = self.machine.start
        read = survey.seconds * (survey.count + survey.held_out) / max(1, self.machine.cores)
        seconds = spent + read + PACKING + start * (4 if self.labelled else 2)
        seconds += min(EVALUATION * 60 * minutes, EVALUATION_SECONDS)
        budget = FILLED * 60 * minutes
        notes = self.notes()
        classifier = None
        if self.labelled:
            classifier = self.classifier(max(0.0, budget - seconds))
            notes.append(f"classifier: {classifier.why}")
            # Two evaluations during training, one after it.
            seconds += classifier.seconds + 3 * classifier.judging * self.held_out
        gan = self.gan(budget - seconds)
        notes.append(f"GAN: {gan.why}")
        seconds += gan.seconds
        if seconds > 63 * minutes:
            notes.append(
                f"this takes longer than {minutes:g} minutes on this machine, even with the "
                "smallest settings"
            )
        rate = EVALUATED if gan.resolution <= 64 else EVALUATED_LARGE
        evaluated = min(GAN_IMAGES, self.held_out, int(rate * minutes))
        searched = min(SEARCHED, self.images, int(rate * minutes))
        sides = [training.resolution for training in (gan, classifier) if training]
        return Plan(
            survey=survey,
            request=[],  # `measure.make_plan` sets it
            minutes=minutes,
            quick=self.quick,
            size=max(sides),
            smallest=min(sides),
            val_share=self.val_share,
            training_images=self.images,
            held_out=self.held_out,
            classifier=classifier,
            gan=gan,
            evaluation=["--n", str(evaluated), "--searched", str(searched)],
            spent=round(spent, 1),
            seconds=round(seconds, 1),
            notes=notes,
        )

    def notes(self) -> list[str]:
        """Return the plan's notes about held-out images, unreadable images and missing classes.

        Each note is a text for the user.
        """
        survey = self.survey
        note = f"held out: the source's own test part, {counted(survey.held_out, 'image')}"
        if self.val_share is not None:
            note = (
                f"held out: {self.val_share:.0%}{' of each class' * self.labelled}, "
                f"about {self.held_out:,} images in all; similar images stay in the same part"
            )
        if survey.groups:
            note += f"; each of the {survey.groups:,} groups stays whole"
        notes = [note]
        if survey.unreadable:
            notes.append(
                f"images that cannot be read are left out, for example: {survey.unreadable}"
            )
        if not self.labelled:
            reason = "are of one class" if survey.classes else "have no labels"
            notes.append(
                f"no classifier: the images {reason}; put them into a folder for each class"
            )
        return notes

    def training(
        self,
        config: str,
        options: list[str],
        side: int,
        speed: Speed,
        images: float,
        reason: str,
    ) -> Training:
        is_gan = config not in STEPS
        batch = BATCH[config]
        steps = max(STEPS.get(config, GAN_STEPS), int(images / batch))
        if self.quick:
            steps = QUICK_STEPS
            options = [*options, "--log.every", str(QUICK_STEPS // 2)]
        if not is_gan:
            warmup = str(max(1, steps // 10))
            options = [*options, "--data.resolution", str(side), "--optimizer.warmup-steps", warmup]
        seconds = steps * batch / speed.images_per_second
        # Two evaluations of a classifier, one of a GAN, and a checkpoint about every two minutes.
        evaluate_every = math.ceil(steps / (1 if is_gan else 2))
        save_every = max(10, min(evaluate_every, int(120 * steps / seconds)))
        options = [*options, "--steps", str(steps)]
        options += ["--evaluation.every", str(evaluate_every)]
        options += ["--checkpoint.every", str(save_every)]
        # Classifying an image takes a third of the time of training on it.
        slowdown = 2.0 if speed.precision == "bf16" else 1.0
        return Training(
            config=config,
            overrides=options,
            steps=steps,
            batch_size=batch,
            resolution=side,
            precision=speed.precision,
            images_per_second=speed.images_per_second,
            seconds=GRIDS * seconds if is_gan else seconds,
            why=reason,
            judging=slowdown / (3 * speed.images_per_second),
        )

    # --- the classifier

    def classifier(self, budget: float) -> Training:
        """Return the plan of the classifier's training.

        Without pretrained weights, all layers are trained from scratch. With them, all layers are
        fine-tuned, or only the last ones (`behind_frozen`) if there are few images or little time.

        If all layers are trained, the training sees a target number of images, or as many as fit
        into the classifier's part of `budget` if the target does not fit. If half of that part is
        enough for more than the target, the training fills that half, but sees at most three times
        the target.

        Args:
            budget: seconds for the classifier's and the GAN's trainings together.
        """
        config = SCRATCH
        options: list[str] = []
        if self.machine.weights is None:
            budget *= SCRATCH_SHARE
            is_large = self.survey.side > 48 and self.images < 20_000
            side = side_for(self.survey.side, 64 if is_large else 32)
            judgement = "few for that" if self.images < SCRATCH_FROM else "enough for that"
            reason = f"from scratch; {self.images:,} images are {judgement}"
            target_images = max(7 * self.images, min(100 * self.images, 40_000))
        else:
            config = TUNED
            budget *= TUNED_SHARE
            file, name, he_strides = self.machine.weights
            side = side_for(self.survey.side, TUNED_SIDE)
            options = ["--model.name", name, "--model.weights", file]
            options += ["--model.he-strides", str(he_strides).lower()]
            reason = f"fine-tuned from {name}'s ImageNet weights, {file}"
            target_images = max(3200, 6 * self.images, min(20 * self.images, 25_600))
            if self.images < TUNED_FROM:
                return self.behind_frozen(budget, options, name, reason)
        speed = self.machine.speed(config, options, side, self.survey)
        most = budget * speed.images_per_second
        if config == TUNED and most < target_images / 2:
            return self.behind_frozen(budget, options, name, reason)
        images = max(min(target_images, most), min(3 * target_images, most / 2))
        return self.training(config, options, side, speed, images, reason)

    def behind_frozen(self, budget: float, options: list[str], name: str, reason: str) -> Training:
        """Return the plan of training only the last stage, or the head, of a pretrained network.

        Features of the frozen stages are computed once; the head starts from a logistic regression.

        Args:
            budget: seconds for this training.
            options: the first command-line options of the plan, which select the weights.
            name: the name of the network.
            reason: the beginning of the plan's text for the user (`Training.why`).
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

        # Only the head is trained, so this is the time of the features, at 128 px.
        uncached = [*sized(128, 1), "--finetune.cache", "0"]
        seconds = 1 / self.machine.speed(LAST, uncached, side, self.survey).images_per_second
        for inside, views in LADDER:
            features = seconds * (inside / 128) ** 2
            if views * self.images * features < FEATURES * budget:
                break
        options = sized(inside, views)
        behind = self.machine.speed(LAST, options, side, self.survey)
        # The preparation includes a pass through the trained stages.
        preparation = views * self.images * (features + 1 / (3 * behind.images_per_second))
        left = max(0.0, budget - preparation)
        images = min(EPOCHS * self.images, left * behind.images_per_second)
        part = "its last stage" if views > 1 else "its head"
        cause = "there are few images" if self.images < TUNED_FROM else "there is no time for more"
        reason += (
            f"; {part} alone is trained, from a logistic regression on features of images of "
            f"{inside} px, because {cause}"
        )
        training = self.training(LAST, options, side, behind, images, reason)
        return training.model_copy(
            update={
                "judging": training.judging + 2.0 * features,
                "seconds": training.seconds + preparation,
            }
        )

    # --- the GAN

    def gan_size(self, budget: float) -> tuple[Size, Speed]:
        """Return the GAN's size and its training speed.

        The size is the largest one, up to that to which `side_for` scales the images, whose samples
        become recognisable within `budget` seconds of training. The smallest size always does.
        """
        size = SIZES[0]
        speed = self.gan_speed(size)
        for larger in SIZES[1:]:
            # Samples of a larger size would have more detail than the images.
            if self.quick or larger.side > side_for(self.survey.side, SIZES[-1].side):
                break
            needed = 1000 * (larger.started if self.starts(larger) else larger.kimg)
            # A larger size is slower, so it is only measured if this one is fast enough for it.
            if speed.images_per_second * budget >= needed:
                larger_speed = self.gan_speed(larger)
                if larger_speed.images_per_second * budget >= needed:
                    size = larger
                    speed = larger_speed
        return size, speed

    def gan_speed(self, size: Size) -> Speed:
        return self.machine.speed(*self.recipe(size), size.side, self.survey)

    def starts(self, size: Size) -> bool:
        """Return True if the training of a GAN of this size starts from the networks in START.

        It does if the images are few and in colour, and START has this size. Measurements showed
        that the samples are then better.
        """
        return bool(size.started) and self.survey.channels == 3 and self.ada

    def gan(self, budget: float) -> Training:
        """Return the plan of the GAN's training.

        The training lasts `budget` seconds. It is shorter if more training would make no visible
        difference, and longer if `budget` is too little for GAN_STEPS steps.
        """
        size, speed = self.gan_size(budget)
        images = min(budget * speed.images_per_second / GRIDS, 1000 * size.most)
        reason = f"{size.side} px, "
        reason += "class-conditional" if self.labelled else "without labels"
        if self.ada:
            reason += f"; with ADA, because there are fewer than {ADA_BELOW:,} training images"
        if self.starts(size):
            reason += f"; it starts from a GAN that was trained on drawings, {START}"
        if images == 1000 * size.most and not self.quick:
            reason += "; longer training would make no visible difference"
        recipe, options = self.recipe(size)
        if recipe == PAIRS and images > MUON:
            options += ["--generator-optimizer.name", "adam"]
        return self.training(recipe, options, size.side, speed, images, reason)

    def recipe(self, size: Size) -> tuple[str, list[str]]:
        options = ["--data.resolution", str(size.side)]
        for network in ("generator", "discriminator"):
            options += [f"--{network}.channel-base", str(size.channel_base)]
            options += [f"--{network}.channel-max", str(size.channel_max)]
        if self.labelled and not self.ada and size.side <= 32:
            return PAIRS, options
        if not self.labelled:
            options += ["--loss.mismatch-weight", "0"]
        starts = self.starts(size)
        if starts:
            options += ["--init-from", START, "--ema.ema-kimg", "5", "--augment.flip", "false"]
        if starts and self.labelled:
            options += ["--loss.auxiliary-weight", "0.5"]
        if self.ada:
            options += ["--ada.mode", "adaptive", "--ada.kimg", "100"]
        return STARTED if starts else GAN, options
