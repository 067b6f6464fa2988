"""evaluate.py and predict.py through their command lines, on untrained runs."""

import csv
import json
import os
import shutil
import threading
import zipfile
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import duetgan.inference.predictions
from duetgan.commands import evaluate, predict
from duetgan.data.reading.dataset import Dataset
from duetgan.inference.inputs import Input, file_input
from duetgan.inference.predictions import predict as predict_inputs
from duetgan.inference.predictions import sorter
from duetgan.metrics.evaluate_gan import judge_images
from duetgan.metrics.features.extractors import fingerprint
from duetgan.models.restore import classifier_from
from duetgan.utils.checkpoint import load, resolve
from duetgan.utils.distributed.process import run_cli
from duetgan.utils.runlog.progress import Bar
from tests.metrics.conftest import CLASSES, SIDE, classifier_run, gan_run, pack, read_json


def call(script, *argv):
    return run_cli(script.main, [str(part) for part in argv])


def evaluated(checkpoint, out, *more):
    """The document that evaluate.py writes."""
    assert call(evaluate, "--checkpoint", checkpoint, "--out", out, *more) == 0
    return read_json(out / "metrics.json")


def answers(capsys, run, *argv):
    """What predict.py says of images."""
    capsys.readouterr()
    assert call(predict, "--checkpoint", run, *argv, "--json") == 0
    return json.loads(capsys.readouterr().out)


def pixels(path):
    with Image.open(path) as image:
        return np.asarray(image)


class TestEvaluate:
    def test_n8_a_precision_and_folding_are_told_and_the_default_is_float32(self, runs, tmp_path, refused):
        options = {"plain": [], "fold": ["--fold"], "bf16": ["--fold", "--precision", "bf16"], "views": ["--tta=flip"]}
        found = {name: evaluated(runs["classifier"], tmp_path / name, *more) for name, more in options.items()}
        assert {name: (row["precision"], row["fold"], row["tta"]) for name, row in found.items()} == {
            "plain": ("fp32", False, "off"),
            "fold": ("fp32", True, "off"),
            "bf16": ("bf16", True, "off"),
            "views": ("fp32", False, "flip"),
        }
        assert found["views"]["ece"] != found["plain"]["ece"]
        assert found["plain"]["confusion"] == found["fold"]["confusion"]
        assert abs(found["bf16"]["ece"] - found["plain"]["ece"]) < 0.02
        told = refused(evaluate.main, "--checkpoint", runs["gan"], "--fold", "--out", tmp_path / "gan")
        assert "--fold is for a classifier" in told

    def test_a_gan_with_its_judge_as_json_and_as_a_table(self, runs, files, tmp_path, capsys):
        """The same seed gives the same document and images. U12: weak evidence looks weak."""
        options = ["--checkpoint", runs["gan"], "--classifier", runs["classifier"], "--n", 40, "--per-class", 5]
        options += ["--extractor", "pixels,classifier", "--extractor", f"classifier:{resolve(runs['classifier'])}"]
        assert call(evaluate, *options, "--seed", 3, "--out", tmp_path / "a", "--json") == 0
        found = json.loads(capsys.readouterr().out)
        assert call(evaluate, *options, "--seed", 3, "--out", tmp_path / "b") == 0
        printed = capsys.readouterr().out
        for name in ("metrics.json", *found["images"]):
            assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes(), name
        assert found == read_json(tmp_path / "a" / "metrics.json")
        names = [row["extractor"] for row in found["distances"]]
        assert names == ["pixels", f"classifier:{runs['classifier']}", f"classifier:{resolve(runs['classifier'])}"]
        assert found["distances"][1]["frechet"] == found["distances"][2]["frechet"]
        command = (tmp_path / "a" / "command.txt").read_text()
        assert command.startswith("python evaluate.py --checkpoint ")
        assert "--seed 3" in command
        assert "Few test images (40): " in printed
        assert found["judge"]["is_weak"]  # it is untrained
        assert found["weak_extractors"] == names[1:]
        assert found["notes"]["n"].startswith("distances of fewer than")  # nothing of the recognised fraction
        assert f"Weak classifier: {found['notes']['recognised']}" in printed
        assert "classifier" not in printed.partition("extractor")[2].partition("Weak classifier")[0]

    def test_test_images_that_were_trained_on_are_told(self, runs, files, tmp_path, capsys, monkeypatch):
        """U12. A bar is shown for each pass over images."""
        shown: list[Any] = []

        def noted(**named: Any) -> Bar:
            shown.append((named["desc"], named["disable"]))
            return Bar(**named | {"disable": True})

        monkeypatch.setattr("duetgan.metrics.features.extractors.Bar", noted)
        found = evaluated(runs["classifier"], tmp_path, "--data", files["path"])
        assert "90 of 90 test images are training images" in found["notes"]["leaks"]
        assert "too good" in capsys.readouterr().out
        options = ["--data", files["path"], "--extractor", "pixels", "--n", "20", "--searched", "0"]
        notes = evaluated(runs["gan"], tmp_path / "gan", *options)["notes"]
        assert "90 of 90 test images are training images" in notes["leaks"]
        assert shown == [(words, False) for words in ("images", "real test images", "samples")]
        low, high = found["accuracy_interval"]
        assert low <= found["accuracy"] <= high

    def test_checkpoint_file_and_missing_training_images(self, files, tmp_path):
        run = gan_run(tmp_path / "run", data={"path": "absent.lmdb", "val_path": None})
        data = ["--data", files["val_path"], "--extractor", "pixels", "--n", "20"]
        assert call(evaluate, "--checkpoint", resolve(run), *data) == 0
        found = read_json(run / "eval" / "metrics.json")
        assert found["distances"][0]["floor"] is found["memorisation"] is None
        for name in ("floor", "memorisation"):
            assert "absent.lmdb" in found["notes"][name]
        assert "neighbours.png" not in found["images"]

    def test_unconditional_generator(self, runs, files, tmp_path):
        run, judge = gan_run(tmp_path / "run", classes=[], data=files), ["--classifier", runs["classifier"]]
        found = evaluated(run, run / "eval", "--extractor", "pixels", "--n", "20", *judge)
        assert (found["recognised"], found["judge"]["n"]) == (None, 20)
        for name in ("samples.png", "real.png"):  # of all classes, and filled up to all 60 images
            assert pixels(run / "eval" / name).shape == (6 * 64, 10 * 64)

    def test_default_extractors_are_what_is_there(self, runs, tmp_path, refused, no_weights):
        options = ["--n", "20", "--out", tmp_path]
        assert "--extractor pixels" in refused(evaluate.main, "--checkpoint", runs["gan"], *options)
        found = evaluated(runs["gan"], tmp_path, "--n", "20", "--classifier", runs["classifier"])
        assert [row["extractor"] for row in found["distances"]] == [f"classifier:{runs['classifier']}"]

    def test_a_classifier_that_supplied_a_loss_cannot_judge(self, runs, files, tmp_path, refused):
        names = runs["classifier"], resolve(runs["classifier"])
        for helper, judge in (names, names[::-1]):
            run = gan_run(tmp_path / helper.name, data=files, loss={"classifier": str(helper)})
            options = ["--checkpoint", run, "--classifier", judge, "--extractor", "pixels"]
            assert "supplied a loss" in refused(evaluate.main, *options)

    def test_a_teacher_is_known_by_its_weights(self, runs, files, tmp_path, refused):
        """Wherever its file lies, and under whatever name."""
        teacher = fingerprint(classifier_from(load(resolve(runs["classifier"]))))
        copy, other = classifier_run(tmp_path / "elsewhere"), classifier_run(tmp_path / "other", seed=1)
        run = gan_run(tmp_path / "gan", data=files, teachers=["sha256:0123456789ab", teacher])
        options = ["--extractor", "pixels", "--n", "20"]
        told = refused(evaluate.main, "--checkpoint", run, *options, "--classifier", copy)
        assert "supplied a loss" in told
        notes = evaluated(run, tmp_path / "out", *options, "--classifier", other)["notes"]
        assert notes.keys() == {"n", "intra_class_frechet", "recognised"}  # of a judge that names one class always
        features = ["--extractor", f"classifier:{copy},classifier:{other}"]  # its features are taken, with a word
        notes = evaluated(run, tmp_path / "out", *options, *features)["notes"]
        assert "flattered" in notes[f"classifier:{copy}"]
        assert f"classifier:{other}" not in notes

    def test_the_report_tells_how_it_was_trained_and_evaluated(self, files, tmp_path):
        run = gan_run(tmp_path / "run", data=files)
        (run / "config.yaml").write_text("task: gan\n")
        assert call(evaluate, "--checkpoint", run, "--extractor", "pixels", "--n", 20, "--searched", 0) == 0
        report = (run / "report.html").read_text()
        assert f"python train.py --config {run}/config.yaml --run-dir {run}-again" in report
        assert f"python evaluate.py --checkpoint {run} --extractor pixels --n 20 --searched 0" in report
        assert "step 7" in report
        assert read_json(run / "eval" / "metrics.json")["memorisation"] is None
        (run / "report.html").unlink()
        evaluated(run, tmp_path / "out", "--extractor", "pixels", "--n", "20", "--searched", "0")
        assert not (run / "report.html").exists()  # it is of the run's own evaluation

    def test_refusals(self, runs, files, tmp_path, refused):
        gan, classifier = ["--checkpoint", runs["gan"]], ["--checkpoint", runs["classifier"]]
        other = classifier_run(tmp_path / "other", classes=["dark", "light", "grey"])
        two, pink = (pack(tmp_path / f"{b}.lmdb", classes=["dark", b]) for b in ("light", "pink"))
        pixel = ["--extractor", "pixels"]
        for argv, told in (
            ([*gan, "--classifier", other, *pixel], "class 1 is 'grey' here and 'light' there"),
            ([*gan, "--classifier", runs["gan"], *pixel], "'gan'"),
            ([*gan, "--data", two, *pixel], "its classes are not those of the images: grey only here"),
            ([*gan, "--data", tmp_path / "absent.lmdb", *pixel], "absent.lmdb"),
            ([*gan, "--extractor", "pixel"], "did you mean 'pixels'"),
            ([*gan, "--extractor", "classifier"], "--classifier RUN"),
            ([*gan, "--n", "0"], "at least 1"),
            ([*classifier, "--classifier", runs["classifier"]], "--classifier is for a GAN"),
            ([*classifier, "--per-class", "3"], "--per-class is for a GAN"),
            ([*classifier, "--searched", "0"], "--searched is for a GAN"),
            ([*gan, *pixel, "--searched", "-1"], "--searched"),
            ([*classifier, "--data", pink], "grey, light only here"),
            ([*gan, *pixel, "--fold"], "--fold is for a classifier"),
            (["--checkpoint", other], "--data X.lmdb"),
        ):
            assert told in refused(evaluate.main, *argv)


class TestPredict:
    @pytest.fixture
    def sample_images(self, tmp_path, test_reader):
        """Two test images as files, one of them in colour and larger."""
        paths = [tmp_path / "first.png", tmp_path / "second.png"]
        for path, index in zip(paths, (0, 59), strict=True):
            Image.fromarray(test_reader.image(index)[0][:, :, 0]).save(path)
        with Image.open(paths[1]) as image:
            image.convert("RGB").resize((SIDE * 2, SIDE * 2), Image.Resampling.NEAREST).save(paths[1])
        return paths

    def test_n8_precision_folding_and_views_reach_the_probabilities_but_not_grad_cam(
        self, runs, sample_images, tmp_path, capsys
    ):
        found, maps = {}, {}
        ways = {"plain": [], "fold": ["--fold"], "bf16": ["--precision", "bf16"], "views": ["--tta", "shift"]}
        for name, more in ways.items():
            rows = answers(capsys, runs["classifier"], *sample_images, "--gradcam", tmp_path / name, *more)
            found[name] = [row["probabilities"][label] for row in rows for label in CLASSES]
            maps[name] = pixels(tmp_path / name / "first-gradcam.png")
        assert found["fold"] == pytest.approx(found["plain"], abs=1e-5)
        assert found["bf16"] == pytest.approx(found["plain"], abs=0.02)
        assert found["plain"] not in (found["bf16"], found["views"])
        assert maps["fold"].shape == maps["plain"].shape

    def test_unreadable_images_stand_in_their_place_and_exit_is_2(self, runs, sample_images, tmp_path, capsys):
        (tmp_path / "text.jpg").write_text("not an image")
        files = [tmp_path / "absent.png", sample_images[0], tmp_path / "text.jpg", tmp_path / "absent"]
        assert call(predict, "--checkpoint", runs["classifier"], *files, "--json", "--batch-size", 2) == 2
        printed = capsys.readouterr()
        found = json.loads(printed.out)
        assert [row["file"] for row in found] == [str(file) for file in files]
        assert ["error" in row for row in found] == [True, False, True, True]
        assert list(found[0]) == ["file", "error"]
        assert "No such file" in found[0]["error"]
        assert "not an image" in found[2]["error"]
        assert "3 of 4 images" in printed.err

    @pytest.fixture
    def photos(self, tmp_path, sample_images):
        """A folder with images at the top, deeper, in a folder called train, and what is none."""
        folder = tmp_path / "photos"
        for name in ("b.png", "a/c.png", "train/d.png", "deep/er/e.PNG"):
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(sample_images[0].read_bytes())
        (folder / "notes.md").write_text("no image")
        (folder / "broken.jpg").write_text("not an image")
        return folder

    def rows(self, path):
        with open(path, newline="", encoding="utf-8") as file:
            return list(csv.DictReader(file))

    def test_folders_archives_patterns_lists_and_packed_files_are_read(
        self, runs, photos, sample_images, files, tmp_path, capsys
    ):
        names = ["a/c.png", "b.png", "broken.jpg", "deep/er/e.PNG", "train/d.png"]
        with zipfile.ZipFile(tmp_path / "photos.zip", "w") as archive:
            for name in names:
                archive.write(photos / name, name)
        (tmp_path / "list.txt").write_text("photos/b.png\n\nsecond.png\n")
        second = sample_images[1]
        options = ["--checkpoint", runs["classifier"], "--batch-size", 2, "--csv", tmp_path / "out.csv"]
        for given, expected in (
            ([photos], [photos / name for name in names]),
            ([tmp_path / "photos.zip"], [f"{tmp_path / 'photos.zip'}:{name}" for name in names]),
            ([photos / "**" / "[ce].*", second], [photos / "a/c.png", photos / "deep/er/e.PNG", second]),
            ([tmp_path / "list.txt"], [photos / "b.png", second]),
        ):
            assert call(predict, *options, *given) == (2 if "broken" in str(expected) else 0)
            rows = self.rows(tmp_path / "out.csv")
            assert [row["file"] for row in rows] == [str(file) for file in expected]
            assert [row["file"] for row in rows if not row["label"]] == [str(f) for f in expected if "broken" in str(f)]
        assert call(predict, *options, files["val_path"]) == 0
        rows, reader = self.rows(tmp_path / "out.csv"), Dataset(files["val_path"])
        assert [row["file"] for row in rows[:2]] == [f"{files['val_path']}: record {index}" for index in (0, 1)]
        assert len(rows) == len(reader)
        model = classifier_from(load(resolve(runs["classifier"])))
        shares = judge_images(model, torch.from_numpy(reader.read(np.arange(len(reader)))[0]))
        found = torch.tensor([[float(row[name]) for name in CLASSES] for row in rows], dtype=torch.float64)
        torch.testing.assert_close(found, shares, rtol=1e-5, atol=1e-6)
        assert [row["label"] for row in rows] == [CLASSES[k] for k in shares.argmax(1).tolist()]

    def test_tables_of_answers_and_of_errors(self, runs, photos, tmp_path, capsys):
        options = ["--checkpoint", runs["classifier"], photos, "--csv", tmp_path / "out.csv"]
        assert call(predict, *options, "--errors", tmp_path / "bad.csv", "--top", 2) == 2
        printed = capsys.readouterr()
        assert printed.out == ""
        end = f"error: 1 of 5 images could not be read, the first: {photos / 'broken.jpg'}"
        told = [f"wrote {tmp_path / 'out.csv'}", f"wrote {tmp_path / 'bad.csv'}", end]
        assert printed.err.splitlines()[-3:] == told
        rows = self.rows(tmp_path / "out.csv")
        assert list(rows[2].values()) == [str(photos / "broken.jpg"), "", "", "", ""]
        (bad,) = self.rows(tmp_path / "bad.csv")
        assert bad["file"] == str(photos / "broken.jpg")
        assert "not an image" in bad["error"]

    def test_names_that_are_no_text_are_written_and_read(self, runs, photos, tmp_path):
        odd = os.fsencode(tmp_path) + b"/caf\xe9.png"
        shutil.copy(photos / "b.png", odd)
        (tmp_path / "list.txt").write_bytes(odd + b"\n")
        assert (
            call(predict, "--checkpoint", runs["classifier"], tmp_path / "list.txt", "--csv", tmp_path / "x.csv") == 0
        )
        assert "caf\\udce9.png" in (tmp_path / "x.csv").read_text()

    def test_images_are_sorted_by_class(self, runs, photos, files, tmp_path):
        shutil.copy(photos / "b.png", photos / "deep" / "b.png")  # another file of the same name and class
        with zipfile.ZipFile(tmp_path / "photos.zip", "w") as archive:
            archive.write(photos / "b.png", "x/b.png")
        options = ["--checkpoint", runs["classifier"], "--sort-into", tmp_path / "sorted"]
        assert call(predict, *options, photos, tmp_path / "photos.zip", photos / "b.png", files["val_path"]) == 2
        placed = sorted(path for path in (tmp_path / "sorted").rglob("*") if not path.is_dir())
        assert {path.parent.name for path in placed} <= set(CLASSES)
        links = [path for path in placed if path.is_symlink()]
        assert sorted(path.name for path in links) == ["b-2.png", "b.png", "c.png", "d.png", "e.PNG"]
        assert all(path.resolve().is_file() for path in links)
        stored = Dataset(files["val_path"])
        expected = [pixels(photos / "b.png"), *stored.read(np.arange(len(stored)))[0][:, 0]]
        copies = [pixels(path) for path in placed if not path.is_symlink()]
        assert sorted(image.tobytes() for image in copies) == sorted(image.tobytes() for image in expected)
        assert call(predict, *options, photos) == 2  # again: the same links
        assert len([path for path in (tmp_path / "sorted").rglob("*") if path.is_symlink()]) == 5

    @pytest.mark.parametrize("label", ["..", ".", "../../x", "a/b", "\0"])
    def test_no_class_leads_out_of_the_folder_of_sorted_images(self, label, photos, tmp_path):
        sorter(tmp_path / "in" / "sorted")(file_input(photos / "b.png"), {"label": label})
        (placed,) = (tmp_path / "in").rglob("b.png")
        assert placed.parent.parent == tmp_path / "in" / "sorted"

    def test_inputs_that_cannot_be_are_refused_before_anything_is_read(self, runs, photos, tmp_path, refused):
        options = ["--checkpoint", runs["classifier"], "--csv", tmp_path / "out.csv", photos]
        (tmp_path / "empty").mkdir()
        assert "empty" in refused(predict.main, *options, tmp_path / "empty")
        assert "no file matches" in refused(predict.main, *options, f"{photos}/*.bmp")
        more = ["--counterfactual", tmp_path / "x", "--generator", runs["gan"]]
        with zipfile.ZipFile(tmp_path / "photos.zip", "w") as archive:
            archive.write(photos / "b.png", "b.png")
        assert "is for image files and folders" in refused(predict.main, *options, photos / "../photos.zip", *more)
        assert not (tmp_path / "out.csv").exists()

    def test_batches_that_threads_read_are_the_files_one_by_one(self, runs, sample_images, tmp_path, monkeypatch):
        """Also their order and errors, and no more than a batch is read ahead of the network."""
        (tmp_path / "text.jpg").write_text("not an image")
        files = [str(path) for path in [*sample_images, tmp_path / "text.jpg", tmp_path / "none.png"] * 4]
        checkpoint = load(resolve(runs["classifier"]))
        how: Any = {"resize": None, "top": len(CLASSES), "maps": None, "fast": None}
        model = classifier_from(checkpoint)
        inputs = [file_input(file) for file in files]
        alone = [row for given in inputs for _, row in predict_inputs(model, checkpoint, [given], **how, batch_size=1)]
        read, seen = [], []
        plain_judge = duetgan.inference.predictions.judge_images

        def counted(given):
            read.append(given.name)
            return given.content()

        def judged(*arguments):
            seen.append(len(read))
            return plain_judge(*arguments)

        monkeypatch.setattr(duetgan.inference.predictions, "cores", lambda: 3)
        monkeypatch.setattr(duetgan.inference.predictions, "judge_images", judged)
        counting = [given._replace(content=partial(counted, given)) for given in inputs]
        together = [row for _, row in predict_inputs(model, checkpoint, counting, **how, batch_size=5)]
        assert sorted(read) == sorted(files)
        assert len(seen) == 3  # nothing of the last batch can be read
        assert all(count <= 5 * (batch + 2) for batch, count in enumerate(seen))
        assert [row["file"] for row in together] == files
        for row, expected in zip(together, alone, strict=True):
            assert row.get("error") == expected.get("error")
            assert row.get("label") == expected.get("label")
            assert row.get("probabilities", {}) == pytest.approx(expected.get("probabilities", {}), abs=1e-6)

    def test_a_fault_while_reading_ends_the_threads(self, runs, monkeypatch):
        """Nothing goes on decoding behind the back of who has stopped."""

        def broken():
            raise MemoryError

        checkpoint = load(resolve(runs["classifier"]))
        inputs = [Input("a", broken)] * 9
        how: dict[str, Any] = {"resize": None, "top": 1, "maps": None, "fast": None}
        with pytest.raises(MemoryError):
            next(predict_inputs(classifier_from(checkpoint), checkpoint, inputs, **how, batch_size=4))
        assert not [thread for thread in threading.enumerate() if thread.name.startswith("decode")]

    def test_images_are_brought_to_size_as_the_training_data_was(self, files, tmp_path, capsys):
        """A wide image: cropped to its middle, or shrunk whole onto black, as the packed file says."""
        wide = np.zeros((SIDE, SIDE * 2), np.uint8)
        wide[:, SIDE // 2 : SIDE + SIDE // 2] = 255
        Image.fromarray(wide).save(tmp_path / "wide.png")
        crop = classifier_run(tmp_path / "crop", resize_filter="centre-crop+lanczos")
        pad = classifier_run(tmp_path / "pad", resize_filter="zero-pad")
        cropped, padded, asked = (
            answers(capsys, run, tmp_path / "wide.png", *more)[0]["probabilities"]
            for run, more in ((crop, []), (pad, []), (crop, ["--resize", "pad"]))
        )
        assert cropped != padded == asked

    def test_refusals(self, runs, refused):
        assert "'classifier' checkpoint is needed" in refused(predict.main, "--checkpoint", runs["gan"], "x.png")
        assert "required: IMAGES" in refused(predict.main, "--checkpoint", runs["classifier"])


def test_a_file_with_a_damaged_record_is_told(runs, tmp_path, refused):
    path = pack(tmp_path / "damaged.lmdb")
    with Dataset(path) as reader:
        needle = reader.image(30)[0].tobytes()
    content = bytearray(path.read_bytes())
    content[content.index(needle)] ^= 255
    path.write_bytes(content)
    assert "record 30" in refused(evaluate.main, "--checkpoint", runs["classifier"], "--data", path)
