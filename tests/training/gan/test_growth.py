"""The schedule of progressive growing: against a loop that grows image by image, and its properties."""

from contextlib import nullcontext
from fractions import Fraction
from typing import Any, NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from duetgan.training.gan.config import GanConfig
from duetgan.training.gan.growth import ProgressiveConfig, Stage, Stages
from duetgan.utils.config.build import build
from duetgan.utils.errors import UserError

SIDES = (8, 16, 32, 64)


class Lengths(NamedTuple):
    """A schedule in images."""

    sides: tuple[int, ...]
    fades: dict[int, int]  # all but the first
    stables: dict[int, int]  # all but the last
    batches: dict[int, int]


def stages_of(lengths: Lengths, steps: int = 1000, **options: Any) -> Stages:
    config = ProgressiveConfig(
        start=lengths.sides[0],
        fade_kimg={side: images / 1000 for side, images in lengths.fades.items()},
        stable_kimg={side: images / 1000 for side, images in lengths.stables.items()},
        batch_sizes=lengths.batches,
        **options,
    )
    return Stages(config, lengths.sides[-1], steps, 77)


def grown(lengths: Lengths, steps: int) -> list[tuple[int, Fraction, int, int, int]]:
    """Resolution, alpha, batch size, images seen before and first step of every step, by walking through them."""
    rows: list[tuple[int, Fraction, int, int, int]] = []
    number, seen, total, first = 0, 0, 0, 0  # stage, images of the stage, of the run, first step of the stage
    for step in range(steps):
        side = lengths.sides[number]
        fade = lengths.fades[side] if number else 0
        alpha = Fraction(min(seen, fade), fade) if fade else Fraction(1)
        rows.append((side, alpha, lengths.batches[side], total, first))
        seen, total = seen + lengths.batches[side], total + lengths.batches[side]
        if number + 1 < len(lengths.sides) and seen >= fade + lengths.stables[side]:
            number, seen, first = number + 1, 0, step + 1
    return rows


@st.composite
def schedules(draw: st.DrawFn) -> Lengths:
    """Short stages, so that a few hundred steps pass all of them; some without fade, some without a stable part."""
    first = draw(st.integers(0, 2))
    sides = SIDES[first : draw(st.integers(first + 2, 4))]
    images = st.integers(0, 200)
    fades = {side: draw(images) for side in sides[1:]}
    stables = {side: draw(st.integers(0 if fades.get(side) else 1, 200)) for side in sides[:-1]}
    batches = {side: draw(st.integers(2, 40)) for side in sides}  # at most 600 steps to the full resolution
    return Lengths(sides, fades, stables, batches)


def spans(stages: Stages) -> list[tuple[int, int, int]]:
    return [(stage.first_step, stage.resolution, stage.batch_size) for stage in stages.all]


@settings(derandomize=True, deadline=None)
@given(lengths=schedules())
def test_every_step_is_that_of_the_walk(lengths):
    stages = stages_of(lengths)
    for step, (side, alpha, batch, images, first) in enumerate(grown(lengths, 150)):
        stage = stages.at(step)
        assert (stage.resolution, stage.batch_size, stage.first_step) == (side, batch, first)
        assert stage.alpha == float(alpha)
        assert stages.images_at(step) == images


@settings(derandomize=True, deadline=None)
@given(lengths=schedules(), steps=st.integers(1, 200))
def test_whether_the_run_is_long_enough(lengths, steps):
    stages = stages_of(lengths, steps)
    full = [(side, alpha) == (lengths.sides[-1], Fraction(1)) for side, alpha, *_ in grown(lengths, 700)].index(True)
    rows = stages.describe()
    assert (len(rows), rows[-1].startswith("warning: ")) == (len(lengths.sides) + (steps <= full), steps <= full)
    assert steps > full or f"at alpha 1 begin at step {full:,}:" in rows[-1]


def test_spans_are_the_stages_by_one_number_or_many():
    progressive = ProgressiveConfig(start=8, fade_kimg=0.6, stable_kimg=1, batch_sizes={16: 50})
    config = GanConfig(progressive=progressive, steps=100, batch_size=10)
    stages = config.stages(32)
    assert config.spans(32) == spans(stages) == [(0, 8, 10), (100, 16, 50), (132, 32, 10)]
    expected = Stage(resolution=32, alpha=0.5, batch_size=10, first_step=132, first_image=2600, fade_images=600)
    assert stages.at(132 + 30) == expected
    assert stages.images_at(133) == 1000 + 1600 + 10


@pytest.mark.parametrize("length", [1.001, {16: 1.001, 32: 1.001}])  # times 1000 it is a little less than 1001
def test_lengths_are_whole_images(length):
    stages = Stages(ProgressiveConfig(start=8, fade_kimg=length, stable_kimg=1), 32, 100, 1)
    assert spans(stages) == [(0, 8, 1), (1000, 16, 1), (3001, 32, 1)]


@pytest.mark.parametrize("config", [ProgressiveConfig(), ProgressiveConfig(batch_sizes={8: 3}, fade_kimg={})])
def test_without_growth_there_is_one_stage(config):
    stages = Stages(config, 48, 70, 12)  # any resolution
    assert (stages.growing, stages.describe()) == (False, [])
    assert stages.all == [Stage(48, 12, 0, 0, 0, alpha=1.0)]


def test_plan():
    config = ProgressiveConfig(start=8, fade_kimg={16: 2, 32: 0}, stable_kimg=1, batch_sizes={8: 64})
    stages = Stages(config, 32, 200, 20)
    assert stages.describe() == [
        "8 px from step 0: batches of 64, fading in over 0 images; Adam's moments start anew",
        "16 px from step 16: batches of 20, fading in over 2,000 images; Adam's moments start anew",
        "32 px from step 166: batches of 20, fading in over 0 images; Adam's moments start anew",
    ]
    assert Stages(config, 32, 66, 20).describe()[3:] == [
        "warning: the run ends at 16 px with alpha 0.49; 32 px at alpha 1 begin at step 166: raise steps (66) above "
        "that or shorten the stages",
    ]
    config = ProgressiveConfig(start=8, reset_optimizer=False)
    assert "Adam's moments go on" in Stages(config, 32, 200, 20).row(stages.at(0))


@pytest.mark.parametrize(
    ("options", "resolution", "message"),
    [
        ({}, 8, r"^progressive\.start 8: the images are not larger"),
        ({}, 4, r"^progressive\.start 8: doubling it never gives the images' 4 px"),
        ({}, 48, r"doubling it never gives the images' 48 px; choose a start that does"),
        (
            {"batch_sizes": {64: 4}},
            32,
            r"^progressive\.batch_sizes: no stage of 64 px takes a value; give values for \[8, 16, 32\] only",
        ),
        ({"fade_kimg": {8: 4, 16: 1, 32: 1}}, 32, r"^progressive\.fade_kimg: no stage of 8 px .* \[16, 32\] only"),
        ({"stable_kimg": {8: 4, 16: 1, 32: 1}}, 32, r"^progressive\.stable_kimg: no stage of 32 px .* \[8, 16\] only"),
        ({"fade_kimg": {16: 1}}, 32, r"^progressive\.fade_kimg: no value for 32 px; give one"),
        ({"stable_kimg": {16: 1}}, 32, r"^progressive\.stable_kimg: no value for 8 px"),
        ({"stable_kimg": {8: 0, 16: 1}}, 32, r"the stage of 8 px sees no images; .* progressive\.stable_kimg"),
        ({"stable_kimg": {8: 1, 16: 0}, "fade_kimg": 0}, 32, r"the stage of 16 px sees no images"),
    ],
)
def test_stages_that_do_not_fit_are_refused(options, resolution, message):
    with pytest.raises(UserError, match=message):
        Stages(ProgressiveConfig(start=8, **options), resolution, 100, 8)


def test_batches_and_schedules_have_a_least_length():
    groups: dict[str, Any] = {"discriminator": {"minibatch_std_group": 3}}
    assert GanConfig(**groups).smallest_batch == 6  # path lengths take half of it
    groups["loss"] = {"feature_matching_weight": 1, "feature_matching_group": 5}
    assert GanConfig(**groups).smallest_batch == 30
    for kimg, steps, images in ((None, 40, 480), (0.055, 5, 55), (1e-6, 1, 1)):
        config = GanConfig(steps=40, batch_size=12, schedule_kimg=kimg)
        assert (config.schedule_steps(32), config.schedule_images(32)) == (steps, images)
    progressive = ProgressiveConfig(start=8, fade_kimg=0.6, stable_kimg=1, batch_sizes={16: 50})
    for kimg, steps in ((0.5, 50), (1.0, 100), (2.0, 120), (2.6, 132), (3.0, 172)):
        config = GanConfig(progressive=progressive, steps=200, batch_size=10, schedule_kimg=kimg)
        assert config.schedule_steps(32) == steps
        assert config.stages(32).images_at(steps) == config.schedule_images(32)


@pytest.mark.parametrize(
    ("world", "changes", "message"),
    [
        (3, {}, r"^batch_size 64 of the stage of 8 px: the number of processes 3 does not divide 64"),
        (16, {}, r"^batch_size 24 of the stage of 16 px: .* 16 does not divide 24"),
        (5, {"progressive": {}}, r"^batch_size 24 of the stage of 16 px: the number of processes 5"),
        (2, {"micro_batch": 8}, r"^batch_size 24 .*: micro_batch 8 does not divide 12 samples \(2 processes"),
        (1, {"discriminator": {"minibatch_std_group": 16}}, r"^batch_size 24 .*group 16 does not divide 24"),
        (1, {"micro_batch": 2}, r"^batch_size 64 .*minibatch_std_group 4 does not divide 2 "),
        (1, {"loss": {"feature_matching_weight": 1, "feature_matching_group": 3}}, r"_group 3 does not divide 64"),
        (1, {"micro_batch": 4, "loss": {"feature_matching_weight": 1}}, r"feature_matching_group 8 does not divide 4 "),
        (8, {"loss": {"path_length_weight": 2}}, r"loss\.path_length_weight .* 2 does not divide 3 samples"),
        (2, {"micro_batch": 4, "loss": {"path_length_weight": 2}}, None),
        (6, {"micro_batch": 16, "progressive": {}}, None),  # 4 samples in one pass
    ],
)
def test_batches_that_do_not_fit_name_their_stage(world, changes, message):
    config = build(GanConfig, {"batch_size": 24, "progressive": {"start": 8, "batch_sizes": {8: 64}}} | changes)
    with nullcontext() if message is None else pytest.raises(UserError, match=message):
        config.check_batches(config.stages(16), world)
