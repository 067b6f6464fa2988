"""Weights files, read without running anything in them, and fitted into our networks: only the head
may differ.
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
from safetensors import SafetensorError, safe_open
from torch import Tensor

from duetgan.models.by_class import class_parts, copy_by_name, matched
from duetgan.models.classifier import Classifier, ModelConfig
from duetgan.models.registry import BACKBONES, backbone_of
from duetgan.utils import bounded
from duetgan.utils import checkpoint as checkpoints
from duetgan.utils.checkpoint.state_schema import check_tensors
from duetgan.utils.config.build import build
from duetgan.utils.config.yaml_files import near_file
from duetgan.utils.distributed import collectives
from duetgan.utils.errors import UserError, explained
from duetgan.utils.files import downloading
from duetgan.utils.provenance import Lineage
from duetgan.utils.text import did_you_mean

OPTION = "model.weights"
# under which other programs keep the state dict, the average first: it is the network to use
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

ANSWER = 10.0  # seconds in which a server has to answer

State = dict[str, Tensor]


def read_state_dict(path: Path, *, option: str = "--weights") -> tuple[State, dict[str, str]]:
    """State dict on the CPU and what the file says of its network, by restricted unpickling: of
    `.safetensors`, of what `torch.save` wrote of names and tensors (Python 2's, too), and of our
    own checkpoints.

    Wrappers of other programs and the prefixes of DataParallel (`module.`) and torch.compile
    (`_orig_mod.`) are taken off. The second part is a safetensors file's metadata, or of our own
    checkpoints `stride`, `normalise` and, with the `lineage`, `duet`.

    Raises:
        UserError: the file is missing, damaged, or holds anything but names and tensors; `option`
            is in the remedy.
    """
    remedy = f"fetch the file again, or give another with {option}"
    if not path.is_file():
        raise UserError(f"{option} {path}: no such file{near_file(path)}")
    if path.suffix == ".safetensors":
        state, about = read_tensors(path, remedy)
        # `lineage_of` tells of damage
        with contextlib.suppress(ValueError, LookupError, TypeError, RecursionError):
            about |= _built(json.loads(about["duet"])["config"]["model"], path)
        return _plain_names(state), about
    content = read_plain(path, remedy)
    if isinstance(content, dict) and all(key in content for key in checkpoints.KEYS):
        return _ours(path, content)
    state = _unwrapped(content)
    if not state:
        raise UserError(f"{path} is not a plain state dict (name -> tensor); {remedy}")
    return _plain_names(state), {}


def read_tensors(path: Path, remedy: str) -> tuple[State, dict[str, str]]:
    """The tensors of a `.safetensors` file, on the CPU, and its metadata. Raises UserError as
    `read_plain`.
    """
    with bounded.reading(path, remedy, SafetensorError):
        bounded.check(path, bounded.WEIGHTS)
        with safe_open(str(path), framework="pt") as file:
            return {key: file.get_tensor(key) for key in file.keys()}, file.metadata() or {}  # noqa: SIM118


def read_plain(path: Path, remedy: str) -> Any:
    """What torch.save wrote of names, tensors and numbers; nothing in the file is run.

    Raises UserError for a file that is missing, too large, damaged, or holds more than that.
    """
    with bounded.reading(path, remedy):
        bounded.check(path, bounded.WEIGHTS)
    bounded.refuse_page(path)
    # torch's own message advises to read the file unsafely, so it is not passed on
    words = (
        "is damaged or not a plain state dict (names and tensors, as "
        "torch.save(model.state_dict(), FILE) writes it)"
    )
    # torch's reader and unpickler raise a dozen kinds
    refused = explained(Exception, f"{path} {words}; {remedy}")
    # latin1: names that Python 2 wrote; torch warns of it and does it. A Namespace only holds
    # values, and torchvision's own training writes one into its checkpoints
    with refused, warnings.catch_warnings(), torch.serialization.safe_globals([argparse.Namespace]):
        warnings.filterwarnings("ignore", message="pickle_load_args only works")
        return torch.load(path, map_location="cpu", weights_only=True, encoding="latin1")


def _built(model: dict[str, Any], path: Path) -> dict[str, str]:
    """What no shape shows of a network of ours."""
    config = build(ModelConfig, model, source=f"{path}: its model")
    normalise = "imagenet" if config.imagenet_normalised else "symmetric"
    return {"stride": "conv1" if config.he_strides else "conv2", "normalise": normalise}


@functools.cache  # a start checks its config several times
def trained_symmetric(weights: str) -> bool:
    """Whether `model.weights` names a classifier of ours whose images were in [-1, 1]; False where
    it is unreadable.
    """
    try:
        return read_state_dict(checkpoints.resolve(weights))[1].get("normalise") == "symmetric"
    except UserError:
        return False


def _ours(path: Path, content: dict[str, Any]) -> tuple[State, dict[str, str]]:
    """The averaged classifier of our own checkpoint, whose checksum is verified."""
    if content["task"] != "classifier":
        raise UserError(
            f"{path}: is a checkpoint of task {content['task']!r}; give one of a classifier"
        )
    content = checkpoints.load(path)
    with explained(ValueError, lambda why: f"{path}: {why}; give another checkpoint"):
        check_tensors("state.model_ema", content["state"].get("model_ema"))
    about = _built(content["config"].get("model", {}), path)
    from duetgan.models.restore import passed_on  # which reads weights by this module

    about["duet"] = json.dumps({"lineage": passed_on(content).document()})  # as an export has it
    about["classes"] = json.dumps(content["classes"])
    return _plain_names(content["state"]["model_ema"]), about


def _unwrapped(content: Any) -> State:
    """The innermost state dict; empty where there is none."""
    while isinstance(content, dict) and content:
        tensors = [
            value
            for key, value in content.items()
            if isinstance(key, str) and isinstance(value, Tensor)
        ]
        # with numbers in them: neither sparse nor of the meta device
        if len(content) == sum(
            tensor.layout == torch.strided and not tensor.is_meta for tensor in tensors
        ):
            return content
        content = next(
            (content[key] for key in WRAPPERS if isinstance(content.get(key), dict)), None
        )
    return {}


def _plain_names(state: Mapping[str, Tensor]) -> State:
    """`state` by the network's own names, without what averaging and wrapping added."""
    plain = {
        re.sub(r"^(module\.)+", "", name.replace("_orig_mod.", "")): value
        for name, value in state.items()
    }
    plain.pop("n_averaged", None)  # of torch's AveragedModel
    plain.pop("thresholds", None)  # of a classifier's own labels
    for prefix in ("network.", "model.", "net."):
        if plain and all(name.startswith(prefix) for name in plain):
            plain = {name.removeprefix(prefix): tensor for name, tensor in plain.items()}
    return plain


# --- where they are


def find_weights(weights: str, name: str, *, option: str = OPTION) -> Path:
    """The file that `model.weights` means for the network `name`: a file, a run folder's last
    checkpoint, or a member of torchvision's enum, which is downloaded once.

    Raises UserError when there is none, and without a network.
    """
    path = Path(weights)
    if path.is_dir():
        return checkpoints.resolve(path)
    if path.is_file() or weights.lower().endswith(SUFFIXES) or "/" in weights:
        return path
    members = backbone_of(name).published(name)
    if weights not in members:
        near = did_you_mean(weights, list(members)) or near_file(path)
        names = f"{name} has {', '.join(members)}, or " if members else ""
        raise UserError(f"{option} {weights!r}: no such file{near}; {names}give a file")
    return Path(
        collectives.from_main_process(lambda: _download(members[weights], f"{option} {weights}"))
    )


def published_at_hand(name: str) -> Path | None:
    """A published file of the network `name` that was downloaded before, torchvision's latest
    first.
    """
    cached = [_in_cache(url) for url in reversed(backbone_of(name).published(name).values())]
    return next((path for path in cached if path.is_file()), None)


def _in_cache(url: str) -> Path:
    place = Path(urlparse(url).path)
    # timm's are named by the folder
    name = place.name if place.stem != "model" else f"{place.parts[2]}{place.suffix}"
    return Path(torch.hub.get_dir()) / "checkpoints" / name


def missing_published(url: str, what: str) -> str:
    """Return why the published file of `url` cannot be had, with the remedy; empty if it is in
    torch's cache now.

    All ranks must call this.
    """

    def fetch() -> str:
        try:
            _download(url, what)
        except UserError as error:
            return str(error)
        return ""

    return collectives.from_main_process(fetch)


def _download(url: str, what: str) -> str:
    """Return the file of `url` in torch's cache; fetch it if it is not there and check the hash in
    its name.

    Says in one line how large it is and where it goes. With the variable DUET_OFFLINE set no
    network is tried.
    """
    path = _in_cache(url)
    remedy = f"fetch {url} on a machine with a network and put it there"
    if not path.is_file():
        with downloading(f"{what}: is not at {path}", remedy):
            if os.environ.get("DUET_OFFLINE"):
                raise OSError("DUET_OFFLINE is set")
            with urllib.request.urlopen(
                urllib.request.Request(url, method="HEAD"), timeout=ANSWER
            ) as answer:
                size = int(answer.headers.get("Content-Length") or 0) / 1e6
            print(
                f"downloading {what} ({size:,.0f} MB) into {path.parent}",
                file=sys.stderr,
                flush=True,
            )
            path.parent.mkdir(parents=True, exist_ok=True)
            hashed = torch.hub.HASH_REGEX.search(path.name)
            torch.hub.download_url_to_file(
                url, str(path), hashed[1] if hashed else None, progress=False
            )
    return str(path)


# --- how they fit


def load_pretrained(model: Classifier, classes: Sequence[str] | None = None) -> str:
    """Copy the weights that `model.config.weights` names into `model`; returns what was taken, for
    a person.

    The first convolution is fitted to the channels and the stem, the head is left new where it does
    not fit. Where both lists of class names are known, of `model` (`classes`) and of the file, the
    head's rows are matched by name.

    Raises UserError when the file cannot be had or read, or holds another network; then nothing is
    changed.
    """
    config = model.config
    if config.weights is None:
        return ""
    path = find_weights(config.weights, config.name)
    state, about = read_state_dict(path, option=f"--{OPTION}")
    check_built_alike(path, about, config)
    expected = model.network.state_dict()
    head, theirs = (
        {
            name: value.shape
            for name, value in one.items()
            if name.startswith(f"{model.backbone.head}.")
        }
        for one in (expected, state)
    )
    taken, words = len(expected), ["head taken"]
    theirs_by_name = _class_names(about)
    if classes and theirs_by_name:
        if said := matched(classes, theirs_by_name):
            words = [f"head: {said}"]
        for name, part in class_parts(model).items():
            if (key := name.removeprefix("network.")) in state:
                state[key] = copy_by_name(expected[key], state[key], part, classes, theirs_by_name)
        theirs = {name: state[name].shape for name in theirs}
    if head != theirs:
        taken, words = taken - len(head), ["head new"]
        state = {name: value for name, value in state.items() if name not in theirs}
        state |= {name: expected[name] for name in head}
    first = f"{model.backbone.first}.weight"
    if (
        first in state
        and state[first].ndim == 4
        and state[first].numel()
        and state[first].is_floating_point()
    ):
        state[first], notes = fit_first(state[first], expected[first], alpha=model.spec.alpha)
        words += notes
    lineage = lineage_of(path, about)
    model.network.load_state_dict(fitted(state, expected, path, config.name))
    model.lineage = lineage
    return f"weights from {path}: {taken} of {len(expected)} tensors; {', '.join(words)}"


def _class_names(about: Mapping[str, str]) -> list[str]:
    """The class names that a file tells; an empty list for files of other programs."""
    try:
        names = json.loads(about.get("classes", "[]"))
    except (ValueError, RecursionError):
        return []
    return names if isinstance(names, list) and all(isinstance(name, str) for name in names) else []


def lineage_of(path: Path, about: Mapping[str, str]) -> Lineage:
    """What a file of ours, a checkpoint or an export, says that its weights have seen; those of
    others are known by their hash.

    Raises UserError where it says so in a damaged way.
    """
    with bounded.reading(
        f"{path}: its metadata", "export it again", ValueError, AttributeError, RecursionError
    ):
        if lineage := json.loads(about.get("duet", "{}")).get("lineage"):
            return Lineage.read(lineage, "lineage")
    return Lineage.of(pretrained=[file_hash(path)])


def file_hash(path: Path) -> str:
    """The short hash by which a weights file is known."""
    return f"sha256:{hashlib.sha256(bounded.read_file(path, bounded.WEIGHTS)).hexdigest()[:12]}"


def check_built_alike(path: Path, about: Mapping[str, str], config: ModelConfig) -> None:
    """Raise UserError where the file says that its network differs in what no shape shows."""
    if "stride" in about and about["stride"].startswith("conv1") != config.he_strides:
        raise UserError(
            f"{path}: its network has the stride of 2 in {about['stride'].split()[0]} of each stage's first block; set "
            f"--model.he-strides {str(not config.he_strides).lower()}"
        )
    given = about.get("normalise")
    if given in ("symmetric", "imagenet") and (given == "imagenet") != config.imagenet_normalised:
        raise UserError(
            f"{path}: its network was trained on images normalised {given}; set --model.normalise {given}"
        )


def fit_first(filters: Tensor, like: Tensor, *, alpha: bool = False) -> tuple[Tensor, list[str]]:
    """The first convolution's filters [O, C, k, k] for the channels and the smaller kernel of
    `like`, and what was done; filters that already fit come back as they are.

    Grey sums the filters over the channels: a grey image as RGB gives the same outputs. Other
    numbers of channels repeat them, scaled so that equal channels give the same outputs (timm's
    `adapt_input_conv`). Those of `alpha`, the last channel, begin at zero: an opaque image gives
    the outputs of its colours. A smaller kernel takes their middle.
    """
    done, (channels, wanted) = [], (filters.shape[1], like.shape[1])
    if channels != wanted:
        filters, colours = filters.to(like.dtype), wanted - alpha
        repeated = filters[:, torch.arange(colours) % channels] * (channels / colours)
        filters = filters.sum(dim=1, keepdim=True) if colours == 1 else repeated
        filters = F.pad(filters, (0, 0, 0, 0, 0, int(alpha)))
        done.append(f"first filters from {channels} to {wanted} channels")
    cut = filters.shape[-1] - like.shape[-1]
    if cut > 0 and cut % 2:
        raise UserError(
            f"model.stem: filters of {filters.shape[-1]}x{filters.shape[-1]} have no centre of {like.shape[-1]} px; "
            "set --model.stem imagenet, with --model.input-size for small images"
        )
    if cut > 0:
        filters = filters[..., cut // 2 : -(cut // 2), cut // 2 : -(cut // 2)]
        done.append(
            f"first filters' middle {like.shape[-1]}x{like.shape[-1]} taken (model.stem imagenet with model.input_size "
            "keeps them whole)"
        )
    return filters, done


def fitted(
    state: State,
    expected: Mapping[str, Tensor],
    path: Path,
    name: str,
    *,
    option: str = f"--{OPTION}",
) -> State:
    """`state` in the types of `expected`, if it has exactly these names and shapes, in finite
    numbers; the counters of batches, which old files lack, are added.

    Raises UserError naming the first tensor at fault, how many match, and where that is clear the
    file's network.
    """
    state = {
        key: torch.tensor(0) for key in expected if key.endswith("num_batches_tracked")
    } | state
    tensors = {key: value.shape for key, value in expected.items() if value.ndim}
    match = sum(key in state and state[key].shape == shape for key, shape in tensors.items())
    for key in sorted(expected.keys() | state.keys()):
        there, wanted = (
            list(one[key].shape) if key in one else "absent" for one in (state, expected)
        )
        if there != wanted:
            other = network_of(state)
            remedy = f"give a whole {name}'s weights file with {option}"
            if other is None:
                remedy = f"give a {name}'s weights file, by its own names"
            elif other != name:
                remedy = f"the file is a {other}'s: set --model.name {other}, or give a {name}'s"
            raise UserError(
                f"{path}: {key} is {there}, {name} has it {wanted}; {remedy} ({match} of {len(tensors)} tensors match)"
            )
        if state[key].is_floating_point() != expected[key].is_floating_point():
            raise UserError(
                f"{path}: {key} holds {state[key].dtype}, not {expected[key].dtype}; give unquantised weights"
            )
        if not torch.isfinite(state[key]).all():
            raise UserError(f"{path}: {key} holds numbers that are not finite; give another file")
    # on the CPU: `expected` may be on the meta device
    return {key: state[key].to(expected[key].dtype) for key in expected}


def network_of(state: State) -> str | None:
    """The network whose weights these are, but for its first layer and its head; None: they are no
    known one's.
    """
    return next((name for name, share in likeness(state) if share == 1), None)


def likeness(state: State) -> Iterator[tuple[str, float]]:
    """Each known network that begins as these weights do, and the share of the tensors that match."""
    for other, backbone in BACKBONES.items():
        if f"{backbone.first}.weight" not in state:
            continue
        try:
            with torch.device("meta"):
                network = backbone.build(other)
        except NotImplementedError:  # of a RegNet, which computes while it is built
            continue
        ends = (f"{backbone.first}.", f"{backbone.head}.")  # what a config changes
        ours, theirs = (
            {
                key: value.shape
                for key, value in one.items()
                if not key.startswith(ends) and value.ndim
            }
            for one in (network.state_dict(), state)
        )
        yield other, len(ours.items() & theirs.items()) / len(ours.keys() | theirs.keys())
