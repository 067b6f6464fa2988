"""One oracle of what evaluate.py reports: every key of its documents, every picture, what is printed, and the page.

Logits, features and samples come from the networks alone; values are scikit-learn's, SciPy's or a line of NumPy.
"""

import hashlib
import html
import re
from typing import Any

import numpy as np
import pytest
import torch
from prdc import compute_prdc
from safetensors.numpy import load_file
from scipy.optimize import minimize_scalar
from scipy.spatial.distance import cdist, pdist
from scipy.stats import binomtest
from sklearn import metrics as theirs

import evaluate
from duetgan.data.reading.dataset import Dataset
from duetgan.data.records import pack_arrays
from duetgan.metrics import evaluate_classifier
from duetgan.metrics.classification.answers import halves
from duetgan.metrics.classification.corruptions import CORRUPTIONS
from duetgan.metrics.features.extractors import fingerprint
from duetgan.metrics.features.selection import select
from duetgan.metrics.figures import FIGURES, GAN, Samples
from duetgan.metrics.grad_cam import image_heat, overlay
from duetgan.metrics.samples.memorisation import RealSet, memorisation
from duetgan.utils.seeding import numpy_generator
from tests.metrics.conftest import SIDE, read_json
from tests.metrics.samples.test_neighbours import oracle as clipped
from tests.metrics.test_scripts import call
from tests.metrics.trained import (
    BEST,
    COUNT,
    NAMES,
    PROBE,
    SETS,
    Trained,
    as_bytes,
    assert_pixels,
    fitted,
    pictures,
    samples_of,
    styles_of,
    to_float,
    trained,
    two_checkpoints,
)

__all__ = ["pictures", "trained"]  # fixtures
N, SEED, Z = 47, 5, 1.959964
PERCENT = {"accuracy", "balanced_accuracy", "top5_accuracy", "ece", "macro_f1", "micro_f1", "exact_match"}
PERCENT |= {"recognised", "precision", "recall", "coverage", "clipped_density", "clipped_coverage", "f1", "threshold"}
TITLES = {row.key: (row.title, row.digits, row.meaning) for row in FIGURES if row.place != "column"}


def assert_document(found: Any, expected: Any, place: str = "") -> None:
    """Every key has an oracle, and its value is the oracle's."""
    if isinstance(expected, dict):
        assert set(found) == set(expected), place
        for key, value in expected.items():
            assert_document(found[key], value, f"{place}.{key}")
    elif isinstance(expected, list) and any(isinstance(each, (dict, list, str)) for each in expected):
        assert len(found) == len(expected), place
        for index, value in enumerate(expected):
            assert_document(found[index], value, f"{place}.{index}")
    elif expected is None or isinstance(expected, (bool, str)):
        assert found == expected, place
    else:
        assert found == pytest.approx(expected, rel=1e-3, abs=2e-6), place


def share(hits: Any) -> tuple[float, list[float]]:
    limits = binomtest(int(np.sum(hits)), len(hits)).proportion_ci(method="wilson")
    return float(np.mean(hits)), [limits.low, limits.high]


def jackknife(statistic: Any, count: int = N, high: float = 1.0, step: float = 1e-5) -> tuple[float, list[float], Any]:
    """A figure of weighted images, its interval, and each image's influence, by numeric derivatives."""
    value = float(statistic(np.ones(count)))
    slopes = np.array([statistic(np.ones(count) + step * row) - value for row in np.eye(count)]) / step
    half = Z * np.sqrt(np.square(slopes).sum())
    return value, [max(0.0, value - half), min(high, value + half)], count * slopes


def keys(**figures: Any) -> dict[str, Any]:
    """Values and intervals as a document has them."""
    return {name + end: part for name, pair in figures.items() for end, part in zip(("", "_interval"), pair)}  # noqa: B905


def log_softmax(logits: np.ndarray) -> np.ndarray:
    return torch.from_numpy(logits).log_softmax(1).numpy()


def bins(confidence: np.ndarray) -> np.ndarray:
    return np.digitize(confidence, np.arange(1, 15) / 15, right=True)


def calibration(confidence: np.ndarray, hits: np.ndarray) -> Any:
    place = bins(confidence)
    return lambda w: sum(abs((w * (confidence - hits))[place == k].sum()) for k in range(15)) / w.sum()


def average(figure: Any, hot: np.ndarray, scores: np.ndarray) -> Any:
    """A figure of scikit-learn's, its mean over the classes as a function of the images' weights."""
    return lambda w: float(np.mean([figure(*pair, sample_weight=w) for pair in zip(hot.T, scores.T, strict=True)]))


def ranked(hot: np.ndarray, scores: np.ndarray) -> tuple[dict[str, Any], dict[str, list[float]]]:
    figures = {"auroc": theirs.roc_auc_score, "average_precision": theirs.average_precision_score}
    means = {name: jackknife(average(figure, hot, scores)) for name, figure in figures.items()}
    columns = zip(hot.T, scores.T, strict=True)
    rows = [{name: figure(*pair) for name, figure in figures.items()} for pair in columns]
    return means, {name: [row[name] for row in rows] for name in figures}


def classes_of(hot: np.ndarray, named: np.ndarray, names: list[str], **more: Any) -> dict[str, Any]:
    """A row a class."""
    columns = theirs.precision_recall_fscore_support(hot, named, zero_division=np.nan)
    each = dict(zip(("precision", "recall", "f1", "support"), columns, strict=True)) | more
    each = {key: [None if np.isnan(value) else value for value in column] for key, column in each.items()}
    return {name: {key: column[place] for key, column in each.items()} for place, name in enumerate(names)}


def logits_of(network: Any, images: torch.Tensor) -> np.ndarray:
    """The mean of an image's and its mirror image's."""
    with torch.no_grad():
        return (sum(network(to_float(each)) for each in (images, images.flip(3))) / 2).double().numpy()


def drawn(count: int) -> np.ndarray:
    return np.sort(numpy_generator(SEED, "eval", "classifier").permutation(count)[:N])


def head_of(trained: Trained, run: str, folder: Any, test: str = "test.lmdb") -> dict[str, Any]:
    """What every document begins with, and what it says of the predictions beside it."""
    content = (folder / "predictions.safetensors").read_bytes()
    with Dataset(trained[test]) as reader:
        found = {"data": str(trained[test]), "data_hash": reader.meta.content_hash, "seed": SEED, "n": N}
    path = trained[run] / "checkpoints" / f"step-{BEST:08d}.pt"
    about = {"file": "predictions.safetensors", "sha256": hashlib.sha256(content).hexdigest()}
    found["task"] = "gan" if run == "gan" else "classifier"
    return found | {"checkpoint": str(path), "step": BEST, "predictions": about}


def assert_pictures(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert set(found) == set(expected)
    for name, (images, words) in expected.items():
        assert found[name][1] == words, name
        assert_pixels(found[name][0], [np.asarray(image) for image in images])


def few(interval: list[float], more: str = "") -> str:
    return f"few images ({N}): its share is known to {100 * (interval[1] - interval[0]):.0f} points only{more}"


def tiles_and_tables(path: Any) -> tuple[list[tuple[str, str]], list[list[str]]]:
    """The evaluation's part of a page: value and words of each tile, cells of each row."""
    page = re.search(r"<h3>Evaluation at step 7</h3>(.*?)<h2>", path.read_text(), re.DOTALL)
    assert page
    text = html.unescape(page[1])
    rows = re.findall(r"<tr>(.*?)</tr>", text)
    return re.findall(r"<b>(.*?)</b><span>(.*?)</span>", text), [re.findall(r"<t[hd]>(.*?)</t", row) for row in rows]


def shown(key: str, value: float | None, digits: int | None = None) -> str:
    """A figure as the page has it, or with `digits` as it is printed."""
    if value is None:
        return "-"
    if digits is not None:
        return f"{value:.{digits}f}"
    return (
        f"{100 * value:.1f} %"
        if key in PERCENT
        else f"{value:.3g}"
        if value == 0 or abs(value) >= 1e-4
        else f"{value:.2g}"
    )


def assert_shown(document: dict[str, Any], printed: str, page: Any, *, more: dict[str, str]) -> list[list[str]]:
    """Table and page have every figure of a document, with its interval in its unit; `more` ends a tile's words."""
    tiles, rows = tiles_and_tables(page)
    found = dict(
        line for line in (re.split(r" {2,}", line, maxsplit=1) for line in printed.splitlines()) if len(line) == 2
    )
    for key, (title, digits, meaning) in TITLES.items():
        value, interval = document.get(key), document.get(f"{key}_interval")
        if value is None or isinstance(value, str):
            assert not [words for _, words in tiles if words.startswith(f"{meaning} (")]
            continue
        words = f"  (95 %: {interval[0]:.4f} to {interval[1]:.4f})" if interval else ""
        assert found[title] == shown(key, value, digits) + words
        ends = [shown(key, end) for end in interval or ()]
        words = [f"95 % interval {ends[0].removesuffix(' %')} to {ends[1]}"] if interval else []
        words += [more[key]] if key in more else []
        assert (shown(key, value), meaning + (f" ({'; '.join(words)})" if words else "")) in tiles
    return rows


def divergence(p: np.ndarray) -> Any:
    """The class score as a function of the images' weights."""
    return lambda w: np.exp(np.average((p * np.log(p / np.average(p, axis=0, weights=w))).sum(1), weights=w))


def of_one_label(labels: np.ndarray, logits: np.ndarray) -> tuple[dict[str, Any], dict[str, Any]]:
    """Figures of a classifier, and the columns of its predictions."""
    hot, p, count = np.eye(len(NAMES), dtype=int)[labels], np.exp(log_softmax(logits)), len(NAMES)
    predicted, confidence, losses = p.argmax(1), p.max(1), -log_softmax(logits)[np.arange(N), labels]
    hits, confusion = predicted == labels, theirs.confusion_matrix(labels, predicted)
    means, by_class = ranked(hot, p)
    means["nll"] = jackknife(lambda w: np.average(losses, weights=w), high=np.inf)
    means["ece"] = jackknife(calibration(confidence, hits))
    of_class = [labels == label for label in range(count)]
    balanced = jackknife(lambda w: np.mean([np.average(hits[row], weights=w[row]) for row in of_class]))
    off = np.array([np.abs(np.subtract(*share(hits[row]))) for row in of_class])
    limits = balanced[0] + np.sqrt(np.square(off).sum(0)) / count * [-1, 1]
    top5 = share([label in row for label, row in zip(labels, p.argsort(1)[:, -5:], strict=True)])
    figures = keys(accuracy=share(hits), balanced_accuracy=(balanced[0], limits), top5_accuracy=top5, **means)
    pairs = sorted((-n, i, j) for (i, j), n in np.ndenumerate(confusion) if n and i != j)[:10]
    figures["confused"] = [{"true": NAMES[i], "predicted": NAMES[j], "n": -n} for n, i, j in pairs]
    figures["confusion"], place = confusion.tolist(), bins(confidence)
    figures["reliability"] = [{"n": 0, "confidence": None, "accuracy": None} for _ in range(15)]
    for k in set(place):
        rows = place == k
        figures["reliability"][k] = {
            "n": rows.sum(),
            "confidence": confidence[rows].mean(),
            "accuracy": hits[rows].mean(),
        }
    fit, judged = halves(labels, SEED)
    at = minimize_scalar(
        lambda t: theirs.log_loss(labels[fit], np.exp(log_softmax(logits[fit] / np.exp(t)))), (-1, 1)
    ).x
    found = {"value": np.exp(at), "fitted_on": len(fit), "judged_on": len(judged)}
    for name, divisor in (("before", 1.0), ("after", found["value"])):
        p = np.exp(log_softmax(logits[judged] / divisor))
        error = jackknife(calibration(p.max(1), p.argmax(1) == labels[judged]), len(judged))
        found |= {
            f"ece_{name}": error[0],
            f"ece_interval_{name}": error[1],
            f"nll_{name}": theirs.log_loss(labels[judged], p),
        }
    more = {"temperature": found, "per_class": classes_of(hot, np.eye(count, dtype=int)[predicted], NAMES, **by_class)}
    columns = {"label": labels, "prediction": predicted, "confidence": confidence, "loss": losses}
    means["balanced_accuracy"] = balanced
    return figures | more, columns | {name: each[2] for name, each in means.items()}


def test_a_classifier(trained, pictures, capsys, monkeypatch):
    charts: dict[str, Any] = {}
    for name in ("save_confusion", "save_reliability"):
        monkeypatch.setattr(evaluate_classifier, name, lambda *given: charts.update({given[-1].name: given[:-1]}))
    options = [
        "--which",
        "best",
        "--n",
        N,
        "--seed",
        SEED,
        "--tta",
        "flip",
        "--fold",
        "--batch-size",
        7,
        "--robustness",
    ]
    assert call(evaluate, "--checkpoint", trained["classifier"], *options, "--ood", trained["others.lmdb"]) == 0
    folder, printed = trained["classifier"] / "eval", capsys.readouterr().out
    document, records = read_json(folder / "metrics.json"), drawn(COUNT)
    images, labels = trained.images["test"][records], trained.labels["test"][records]
    logits, outside = (logits_of(trained.network, each) for each in (images, trained.images["others"][drawn(61)]))
    expected, columns = of_one_label(labels, logits)
    assert_document(load_file(folder / "predictions.safetensors"), columns)
    corruptions = {}
    for name, corruption in CORRUPTIONS.items():
        corruptions[name] = {"unit": corruption.unit, "strengths": []}
        for strength in range(1, 6):
            each = zip(images.numpy(), records.tolist(), strict=True)
            spoiled = np.stack([corruption(image, strength, seed=SEED, index=record) for image, record in each])
            hits = logits_of(trained.network, torch.from_numpy(spoiled)).argmax(1) == labels
            row = {"amount": corruption.amount(strength, SIDE)} | keys(accuracy=share(hits))
            corruptions[name]["strengths"].append(row)
    mean = np.mean([row["accuracy"] for each in corruptions.values() for row in each["strengths"]])
    expected |= {"robustness": {"n": N, "accuracy": mean, "corruptions": corruptions}}
    expected["ood"] = {"data": str(trained["others.lmdb"]), "n": N}
    for name, score in (
        ("max_probability", lambda x: np.exp(log_softmax(x)).max(1)),
        ("energy", lambda x: np.log(np.exp(x).sum(1))),
    ):
        both, own = np.r_[score(logits), score(outside)], np.arange(2 * N) < N
        area = jackknife(lambda w, own=own, both=both: theirs.roc_auc_score(own, both, sample_weight=w), 2 * N)
        passed = (score(outside) >= np.sort(score(logits))[int(0.05 * N)]).mean()
        expected["ood"][name] = keys(auroc=area) | {"fpr95": passed}
    sure = "it began as a logistic regression on its features: 0.613 (0.504 to 0.711) by cross-validation"
    expected |= {"probe": PROBE, "notes": {"n": few(expected["accuracy_interval"]), "probe": sure}}
    names = ["confusion", "reliability", "mistakes", "confused", "evidence", "robustness"]
    expected |= {"precision": "fp32", "fold": True, "tta": "flip", "images": [f"{name}.png" for name in names]}
    assert_document(document, expected | head_of(trained, "classifier", folder))

    order = np.argsort(-columns["confidence"])
    true, named = ([NAMES[label] for label in columns[key]] for key in ("label", "prediction"))
    both = [(f"{records[i]}: {true[i]}", f"named {named[i]} {columns['confidence'][i]:.2f}") for i in range(N)]
    wrong, right = ([i for i in order if (true[i] != named[i]) == which] for which in (True, False))
    surest = {(pair["true"], pair["predicted"]): [] for pair in expected["confused"]}
    for i in wrong:
        surest.get((true[i], named[i]), []).append(i)
    chosen = [*wrong[:4], *right[:4]]
    heats = image_heat(trained.network, images[chosen], torch.from_numpy(columns["prediction"][chosen]))
    first = trained.images["test"][0].numpy()
    rows = [[first, *(each(first, k, seed=SEED, index=0) for k in range(1, 6))] for each in CORRUPTIONS.values()]
    heads = [f"{pair['true']} as {pair['predicted']} ({pair['n']})" for pair in expected["confused"]]
    assert_pictures(
        pictures,
        {
            "mistakes.png": (images[wrong[:24]], [line for i in wrong[:24] for line in both[i]]),
            "confused.png": (images[[i for row in surest.values() for i in row[:8]]], heads),
            "evidence.png": (
                [each for i, heat in zip(chosen, heats, strict=True) for each in overlay(images[i], heat)],
                [line for i in chosen for line in both[i]],
            ),
            "robustness.png": (
                [image for row in rows for image in row],
                [*CORRUPTIONS, "as it is", *(f"strength {k}" for k in range(1, 6))],
            ),
        },
    )
    assert charts["confusion.png"] == (expected["confusion"], NAMES)
    assert_document(charts["reliability.png"][0], expected["reliability"])
    assert charts["reliability.png"][1] == document["ece"]

    rows = assert_shown(document, printed, trained["classifier"] / "report.html", more={"accuracy": "mean of 2 views"})
    words = [line.split() for line in printed.splitlines()]
    for name, row in document["per_class"].items():
        assert [name, *(str(value) if key == "support" else shown(key, value) for key, value in row.items())] in rows
        order = ["precision", "recall", "f1", "auroc", "average_precision"]
        assert [name, *(shown(key, row[key], 4) for key in order), str(row["support"])] in words
    for name, each in document["robustness"]["corruptions"].items():
        values = [document["accuracy"], *(row["accuracy"] for row in each["strengths"])]
        assert [name, *(shown("accuracy", value) for value in values)] in rows
        assert [name, *(shown("accuracy", value, 4) for value in values)] in words
    for key, title, short in (
        ("max_probability", "largest probability", "probability"),
        ("energy", "energy", "energy"),
    ):
        row = document["ood"][key]
        low, high = row["auroc_interval"]
        assert [title, f"{row['auroc']:.3g}", f"{low:.3g} to {high:.3g}", f"{100 * row['fpr95']:.1f} %"] in rows
        assert f"outliers by {short}" in printed
        assert f"AUROC {row['auroc']:.4f}  (95 %: {low:.4f} to {high:.4f})" in printed
    change = "ECE {ece_before:.4f} -> {ece_after:.4f} on the other half".format(**document["temperature"])
    assert f"{document['temperature']['value']:.3f}  ({change})" in printed
    assert ", ".join(heads[:3]) in printed


def test_a_classifier_of_several_labels(trained, pictures, capsys):
    numbers = {name: labels % len(SETS) for name, labels in trained.labels.items()}
    every = np.array([[label in each for label in range(3)] for each in SETS])
    networks = [
        fitted(trained.images["train"], torch.from_numpy(every[numbers["train"]]), k, several=True) for k in (1, 0)
    ]
    pack_arrays(trained["sets.lmdb"], trained.images["test"].numpy(), numbers["test"], NAMES[:3], sets=SETS)
    more = {"shape": {"channels": 1, "classes": 3, "resolution": SIDE}, "classes": NAMES[:3]}
    config = {"model": {"stem": "small-stride2"}, "data": {"val_path": str(trained["sets.lmdb"])}}
    two_checkpoints(trained["several"], "model", networks, task="classifier", config=config, **more)
    assert call(evaluate, "--checkpoint", trained["several"], "--which", "best", "--n", N, "--seed", SEED) == 0
    folder, records = trained["several"] / "eval", drawn(COUNT)
    document, images, hot = (
        read_json(folder / "metrics.json"),
        trained.images["test"][records],
        every[numbers["test"][records]],
    )
    with torch.no_grad():
        p = networks[1](to_float(images)).double().sigmoid().numpy()
    levels = networks[1].thresholds.double().numpy()
    named, (means, by_class) = p >= levels, ranked(hot, p)
    for average in ("macro", "micro"):
        means[f"{average}_f1"] = jackknife(
            lambda w, how=average: theirs.f1_score(hot, named, average=how, sample_weight=w)
        )
    assert_document(load_file(folder / "predictions.safetensors"), {name: each[2] for name, each in means.items()})
    expected = keys(exact_match=share((hot == named).all(1)), **means)
    flattered = "they were chosen on these images, which flatters F1 and exact match; give others"
    expected["notes"] = {"n": few(expected["exact_match_interval"]), "thresholds": flattered}
    expected["per_class"] = classes_of(hot, named, NAMES[:3], threshold=levels, **by_class)
    expected |= {"precision": "fp32", "fold": False, "tta": "off", "images": ["mistakes.png"]}
    assert_document(document, expected | head_of(trained, "several", folder, "sets.lmdb"))

    doubt = (np.abs(p - hot) * (named != hot)).max(1)
    wrong = np.argsort(-doubt)[: min(24, (doubt > 0).sum())]
    words = [["; ".join(np.array(NAMES[:3])[row]) or "no label" for row in rows] for rows in (hot, named)]
    both = [line for i in wrong for line in (f"{records[i]}: {words[0][i]}", f"named {words[1][i]} {doubt[i]:.2f}")]
    assert_pictures(pictures, {"mistakes.png": (images[wrong], both)})
    printed = capsys.readouterr().out
    rows = assert_shown(document, printed, trained["several"] / "report.html", more={})
    for name, row in document["per_class"].items():
        assert [name, *(str(value) if key == "support" else shown(key, value) for key, value in row.items())] in rows
        order = ["precision", "recall", "f1", "auroc", "average_precision", "threshold"]
        assert [name, *(shown(key, row[key], 4) for key in order), str(row["support"])] in map(
            str.split, printed.splitlines()
        )


def frechet(x: np.ndarray, y: np.ndarray) -> float:
    (a, b), root = (each - each.mean(0) for each in (x, y)), np.sqrt((len(x) - 1) * (len(y) - 1))
    spread = (a**2).sum() / (len(a) - 1) + (b**2).sum() / (len(b) - 1)
    return ((x.mean(0) - y.mean(0)) ** 2).sum() + spread - 2 * np.linalg.norm(a @ b.T, "nuc") / root


def mmd(x: np.ndarray, y: np.ndarray) -> float:
    xx, yy, xy = ((a @ b.T / x.shape[1] + 1) ** 3 for a, b in ((x, x), (y, y), (x, y)))
    return sum((k.sum() - k.trace()) / len(k) / (len(k) - 1) for k in (xx, yy)) - 2 * xy.mean()


def of_samples(
    fake: np.ndarray, real: np.ndarray, training: np.ndarray, labels: np.ndarray, per_class: int
) -> dict[str, Any]:
    """The values of an extractor's figures."""
    x, y, first = fake[:N], real[:N], labels[:N]
    pairs = [[each[labels == label][:per_class] for each in (fake, real)] for label in range(len(NAMES))]
    diversity = [float(pdist(a).mean() / pdist(b).mean()) for a, b in pairs]
    within = [frechet(x[first == label], y[first == label]) for label in range(len(NAMES))]
    found = {
        "frechet": frechet(x, y),
        "kernel": mmd(x, y),
        "floor": frechet(training, y),
        "kernel_floor": mmd(training, y),
    }
    found |= {"diversity_ratio": min(diversity), "diversity_by_class": dict(zip(NAMES, diversity, strict=True))}
    found |= {
        "intra_class_frechet": np.mean(within),
        "intra_class_frechet_by_class": dict(zip(NAMES, within, strict=True)),
    }
    for k, names in ((3, ("precision", "recall")), (5, ("density", "coverage"))):
        found |= {name: compute_prdc(y, x, nearest_k=k)[name] for name in names}
    return found | dict(zip(("clipped_density", "clipped_coverage"), clipped(x, y), strict=True))


def test_a_gan(trained, pictures, capsys):
    """Its judge is the last checkpoint of a run, whose best is another."""
    judge, test, train, per_class, searched = trained.judge, trained.labels["test"], trained.labels["train"], 9, 67
    options = [
        "--checkpoint",
        trained["gan"],
        "--which",
        "best",
        "--classifier",
        trained["classifier"],
        "--seed",
        SEED,
        "--n",
        N,
    ]
    options += ["--extractor", "classifier,pixels", "--per-class", per_class, "--searched", searched, "--batch-size", 7]
    assert call(evaluate, *options) == 0
    folder, printed = trained["gan"] / "eval", capsys.readouterr().out
    document = read_json(folder / "metrics.json")
    real = select(test, n=N, seed=SEED, role="test", per_class=per_class)
    other = select(train, n=searched, seed=SEED, role="train")
    labels, count = real.labels, len(real.labels)
    samples = samples_of(trained.generator, labels.tolist(), list(range(count)), SEED)
    sets = [samples, trained.images["test"][real.indices], trained.images["train"][other.indices]]
    asked = {"labels": torch.from_numpy(labels), "n": N, "names": NAMES, "seed": SEED, "per_class": per_class}
    expected: dict[str, Any] = {"distances": []}
    spaces = {f"classifier:{trained['classifier']}": judge.features, "pixels": lambda x: (x.flatten(1) + 1) / 2}
    with torch.no_grad():
        p = judge(to_float(samples)).double().softmax(1).numpy()
        places = [[make(to_float(each)) for each in sets] for make in spaces.values()]
    hits = p.argmax(1) == labels
    for name, place in zip(spaces, places, strict=True):
        fake, y, training = place
        record = Samples(fake=fake, real=y, training=training, probabilities=None, extractor=name, **asked)
        row = {"extractor": name, "weights": fingerprint(judge) if ":" in name else "", "n": N}
        for figure in GAN:
            row |= {} if figure.by_judge else figure.keys(figure.measure(record), NAMES)
        row |= of_samples(*(each.double().numpy() for each in (fake, y, training[:N])), labels, per_class)
        expected["distances"].append(row)
    first, columns = expected["distances"][0], ("extractor", "weights", "frechet", "kernel", "floor")
    expected |= {key: value for key, value in first.items() if not key.startswith(columns)}
    expected |= keys(recognised=share(hits[:N]), class_score=jackknife(divergence(p[:N]), high=7)[:2])
    by_class = {name: float(hits[:N][labels[:N] == label].mean()) for label, name in enumerate(NAMES)}
    sizes = [min(per_class, (labels == label).sum()) for label in range(len(NAMES))]
    expected |= {
        "recognised_by_class": by_class,
        "diversity_images": min(sizes),
        "diversity_extractor": first["extractor"],
    }
    near = [
        RealSet(places[1][2], torch.from_numpy(other.labels)),
        RealSet(places[1][1][:N], torch.from_numpy(labels[:N])),
    ]
    copies = memorisation(places[1][0][:N], *near)[0]
    distances = cdist(places[1][0][:N], places[1][2])
    pairs = [
        {"sample": i, "label": labels[i], "train": other.indices[row.argmin()], "distance": row.min()}
        for i, row in enumerate(distances)
    ]
    lists = {"closest": sorted(pairs, key=lambda pair: pair["distance"])[:12], "first": pairs[:12]}
    copies["usual_distance"] = np.median(cdist(places[1][1][:N], places[1][2]).min(1)[:N])
    expected["memorisation"] = copies | lists | {"extractor": "pixels", "weights": "", "searched": searched, "n": N}
    judged = select(test, n=N, seed=SEED, role="judge")
    with torch.no_grad():
        q = judge(to_float(trained.images["test"][judged.indices])).double().softmax(1).numpy()
    of_judge = keys(accuracy=share(q.argmax(1) == judged.labels), class_score=jackknife(divergence(q), high=7)[:2])
    expected["judge"] = of_judge | {"n": N}
    more = "; distances of fewer than 1,000 images are rough and depend on n: compare them only with figures of the same n, "
    least = np.bincount(labels[:N]).min()
    expected["notes"] = {
        "n": few(expected["recognised_interval"], f"{more}and only large differences"),
        "intra_class_frechet": f"a class has {least} images a side, so its distance is mostly the bias of small n: compare it "
        "with figures of the same n alone",
    }
    names = ["samples", "recognised_best", "recognised_worst", "real", "neighbours", "truncation", "mixing"]
    expected["images"] = [f"{name}.png" for name in names]
    assert_document(document, expected | head_of(trained, "gan", folder))
    kept = {"label": labels[:N], "prediction": p[:N].argmax(1), "confidence": p[:N].max(1)}
    assert_document(load_file(folder / "predictions.safetensors"), kept)

    own = p[np.arange(count), labels]
    words = [
        [f"{NAMES[labels[i]]} {own[i]:.2f}", *([] if hits[i] else [f"named {NAMES[p[i].argmax()]}"])]
        for i in range(count)
    ]
    order = np.argsort(-own, kind="stable")[:24], np.argsort(own, kind="stable")[:24]
    rows = [np.flatnonzero(of == label)[:10] for of in (labels, test) for label in range(len(NAMES))]
    shown_pairs = lists["closest"] + lists["first"]
    beside = [
        samples[[pair["sample"] for pair in shown_pairs]],
        trained.images["train"][[pair["train"] for pair in shown_pairs]],
    ]
    beside.insert(1, torch.full_like(beside[0][..., :1], 255))
    about = "sample {sample} | record {train}"
    ratio = [f"{pair['distance'] / copies['usual_distance']:.2f} of the usual distance" for pair in shown_pairs]
    psis, ten = (0, 0.3, 0.5, 0.7, 1), [i % 7 for i in range(10)]
    (a, a_maps), (b, b_maps) = (styles_of(trained.generator, ten[:6], list(range(k, k + 6)), SEED) for k in (0, 7))
    table, coarse = [*as_bytes(trained.generator.synthesis(b, b_maps))], trained.generator.num_ws // 2
    for i in range(6):
        ws, maps = a[[i] * 6].clone(), [b_maps[k] if k < coarse else level[[i] * 6] for k, level in enumerate(a_maps)]
        table += as_bytes(trained.generator.synthesis(a[i : i + 1], [level[i : i + 1] for level in a_maps]))
        ws[:, :coarse] = b[:, :coarse]
        table += as_bytes(trained.generator.synthesis(ws, maps))
    assert_pictures(
        pictures,
        {
            "samples.png": (samples[np.concatenate(rows[:7])], NAMES),
            "real.png": (trained.images["test"][np.concatenate(rows[7:])], NAMES),
            **{
                f"recognised_{name}.png": (samples[at], [line for i in at for line in words[i]])
                for name, at in zip(("best", "worst"), order, strict=True)
            },
            "neighbours.png": (
                torch.cat(beside, -1),
                [line for pair, far in zip(shown_pairs, ratio, strict=True) for line in (about.format(**pair), far)],
            ),
            "truncation.png": (
                torch.cat([samples_of(trained.generator, ten, list(range(10)), SEED, psi=psi) for psi in psis]),
                [*(f"psi {psi:g}" for psi in psis), *(NAMES[label] for label in ten)],
            ),
            "mixing.png": (table, ["", *(f"A {NAMES[k]}" for k in range(6)), "", *(f"B {NAMES[k]}" for k in range(6))]),
        },
    )

    judging = {
        "recognised": f"the judge predicts {100 * of_judge['accuracy']:.1f} % of the real images at the samples' size correctly"
    }
    judging["class_score"] = f"real images: {of_judge['class_score']:.3g}"
    page = trained["gan"] / "report.html"
    rows, lines = assert_shown(document, printed, page, more=judging), [line.split() for line in printed.splitlines()]
    by_class = {key: document[row.by_class] for row in GAN if row.by_class for key in [row.key]}
    for name in NAMES:
        assert [name, *(shown(key, values[name]) for key, values in by_class.items())] in rows
        assert [name, *(shown(key, values[name], 4) for key, values in by_class.items())] in lines
    for row, name in zip(document["distances"], ("classifier", "pixels"), strict=True):
        assert [name, *(shown(key, row[key]) for key in ("frechet", "floor", "kernel", "kernel_floor")), str(N)] in rows
        cells = [row["extractor"]]
        for key, digits in (("frechet", 3), ("floor", 3), ("kernel", 6), ("kernel_floor", 6), ("diversity_ratio", 3)):
            interval = row.get(f"{key}_interval")
            cells += [shown(key, row[key], digits), *([f"+-{interval[1] - row[key]:.{digits}f}"] if interval else [])]
        assert [*cells, str(N)] in lines
    low, high = first["frechet_interval"]
    words = f"{first['frechet']:.3g}</b><span>Frechet distance on classifier (real images: {first['floor']:.3g}, n {N}; 95 % interval {low:.3g} to {high:.3g})"
    assert words in page.read_text()
    tile = (
        f"{100 * copies['share']:.1f} % of the samples unusually near to training images, {100 * copies['expected']:.1f} % "
        f"expected; p {copies['p_value']:.3g} (pixels, {searched} searched)"
    )
    assert ("no sign of copies", tile) in tiles_and_tables(page)[0]
    assert (
        f"no sign of copies (p {copies['p_value']:.2g}): {copies['share']:.1%} of the samples unusually near to training "
        f"images, {copies['expected']:.1%} expected; C_T - (pixels, {searched} training images searched)"
    ) in printed
    assert f"{of_judge['accuracy']:.4f}  of the real images" in printed
