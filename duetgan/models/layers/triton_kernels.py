# mypy: disable-error-code="no-untyped-def"
"""Triton kernels of FIR resampling and of the activation after a convolution, and their launches.

Each kernel reads and writes an image once; sums are computed in fp32, or fp64 for float64. The
first call of a kernel compiles it. Later calls neither wait nor draw random numbers, so CUDA graphs
can capture them. Images are [N, C, H, W], contiguous or channels_last; results have the same memory
format.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

LEAKY_SLOPE = 0.2
TILE = 1024  # elements of a tile: 8 for each thread of 4 warps, 16 bytes of half precision
TILES = 8  # largest number of tiles that a program of `_activation` computes and adds up


@triton.jit
def _fir(
    x_ptr,
    y_ptr,
    height,
    length,  # width times `step`
    out_height,
    out_length,
    step,  # distance of neighbours in a row: the channels in channels_last, else 1
    padding: tl.constexpr,
    gain: tl.constexpr,
    kind: tl.constexpr,
    block: tl.constexpr,
):
    # A program computes `block` elements of a row. Elements beyond the borders are zeros.
    dtype: tl.constexpr = tl.float64 if x_ptr.dtype.element_ty == tl.float64 else tl.float32
    taps: tl.constexpr = 2 if kind == "up" else 4
    parts = (out_length + block - 1) // block
    row = tl.program_id(0) // parts % out_height
    plane = (tl.program_id(0) // parts // out_height).to(tl.int64)
    q = tl.program_id(0) % parts * block + tl.arange(0, block)
    column = q // step
    if kind == "up":
        # The outputs 2j and 2j + 1 are (x[j - 1] + 3 x[j]) / 4 and (3 x[j] + x[j + 1]) / 4.
        top = (row + 1) // 2 - 1
        first = q + ((column + 1) // 2 - 1 - column) * step
    elif kind == "down":
        top = row * 2 - padding
        first = q + (column - padding) * step
    else:
        top = row - padding
        first = q - padding * step
    total = tl.full([block], 0.0, dtype)
    for i in tl.static_range(taps):
        limit = tl.where((top + i >= 0) & (top + i < height), length, 0)
        line = x_ptr + (plane * height + top + i) * length
        for k in tl.static_range(taps):
            place = first + k * step
            value = tl.load(line + place, (place >= 0) & (place < limit), 0.0).to(dtype)
            if kind == "up":
                value *= ((1 + 2 * ((row + i) % 2)) * (1 + 2 * ((column + k) % 2))).to(dtype)
            else:
                value *= (1 + 2 * (i % 3 > 0)) * (1 + 2 * (k % 3 > 0))
            total += value
    target = y_ptr + (plane * out_height + row) * out_length + q
    tl.store(target, (total * gain).to(y_ptr.dtype.element_ty), q < out_length)


def _memory_format(x: Tensor) -> torch.memory_format:
    is_last = x.shape[1] > 1 and x.stride(1) == 1
    return torch.channels_last if is_last else torch.contiguous_format


def fir(x: Tensor, kind: str, gain: float, padding: int) -> Tensor:
    """Resample `x` [N, C, H, W]; the arguments are those of `layers._run`."""
    layout = _memory_format(x)
    x = x.contiguous(memory_format=layout)
    n, channels, height, width = x.shape
    size = [2 * height, 2 * width]
    if kind != "up":
        stride = 2 if kind == "down" else 1
        size = [(side + 2 * padding - 4) // stride + 1 for side in (height, width)]
    y = torch.empty((n, channels, *size), dtype=x.dtype, device=x.device, memory_format=layout)
    step = channels if layout == torch.channels_last else 1
    block = min(TILE, triton.next_power_of_2(max(1, size[1] * step)))
    programs = n * channels // step * size[0] * triton.cdiv(size[1] * step, block)
    if programs:
        sizes = (height, width * step, size[0], size[1] * step, step)
        with torch.cuda.device_of(x):
            _fir[(programs,)](x, y, *sizes, padding, gain / 64, kind, block, enable_fp_fusion=True)
    return y


@triton.jit
def _add(a, b):
    return a + b


@triton.jit
def _derivative(value, y, slope: tl.constexpr, limit: tl.constexpr):
    # Return `value` times the activation's derivative at the point where its output is y.
    value = tl.where(y > 0, value, value * slope)
    if limit is not None:
        value = tl.where(tl.abs(y) < limit, value, 0.0)
    return value


@triton.jit
def _activation(
    out_ptr,  # images: out, x, second, y
    x_ptr,
    second_ptr,
    y_ptr,
    scale_ptr,  # [N, C]
    second_scale_ptr,
    bias_ptr,  # [C]
    noise_ptr,  # [N or 1, H, W]
    scale_sums_ptr,  # [chunks of pixels, N, C]
    bias_sums_ptr,
    noise_sums_ptr,  # [parts of the channels, N, H, W]
    samples,
    channels,
    pixels,
    channel_stride,
    pixel_stride,
    noise_stride,
    slope: tl.constexpr,
    limit: tl.constexpr,
    tiles: tl.constexpr,
    c_block: tl.constexpr,
    p_block: tl.constexpr,
):
    # z = x * scale + second * second_scale + bias + noise; a term without a pointer is left out.
    # Without `y_ptr` the output is the activation of z. If `y_ptr` points to an output y of the
    # activation, the output is z times the activation's derivative at y. Let h be x times this
    # derivative. The three sums are h * second over pixels, h over pixels, and h over channels.
    dtype: tl.constexpr = tl.float64 if out_ptr.dtype.element_ty == tl.float64 else tl.float32
    parts = (channels + c_block - 1) // c_block
    chunks = (pixels + tiles * p_block - 1) // (tiles * p_block)
    part = tl.program_id(0) % parts
    chunk = tl.program_id(0) // parts % chunks
    sample = (tl.program_id(0) // parts // chunks).to(tl.int64)
    c = part * c_block + tl.arange(0, c_block)
    scale_total = tl.full([c_block, p_block], 0.0, dtype)
    bias_total = tl.full([c_block, p_block], 0.0, dtype)
    for tile in range(tiles):
        p = (chunk * tiles + tile) * p_block + tl.arange(0, p_block)
        inside = (c < channels)[:, None] & (p < pixels)[None, :]
        place = c[:, None] * channel_stride + p[None, :] * pixel_stride
        place = sample * channels * pixels + place
        z = tl.full([c_block, p_block], 0.0, dtype)
        if x_ptr is not None:
            z = tl.load(x_ptr + place, inside, 0.0).to(dtype)
        h = z
        if y_ptr is not None:
            y = tl.load(y_ptr + place, inside, 0.0).to(dtype)
            h = _derivative(z, y, slope, limit)
        if scale_ptr is not None:
            scale = tl.load(scale_ptr + sample * channels + c, c < channels, 0.0)
            z *= scale.to(dtype)[:, None]
        if second_ptr is not None:
            second = tl.load(second_ptr + place, inside, 0.0).to(dtype)
            scale_total += h * second
        if second_scale_ptr is not None:
            scale = tl.load(second_scale_ptr + sample * channels + c, c < channels, 0.0)
            z += second * scale.to(dtype)[:, None]
        if bias_ptr is not None:
            z += tl.load(bias_ptr + c, c < channels, 0.0).to(dtype)[:, None]
        if noise_ptr is not None:
            noise = tl.load(noise_ptr + sample * noise_stride + p, p < pixels, 0.0)
            z += noise.to(dtype)[None, :]
        if noise_sums_ptr is not None:
            target = noise_sums_ptr + (part * samples + sample) * pixels + p
            tl.store(target, tl.reduce(h, 0, _add), p < pixels)
        bias_total += h
        if y_ptr is not None:
            z = _derivative(z, y, slope, limit)
        else:
            z = tl.where(z > 0, z, z * slope)
            if limit is not None:  # the comparisons keep a NaN
                z = tl.where(z > limit, limit, tl.where(z < -limit, -limit, z))
        tl.store(out_ptr + place, z.to(out_ptr.dtype.element_ty), inside)
    target = (chunk * samples + sample) * channels + c
    if scale_sums_ptr is not None:
        tl.store(scale_sums_ptr + target, tl.reduce(scale_total, 1, _add), c < channels)
    if bias_sums_ptr is not None:
        tl.store(bias_sums_ptr + target, tl.reduce(bias_total, 1, _add), c < channels)


def activation(
    x: Tensor | None,
    scale: Tensor | None,
    bias: Tensor | None,
    noise: Tensor | None,
    limit: float | None,
    *,
    out: Tensor | None = None,
    second: Tensor | None = None,
    second_scale: Tensor | None = None,
    y: Tensor | None = None,
    sums: tuple[bool, ...] = (False, False, False),
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
    """Return clamp(leaky_relu(x * scale + bias + noise)), and three gradients or None (`sums`).

    The comment in `_activation` defines the results with the optional arguments.

    Args:
        x: [N, C, H, W]. None leaves the term out; so does None for each of the other tensors.
        scale: [N, C, 1, 1].
        bias: [C].
        noise: [N or 1, 1, H, W].
        limit: Largest absolute value of the output; None: no limit.
        out: `x`, to overwrite it if it is dense.
        second: [N, C, H, W].
        second_scale: [N, C, 1, 1].
        y: Output [N, C, H, W] of an activation. If given, multiply by the derivative of that
            activation instead of applying an activation.
        sums: Three flags: True to return the gradient for the scale of `second`, for the bias, and
            for the noise.
    """
    image = x if y is None else y
    assert image is not None
    layout = _memory_format(image)
    images = [t if t is None else t.contiguous(memory_format=layout) for t in (x, second, y)]
    if out is None or images[0] is not out:
        out = torch.empty_like(image, memory_format=layout)
    n, channels, height, width = out.shape
    pixels = height * width
    small = [t if t is None else t.contiguous() for t in (scale, second_scale, bias, noise)]
    strides = (1, channels) if layout == torch.channels_last else (pixels, 1)
    p_block = min(triton.next_power_of_2(max(1, pixels)), TILE // 2)
    c_block = min(triton.next_power_of_2(max(1, channels)), TILE // 16)
    if layout == torch.channels_last:
        p_block = min(p_block, TILE // c_block)
    else:
        c_block = min(c_block, TILE // p_block)
    tiles = min(TILES, triton.cdiv(pixels, p_block))
    parts = triton.cdiv(channels, c_block)
    chunks = triton.cdiv(pixels, max(1, tiles) * p_block)
    dtype = torch.promote_types(out.dtype, torch.float32)
    shapes = ((chunks, n, channels), (chunks, n, channels), (parts, n, 1, height, width))
    totals = [
        out.new_empty(shape, dtype=dtype) if is_needed else None
        for shape, is_needed in zip(shapes, sums, strict=True)
    ]
    if n * parts * chunks:
        noise_stride = pixels if noise is not None and len(noise) > 1 else 0
        sizes = (n, channels, pixels, *strides, noise_stride)
        with torch.cuda.device_of(out):
            _activation[(n * parts * chunks,)](
                out,
                *images,
                *small,
                *totals,
                *sizes,
                LEAKY_SLOPE,
                limit,
                tiles,
                c_block,
                p_block,
                enable_fp_fusion=True,
            )
    scale_sums, bias_sums, noise_sums = totals
    return (
        out,
        None if scale_sums is None else scale_sums.sum(0)[:, :, None, None],
        None if bias_sums is None else bias_sums.sum((0, 1)),
        None if noise_sums is None else noise_sums.sum(0),
    )
