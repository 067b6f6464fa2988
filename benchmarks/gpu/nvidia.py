"""A training step of NVIDIA's StyleGAN3 code in its configuration stylegan2, from a folder of it, against our preset.

The networks, the loss and the extensions are that folder's; nothing of it is copied. The step is that of its training
loop on one GPU without augmentation: each phase's gradients, Adam, and the average of the weights.
"""

import contextlib
import copy
import importlib
import sys
import time
import types
from pathlib import Path
from typing import Any

import torch

from benchmarks import scaling
from benchmarks.gpu.book import Book, NotThere, Setting
from benchmarks.gpu.steps import BLOCK, GIB, mean_seconds
from benchmarks.gpu.switches import WARM_UP, options, timed

FOLDER = "stylegan3"
OURS = "stylegan2_256"
SIDE, BATCH, GAMMA = 256, 32, 1.0
WIDTH = 16384  # --cbase, as its docs/configs.md has it for 256 px and our preset
SMALL = {"side": 16, "batch": 4, "width": 4, "dim": 8}


def find(setting: Setting) -> Path:
    """The folder of NVIDIA's code. Raises NotThere."""
    for folder in (setting.nvidia, setting.bundle / "peers" / FOLDER):
        if folder is not None and (folder / "training" / "networks_stylegan2.py").is_file():
            return folder
    raise NotThere(f"{FOLDER}: neither --nvidia FOLDER nor the bundle has training/networks_stylegan2.py")


@contextlib.contextmanager
def importable(folder: Path) -> Any:
    """Put the folder's packages on the path. It asks setuptools' old pkg_resources for versions only."""
    if "pkg_resources" not in sys.modules and importlib.util.find_spec("pkg_resources") is None:
        stand_in: Any = types.ModuleType("pkg_resources")
        stand_in.parse_version = importlib.import_module("packaging.version").parse
        sys.modules["pkg_resources"] = stand_in
    sys.path.insert(0, str(folder))
    try:
        yield
    finally:
        sys.path.remove(str(folder))


class NvidiaStep:
    """Networks, optimizers, loss and average as `train.py --cfg=stylegan2 --aug=noaug` makes them on one GPU."""

    def __init__(self, setting: Setting) -> None:
        small = setting.small
        self.setting = setting
        self.device = setting.torch_device
        self.batch = SMALL["batch"] if small else BATCH
        side = SMALL["side"] if small else SIDE
        networks = importlib.import_module("training.networks_stylegan2")
        losses = importlib.import_module("training.loss")
        sizes: dict[str, Any] = {"img_resolution": side, "img_channels": 3, "c_dim": 0}
        sizes |= {"channel_base": WIDTH, "channel_max": 512}
        if small:
            sizes |= {"channel_base": SMALL["width"] * side, "channel_max": SMALL["width"]}
        dim = SMALL["dim"] if small else 512
        self.generator = networks.Generator(
            z_dim=dim,
            w_dim=dim,
            mapping_kwargs={"num_layers": 8},
            num_fp16_res=4,
            conv_clamp=256,
            fused_modconv_default="inference_only",
            **sizes,
        )
        self.discriminator = networks.Discriminator(
            num_fp16_res=4, conv_clamp=256, epilogue_kwargs={"mbstd_group_size": 4}, **sizes
        )
        for network in (self.generator, self.discriminator):
            network.train().requires_grad_(False).to(self.device)
        self.average = copy.deepcopy(self.generator).eval()
        self.loss = losses.StyleGAN2Loss(
            self.device,
            self.generator,
            self.discriminator,
            r1_gamma=GAMMA,
            style_mixing_prob=0.9,
            pl_weight=2,
            pl_no_weight_grad=True,
        )
        self.phases = []
        for letter, network, lr, interval in (
            ("G", self.generator, 0.002, 4),
            ("D", self.discriminator, 0.002, 16),
        ):
            ratio = interval / (interval + 1)
            adam = torch.optim.Adam(
                network.parameters(), lr=lr * ratio, betas=(0.0, 0.99**ratio), eps=1e-8
            )
            self.phases += [(f"{letter}main", network, adam, 1), (f"{letter}reg", network, adam, interval)]
        self.images = torch.randint(0, 256, (self.batch, 3, side, side), dtype=torch.uint8).to(self.device)

    def step(self, number: int) -> None:
        """One step of every phase that is due."""
        reals = self.images.to(torch.float32) / 127.5 - 1
        labels = torch.zeros(self.batch, 0, device=self.device)
        for name, network, adam, interval in self.phases:
            if number % interval:
                continue
            latents = torch.randn(self.batch, self.generator.z_dim, device=self.device)
            adam.zero_grad(set_to_none=True)
            network.requires_grad_(True)
            self.loss.accumulate_gradients(name, reals, labels, latents, labels, interval, 0)
            network.requires_grad_(False)
            with_gradient = [p for p in network.parameters() if p.grad is not None]
            flat = torch.cat([p.grad.flatten() for p in with_gradient])
            torch.nan_to_num(flat, nan=0, posinf=1e5, neginf=-1e5, out=flat)
            for p, gradient in zip(with_gradient, flat.split([p.numel() for p in with_gradient]), strict=True):
                p.grad = gradient.view_as(p)
            adam.step()
        with torch.no_grad():
            for average, current in zip(self.average.parameters(), self.generator.parameters(), strict=True):
                average.copy_(current.lerp(average, 0.998))

    def seconds(self, number: int, count: int) -> float:
        """What so many steps like this one take."""
        self.setting.synchronize()
        begun = time.perf_counter()
        for _ in range(count):
            self.step(number)
        self.setting.synchronize()
        return time.perf_counter() - begun


def stylegan3(setting: Setting, book: Book) -> None:
    """Their step and ours in turns; the first of theirs compiles their extensions."""
    folder = find(setting)
    device = setting.torch_device
    with importable(folder):
        theirs = NvidiaStep(setting)
        # As their training loop sets it: cuDNN chooses, and fp32 is not computed in TF32.
        before = torch.backends.cudnn.benchmark, torch.backends.cudnn.allow_tf32
        torch.backends.cudnn.benchmark = True
        torch.backends.cudnn.allow_tf32 = False
        kinds = {1: 12 / 16, 4: 3 / 16, 0: 1 / 16}
        begun = theirs.seconds(0, 1)
        book.row("NVIDIA's StyleGAN3 code", first_step_s=begun)
        for kind in kinds:
            theirs.seconds(kind, 1 if setting.small else WARM_UP)
        if device.type != "cpu":
            torch.accelerator.reset_peak_memory_stats(device)
        seconds = mean_seconds(theirs.seconds, kinds, 0.0 if setting.small else 2 * BLOCK)
        rate = theirs.batch / seconds
        row: dict[str, Any] = {"samples": theirs.batch, "ms": 1000 * seconds, "images_per_second": rate}
        if device.type != "cpu":
            row["peak_gib"] = torch.accelerator.max_memory_allocated(device) / GIB
        book.row("NVIDIA's StyleGAN3 code", **row)
        torch.backends.cudnn.benchmark, torch.backends.cudnn.allow_tf32 = before
    del theirs
    name, samples = ("quickstart_gan", 8) if setting.small else (OURS, BATCH)
    for variant, switches in (("kernels", {"graphs": "off"}), ("kernels and graphs", {"graphs": "auto"})):
        config = options(scaling.recipe(name).changed(micro_batch=None), **switches)
        found = timed(config, name, samples, setting)
        ratio = float(found["images_per_second"]) / float(row["images_per_second"])
        book.row(f"{name}, {variant}", samples=samples, **found, vs_peer_ratio=ratio)
