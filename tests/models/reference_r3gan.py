"""R3GAN's formulas (2501.05441) written out with loops over samples, groups and taps: float64 NumPy, slow and obvious.

Everything is read from a state dict of arrays by name and from the sizes in the configuration; nothing of the
modules' code is used. An image is [C, H, W].
"""

import numpy as np


def arrays(network):
    """A network's state dict as float64 arrays."""
    return {name: tensor.detach().double().contiguous().numpy() for name, tensor in network.state_dict().items()}


def leaky(x):
    return np.where(x > 0, x, 0.2 * x)


def convolution(x, weight, bias=None, groups=1):
    """x [I, H, W] with weight [O, I / groups, k, k], k odd, padded by zeros to the same size."""
    outputs, inputs, size, _ = weight.shape
    _, height, width = x.shape
    padded = np.pad(x, [(0, 0), (size // 2, size // 2), (size // 2, size // 2)])
    out = np.zeros((outputs, height, width))
    for o in range(outputs):
        first = o // (outputs // groups) * inputs  # of the input channels that this output's group sees
        for i in range(inputs):
            for top in range(size):
                for left in range(size):
                    window = padded[first + i, top : top + height, left : left + width]
                    out[o] += weight[o, i, top, left] * window
    return out if bias is None else out + bias[:, None, None]


def low_pass(x):
    """[1, 2, 1] / 4 along both axes, zeros outside."""
    for axis in (1, 2):
        padded = np.pad(x, [(0, 0)] + [(1, 1) if axis == a else (0, 0) for a in (1, 2)])
        length = x.shape[axis]
        before, here, after = (np.take(padded, range(shift, shift + length), axis=axis) for shift in (0, 1, 2))
        x = 0.25 * before + 0.5 * here + 0.25 * after
    return x


def up(x):
    """Every pixel as a square of four, then the low-pass."""
    return low_pass(np.repeat(np.repeat(x, 2, axis=1), 2, axis=2))


def down(x):
    """The low-pass, then the mean of every square of four."""
    x = low_pass(x)
    return (x[:, ::2, ::2] + x[:, 1::2, ::2] + x[:, ::2, 1::2] + x[:, 1::2, 1::2]) / 4


def block(state, name, x, groups):
    y = leaky(convolution(x, state[f"{name}.expand.weight"], state[f"{name}.expand.bias"]))
    y = leaky(convolution(y, state[f"{name}.group.weight"], state[f"{name}.group.bias"], groups))
    return x + convolution(y, state[f"{name}.reduce.weight"])


def stages(state, config, x, sizes, change):
    """The residual blocks at every size; `change(x, weight or None)` comes between two sizes."""
    for stage, size in enumerate(sizes):
        if stage > 0:
            x = change(x, state.get(f"stages.{stage}.change.weight"))
        assert x.shape[1] == size
        halvings = max(0, size.bit_length() - (32).bit_length())
        assert len(x) == config.width // 2**halvings
        for number in range(config.blocks):
            x = block(state, f"stages.{stage}.blocks.{number}", x, config.cardinality // 2**halvings)
    return x


def sizes_to(resolution):
    return [size for size in (4, 8, 16, 32, 64, 128, 256) if size <= resolution]


def generator(network, resolution, z, labels):
    """Images [N, C, R, R] of latents [N, z_dim] and labels [N] (None: unconditional)."""
    state = arrays(network)

    def change(x, weight):
        return up(x if weight is None else convolution(x, weight))

    images = []
    for index, latent in enumerate(z):
        if labels is not None:
            latent = np.concatenate([latent, state["embed.weight"][:, labels[index]]])
        scales = state["linear.weight"] @ latent
        x = np.stack([scale * plane for scale, plane in zip(scales, state["basis"][0], strict=True)])
        x = stages(state, network.config, x, sizes_to(resolution), change)
        images.append(convolution(x, state["to_rgb.weight"]))
    return np.stack(images)


def hidden(network, resolution, images):
    """[N, width]."""
    state = arrays(network)

    def change(x, weight):
        x = down(x)
        return x if weight is None else convolution(x, weight)

    found = []
    for image in images:
        x = convolution(image, state["from_rgb.weight"])
        x = stages(state, network.config, x, sizes_to(resolution)[::-1], change)
        found.append([(plane * weight).sum() for plane, weight in zip(x, state["basis"][0], strict=True)])
    return np.array(found)


def discriminator(network, resolution, images, labels):
    """Logits [N]."""
    state = arrays(network)
    features = hidden(network, resolution, images) @ state["output.weight"].T
    if labels is None:
        return features[:, 0]
    return np.array([row @ state["embed.weight"][:, label] for row, label in zip(features, labels, strict=True)])
