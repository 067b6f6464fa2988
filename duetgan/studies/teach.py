"""Study `teach`: what does a classifier's loss do to a generator, from outside or as a head on the
discriminator?
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from duetgan.data.reading.dataset import Dataset
from duetgan.inference.dataset import write_labelled
from duetgan.metrics.evaluate_classifier import logits_of
from duetgan.metrics.evaluate_gan import evaluate_generator
from duetgan.metrics.features.extractors import build
from duetgan.metrics.lineage import load_judge
from duetgan.models.classifier import Classifier
from duetgan.models.gan import ImageGenerator, generate
from duetgan.models.restore import classifier_from, generator_from
from duetgan.studies.images import HELD_BACK, TEST, TRAIN, StudyConfig
from duetgan.studies.results import Comparison, Result
from duetgan.studies.subject import SEED, Job, Settings, Subject, of_seed
from duetgan.utils.checkpoint import Checkpoint, load, resolve
from duetgan.utils.config.model import InnerShare, PositiveFloat, PositiveInt
from duetgan.utils.distributed.collectives import choose_device
from duetgan.utils.errors import UserError
from duetgan.utils.images import save_rows
from duetgan.utils.seeding import numpy_generator

JUDGE, TEACHER, WRONG_TEACHER, WRONG_LABELS = (
    "judge",
    "teacher",
    "teacher by chance",
    "labels by chance",
)
CHOSEN, CHEAP = "chosen by the teacher", ("chosen by chance", "truncated by class")
CAPTION = "{}: the first seed's samples, a row for each class"
PLAIN, SHORT = "no classifier", "no classifier, stopped early"
FIGURES = {"recognised": True, "frechet": False, "diversity": True}  # whether larger is better
SHOWN, COLUMNS = 10, 12  # classes in the pictures, and samples of each


class TeachConfig(StudyConfig):
    teacher: list[PositiveFloat] = [1.0]  # loss.classifier_weight, an arm each
    head: list[PositiveFloat] = [1.0]  # loss.auxiliary_weight, an arm each
    # whether each head has a second arm, with loss.auxiliary_fakes
    head_learns_samples: bool = True
    n: PositiveInt = 2000  # samples and test images of a distance
    extractor: str = JUDGE  # whose features it is taken in: judge (its own), resnet50 or inception
    weights: str | None = None  # weights file of the extractor
    short: InnerShare = 0.1  # share of the steps after which the control stops
    pool: PositiveInt = 4  # samples drawn for each that a classifier chooses
    # truncation towards a class's mean, of what is cheap without a classifier
    psi: InnerShare = 0.7

    def check(self) -> None:
        super().check()
        if self.gan.run is not None or not (self.teacher or self.head):
            raise UserError(
                "gan.run must be null, and teacher or head must have a weight: the arms train generators"
            )


def answers(*controls: str) -> list[Comparison]:
    """What is asked of an arm."""
    return [
        Comparison(PLAIN, controls=controls, figure=figure, larger_is_better=larger, asked=True)
        for figure, larger in FIGURES.items()
    ]


class Chosen(ImageGenerator):
    """Of `pool` samples the first that a classifier names as asked, else the last; each is
    truncated to `psi`.
    """

    def __init__(
        self, generator: Any, classifier: Classifier | None, pool: int, psi: float
    ) -> None:
        super().__init__()
        self.generator, self.classifier, self.pool, self.psi = generator, classifier, pool, psi
        self.z_dim, self.classes, self.channels = (
            pool * generator.z_dim,
            generator.classes,
            generator.channels,
        )
        self.resolution, self.pixel_format = generator.resolution, generator.pixel_format
        if psi < 1 and not generator.has_styles:
            raise UserError(
                f"psi {psi}: this generator has no w to truncate; name other arms with only"
            )

    def noise_shapes(self, resolution: int | None = None) -> list[tuple[int, int, int]]:
        return self.pool * self.generator.noise_shapes(resolution)

    def forward(self, z: Tensor, labels: Tensor, noise: Any, **options: Any) -> Tensor:
        size, chosen, done = (
            len(noise) // self.pool,
            z,
            torch.zeros(len(z), dtype=torch.bool, device=z.device),
        )
        for number, own in enumerate(z.chunk(self.pool, 1)):
            maps = noise[number * size : (number + 1) * size]
            images = self.generator(
                own, labels, noise=maps, **options | {"truncation_psi": self.psi}
            )
            chosen = torch.where(done.view(-1, 1, 1, 1), chosen, images) if number else images
            if self.classifier is not None:
                done |= (
                    logits_of(self.classifier, self.spec.from_float(images)).argmax(1).to(z.device)
                    == labels
                )
        return chosen


class Teach(Subject):
    """Generators of one recipe, each judged by a classifier of images that neither they nor their
    teachers saw.
    """

    title = "What does a classifier's loss do to a generator?"

    def declare(self) -> None:
        config, recipe = self.config, self.config.classifier
        judge = Job(JUDGE, "training the judge, of images held back")
        self.run = self.training(judge, recipe, images=self.part(HELD_BACK), fixed=2000)
        teacher = self.training(Job(TEACHER, "training the teacher"), recipe, fixed=1000)
        wrong = (
            self.add(Job(WRONG_LABELS, WRONG_LABELS), self._wrong_labels, images=self.part(TRAIN))
            / "images.lmdb"
        )
        by_chance = self.training(
            Job(WRONG_TEACHER, "training a teacher by chance"), recipe, images=wrong, fixed=1000
        )

        why = "training on must help, or the study could not see any help"
        longer = Comparison(SHORT, figure="recognised", expected="helps", why=why)
        why = "a teacher that knows nothing must not help"
        nothing = Comparison(PLAIN, figure="recognised", expected="not helps", why=why)
        plain = self._arm(Job(PLAIN, "the recipe alone", "plain", [longer]), {})
        for weight in config.teacher:
            name, what = (
                f"teacher, weight {weight:g}",
                "loss.classifier: a classifier of the same training images",
            )
            own = {"loss.classifier": teacher, "loss.classifier_weight": weight}
            self._arm(Job(name, what, "taught", answers(WRONG_TEACHER)), own)
        for weight in config.head:
            name, own = f"head on D, weight {weight:g}", {"loss.auxiliary_weight": weight}
            self._arm(Job(name, "a head on D, of real images", "taught", answers()), own)
            if config.head_learns_samples:
                both = own | {"loss.auxiliary_fakes": True}
                self._arm(
                    Job(f"{name}, learns samples", "of samples, too", "taught", answers()), both
                )
        drawn: dict[str, Any] = {
            "generator": plain,
            "pool": config.pool,
            "n": config.n,
            "extractor": config.extractor,
        }
        for name, what, family, classifier, psi, against in (
            (
                CHOSEN,
                "its samples that the teacher names as asked",
                "taught",
                teacher,
                1.0,
                answers(*CHEAP),
            ),
            (
                CHEAP[0],
                "its samples that the teacher by chance names as asked",
                "control",
                by_chance,
                1.0,
                [],
            ),
            (
                CHEAP[1],
                f"its samples at psi {config.psi:g} of their class",
                "control",
                None,
                config.psi,
                [],
            ),
        ):
            self.add(
                Job(name, what, family, against),
                self._chosen,
                classifier=classifier,
                psi=psi,
                **drawn,
            )
            self.captions[name] = CAPTION.format(name)
        own = {
            "loss.classifier": by_chance,
            "loss.classifier_weight": max(config.teacher, default=1.0),
        }
        self._arm(
            Job(WRONG_TEACHER, "the teacher has learnt labels by chance", "control", [nothing]), own
        )
        steps = max(1, round(config.short * config.gan.settings().steps))
        self._arm(Job(SHORT, f"{config.short:g} of the steps", "control"), {}, steps)
        self.notes = (
            "recognised: share of samples that the judge, a classifier of the images held back, names as asked; "
            f"frechet: distance to the test images in the features of: {config.extractor}; "
            "diversity: pairwise distance within a class, real test images have 1",
            "intervals are over the training seeds; judge and teacher are one each",
        )

    def _arm(self, arm: Job, own: Settings, steps: int | None = None) -> Path:
        config = self.config
        self.captions[arm.name] = CAPTION.format(arm.name)
        return self.training(
            arm,
            config.gan,
            own,
            steps=steps,
            n=config.n,
            extractor=config.extractor,
            judge=self.run,
        )

    def _chosen(
        self, place: Path, seed: int, generator: Path, classifier: Path | None, **how: Any
    ) -> Result:
        """Samples of another arm's run."""
        checkpoint = load(resolve(str(of_seed(generator, seed))))
        by = (
            None
            if classifier is None
            else classifier_from(load(resolve(str(classifier))), choose_device(self.device))
        )
        return self.judged(
            checkpoint, place, partial(Chosen, classifier=by, pool=how["pool"], psi=how["psi"])
        )

    def judge(self, run: Path) -> Result:
        return self.judged(load(resolve(str(run))), run.parent)

    def judged(
        self, checkpoint: Checkpoint, place: Path, chosen: Callable[..., Any] = lambda each: each
    ) -> Result:
        """What the judge says of a generator, or of what is chosen of its samples; and a picture of
        samples at the same latents for every arm. Raises UserError where it taught this one.
        """
        config, device, run = self.config, choose_device(self.device), str(self.run)
        generator, picture = (
            chosen(generator_from(checkpoint, device)),
            self.picture(place.name.rpartition("-s")[0]),
        )
        if not picture.is_file():
            classes = checkpoint["classes"][:SHOWN]
            labels = torch.arange(len(classes)).repeat_interleave(COLUMNS)
            images = generate(generator, labels=labels, indices=range(len(labels)), seed=SEED)
            save_rows(
                [list(part) for part in images.split(COLUMNS)],
                picture,
                columns=COLUMNS,
                captions=classes,
            )

        with Dataset(self.part(TEST)) as reader:
            classifier = load_judge(run, checkpoint, list(checkpoint["classes"]), device, reader)
            spec = f"classifier:{run}" if config.extractor == JUDGE else config.extractor
            figures = evaluate_generator(
                generator,
                reader,
                n=config.n,
                seed=SEED,
                extractors=build([spec], device=device, spec=reader.spec, weights=config.weights),
                classifier=classifier,
                per_class=max(2, config.n // len(reader.classes)),
                floor=False,
                searched=0,
                details=False,
            )
        row = figures["distances"][0]
        return Result(
            {
                "frechet": row["frechet"],
                "recognised": figures["recognised"],
                "diversity": row["diversity_ratio"],
            }
        )

    def _wrong_labels(self, place: Path, _seed: int, images: Path) -> Settings:
        with Dataset(images) as reader:
            order = numpy_generator(self.config.data.seed, "study", "wrong labels").permutation(
                len(reader)
            )
            every = (reader, range(len(reader)), reader.labels()[order])
            write_labelled(
                place / "images.lmdb",
                [every],
                reader.classes,
                source=f"{reader.meta.source}, labels by chance",
                overwrite=True,
            )
        return {}


CONFIG, SUBJECT = TeachConfig, Teach
