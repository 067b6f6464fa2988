"""Make a small file of a trained GAN's networks that other trainings start from (`--init-from`).

`python benchmarks/folders/start.py RUN OUT.pt`: both networks in float16, the generator as its average, without what a
resume needs. The quickstart's own, configs/drawings_64.pt, came from (configs/drawings_64.md has its card)

    python benchmarks/folders/make.py DEST drawings
    duet pack DEST/drawings drawings.lmdb --size 64
    python train.py --config configs/gan_64_cpu.yaml --run-dir RUN --data.path drawings.lmdb --steps 15000 \\
        --loss.auxiliary-weight 0.2
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch

from duetgan.models.restore import open_checkpoint
from duetgan.utils.config.cli import Parser
from duetgan.utils.distributed.process import run_cli

KEPT = ("schema", "task", "step", "config", "classes", "lineage", "shape")


def main(argv: list[str]) -> None:
    parser = Parser(prog="start.py", description="Make a small file that other trainings start from.")
    parser.add_argument("run")
    parser.add_argument("out", type=Path)
    options = parser.parse_args(argv)
    _, checkpoint = open_checkpoint(options.run, "last")
    state = checkpoint["state"]
    half = {
        name: {key: tensor.half() if tensor.is_floating_point() else tensor for key, tensor in state[name].items()}
        for name in ("generator_ema", "discriminator")
    }
    slim = {key: checkpoint[key] for key in KEPT if key in checkpoint}
    slim["config"] = {key: slim["config"][key] for key in ("task", "architecture", "generator", "discriminator")}
    torch.save(slim | {"state": half | {"generator": half["generator_ema"]}}, options.out)
    print(f"{options.out}: {options.out.stat().st_size / 1e6:.1f} MB")


if __name__ == "__main__":
    sys.exit(run_cli(main))
