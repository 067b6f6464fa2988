"""Study `teach`: what does a classifier's loss do to a generator?

The classifier is a trained network, the teacher, or an additional head on the discriminator.
"""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from duetgan.data.reading.dataset import Dataset
from duetgan.extras.studies.images import HELD_BACK, TEST, TRAIN, StudyConfig
from duetgan.extras.studies.results import Comparison, Result
from duetgan.extras.studies.subject import SEED, Job, Settings, Subject, of_seed
from duetgan.inference.dataset import write_labelled
from duetgan.metrics.evaluate_classifier import logits_of
from duetgan.metrics.evaluate_gan import evaluate_generator
from duetgan.metrics.features.extractors import build
from duetgan.metrics.lineage import load_judge
from duetgan.models.classifier import Classifier
from duetgan.models.gan import ImageGenerator, generate
from duetgan.models.restore import classifier_from, generator_from
from duetgan.utils.checkpoint import Checkpoint, load, resolve
from duetgan.utils.config.model import InnerFraction, PositiveFloat, PositiveInt
from duetgan.utils.distributed.collectives import choose_device
from duetgan.utils.errors import UserError
from duetgan.utils.images import save_rows
from duetgan.utils.seeding import numpy_generator

JUDGE, TEACHER = "judge", "teacher"
WRONG_TEACHER, WRONG_LABELS = "teacher by chance", "labels by chance"
CHOSEN, CHEAP = "chosen by the teacher", ("chosen by chance", "truncated by class")
CAPTION = "{}: the first seed's samples, a row for each class"
PLAIN, SHORT = "no classifier", "no classifier, stopped early"
# metric -> True if larger values are better
FIGURES = {"recognised": True, "frechet": False, "diversity": True}
MAX_CLASSES, COLUMNS = 10, 12  # classes in the pictures, and samples of each


class TeachConfig(StudyConfig):
    teacher: list[PositiveFloat] = [1.0]  # values of loss.classifier_weight, one arm each
    head: list[PositiveFloat] = [1.0]  # values of loss.auxiliary_weight, one arm each
    # true: each value of `head` has a second arm, with loss.auxiliary_fakes
    head_learns_samples: bool = True
    n: PositiveInt = 2000  # samples, and test images, for the Frechet distance
    extractor: str = JUDGE  # network whose features give the distance: judge, resnet50 or inception
    weights: str | None = None  # weights file of the extractor
    short: InnerFraction = 0.1  # fraction of the steps after which the control is stopped early
    pool: PositiveInt = 4  # candidates for each sample that a classifier chooses
    # truncation of samples towards the mean of their class, in a control without a classifier
    psi: InnerFraction = 0.7

    def check(self) -> None:
        super().check()
        if self.gan.run is not None or not (self.teacher or self.head):
            raise UserError(
                "gan.run must be null, and teacher or head must have a weight: the arms train generators"
            )


def answers(*controls: str) -> list[Comparison]:
    """Return comparisons with the arm PLAIN and with `controls`, one for each metric."""
    return [
        Comparison(PLAIN, controls=controls, figure=figure, larger_is_better=larger, asked=True)
        for figure, larger in FIGURES.items()
    ]


class Chosen(ImageGenerator):
    """A generator that returns the first of `pool` samples that a classifier predicts as requested.

    If there is no such sample, it returns the last one. All are drawn with the truncation `psi`.
    """

    def __init__(
        self, generator: ImageGenerator, classifier: Classifier | None, pool: int, psi: float
    ) -> None:
        super().__init__()
        self.generator = generator
        self.classifier = classifier
        self.pool = pool
        self.psi = psi
        self.z_dim = pool * generator.z_dim
        self.classes = generator.classes
        self.channels = generator.channels
        self.resolution = generator.resolution
        self.pixel_format = generator.pixel_format
        if psi < 1 and not generator.has_styles:
            raise UserError(
                f"psi {psi}: this generator has no w to truncate; name other arms with only"
            )

    def noise_shapes(self) -> list[tuple[int, int, int]]:
        return self.pool * self.generator.noise_shapes()

    def forward(self, z: Tensor, labels: Tensor, noise: Any, **options: Any) -> Tensor:
        size = len(noise) // self.pool
        chosen = z
        done = torch.zeros(len(z), dtype=torch.bool, device=z.device)
        options["truncation_psi"] = self.psi
        for number, latents in enumerate(z.chunk(self.pool, 1)):
            maps = noise[number * size : (number + 1) * size]
            images = self.generator(latents, labels, noise=maps, **options)
            chosen = torch.where(done.view(-1, 1, 1, 1), chosen, images) if number else images
            if self.classifier is not None:
                logits = logits_of(self.classifier, self.spec.from_float(images))
                done |= logits.argmax(1).to(z.device) == labels
        return chosen


class Teach(Subject):
    """A comparison of generators of one recipe with and without a classifier's loss.

    The judge that evaluates them is a classifier of images on which neither the generators nor
    their teachers were trained.
    """

    title = "What does a classifier's loss do to a generator?"

    def declare(self) -> None:
        config, recipe = self.config, self.config.classifier
        judge = Job(JUDGE, "training the judge, of images held back")
        self.run = self.training(judge, recipe, images=self.part(HELD_BACK), fixed=2000)
        teacher = self.training(Job(TEACHER, "training the teacher"), recipe, fixed=1000)
        place = self.add(
            Job(WRONG_LABELS, WRONG_LABELS), self._wrong_labels, images=self.part(TRAIN)
        )
        wrong_teacher = self.training(
            Job(WRONG_TEACHER, "training a teacher by chance"),
            recipe,
            images=place / "images.lmdb",
            fixed=1000,
        )

        longer = Comparison(
            SHORT,
            figure="recognised",
            expected="helps",
            why="training on must help, or the study could not see any help",
        )
        no_help = Comparison(
            PLAIN,
            figure="recognised",
            expected="not helps",
            why="a teacher that knows nothing must not help",
        )
        plain = self._arm(Job(PLAIN, "the recipe alone", "plain", [longer]), {})
        for weight in config.teacher:
            arm = Job(
                f"teacher, weight {weight:g}",
                "loss.classifier: a classifier of the same training images",
                "taught",
                answers(WRONG_TEACHER),
            )
            self._arm(arm, {"loss.classifier": teacher, "loss.classifier_weight": weight})
        for weight in config.head:
            name, overrides = f"head on D, weight {weight:g}", {"loss.auxiliary_weight": weight}
            self._arm(Job(name, "a head on D, of real images", "taught", answers()), overrides)
            if config.head_learns_samples:
                arm = Job(f"{name}, learns samples", "of samples, too", "taught", answers())
                self._arm(arm, overrides | {"loss.auxiliary_fakes": True})

        def choosing(arm: Job, classifier: Path | None, psi: float = 1.0) -> None:
            self.add(
                arm,
                self._chosen,
                classifier=classifier,
                psi=psi,
                generator=plain,
                pool=config.pool,
                n=config.n,
                extractor=config.extractor,
            )
            self.captions[arm.name] = CAPTION.format(arm.name)

        description = "its samples that the teacher names as asked"
        choosing(Job(CHOSEN, description, "taught", answers(*CHEAP)), teacher)
        description = "its samples that the teacher by chance names as asked"
        choosing(Job(CHEAP[0], description, "control"), wrong_teacher)
        description = f"its samples at psi {config.psi:g} of their class"
        choosing(Job(CHEAP[1], description, "control"), None, config.psi)
        self._arm(
            Job(WRONG_TEACHER, "the teacher has learnt labels by chance", "control", [no_help]),
            {
                "loss.classifier": wrong_teacher,
                "loss.classifier_weight": max(config.teacher, default=1.0),
            },
        )
        steps = max(1, round(config.short * config.gan.settings().steps))
        self._arm(Job(SHORT, f"{config.short:g} of the steps", "control"), {}, steps)
        self.notes = (
            "recognised: share of samples that the judge, a classifier of the images held back, names as asked; "
            f"frechet: distance to the test images in the features of: {config.extractor}; "
            "diversity: pairwise distance within a class, real test images have 1",
            "intervals are over the training seeds; judge and teacher are one each",
        )

    def _arm(self, arm: Job, overrides: Settings, steps: int | None = None) -> Path:
        config = self.config
        self.captions[arm.name] = CAPTION.format(arm.name)
        return self.training(
            arm,
            config.gan,
            overrides,
            steps=steps,
            n=config.n,
            extractor=config.extractor,
            judge=self.run,
        )

    def _chosen(
        self,
        place: Path,
        seed: int,
        generator: Path,
        classifier: Path | None,
        pool: int,
        psi: float,
        **_settings: object,
    ) -> Result:
        """Evaluate chosen or truncated samples of another arm's generator."""
        device = choose_device(self.device)
        checkpoint = load(resolve(str(of_seed(generator, seed))))
        network = None
        if classifier is not None:
            network = classifier_from(load(resolve(str(classifier))), device)
        chosen = Chosen(generator_from(checkpoint, device), network, pool, psi)
        return self.judged(checkpoint, place, chosen)

    def judge(self, run: Path) -> Result:
        checkpoint = load(resolve(str(run)))
        generator = generator_from(checkpoint, choose_device(self.device))
        return self.judged(checkpoint, run.parent, generator)

    def judged(self, checkpoint: Checkpoint, place: Path, generator: ImageGenerator) -> Result:
        """Evaluate a generator by the judge, and save a picture of samples.

        All arms have the same latents in their pictures. Raises UserError if the judge is not
        independent of the generator, whose training `checkpoint` describes.
        """
        config, run = self.config, str(self.run)
        device = choose_device(self.device)
        picture = self.picture(place.name.rpartition("-s")[0])
        if not picture.is_file():
            classes = checkpoint["classes"][:MAX_CLASSES]
            labels = torch.arange(len(classes)).repeat_interleave(COLUMNS)
            images = generate(generator, labels=labels, indices=range(len(labels)), seed=SEED)
            save_rows(
                [list(part) for part in images.split(COLUMNS)],
                picture,
                columns=COLUMNS,
                captions=classes,
            )

        with Dataset(self.part(TEST)) as dataset:
            classifier = load_judge(run, checkpoint, list(checkpoint["classes"]), device, dataset)
            extractor = f"classifier:{run}" if config.extractor == JUDGE else config.extractor
            figures = evaluate_generator(
                generator,
                dataset,
                n=config.n,
                seed=SEED,
                extractors=build(
                    [extractor], device=device, spec=dataset.spec, weights=config.weights
                ),
                classifier=classifier,
                per_class=max(2, config.n // len(dataset.classes)),
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
        with Dataset(images) as dataset:
            order = numpy_generator(self.config.data.seed, "study", "wrong labels").permutation(
                len(dataset)
            )
            relabelled = (dataset, range(len(dataset)), dataset.labels()[order])
            write_labelled(
                place / "images.lmdb",
                [relabelled],
                dataset.classes,
                source=f"{dataset.meta.source}, labels by chance",
                overwrite=True,
            )
        return {}


CONFIG, SUBJECT = TeachConfig, Teach
