"""Study `augment`: do a generator's samples help a classifier, beyond what weights, sampling and
augmentation do?
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from duetgan.data.reading.dataset import Dataset
from duetgan.studies.images import (
    HELD_BACK,
    HELD_OUT,
    TEST,
    TRAIN,
    StudyConfig,
    even,
    expected_counts,
)
from duetgan.studies.results import CLASSES, GROUPS, Comparison
from duetgan.studies.samples import Band, Drawing
from duetgan.studies.subject import UNTRAINED, Job, Settings, Subject
from duetgan.utils.config.model import PositiveFloat, PositiveInt
from duetgan.utils.errors import UserError

REAL, HELD = "real only", "held-back real images"
CLASSIC, SYNTHETIC, CONTROL = "classic", "synthetic", "control"
BASE, BEST = "best classic arm", "best arm with samples"
SAMPLES, SELECTED, NOISE = "samples", "selected samples", "untrained samples"  # jobs
EVERY = Comparison(REAL, group=GROUPS, family="all arms")


class SelectionConfig(Drawing):
    """Which samples the arms `selected` train on."""

    recognised: bool = True
    confidence: Band | None = (0.5, 1.0)
    pool: PositiveInt = 4  # samples drawn for each that is wanted


class AugmentConfig(StudyConfig):
    ratios: list[PositiveFloat] = [0.25, 0.5, 1.0, 2.0]  # samples per real image
    selected: list[bool] = [False, True]  # which kinds of samples
    selection: SelectionConfig = SelectionConfig()
    control_ratio: PositiveFloat = 1.0  # of both controls: images per real image
    # of the arm "stronger augmentation": keys of the classifier's recipe
    stronger: dict[str, Any] = {
        "augment.trivial_augment": True,
        "augment.cutmix": 1.0,
        "augment.mix_prob": 0.5,
    }
    # of every arm with samples, not of the controls: keys of the classifier's recipe, such as
    # data.sampling
    mixing: dict[str, Any] = {}

    def check(self) -> None:
        super().check()
        if not self.ratios or not self.selected:
            raise UserError(
                "ratios and selected: give at least one each, such as [0.5] and [false]"
            )


def synthetic_name(ratio: float, selected: bool) -> str:
    return f"samples {ratio:g}" + (", selected" if selected else "")


def file_of(place: Path, ratio: float) -> Path:
    return place / f"ratio-{ratio:g}.lmdb"


def sample_counts(counts: Sequence[int], ratio: float, *, fill: bool) -> list[int]:
    """Samples of each class at a ratio, rounded up: as many of each, or with `fill` each class's
    share of what all classes lack of the largest, which is how `data.synthetic.balance fill` mixes
    them in.
    """
    parts = max(counts) - np.array(counts, np.float64) if fill else np.ones(len(counts))
    return [int(count) for count in np.ceil(ratio * sum(counts) * parts / parts.sum() - 1e-9)]


class Augment(Subject):
    """The arms, trained alike for as many steps, with the same share of every batch where images
    are added. Choices are made on held-out images; the test images are looked at only by what was
    chosen.
    """

    title = "Do samples help the classifier?"
    sets = (HELD_OUT, TEST)

    def declare(self) -> None:
        config, control = self.config, self.config.control_ratio
        self.tail = not even(expected_counts(config.data))
        # where arms with samples mix them in another way, as many of each class
        self.fill = self.tail and config.mixing.get("data.synthetic.balance", "fill") == "fill"
        generator, untrained = self.generators()
        # by a classifier of the training images alone, every class seen equally often
        selector = self.selector(config.classifier, {"data.sampling": "balanced"})
        for name, source, ratios, drawing, pool, by in (
            (HELD, self.part(HELD_BACK), [control], None, None, None),
            (SAMPLES, generator, config.ratios, Drawing(), None, None),
            (SELECTED, generator, config.ratios, config.selection, config.selection.pool, selector),
            (NOISE, untrained, [control], Drawing(), None, None),
        ):
            how = {"generator": source, "drawing": drawing, "pool": pool, "selector": by}
            job = Job(name, f"{name}, {drawing or 'as they are'}")
            self.add(
                job,
                self._draw,
                ratios=ratios,
                tail=self.tail if name in (HELD, NOISE) else self.fill,
                **how,
            )
            self.captions[name] = f"{name}, a row for each class"

        answer = Comparison(BASE, group=GROUPS, controls=(UNTRAINED,), asked=True)
        self.best(BASE, CLASSIC)
        self.best(
            BEST, SYNTHETIC, [answer, Comparison(BASE, group=CLASSES, family="classes"), EVERY]
        )
        self._arm(Job(REAL, "the training images alone", CLASSIC), {})
        if self.tail:
            weights, sampling = {"loss.class_weights": "balanced"}, {"data.sampling": "balanced"}
            self._arm(
                Job("class weights", "each class's loss by 1 / its frequency", CLASSIC, [EVERY]),
                weights,
            )
            adjusted = Job(
                "logit adjustment",
                "log frequencies are added to logits in training",
                CLASSIC,
                [EVERY],
            )
            self._arm(adjusted, {"loss.logit_adjustment": 1.0})
            self._arm(
                Job("balanced sampling", "every class is seen equally often", CLASSIC, [EVERY]),
                sampling,
            )
        self.bases(Job("", family=CLASSIC, against=[EVERY]))
        self._arm(
            Job("stronger augmentation", _settings(config.stronger), CLASSIC, [EVERY]),
            config.stronger,
        )
        mixing = f", {_settings(config.mixing)}" if config.mixing else ""
        for kind in [SELECTED if selected else SAMPLES for selected in config.selected]:
            for ratio in config.ratios:
                name, what = (
                    synthetic_name(ratio, kind == SELECTED),
                    f"{ratio:g} {kind} per real image{mixing}",
                )
                self._arm(Job(name, what, SYNTHETIC, [EVERY]), config.mixing, kind, ratio)
        why = "samples without any content must not help"
        nothing = Comparison(REAL, expected="not helps", why=why)
        what = f"{control:g} samples of an untrained generator per real image"
        self._arm(Job(UNTRAINED, what, CONTROL, [nothing, EVERY]), {}, NOISE, control)
        why = "further real images must help, or the study could not see any help"
        real, what = (
            Comparison(REAL, expected="helps", why=why),
            f"{control:g} further real images per real image",
        )
        self._arm(Job(HELD, what, CONTROL, [real, EVERY]), {}, HELD, control)

    def _arm(self, arm: Job, own: Settings, job: str = "", ratio: float = 0.0) -> None:
        """An arm with overrides of its own, and with the images of a job mixed in."""
        used = None
        if job:
            file = file_of(self.place(job), ratio)
            mixed = {
                "data.synthetic.path": file,
                "data.synthetic.share": round(ratio / (1 + ratio), 6),
            }
            own = mixed | ({"data.synthetic.balance": "fill"} if self.tail else {}) | dict(own)
            used = (self.place(job), file.stem) if arm.family == SYNTHETIC else None
        self.training(arm, self.config.classifier, own, used=used)

    def _draw(
        self, place: Path, seed: int, ratios: Sequence[float], tail: bool, **how: Any
    ) -> Settings:
        """A file for each ratio. Tells `kept`, the share of the drawn samples of each class that
        the selection keeps, `counts`: what each file holds, fewer than asked for where the
        selection's pool has no more, and as `figures` their shares of what was asked for.
        """
        files = {
            file_of(place, ratio): sample_counts(self.counts(TRAIN), ratio, fill=tail)
            for ratio in ratios
        }
        kept, counts = self.draw(files, seed=seed, **how), {}
        for file in files:
            with Dataset(file) as reader:
                counts[file.stem] = list(reader.meta.histogram)
        self.show(place.name, file_of(place, max(ratios)))
        figures = {
            file.stem: sum(counts[file.stem]) / sum(wanted) for file, wanted in files.items()
        }
        return {"kept": kept, "counts": counts, "figures": figures}

    @property
    def notes(self) -> list[str]:  # type: ignore[override]
        steps = self.config.classifier.overrides.get("steps")
        notes = [
            f"every arm has the same recipe and number of steps{'' if steps is None else f', {steps}'}: where samples "
            "are mixed in, real images are seen less often, and in short trainings what learns slowly, as under strong "
            "augmentation, looks worse than it is",
            "choices were made by the mean recall on held-out images; the intervals cover the chance of training and "
            "the draw of test images, not the training images or the generator, of which there is one",
            "training images: "
            + ", ".join(
                f"{name} {count:,}"
                for name, count in zip(self.classes(), self.counts(TRAIN), strict=True)
            ),
        ]
        if made := self.outcome(self.place(SELECTED)):
            shares = [share for share in made["kept"] if share is not None]
            notes.append(
                f"the selection kept {min(shares):.0%} to {max(shares):.0%} of the drawn samples of a class"
            )
            for ratio in self.config.ratios:
                wanted = sample_counts(self.counts(TRAIN), ratio, fill=self.fill)
                rows = zip(made["counts"][f"ratio-{ratio:g}"], wanted, self.classes(), strict=True)
                if few := [
                    f"{name} {held} of {asked}" for held, asked, name in rows if held < asked
                ]:
                    notes.append(
                        f"{synthetic_name(ratio, True)}: the pool had too few of some classes, so that each of these is"
                        f" seen more often ({', '.join(few)}); a larger selection.pool gives more"
                    )
        return notes


def _settings(overrides: Mapping[str, Any]) -> str:
    return ", ".join(f"{key.partition('.')[2] or key} {value}" for key, value in overrides.items())


CONFIG, SUBJECT = AugmentConfig, Augment
