"""Read weights files, without running code in them, and load them into classifiers.

A file's network may differ from the classifier only in the head, and in the size and channels of
the first convolution.
"""

import argparse
import contextlib
import functools
import hashlib
import json
import os
import re
import sys
import urllib.request
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

import torch
import torch.nn.functional as F
from torch import Tensor

from duetgan.models.by_class import class_parts, copy_by_name, describe_match
from duetgan.models.classifier import Classifier, ModelConfig
from duetgan.models.registry import BACKBONES, backbone_of
from duetgan.models.restore import inherited_lineage, read_tensors
from duetgan.utils import checkpoint as checkpoints
from duetgan.utils import files
from duetgan.utils.checkpoint.provenance import Lineage
from duetgan.utils.checkpoint.state_schema import check_tensors
from duetgan.utils.config.build import build
from duetgan.utils.config.yaml_files import Tree, near_file
from duetgan.utils.distributed import collectives
from duetgan.utils.errors import UserError, explained
from duetgan.utils.files import downloading
from duetgan.utils.text import did_you_mean

OPTION = "model.weights"
# Keys of the state dict in files of other programs. The averages come first, as they are preferred.
WRAPPERS = (
    "state_dict_ema",
    "model_ema",
    "state_dict",
    "model_state_dict",
    "model",
    "net",
    "network",
)
SUFFIXES = (".safetensors", ".pth", ".pt", ".pth.tar", ".bin", ".ckpt")

TIMEOUT = 10.0  # seconds until a server must answer

State = dict[str, Tensor]


def read_state_dict(path: Path, *, option: str = "--weights") -> tuple[State, dict[str, str]]:
    """Return a file's state dict on the CPU and its metadata, without running code in the file.

    The file is a `.safetensors` file, a checkpoint of Duet, or a file of names and tensors that
    `torch.save` wrote (also under Python 2). Wrappers of other programs and the prefixes of
    DataParallel (`module.`) and torch.compile (`_orig_mod.`) are removed. The metadata are the
    entries of a safetensors file, and for Duet's files also `stride` and `normalise`
    (`_build_metadata`). For Duet's checkpoints they include `classes` and `duet`, which holds the
    lineage.

    Args:
        option: The file's command-line option, for messages.

    Raises:
        UserError: The file is missing, damaged, or holds anything but names and tensors.
    """
    remedy = f"fetch the file again, or give another with {option}"
    if not path.is_file():
        raise UserError(f"{option} {path}: no such file{near_file(path)}")
    if path.suffix == ".safetensors":
        state, metadata = read_tensors(path, remedy)
        # `lineage_of` reports damaged metadata.
        with contextlib.suppress(ValueError, LookupError, TypeError, RecursionError):
            metadata |= _build_metadata(json.loads(metadata["duet"])["config"]["model"], path)
        return _plain_names(state), metadata
    content = read_plain(path, remedy)
    if isinstance(content, dict) and all(key in content for key in checkpoints.KEYS):
        return _read_checkpoint(path, content)
    state = _unwrapped(content)
    if not state:
        raise UserError(f"{path} is not a plain state dict (name -> tensor); {remedy}")
    return _plain_names(state), {}


def read_plain(path: Path, remedy: str) -> Any:
    """Return the content of a torch.save file (names, tensors, numbers) without running code in it.

    Raises UserError, with the advice `remedy`, for a file that is missing, too large or damaged, or
    has other content.
    """
    with files.reading(path, remedy):
        files.check(path, files.WEIGHTS)
    # torch's message is replaced because it advises to read the file unsafely.
    message = (
        f"{path} is damaged or not a plain state dict (names and tensors, as "
        f"torch.save(model.state_dict(), FILE) writes it); {remedy}"
    )
    # torch's reader and unpickler raise a dozen kinds of exceptions.
    refused = explained(Exception, message)
    # Names written by Python 2 need latin1, of which torch warns. A Namespace only holds values,
    # and torchvision's training scripts write one into their checkpoints.
    with refused, warnings.catch_warnings(), torch.serialization.safe_globals([argparse.Namespace]):
        warnings.filterwarnings("ignore", message="pickle_load_args only works")
        return torch.load(path, map_location="cpu", weights_only=True, encoding="latin1")


def _build_metadata(model: Tree, path: Path) -> dict[str, str]:
    """Return the metadata `stride` and `normalise`, which the shapes of weights do not show.

    `model` is the config of the Duet classifier in the file `path`.
    """
    config = build(ModelConfig, model, source=f"{path}: its model")
    normalise = "imagenet" if config.imagenet_normalised else "symmetric"
    return {"stride": "conv1" if config.he_strides else "conv2", "normalise": normalise}


@functools.cache  # training checks its config several times
def trained_symmetric(weights: str) -> bool:
    """Return True if the file or run `weights` is a Duet classifier that takes images in [-1, 1].

    Returns False if it cannot be read.
    """
    try:
        return read_state_dict(checkpoints.resolve(weights))[1].get("normalise") == "symmetric"
    except UserError:
        return False


def _read_checkpoint(path: Path, content: checkpoints.Checkpoint) -> tuple[State, dict[str, str]]:
    """Return the state dict and the metadata of the EMA classifier in a checkpoint of Duet.

    The file's checksum is verified.
    """
    if content["task"] != "classifier":
        raise UserError(
            f"{path}: is a checkpoint of task {content['task']!r}; give one of a classifier"
        )
    content = checkpoints.load(path)
    with explained(ValueError, lambda error: f"{path}: {error}; give another checkpoint"):
        check_tensors("state.model_ema", content["state"].get("model_ema"))
    metadata = _build_metadata(content["config"].get("model", {}), path)
    # This entry is the same as in export.py's files.
    metadata["duet"] = json.dumps({"lineage": inherited_lineage(content).document()})
    metadata["classes"] = json.dumps(content["classes"])
    return _plain_names(content["state"]["model_ema"]), metadata


def _unwrapped(content: object) -> State:
    """Return the state dict in the content of another program's file, whose dicts may be nested.

    Returns an empty dict if there is none.
    """
    while isinstance(content, dict) and content:
        if all(_is_named_tensor(key, value) for key, value in content.items()):
            return content
        content = next(
            (content[key] for key in WRAPPERS if isinstance(content.get(key), dict)), None
        )
    return {}


def _is_named_tensor(key: object, value: object) -> bool:
    """Return True if `key` is a text and `value` a tensor with values, neither sparse nor meta."""
    return (
        isinstance(key, str)
        and isinstance(value, Tensor)
        and value.layout == torch.strided
        and not value.is_meta
    )


def _plain_names(state: Mapping[str, Tensor]) -> State:
    """Return `state` with the backbone's names, without the prefixes and entries of wrappers."""
    plain = {
        re.sub(r"^(module\.)+", "", name.replace("_orig_mod.", "")): value
        for name, value in state.items()
    }
    plain.pop("n_averaged", None)  # of torch's AveragedModel
    for name in ("thresholds", "temperature"):  # of Duet's classifiers, not of their backbones
        plain.pop(name, None)
    for prefix in ("network.", "model.", "net."):
        if plain and all(name.startswith(prefix) for name in plain):
            plain = {name.removeprefix(prefix): tensor for name, tensor in plain.items()}
    return plain


# --- finding and downloading files


def find_weights(weights: str, name: str, *, option: str = OPTION) -> Path:
    """Return the path of the file that `weights`, a value of the key `model.weights`, names.

    `weights` is a file, a run folder (its last checkpoint is used), or the name of published
    weights of the network `name`, which are downloaded once. A text with a "/" or a suffix of
    weights files counts as a file, even if it does not exist. Raises UserError, which names the
    `option`, for an unknown name or a failed download.
    """
    path = Path(weights)
    if path.is_dir():
        return checkpoints.resolve(path)
    if path.is_file() or weights.lower().endswith(SUFFIXES) or "/" in weights:
        return path
    members = backbone_of(name).published(name)
    if weights not in members:
        hint = did_you_mean(weights, list(members)) or near_file(path)
        names = f"{name} has {', '.join(members)}, or " if members else ""
        raise UserError(f"{option} {weights!r}: no such file{hint}; {names}give a file")
    return Path(
        collectives.from_main_process(lambda: _download(members[weights], f"{option} {weights}"))
    )


def cached_weights(name: str) -> Path | None:
    """Return the path of the newest published weights of the network `name` in torch's cache.

    Returns None if the cache has none.
    """
    cached = [_cache_path(url) for url in reversed(backbone_of(name).published(name).values())]
    return next((path for path in cached if path.is_file()), None)


def _cache_path(url: str) -> Path:
    path = Path(urlparse(url).path)
    # timm's files are all called model, so the name of their folder is used.
    name = path.name if path.stem != "model" else f"{path.parts[2]}{path.suffix}"
    return Path(torch.hub.get_dir()) / "checkpoints" / name


def missing_published(url: str, subject: str) -> str:
    """Fetch a published file into torch's cache; on failure return an error message with a remedy.

    Returns an empty string if the file is then in the cache. `subject` names the file in messages.
    All ranks must call this function.
    """

    def fetch() -> str:
        try:
            _download(url, subject)
        except UserError as error:
            return str(error)
        return ""

    return collectives.from_main_process(fetch)


def _download(url: str, subject: str) -> str:
    """Download `url` into torch's cache, if it is missing there, and return its path in the cache.

    If the name of the file contains a hash, the download must have this hash. A line on stderr
    tells its size and folder; `subject` names the file there and in errors. Raises UserError if the
    download fails or the environment variable DUET_OFFLINE forbids it.
    """
    path = _cache_path(url)
    remedy = f"fetch {url} on a machine with a network and put it there"
    if not path.is_file():
        with downloading(f"{subject}: is not at {path}", remedy):
            if os.environ.get("DUET_OFFLINE"):
                raise OSError("DUET_OFFLINE is set")
            request = urllib.request.Request(url, method="HEAD")
            with urllib.request.urlopen(request, timeout=TIMEOUT) as answer:
                size = int(answer.headers.get("Content-Length") or 0) / 1e6
            print(
                f"downloading {subject} ({size:,.0f} MB) into {path.parent}",
                file=sys.stderr,
                flush=True,
            )
            path.parent.mkdir(parents=True, exist_ok=True)
            match = torch.hub.HASH_REGEX.search(path.name)
            prefix = match[1] if match else None
            torch.hub.download_url_to_file(url, str(path), prefix, progress=False)
    return str(path)


# --- loading weights into a classifier


def load_pretrained(model: Classifier, classes: Sequence[str] | None) -> str:
    """Copy the weights that `model.config.weights` names into `model`.

    The first convolution is adapted to the classifier's channels and stem. The head is copied by
    class name if the class names of the file and of the classifier are known; otherwise it is
    copied by index if its shape is the same. A head that cannot be copied keeps its initial
    weights.

    Args:
        classes: Names of the classifier's classes.

    Returns:
        A message about the weights that were copied; empty if the config names none.

    Raises:
        UserError: The file is missing, unreadable, or holds another network. `model` is unchanged.
    """
    config = model.config
    if config.weights is None:
        return ""
    path = find_weights(config.weights, config.name)
    state, metadata = read_state_dict(path, option=f"--{OPTION}")
    check_same_build(path, metadata, config)
    expected = model.network.state_dict()
    head = _head_shapes(model, expected)
    file_head = _head_shapes(model, state)
    copied = len(expected)
    notes = ["head taken"]
    file_classes = _class_names(metadata)
    if classes and not file_classes:
        notes = ["head taken by number, because the file names no classes"]
    elif classes:
        match = describe_match(classes, file_classes)
        if match:
            notes = [f"head: {match}"]
        for name, part in class_parts(model).items():
            key = name.removeprefix("network.")
            if key in state:
                state[key] = copy_by_name(expected[key], state[key], part, classes, file_classes)
        file_head = {name: state[name].shape for name in file_head}
    if head != file_head:
        copied -= len(head)
        notes = ["head new"]
        state = {name: value for name, value in state.items() if name not in file_head}
        state |= {name: expected[name] for name in head}
    first = f"{model.backbone.first}.weight"
    if (
        first in state
        and state[first].ndim == 4
        and state[first].numel()
        and state[first].is_floating_point()
    ):
        state[first], changes = fit_first(state[first], expected[first], alpha=model.spec.alpha)
        notes += changes
    lineage = lineage_of(path, metadata)
    model.network.load_state_dict(fit_state(state, expected, path, config.name))
    model.lineage = lineage
    return f"weights from {path}: {copied} of {len(expected)} tensors; {', '.join(notes)}"


def _head_shapes(model: Classifier, state: Mapping[str, Tensor]) -> dict[str, torch.Size]:
    prefix = f"{model.backbone.head}."
    return {name: value.shape for name, value in state.items() if name.startswith(prefix)}


def _class_names(metadata: Mapping[str, str]) -> list[str]:
    """Return the class names in a file's metadata; empty for files of other programs."""
    try:
        names = json.loads(metadata.get("classes", "[]"))
    except (ValueError, RecursionError):
        return []
    return names if isinstance(names, list) and all(isinstance(name, str) for name in names) else []


def lineage_of(path: Path, metadata: Mapping[str, str]) -> Lineage:
    """Return the lineage of a file's weights, i.e. the data and networks from which they learnt.

    Duet's checkpoints and exports have it in their metadata. For another file, it consists of the
    hash of the file. Raises UserError for damaged metadata.
    """
    faults = (ValueError, AttributeError, RecursionError)
    with files.reading(f"{path}: its metadata", "export it again", *faults):
        lineage = json.loads(metadata.get("duet", "{}")).get("lineage")
        if lineage:
            return Lineage.read(lineage, "lineage")
    return Lineage.of(pretrained=[file_hash(path)])


def file_hash(path: Path) -> str:
    """Return the short hash that identifies a weights file."""
    return f"sha256:{hashlib.sha256(files.read_file(path, files.WEIGHTS)).hexdigest()[:12]}"


def check_same_build(path: Path, metadata: Mapping[str, str], config: ModelConfig) -> None:
    """Raise UserError if a file's metadata and `config` differ in strides or input normalisation.

    The shapes of the weights do not show these differences.
    """
    stride = metadata.get("stride")
    if stride is not None and stride.startswith("conv1") != config.he_strides:
        raise UserError(
            f"{path}: its network has the stride of 2 in {stride.split()[0]} of each stage's first "
            f"block; set --model.he-strides {str(not config.he_strides).lower()}"
        )
    normalise = metadata.get("normalise")
    if normalise not in ("symmetric", "imagenet"):
        return
    if (normalise == "imagenet") != config.imagenet_normalised:
        raise UserError(
            f"{path}: its network was trained on images normalised {normalise}; set "
            f"--model.normalise {normalise}"
        )


def fit_first(filters: Tensor, target: Tensor, *, alpha: bool) -> tuple[Tensor, list[str]]:
    """Adapt the filters of the first convolution to other channels and to a smaller kernel.

    Filters that fit already are returned unchanged. For grey images the filters are summed over the
    channels, so that a grey image gives the same outputs as its RGB version. For other numbers of
    channels the filters are repeated and scaled, so that an image with equal channels gives the
    same outputs (timm's `adapt_input_conv`). For a smaller kernel, the centre of the filters is
    taken.

    Args:
        filters: [O, C, k, k].
        target: Filters of the new shape.
        alpha: True if the last channel is alpha. Filters for an added alpha channel are zero, so
            that an opaque image gives the outputs of its colours.

    Returns:
        The new filters, and messages about the changes.

    Raises:
        UserError: The filters have no centre of the smaller size.
    """
    changes: list[str] = []
    channels = filters.shape[1]
    new_channels = target.shape[1]
    if channels != new_channels:
        filters = filters.to(target.dtype)
        colours = new_channels - alpha
        repeated = filters[:, torch.arange(colours) % channels] * (channels / colours)
        filters = filters.sum(dim=1, keepdim=True) if colours == 1 else repeated
        filters = F.pad(filters, (0, 0, 0, 0, 0, int(alpha)))
        changes.append(f"first filters from {channels} to {new_channels} channels")
    size = target.shape[-1]
    excess = filters.shape[-1] - size
    if excess > 0 and excess % 2:
        raise UserError(
            f"model.stem: filters of {filters.shape[-1]}x{filters.shape[-1]} have no centre of "
            f"{size} px; set --model.stem imagenet, with --model.input-size for small images"
        )
    if excess > 0:
        margin = excess // 2
        filters = filters[..., margin:-margin, margin:-margin]
        changes.append(
            f"first filters' middle {size}x{size} taken (model.stem imagenet with model.input_size "
            "keeps them whole)"
        )
    return filters, changes


def fit_state(
    state: Mapping[str, Tensor],
    expected: Mapping[str, Tensor],
    path: Path,
    name: str,
    *,
    option: str = f"--{OPTION}",
) -> State:
    """Check names, shapes and values of `state`, and return it in the dtypes of `expected`.

    BatchNorm's counters of batches, which old files lack, are added.

    Args:
        state: The file's state dict.
        expected: A state dict of the network, possibly on the meta device.
        path, name, option: The file, network and command-line option, for messages.

    Raises:
        UserError: A name or shape differs, or a value is not finite. The message names the first
            such tensor, the number of matching ones, and the file's network if it is clear.
    """
    counters = {key: torch.tensor(0) for key in expected if key.endswith("num_batches_tracked")}
    state = {**counters, **state}
    tensors = {key: value.shape for key, value in expected.items() if value.ndim}
    match = sum(key in state and state[key].shape == shape for key, shape in tensors.items())
    for key in sorted(expected.keys() | state.keys()):
        shape = list(state[key].shape) if key in state else "absent"
        expected_shape = list(expected[key].shape) if key in expected else "absent"
        if shape != expected_shape:
            file_network = network_of(state)
            remedy = f"give a whole {name}'s weights file with {option}"
            if file_network is None:
                remedy = f"give a {name}'s weights file, by its own names"
            elif file_network != name:
                remedy = (
                    f"the file is a {file_network}'s: set --model.name {file_network}, or give a "
                    f"{name}'s"
                )
            raise UserError(
                f"{path}: {key} is {shape}, {name} has it {expected_shape}; {remedy} ({match} of "
                f"{len(tensors)} tensors match)"
            )
        if state[key].is_floating_point() != expected[key].is_floating_point():
            raise UserError(
                f"{path}: {key} holds {state[key].dtype}, not {expected[key].dtype}; give "
                "unquantised weights"
            )
        if not torch.isfinite(state[key]).all():
            raise UserError(f"{path}: {key} holds numbers that are not finite; give another file")
    return {key: state[key].to(expected[key].dtype) for key in expected}


def network_of(state: Mapping[str, Tensor]) -> str | None:
    """Return the name of the network whose tensors have the names and shapes of `state`, or None.

    The first layer and the head are not compared.
    """
    return next((name for name, fraction in similar_networks(state) if fraction == 1), None)


def similar_networks(state: Mapping[str, Tensor]) -> Iterator[tuple[str, float]]:
    """Yield (name, similarity) of the networks whose first layer's name is also in `state`.

    The similarity is the fraction of tensors, 0 to 1, whose names and shapes are equal. The first
    layer and the head are not compared.
    """
    for name, backbone in BACKBONES.items():
        if f"{backbone.first}.weight" not in state:
            continue
        try:
            with torch.device("meta"):
                network = backbone.build(name)
        except NotImplementedError:  # a network that computes while it is built
            continue
        ends = (f"{backbone.first}.", f"{backbone.head}.")  # a config may change these layers
        shapes = _inner_shapes(network.state_dict(), ends)
        file_shapes = _inner_shapes(state, ends)
        matching = len(shapes.items() & file_shapes.items())
        yield name, matching / len(shapes.keys() | file_shapes.keys())


def _inner_shapes(state: Mapping[str, Tensor], ends: tuple[str, ...]) -> dict[str, torch.Size]:
    return {
        key: value.shape for key, value in state.items() if not key.startswith(ends) and value.ndim
    }
