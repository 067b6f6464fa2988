"""evaluate.py --compare, on evaluations that are written by hand and on those of untrained runs."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
from scipy.stats import ttest_rel

from duetgan.commands import evaluate
from duetgan.metrics.comparison.compare import compare, comparison_table
from duetgan.metrics.evaluate_classifier import document_of
from duetgan.metrics.figures import CLASSIFIER
from duetgan.metrics.intervals import wilson
from duetgan.utils.errors import UserError
from tests.conftest import assert_raises
from tests.metrics.classification.test_answers import answers, given
from tests.metrics.conftest import classifier_run, read_json
from tests.metrics.test_scripts import call


def classified(folder, *, better=0.0, seed=0, n=500, noise=0):
    """An evaluated classifier whose own logits are raised by `better`; `noise` is another classifier."""
    logits, labels = answers(n=n)
    other, _ = answers(n=n, seed=100 + noise)
    logits = logits + (0.5 * other if noise else 0)
    logits[np.arange(n), labels] += better
    return written(folder, document_of(given(logits, labels), seed=0), "classifier", n, training_seed=seed)


def written(folder, figures, task, n, **about):
    head = {"task": task, "data_hash": "ab12", "n": n, "seed": 0, "training_seed": 0}
    folder.mkdir()
    (folder / "metrics.json").write_text(json.dumps(figures | head | about))
    return str(folder)


def rows_of(document, place=0):
    return {row["figure"]: row for row in document["comparisons"][place]["figures"]}


def test_a_better_classifier_is_better_and_the_reverse_is_worse(tmp_path):
    plain, better = classified(tmp_path / "a"), classified(tmp_path / "b", better=0.6)
    forward, back = rows_of(compare([plain, better])), rows_of(compare([better, plain]))
    assert set(forward) == {row.key for row in CLASSIFIER if row.better}
    for name in ("accuracy", "balanced_accuracy", "auroc", "average_precision", "nll"):
        assert forward[name]["verdict"] == "better", name
        assert back[name]["verdict"] == "worse", name
        low, high = forward[name]["interval"]
        assert low < forward[name]["difference"] < high
        assert low * high > 0
        assert forward[name]["difference"] == pytest.approx(forward[name]["second"] - forward[name]["first"])
        assert back[name]["difference"] == -forward[name]["difference"]
        assert back[name]["p"] == pytest.approx(forward[name]["p"])
    assert {row["method"] for row in forward.values()} == {"intervals of each"}


def test_a_figure_without_an_interval_gets_no_verdict(tmp_path):
    runs = [classified(tmp_path / name, better=better) for name, better in (("a", 0.0), ("b", 0.6))]
    for run in runs:
        document = read_json(f"{run}/metrics.json") | {"top5_accuracy_interval": None}
        (Path(run) / "metrics.json").write_text(json.dumps(document))
    found = rows_of(compare(runs))
    assert (found["top5_accuracy"]["verdict"], found["nll"]["verdict"]) == ("cannot tell", "better")
    assert found["top5_accuracy"]["method"] == "no interval"


def test_several_are_compared_with_the_first_and_corrected(tmp_path):
    runs = [classified(tmp_path / str(place), noise=place) for place in range(4)]
    found = compare(runs)
    assert [each["run"] for each in found["comparisons"]] == runs[1:]
    pairs = [rows_of(compare([runs[0], run])) for run in runs[1:]]
    for place in range(3):
        alone = pairs[place]["nll"]
        together = rows_of(found, place)["nll"]
        assert together["p"] >= alone["p"]
        assert together["interval"] == alone["interval"]
    for name in pairs[0]:
        values = [pair[name]["p"] for pair in pairs]
        steps = [(3 - sum(other < value for other in values)) * value for value in values]
        for place, value in enumerate(values):
            largest = max(step for step, other in zip(steps, values, strict=True) if other <= value)
            assert rows_of(found, place)[name]["p"] == pytest.approx(min(1, largest)), name
    assert "Holm" in found["notes"]["p"]
    text = comparison_table(found)
    assert text.count("the second is") == 3
    assert "p: corrected for 3 comparisons" in text


def test_groups_are_paired_by_their_training_seeds(tmp_path):
    """The same three seeds, given in another order; every one is a little better."""
    first = [classified(tmp_path / f"a{seed}", noise=seed + 1, seed=seed) for seed in range(3)]
    second = [classified(tmp_path / f"b{seed}", noise=seed + 1, seed=seed, better=0.3) for seed in (2, 0, 1)]
    found = compare([",".join(first), ",".join(second)])
    row = rows_of(found)["accuracy"]
    assert row["method"] == "paired by training seed"
    assert row["verdict"] == "better"
    assert row["first"] == pytest.approx(np.mean([read_json(f"{run}/metrics.json")["accuracy"] for run in first]))
    assert "seeds" not in found["notes"]
    sides = [[read_json(f"{run}/metrics.json")["accuracy"] for run in runs] for runs in (first, sorted(second))]
    expected = ttest_rel(*sides[::-1])
    assert [row["p"], row["second"]] == pytest.approx([expected.pvalue, np.mean(sides[1])])
    assert row["interval"] == pytest.approx([*expected.confidence_interval()])
    unpaired = rows_of(compare([first[0], second[0]]))["accuracy"]
    assert unpaired["method"] == "intervals of each"


def sampled(folder, share=0.5, *, judge="sha256:1", frechet=3.0, width=0.2, weights="w", **about):
    """An evaluated GAN of which a share of 400 samples is recognised."""
    distance = {"extractor": "classifier:x", "weights": weights, "frechet": frechet, "kernel": None}
    distance["frechet_interval"] = [frechet - width, frechet + width]
    distance |= {"clipped_density": share, "clipped_density_interval": [share - 0.05, share + 0.05]}
    figures = {"recognised": share, "recognised_interval": wilson(round(400 * share), 400)}
    figures |= {"distances": [distance | {"intra_class_frechet": share}]}
    return written(folder, figures, "gan", 400, judge_weights=judge, **about)


def test_gans_are_compared_by_their_intervals(tmp_path):
    first, second = sampled(tmp_path / "a", 0.5), sampled(tmp_path / "b", 0.75, frechet=2.5)
    document = compare([first, second])
    found = rows_of(document)
    row = found["frechet classifier w"]
    lines = comparison_table(document).splitlines()
    assert (lines[0], lines[2]) == ("gan, 400 images, seed 0", f"{first} and {second}")
    low, high = found["recognised"]["interval"]
    assert [re.split(r" {2,}", line.strip()) for line in lines[3:8]] == [
        ["first", "second", "difference", "95 % interval", "p", "the second is"],
        ["recognised", "0.5000", "0.7500", "+0.2500", f"{low:+.4f} to {high:+.4f}", "<0.0001", "better"],
        ["frechet classifier w", "3.0000", "2.5000", "-0.5000", "-0.7828 to -0.2172", f"{row['p']:.4f}", "better"],
        ["clipped_density classifier w", "0.5000", "0.7500", "+0.2500", "+0.1793 to +0.3207", "<0.0001", "better"],
        ["intra_class_frechet classifier w", "0.5000", "0.7500", "+0.2500", "-", "-", "cannot tell"],
    ]
    assert row["interval"] == pytest.approx([-0.5 - 0.2 * 2**0.5, -0.5 + 0.2 * 2**0.5])
    wide = sampled(tmp_path / "c", 0.5, frechet=2.5, width=0.9)
    assert rows_of(compare([first, wide]))["frechet classifier w"]["verdict"] == "cannot tell"
    other = sampled(tmp_path / "d", 0.75, judge="sha256:2", weights="v")
    document = compare([first, other])
    assert rows_of(document) == {}
    assert "--classifier" in document["notes"]["recognised"]
    other = sampled(tmp_path / "e", 0.75, judge="sha256:2")
    assert rows_of(compare([first, other])).keys() == found.keys() - {"recognised"}


@pytest.mark.parametrize(
    ("option", "value", "told"),
    [("tta", "shift", "off and shift"), ("precision", "bf16", "fp32 and bf16"), ("fold", True, "False and True")],
)
def test_classifiers_that_were_evaluated_by_other_options_are_refused(tmp_path, option, value, told):
    """What a document does not say is the default."""
    plain, same, changed = (classified(tmp_path / name) for name in ("plain", "same", "changed"))
    for folder, values in ((same, {"precision": "fp32", "fold": False, "tta": "off"}), (changed, {option: value})):
        path = Path(folder) / "metrics.json"
        path.write_text(json.dumps(read_json(path) | values))
    compare([plain, same])
    assert_raises(UserError, rf"different --{option} \({told}\)", compare, [plain, changed])


def test_what_cannot_be_compared_is_refused_with_the_remedy(tmp_path):
    first = classified(tmp_path / "a")
    for name, about, told in (
        ("data", {"data_hash": "cd34"}, r"different test files \(ab12 and cd34\)"),
        ("seed", {"seed": 1}, r"different --seed \(0 and 1\)"),
    ):
        other = written(tmp_path / name, {}, "classifier", 500, **about)
        assert_raises(UserError, f"{told}.*evaluate both in the same way", compare, [first, other])
    second = classified(tmp_path / "second", seed=1)
    for runs, told in (
        ([first, classified(tmp_path / "n", n=400)], r"different --n \(500 and 400\)"),
        ([first, sampled(tmp_path / "gan", 0.5)], "different tasks"),
        ([first], "two runs or more"),
        ([f"{first},{first}"] * 2, r"training seeds \[0, 0\] and \[0, 0\]; give runs of equal seeds, each seed once"),
        ([first, f"{first},{second}"], r"training seeds \[0\] and \[0, 1\]"),
    ):
        assert_raises(UserError, told, compare, runs)


def test_damaged_evaluations_are_refused_in_one_line(tmp_path):
    first, other = classified(tmp_path / "a"), tmp_path / "b"
    classified(other, noise=1)
    good = read_json(other / "metrics.json")
    for change, told in (
        ({"accuracy": "high"}, "cannot be read"),
        ({"accuracy_interval": [0.1]}, "cannot be read"),
        ({"distances": 3}, "cannot be read"),
    ):
        (other / "metrics.json").write_text(json.dumps(good | change))
        with pytest.raises(UserError, match=told) as caught:
            compare([first, str(other)])
        assert "\n" not in str(caught.value)
    (other / "metrics.json").write_text("[" * 10_000)
    assert_raises(UserError, r"metrics\.json", compare, [first, str(other)])
    (other / "metrics.json").unlink()
    assert_raises(UserError, r"evaluate it with evaluate\.py --checkpoint", compare, [first, str(other)])


def test_by_the_command_line(files, tmp_path, capsys, refused):
    runs = [classifier_run(tmp_path / str(seed), data=files, seed=seed) for seed in (0, 1)]
    assert "evaluate it with" in refused(evaluate.main, "--compare", *runs)
    for run in runs:
        assert call(evaluate, "--checkpoint", run) == 0
    capsys.readouterr()
    assert call(evaluate, "--compare", *runs, "--out", tmp_path / "out", "--json") == 0
    document = json.loads(capsys.readouterr().out)
    assert document == read_json(tmp_path / "out" / "comparison.json")
    assert document["runs"] == [str(run) for run in runs]
    found = rows_of(document)["accuracy"]
    assert found["second"] == read_json(runs[1] / "eval" / "metrics.json")["accuracy"]
    assert call(evaluate, "--compare", *runs) == 0
    assert "the second is" in capsys.readouterr().out
    assert "leave --n out" in refused(evaluate.main, "--compare", *runs, "--n", 3)
    assert "required: --checkpoint" in refused(evaluate.main, "--n", 3)
