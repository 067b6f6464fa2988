"""Study `teach`: what does a classifier's loss do to a generator, from outside or as a head on the discriminator?"""

from pathlib import Path

import torch

from duetgan.data.reading.dataset import Dataset
from duetgan.inference.dataset import write_labelled
from duetgan.metrics.evaluate_gan import evaluate_generator
from duetgan.metrics.features.extractors import build
from duetgan.metrics.lineage import load_judge
from duetgan.models.gan import generate
from duetgan.models.restore import generator_from
from duetgan.studies.images import HELD_BACK, TEST, TRAIN, StudyConfig
from duetgan.studies.samples import COLUMNS, save_table
from duetgan.studies.subject import SEED, Comparison, Conclusion, Control, Result, Results, Settings, Subject
from duetgan.utils.checkpoint import Checkpoint, load, resolve
from duetgan.utils.config.model import InnerShare, PositiveFloat, PositiveInt
from duetgan.utils.distributed.collectives import choose_device
from duetgan.utils.errors import UserError
from duetgan.utils.seeding import numpy_generator

JUDGE, TEACHER, WRONG_TEACHER, WRONG_LABELS = "judge", "teacher", "teacher by chance", "labels by chance"
PLAIN, SHORT = "no classifier", "no classifier, stopped early"
FIGURES = {"recognised": True, "frechet": False, "diversity": True}  # whether larger is better
SHOWN = 10  # classes in the pictures


class TeachConfig(StudyConfig):
    """All settings of the study."""

    teacher: list[PositiveFloat] = [1.0]  # loss.classifier_weight, an arm each
    head: list[PositiveFloat] = [1.0]  # loss.auxiliary_weight, an arm each
    head_learns_samples: bool = True  # whether each head has a second arm, with loss.auxiliary_fakes
    n: PositiveInt = 2000  # samples and test images of a distance
    extractor: str = JUDGE  # whose features it is taken in: judge (its own), resnet50 or inception
    weights: str | None = None  # weights file of the extractor
    short: InnerShare = 0.1  # share of the steps after which the control stops

    def check(self) -> None:
        super().check()
        if self.gan.run is not None or not (self.teacher or self.head):
            raise UserError("gan.run must be null, and teacher or head must have a weight: the arms train generators")


class Teach(Subject):
    """Generators of one recipe, each judged by a classifier of images that neither they nor their teachers saw."""

    title = "What does a classifier's loss do to a generator?"

    controls = (
        Control(WRONG_TEACHER, PLAIN, "not helps", "a teacher that knows nothing must not help", figure="recognised"),
        Control(
            PLAIN, SHORT, "helps", "training on must help, or the study could not see any help", figure="recognised"
        ),
    )

    def declare(self) -> None:
        config, recipe, what = self.config, self.config.classifier, "training the judge, of images held back"
        self.run = self.training(JUDGE, what, recipe, images=self.part(HELD_BACK), seed=2000)
        teacher = self.training(TEACHER, "training the teacher", recipe, seed=1000)
        wrong = self.add(WRONG_LABELS, WRONG_LABELS, self._wrong_labels, {"images": self.part(TRAIN)}) / "images.lmdb"
        what = "training a teacher by chance"
        by_chance = self.training(WRONG_TEACHER, what, recipe, images=wrong, seed=1000)

        self._arm(PLAIN, "the recipe alone", {}, "plain")
        for weight in config.teacher:
            name, what = f"teacher, weight {weight:g}", "loss.classifier: a classifier of the same training images"
            self._arm(name, what, {"loss.classifier": teacher, "loss.classifier_weight": weight}, "taught")
        for weight in config.head:
            name, own = f"head on D, weight {weight:g}", {"loss.auxiliary_weight": weight}
            self._arm(name, "a head on D, of real images", own, "taught")
            if config.head_learns_samples:
                own = own | {"loss.auxiliary_fakes": True}
                self._arm(f"{name}, learns samples", "of samples, too", own, "taught")
        own = {"loss.classifier": by_chance, "loss.classifier_weight": max(config.teacher, default=1.0)}
        self._arm(WRONG_TEACHER, "the teacher has learnt labels by chance", own, "control")
        steps = max(1, round(config.short * config.gan.settings().steps))
        self._arm(SHORT, f"{config.short:g} of the steps", {}, "control", steps)

    def _arm(self, name: str, what: str, own: Settings, family: str, steps: int | None = None) -> None:
        def judge(run: Path, _seed: int) -> Result:
            checkpoint = load(resolve(str(run)))
            if not self.picture(name).is_file():  # samples at the same latents for every arm, a row for each class
                classes = checkpoint["classes"][:SHOWN]
                labels = torch.arange(len(classes)).repeat_interleave(COLUMNS)
                images = generate(generator_from(checkpoint), labels=labels, indices=range(len(labels)), seed=SEED)
                save_table(dict(zip(classes, images.split(COLUMNS), strict=True)), self.picture(name))
            return self.judged(checkpoint)

        key = {"n": self.config.n, "extractor": self.config.extractor, "judge": self.run}
        self.training(name, what, self.config.gan, own, family, steps=steps, judge=judge, key=key)

    def _wrong_labels(self, place: Path, _seed: int) -> Settings:
        with Dataset(self.part(TRAIN)) as reader:
            order = numpy_generator(self.config.data.seed, "study", "wrong labels").permutation(len(reader))
            images = (reader, range(len(reader)), reader.labels()[order])
            source = f"{reader.meta.source}, labels by chance"
            write_labelled(place / "images.lmdb", [images], reader.classes, source=source, overwrite=True)
        return {}

    def judged(self, checkpoint: Checkpoint) -> Result:
        """What the judge says of a generator. Raises UserError where it taught this one."""
        config, device, run = self.config, choose_device(self.device), str(self.run)
        generator = generator_from(checkpoint, device)
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
            {"frechet": row["frechet"], "recognised": figures["recognised"], "diversity": row["diversity_ratio"]}
        )

    # --- answers

    def conclude(self, results: Results) -> Conclusion:
        comparisons = [
            Comparison(PLAIN, arm.name, controls=controls, figure=figure, larger_is_better=larger, asked=True)
            for arm in self.arms
            if arm.family == "taught"
            for controls in [(WRONG_TEACHER,) if arm.name.startswith(TEACHER) else ()]
            for figure, larger in FIGURES.items()
        ]
        return Conclusion(
            comparisons=comparisons,
            pictures={arm.name: f"{arm.name}: the first seed's samples, a row for each class" for arm in self.arms},
            notes=[
                "recognised: share of samples that the judge, a classifier of the images held back, names as asked; "
                f"frechet: distance to the test images in the features of: {self.config.extractor}; "
                "diversity: pairwise distance within a class, real test images have 1",
                "intervals are over the training seeds; judge and teacher are one each",
            ],
        )


CONFIG, SUBJECT = TeachConfig, Teach
