"""The HTML report: complete, self-contained, well formed, and never stopped by what a run folder lacks."""

import base64
import html
import io
import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from duetgan.metrics.figures import FIGURES
from duetgan.metrics.tables import credible, note_lines
from duetgan.reporting.pictures import CAPTIONS, LARGEST_SIDE, MOST_SAMPLES, samples
from duetgan.reporting.report import charts, write_quickstart_report, write_report
from duetgan.reporting.run_files import Run
from duetgan.utils.images import grid, save_png
from duetgan.utils.runlog.versions import environment
from tests.slim import no_curves

VOID = {"meta", "img", "br", "hr", "link", "input"}
EVIL = "<script>alert('x')</script>"


class Page(HTMLParser):
    """What a page holds: tags, addresses and text; refuses tags that are not closed in order."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.addresses: list[str] = []
        self.text = ""
        self._open: list[str] = []
        self.feed(text)
        self.close()
        assert not self._open, f"never closed: {self._open}"

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.addresses += [value for key, value in attrs if key in ("src", "href", "action", "data", "poster")]
        if tag not in VOID:
            self._open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append(tag)

    def handle_endtag(self, tag):
        assert self._open, f"</{tag}> closes nothing"
        assert self._open.pop() == tag

    def handle_data(self, data):
        self.text += data


def page(path: Path) -> Page:
    return Page(path.read_text(encoding="utf-8"))


def write(path: Path, content: object) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content if isinstance(content, str) else json.dumps(content))


def save_grid(path: Path) -> None:
    images = np.random.default_rng(0).integers(0, 256, (4, 1, 8, 8), dtype=np.uint8)
    save_png(grid(torch.from_numpy(images), spec=None), path)


def make_gan(folder: Path) -> Path:
    rows = []
    for step in range(10, 60, 10):
        losses = {"generator": 1.0 / step, "discriminator": 0.5, "r1": None if step == 30 else 10.0 ** (-step / 10)}
        row = {"step": step, "images": step * 64, "images_per_second": 400.0 + step}
        rows.append(json.dumps(row | {f"loss/{name}": value for name, value in losses.items()}))
    write(folder / "metrics.jsonl", "\n".join(rows))
    write(folder / "config.yaml", f"task: gan\nseed: 3\nname: {EVIL}\n")
    write(folder / "status.json", {"state": "finished", "step": 50, "reason": "", "exit_code": 0})
    write(folder / "checkpoints" / "last.json", {"file": "step-00000050.pt", "step": 50, "sha256": "0" * 64})
    for step in (0, 20, 50):
        save_grid(folder / "samples" / f"step-{step:08d}.png")
    save_grid(folder / "eval" / "samples.png")
    distance = {"extractor": "resnet50", "frechet": 1869.25, "kernel": 1.5, "floor": 60.875, "kernel_floor": None}
    copies = {"copies": False, "share": 0.0125, "expected": 0.01, "p_value": 0.25, "searched": 9000}
    evaluation = {"checkpoint": "runs/gan/checkpoints/step-00020000.pt", "step": 20000, "n": 2000, "seed": 4}
    evaluation |= {
        "data": f"test {EVIL}.lmdb",
        "memorisation": copies | {"extractor": f"pixels {EVIL}"},
        "distances": [{**distance, "n": 2000}],
        "recognised": 0.8725,
        "recognised_by_class": {"Bag": 0.9, EVIL: 0.845},
        "diversity_ratio": 0.4375,
        "diversity_by_class": {"Bag": 0.5, EVIL: 0.4375},
        "notes": {"floor": f"a note {EVIL}"},
    }
    write(folder / "eval" / "metrics.json", evaluation)
    return folder


def make_classifier(folder: Path) -> Path:
    row = {"step": 10, "loss/classifier": 0.3, "accuracy/train": 0.95, "val/accuracy": 0.9}
    write(folder / "metrics.jsonl", json.dumps(row) + "\n")
    write(folder / "config.yaml", "task: classifier\n")
    per_class = {"Shirt": {"precision": 0.725, "recall": None, "f1": 0.7, "support": 200}}
    evaluation = {"accuracy": 0.8975, "top5_accuracy": None, "ece": 0.0213, "per_class": per_class}
    write(folder / "eval" / "metrics.json", evaluation)
    save_grid(folder / "eval" / "confusion.png")
    return folder


def test_report_of_a_gan_run_shows_everything_and_is_self_contained_and_escaped(tmp_path):
    write(make_gan(tmp_path / "gan") / "eval" / "command.txt", f"python evaluate.py --seed 4 && echo {EVIL}")
    report = write_report(tmp_path / "gan")
    assert report == tmp_path / "gan" / "report.html"
    found = page(report)
    assert found.tags.count("svg") == 3  # adversarial losses together, r1, speed
    assert found.tags.count("img") == 3 + 1  # three grids over time, one of the evaluation
    shown = ["finished", "87.2 %", "0.438", "1,869", "60.9", "90.0 %", "step 20", "seed: 3", "a note"]
    shown += [f"python evaluate.py --seed 4 && echo {EVIL}", environment()["torch"]]
    shown += [f"step-00020000.pt, step 20000, n 2000, data test {EVIL}.lmdb, seed 4", "no sign of copies"]
    near = "1.2 % of the samples are unusually near to a training image (expected without copying: 1.0 %); p-value 0.25"
    shown.append(f"{near} (features of pixels {EVIL}")
    assert [text for text in shown if text not in found.text] == []
    assert "script" not in found.tags
    assert "link" not in found.tags
    assert found.text.count(EVIL) == 6  # command, config, class, note, data, extractor: as text
    assert [address for address in found.addresses if not address.startswith("data:image/png;base64,")] == []
    assert "url(" not in report.read_text()


def test_names_that_a_run_chose_are_escaped_in_titles_and_charts(tmp_path):
    folder = tmp_path / "a<b>&'\""
    write(folder / "metrics.jsonl", json.dumps({"step": 1, f"loss/{EVIL}": 1.0, f"val/{EVIL}": None}))
    write(folder / "config.yaml", f'task: "{EVIL}"')
    found = page(write_report(folder))
    assert "script" not in found.tags
    assert "Run a<b>&'\"" in found.text
    assert f"loss/{EVIL} 1" in found.text
    assert f"val/{EVIL}: not one finite value." in found.text


def test_a_small_image_is_embedded_as_it_is_a_large_one_shrunk_and_a_torn_one_named(tmp_path):
    run = make_gan(tmp_path / "gan")
    small = (run / "samples" / "step-00000050.png").read_bytes()
    assert base64.b64decode(page(write_report(run)).addresses[1].partition(",")[2]) == small
    (run / "eval" / "samples.png").write_bytes(small[: len(small) // 2])
    assert "samples.png cannot be shown" in page(write_report(run)).text
    noise = np.random.default_rng(0).integers(0, 256, (1500, 1500), dtype=np.uint8)
    Image.fromarray(noise).save(run / "eval" / "samples.png")
    address = page(write_report(run)).addresses[0]
    image = Image.open(io.BytesIO(base64.b64decode(address.partition(",")[2])))
    assert (image.format, image.size) == ("JPEG", (LARGEST_SIDE, LARGEST_SIDE))


def test_empty_folder_gives_a_report_that_says_so(tmp_path):
    found = page(write_report(tmp_path))
    assert f"Run: python evaluate.py --checkpoint {tmp_path}" in found.text  # U11
    words = (
        "No values in metrics.jsonl",
        "Not evaluated yet",
        "no config.yaml",
        "commands were not recorded",
        "No sample grids",
    )
    assert [each for each in words if each not in found.text] == []


@pytest.mark.parametrize(
    ("file", "content", "words"),
    [
        *(("status.json", odd, "Training") for odd in ("{", "[]")),
        ("metrics.jsonl", '{"step": 1, "loss/r1": 2.0}\n{"step": 2, "lo', "r1 loss"),
        ("metrics.jsonl", f'{{"step": 1, "loss/r1": {10**400}}}\n', "loss/r1: not one finite value"),
        ("metrics.jsonl", '{"step": 1, "x": 1.7e308}\n{"step": 2, "x": -1.7e308}\n', "x: not one finite value"),
        ("samples/step-00000050.png", "no image", "step-00000050.png cannot be shown"),
        ("eval/metrics.json", '{"distances": 3, "per_class": [1], "accuracy": "x", "notes": []}', "Evaluation"),
        *(("eval/metrics.json", odd, "Evaluation") for odd in ('{"step": "7", "n": null}', '{"memorisation": []}')),
        ("config.yaml", "\t: [", "Resolved configuration"),
    ],
)
def test_damaged_file_stops_nothing(tmp_path, file, content, words):
    run = make_gan(tmp_path / "gan")
    write(run / file, content)
    assert words in page(write_report(run)).text


def test_quickstart_report_holds_both_runs(tmp_path):
    make_gan(tmp_path / "gan")
    make_classifier(tmp_path / "classifier")
    found = page(
        write_quickstart_report(tmp_path, commands=["one", "two"], seconds=75.0, notes=(), classifier=True, answers=())
    )
    headings = ["What the GAN draws", "What the classifier gets right"]
    shown = [*headings, "89.8 %", "87.2 %", "75 s", "72.5 %", "one\ntwo"]
    assert [text for text in shown if text not in found.text] == []
    assert found.tags.count("img") == 4 + 1
    assert found.tags.count("details") >= 2  # both configurations, folded away
    classifier, gan = (pieces(write_report(tmp_path / name).read_text()) for name in ("classifier", "gan"))
    both = pieces((tmp_path / "report.html").read_text())
    for part in ("captions", "charts", "remarks", "tables"):  # each run's, in the order of the runs
        assert both[part] == classifier[part] + gan[part]
    total = ("75 s", "total time of all commands")
    assert sorted(both["tiles"]) == sorted([*classifier["tiles"], *gan["tiles"], total])


def make_told_run(folder: Path) -> Path:
    """A run with all that the report tells of one."""
    make_gan(folder)
    save_grid(folder / "eval" / "real.png")
    write(folder / "status.json", {"state": "stopped", "step": 50, "reason": "SIGTERM", "seconds": 3725.0})
    best = {"file": "step-00000040.pt", "step": 40, "metric": "diversity_ratio", "value": 0.625}
    write(folder / "checkpoints" / "best.json", best)
    images = {"path": "train.lmdb", "count": 650, "channels": 3, "resolution": 32, "content_hash": "abcdef" * 8}
    write(folder / "data.json", {"training": images | {"by_class": {"Bag": 400, EVIL: 250}}, "held-out": "odd"})
    return folder


def test_headline_and_images_come_before_training_and_curves_and_nothing_is_left_out(tmp_path):
    path = write_report(make_told_run(tmp_path / "gan"))
    text, source = page(path).text, path.read_text()
    order = ["fraction of the samples for which the judge (the classifier) predicts the requested class"]
    order += ["Samples, a row for each class", "Real test images", "Evaluation"]
    order += ["Samples over time", "Training", "adversarial losses", "Data", "How this was made"]
    places = [text.index(words) for words in order]
    assert places == sorted(places)
    assert "samples.png" not in text  # captions are words
    scrolling = source.count('<div class="scroll" tabindex="0"><table')
    assert source.count("<table") == scrolling > 0  # U9: they were cut off at 390 px
    shown = ["62 min", "step 40", "best checkpoint by evaluations during training: diversity ratio 0.625", "SIGTERM"]
    shown += ["train.lmdb", "650", "32 px, 3 channel(s)", "400", "250"]
    assert [words for words in shown if words not in text] == []


def pieces(source: str) -> dict[str, list[Any]]:
    """The headings, tiles, tables, captions, titles of charts with their legends, and remarks of a page."""
    source = html.unescape(source.partition("<body>")[2])
    tables = [table.split("</tr>")[:-1] for table in re.findall(r"<table.*?>(.*?)</table>", source, re.DOTALL)]
    charts = re.findall(r'<figure class="chart"><figcaption>(.*?)<span class="keys">(.*?)</span></figcaption>', source)
    return {
        "headings": re.findall(r"<h[123]>(.*?)</h", source),
        "tiles": re.findall(r'<div class="tile"><b>(.*?)</b><span>(.*?)</span>', source),
        "tables": [[re.findall("<t[dh]>(.*?)</t[dh]>", row) for row in table] for table in tables][:-1],  # no versions
        "captions": re.findall(r'<figure class="image.*?alt="(.*?)">', source),
        "large": re.findall(r"<figcaption>(.*?), the latest</figcaption>", source),
        "charts": [(title, re.findall(r"s(\d)\">(.*?) <b>(.*?)</b>", legend)) for title, legend in charts],
        "remarks": re.findall(r'<p class="(?:note|missing|soft)">(.*?)</p>', source),
    }


def test_every_value_of_a_page_is_that_of_its_file(tmp_path, monkeypatch):
    """No two values of a kind are equal, and no mean is a median."""
    monkeypatch.setattr("duetgan.reporting.pictures._svg", no_curves)
    run = tmp_path / "run"
    meanings = {row.key: row.meaning for row in FIGURES}
    rows: list[dict[str, Any]] = [{"step": step, "images": 64 * step} for step in (10, 20, 30)]
    for row, speed, wait in zip(rows, (100.0, 430.0, 130.0), (0.02, 0.5, 0.04), strict=True):
        row |= {"images_per_second": speed, "data_wait": wait}
        row |= {"loss/generator": speed / 1000, "loss/discriminator": 2 * wait}
        row |= {f"x{number}": number + row["step"] for number in range(7)}
    write(run / "metrics.jsonl", "\n".join(map(json.dumps, rows)))
    write(run / "config.yaml", "task: gan\n")
    write(run / "status.json", {"state": "stopped", "step": 37, "reason": "SIGTERM", "seconds": 7270.0})
    write(run / "checkpoints" / "last.json", {"step": 36, "metric": "frechet", "value": 5.5})
    write(run / "checkpoints" / "best.json", {"step": 24, "metric": "diversity_ratio", "value": 0.625})
    data = {
        "training": {"path": "a.lmdb", "count": 650, "channels": 3, "resolution": 32, "groups": 11},
        "synthetic": {"path": "b.lmdb", "count": 90, "channels": 1, "resolution": 16},
        "held-out": {"path": "c.lmdb", "count": 72, "channels": 4, "resolution": 64},
    }
    for role, counts in zip(data, ({"Bag": 400, "Hat": 250}, {"Bag": 90}, {"Hat": 60, "Cap": 12}), strict=True):
        data[role]["by_class"] = counts
    write(run / "data.json", data | {"history": {"0": "a.lmdb", "30": "d.lmdb"}})
    copies = {"copies": True, "share": 0.125, "expected": 0.01, "p_value": 0.00025, "searched": 9000}
    distances: list[dict[str, Any]] = [
        {"extractor": "resnet50", "frechet": 1869.25, "kernel": 1.5, "floor": 60.875, "kernel_floor": 0.25, "n": 2000},
        {"extractor": "classifier:runs/a", "frechet": 2.5, "kernel": 3.5, "floor": 0.5, "n": 1990},
    ]
    document: dict[str, Any] = {"checkpoint": "x.pt", "step": 24, "n": 2010, "seed": 4, "data": "c.lmdb"}
    document |= {"distances": distances, "recognised": 0.8725, "judge": {"accuracy": 0.75, "majority_class_rate": 0.25}}
    document |= {"recall": 0.375, "memorisation": copies | {"extractor": "pixels"}, "notes": {"recall": "a note"}}
    document |= {"images": ["neighbours.png", "real.png", "truncation.png", "samples.png"]}
    distances[0]["frechet_interval"] = document["recall_interval"] = [0.25, 2000.5]
    write(run / "eval" / "metrics.json", document)
    for name in document["images"]:
        save_grid(run / "eval" / name)
    for step in (0, 20, 24):
        save_grid(run / "samples" / f"step-{step:08d}.png")
    judge = f"{meanings['recognised']} (the classifier is right on 75.0 % of the real images of this size; always "
    judge += "predicting the most frequent class would be right on 25.0 %)"
    distance = "Frechet distance between samples and real images, on features of resnet50 (between training and test "
    distance += "images: 60.9; 2,000 images each; 95 % interval 0.25 to 2,000)"
    recall = f"{meanings['recall']} (95 % interval 25.0 to 200050.0 %; features of resnet50)"
    near = "12.5 % of the samples are unusually near to a training image (expected without copying: 1.0 %); p-value "
    near += "0.00025 (features of pixels, 9,000 training images searched)"
    evaluation = pieces(write_report(run).read_text())
    assert evaluation["headings"] == [
        "Run run (gan)", "Evaluation", "Samples over time", "Training", "Data", "How this was made",
        "Commands to repeat this run", "Versions and machine",
    ]  # fmt: skip
    assert evaluation["tiles"] == [
        ("87.2 %", judge), ("1,869", distance), ("87.2 %", judge), ("37.5 %", recall), ("copies training images", near),
        ("stopped", "SIGTERM"), ("37", "steps"), ("2.0 h", "duration, including evaluations"),
        ("130", "images per second (median)"), ("4.0 %", "of the time spent waiting for data (median)"),
        ("step 24", "best checkpoint by evaluations during training: diversity ratio 0.625"),
    ]  # fmt: skip
    titles = [row.title for row in FIGURES if row.place == "column"]
    assert evaluation["tables"] == [
        [["extractor", *titles, "n"], ["resnet50", "1,869 ± 131", "60.9", "1.5", "0.25", "2,000"],
         ["classifier (a)", "2.5", "0.5", "3.5", "-", "1,990"]],
        [["data", "file", "images", "size", "groups of images kept together"],
         ["training", "a.lmdb", "650", "32 px, 3 channel(s)", "11"],
         ["synthetic", "b.lmdb", "90", "16 px, 1 channel(s)", "-"],
         ["held-out", "c.lmdb", "72", "64 px, 4 channel(s)", "-"]],
        [["from", "training images"], ["0", "a.lmdb"], ["30", "d.lmdb"]],
        [["class", "training", "synthetic", "held-out"], ["Bag", "400", "90", "-"], ["Hat", "250", "-", "60"],
         ["Cap", "-", "-", "12"]],
    ]  # fmt: skip
    words = ["Samples", "Real test images", CAPTIONS["neighbours"], CAPTIONS["truncation"]]
    assert evaluation["captions"] == [*words, "step 0", "step 20", "step 24"]
    losses = [("0", "loss/generator", "0.13"), ("1", "loss/discriminator", "0.08")]
    singles = [("images per second", [("0", "images_per_second", "130")]), ("data wait", [("0", "data_wait", "0.04")])]
    assert evaluation["charts"] == [
        *singles, ("adversarial losses", losses), *((f"x{i}", [("0", f"x{i}", f"{30 + i}")]) for i in range(7)),
    ]  # fmt: skip
    assert evaluation["remarks"] == ["Recall: a note", "checkpoint x.pt, step 24, n 2010, data c.lmdb, seed 4"]
    assert evaluation["large"] == []
    for task, caption in (("classifier", "the first training images, as the network sees them"), ("gan", "step 0")):
        write(run / "config.yaml", f"task: {task}\n")
        (run / "eval" / "metrics.json").unlink(missing_ok=True)
        unfinished = pieces(write_report(run).read_text())
        over = "Training images" if task == "classifier" else "Samples over time"
        begin = "Training images" if task == "classifier" else "Samples during training"
        assert unfinished["headings"][1:4] == ["Evaluation", begin, over]
        assert unfinished["captions"] == ["step 24", caption, "step 20", "step 24"]
        assert unfinished["large"] == ["step 24"]
        assert unfinished["remarks"] == [f"Not evaluated yet. Run: python evaluate.py --checkpoint {run}"]


def test_a_classifiers_further_figures(tmp_path):
    run = tmp_path / "run"
    (run / "eval").mkdir(parents=True)
    found = {"accuracy": 0.75, "balanced_accuracy": 0.5, "balanced_accuracy_interval": [0.4375, 0.5625]}
    found |= {"auroc": 0.875, "auroc_interval": [0.8125, 0.9375], "precision": "fp32"}
    fitted = {"value": 0.7, "n": 60, "nll_before": 0.5, "nll_after": 0.375, "ece_before": 0.08, "ece_after": 0.018}
    found["temperature"] = fitted | {"ece_interval_before": [0.069, 0.091], "ece_interval_after": [0.006, 0.029]}
    found |= {"tta": "shift", "majority_class_rate": 0.25}
    write(run / "eval" / "metrics.json", found)
    written = html.unescape(write_report(run).read_text())
    rows = [re.findall("<t[dh]>(.*?)</t[dh]>", row) for row in re.findall("<tr>(.*?)</tr>", written)]
    cells = ["8.0 % (95 % interval 6.9 to 9.1 %)", "1.8 % (95 % interval 0.6 to 2.9 %)"]
    assert ["temperature", "1", "0.7"] in rows
    assert ["negative log-likelihood", "0.5", "0.375"] in rows
    assert ["calibration error (ECE)", *cells] in rows
    text = page(write_report(run)).text
    shown = ["rare and frequent classes count equally (95 % interval 43.8 to 56.2 %)"]
    shown += ["averaged over the classes (95 % interval 0.812 to 0.938)"]
    shown += ["classified correctly (mean of 6 views; always predicting the most frequent class: 25.0 %)"]
    assert [words for words in shown if words not in text] == []
    assert "that image's 3rd nearest real image" not in text  # a GAN's precision


@pytest.mark.parametrize("is_weak", [True, False])
def test_a_weak_judges_metrics_are_left_out_and_a_skilled_ones_stay(tmp_path, is_weak):
    """U1: samples that are noise had 99.3 % fidelity in the features of a classifier near chance."""
    run = make_gan(tmp_path / "gan")
    document = json.loads((run / "eval" / "metrics.json").read_text())
    (other,) = document["distances"]
    made = {"clipped_density": 0.993, "frechet": 77.5, "diversity_ratio": 0.4375}
    judge = {"accuracy": 0.35, "majority_class_rate": 0.3125, "is_weak": is_weak, "n": 100}
    document |= made | {"judge": judge, "weak_extractors": ["classifier:x"] * is_weak}
    document["distances"] = [other | made | {"extractor": "classifier:x"}, other | {"clipped_density": 0.25}]
    document["images"] = ["samples.png", "recognised_best.png"]
    save_grid(run / "eval" / "recognised_best.png")
    write(run / "eval" / "metrics.json", document)
    text = page(write_report(run)).text
    of_judge = ["87.2 %", "90.0 %", "99.3 %", "77.5", "31.2 %", "best recognised"]
    assert [words for words in of_judge if words in text] == ([] if is_weak else of_judge)
    assert ("25.0 %" in text) is is_weak  # under the extractor that is no weak classifier
    assert "no sign of copies" in text


def test_metrics_of_a_weak_classifier_are_those_of_the_first_extractor_that_is_none():
    """Those by the judge go if it is the judge that is weak."""
    rows: list[dict[str, Any]] = [{"extractor": name} for name in ("classifier:x", "pixels", "resnet50")]
    features: dict[str, Any] = {}
    for number, row in enumerate(rows):
        row |= {"recall": number, "recall_interval": [number] * 2, "diversity_by_class": {"a": number}}
    features = {key: value for key, value in rows[0].items() if key != "extractor"}
    judged = {"recognised": 0.5, "recognised_interval": [0.4, 0.6], "recognised_by_class": {"a": 0.5}}
    document = features | judged | {"distances": rows, "images": ["recognised_best.png", "real.png"], "n": 3}
    for is_weak, weak in ((0, []), (0, ["classifier:x"]), (0, ["resnet50"]), (1, ["classifier:x", "pixels"])):
        found = credible(document | {"judge": {"is_weak": is_weak}, "weak_extractors": weak})
        trusted = [row for row in rows if row["extractor"] not in weak]
        assert found["distances"] == trusted
        first = trusted[0] if "classifier:x" in weak else rows[0]
        assert {key: found[key] for key in features} == {key: first[key] for key in features}
        assert {key: found[key] for key in judged} == (dict.fromkeys(judged) if is_weak else judged)
        assert (found["images"], found["n"]) == (document["images"][is_weak:], 3)
    found = credible(document | {"weak_extractors": [row["extractor"] for row in rows]})
    assert (found["distances"], {found[key] for key in features}) == ([], {None})


def test_records_of_a_step_are_one_and_its_later_values_count(tmp_path):
    rows = [(10, "loss/r1", 1.0), (20, "loss/r1", 2.0), (30, "loss/r1", 3.0), (20, "val/x", 7.0), (20, "loss/r1", 5.0)]
    rows += [(20, "images", 640), (20, "val/n", 40)]  # no curves
    write(tmp_path / "metrics.jsonl", "\n".join(json.dumps({"step": step, key: value}) for step, key, value in rows))
    expected = {"loss/r1": [(10.0, 1.0), (20.0, 5.0), (30.0, 3.0)], "val/x": [(20.0, 7.0)]}
    assert Run(tmp_path).series == expected


def test_a_run_has_its_task_its_sample_grids_and_its_evaluations_images_in_order(tmp_path):
    for config, task in (("task: gan", "gan"), ("steps: 3\ntask: classifier\n", "classifier"), ("\t: [", "")):
        write(tmp_path / "config.yaml", config)
        assert Run(tmp_path).task == task
    for name in ("step-00000010.png", "step-00000002.png", "step-x.png", "other.png"):
        write(tmp_path / "samples" / name, "")
    for name in ("a.png", "b.png", "c.png"):
        write(tmp_path / "eval" / name, "")
    write(tmp_path / "eval" / "metrics.json", {"images": ["c.png", "a.png", "gone.png"]})
    run = Run(tmp_path)
    assert [path.name for path in run.samples] == ["step-00000002.png", "step-00000010.png"]
    assert [path.name for path in run.images] == ["c.png", "a.png"]
    for step in range(20, 32):
        save_grid(tmp_path / "samples" / f"step-{step:08d}.png")
        assert len(samples(Run(tmp_path))) <= MOST_SAMPLES
    assert [grid["caption"] for grid in samples(Run(tmp_path))][-2:] == ["step 29", "step 31"]


def test_notes_have_titles_instead_of_keys():
    notes = {"n": "x", "recognised": "it y", "weak_extractors": "z", "training_images": "a", "frechet": "b"}
    notes |= {"classifier:runs/my_run": "c", "intra_class_frechet": "d"}
    lines = ["Few test images (120): x", "Weak classifier: it y", "Weak classifier: z", "Training images: a"]
    lines += ["Frechet: b", "Classifier:runs/my_run: c", "Frechet within classes: d"]
    assert note_lines({"n": 120, "notes": notes, "judge": {"is_weak": True}}) == lines
    assert note_lines({"notes": {"recognised": "no"}, "judge": None}) == ["Recognised: no"]
    assert note_lines({"notes": []}) == []


def test_a_chart_title_names_only_the_curves_that_are_there(tmp_path):
    row = {"step": 1, "logits/real_sign": 0.5, "loss/auxiliary": 1.0, "loss/auxiliary_real": 2.0}
    write(tmp_path / "metrics.jsonl", json.dumps(row | {"accuracy/auxiliary": 0.25}))
    head = "D's class head: loss on samples (auxiliary) and on real images (auxiliary_real)"
    titles = ["mean sign of D(real)", head, "D's class head: accuracy"]
    assert [chart.title for chart in charts(Run(tmp_path))] == titles
    write(tmp_path / "metrics.jsonl", json.dumps({"step": 1, "logits/real_sign": 0.5, "ada/p": 0.25}))
    assert [chart.title for chart in charts(Run(tmp_path))] == ["augmentation: strength p and mean sign of D(real)"]


@pytest.mark.parametrize("groups", [None, 7])
def test_a_data_table_has_groups_if_there_are_any(tmp_path, groups):
    write(tmp_path / "gan" / "config.yaml", "task: gan\n")
    data = {"path": "a.lmdb", "count": 5} | ({"groups": groups} if groups else {})
    write(tmp_path / "gan" / "data.json", {"training": data})
    text = page(write_report(tmp_path / "gan")).text
    assert ("groups of images kept together" in text) == bool(groups)
    assert "Run gan (gan)" not in text  # the task is the name
    assert "Commands to repeat this run" in text
