"""`duet pack --group-column` and `--group-from`: patients, cameras and sequences stay on one side of a split."""

import itertools
import re
import shutil
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from PIL import Image

from duetgan.commands.pack import main
from duetgan.commands.planning.measure import survey
from duetgan.commands.planning.plan import choose
from duetgan.data.lmdb.reader import LMDBReader
from duetgan.data.packing import split
from duetgan.data.packing.pack import pack
from duetgan.data.packing.split import balance, group_counts
from duetgan.data.reading.dataset import Dataset
from duetgan.reporting.figures import data_tables
from duetgan.training.base.data import facts
from duetgan.utils.config.cli import Parser, add_table_options
from tests.commands.machines import Fast
from tests.data.conftest import source_at, succeed
from tests.data.packing.test_duplicates import photos, saved

PATIENT = "--group-from=_(p[0-9]+)_"


def exact_cost(counts: np.ndarray, chosen: tuple[bool, ...], fraction: Fraction) -> tuple[int, Fraction]:
    """Number of classes that a part lacks without need, then the sum of squared differences, by definition."""
    lacking, squares = 0, Fraction(0)
    for column in counts.T.tolist():
        if any(column):
            held = sum(count for count, is_chosen in zip(column, chosen, strict=True) if is_chosen)
            several = sum(count > 0 for count in column) > 1
            lacking += held == sum(column) or (several and held == 0)
            squares += (Fraction(held, sum(column)) - fraction) ** 2
    return lacking, squares


@st.composite
def groupings(draw: Callable[..., Any], most: int) -> tuple[np.ndarray, Fraction]:
    """Numbers of images of each class, and of all, in each group; a fraction."""
    classes = draw(st.integers(1, 3))
    rows = st.lists(st.integers(0, 12), min_size=classes, max_size=classes).filter(any)
    counts = np.array(draw(st.lists(rows, min_size=2, max_size=most)))
    fraction = draw(st.sampled_from(["0.1", "0.2", "0.25", "0.5"]))
    return np.column_stack([counts, counts.sum(1)]), Fraction(str(fraction))


@settings(max_examples=40)
@given(groupings(most=7))
@example((np.array([[0, 1, 1], [1, 0, 1]]), Fraction(1, 10)))
def test_few_groups_are_divided_as_well_as_any_choice_can(case):
    counts, fraction = case
    choices = itertools.product((False, True), repeat=len(counts))
    best = min(exact_cost(counts, choice, fraction) for choice in choices)
    start = np.zeros(len(counts), bool)
    found = exact_cost(counts, tuple(balance(counts, float(fraction), start)), fraction)
    assert found[0] == best[0]
    assert float(found[1]) == pytest.approx(float(best[1]), abs=1e-9)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(split, "TRIED", 0)  # the search that many groups need
        near = balance(counts, float(fraction), start)
    cost = exact_cost(counts, tuple(near), fraction)
    for moved in near ^ np.eye(len(counts), dtype=bool):  # no move of one group to the other part is better
        lacking, squares = exact_cost(counts, tuple(moved), fraction)
        assert cost <= (lacking, squares + Fraction(1, 10**9))
    assert near.sum() < len(counts)
    if best[0] == 0:  # else each choice leaves a part without some class, and holding out nothing may be best
        assert near.sum() > 0
        assert cost[0] == 0


@pytest.mark.parametrize("seed", range(4))
def test_many_groups_are_within_the_bound(seed):
    """No move improves the choice; added up over all groups, that is the bound in `balance`."""
    rng = np.random.default_rng(seed)
    counts = rng.integers(0, 2, (60, 4)) * rng.integers(1, 30, (60, 4))
    counts = np.column_stack([counts, counts.sum(1)])[counts.any(1)]
    fraction = (0.1, 0.2, 0.3, 0.5)[seed]
    start = rng.random(len(counts)) < fraction
    chosen = balance(counts, fraction, start)
    parts = counts / counts.sum(0)

    def squares(held: np.ndarray) -> float:
        return float(np.square(parts[held].sum(0) - fraction).sum())

    weights = np.where(chosen, 1 - fraction, fraction)
    assert squares(chosen) <= (weights * np.square(parts).sum(1)).sum() / 2
    assert squares(chosen) <= squares(start)
    for group in range(len(counts)):
        moved = chosen.copy()
        moved[group] ^= True
        assert squares(moved) >= squares(chosen) - 1e-9
    assert np.abs(parts[chosen].sum(0) - fraction).max() < 0.04  # of every class, and of all


def test_a_class_of_one_group_is_trained_on_and_counts_add_up():
    counts = np.array([[9, 1, 10], [0, 2, 2], [0, 2, 2]])
    assert balance(counts, 0.5, np.zeros(3, bool)).tolist()[0] is False
    groups = [np.array([0, 2]), np.array([1, 3, 4])]
    labels = np.array([0, 2, 1, 2, 0])
    assert group_counts(groups, labels, np.eye(3, dtype=bool)).tolist() == [[1, 1, 0, 2], [1, 0, 2, 3]]
    sets = np.array([[1, 1], [0, 1], [0, 0]], bool)  # classes of label sets
    assert group_counts(groups, labels, sets).tolist() == [[1, 2, 2], [1, 1, 3]]
    assert group_counts(groups, labels * 0, np.eye(0, dtype=bool)).tolist() == [[2], [3]]


@pytest.fixture(scope="module")
def scans(tmp_path_factory):
    """60 images of 15 patients, whose numbers are in the names; p3 and p4 share an image, one of them as JPEG."""
    folder = tmp_path_factory.mktemp("scans")
    images = photos(60, side=32)
    images[16] = saved(images[12:13])[0]
    for number, image in enumerate(images):
        kind = ("ill", "well")[number % 4 // 2 if number // 4 % 3 else 0]
        path = folder / "scans" / kind / f"x_p{number // 4}_{number:02d}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(image.transpose(1, 2, 0)).save(path)
    files = sorted((folder / "scans").rglob("*.png"))
    rows = [(f"scans/{path.parent.name}/{path.name}", path.parent.name, path.name.split("_")[1]) for path in files]
    (folder / "t.csv").write_text("\n".join(map(",".join, [("path", "label", "patient"), *rows])))
    return folder


def parts_of(file: Path) -> list[list[str]]:
    """Patients in the training file and in the held-out one."""
    found = []
    for path in (file, split.val_path(file)):
        with LMDBReader(path) as reader:
            found.append(sorted({name.split("_")[1] for name in reader.names()}))
    return found


def test_no_patient_is_on_both_sides_and_the_files_plan_and_report_say_so(scans, tmp_path, capsys):
    file = tmp_path / "a.lmdb"
    succeed(main, scans / "scans", file, "--size=16", "--val-share", "0.2", PATIENT)
    said = capsys.readouterr().out
    training, held_out = parts_of(file)
    assert not set(training) & set(held_out)
    assert len(training) + len(held_out) == 15
    assert ({"p3", "p4"} <= set(training)) or ({"p3", "p4"} <= set(held_out))
    option = "--group-from '_(p[0-9]+)_'"
    assert f"{len(held_out)} held out whole ({option})" in said
    with Dataset(file) as dataset, Dataset(split.val_path(file)) as val_dataset:
        splits = [each.meta.split for each in (dataset, val_dataset)]
        assert [(each.group_by, each.groups) for each in splits if each] == [
            (option, len(part)) for part in (training, held_out)
        ]
        assert abs(np.array(val_dataset.meta.by_class) / [40, 20] - 0.2).max() <= 0.1
        dataset.synthetic = None
        run: Any = SimpleNamespace(data=facts(dataset, val_dataset))
        rows = data_tables(run)[0][1]
    assert [row[-1] for row in rows] == [f"{len(part)} ({option})" for part in (training, held_out)]
    succeed(main, scans / "t.csv", tmp_path / "t.lmdb", "--size=16", "--val-share=0.2", "--group-column=patient")
    assert parts_of(tmp_path / "t.lmdb") == [training, held_out]  # the same split
    succeed(main, scans / "scans", tmp_path / "s.lmdb", "--size=16", "--val-share=0.2", "--seed=1", PATIENT)
    assert parts_of(tmp_path / "s.lmdb") != [training, held_out]

    parser = Parser(prog="x")
    add_table_options(parser)
    found = survey(str(scans / "scans"), parser.parse_args([PATIENT]))
    plan = choose(found, Fast(), minutes=15)
    assert "each of the 15 groups stays whole" in plan.notes[0]
    succeed(main, scans / "scans", tmp_path / "b.lmdb", "--size=16", "--val-share=0.2", PATIENT)
    with LMDBReader(tmp_path / "b-val.lmdb") as reader:
        assert abs(plan.held_out - len(reader)) <= 4  # the images of a patient


def test_a_skipped_image_moves_no_other_to_another_group(scans, tmp_path):
    shutil.copytree(scans / "scans", tmp_path / "scans")
    min((tmp_path / "scans").rglob("*.png")).write_text("no image")
    options = ["--size=16", "--val-share=0.2", "--on-error=skip", PATIENT]
    succeed(main, tmp_path / "scans", tmp_path / "x.lmdb", *options)
    training, held_out = parts_of(tmp_path / "x.lmdb")
    assert held_out
    assert not set(training) & set(held_out)


def test_groups_of_images_of_several_labels_are_divided_by_class(tmp_path):
    draws, rows = np.random.default_rng(1), []
    counts = np.zeros((8, 4), np.int64)  # of each patient and class, and all
    for number in range(48):
        Image.fromarray(draws.integers(0, 256, (8, 8, 3), dtype=np.uint8)).save(tmp_path / f"{number}.png")
        labels, patient = np.flatnonzero(draws.random(3) < 0.4), int(draws.integers(8))
        counts[patient, [*labels, 3]] += 1
        rows.append(f"{number}.png,{';'.join(map(str, labels))},{patient}")
    (tmp_path / "t.csv").write_text("\n".join(["path,label,patient", *rows]))
    source = source_at(tmp_path / "t.csv", label_separator=";", group_column="patient")
    pack(source, tmp_path / "x.lmdb", val_share="0.25", duplicates=False)
    with LMDBReader(tmp_path / "x-val.lmdb") as reader:
        held_out = {rows[int(name.split(".")[0])].split(",")[2] for name in reader.names()}
    choices = itertools.product((False, True), repeat=8)
    costs = {choice: exact_cost(counts, choice, Fraction(1, 4)) for choice in choices}
    assert tuple(str(patient) in held_out for patient in range(8)) == min(costs, key=lambda choice: costs[choice])


def test_groups_of_tables_follow_their_rows(scans):
    lines = (scans / "t.csv").read_text().splitlines()
    rows = [f"{line},{'val' if number % 3 else 'train'}" for number, line in enumerate(lines[1:])]
    rows[4] = rows[4].replace(".png", ".gone")  # no such file
    (scans / "s.csv").write_text("\n".join([f"{lines[0]},split", *rows]))
    source = source_at(scans / "s.csv", split="val", group_column="PATIENT")
    assert source.grouping is not None
    assert len(source.grouping.names) == len(source) == 39
    assert [re.findall(r"_(p\d+)_", source.stored_name(index))[0] for index in range(39)] == source.grouping.names


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["scans", "--group-from=(p1[0-9])_"], "scans/ill/x_p0_00.png: --group-from '(p1[0-9])_' finds no group"),
        (["scans", "--group-from=_p[0-9]+"], "put the part that names the group, and nothing else, in parentheses"),
        (["scans", "--group-from=(p"], "--group-from '(p': is not a regular expression (missing )"),
        (["scans", "--group-from=(x)_"], "(the largest group has 60 of 60), so none can be held out"),
        (["scans", "--group-column=patient"], "--group-column does not apply to"),
        (["t.csv", "--group-column=patients"], "--group-column patients: no such column (did you mean 'patient'?)"),
        (["t.csv", "--group-column=patient", PATIENT], "--group-column and --group-from both define groups"),
        (["empty.csv", "--group-column=patient"], "line 3: --group-column patient finds no group of this image"),
    ],
)
def test_groups_that_cannot_be_made(scans, tmp_path, refused, arguments, told):
    lines = (scans / "t.csv").read_text().splitlines()
    lines[2] = lines[2].rsplit(",", 1)[0] + ","
    (scans / "empty.csv").write_text("\n".join(lines))
    source, *options = arguments
    line = refused(main, scans / source, tmp_path / "x.lmdb", "--size=16", "--val-share=0.2", *options)
    assert told in line
    assert not list(tmp_path.iterdir())


def test_groups_need_a_held_out_part(scans, tmp_path, refused):
    assert "is for --val-share: add --val-share or drop --group-from" in refused(
        main, scans / "scans", tmp_path / "x.lmdb", "--size=16", PATIENT
    )
