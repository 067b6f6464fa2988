"""The quickstart's steps: what is run, what is not run again, and what a failing step leaves."""

import html
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from itertools import count
from pathlib import Path
from types import SimpleNamespace

import pytest

from duetgan.commands.planning import steps
from duetgan.commands.planning.plan import QUICK_STEPS, Plan, choose
from duetgan.commands.planning.steps import run_python, unfit
from duetgan.commands.quickstart import main
from duetgan.data.reading.dataset import Dataset
from duetgan.metrics.tables import credible
from duetgan.reporting.answers import answers
from duetgan.utils.distributed.process import run_cli
from duetgan.utils.errors import UserError
from tests.commands.machines import SAMPLE, WEIGHTS, Fast, seen
from tests.metrics.conftest import classifier_run
from tests.metrics.conftest import pack as pack_images
from tests.reporting.test_answers import CLASSIFIER, GAN
from tests.reporting.test_report import make_classifier, make_gan, write

ROOT = Path(__file__).resolve().parents[2]
TASKS = ("classifier", "gan")
STEPS = ["pack", "pack", "train", "train", "evaluate", "evaluate"]


def option(command: list[str], name: str) -> str:
    """What follows an option."""
    return command[command.index(name) + 1]


class Commands:
    """Stands for the commands: notes each call, leaves what the real one would, or fails at a given call."""

    def __init__(self, fail_at: int | None = None, code: int = 4) -> None:
        self.fail_at, self.code = fail_at, code
        self.calls: list[list[str]] = []
        self.survey, self.machine = SAMPLE.model_copy(update={"source": "sample"}), Fast()
        self.first: Plan | None = None

    def __call__(self, command: list[str]) -> int:
        name = command[0].removeprefix("quickstart-")
        if name != "plan":
            self.calls.append(command)
        if len(self.calls) == self.fail_at:
            return self.code
        if name == "plan":
            minutes = float(option(command, "--minutes"))
            made = choose(self.survey, self.machine, minutes=minutes, quick="--quick" in command, spent=2.5)
            seed = int(option(command, "--seed")) if "--seed" in command else 0
            request = command[1 : command.index("--minutes")]
            self.first = made.model_copy(update={"seed": seed, "request": request})
            write(Path(option(command, "--out")), self.first.model_dump())
            return 0
        if name == "pack":
            Path(command[2]).parent.mkdir(parents=True, exist_ok=True)
            Path(command[2]).touch()
            if "--val-dest" in command:
                Path(option(command, "--val-dest")).touch()
        elif name == "evaluate":
            folder = Path(option(command, "--checkpoint")).parent
            classifier = make_classifier(folder / "classifier") / "eval" / "metrics.json"
            write(classifier, CLASSIFIER | json.loads(classifier.read_text()))
            gan = make_gan(folder / "gan") / "eval" / "metrics.json"
            found = json.loads(gan.read_text())
            write(gan, GAN | {"samples_by_class": dict.fromkeys(found["recognised_by_class"], 300)} | found)
        return 0

    @property
    def names(self) -> list[str]:
        return [command[0] for command in self.calls]

    def lines(self, folder: Path) -> list[str]:
        """Return the commands as text; DIR stands for the folder of the results."""
        return [shlex.join(command).replace(str(folder), "DIR") for command in self.calls]

    def trainings(self) -> list[str]:
        """Return the commands of the plan's trainings, as `lines` does."""
        plan = self.first
        data = "--data.path DIR/data/train.lmdb --data.val-path DIR/data/test.lmdb"
        return [
            f"train --config {training.config} --run-dir DIR/{task} {data} {shlex.join(training.overrides)} "
            f"--seed {plan.seed}"
            for task, training in plan.trainings.items()
        ]


@pytest.fixture
def commands(tmp_path, monkeypatch):
    stub = Commands()
    monkeypatch.setattr(steps, "call", stub)
    monkeypatch.setattr(steps, "unfit", lambda run, test: "")  # the files are empty
    return stub


@pytest.mark.parametrize("quick", [False, True])
def test_classifier_that_may_not_judge_supplies_features_only(commands, tmp_path, monkeypatch, capsys, quick):
    monkeypatch.setattr(steps, "unfit", lambda run, test: f"was trained on {test.name} as {run.name}")
    assert main(["--dir", str(tmp_path), *["--quick"] * quick]) == 0
    assert "--classifier" not in commands.calls[-1]
    assert option(commands.calls[-1], "--extractor") == f"classifier:{tmp_path / 'classifier'}"
    assert "does not judge the GAN: it was trained on test.lmdb as classifier" in capsys.readouterr().out


def test_classifier_trained_on_the_test_images_may_not_judge(tmp_path):
    test = pack_images(tmp_path / "test.lmdb")
    with Dataset(test) as reader:
        seen = reader.meta.content_hash
    assert unfit(classifier_run(tmp_path / "other", content_hash="f00d"), test) == ""
    assert "was trained on the test images" in unfit(classifier_run(tmp_path / "same", content_hash=seen), test)


def test_all_steps_in_order_on_the_packed_sample_then_summary_and_report(commands, tmp_path, capsys, monkeypatch):
    clock = SimpleNamespace(monotonic=count(100.0, 30.0).__next__, strftime=time.strftime)
    monkeypatch.setattr(steps, "time", clock)
    assert main(["--dir", str(tmp_path), "--minutes", "13"]) == 0
    packs = [f"pack sample DIR/data/{part}.lmdb --size 32 --channels 1 --split {part}" for part in ("train", "test")]
    evaluations = [f"evaluate --checkpoint DIR/{task} --data DIR/data/test.lmdb" for task in TASKS]
    evaluations[1] += " --classifier DIR/classifier --n 2000 --searched 10000"
    assert commands.lines(tmp_path) == [*packs, *commands.trainings(), *evaluations]
    summary, plan = summary_of(tmp_path), commands.first.model_dump()
    expected = {"source": "sample", "minutes": 13.0, "notes": plan["notes"], "expected_seconds": plan["seconds"]}
    assert summary["plan"] == expected | {"classifier": plan["classifier"], "gan": plan["gan"]}
    assert summary["classifier"]["accuracy"] == 0.8975
    gan = {"recognised": 0.8725, "diversity_ratio": 0.4375, "distance": 1869.25, "floor": 60.875}
    assert summary["gan"] == {**gan, "extractor": "resnet50", "n": 2000}
    assert summary["seconds"] == 32.5  # of the survey and since
    documents = [json.loads((tmp_path / task / "eval/metrics.json").read_text()) for task in TASKS]
    command = f"duet quickstart sample --minutes 52 --dir {tmp_path}-next"
    advice = f"train longer, for better samples, perhaps of a higher resolution: {command}"
    end = [
        "",
        *answers(*map(credible, documents)),
        f"Next: {advice}",
        "total time: 32 s",
        f"summary: {tmp_path}/summary.json",
    ]
    end.append(f"report:  {tmp_path}/report.html  (open it in a browser)")
    shown, report = capsys.readouterr().out, html.unescape((tmp_path / "report.html").read_text())
    assert shown.splitlines()[-len(end) :] == end
    typed = [shlex.join(["duet", *command]) for command in commands.calls]
    assert [line for line in typed if f"\n$ {line}\n" not in shown] == []
    told = [*typed, *end[1:-3], "32 s", commands.survey.text(), *plan["notes"]]
    assert [line for line in told if line not in report] == []


def plan_of(folder: Path) -> dict:
    return json.loads((folder / "plan.json").read_text())


def summary_of(folder: Path) -> dict:
    return json.loads((folder / "summary.json").read_text())


def test_quick_trains_a_few_steps_only(commands, tmp_path):
    main(["--dir", str(tmp_path), "--quick"])
    assert commands.lines(tmp_path)[2:4] == commands.trainings()
    assert [option(arguments, "--steps") for arguments in commands.calls[2:4]] == [str(QUICK_STEPS)] * 2
    evaluations = [f"evaluate --checkpoint DIR/{task} --data DIR/data/test.lmdb --n 120" for task in TASKS]
    evaluations[1] += " --classifier DIR/classifier --searched 120 --per-class 12"
    assert commands.lines(tmp_path)[4:] == evaluations
    assert summary_of(tmp_path)["plan"].keys() == {"source", "minutes", "notes"}  # nothing was measured


def test_resume_keeps_the_plan_of_the_first_start_whatever_is_measured_now(commands, tmp_path, capsys):
    commands.fail_at = 3
    assert main(["--dir", str(tmp_path), "--minutes", "20"]) == 4
    first, commands.fail_at = plan_of(tmp_path), None
    commands.machine.gan = 1.0
    commands.calls.clear()
    assert main(["--dir", str(tmp_path)]) == 0
    assert plan_of(tmp_path) == first
    assert "of 20 minutes" in capsys.readouterr().out
    assert option(commands.calls[1], "--steps") == str(first["gan"]["steps"])


def test_the_folder_is_named_by_the_images(monkeypatch):
    names = {("sample", False): "quickstart", ("sample", True): "quickstart_quick"}
    names |= {("/tmp/my photos/", False): "quickstart_my_photos", ("cats.zip", True): "quickstart_cats_quick"}
    for place in ("runs", "scratch"):
        monkeypatch.setenv("DUET_RUNS", place)
        for (source, quick), name in names.items():
            assert steps.default_folder(source, quick) == Path(place, name)
    assert [steps.display_path(path) for path in (Path.cwd() / "a" / "b", Path("/x/y"))] == ["a/b", "/x/y"]


def test_plan_of_other_images_or_of_another_version_is_refused(commands, tmp_path, images):
    assert main(["--dir", str(tmp_path)]) == 0
    for argv, told in (
        ([str(images)], "its plan is for sample; give another folder"),
        (["--quick"], "its plan is for sample"),
        (["--seed", "1"], "its plan is for sample"),
        (["--weights", "other.pth"], "its plan is for sample"),
        *((["--minutes", minutes], "from 1 to 10,080") for minutes in ("0", "nan", "1e9")),
        ([], r"plan\.json: is no plan of this version .* give another folder"),
    ):
        if not argv:
            write(tmp_path / "plan.json", {"minutes": 15})
        with pytest.raises(UserError, match=told):
            main([*argv, "--dir", str(tmp_path)])


def test_plan_that_cannot_be_made_ends_with_its_exit_code(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(steps, "call", lambda command: 2)
    for options, more in (([], ", then measuring the speed of this machine"), (["--quick"], "")):
        assert main(["--dir", str(tmp_path), *options]) == 2
        assert capsys.readouterr().out.splitlines()[0] == f"reading some images of the source 'sample'{more}"


@pytest.fixture
def images(tmp_path):
    folder = tmp_path / "my photos"
    folder.mkdir()
    return folder


def test_own_folder_is_split_packed_at_two_sizes_and_the_classifier_tuned(commands, tmp_path, images):
    commands.survey = seen(300, 5, source=str(images), options=["--root=/x"])
    commands.machine.weights = WEIGHTS
    assert main([str(images), "--dir", str(tmp_path / "out"), "--seed", "3"]) == 0
    pack = f"pack '{images}' DIR/data/train.lmdb --root=/x --size 256 --channels 3 --pyramid 64 --on-error skip"
    pack += " --val-share 0.2 --val-dest DIR/data/test.lmdb --seed 3"
    assert commands.names == ["pack", "train", "train", "evaluate", "evaluate"]
    assert commands.lines(tmp_path / "out")[:3] == [pack, *commands.trainings()]
    classifier, gan = commands.calls[1:3]
    assert option(classifier, "--config") == "configs/finetune_resnet50_last.yaml"
    assert (option(classifier, "--data.resolution"), option(gan, "--data.resolution")) == ("256", "64")
    assert (ROOT / option(gan, "--init-from")).is_file()
    (tmp_path / "out" / "data" / "test.lmdb").unlink()
    assert main([str(images), "--dir", str(tmp_path / "out"), "--seed", "3"]) == 0
    assert commands.lines(tmp_path / "out")[5] == f"{pack} --overwrite"


def test_a_seed_is_that_of_the_plan(commands, tmp_path, images, capsys):
    commands.survey = seen(300, 5, source=str(images))
    asked = [str(images), "--dir", str(tmp_path / "out"), "--seed"]
    assert main([*asked, "7"]) == 0
    advice = re.search("^Next: .*", capsys.readouterr().out, re.MULTILINE)[0]
    assert " --seed 7 " in advice
    assert f" --dir {tmp_path / 'out'}-" in advice
    assert run_cli(main, [*asked, "0"]) == 2
    assert "--seed 7; give another folder" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("images", "weights", "words", "expected"),
    [
        (seen(300, 5), WEIGHTS, ["--quick"], "--minutes 60"),
        (seen(300, 5), None, ["--quick", "--seed=7"], "--seed 7 --weights resnet50-0676ba61.pth"),
        (seen(4999, 5, held_out=9), None, [], "--weights resnet50-0676ba61.pth"),
        (seen(5000, 5, held_out=9), None, [], "--minutes 60"),
        (seen(300, 0), None, ["--minutes=5000"], "--minutes 10080"),  # a week
    ],
)
def test_advice_is_more_time_or_weights(commands, tmp_path, capsys, images, weights, words, expected):
    commands.survey, commands.machine.weights = images, weights
    assert main(["sample", "--dir", str(tmp_path), *words]) == 0
    advice = re.search("^Next: .*", capsys.readouterr().out, re.MULTILINE)[0]
    assert advice.partition(": duet ")[2] == f"quickstart sample {expected} --dir {tmp_path}-next"


def test_weights_that_are_given_are_tuned_and_those_of_the_plan(commands, tmp_path, images):
    file = str(tmp_path / WEIGHTS.file)
    commands.survey, commands.machine.weights = seen(300, 5, source=str(images)), WEIGHTS._replace(file=file)
    asked = [str(images), "--dir", str(tmp_path), "--weights"]
    assert main([*asked, file]) == 0
    assert option(commands.calls[1], "--model.weights") == file
    assert f"--weights {file} " in (tmp_path / "report.html").read_text()
    with pytest.raises(UserError, match=f"its plan is for .* --weights {file}; give another folder"):
        main([*asked, "others.pth"])


@pytest.mark.parametrize(("weights", "quick"), [(None, False), ("w.pth", False), ("w.pth", True)])
def test_images_without_labels_train_the_gan_alone_and_the_report_says_so(
    commands, tmp_path, images, monkeypatch, weights, quick
):
    commands.survey = seen(500, 0, source=str(images))
    monkeypatch.setattr("duetgan.metrics.features.extractors.find_weights", lambda _: weights)
    assert main([str(images), "--dir", str(tmp_path / "out"), *["--quick"] * quick]) == 0
    assert commands.names == ["pack", "train", "evaluate"]
    options = "--n 50 --searched 450"
    if quick:
        options = "--n 120 --extractor pixels --searched 120 --per-class 12"
    elif weights is None:
        options = f"--extractor pixels {options}"
    assert commands.lines(tmp_path / "out")[-1] == f"evaluate --checkpoint DIR/gan --data DIR/data/test.lmdb {options}"
    assert summary_of(tmp_path / "out")["classifier"] is None
    report = (tmp_path / "out" / "report.html").read_text()
    assert "no classifier: the images have no labels" in report
    assert "What the classifier gets right" not in report


@pytest.mark.parametrize("failing", [1, 3, 6])
def test_failing_step_ends_with_its_exit_code_and_no_later_step_runs(commands, tmp_path, capsys, failing):
    commands.fail_at = failing
    assert main(["--dir", str(tmp_path)]) == 4
    assert commands.names == STEPS[:failing]
    assert "exit code 4" in capsys.readouterr().err
    assert not (tmp_path / "summary.json").exists()


def test_a_second_start_keeps_packs_and_finished_runs(commands, tmp_path, capsys):
    main(["--dir", str(tmp_path)])
    write(tmp_path / "classifier" / "status.json", {"state": "finished"})
    write(tmp_path / "gan" / "status.json", {"state": "stopped"})
    commands.calls.clear()
    assert main(["--dir", str(tmp_path)]) == 0
    assert commands.names == ["train", "evaluate", "evaluate"]
    assert "configs/gan_32_pairs.yaml" in commands.calls[0]
    done = re.findall("^(.*): already done$", capsys.readouterr().out, re.MULTILINE)
    assert done == ["pack train", "pack test", "train classifier"]
    (tmp_path / "data" / "test.lmdb").unlink()
    commands.calls.clear()
    assert main(["--dir", str(tmp_path)]) == 0
    assert commands.names[0] == "pack"
    assert "--overwrite" not in commands.calls[0]


@pytest.mark.parametrize(("code", "told"), [(130, "was stopped"), (3, "was stopped"), (139, "exit code 139")])
def test_a_step_that_is_stopped_is_no_error(commands, tmp_path, capsys, code, told):
    commands.fail_at, commands.code = 1, code
    assert main(["--dir", str(tmp_path)]) == code
    assert told in capsys.readouterr().err


@pytest.mark.parametrize(
    ("code", "expected"),
    [("sys.stdin.read() and sys.exit(1)", 0), ("sys.exit(3)", 3), ("os.kill(os.getpid(), 9)", 137)],
)
def test_call_returns_the_exit_code_of_a_command_that_has_no_input(code, expected):
    reader, writer = os.pipe()
    os.write(writer, b"of the terminal")
    os.close(writer)
    stdin = os.dup(0)
    os.dup2(reader, 0)
    try:
        assert run_python(["-c", f"import os, sys; {code}"]) == expected
    finally:
        os.dup2(stdin, 0)
        os.close(stdin)
        os.close(reader)


@pytest.mark.parametrize("to_group", [False, True], ids=["own PID", "Ctrl-C"])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_reaches_the_command_once_and_its_end_is_waited_for(tmp_path, number, to_group):
    child = tmp_path / "child.py"
    child.write_text(
        "import pathlib, signal, sys, time\n"
        f"signal.signal({number:d}, lambda *_: open(sys.argv[1] + '/told', 'a').write('x'))\n"
        "pathlib.Path(sys.argv[1], 'ready').touch()\n"
        "while not pathlib.Path(sys.argv[1], 'told').exists(): time.sleep(0.05)\n"
        "time.sleep(0.3), sys.exit(3)\n"
    )
    arguments = f"[{str(child)!r}, {str(tmp_path)!r}]"
    parent = f"import sys; from duetgan.commands.planning.steps import run_python; sys.exit(run_python({arguments}))"
    with subprocess.Popen([sys.executable, "-c", parent], cwd=ROOT, start_new_session=True) as process:
        deadline = time.monotonic() + 60
        while not (tmp_path / "ready").exists() and time.monotonic() < deadline:
            time.sleep(0.05)
        (os.killpg if to_group else os.kill)(process.pid, number)
        assert process.wait(timeout=60) == 3
    assert (tmp_path / "told").read_text() == "x"


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_quick_form_runs_for_real_and_again(tmp_path):
    command = [sys.executable, str(ROOT / "quickstart.py"), "--quick", "--dir", str(tmp_path)]
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    for _ in range(2):
        done = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr[-2000:]
        summary = summary_of(tmp_path)
        assert 0 <= summary["classifier"]["accuracy"] <= 1
        assert summary["gan"]["recognised"] is None  # U1: of twelve steps the classifier knows nothing
        assert "Weak classifier: it is right on " in (tmp_path / "report.html").read_text()
        assert (tmp_path / "report.html").stat().st_size > 50_000
    assert done.stdout.count("already done") == 4  # the packs and the trainings


def test_the_summary_has_the_intervals_that_the_evaluation_gives(commands, tmp_path):
    """Of a generator's metrics as of the accuracy; an evaluation of before has none, and its summary neither."""
    assert main(["--dir", str(tmp_path)]) == 0
    documents = {}
    for task in ("classifier", "gan"):
        documents[task] = json.loads((tmp_path / task / "eval" / "metrics.json").read_text())
    documents["gan"]["distances"][0]["frechet_interval"] = [1.0, 2.0]
    more = {"recognised_interval": [0.8, 0.9], "clipped_density": 0.5, "clipped_density_interval": [0.4, 0.6]}
    documents["gan"] |= more
    documents["classifier"]["probe"] = {"accuracy": 0.75, "interval": [0.7, 0.8], "images": 90}
    summary = steps.summarise(Plan.read(plan_of(tmp_path)), documents, 1.0)
    assert {key: summary["gan"][key] for key in more} == more
    assert summary["gan"]["distance_interval"] == [1.0, 2.0]
    assert "clipped_coverage" not in summary["gan"]
    assert summary["classifier"]["floor"] == {"accuracy": 0.75, "interval": [0.7, 0.8], "images": 90}
