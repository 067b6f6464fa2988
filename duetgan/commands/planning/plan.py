"""The quickstart's plan for given images, machine and time: resolution, recipes, lengths, and why.

Nothing is measured here: a `Machine` tells how fast it is, so that tests can ask for any other.
"""

from functools import partial
from itertools import pairwise

from duetgan.commands.planning.given import Machine, Speed, Survey, Weights
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
# better in the same time where classes and images are many: quickstart.md
PAIRS = "configs/gan_32_pairs.yaml"
STARTED = "configs/gan_64_cpu.yaml"  # a GAN that begins with START's networks
TUNED, LAST = "configs/finetune_resnet50.yaml", "configs/finetune_resnet50_last.yaml"
FEW_LABELS = "configs/few_labels.yaml"
BATCH = {GAN: 32, PAIRS: 32, STARTED: 16, SCRATCH: 64, TUNED: 32, LAST: 32, FEW_LABELS: 32}
FILLED = 0.93  # share of the time that is planned: measured speeds are not exact
VAL_SHARE, VAL_SHARE_FEW, FEW = 0.1, 0.2, 500  # held out; of fewer than FEW images the larger share
SOME = 0.05  # share of images that are far from square, from which that is told
# training images, below which the discriminator's are augmented (2006.06676, figure 1)
ADA_BELOW = 10_000
EVALUATION = 0.1  # share of the time that the GAN's evaluation may take at most
SEARCHED_LESS = 2000  # training images that are searched for copies where time is short
# sample grids, checkpoints and an evaluation on pixels cost a GAN's training 2 % more time
GRIDS = 1.02
SCRATCH_SHARE, TUNED_SHARE = 0.32, 0.35  # of the training's time that the classifier gets at most
# px inside the network and of the images that a classifier reads that is fine-tuned as a whole
TUNED_SIDE = 128
SCRATCH_FROM = 5000  # images that suffice without pretrained weights
# of few labels: to see; at most: px, images to spread over
FEW_IMAGES, FEW_SIDE, FEW_SPREAD = 153_600, 64, 50_000
LAST_STEPS = 10  # at least: those begin at a regression
TUNED_FROM = 1000  # images, from which a network is fine-tuned as a whole where there is time
HEAD_ALONE = "[backbone]"  # what is frozen where there is no time for more
LOOK = 500  # training images that networks are compared on, at most
FEATURES, EPOCHS = 0.8, 10  # share of the time that features may take as estimated, epochs at most
PACKING = 2.5  # seconds that packing takes besides reading the images
STEPS = {"classifier": 60, "gan": 200}  # at least, however little time there is


class Training(Stored):
    config: str
    overrides: list[str]
    steps: int
    batch_size: int
    resolution: int  # px
    precision: str
    images_per_second: float  # measured
    seconds: float  # expected
    why: str
    most: int | None = None  # steps after which more no longer shows
    features: float = 0.0  # seconds of the frozen stages for an image, where they are computed once

    @property
    def weights(self) -> str:
        """The file that the classifier is fine-tuned from, or empty."""
        return dict(pairwise(self.overrides)).get("--model.weights", "")

    @property
    def judging(self) -> float:
        """Seconds to classify an image: a third of a training step's share, in fp32."""
        return (2.0 if self.precision == "bf16" else 1.0) / (
            3 * self.images_per_second
        ) + 2.0 * self.features


class Plan(Stored):
    """What the quickstart does; kept in plan.json, so that a resume does the same."""

    survey: Survey
    minutes: float
    quick: bool
    seed: int = 0  # of the split and both trainings
    size: int  # px the images are packed with
    smallest: int  # px: also packed with, for the GAN
    val_share: float | None  # None: the source has a held-out part
    training_images: int
    held_out: int
    classifier: Training | None
    gan: Training
    evaluation: list[str]  # options of the GAN's
    seconds: dict[str, float]  # expected, by part
    notes: list[str]  # what was chosen and why
    pooled: bool = False  # the GAN learns from all images, without labels
    from_gan: bool = False  # the classifier begins with the GAN's discriminator
    # of the classifier, with each network at hand: one is to be taken, see settled
    choices: list[Training] = []
    # the first plan's `gan_steps` and `seconds`, if changed
    replanned: dict[str, float] | None = None

    @property
    def total(self) -> float:
        return sum(self.seconds.values())

    @property
    def trainings(self) -> dict[str, Training]:
        found = ({"classifier": self.classifier} if self.classifier else {}) | {"gan": self.gan}
        return dict(reversed(found.items())) if self.from_gan else found


def choose(
    survey: Survey, machine: Machine, *, minutes: float, quick: bool = False, spent: float = 0.0
) -> Plan:
    """The plan. `quick`: lengths do not matter, a few steps of the smallest are trained. `spent`:
    seconds until now.
    """
    return _Choice(survey, machine, minutes, quick).plan(spent)


class _Choice:
    def __init__(self, survey: Survey, machine: Machine, minutes: float, quick: bool) -> None:
        self.survey, self.machine, self.minutes, self.quick = survey, machine, minutes, quick
        self.val_share = (
            None if survey.held_out else VAL_SHARE_FEW if survey.count < FEW else VAL_SHARE
        )
        self.held_out = survey.held_out or max(
            1, survey.classes, round(survey.count * (self.val_share or 0))
        )
        self.held_out = (
            min(self.held_out, survey.count - survey.classes) if self.val_share else self.held_out
        )
        self.images = survey.count - (self.held_out if self.val_share else 0)
        self.labelled = survey.classes > 1
        self.pooled = survey.unlabelled > self.images
        self.from_gan = (
            self.labelled and self.pooled and not machine.weights and self.images < SCRATCH_FROM
        )
        # as the GAN sees it
        self.of_gan = survey.model_copy(update={"classes": 0}) if self.pooled else survey
        self.learnt = self.images + survey.unlabelled * self.pooled  # images, by the GAN
        self.ada = self.learnt < ADA_BELOW
        # px: the largest that the images have details for
        self.gan_side = side_for(survey.side, FEW_SIDE if self.from_gan else SIZES[0].side)
        if self.val_share is None:
            self.notes = [f"held out: the source's own {survey.held_out:,} images"]
        else:
            few = (
                f" (20 % because there are fewer than {FEW})"
                if self.val_share == VAL_SHARE_FEW
                else ""
            )
            what = f"{self.val_share:.0%}{' of each class' * self.labelled}, about {self.held_out:,} images in all"
            self.notes = [f"held out: {what}, look-alikes on one side{few}"]
        if survey.unreadable:
            self.notes.append(
                f"images that cannot be read are left out, for example: {survey.unreadable}"
            )
        if survey.oblong >= SOME:
            self.notes.append(
                f"{survey.oblong:.0%} of the images are far from square: their sides are cut off"
            )
        if survey.unlabelled:
            how = (
                "the GAN learns from them and the others"
                if self.pooled
                else "left out, fewer than with labels"
            )
            self.notes.append(f"{survey.unlabelled:,} images without labels: {how}")
        if not self.labelled:
            why = "are of one class" if survey.classes else "have no labels"
            self.notes.append(
                f"no classifier: the images {why}; put them into a folder for each class"
            )

    def plan(self, spent: float) -> Plan:
        """Classifier first, because it needs little, or begins with the GAN; the GAN has what is
        left.
        """
        survey, start = self.survey, self.machine.start
        read = (survey.count + survey.held_out) * (
            1 + self.pooled
        ) + survey.unlabelled * self.pooled
        packing = survey.seconds * read / max(1, self.machine.cores)
        seconds = ({"plan": spent} if spent else {}) | {
            "pack": packing + PACKING * (2 if survey.held_out else 1)
        }
        left = (
            FILLED * 60 * self.minutes - sum(seconds.values()) - start * (4 if self.labelled else 2)
        )
        most = EVALUATION * 60 * self.minutes  # for the GAN's evaluation
        judging, choices = 0.0, list[Training]()
        found = self._gan_size((1 - SCRATCH_SHARE) * (left - most)) if self.from_gan else None
        if self.labelled:
            networks = self.machine.weights or (None,)
            every = [
                self._classifier(max(0.0, left - most), found and found[0], each)
                for each in networks
            ]
            choices = [each for each in every if HEAD_ALONE not in each.overrides] or every[:1]
            self.notes.append(f"classifier: {choices[0].why}")
            judging, slowest = (
                max(each.judging for each in choices),
                max(each.seconds for each in choices),
            )
            if len(choices) > 1:
                seconds["compare networks"] = start + min(LOOK, self.images) * sum(
                    each.judging for each in choices
                )
            seconds["train classifier"] = slowest + 2 * judging * self.held_out + start
            seconds["evaluate classifier"] = judging * self.held_out + start
            left -= seconds.get("compare networks", 0.0) + slowest + 3 * judging * self.held_out
        size, speed = found or self._gan_size(left - most)
        options, evaluation = self._evaluation(size, speed, 0.0 if self.from_gan else judging, most)
        gan = self._gan(size, speed, left - evaluation)
        self.notes.append(f"GAN: {gan.why}")
        seconds |= {"train gan": gan.seconds + start, "evaluate gan": evaluation + start}
        if sum(seconds.values()) > 63 * self.minutes:
            self.notes.append(
                f"this takes longer than {self.minutes:g} minutes here, and there is nothing smaller"
            )
        side = max((each.resolution for each in choices), default=gan.resolution)
        tasks = ("gan", "classifier") if self.from_gan else ("classifier", "gan")
        last = [f"{what} {task}" for what in ("train", "evaluate") for task in tasks]
        order = ["plan", "pack", "compare networks", *last]
        return Plan(
            survey=survey,
            minutes=self.minutes,
            quick=self.quick,
            size=max(side, gan.resolution),
            smallest=min([gan.resolution, *(each.resolution for each in choices)]),
            val_share=self.val_share,
            training_images=self.images,
            held_out=self.held_out,
            classifier=choices[0] if choices else None,
            choices=choices if len(choices) > 1 else [],
            gan=gan,
            evaluation=options,
            seconds={name: round(seconds[name], 1) for name in order if name in seconds},
            notes=self.notes,
            pooled=self.pooled,
            from_gan=self.from_gan,
        )

    def _training(
        self,
        config: str,
        options: list[str],
        side: int,
        speed: Speed,
        images: float,
        why: str,
        most: int | None = None,
    ) -> Training:
        gan, batch, rate = config in (GAN, PAIRS, STARTED), BATCH[config], speed.images_per_second
        least = STEPS["gan" if gan else "classifier"] if config != LAST else LAST_STEPS
        steps = least if self.quick else max(least, int(images / batch))
        if not gan:
            warmup = str(max(1, steps // (96 if config == FEW_LABELS else 10)))
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
            why=why,
            most=None if most is None else max(steps, most // batch),
        )

    # --- the classifier

    def _classifier(self, budget: float, gan: Size | None, weights: Weights | None) -> Training:
        """Fine-tuned where weights are at hand, all of it if time allows, else its head; else from
        scratch. It sees the images that it wants, up to thrice as many where time abounds, as far
        as its share of the time allows. `gan`: it begins with the discriminator of one of that
        size.
        """
        form: list[str] = []
        if gan is not None:
            side, config, options, share = (
                gan.side,
                FEW_LABELS,
                ["--model.name", "discriminator"],
                SCRATCH_SHARE,
            )
            network = f"{{architecture: plain, channel_base: {gan.channel_base}, channel_max: {gan.channel_max}}}"
            about = f"architecture: stylegan2, resolution: {side}, channels: {self.survey.channels}, config: {network}"
            # the run that has it is to come
            form, wanted = ["--model.discriminator", f"{{{about}}}"], FEW_IMAGES
            options += ["--unlabelled.spread", "0"] if self.learnt > FEW_SPREAD else []
            why = "with the images without labels, from the GAN's discriminator on: no ImageNet weights are at hand "
            why += "(--weights FILE), few images have labels"
        elif weights is None:
            side = (
                64
                if self.survey.side > 48 and self.images < 20_000
                else side_for(self.survey.side, 32)
            )
            config, options, share = SCRATCH, [], SCRATCH_SHARE
            few = f"{self.images:,} images {'are few for that' if self.images < SCRATCH_FROM else 'allow that'}"
            lacking = (
                ""
                if self.survey.source == "sample"
                else ", no ImageNet weights are at hand (--weights FILE)"
            )
            why = f"from scratch{lacking}; {few}"
            wanted = max(7 * self.images, min(100 * self.images, 40_000))
        else:
            file, name, he_strides = weights
            side, config, share = side_for(self.survey.side, TUNED_SIDE), TUNED, TUNED_SHARE
            options = [
                "--model.name",
                name,
                "--model.weights",
                file,
                "--model.he-strides",
                str(he_strides).lower(),
            ]
            why = f"fine-tuned from {name}'s ImageNet weights, {file}"
            wanted = max(3200, 6 * self.images, min(20 * self.images, 25_600))
        behind = (
            partial(self._behind_frozen, share * budget, options, weights.network, why)
            if weights
            else None
        )
        if behind and self.images < TUNED_FROM and (training := behind()):
            return training
        speed = self.machine.speed(config, [*options, *form], side, self.survey)
        scarce = share * budget * speed.images_per_second < wanted / 2
        if behind and scarce:
            if training := behind():
                return training
            options += ["--finetune.freeze", HEAD_ALONE]
            why += "; the head alone, because there is no time for more"
            speed = self.machine.speed(config, options, side, self.survey)
        most = share * budget * speed.images_per_second
        return self._training(
            config, options, side, speed, max(min(wanted, most), min(3 * wanted, most / 2)), why
        )

    def _behind_frozen(
        self, budget: float, options: list[str], name: str, why: str
    ) -> Training | None:
        """A regression on all images' features, then the last stage or the head: what is before is
        computed once. None: there is no time for it.
        """
        from duetgan.models.registry import backbone_of  # imports torch

        last, side = (
            list(backbone_of(name).stages)[-1],
            side_for(int(1.5 * self.survey.side), 2 * TUNED_SIDE),
        )

        def sized(inside: int, views: int) -> list[str]:
            trained = f"{{head: 0, {last}: 0}}" if views > 1 else "{head: 0}"
            found = [*options, "--finetune.unfreeze", trained, "--model.input-size", str(inside)]
            found += READOUT if views == 1 and name.startswith("resnet") else []
            return [*found, "--augment.flip", str(views > 1).lower()]

        def speed(options: list[str]) -> Speed:
            return self.machine.speed(LAST, options, side, self.survey)

        uncached = ["--finetune.cache", "0"]
        # seconds for a view of every image
        one = self.images / speed([*sized(128, 1), *uncached]).images_per_second
        fits = (rung for rung in LADDER if rung[1] * one * (rung[0] / 128) ** 2 < FEATURES * budget)
        if (rung := next(fits, None)) is None:
            return None
        options = sized(*rung)
        whole, behind = speed([*options, *uncached]).images_per_second, speed(options)
        features = max(0.0, 1 / whole - 1 / behind.images_per_second)
        # the trained stages' too
        before = rung[1] * self.images * (features + 1 / (3 * behind.images_per_second))
        images = min(EPOCHS * self.images, max(0.0, budget - before) * behind.images_per_second)
        part = "its last stage" if rung[1] > 1 else "its head"
        few = "there are few images" if self.images < TUNED_FROM else "there is no time for more"
        why += f"; {part} alone, from a regression at {rung[0]} px, because {few}"
        training = self._training(LAST, options, side, behind, images, why)
        return training.model_copy(
            update={"features": features, "seconds": training.seconds + before}
        )

    # --- the GAN

    def _gan_size(self, budget: float) -> tuple[Size, Speed]:
        """The largest whose samples can be recognised in the time that is left, and its speed."""
        sizes = [size for size in SIZES if size.side <= self.gan_side] or [SIZES[-1]]
        base = next((size for size in sizes if size.side <= 32 or self._starts(size)), sizes[-1])
        known = 0.0 if self.quick else self._gan_speed(base).images_per_second
        for size in sizes[:-1]:
            hoped = known * work(base) / work(size) * budget
            kimg = size.started if self._starts(size) else size.kimg
            if self.quick or hoped < 600 * kimg:  # not worth measuring
                continue
            speed = self._gan_speed(size)
            if speed.images_per_second * budget >= 1000 * kimg:
                return self._of_width(size, budget) if self._by_law(size) else (size, speed)
        return sizes[-1], self._gan_speed(sizes[-1])

    def _of_width(self, size: Size, budget: float) -> tuple[Size, Speed]:
        """The size in the width that is expected to come nearest to the images in that time, and
        its speed.
        """
        found: list[tuple[float, Size, Speed]] = []
        for wide in (size._replace(channel_base=base, channel_max=base // 4) for base in WIDTHS):
            speed = self._gan_speed(wide)
            near = nearness(wide, min(speed.images_per_second * budget, 1000 * size.most))
            if found and near <= found[-1][0]:
                break
            found.append((near, wide, speed))
        return found[-1][1:]

    def _by_law(self, size: Size) -> bool:
        return size.channel_base in WIDTHS and self._recipe(size)[0] == PAIRS and not self.quick

    def _gan_speed(self, size: Size) -> Speed:
        return self.machine.speed(*self._recipe(size), size.side, self.of_gan)

    def _starts(self, size: Size) -> bool:
        """Whether it begins with START's networks: measured with few images in colour only."""
        return bool(size.started) and self.survey.channels == 3 and self.ada

    def _gan(self, size: Size, speed: Speed, budget: float) -> Training:
        """As long as there is time, and as it shows."""
        images = min(budget * speed.images_per_second / GRIDS, 1000 * size.most)
        why = f"{size.side} px, " + (
            "one network draws every class" if self.of_gan.classes > 1 else "without labels"
        )
        if self._by_law(size):
            why += f"; for its {duration(budget)} {size.channel_base // size.side} channels"
        if size.side < self.gan_side and not self.quick:
            why += f"; {size.side * 2} px want more time than there is (--minutes)"
        if self.ada:
            why += f"; with ADA, because there are fewer than {ADA_BELOW:,} training images"
        if self._starts(size):
            why += f"; it starts from a GAN of drawings, {START}"
        if images == 1000 * size.most and not self.quick:
            why += "; training longer would hardly show"
        recipe, options = self._recipe(size)
        options += (
            ["--generator-optimizer.name", "adam"] if recipe == PAIRS and images > MUON else []
        )
        return self._training(recipe, options, size.side, speed, images, why, 1000 * size.most)

    def _recipe(self, size: Size) -> tuple[str, list[str]]:
        options = ["--data.resolution", str(size.side)]
        for network in ("generator", "discriminator"):
            options += [f"--{network}.channel-base", str(size.channel_base)]
            options += [f"--{network}.channel-max", str(size.channel_max)]
        if self.of_gan.classes > 1 and not self.ada and size.side <= 32:
            return PAIRS, options
        options += [] if self.of_gan.classes > 1 else ["--loss.mismatch-weight", "0"]
        if self._starts(size):
            options += ["--init-from", START, "--ema.ema-kimg", "5", "--augment.flip", "false"]
            options += ["--loss.auxiliary-weight", "0.5"] if self.of_gan.classes > 1 else []
        options += ["--ada.mode", "adaptive", "--ada.kimg", "100"] if self.ada else []
        return STARTED if self._starts(size) else GAN, options

    def _evaluation(
        self, size: Size, speed: Speed, judging: float, most: float
    ) -> tuple[list[str], float]:
        """Options of the GAN's evaluation and its seconds, `most` at most: fewer images, then fewer
        extractors.

        A sample costs about a quarter of a training image, in fp32; ResNet-50 sees one above 64 px
        at 224.
        """
        features, judged = self.machine.features_per_second, self.labelled and not self.from_gan
        features /= (224 / 64) ** 2 if size.side > 64 else 1
        options: list[str] = [] if features or judged else ["--extractor", "pixels"]
        classes, per_class = max(1, self.of_gan.classes), PER_CLASS

        def seconds(n: int, searched: int, features: float) -> float:
            both = max(n, min(self.held_out, per_class * classes))
            through = judging + (1 / features if features else 0.0)
            rest = max(n, searched) / features if features else 0.0
            return both * (0.4 / speed.images_per_second + 2 * through) + 2 * n * judging + rest

        n, searched = min(GAN_IMAGES, self.held_out), min(SEARCHED, self.learnt)
        if seconds(n, searched, features) > most and features:
            searched = min(searched, SEARCHED_LESS)
            options += ["--searched", str(searched)]
        if seconds(n, searched, features) > most and features and judged:
            features = 0.0
            options += ["--extractor", "classifier"]
        if seconds(n, searched, features) > most:
            n = max(min(n, 200), int(n * most / seconds(n, searched, features)))
            per_class = max(10, min(per_class, n // classes))
            options += ["--n", str(n), "--per-class", str(per_class)]
        return options, seconds(n, searched, features)
