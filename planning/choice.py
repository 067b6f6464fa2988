"""What the quickstart takes for given images, machine and time: resolution, recipes, lengths, and why.

Nothing is measured here: `Machine` tells how fast this one is, so that tests can ask for any other.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple, Protocol

from metrics import GAN_IMAGES, PER_CLASS, SEARCHED
from planning.plan import Plan, Speed, Survey, Training
from utils.text import duration

GAN, SCRATCH = "configs/quickstart_gan.yaml", "configs/quickstart_classifier.yaml"
TUNED = "configs/finetune_resnet50.yaml"
BATCH = {GAN: 32, SCRATCH: 64, TUNED: 32}
FILLED = 0.93  # share of the time that is planned: measured speeds are not exact
VAL_SHARE, VAL_SHARE_FEW, FEW = 0.1, 0.2, 500  # held out; of fewer than FEW images the larger share
ADA_BELOW = 10_000  # training images, below which the discriminator's are augmented (2006.06676, figure 1)
EVALUATION = 0.1  # share of the time that the GAN's evaluation may take at most
SEARCHED_LESS = 2000  # training images that are searched for copies where time is short
GRIDS = 1.02  # sample grids, checkpoints and an evaluation on pixels cost a GAN's training 2 % more time
SCRATCH_SHARE, TUNED_SHARE = 0.32, 0.35  # of the training's time that the classifier gets at most
TUNED_SIDE = 128  # px inside the network and of the images that a fine-tuned classifier reads
PACKING = 2.5  # seconds that packing takes besides reading the images
ORDER = ("pack", "train classifier", "train gan", "evaluate classifier", "evaluate gan")
STEPS = {"classifier": 60, "gan": 200}  # at least, however little time there is
PACE = (0.8, 5.0)  # how much longer than planned a part may take for others to be planned by it
LONGER = 1.05  # a GAN that could be longer by a smaller factor stays as it is


class Size(NamedTuple):
    """A GAN's size, and the images it must see before its samples can be recognised."""

    side: int  # px
    channel_base: int  # channels at a resolution: base / resolution, channel_max at most
    channel_max: int
    kimg: int  # thousand images, at least
    most: int  # thousand images after which more no longer shows


SIZES = (
    Size(128, 4096, 256, 600, 6000),
    Size(128, 2048, 128, 300, 3000),
    Size(64, 2048, 256, 200, 2000),
    Size(64, 1024, 128, 80, 1500),
    Size(32, 512, 128, 50, 640),
    Size(32, 256, 64, 30, 640),
    Size(16, 256, 64, 0, 400),
)


class Machine(Protocol):
    """The machine that the plan is for."""

    start: float  # seconds that training and evaluating take before their work and after it
    cores: int
    weights: tuple[str, str, bool] | None  # ImageNet weights at hand: file, its network, stride of 2 as in He's own
    features_per_second: float  # images through ResNet-50 for the distance; 0: there are no weights for it

    def speed(self, config: str, overrides: Sequence[str], *, side: int, channels: int, classes: int) -> Speed:
        """How fast the recipe trains on such images."""
        ...


def choose(survey: Survey, machine: Machine, *, minutes: float, quick: bool = False) -> Plan:
    """The plan. `quick`: lengths do not matter, a few steps of the smallest are trained."""
    return _Choice(survey, machine, minutes, quick).plan()


def replanned(plan: Plan, spent: Mapping[str, float]) -> Plan:
    """The plan with another length for the GAN, before it begins; `spent`: seconds that the parts before it took.

    The machine is taken to go on as much slower, or faster, as the classifier's training has shown it to be. A GAN that
    would no longer end within the minutes gets the time that is left of them; one for which there is clearly more time
    than planned gets that. Else the plan itself.
    """
    planned, gan = plan.seconds, plan.gan
    part = "train classifier"
    pace = min(max(spent[part] / planned[part], PACE[0]), PACE[1]) if part in spent else 1.0
    coming = {name: pace * seconds for name, seconds in planned.items() if name not in spent and name != "train gan"}
    start = pace * (planned["train gan"] - gan.seconds)
    others, rate = sum(spent.values()) + sum(coming.values()) + start, gan.images_per_second / pace

    def fitting(seconds: float) -> int:
        """The steps that end so many seconds after the quickstart's start."""
        steps = int((seconds - others) * rate / GRIDS / gan.batch_size)
        return max(STEPS["gan"], min(steps, gan.most or gan.steps))

    longer, steps = fitting(FILLED * 60 * plan.minutes), min(gan.steps, fitting(60 * plan.minutes))
    steps = longer if longer > LONGER * gan.steps else steps
    if steps == gan.steps:
        return plan
    took, meant = sum(spent.values()), sum(planned[name] for name in spent)
    note = f"GAN: {steps:,} steps instead of {gan.steps:,}, because the parts before it took {duration(took)}"
    cadence = _cadence(steps, gan.batch_size / rate, evaluations=1)
    seconds = GRIDS * steps * gan.batch_size / rate
    training = replace(gan, steps=steps, images_per_second=rate, seconds=seconds)
    training.overrides = [*gan.overrides[: -len(cadence)], *cadence]
    times = {**spent, **coming, "train gan": seconds + start}
    return replace(
        plan,
        gan=training,
        seconds={name: round(times[name], 1) for name in planned},
        notes=[*plan.notes, f"{note} instead of {duration(meant)}"],
        replanned={"gan_steps": gan.steps, "seconds": round(plan.total, 1)},
    )


class _Choice:
    def __init__(self, survey: Survey, machine: Machine, minutes: float, quick: bool) -> None:
        self.survey, self.machine, self.minutes, self.quick = survey, machine, minutes, quick
        apart = survey.held_out > 0
        self.val_share = None if apart else VAL_SHARE_FEW if survey.count < FEW else VAL_SHARE
        self.held_out = survey.held_out or max(1, round(survey.count * (self.val_share or 0)))
        self.images = survey.count if apart else survey.count - self.held_out
        self.labelled = survey.classes > 1
        self.budget = FILLED * 60 * minutes
        self.notes: list[str] = []

    def plan(self) -> Plan:
        """Classifier first, because it needs little; the GAN has what is left."""
        survey, start = self.survey, self.machine.start
        packing = survey.seconds * (survey.count + survey.held_out) / max(1, self.machine.cores)
        seconds = {"pack": packing + PACKING * (2 if survey.held_out else 1)}
        self._notes_on_data()
        left = self.budget - seconds["pack"] - start * (4 if self.labelled else 2)
        most = EVALUATION * 60 * self.minutes  # for the GAN's evaluation
        classifier = self._classifier(max(0.0, left - most)) if self.labelled else None
        judging = self._judging(classifier)
        if classifier:
            seconds["train classifier"] = classifier.seconds + 2 * judging * self.held_out + start
            seconds["evaluate classifier"] = judging * self.held_out + start
            left -= classifier.seconds + 3 * judging * self.held_out
        size, speed = self._gan_size(left - most)
        options, evaluation = self._evaluation(speed.images_per_second, judging, most)
        gan = self._gan(size, speed, left - evaluation)
        seconds |= {"train gan": gan.seconds + start, "evaluate gan": evaluation + start}
        if sum(seconds.values()) > 63 * self.minutes:
            self.notes.append(f"this takes longer than {self.minutes:g} minutes here, and there is nothing smaller")
        side = classifier.resolution if classifier else gan.resolution
        return Plan(
            survey=self.survey,
            minutes=self.minutes,
            quick=self.quick,
            size=max(side, gan.resolution),
            smallest=min(side, gan.resolution),
            val_share=self.val_share,
            training_images=self.images,
            held_out=self.held_out,
            classifier=classifier,
            gan=gan,
            evaluation=options,
            seconds={name: round(seconds[name], 1) for name in ORDER if name in seconds},
            notes=self.notes,
        )

    def _notes_on_data(self) -> None:
        survey = self.survey
        if self.val_share is None:
            self.notes.append(f"held out: the source's own {survey.held_out:,} images")
        else:
            self.notes.append(
                f"held out: {self.val_share:.0%} of each class, about {self.held_out:,} images in all, look-alikes on "
                "one side" + (f" (20 % because there are fewer than {FEW})" if self.val_share == VAL_SHARE_FEW else "")
            )
        if survey.unreadable:
            self.notes.append(f"images that cannot be read are left out, for example: {survey.unreadable}")
        if survey.classes == 1:
            self.notes.append("no classifier: the images are of one class; put them into a folder for each class")
        elif not survey.classes:
            self.notes.append("no classifier: the images have no labels; put them into a folder for each class")

    # --- the classifier

    def _classifier(self, budget: float) -> Training:
        """Fine-tuned where weights are at hand, all of it if time allows, else its head; else from scratch."""
        weights = self.machine.weights
        if weights is None:
            side = 64 if self.survey.side > 48 and self.images < 20_000 else _side(self.survey.side, 32)
            few = f"{self.images:,} images {'are few for that' if self.images < 5000 else 'allow that'}"
            why = f"from scratch, no ImageNet weights are at hand (--weights FILE); {few}"
            wanted = max(7 * self.images, min(100 * self.images, 40_000))
            return self._trained(SCRATCH, [], side, wanted, budget, SCRATCH_SHARE, why)
        file, name, he_strides = weights
        options = ["--model.name", name, "--model.weights", file, "--model.he-strides", str(he_strides).lower()]
        side = _side(self.survey.side, TUNED_SIDE)
        wanted = max(3200, 6 * self.images, min(20 * self.images, 25_600))
        why = f"fine-tuned from {name}'s ImageNet weights, {file}"
        tuned = self._trained(TUNED, options, side, wanted, budget, TUNED_SHARE, why)
        if TUNED_SHARE * budget * tuned.images_per_second >= wanted / 3:
            return tuned
        options += ["--finetune.freeze", "[backbone]"]
        self.notes.pop()
        why += "; the head alone, because there is no time for more"
        return self._trained(TUNED, options, side, wanted, budget, TUNED_SHARE, why)

    def _trained(
        self, config: str, options: list[str], side: int, wanted: int, budget: float, share: float, why: str
    ) -> Training:
        """A classifier that sees `wanted` images, up to thrice as many where time abounds, as long as time allows."""
        speed = self._speed(config, options, side, classes=self.survey.classes)
        batch, rate = BATCH[config], speed.images_per_second
        images = max(min(wanted, share * budget * rate), min(3 * wanted, share / 2 * budget * rate))
        steps = STEPS["classifier"] if self.quick else max(STEPS["classifier"], round(images / batch))
        options = [*options, "--data.resolution", str(side), *_cadence(steps, batch / rate, evaluations=2)]
        options += ["--optimizer.warmup-steps", str(max(1, steps // 10))]
        self.notes.append(f"classifier: {why}")
        return Training(
            config=config,
            overrides=options,
            steps=steps,
            batch_size=batch,
            resolution=side,
            precision=speed.precision,
            images_per_second=rate,
            seconds=steps * batch / rate,
            why=why,
        )

    def _judging(self, classifier: Training | None) -> float:
        """Seconds to classify an image: a third of a training step's share, in fp32."""
        if classifier is None:
            return 0.0
        return (2.0 if classifier.precision == "bf16" else 1.0) / (3 * classifier.images_per_second)

    # --- the GAN

    def _gan_size(self, budget: float) -> tuple[Size, Speed]:
        """The largest whose samples can be recognised in the time that is left, and its speed."""
        ada = self.images < ADA_BELOW
        sizes = [size for size in SIZES if size.side <= self._gan_side] or [SIZES[-1]]
        base, known = next((size for size in sizes if size.side <= 32), sizes[-1]), 0.0
        if not self.quick:
            known = self._speed(GAN, self._options(base, ada), base.side).images_per_second
        for size in sizes[:-1]:
            hoped = known * _work(base) / _work(size) * budget
            if self.quick or hoped < 600 * size.kimg:  # not worth measuring
                continue
            speed = self._speed(GAN, self._options(size, ada), size.side)
            if speed.images_per_second * budget >= 1000 * size.kimg:
                return size, speed
        return sizes[-1], self._speed(GAN, self._options(sizes[-1], ada), sizes[-1].side)

    @property
    def _gan_side(self) -> int:
        """px: the largest side that the images have details for."""
        return _side(self.survey.side, SIZES[0].side)

    def _gan(self, size: Size, speed: Speed, budget: float) -> Training:
        """As long as there is time, and as it shows."""
        rate, ada = speed.images_per_second, self.images < ADA_BELOW
        images = min(budget * rate / GRIDS, 1000 * size.most)
        steps = STEPS["gan"] if self.quick else max(STEPS["gan"], int(images / BATCH[GAN]))
        why = f"{size.side} px, " + ("one network draws every class" if self.labelled else "without labels")
        if size.side < self._gan_side and not self.quick:
            why += f"; {size.side * 2} px want more time than there is (--minutes)"
        if ada:
            why += f"; with ADA, because there are fewer than {ADA_BELOW:,} training images"
        if images == 1000 * size.most and not self.quick:
            why += "; training longer would hardly show"
        self.notes.append(f"GAN: {why}")
        return Training(
            config=GAN,
            overrides=[*self._options(size, ada), *_cadence(steps, BATCH[GAN] / rate, evaluations=1)],
            steps=steps,
            batch_size=BATCH[GAN],
            resolution=size.side,
            precision=speed.precision,
            images_per_second=rate,
            seconds=GRIDS * steps * BATCH[GAN] / rate,
            why=why,
            most=max(steps, 1000 * size.most // BATCH[GAN]),
        )

    def _options(self, size: Size, ada: bool) -> list[str]:
        options = ["--data.resolution", str(size.side)]
        for network in ("generator", "discriminator"):
            options += [f"--{network}.channel-base", str(size.channel_base)]
            options += [f"--{network}.channel-max", str(size.channel_max)]
        options += [] if self.labelled else ["--loss.mismatch-weight", "0"]
        return options + (["--ada.mode", "adaptive", "--ada.kimg", "100"] if ada else [])

    def _speed(self, config: str, options: list[str], side: int, classes: int | None = None) -> Speed:
        classes = self.survey.classes if classes is None else classes
        return self.machine.speed(config, options, side=side, channels=self.survey.channels, classes=classes)

    # --- evaluation

    def _evaluation(self, drawn: float, judging: float, most: float) -> tuple[list[str], float]:
        """Options of the GAN's evaluation and its seconds, `most` at most: fewer images, then fewer extractors.

        `drawn`: images/s of the GAN's training; a sample costs about a quarter of one, in fp32.
        """
        features = self.machine.features_per_second
        options: list[str] = [] if features or self.labelled else ["--extractor", "pixels"]
        classes, per_class = max(1, self.survey.classes), PER_CLASS

        def seconds(n: int, searched: int, features: float) -> float:
            both = max(n, min(self.held_out, per_class * classes))
            through = judging + (1 / features if features else 0.0)
            rest = max(n, searched) / features if features else 0.0
            return both * (0.4 / drawn + 2 * through) + 2 * n * judging + rest

        n, searched = min(GAN_IMAGES, self.held_out), min(SEARCHED, self.images)
        if seconds(n, searched, features) > most and features:
            searched = min(searched, SEARCHED_LESS)
            options += ["--searched", str(searched)]
        if seconds(n, searched, features) > most and features and self.labelled:
            features = 0.0
            options += ["--extractor", "classifier"]
        if seconds(n, searched, features) > most:
            n = max(min(n, 200), int(n * most / seconds(n, searched, features)))
            per_class = max(10, min(per_class, n // classes))
            options += ["--n", str(n), "--per-class", str(per_class)]
        return options, seconds(n, searched, features)


def _side(side: int, most: int) -> int:
    """A power of two near `side` px, from 16 to `most`: images are enlarged by less than half."""
    return min(most, max(16, 2 ** math.ceil(math.log2(max(side, 16) / 1.5))))


def _work(size: Size) -> float:
    """Work of one image in relation to other sizes: products of the convolutions, and the pixels for all else."""
    sides = [4 * 2**k for k in range(int(math.log2(size.side)) - 1)]
    channels = {side: min(size.channel_base // side, size.channel_max) for side in sides}
    return sum(side**2 * (channels[side] ** 2 + 16 * channels[side]) for side in sides)


def _cadence(steps: int, seconds: float, *, evaluations: int) -> list[str]:
    """How often a training evaluates and saves (every two minutes or so), and its length."""
    every = max(1, math.ceil(steps / evaluations))
    save = max(10, min(every, int(120 / seconds)))
    return ["--steps", str(steps), "--evaluation.every", str(every), "--checkpoint.every", str(save)]
