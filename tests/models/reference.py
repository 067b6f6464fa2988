"""The networks' formulas written out with loops over samples and taps: float64 NumPy, slow and obvious.

Sources: StyleGAN (1812.04948), StyleGAN2 (1912.04958), projection discriminator (1802.05637). A module's parameters
are read by name; nothing of its `forward` is used.
"""

import math

import numpy as np

FIR = np.outer([1, 3, 3, 1], [1, 3, 3, 1]) / 64
SQRT2 = math.sqrt(2)


def array(tensor):
    """A tensor's values as a float64 array."""
    return tensor.detach().double().cpu().contiguous().numpy()


def leaky(x):
    """Leaky ReLU with slope 0.2, times sqrt(2)."""
    return np.where(x > 0, x, 0.2 * x) * SQRT2


def normalised(rows):
    """Rows [N, F] scaled to unit second moment."""
    return np.stack([row / np.sqrt((row**2).mean() + 1e-8) for row in rows])


def correlate(x, kernel, *, pad, stride=1):
    """x [I, H, W] with kernel [O, I, kh, kw], zero padding `pad` on all sides; sums over taps, one at a time."""
    x = np.pad(x, [(0, 0), (pad, pad), (pad, pad)])
    kh, kw = kernel.shape[2:]
    height, width = (x.shape[1] - kh) // stride + 1, (x.shape[2] - kw) // stride + 1
    out = np.zeros((kernel.shape[0], height, width))
    for top in range(kh):
        for left in range(kw):
            window = x[:, top : top + stride * height : stride, left : left + stride * width : stride]
            out += np.einsum("oi,ihw->ohw", kernel[:, :, top, left], window[:, :height, :width])
    return out


def per_channel(kernel, channels):
    """One 2-D kernel as a [channels, channels, kh, kw] kernel that does not mix channels."""
    return np.eye(channels)[:, :, None, None] * kernel


def blur(x, *, pad, gain=1.0):
    """FIR of x [C, H, W] at full resolution."""
    return correlate(x, per_channel(FIR * gain, len(x)), pad=pad)


def down(x):
    """FIR, then every second pixel."""
    return blur(x, pad=1)[:, ::2, ::2]


def up(x):
    """Zeros between the pixels, then the FIR with gain 4 (2 pixels of padding before, 1 after)."""
    channels, height, width = x.shape
    spread = np.zeros((channels, 2 * height, 2 * width))
    spread[:, ::2, ::2] = x
    return blur(np.pad(spread, [(0, 0), (2, 1), (2, 1)]), pad=0, gain=4)


def linear(layer, rows, *, lr_multiplier=1.0, activation=False):
    """Equalised fully connected layer on rows [N, F]."""
    weight, bias = array(layer.weight), array(layer.bias)
    out = rows @ (weight * lr_multiplier / math.sqrt(weight.shape[1])).T + bias * lr_multiplier
    return leaky(out) if activation else out


def conv(layer, x, *, downsample=False, activation=True, gain=1.0):
    """Equalised convolution of x [I, H, W] with its bias where it has one."""
    weight = array(layer.weight)
    weight = weight / math.sqrt(weight[0].size)
    size = weight.shape[-1]
    if downsample:
        # on the plane extended by zeros: FIR at half-pixel positions, convolution around every second pixel
        out = correlate(blur(x, pad=size // 2 + 1), weight, pad=0, stride=2)
    else:
        out = correlate(x, weight, pad=size // 2)
    if layer.bias is not None:
        out = out + array(layer.bias)[:, None, None]
    return (leaky(out) if activation else out) * gain


def modulated(layer, x, w, *, demodulate=True, upsample=False):
    """x [N, I, H, W] and w [N, w_dim], one sample at a time with the style fused into the weights."""
    weight = array(layer.weight)
    weight = weight / math.sqrt(weight[0].size)
    styles = linear(layer.affine, w)
    return np.stack([_modulated_sample(weight, s, p, demodulate, upsample) for s, p in zip(styles, x, strict=True)])


def _modulated_sample(weight, style, x, demodulate, upsample):
    own = weight * style[None, :, None, None]
    if demodulate:
        own = np.stack([kernel / np.sqrt((kernel**2).sum() + 1e-8) for kernel in own])
    if not upsample:
        return correlate(x, own, pad=own.shape[-1] // 2)
    channels, height, width = x.shape
    spread = np.zeros((channels, 2 * height - 1, 2 * width - 1))
    spread[:, ::2, ::2] = x
    # a transposed convolution is a true convolution: the kernel is turned around
    return blur(correlate(spread, own[:, :, ::-1, ::-1], pad=2), pad=1, gain=4)


def mapping(network, z, labels, *, lr_multiplier):
    """w [N, w_dim] from z [N, z_dim] and labels."""
    x = normalised(z)
    if network.embed is not None:
        one_hot = np.eye(network.embed.weight.shape[1])[labels]
        x = np.concatenate([x, normalised(linear(network.embed, one_hot))], axis=1)
    for layer in network.layers:
        x = linear(layer, x, lr_multiplier=lr_multiplier, activation=True)
    return x


def styled(layer, x, w, noise, *, upsample):
    """Modulated convolution + noise * strength + bias, then the activation."""
    out = modulated(layer.conv, x, w, upsample=upsample) + array(layer.bias)[None, :, None, None]
    if noise is not None:
        out = out + noise * array(layer.noise_strength)
    return leaky(out)


def to_rgb(layer, x, w):
    return modulated(layer.conv, x, w, demodulate=False) + array(layer.bias)[None, :, None, None]


def synthesis(generator, ws, noise, *, resolution=None, alpha=1.0):
    """Images from ws [N, num_ws, w_dim]; `noise` one map (or None) a layer. ToRGB's w is that of the layer after it.

    A stage has the blocks up to its resolution; the newest one's part of the image counts `alpha`.
    """
    x = np.stack([array(generator.constant)[0]] * len(ws))
    image, layer, size = None, 0, 4
    for block in generator.blocks:
        if block.first is not None:
            x = styled(block.first, x, ws[:, layer], noise[layer], upsample=True)
            layer += 1
        x = styled(block.second, x, ws[:, layer], noise[layer], upsample=False)
        layer += 1
        rgb = to_rgb(block.to_rgb, x, ws[:, layer])
        weight = alpha if size == resolution else 1.0
        image = rgb if image is None else np.stack([up(sample_image) for sample_image in image]) + weight * rgb
        if size == resolution:
            break
        size *= 2
    return image


def minibatch_std(x, group):
    """x [N, C, H, W] with one more map: each group of consecutive samples' mean standard deviation."""
    maps = []
    for start in range(0, len(x), group):
        members = x[start : start + group]
        deviations = []
        for c in range(x.shape[1]):
            for i in range(x.shape[2]):
                for j in range(x.shape[3]):
                    values = members[:, c, i, j]
                    deviations.append(math.sqrt(((values - values.mean()) ** 2).mean() + 1e-8))
        maps += [np.full((1, *x.shape[2:]), np.mean(deviations))] * len(members)
    return np.concatenate([x, np.stack(maps)], axis=1)


def halved(x):
    """x [C, 2H, 2W]: the mean of each 2x2 pixels."""
    channels, height, width = x.shape
    out = np.zeros((channels, height // 2, width // 2))
    for i in range(height // 2):
        for j in range(width // 2):
            out[:, i, j] = x[:, 2 * i : 2 * i + 2, 2 * j : 2 * j + 2].mean(axis=(1, 2))
    return out


def discriminator(network, images, labels, *, residual, group, alpha=1.0):
    """Logits [N]."""
    features = linear(network.output, hidden(network, images, residual=residual, group=group, alpha=alpha))
    if network.embed is None:
        return features[:, 0]
    mapped = normalised(linear(network.embed, np.eye(network.embed.weight.shape[1])[labels]))
    for layer in network.label_mapping:
        mapped = linear(layer, mapped, lr_multiplier=0.01, activation=True)
    return (features * mapped).sum(axis=1) / math.sqrt(features.shape[1])


def hidden(network, images, *, residual, group, alpha=1.0):
    """The last hidden activations [N, F] of images at any stage's resolution."""
    x = np.stack([_walk(network, sample_image, residual, alpha) for sample_image in images])
    if group > 1:
        x = minibatch_std(x, group)
    x = np.stack([conv(network.last_conv, sample_image) for sample_image in x])
    return linear(network.last_linear, x.reshape(len(x), -1), activation=True)


def _walk(network, sample_image, residual, alpha):
    """One image's activations at 4 px; the block of its own resolution counts `alpha`."""
    full = 4 * 2 ** len(network.blocks)
    size = sample_image.shape[-1]
    x = conv(network.from_rgb if size == full else network.from_rgbs[str(size)], sample_image)
    for number, block in enumerate(network.blocks):
        if full // 2**number > size:
            continue
        x = _discriminator_block(block, x, residual)
        if full // 2**number == size and alpha != 1:
            before = conv(network.from_rgbs[str(size // 2)], halved(sample_image))
            x = alpha * x + (1 - alpha) * before
    return x


def _discriminator_block(block, x, residual):
    gain = math.sqrt(0.5) if residual else 1.0
    y = conv(block.second, conv(block.first, x), downsample=True, gain=gain)
    return y + conv(block.skip, x, downsample=True, activation=False, gain=gain) if residual else y
