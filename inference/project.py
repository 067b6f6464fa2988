"""An image file into the generator's latents: read it, search, write images and latents."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from safetensors.torch import save
from torch import Tensor
from tqdm import tqdm

from data.images import ImageError
from inference.image_files import read_image
from inference.perceptual import Distance, build_features
from inference.projection import Projection, ProjectionConfig, Projector, Space
from inference.samples import Sampler, with_styles
from metrics.precision import exact_float32
from utils.errors import UserError
from utils.files import write_atomic
from utils.image_tables import save_table

SPACES: dict[str, tuple[Space, ...]] = {"w": ("w",), "w+": ("w+",), "both": ("w", "w+")}
SAVED = ".safetensors"
CELL = 192  # px that smaller images are enlarged to


def read_target(path: Path, checkpoint: dict[str, Any], *, resize: Literal["crop", "pad"] | None = None) -> Tensor:
    """An image file as the generator's training images were made: uint8 [1, C, H, H].

    Raises UserError if it cannot be read.
    """
    try:
        return read_image(path, checkpoint, resize=resize)[None]
    except ImageError as error:
        raise UserError(f"--image {path}: {error}; give another image") from error


def project(
    sampler: Sampler,
    names: Sequence[str],
    target: Tensor,  # uint8 [1, C, H, H]
    out: Path,
    config: ProjectionConfig,
    *,
    space: str = "both",  # one of SPACES; w+ starts where w ended if both are searched
    features: str = "resnet50",  # one of FEATURES
    weights: str | Path | None = None,  # of the features
    save_to: Path | None = None,  # a .safetensors file for what was found
) -> list[str]:
    """Write a PNG: the target, then what was found, with its distances; returns lines that say the same.

    Of several chosen classes the one whose mean image looks most like the target is where the search starts. Raises
    UserError for a generator without w, and for missing weights.
    """
    generator = with_styles(sampler.generator, "project")
    if features == "pixels" and config.pixel_weight == 0:
        raise UserError("--pixel-weight 0 with --features pixels leaves nothing to compare; leave one of them out")
    network = build_features(features, weights, sampler.device)
    wanted = target.to(sampler.device, generator.w_avg.dtype) / 127.5 - 1
    with exact_float32(sampler.device):
        distance = Distance(wanted, features=network, pixel_weight=config.pixel_weight)
    projector = Projector(generator, distance, config, seed=sampler.seed)
    start = projector.start(sampler.chosen)
    found: dict[str, Projection] = {}
    with tqdm(total=config.steps * len(SPACES[space]), desc="projecting", unit="step", disable=None) as bar:
        for name in SPACES[space]:
            before = next(reversed(found.values()), start)
            found[name] = projector.search(name, before, refine=bool(found), tick=bar.update)
    label = "" if projector.label is None else names[projector.label]
    _save_images(target, found, out)
    if save_to is not None:
        write_atomic(save_to, _latents(found, {"class": label, "seed": sampler.seed, "steps": config.steps}))
    where = f"start ({label})" if label else "start"
    return [f"{name}: {', '.join(result.distances)}" for name, result in {where: start, **found}.items()]


def _save_images(target: Tensor, found: dict[str, Projection], out: Path) -> None:
    heads = ["target", *("\n".join([name, *result.distances]) for name, result in found.items())]
    row = [target[0], *(result.image for result in found.values())]
    save_table([row], out, row_heads=[""], column_heads=heads, cell=CELL)


def _latents(found: dict[str, Projection], about: dict[str, Any]) -> bytes:
    """A safetensors file: `w` [w_dim], `w+` [num_ws, w_dim], the searched noise as `NAME.noise.LAYER` [1, 1, h, w].

    Its metadata is one JSON text, `projection`: several entries would come in another order every time.
    """
    tensors = {name: result.ws[0] if name == "w" else result.ws for name, result in found.items()}
    for name, result in found.items():
        if not isinstance(result.noise, str):
            tensors |= {f"{name}.noise.{layer}": level for layer, level in enumerate(result.noise)}
    about = {**about, "rmse": {name: result.rmse for name, result in found.items()}}
    plain = {key: value.detach().cpu().contiguous() for key, value in tensors.items()}
    return save(plain, metadata={"projection": json.dumps(about)})
