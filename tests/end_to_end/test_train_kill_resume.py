"""Both tasks through the command line: train, stop, resume, evaluate, predict, generate. (Kills: test_random_kills.)"""

import json

import cv2
import pytest
from PIL import Image

from duetgan.commands import evaluate, generate, predict
from duetgan.data.reading.dataset import Dataset
from duetgan.utils.distributed.process import run_cli
from tests.end_to_end.helpers import events_of, graph_scopes, log_of, status, train_in_process, write_config

pytestmark = pytest.mark.usefixtures("slim")


@pytest.mark.slow
def test_classifier_evaluate_and_predict(tmp_path, packed, capsys):
    config, run = write_config(tmp_path / "recipe.yaml", "classifier", packed, tensorboard=True), tmp_path / "run"
    assert train_in_process(config, run, "--steps", "60", "--evaluation.every", "20") == 0
    best = json.loads((run / "checkpoints" / "best.json").read_text())
    assert (run / "checkpoints" / best["file"]).exists()
    assert best["metric"] == "accuracy"
    assert list((run / "tensorboard").rglob("events.out.tfevents.*"))
    capsys.readouterr()
    assert run_cli(evaluate.main, ["--checkpoint", str(run), "--json"]) == 0
    figures = json.loads(capsys.readouterr().out)
    assert figures == json.loads((run / "eval" / "metrics.json").read_text())
    assert "evaluation/confusion" in events_of(run).Tags()["images"]
    # 60 steps on 200 images learn far more than the 0.1 of guessing
    assert figures["accuracy"] > 0.3
    assert sum(map(sum, figures["confusion"])) == 100

    with Dataset(packed / "test.lmdb") as reader:
        pixels, label = reader.image(0)
    cv2.imwrite(str(tmp_path / "a.png"), pixels)
    (tmp_path / "b.jpg").write_text("not an image")
    code = run_cli(predict.main, ["--checkpoint", str(run), str(tmp_path / "a.png"), str(tmp_path / "b.jpg"), "--json"])
    first, second = json.loads(capsys.readouterr().out)
    assert code == 2
    assert first["label"] in figures["per_class"] or first["label"] in first["probabilities"]
    assert sum(first["probabilities"].values()) == pytest.approx(1, abs=1e-4)
    assert set(second) == {"file", "error"}
    assert 0 <= label < 10


@pytest.mark.slow
def test_gan_evaluate_and_generate(tmp_path, packed, capsys):
    config, run = write_config(tmp_path / "recipe.yaml", "gan", packed, tensorboard=True), tmp_path / "run"
    judge_config, judge = write_config(tmp_path / "judge.yaml", "classifier", packed), tmp_path / "judge"
    assert train_in_process(config, run) == 0
    assert train_in_process(judge_config, judge) == 0
    assert sorted(p.name for p in (run / "samples").iterdir()) == [f"step-{s:08d}.png" for s in (0, 4, 8)]
    assert {"generator", "discriminator"} <= graph_scopes(run)
    assert [path for path in (run / "tensorboard").iterdir() if path.is_dir()] == []  # TensorBoard shows the run once
    capsys.readouterr()
    arguments = ["--checkpoint", str(run), "--classifier", str(judge), "--extractor", "classifier,pixels", "--n", "60"]
    assert run_cli(evaluate.main, [*arguments, "--per-class", "10", "--json"]) == 0
    figures = json.loads(capsys.readouterr().out)
    assert [d["extractor"] for d in figures["distances"]] == [f"classifier:{judge}", "pixels"]
    assert all(d["frechet"] > d["floor"] > 0 for d in figures["distances"])
    assert 0 <= figures["recognised"] <= 1
    assert figures["diversity_ratio"] == pytest.approx(min(figures["diversity_by_class"].values()))

    for name in ("one", "two"):
        out = ["--out", str(tmp_path / f"{name}.png"), "--seed", "5", "--n", "20"]
        assert run_cli(generate.main, ["grid", "--checkpoint", str(run), *out]) == 0
    assert (tmp_path / "one.png").read_bytes() == (tmp_path / "two.png").read_bytes()
    with Image.open(tmp_path / "one.png") as image:
        assert image.size[0] >= 16
        assert image.getextrema() != (0, 0)


def test_training_that_breaks_stops_itself(tmp_path, packed, capsys):
    """Non-finite gradients are masked, counted and, past the cap, end the run with exit code 4."""
    config, run = write_config(tmp_path / "recipe.yaml", "classifier", packed), tmp_path / "run"
    broken = ["--steps", "40", "--optimizer.lr", "1e18", "--nonfinite-cap", "5", "--checkpoint.every", "10"]
    assert train_in_process(config, run, *broken, "--evaluation.every", "4") == 4
    assert "evaluation at step 4 failed" in capsys.readouterr().err
    assert train_in_process(config, run, *broken, "--evaluation.every", "0") == 4
    assert "non-finite gradients" in capsys.readouterr().err
    assert status(run, "state", "exit_code") == ("failed", 4)
    row = log_of(run)[-1]
    assert row["nonfinite_updates"] > 5
    assert row["loss/classifier"] is None


def test_a_run_that_broke_goes_on_from_its_last_sound_checkpoint(tmp_path, packed, capsys):
    """G2: rotation deleted it while every update was skipped, and the advice led to a dead run."""
    config, run = write_config(tmp_path / "recipe.yaml", "classifier", packed), tmp_path / "run"
    plain = ["--checkpoint.every", "3", "--checkpoint.keep", "1", "--evaluation.every", "0", "--precision", "fp32"]
    assert train_in_process(config, run, *plain, "--steps", "12") == 0
    broken = [*plain, "--steps", "40", "--optimizer.lr", "1e6", "--nonfinite-cap", "8"]
    assert train_in_process(config, run, *broken) == 4
    told = capsys.readouterr().err
    advice = "lower the learning rate (optimizer.lr); the same command then goes on from step 12, the last checkpoint"
    assert "more than nonfinite_cap 8; " + advice in told
    files = sorted(path.name for path in (run / "checkpoints").glob("*.pt"))
    assert files == ["step-00000012.pt", "step-00000021.pt"]
    assert json.loads((run / "checkpoints" / "last.json").read_text())["step"] == 12
    assert train_in_process(config, run, *plain, "--steps", "15") == 0
    assert "going back to the checkpoint of step 12: training broke after it and stopped at" in capsys.readouterr().err
    assert [path.name for path in (run / "checkpoints").glob("*.pt")] == ["step-00000015.pt"]
    row = [row for row in log_of(run) if "images" in row][-1]
    assert (row["step"], row["nonfinite_updates"]) == (15, 0)
    assert row["loss/classifier"] < 10
