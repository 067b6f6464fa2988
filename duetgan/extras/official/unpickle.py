"""Read pickles of other programs without running anything in them.

A pickle names functions and classes and calls them. The reader here replaces each name that
NVIDIA's and R3GAN's files use by a function or class of ours. These build tensors, arrays and plain
containers, or only store their arguments. Any other name is refused. The Python source inside
NVIDIA's files (`module_src`) is never compiled, and the pickle inside each torch storage is read
with `weights_only`.
"""

import collections
import io
import math
import pickle
import pickletools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from duetgan.utils import files

DEPTH = 32  # maximum depth of nested modules
TENSORS = 10_000  # maximum number of tensors in a network
NUMBERS = frozenset("biuf")  # dtype.kind of NumPy's types of numbers
CLASSES = (
    "torch.nn.modules.container.ModuleList",
    "torch.nn.modules.conv.Conv2d",
    "torch.nn.modules.linear.Linear",
)
PROGRAMS = ("training.networks", "R3GAN")  # Python modules with R3GAN's classes


class Refused(ValueError):
    """An error for a file with unexpected content.

    Its message is the reason in "FILE cannot be read (REASON); ...".
    """


class Inert:
    """A stand-in for an object of another program.

    It has the name of the object's class and, in `state`, the object's attributes, but no methods.
    """

    name: str
    state: dict[str, Any]

    def __new__(cls, *_: object, **__: object) -> "Inert":
        instance = super().__new__(cls)
        instance.state = {}
        return instance

    def __init__(self, *_: object, **__: object) -> None:
        pass

    def __setstate__(self, state: object) -> None:
        if not isinstance(state, dict):
            raise Refused(f"the state of {self.name} is no dictionary")
        self.state = dict(state)


class EasyDict(dict[str, Any]):
    """A replacement for dnnlib's EasyDict: a plain dictionary."""

    def __setstate__(self, state: object) -> None:
        raise Refused("a dictionary with a state of its own")


class _DType:
    """A replacement for numpy.dtype that accepts only types of numbers."""

    def __init__(self, code: object, *_: object) -> None:
        if not isinstance(code, str) or len(code) > 4 or np.dtype(code).kind not in NUMBERS:
            raise Refused(f"an array of type {str(code)[:20]!r}, which may hold objects")
        self.dtype = np.dtype(code)

    def __setstate__(self, state: object) -> None:
        if (
            not isinstance(state, tuple)
            or len(state) < 5
            or state[1] not in ("<", ">", "|", "=")
            or any(state[2:5])
        ):
            raise Refused("an array of a compound type")
        self.dtype = self.dtype.newbyteorder(state[1])


class Array:
    """A replacement for numpy.ndarray; `array` has the numbers."""

    array: np.ndarray

    def __setstate__(self, state: Any) -> None:
        _, shape, dtype, fortran, data = state
        self.array = _array(data, dtype, shape, "F" if fortran else "C")


def _array(data: object, dtype: object, shape: Sequence[int], order: object) -> np.ndarray:
    if not isinstance(data, (bytes, bytearray)) or not isinstance(dtype, _DType):
        raise Refused("an array of objects")
    return np.frombuffer(data, dtype.dtype).reshape(shape, order="F" if order == "F" else "C")


def _frombuffer(data: bytes, dtype: object, shape: Sequence[int], order: object) -> Array:
    instance = Array()
    instance.array = _array(bytes(data), dtype, shape, order)
    return instance


def _persistent(meta: object) -> Inert:
    """Return an object that NVIDIA's program stored, without the source code of its class."""
    if (
        not isinstance(meta, dict)
        or not isinstance(meta.get("class_name"), str)
        or meta.get("type") != "class"
    ):
        raise Refused("a persistent object that is none of NVIDIA's")
    instance = Inert()
    instance.name = meta["class_name"]
    instance.__setstate__(meta.get("state"))
    return instance


def _storage(data: object) -> torch.storage.TypedStorage:
    if not isinstance(data, bytes) or data[:2] == b"PK":
        raise Refused("a storage of a form that those programs do not write")
    try:
        storage = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    except Exception as error:  # torch raises a dozen kinds
        raise Refused("a storage that holds more than numbers, or is damaged") from error
    if not isinstance(storage, torch.storage.TypedStorage):
        raise Refused("a storage that is none")
    return storage


def _tensor(
    storage: object, offset: int, size: Sequence[int], stride: Sequence[int], *_: object
) -> Tensor:
    if not isinstance(storage, torch.storage.TypedStorage):
        raise Refused("a tensor without a storage")
    if len(size) != len(stride) or any(
        type(number) is not int or number < 0 for number in [offset, *size, *stride]
    ):
        raise Refused("a tensor of impossible sizes")
    # The public methods of TypedStorage warn that they are deprecated.
    untyped = storage._untyped_storage
    count = untyped.nbytes() // storage.dtype.itemsize
    last = offset + sum((n - 1) * step for n, step in zip(size, stride, strict=True))
    if math.prod(size) > count or (0 not in size and last >= count):
        raise Refused("a tensor that is larger than its storage")
    return torch.empty(0, dtype=storage.dtype).set_(untyped, offset, size, stride)


def _parameter(data: object, *_: object) -> Tensor:
    if not isinstance(data, Tensor):
        raise Refused("a parameter that is no tensor")
    return data


def _encoded(text: object, codec: object) -> bytes:
    if not isinstance(text, str) or codec != "latin1":
        raise Refused("a text in an unusual code")
    return text.encode("latin1")


# The names that a pickle may use, and our replacements.
ALLOWED: dict[str, object] = {
    "torch_utils.persistence._reconstruct_persistent_obj": _persistent,
    "dnnlib.util.EasyDict": EasyDict,
    "dnnlib.EasyDict": EasyDict,
    "collections.OrderedDict": collections.OrderedDict,
    "builtins.set": set,
    "torch._utils._rebuild_tensor_v2": _tensor,
    "torch._utils._rebuild_parameter": _parameter,
    "torch.storage._load_from_bytes": _storage,
    "numpy.dtype": _DType,
    "numpy.ndarray": Array,
    "_codecs.encode": _encoded,
    **{f"torch.{name}": getattr(torch, name) for name in ("float32", "float16", "bfloat16")},
}
for _core in ("numpy.core", "numpy._core"):
    ALLOWED[f"{_core}.multiarray._reconstruct"] = lambda *_: Array()
    ALLOWED[f"{_core}.multiarray.scalar"] = lambda dtype, data: _array(data, dtype, (), "C").item()
    ALLOWED[f"{_core}.numeric._frombuffer"] = _frombuffer


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        full = f"{module}.{name}"
        if full in ALLOWED:
            return ALLOWED[full]
        is_r3gan = any(f"{module}.".startswith(f"{program}.") for program in PROGRAMS)
        if full in CLASSES or full == "dnnlib.tflib.network.Network" or is_r3gan:
            return type("Inert", (Inert,), {"name": name})
        raise Refused(
            f"it asks for {full[:100]!r}, which no generator needs; nothing in it was run"
        )

    def persistent_load(self, pid: object) -> Any:
        raise Refused("it refers to objects outside the file")


def _scan(file: io.BufferedReader) -> None:
    """Raise Refused if the pickle would make the unpickler allocate memory without bounds.

    Also raises Refused if it refers to objects outside the file.
    """
    puts = 0
    for operation, argument, _ in pickletools.genops(file):
        puts += operation.name in ("MEMOIZE", "PUT", "BINPUT", "LONG_BINPUT")
        if (
            operation.name in ("PUT", "BINPUT", "LONG_BINPUT")
            and int(argument or 0) > 2 * puts + 1024
        ):
            raise Refused("its memo has gaps")
        if operation.name.startswith("EXT") or operation.name in ("PERSID", "BINPERSID"):
            raise Refused("it refers to objects outside the file")


def read_pickle(path: Path) -> Any:
    """Return the content of a pickle, without running anything in the file.

    The content consists of containers, numbers, texts, CPU tensors, `Array` and `Inert` objects.
    Raises UserError if the file is missing, too large or damaged, or holds anything else.
    """
    remedy = "give a network's file of one of those programs"
    # The unpickler raises a dozen kinds for damaged files.
    with files.reading(path, remedy, Exception), files.open_file(path, files.WEIGHTS) as file:
        _scan(file)
        file.seek(0)
        return _Unpickler(file, encoding="latin1").load()


def module_state(module: object, prefix: str = "", depth: int = 0) -> dict[str, Tensor]:
    """Return the state dict of a pickled torch module: its parameters and buffers, in order.

    `prefix` begins the names, and `depth` is the number of modules around this one. Raises Refused
    if `module` is no module.
    """
    if not isinstance(module, Inert) or depth > DEPTH:
        raise Refused(f"{prefix or 'the network'} is no module, or modules lie deeper than {DEPTH}")
    hidden = module.state.get("_non_persistent_buffers_set") or ()
    state: dict[str, Tensor] = {}
    for kind in ("_parameters", "_buffers", "_modules"):
        members = module.state.get(kind) or {}
        if not isinstance(members, dict) or not all(isinstance(name, str) for name in members):
            raise Refused(f"{prefix}{kind} is no dictionary of names")
        for name, value in members.items():
            if value is None or (kind != "_modules" and name in hidden):
                continue
            if kind == "_modules":
                state |= module_state(value, f"{prefix}{name}.", depth + 1)
            elif isinstance(value, Tensor):
                state[prefix + name] = value
            else:
                raise Refused(f"{prefix}{name} is no tensor")
            if len(state) > TENSORS:
                raise Refused(f"a network of more than {TENSORS:,} tensors")
    return state
