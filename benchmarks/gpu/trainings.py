"""Parts that train as users do, by the commands' own main functions: a GAN's samples, and CIFAR-10 to 94 %."""

import json
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import duetgan.commands.pack
from benchmarks.gpu import cifar
from benchmarks.gpu.book import Book, Missed, NotThere, Setting, Value
from benchmarks.gpu.wheels import ROOT
from duetgan.commands import evaluate, generate, train
from duetgan.utils.distributed.process import run_cli

AIM = 0.94  # of the test images, six views of each
LADDER = (250, 500, 1000)  # steps of a training: the paper's ten epochs; twice and four times as many if they miss
TRIAL_STEPS = 100
SMALL = ("--precision", "fp32", "--log.tensorboard", "false")  # a graph cannot be traced on a pretend device
PICTURE = "samples.png"


def call(main: Callable[[list[str]], int | None], *arguments: object) -> float:
    """Call a command; the seconds it took. Raises Missed where its exit code is not 0."""
    begun, words = time.perf_counter(), [str(argument) for argument in arguments]
    code = run_cli(main, words)
    if code:
        raise Missed(f"{main.__module__} {' '.join(words[:4])} ... ended with {code}; the log says why")
    return time.perf_counter() - begun


def samples(setting: Setting, book: Book) -> None:
    """The quickstart's GAN on the embedded sample, as long as there is time: stopped, resumed, and a grid drawn."""
    data, run = setting.out / "data", setting.out / "runs" / "gan"
    shutil.rmtree(run, ignore_errors=True)
    for split in ("train", "test"):
        where = data / f"sample-{split}.lmdb"
        call(duetgan.commands.pack.main, "sample", where, "--split", split, "--size", 32, "--overwrite")
    config = ["--config", ROOT / "configs/quickstart_gan.yaml", "--run-dir", run, "--device", setting.device]
    config += ["--data.path", data / "sample-train.lmdb", "--data.val-path", data / "sample-test.lmdb"]
    config += ["--batch-size", 8, "--evaluation.n", 20, *SMALL] if setting.small else []
    first = 1 if setting.small else TRIAL_STEPS
    took = call(train.main, *config, "--max-steps", first)
    book.row("first steps", steps=first, seconds=took)
    steps = 2 if setting.small else max(first + 1, min(5000, int(first * 0.4 * setting.seconds / took)))
    took = call(train.main, *config, "--max-steps", steps)
    book.row("resumed", steps=steps - first, seconds=took, steps_per_second=(steps - first) / took)
    grid = ["--checkpoint", run, "--device", setting.device, "--out", setting.out / PICTURE]
    book.row("grid", seconds=call(generate.main, "grid", *grid))


def packed_cifar(setting: Setting) -> tuple[Path, str]:
    """The folder of both packed files, and what they are. Raises NotThere."""
    if setting.data is not None and all((setting.data / f"cifar10-{split}.lmdb").exists() for split in cifar.SPLITS):
        return setting.data, "as packed by the user"
    if (setting.bundle / "data" / "cifar10.json").is_file():
        target = setting.out / "data"
        quality = cifar.pack(setting.bundle / "data", target)
        return target, f"JPEG of quality {quality}, training and test images"
    raise NotThere("CIFAR-10: neither --data FOLDER nor the bundle has it")


def gan(setting: Setting, book: Book) -> None:
    """CIFAR-10's GAN for GPUs, all its schedules scaled to the steps for which there is time; then its distance."""
    data, about = packed_cifar(setting)
    run = setting.out / "runs" / "cifar10_gan_gpu"
    recipe = ["--config", ROOT / "configs/cifar10_gan_gpu.yaml", "--device", setting.device]
    recipe += [f"--data.path={data}/cifar10-train.lmdb", f"--data.val-path={data}/cifar10-test.lmdb"]
    recipe += ["--evaluation.every", 0, "--log.samples_every", 0]
    narrow = ("--generator.channel_base", 64, "--discriminator.channel_base", 64, "--batch-size", 8)
    recipe += [*narrow, *SMALL] if setting.small else []
    took = []
    for steps in (1, 2) if setting.small else (TRIAL_STEPS, 3 * TRIAL_STEPS):
        shutil.rmtree(run, ignore_errors=True)
        took.append(call(train.main, *recipe, "--run-dir", run, "--steps", steps))
    each = max(1e-3, (took[1] - took[0]) / (1 if setting.small else 2 * TRIAL_STEPS))
    steps = 2 if setting.small else max(500, int((0.8 * setting.seconds - sum(took) - took[0]) / each))
    shutil.rmtree(run, ignore_errors=True)
    book.row("trial", seconds_a_step=each, start_seconds=took[0])
    seconds = call(train.main, *recipe, "--run-dir", run, "--steps", min(steps, 9500))
    book.row("training", steps=min(steps, 9500), seconds=seconds, images=about)
    grid = ["--checkpoint", run, "--device", setting.device, "--out", setting.out / PICTURE]
    book.row("grid", seconds=call(generate.main, "grid", *grid))


def cifar10(setting: Setting, book: Book) -> None:
    """From scratch to 94 % of the test images; more steps where the first training misses it."""
    data, about = packed_cifar(setting)
    begun = time.perf_counter()
    for steps in (2,) if setting.small else LADDER:
        run = setting.out / "runs" / f"cifar10-{steps}"
        shutil.rmtree(run, ignore_errors=True)
        config = ["--config", ROOT / "configs/cifar10_airbench.yaml", "--run-dir", run, "--device", setting.device]
        config += [f"--data.path={data}/cifar10-train.lmdb", f"--data.val-path={data}/cifar10-test.lmdb"]
        config += ["--steps", steps, "--checkpoint.every", steps, "--evaluation.every", steps, "--compile", "off"]
        config += ["--batch-size", 20, *SMALL] if setting.small else []
        training = call(train.main, *config)
        judging = call(evaluate.main, "--checkpoint", run, "--device", setting.device, "--tta", "shift")
        accuracy = float(json.loads((run / "eval" / "metrics.json").read_text())["accuracy"])
        figures: dict[str, Value] = {"training_seconds": training, "evaluation_seconds": judging, "accuracy": accuracy}
        figures |= {"seconds_from_the_start": time.perf_counter() - begun, "images": about}
        book.row(f"{steps} steps", **figures)
        if accuracy >= AIM:
            return
    if not setting.small:
        raise Missed(f"no training came to {AIM:.2f}, images: {about}")
