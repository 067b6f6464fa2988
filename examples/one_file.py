"""Duet in one file: a small StyleGAN2 and a ResNet-18, trained on the embedded sample and evaluated.

It needs torch alone, prints accuracy, Frechet distance and the share of samples that the classifier recognises, and
draws a grid. Read it from top to bottom; docs/reading.md goes on from here. Parameters have the program's names, and
tests/oracle/test_one_file.py holds networks and steps equal to the program's.
"""

import argparse
import copy
import gzip
import math
import struct
import zlib
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

SAMPLE = Path(__file__).resolve().parents[1] / "data" / "sample"
CLASSES, Z_DIM, W_DIM = 10, 64, 64
SIDES = [4, 8, 16, 32]  # px
WIDTHS = [128, 64, 32, 16]  # channels at these sides


# --- 1. Images: [N, 1, 32, 32] in [-1, 1], and labels


def load(split: str) -> tuple[Tensor, Tensor]:
    """Fashion-MNIST's files: a header of big-endian numbers, then bytes. 28 px are padded to 32."""
    images = gzip.decompress((SAMPLE / f"{split}-images-idx3-ubyte.gz").read_bytes())
    labels = gzip.decompress((SAMPLE / f"{split}-labels-idx1-ubyte.gz").read_bytes())
    count, height, width = struct.unpack(">III", images[4:16])
    pixels = torch.frombuffer(bytearray(images[16:]), dtype=torch.uint8).view(count, 1, height, width)
    return F.pad(pixels, (2, 2, 2, 2)).float() / 127.5 - 1, torch.tensor(list(labels[8:]))


def batches(count: int, batch_size: int) -> Iterator[Tensor]:
    """Indices without end: each pass in an order of its own, in whole batches."""
    while True:
        yield from torch.randperm(count)[: count // batch_size * batch_size].split(batch_size)


def augment(images: Tensor) -> Tensor:
    """Mirror half of them."""
    return torch.where(torch.rand(len(images), 1, 1, 1) < 0.5, images.flip(3), images)


# --- 2. StyleGAN2's layers (1912.04958). Weights are drawn from N(0, 1) and scaled at run time (equalised learning
# rate, 1710.10196), so that one learning rate suits every layer.


def activate(x: Tensor) -> Tensor:
    return F.leaky_relu(x, 0.2) * math.sqrt(2)


def normalize(x: Tensor) -> Tensor:
    """Each row to unit mean square."""
    return x * torch.rsqrt(x.square().mean(1, keepdim=True) + 1e-8)


def low_pass(x: Tensor, gain: float = 1.0) -> Tensor:
    """[1, 3, 3, 1] in both directions, a filter for each channel: what is resampled without it shows a grid."""
    taps = torch.tensor([1.0, 3.0, 3.0, 1.0], dtype=x.dtype, device=x.device) / 8
    return (torch.outer(taps, taps) * gain).expand(x.shape[1], 1, 4, 4)


def upsample(x: Tensor) -> Tensor:
    """Twice the size. Only a quarter of the pixels is given, so the gain is 4."""
    return F.conv_transpose2d(x, low_pass(x, 4), stride=2, padding=1, groups=x.shape[1])


class Linear(nn.Module):
    """Fully connected, equalised. A low `lr_multiplier` slows the mapping network down."""

    def __init__(self, inputs: int, outputs: int, *, bias: float = 0.0, lr_multiplier: float = 1.0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(outputs, inputs) / lr_multiplier)
        self.bias = nn.Parameter(torch.full([outputs], bias / lr_multiplier))
        self.gain, self.lr_multiplier = lr_multiplier / math.sqrt(inputs), lr_multiplier

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight * self.gain, self.bias * self.lr_multiplier)


class Conv(nn.Module):
    """Convolution, equalised. With `down` the low-pass goes first, and the stride halves the image."""

    def __init__(self, inputs: int, outputs: int, kernel: int, *, down: bool = False, bias: bool = True) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(outputs, inputs, kernel, kernel))
        self.bias = nn.Parameter(torch.zeros(outputs)) if bias else None
        self.gain, self.down = 1 / math.sqrt(inputs * kernel**2), down

    def forward(self, x: Tensor) -> Tensor:
        half = self.weight.shape[-1] // 2
        if self.down:
            x = F.conv2d(x, low_pass(x), padding=half + 1, groups=x.shape[1])
        return F.conv2d(x, self.weight * self.gain, self.bias, 2 if self.down else 1, 0 if self.down else half)


class ModulatedConv(nn.Module):
    """The style w scales the input's channels; demodulation takes the scale out of the output's again."""

    def __init__(self, inputs: int, outputs: int, kernel: int, *, up: bool = False, demodulate: bool = True) -> None:
        super().__init__()
        self.affine = Linear(W_DIM, inputs, bias=1.0)
        self.weight = nn.Parameter(torch.randn(outputs, inputs, kernel, kernel))
        self.gain, self.up, self.demodulate = 1 / math.sqrt(inputs * kernel**2), up, demodulate

    def forward(self, x: Tensor, w: Tensor) -> Tensor:
        style, weight = self.affine(w)[:, :, None, None], self.weight * self.gain
        x = x * style
        if self.up:
            x = F.conv_transpose2d(x, weight.transpose(0, 1), stride=2)
            x = F.conv2d(x, low_pass(x, 4), padding=1, groups=x.shape[1])
        else:
            x = F.conv2d(x, weight, padding=weight.shape[-1] // 2)
        if self.demodulate:  # the norm of each filter times the style, as one would have it of the weights alone
            x = x * torch.rsqrt((weight[None] * style[:, None]).square().sum((2, 3, 4)) + 1e-8)[:, :, None, None]
        return x


# --- 3. Generator: z -> w -> a constant 4x4 map, doubled three times; each resolution adds its own part of the image


class Mapping(nn.Module):
    """z and the class to w: styles need not be as normal as z is."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = Linear(CLASSES, W_DIM)
        self.layers = nn.Sequential(*(Linear(n, W_DIM, lr_multiplier=0.01) for n in (Z_DIM + W_DIM, W_DIM)))

    def forward(self, z: Tensor, labels: Tensor) -> Tensor:
        x = torch.cat([normalize(z), normalize(self.embed(F.one_hot(labels, CLASSES).to(z.dtype)))], 1)
        for layer in self.layers:
            x = activate(layer(x))
        return x


class StyledLayer(nn.Module):
    """Convolution by style, then noise for each pixel: hair and folds are drawn, not memorised."""

    def __init__(self, inputs: int, outputs: int, side: int, *, up: bool = False) -> None:
        super().__init__()
        self.conv = ModulatedConv(inputs, outputs, 3, up=up)
        self.bias = nn.Parameter(torch.zeros(outputs))
        self.noise_strength = nn.Parameter(torch.zeros([]))
        self.register_buffer("noise_const", torch.randn(1, 1, side, side))  # for whoever wants no new noise

    def forward(self, x: Tensor, w: Tensor, noise: Tensor) -> Tensor:
        return activate(self.conv(x, w) + noise * self.noise_strength + self.bias[:, None, None])


class ToRGB(nn.Module):
    def __init__(self, inputs: int) -> None:
        super().__init__()
        self.conv = ModulatedConv(inputs, 1, 1, demodulate=False)
        self.bias = nn.Parameter(torch.zeros(1))

    def forward(self, x: Tensor, w: Tensor) -> Tensor:
        return self.conv(x, w) + self.bias[:, None, None]


class SynthesisBlock(nn.Module):
    def __init__(self, inputs: int, outputs: int, side: int) -> None:
        super().__init__()
        self.first = StyledLayer(inputs, outputs, side, up=True) if side > 4 else None
        self.second = StyledLayer(outputs, outputs, side)
        self.to_rgb = ToRGB(outputs)

    def forward(self, x: Tensor, image: Tensor | None, w: Tensor, noise: Iterator[Tensor]) -> tuple[Tensor, Tensor]:
        x = x if self.first is None else self.first(x, w, next(noise))
        x = self.second(x, w, next(noise))
        return x, self.to_rgb(x, w) if image is None else upsample(image) + self.to_rgb(x, w)


class Generator(nn.Module):
    """z [N, 64] and labels [N] -> images [N, 1, 32, 32] in about [-1, 1]."""

    w_avg: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.mapping = Mapping()
        self.constant = nn.Parameter(torch.randn(1, WIDTHS[0], 4, 4))
        widths = [WIDTHS[0], *WIDTHS]
        self.blocks = nn.ModuleList(map(SynthesisBlock, widths, WIDTHS, SIDES))
        self.register_buffer("w_avg", torch.zeros(W_DIM))  # the mean w of all classes, which the program keeps

    def noise(self, count: int) -> list[Tensor]:
        """A map for each layer: one at 4 px, two at the others."""
        return [torch.randn(count, 1, side, side) for side in sorted(SIDES + SIDES[1:])]

    def forward(self, w: Tensor, noise: list[Tensor]) -> Tensor:
        x, image, maps = self.constant.expand(len(w), -1, -1, -1), None, iter(noise)
        for block in self.blocks:
            x, image = block(x, image, w, maps)
        assert image is not None
        return image


# --- 4. Discriminator: the way back, with skip connections


class DiscriminatorBlock(nn.Module):
    """Two convolutions, the second halving the image, beside a skip; sqrt(0.5) keeps the variance."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.first = Conv(inputs, inputs, 3)
        self.second = Conv(inputs, outputs, 3, down=True)
        self.skip = Conv(inputs, outputs, 1, down=True, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return (activate(self.second(activate(self.first(x)))) + self.skip(x)) * math.sqrt(0.5)


def minibatch_std(x: Tensor, group: int = 4) -> Tensor:
    """One more map: how much four consecutive samples differ. A generator that always draws the same is found out."""
    n, c, h, w = x.shape
    grouped = x.view(n // group, group, c, h, w)
    std = (grouped.var(1, unbiased=False) + 1e-8).sqrt().mean((1, 2, 3))
    return torch.cat([x, std.repeat_interleave(group)[:, None, None, None].expand(n, 1, h, w)], 1)


class Discriminator(nn.Module):
    """Images and labels -> logits [N]: the features' product with the label's embedding (1802.05637)."""

    def __init__(self) -> None:
        super().__init__()
        self.from_rgb = Conv(1, WIDTHS[-1], 1)
        self.blocks = nn.ModuleList(DiscriminatorBlock(a, b) for a, b in pairwise(WIDTHS[::-1]))
        last = WIDTHS[0]
        self.last_conv = Conv(last + 1, last, 3)
        self.last_linear = Linear(last * 16, last)
        self.output = Linear(last, last)
        self.embed = Linear(CLASSES, last)

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        x = activate(self.from_rgb(images))
        for block in self.blocks:
            x = block(x)
        x = activate(self.last_conv(minibatch_std(x)))
        features = self.output(activate(self.last_linear(x.flatten(1))))
        embedded = normalize(self.embed(F.one_hot(labels, CLASSES).to(x.dtype)))
        return (features * embedded).sum(1) / math.sqrt(features.shape[1])


# --- 5. A GAN's step


class Gan:
    """Both networks, the generator's average, and two Adams without momentum."""

    lr, r1_gamma, r1_interval, ema_images = 0.008, 0.1, 16, 10_000

    def __init__(self) -> None:
        self.g, self.d = Generator(), Discriminator()
        self.ema = copy.deepcopy(self.g).requires_grad_(False)
        self.g_optimizer = torch.optim.Adam(self.g.parameters(), lr=self.lr, betas=(0.0, 0.99))
        self.d_optimizer = torch.optim.Adam(self.d.parameters(), lr=self.lr, betas=(0.0, 0.99))

    def step(
        self, images: Tensor, labels: Tensor, z: Tensor, fake_labels: Tensor, noise: list[Tensor], step: int
    ) -> tuple[float, float]:
        """One update of each network; all draws come from outside. Returns both losses."""
        # The generator wants its samples to be taken for real (1406.2661, non-saturating).
        w = self.g.mapping(z, fake_labels)
        fakes = self.g(w, noise)
        g_loss = F.softplus(-self.d(fakes, fake_labels)).mean()
        self.g_optimizer.zero_grad()
        g_loss.backward()  # into the discriminator, too: its own zero_grad comes before its own loss
        self.g_optimizer.step()
        self.follow(w.detach(), step * len(images), len(images))

        # The discriminator tells the same samples from real images.
        due = step % self.r1_interval == 0
        images = images.detach().requires_grad_(due)
        real = self.d(images, labels)
        d_loss = F.softplus(self.d(fakes.detach(), fake_labels)).mean() + F.softplus(-real).mean()
        total = d_loss
        if due:  # R1 (1801.04406): real images stand on level ground. Lazily, with the gain of its interval.
            (slope,) = torch.autograd.grad(real.sum(), images, create_graph=True)
            total = d_loss + self.r1_gamma / 2 * self.r1_interval * slope.square().sum((1, 2, 3)).mean()
        self.d_optimizer.zero_grad()
        total.backward()
        self.d_optimizer.step()
        return float(g_loss.detach()), float(d_loss.detach())

    @torch.no_grad()
    def follow(self, w: Tensor, seen: int, batch: int) -> None:
        """The average of the weights is what is shown. Its half-life grows with the images seen."""
        self.g.w_avg.lerp_(w.mean(0), 0.005)
        beta = 0.5 ** (batch / max(min(self.ema_images, 0.05 * seen), 1e-8))
        for mine, theirs in zip(self.ema.parameters(), self.g.parameters(), strict=True):
            mine.lerp_(theirs, 1 - beta)
        self.ema.w_avg.copy_(self.g.w_avg)

    @torch.no_grad()
    def sample(self, labels: Tensor, psi: float = 1.0) -> Tensor:
        """Of the average, rounded as files are; truncated towards the mean w of its class (2202.11777)."""
        images, z = [], torch.randn(1000, Z_DIM)
        means = torch.stack([self.ema.mapping(z, torch.full([1000], label)).mean(0) for label in range(CLASSES)])
        for part in labels.split(100):
            w = means[part].lerp(self.ema.mapping(torch.randn(len(part), Z_DIM), part), psi)
            images.append(self.ema(w, self.ema.noise(len(part))).clamp(-1, 1))
        return ((torch.cat(images) + 1) * 127.5).round() / 127.5 - 1


# --- 6. ResNet-18 (1512.03385) with a stem for small images, and its step


class BasicBlock(nn.Module):
    """Two convolutions beside the identity, or a 1x1 convolution where the shape changes."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        shortcut = nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs)
        self.downsample = nn.Sequential(*shortcut) if stride > 1 else None

    def forward(self, x: Tensor) -> Tensor:
        y = self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x)))))
        return F.relu(y + (x if self.downsample is None else self.downsample(x)))


class ResNet(nn.Module):
    """Images -> logits [N, 10]; `features` [N, 512] are what it knows of them."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(1, 64, 3, 2, 1, bias=False), nn.BatchNorm2d(64)
        for number, (a, b) in enumerate(pairwise([64, 64, 128, 256, 512]), 1):
            self.add_module(f"layer{number}", nn.Sequential(BasicBlock(a, b, 1 if a == b else 2), BasicBlock(b, b, 1)))
        self.fc = nn.Linear(512, CLASSES)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def features(self, x: Tensor) -> Tensor:
        x = F.relu(self.bn1(self.conv1(x)))
        for number in (1, 2, 3, 4):
            x = self.get_submodule(f"layer{number}")(x)
        return x.mean((2, 3))

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.features(x))


class Classifier:
    """The network, its average, and SGD with Nesterov's momentum; norms and biases do not decay."""

    lr, warmup = 0.05, 100

    def __init__(self) -> None:
        self.model = ResNet()
        self.ema = copy.deepcopy(self.model).eval().requires_grad_(False)
        parameters = list(self.model.parameters())
        filters, others = [p for p in parameters if p.ndim > 1], [p for p in parameters if p.ndim == 1]
        groups = [{"params": filters, "weight_decay": 0.0005}, {"params": others, "weight_decay": 0.0}]
        self.optimizer = torch.optim.SGD(groups, lr=self.lr, momentum=0.9, nesterov=True)

    def step(self, images: Tensor, labels: Tensor, step: int, steps: int) -> float:
        """One update, at a rate that rises for `warmup` steps and falls along half a cosine."""
        done = max(0.0, (step - self.warmup) / max(1, steps - self.warmup))
        rate = self.lr * min((step + 1) / self.warmup, (1 + math.cos(math.pi * done)) / 2)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.zero_grad()
        loss = F.cross_entropy(self.model(images), labels, label_smoothing=0.1)
        loss.backward()
        self.optimizer.step()
        decay = min(0.999, (1 + step) / (10 + step))
        for mine, theirs in zip(self.ema.state_dict().values(), self.model.state_dict().values(), strict=True):
            mine.copy_(mine.lerp(theirs, 1 - decay) if mine.is_floating_point() else theirs)
        return float(loss.detach())

    @torch.no_grad()
    def look(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """Features [N, 512] and predictions [N] of the average."""
        features = torch.cat([self.ema.features(part) for part in images.split(200)])
        return features, self.ema.fc(features).argmax(1)


# --- 7. Evaluation


def frechet(a: Tensor, b: Tensor) -> float:
    """|mean difference|^2 + tr(A + B - 2 (A B)^(1/2)) of two sets of features (1706.08500)."""
    a, b = a.double(), b.double()
    values, vectors = torch.linalg.eigh(a.T.cov())
    root = vectors * values.clamp(min=0).sqrt() @ vectors.T
    mixed = torch.linalg.eigvalsh(root @ b.T.cov() @ root).clamp(min=0).sqrt().sum()
    return float((a.mean(0) - b.mean(0)).square().sum() + a.T.cov().trace() + b.T.cov().trace() - 2 * mixed)


def write_png(path: Path, image: Tensor) -> None:
    """A grey uint8 image [H, W]: PNG is a header, compressed rows that begin with 0, and an end."""
    rows = b"".join(b"\0" + bytes(row.tolist()) for row in image)
    header = struct.pack(">IIBBBBB", image.shape[1], image.shape[0], 8, 0, 0, 0, 0)
    blocks = b"\x89PNG\r\n\x1a\n"
    for kind, data in ((b"IHDR", header), (b"IDAT", zlib.compress(rows)), (b"IEND", b"")):
        blocks += struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
    path.write_bytes(blocks)


def main() -> None:
    parser = argparse.ArgumentParser(description="train a small GAN and a small classifier")
    parser.add_argument("--gan-steps", type=int, default=3000, help="of 32 images")
    parser.add_argument("--classifier-steps", type=int, default=600, help="of 64 images")
    parser.add_argument("--out", type=Path, default=Path("one_file.png"), help="the grid of samples")
    given = parser.parse_args()
    torch.manual_seed(0)
    (images, labels), (test_images, test_labels) = load("train"), load("t10k")
    classifier, order = Classifier(), batches(len(images), 64)
    for step in range(given.classifier_steps):
        rows = next(order)
        loss = classifier.step(augment(images[rows]), labels[rows], step, given.classifier_steps)
        if step % 100 == 0:
            print(f"classifier, step {step}: loss {loss:.3f}", flush=True)
    test_features, predicted = classifier.look(test_images)
    print(f"accuracy on {len(test_images)} test images: {(predicted == test_labels).float().mean():.3f}")

    gan, order = Gan(), batches(len(images), 32)
    for step in range(given.gan_steps):
        for optimizer in (gan.g_optimizer, gan.d_optimizer):  # constant, then down to a fiftieth
            optimizer.param_groups[0]["lr"] = gan.lr * min(1.0, 0.02 + 1.96 * (1 - step / given.gan_steps))
        rows, fake_labels = next(order), torch.randint(0, CLASSES, [32])
        losses = gan.step(images[rows], labels[rows], torch.randn(32, Z_DIM), fake_labels, gan.g.noise(32), step)
        if step % 100 == 0:
            print("GAN, step {}: generator {:.3f}, discriminator {:.3f}".format(step, *losses), flush=True)
    features, predicted = classifier.look(gan.sample(test_labels))
    print(f"recognised as the class asked for: {(predicted == test_labels).float().mean():.3f}")
    floor = frechet(classifier.look(images[: len(test_images)])[0], test_features)
    print(f"Frechet distance {frechet(features, test_features):.2f}; of training images {floor:.2f}")
    grid = gan.sample(torch.arange(CLASSES).repeat_interleave(10), psi=0.8).view(10, 10, 32, 32)
    write_png(given.out, ((grid.transpose(1, 2).reshape(320, 320) + 1) * 127.5).round().to(torch.uint8))
    print(f"a row a class: {given.out}")


if __name__ == "__main__":
    main()
