"""What a start imports: each of these packages would cost every command its time."""

import subprocess
import sys

from tests.conftest import REPOSITORY


def imported(code: str) -> set[str]:
    """The packages that `code` imports."""
    told = f"{code}\nimport sys\nprint(*{{name.partition('.')[0] for name in sys.modules}})"
    done = subprocess.run([sys.executable, "-c", told], cwd=REPOSITORY, capture_output=True, text=True, check=True)
    return set(done.stdout.split())


def test_help_and_training_import_only_what_they_use():
    assert not {"torch", "numpy", "cv2"} & imported("from duetgan.commands import train\ntrain.parser()")
    heavy = {"torchvision", "scipy", "matplotlib", "tensorboard", "torchmetrics", "pandas", "pyarrow"}
    heavy.add("sympy")  # which torch.compile brings along
    assert not heavy & imported("import duetgan.training.engine.run")


def test_gpus_are_chosen_before_torch_is_imported(tmp_path, monkeypatch):
    """Once CUDA is initialised CUDA_VISIBLE_DEVICES has no effect."""
    monkeypatch.setenv("DUET_RUNS", str(tmp_path))
    code = (
        "import os, sys\nfrom duetgan.commands import train\n"
        "train.train_here = lambda *_: print('torch' in sys.modules, os.environ['CUDA_VISIBLE_DEVICES'])\n"
        "train.main(['--config', 'configs/quickstart_gan.yaml', '--gpus', '3'])"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert done.stdout.split() == ["False", "3"], done.stderr
