"""One oracle of what evaluate.py reports: every key of its documents, every picture, what is printed, and the page.

Logits, features and samples come from the networks alone; values are scikit-learn's, SciPy's or a line of NumPy.
"""

import html
import re
from itertools import chain
from typing import Any

import numpy as np
import pytest
import torch
from prdc import compute_prdc
from scipy.optimize import minimize_scalar
from scipy.spatial.distance import cdist, pdist
from scipy.stats import binomtest
from sklearn import metrics as theirs

from duetgan.commands import evaluate
from duetgan.data.packing.records import pack_arrays
from duetgan.data.reading.dataset import Dataset
from duetgan.metrics import evaluate_classifier
from duetgan.metrics.classification.answers import halves
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
flat = chain.from_iterable
N, SEED, Z, KINDS = 47, 5, 1.959964, len(NAMES)
PERCENT = {row.key for row in FIGURES if row.unit == "share"} | {"f1", "threshold"}


def assert_document(result: Any, expected: Any, place: str = "") -> None:
    """Every key has an oracle, and its value is the oracle's."""
    if isinstance(expected, list) and any(isinstance(part, dict | list | str) for part in expected):
        result, expected = dict(enumerate(result)), dict(enumerate(expected))
    if isinstance(expected, dict):
        assert set(result) == set(expected), place
        for key, value in expected.items():
            assert_document(result[key], value, f"{place}.{key}")
    elif expected is None or isinstance(expected, bool | str):
        assert result == expected, place
    else:
        assert result == pytest.approx(expected, rel=1e-3, abs=2e-6), place


def formatted(key: str, value: float | None) -> str:
    """A figure as it is reported."""
    if value is None or key == "support":
        return "-" if value is None else str(value)
    return f"{100 * value:.1f} %" if key in PERCENT else f"{value:.3g}" if abs(value) >= 1e-4 else f"{value:.2g}"


def test_the_accuracy_is_written_in_percent_and_the_likelihood_as_a_number():
    assert formatted("accuracy", 0.625) == "62.5 %"
    assert formatted("nll", 0.625) == "0.625"


class Written:
    """What an evaluation of a run's best checkpoint wrote and printed."""

    def __init__(self, trained: Trained, run: str, capsys: Any, options: str = "") -> None:
        argv = f"--checkpoint {trained[run]} --which best --n {N} --seed {SEED} --batch-size 7 {options}"
        assert call(evaluate, *argv.split()) == 0
        self.run, self.folder, self.printed = trained[run], trained[run] / "eval", capsys.readouterr().out
        self.document = read_json(self.folder / "metrics.json")
        self.text = html.unescape((self.run / "report.html").read_text())
        page = self.text.partition("<h3>Evaluation</h3>")[2].partition("<h2>")[0]
        self.tiles = re.findall(r"<b>(.*?)</b><span>(.*?)</span>", page)
        self.rows = [re.findall(r"<t[hd]>(.*?)</t", row) for row in re.findall(r"<tr>(.*?)</tr>", page)]

    def check(self, expected: dict[str, Any], data: Any) -> None:
        task = "gan" if "distances" in expected else "classifier"
        with Dataset(data) as reader:
            head = {"data_hash": reader.meta.content_hash, "training_seed": 11}
        path = self.run / "checkpoints" / f"step-{BEST:08d}.pt"
        head |= {"checkpoint": str(path), "step": BEST, "task": task, "data": str(data), "seed": SEED, "n": N}
        assert_document(self.document, expected | head)
        about = [f"{path} (step {BEST}, {task})", f"on {N} images of {data}, seed {SEED}"]
        assert self.printed.splitlines()[:2] == about

    def check_figures(self, extra: dict[str, str]) -> None:
        """Table and page have every figure with its interval in its unit; `more` ends the words of a tile."""
        lines = [re.split(r" {2,}", line, maxsplit=1) for line in self.printed.splitlines()]
        for row in FIGURES:
            value, interval = self.document.get(row.key), self.document.get(f"{row.key}_interval")
            if row.place == "column" or value is None or isinstance(value, str):
                assert not [words for _, words in self.tiles if words.startswith(f"{row.meaning} (")]
                continue
            low, high = (formatted(row.key, end) for end in interval or (None, None))
            words = [f"95 % interval {low.removesuffix(' %')} to {high}"] if interval else []
            words += ["features of classifier"] if row in GAN and not row.by_judge else []
            words += [extra[row.key]] if row.key in extra else []
            assert (
                formatted(row.key, value),
                f"{row.meaning} ({'; '.join(words)})" if words else row.meaning,
            ) in self.tiles
            more = f" ({'; '.join(words)})" if words else ""
            assert [row.title, formatted(row.key, value) + more] in lines

    def check_row(self, name: str, figures: list[tuple[str, Any]]) -> None:
        """A row of a table of the page, which is printed, too."""
        row = [name, *(formatted(*pair) for pair in figures)]
        assert row in self.rows
        assert " ".join(row) in [" ".join(line.split()) for line in self.printed.splitlines()]


def assert_pictures(result: dict[str, Any], expected: dict[str, Any]) -> None:
    assert set(result) == set(expected)
    for name, (images, words) in expected.items():
        assert result[name][1] == list(words), name
        assert_pixels(result[name][0], [np.asarray(image) for image in images])


def few(interval: list[float], metric: str, extra: str = "") -> str:
    half = f"{50 * (interval[1] - interval[0]):.0f} percentage points either way"
    return f"the {metric} is uncertain by about {half}{extra}"


def share(hits: Any) -> tuple[float, list[float]]:
    return float(np.mean(hits)), [*binomtest(int(np.sum(hits)), len(hits)).proportion_ci(method="wilson")]


def jackknife(statistic: Any, count: int = N, high: float = 1.0, step: float = 1e-5) -> tuple[float, list[float], Any]:
    """A figure of weighted images, its interval, and each image's influence, by numeric derivatives."""
    value = float(statistic(np.ones(count)))
    slopes = np.array([statistic(np.ones(count) + step * row) - value for row in np.eye(count)]) / step
    half = Z * np.sqrt(np.square(slopes).sum())
    return value, [max(0.0, value - half), min(high, value + half)], count * slopes


def keys(**figures: Any) -> dict[str, Any]:
    """Values and intervals as a document has them."""
    values = {name: figure[0] for name, figure in figures.items()}
    return values | {f"{name}_interval": figure[1] for name, figure in figures.items()}


def probabilities(logits: np.ndarray) -> np.ndarray:
    return torch.from_numpy(logits).softmax(1).numpy()


def bins(confidence: np.ndarray) -> np.ndarray:
    return np.digitize(confidence, np.arange(1, 15) / 15, right=True)


def calibration(p: np.ndarray, labels: np.ndarray) -> Any:
    place, gaps = bins(p.max(1)), p.max(1) - (p.argmax(1) == labels)
    return lambda w: sum(abs((w * gaps)[place == k].sum()) for k in range(15)) / w.sum()


def ranked(hot: np.ndarray, scores: np.ndarray) -> tuple[dict[str, Any], dict[str, list[float]]]:
    """Means over the classes, and the classes' values, of AUROC and average precision."""
    figures: Any = {"auroc": theirs.roc_auc_score, "average_precision": theirs.average_precision_score}
    pairs = list(zip(hot.T, scores.T, strict=True))
    means = {
        name: jackknife(lambda w, figure=figure: np.mean([figure(*pair, sample_weight=w) for pair in pairs]))
        for name, figure in figures.items()
    }
    return means, {name: [figure(*pair) for pair in pairs] for name, figure in figures.items()}


def classes_of(hot: np.ndarray, named: np.ndarray, **extra: Any) -> dict[str, Any]:
    """A row a class."""
    columns = theirs.precision_recall_fscore_support(hot, named, zero_division=np.nan)
    part = dict(zip(("precision", "recall", "f1", "support"), columns, strict=True)) | extra
    rows = [
        {key: None if np.isnan(column[k]) else column[k] for key, column in part.items()} for k in range(len(hot.T))
    ]
    return dict(zip(NAMES, rows, strict=False))


def logits_of(network: Any, images: torch.Tensor) -> np.ndarray:
    """The mean of an image's and its mirror image's."""
    with torch.no_grad():
        return (sum(network(to_float(part)) for part in (images, images.flip(3))) / 2).double().numpy()


def drawn(count: int) -> np.ndarray:
    return np.sort(numpy_generator(SEED, "eval", "classifier").permutation(count)[:N])


def temperature(logits: np.ndarray, labels: np.ndarray) -> float:
    """The best temperature by scipy and scikit-learn, in float64."""
    loss = lambda t: theirs.log_loss(labels, probabilities(logits / np.exp(t)))  # noqa: E731
    return float(np.exp(minimize_scalar(loss, (-1, 1)).x))


def of_one_label(labels: np.ndarray, logits: np.ndarray) -> tuple[dict[str, Any], dict[str, Any]]:
    """Figures of a classifier, and each image's label, prediction and confidence."""
    hot, p, confusion = np.eye(KINDS, dtype=int)[labels], probabilities(logits), np.zeros((KINDS, KINDS), int)
    predicted, confidence, losses = p.argmax(1), p.max(1), -np.log(p[np.arange(N), labels])
    np.add.at(confusion, (labels, predicted), 1)
    hits, place, of_class = predicted == labels, bins(confidence), [labels == label for label in range(KINDS)]
    means, by_class = ranked(hot, p)
    means["nll"] = jackknife(lambda w: np.average(losses, weights=w), high=np.inf)
    means["ece"] = jackknife(calibration(p, labels))
    balanced = jackknife(lambda w: np.mean([np.average(hits[row], weights=w[row]) for row in of_class]))
    off = np.array([np.subtract(*share(hits[row])) for row in of_class])
    limits = balanced[0] + np.sqrt(np.square(off).sum(0)) / KINDS * [-1, 1]
    top5 = share([label in row for label, row in zip(labels, p.argsort(1)[:, -5:], strict=True)])
    figures = keys(accuracy=share(hits), balanced_accuracy=(balanced[0], limits), top5_accuracy=top5, **means)
    pairs = sorted((-n, i, j) for (i, j), n in np.ndenumerate(confusion) if n and i != j)[:10]
    figures["confused"] = [{"true": NAMES[i], "predicted": NAMES[j], "n": -n} for n, i, j in pairs]
    figures["confusion"], figures["reliability"] = confusion.tolist(), []
    for k in range(15):
        both = [part[place == k].mean() if k in place else None for part in (confidence, hits)]
        figures["reliability"].append({"n": (place == k).sum(), "confidence": both[0], "accuracy": both[1]})
    figures["temperature"] = {"value": temperature(logits, labels), "n": N}
    scaled, parts = logits.copy(), halves(labels, SEED)
    for judged, fit in (parts, parts[::-1]):
        scaled[judged] /= temperature(logits[fit], labels[fit])
    for name, p in (("before", probabilities(logits)), ("after", probabilities(scaled))):
        cross_entropies = -np.log(p[np.arange(N), labels])
        error = jackknife(calibration(p, labels))
        mean = jackknife(lambda w, values=cross_entropies: np.average(values, weights=w), high=np.inf)
        figures["temperature"] |= {f"ece_{name}": error[0], f"ece_interval_{name}": error[1]}
        figures["temperature"] |= {f"nll_{name}": mean[0], f"nll_interval_{name}": mean[1]}
    figures["per_class"] = classes_of(hot, np.eye(KINDS, dtype=int)[predicted], **by_class)
    return figures, {"label": labels, "prediction": predicted, "confidence": confidence}


def test_a_classifier(trained, pictures, capsys, monkeypatch):
    charts: dict[str, Any] = {}
    for name in ("save_confusion", "save_reliability"):
        monkeypatch.setattr(
            evaluate_classifier, name, lambda *arguments: charts.update({arguments[-1].name: arguments[:-1]})
        )
    records = drawn(COUNT)
    result = Written(trained, "classifier", capsys, "--tta flip --fold")
    images, labels = trained.images["test"][records], trained.labels["test"][records]
    expected, columns = of_one_label(labels, logits_of(trained.network, images))
    sure = "training began with a logistic regression on the features, of accuracy 0.613 (0.504 to 0.711)"
    sure += " by cross-validation"
    expected |= {"probe": PROBE, "notes": {"n": few(expected["accuracy_interval"], "accuracy"), "probe": sure}}
    names = ["confusion", "reliability", "mistakes", "evidence"]
    expected["majority_class_rate"] = np.bincount(labels).max() / N
    expected |= {"precision": "fp32", "fold": True, "tta": "flip", "images": [f"{name}.png" for name in names]}
    result.check(expected, trained["test.lmdb"])

    true, named = ([NAMES[label] for label in columns[key]] for key in ("label", "prediction"))
    words = [(f"{records[i]}: {true[i]}", f"pred. {named[i]} {columns['confidence'][i]:.2f}") for i in range(N)]
    order = np.argsort(-columns["confidence"])
    wrong, right = ([i for i in order if (true[i] != named[i]) == mistaken] for mistaken in (True, False))
    chosen = [*wrong[:4], *right[:4]]
    heats = image_heat(trained.network, images[chosen], torch.from_numpy(columns["prediction"][chosen]))
    maps = [overlay(images[i], heat) for i, heat in zip(chosen, heats, strict=True)]
    drawings: dict[str, Any] = {"mistakes.png": (images[wrong[:24]], flat(words[i] for i in wrong[:24]))}
    drawings["evidence.png"] = flat(maps), flat(words[i] for i in chosen)
    assert_pictures(pictures, drawings)
    assert charts["confusion.png"] == (expected["confusion"], NAMES)
    assert_document([*charts["reliability.png"]], [expected["reliability"], expected["ece"]])

    most = f"always predicting the most frequent class: {100 * expected['majority_class_rate']:.1f} %"
    result.check_figures({"accuracy": f"mean of 2 views; {most}"})
    for name, row in expected["per_class"].items():
        result.check_row(name, [*row.items()])


def test_a_classifier_of_several_labels(trained, pictures, capsys):
    numbers = {name: labels % len(SETS) for name, labels in trained.labels.items()}
    every, data, records = np.array([np.isin([0, 1, 2], part) for part in SETS]), trained["sets.lmdb"], drawn(COUNT)
    hot = torch.from_numpy(every[numbers["train"]])
    networks = [fitted(trained.images["train"], hot, seed, several=True) for seed in (1, 0)]
    pack_arrays(data, trained.images["test"].numpy(), numbers["test"], NAMES[:3], label_sets=SETS)
    extra: dict[str, Any] = {"shape": {"channels": 1, "classes": 3, "resolution": SIDE}, "classes": NAMES[:3]}
    config = {"model": {"stem": "small-stride2"}, "data": {"val_path": str(data)}, "seed": 11}
    two_checkpoints(trained["several"], "model", networks, task="classifier", config=config, **extra)
    result = Written(trained, "several", capsys)
    images, hot, levels = trained.images["test"][records], every[numbers["test"][records]], networks[1].thresholds
    with torch.no_grad():
        p = networks[1](to_float(images)).double().sigmoid().numpy()
    named, (means, by_class) = p >= levels.numpy(), ranked(hot, p)
    for mean in ("macro", "micro"):
        f1 = lambda w, mean=mean: theirs.f1_score(hot, named, average=mean, sample_weight=w)  # noqa: E731
        means[f"{mean}_f1"] = jackknife(f1)
    expected = keys(exact_match=share((hot == named).all(1)), **means)
    flattered = "they were chosen on these images, which flatters F1 and exact match; give others"
    expected["notes"] = {"n": few(expected["exact_match_interval"], "exact match"), "thresholds": flattered}
    expected["per_class"] = classes_of(hot, named, **by_class, threshold=levels.numpy())
    expected |= {"precision": "fp32", "fold": False, "tta": "off", "images": ["mistakes.png"]}
    result.check(expected, data)

    doubt = (np.abs(p - hot) * (named != hot)).max(1)
    wrong = [i for i in np.argsort(-doubt) if doubt[i]][:24]
    words = [["; ".join(np.array(NAMES[:3])[row]) or "no label" for row in rows] for rows in (hot, named)]
    both = [(f"{records[i]}: {words[0][i]}", f"pred. {words[1][i]} {doubt[i]:.2f}") for i in wrong]
    assert_pictures(pictures, {"mistakes.png": (images[wrong], flat(both))})
    others = trained["others-sets.lmdb"]
    pack_arrays(others, trained.images["others"].numpy(), numbers["others"], NAMES[:3], label_sets=SETS)
    options = ["--data", others, "--n", "9", "--out", trained["others-eval"]]
    assert call(evaluate, "--checkpoint", trained["several"], *options) == 0
    assert "thresholds" not in read_json(trained["others-eval"] / "metrics.json")["notes"]
    result.check_figures({})
    for name, row in expected["per_class"].items():
        result.check_row(name, [*row.items()])


def frechet(x: np.ndarray, y: np.ndarray) -> float:
    a, b = ((part - part.mean(0)) / np.sqrt(len(part) - 1) for part in (x, y))
    shift = x.mean(0) - y.mean(0)
    return float(shift @ shift + (a**2).sum() + (b**2).sum() - 2 * np.linalg.norm(a @ b.T, "nuc"))


def mmd(x: np.ndarray, y: np.ndarray) -> float:
    xx, yy, xy = ((a @ b.T / x.shape[1] + 1) ** 3 for a, b in ((x, x), (y, y), (x, y)))
    return sum((k.sum() - k.trace()) / len(k) / (len(k) - 1) for k in (xx, yy)) - 2 * xy.mean()


def by_name(values: Any) -> dict[str, float]:
    return dict(zip(NAMES, map(float, values), strict=True))


def of_samples(fake: Any, real: Any, training: Any, labels: np.ndarray, per_class: int) -> dict[str, Any]:
    """The values of an extractor's figures."""
    x, y, floor, of_class = fake[:N], real[:N], training[:N], [labels == label for label in range(KINDS)]
    diversity = [pdist(fake[row][:per_class]).mean() / pdist(real[row][:per_class]).mean() for row in of_class]
    within = [frechet(x[row[:N]], y[row[:N]]) for row in of_class]
    result: dict[str, Any] = {
        "frechet": frechet(x, y),
        "floor": frechet(floor, y),
        "kernel": mmd(x, y),
        "kernel_floor": mmd(floor, y),
    }
    for k, names in ((3, ("precision", "recall")), (5, ("density", "coverage"))):
        result |= {name: compute_prdc(y, x, nearest_k=k)[name] for name in names}
    result["clipped_density"], result["clipped_coverage"] = clipped(x, y)
    result |= {"diversity_ratio": min(diversity), "intra_class_frechet": np.mean(within)}
    return result | {"diversity_by_class": by_name(diversity), "intra_class_frechet_by_class": by_name(within)}


@torch.no_grad()
def test_a_gan(trained, pictures, capsys):
    """Its judge is the last checkpoint of a run, whose best is another."""
    judge, test, per_class, searched, generator = trained.judge, trained.labels["test"], 9, 67, trained.generator
    options = f"--classifier {trained['classifier']} --extractor classifier,pixels --per-class {per_class}"
    result = Written(trained, "gan", capsys, f"{options} --searched {searched}")
    real = select(test, n=N, seed=SEED, role="test", per_class=per_class)
    training_rows, judged = (
        select(trained.labels[name], n=n, seed=SEED, role=role)
        for name, n, role in (("train", searched, "train"), ("test", N, "judge"))
    )
    labels, count, first = real.labels, len(real.labels), real.labels[:N]
    samples = samples_of(generator, labels.tolist(), list(range(count)), SEED)
    sets = [samples, trained.images["test"][real.indices], trained.images["train"][training_rows.indices]]
    p, q = (
        judge(to_float(part)).double().softmax(1).numpy() for part in (samples, trained.images["test"][judged.indices])
    )
    hits, label_tensor = p.argmax(1) == labels, torch.from_numpy(labels)
    distances: list[Any] = []
    places = [[judge.features(to_float(part)) for part in sets], [part.flatten(1).float() / 255 for part in sets]]
    names, weights = [f"classifier:{trained['classifier']}", "pixels"], [fingerprint(judge), ""]
    for name, source, (fake, y, training) in zip(names, weights, places, strict=True):
        about: dict[str, Any] = {
            "fake": fake,
            "real": y,
            "training": training,
            "labels": label_tensor,
            "extractor": name,
            "thresholds": None,
        }
        record = Samples(**about, n=N, names=NAMES, probabilities=None, seed=SEED, per_class=per_class)
        row: dict[str, Any] = {"extractor": name, "weights": source, "n": N}
        for figure in (figure for figure in GAN if not figure.by_judge):  # for its interval
            row |= figure.keys(figure.measure(record), NAMES)
        fake, y, training = (part.double().numpy() for part in (fake, y, training))
        row |= of_samples(fake, y, training, labels, per_class)
        distances.append(row)
    columns = ("extractor", "weights", "frechet", "kernel", "floor")
    expected: dict[str, Any] = {key: value for key, value in distances[0].items() if not key.startswith(columns)}
    expected |= keys(recognised=share(hits[:N]))
    expected["recognised_by_class"] = by_name(hits[:N][first == label].mean() for label in range(KINDS))
    sizes = [min(per_class, n) for n in np.bincount(labels)]
    expected |= {"distances": distances, "diversity_images": min(sizes), "diversity_extractor": names[0]}
    fake, y, training = places[1]
    kinds = [RealSet(training, torch.from_numpy(training_rows.labels)), RealSet(y[:N], label_tensor[:N])]
    copies, far = memorisation(fake[:N], *kinds)[0], cdist(fake[:N], training)
    ends = zip(range(N), labels[:N], training_rows.indices[far.argmin(1)], far.min(1), strict=True)
    pairs: list[Any] = [dict(zip(("sample", "label", "train", "distance"), part, strict=True)) for part in ends]
    lists = {"closest": sorted(pairs, key=lambda pair: pair["distance"])[:12], "first": pairs[:12]}
    expected["memorisation"] = copies | lists | {"extractor": "pixels", "weights": "", "searched": searched, "n": N}
    of_judge = keys(accuracy=share(q.argmax(1) == judged.labels))
    majority = np.bincount(judged.labels).max() / N
    assert of_judge["accuracy"] > 0.4 + 0.6 * majority
    expected["judge"] = of_judge | {"n": N, "majority_class_rate": majority, "is_weak": False}
    expected["weak_extractors"] = []
    for key, numbers in (("samples_by_class", first), ("samples_predicted", p[:N].argmax(1))):
        expected[key] = dict(zip(NAMES, np.bincount(numbers, minlength=KINDS).tolist(), strict=True))
    expected["size"] = f"{SIDE}x{SIDE}"
    rough = "; distances of fewer than 1,000 images are rough and depend on n, so compare them only with "
    rough += "distances of the same n, and trust only large differences"
    smallest = np.bincount(first).min()
    biased = f"the smallest class has only {smallest} samples and {smallest} real images; with so few, compare only "
    biased += "with values from as many images"
    uncertain = few(expected["recognised_interval"], "recognised fraction", rough)
    expected["notes"] = {"n": uncertain, "intra_class_frechet": biased}
    drawings = ["samples", "recognised_best", "recognised_worst", "real", "neighbours", "truncation", "mixing"]
    expected["images"] = [f"{name}.png" for name in drawings]
    result.check(expected | {"judge_weights": fingerprint(judge)}, trained["test.lmdb"])

    confidence, pictured = p[np.arange(count), labels], lists["closest"] + lists["first"]
    words = [
        [f"{NAMES[labels[i]]} {confidence[i]:.2f}", *[f"pred. {NAMES[p[i].argmax()]}"] * (not hits[i])]
        for i in range(count)
    ]
    grids = [np.concatenate([np.flatnonzero(part == k)[:10] for k in range(KINDS)]) for part in (labels, test)]
    expected_pictures: dict[str, Any] = {"samples.png": (samples[grids[0]], NAMES)}
    expected_pictures["real.png"] = trained.images["test"][grids[1]], NAMES
    for name, rows in (("best", np.argsort(-confidence)[:24]), ("worst", np.argsort(confidence)[:24])):
        expected_pictures[f"recognised_{name}.png"] = samples[rows], flat(words[i] for i in rows)
    sides = [
        samples[[pair["sample"] for pair in pictured]],
        trained.images["train"][[pair["train"] for pair in pictured]],
    ]
    ratios = [f"{pair['distance'] / copies['usual_distance']:.2f} of the usual distance" for pair in pictured]
    both = [
        ("sample {sample} | record {train}".format(**pair), word) for pair, word in zip(pictured, ratios, strict=True)
    ]
    expected_pictures["neighbours.png"] = (
        torch.cat([sides[0], torch.full((24, 1, SIDE, 1), 255), sides[1]], -1),
        flat(both),
    )
    psis, ten = (0, 0.3, 0.5, 0.7, 1), [i % KINDS for i in range(10)]
    turns = [(SEED, ten[:KINDS]), (SEED + 1, ten[KINDS:])]  # each seed is drawn once for each class
    truncated = [samples_of(generator, labels, labels, seed, psi=psi) for psi in psis for seed, labels in turns]
    heads = flat((f"seed {seed}", NAMES[label]) for seed, labels in turns for label in labels)
    expected_pictures["truncation.png"] = torch.cat(truncated), [*(f"psi {psi:g}" for psi in psis), *heads]
    (a, a_maps), (b, b_maps) = (styles_of(generator, ten[:6], ten[:6], seed) for seed in (SEED, SEED + 1))
    cells, coarse = [*generator.synthesis(b, b_maps)], generator.num_ws // 2
    for i in range(6):
        ws, maps = a[[i] * 6].clone(), [*b_maps[:coarse], *(level[[i] * 6] for level in a_maps[coarse:])]
        ws[:, :coarse] = b[:, :coarse]
        cells += [generator.synthesis(a, a_maps)[i], *generator.synthesis(ws, maps)]
    heads = flat((f"seed {SEED + 1}", f"B {name}") for name in NAMES[:6])
    expected_pictures["mixing.png"] = (
        as_bytes(torch.stack(cells)),
        ["", *(f"A {name} seed {SEED}" for name in NAMES[:6]), "", *heads],
    )
    assert_pictures(pictures, expected_pictures)

    right = f"the classifier is right on {100 * of_judge['accuracy']:.1f} % of the real images of this size"
    right += f"; always predicting the most frequent class would be right on {100 * majority:.1f} %"
    result.check_figures({"recognised": right})
    for name in NAMES:
        of_class = [(figure.key, expected[figure.by_class][name]) for figure in GAN if figure.by_class]
        result.check_row(name, of_class)
    for row, name in zip(distances, ("classifier", "pixels"), strict=True):
        cells = [name]
        for key in ("frechet", "floor", "kernel", "kernel_floor"):
            cells.append(formatted(key, row[key]))
            if interval := row.get(f"{key}_interval"):
                cells[-1] += f" ± {formatted(key, interval[1] - row[key])}"
        assert [*cells, str(N)] in result.rows
        assert " ".join([*cells, str(N)]) in [" ".join(line.split()) for line in result.printed.splitlines()]
    ends = [distances[0][key] for key in ("frechet", "floor")] + distances[0]["frechet_interval"]
    tile = "{:.3g}</b><span>Frechet distance between samples and real images, on features of classifier (between "
    tile += "training and test images: {:.3g}; 47 images each; 95 % interval {:.3g} to {:.3g})"
    assert tile.format(*ends) in result.text
    near = "{} of the samples are unusually near to a training image (expected without copying: {}); "
    counts = near.format(*(formatted("accuracy", copies[key]) for key in ("share", "expected")))
    counts += f"p-value {copies['p_value']:.3g} (features of pixels, {searched} training images searched)"
    assert ("no sign of copies", counts) in result.tiles
    assert f"  no sign of copies: {counts}" in result.printed
