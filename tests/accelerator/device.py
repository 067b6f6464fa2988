"""The device: its tensors, what they refuse, what is waited for, what is allocated. See the package's docstring."""

import copy
import ctypes
import functools
import linecache
import sys
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch.utils import backend_registration
from torch.utils._mode_utils import no_dispatch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.accelerator import autocast, pretend_graph, streams

ROOT = Path(__file__).parents[2]
NAME, COUNT, BYTES = "sim", 2, 80 << 30
aten = torch.ops.aten
TRANSFERS = (aten._to_copy.default, aten.copy_.default, aten.lift_fresh.default)
# the host needs values, or how many there are
WAITS = (aten._local_scalar_dense.default, aten.nonzero.default, aten.masked_select.default, aten.is_nonzero.default)
INDEXED = (aten.index.Tensor, aten.index_put_.default, aten.index_put.default, aten._index_put_impl_.default)
NUMPY = "can't convert sim device type tensor to numpy. Use Tensor.cpu() to copy the tensor to host memory first."

waits: Counter[str] = Counter()  # by source line of the program
limit = BYTES  # bytes of each device
elsewhere: dict[str, Callable[..., Any]] = {}  # what runs the operations of a namespace in place of their kernels
_library = torch.library.Library("aten", "IMPL")
_kept: list[Any] = []  # for good


class Memory:
    """Bytes of the storages that are alive on a device, and the most there have been."""

    def __init__(self) -> None:
        self.holders: Counter[int] = Counter()  # tensors of each storage
        self.uses: dict[int, streams.Use] = {}
        self.allocated = self.peak = 0

    def hold(self, tensor: "Sim") -> None:
        storage = tensor.inner.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        if not self.holders[key]:
            if self.allocated + size > limit:
                raise torch.OutOfMemoryError(f"sim out of memory. Tried to allocate {size} bytes")
            self.allocated += size
            self.peak = max(self.peak, self.allocated)
            self.uses[key] = streams.Use(tensor.index)
        self.holders[key] += 1
        tensor.use = self.uses[key]
        weakref.finalize(tensor, self._release, key, size)

    def forget(self) -> None:
        """The peak from now on."""
        self.peak = self.allocated

    def _release(self, key: int, size: int) -> None:
        self.holders[key] -= 1
        if not self.holders[key]:
            del self.holders[key]
            self.allocated -= size
            self.uses.pop(key).freed()


memory = [Memory() for _ in range(COUNT)]


class Sim(torch.Tensor):
    """A tensor on the device; `inner` is the CPU's."""

    inner: torch.Tensor
    index: int
    use: streams.Use
    _is_param: bool

    @staticmethod
    def __new__(cls, inner: torch.Tensor, index: int = 0, requires_grad: bool = False) -> "Sim":
        made = torch.Tensor._make_wrapper_subclass(
            cls,
            inner.size(),
            strides=inner.stride(),
            storage_offset=inner.storage_offset(),
            dtype=inner.dtype,
            device=torch.device(NAME, index),
            requires_grad=requires_grad,
        )
        made.inner, made.index = inner, index
        memory[index].hold(made)
        return made

    def tolist(self) -> Any:
        _wait("tolist")
        streams.host_waits(streams.current(self.index).clock)
        return self.detach().inner.tolist()

    def new_tensor(self, data: Any, **how: Any) -> torch.Tensor:
        """In place of C++, which asks the guard for the current device."""
        return torch.tensor(data, **{"dtype": self.dtype, "device": self.device, **how})

    def numpy(self, **_: Any) -> Any:
        raise TypeError(NUMPY)

    def __array__(self, *_: Any, **__: Any) -> Any:
        raise TypeError(NUMPY)

    def __repr__(self, **_: Any) -> str:
        return f"Sim({tuple(self.shape)}, {self.dtype}, {self.index})"

    def untyped_storage(self) -> Any:
        return Storage(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> "Sim":
        """In place of torch's, which gives a clone another `inner` than the one that is counted."""
        if id(self) not in memo:
            made = memo[id(self)] = Sim(copy.deepcopy(self.inner, memo), self.index, self.requires_grad)
            made._is_param, made.grad = getattr(self, "_is_param", False), copy.deepcopy(self.grad, memo)
        return memo[id(self)]

    def record_stream(self, stream: streams.Stream) -> None:
        self.use.kept_for.add(stream.line)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {})


class Storage:
    """Of a tensor on the device: as much of one as a checkpoint's copy asks for."""

    def __init__(self, tensor: Sim) -> None:
        self.tensor, self.device, self.inner = tensor, tensor.device, tensor.inner.untyped_storage()
        self.nbytes, self._cdata = self.inner.nbytes, self.inner._cdata

    def sent(self, target: torch.UntypedStorage, non_blocking: bool) -> torch.UntypedStorage:
        """Copied to main memory, where it arrives when the host has waited for it."""
        line = streams.current(self.tensor.index)
        line.tick()
        self.tensor.use.note(line, write=False)
        content = self.inner.clone()
        streams.on_their_way.append((line, line.clock[line], lambda: target.copy_(content)))
        if not non_blocking:
            _wait("copy_")
            streams.host_waits(line.clock)
        return target


def _wait(what: str) -> None:
    """Count a wait at the innermost line of the program itself."""
    line = _line()
    pretend_graph.refuse(f"{line} ({what})")
    waits[f"{line} ({what})" if line else what] += 1


def _line() -> str:
    """The innermost line of the program itself; empty in autograd's own threads."""
    frame = sys._getframe(1)
    while frame is not None:
        file = Path(frame.f_code.co_filename)
        if ROOT in file.parents and not {"tests", "site-packages"} & set(file.relative_to(ROOT).parts):
            return f"{file.relative_to(ROOT)}: {linecache.getline(str(file), frame.f_lineno).strip()}"
        frame = frame.f_back
    return ""


def leaves(value: Any) -> Iterator[Any]:
    """Yield what lists, tuples and dictionaries hold; several times as fast as torch's tree_flatten."""
    if isinstance(value, (list, tuple, dict)):
        for each in value.values() if isinstance(value, dict) else value:
            yield from leaves(each)
    else:
        yield value


def mapped(function: Callable[[Any], Any], value: Any) -> Any:
    """Return lists, tuples and dictionaries with `function` of what they hold."""
    if isinstance(value, dict):
        return {name: mapped(function, each) for name, each in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)([mapped(function, each) for each in value])
    return function(value)


def _run(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    if func.namespace in elsewhere:
        pretend_graph.refuse(f"{func}: not an operator of the device")
        return elsewhere[func.namespace](func, args, kwargs)
    tensors = [each for each in leaves((args, kwargs)) if isinstance(each, torch.Tensor)]
    sims, others = [t for t in tensors if isinstance(t, Sim)], [t for t in tensors if not isinstance(t, Sim)]
    device = torch.device(kwargs["device"]) if kwargs.get("device") is not None else None
    if func not in TRANSFERS:
        _check_devices(func, sims, others)
    target = device if device is not None else (sims[0].device if sims else None)
    if func is aten.copy_.default:
        target = args[0].device
    _check_generator(kwargs.get("generator"), target or torch.device("cpu"))
    plain = {key: value for key, value in kwargs.items() if key != "pin_memory"}
    if device is not None:
        plain["device"] = torch.device("cpu")
    used = {each.index for each in sims} | ({target.index or 0} if target and target.type == NAME else set())
    _order(func, args, kwargs, sims, used)
    if (func in WAITS and sims) or _copies_with_a_wait(func, args, kwargs, device) or _masks(func, args):
        _wait(func.name().removeprefix("aten::"))
        for index in used:
            streams.host_waits(streams.current(index).clock)
    inside = mapped(_inner, args), mapped(_inner, plain)
    on_device = bool(sims) or (target is not None and target.type == NAME)
    recorded = pretend_graph.before(func, *inside) if on_device else None
    found = func(*inside[0], **inside[1])
    if recorded:
        recorded(found)
    if sims and torch.Tag.inplace_view in func.tags:  # what `squeeze_` says of the tensor: of the outer one, too
        with no_dispatch():
            func(*args, **kwargs)
    if target is None or target.type != NAME:
        return streams.pinned.add(found) if kwargs.get("pin_memory") else found
    known, index = {id(each.inner): each for each in sims}, target.index or 0
    return mapped(lambda each: known[id(each)] if id(each) in known else _outer(each, index), found)


class Generator(torch._C.Generator):
    """Of the CPU's numbers, wherever it is."""

    on_sim: ClassVar[set[int]] = set()  # what C++ hands back is another object of the same generator
    place: torch.device

    def __new__(cls, device: Any = "cpu") -> "Generator":
        made = super().__new__(cls, "cpu")
        made.place = torch.device(device)
        if made.place.type == NAME:
            cls.on_sim.add(made._cdata)
            weakref.finalize(made, cls.on_sim.discard, made._cdata)
        return made

    @property
    def device(self) -> torch.device:
        return self.place


def _check_generator(generator: torch.Generator | None, device: torch.device) -> None:
    if generator is not None and (generator._cdata in Generator.on_sim) != (device.type == NAME):
        found = NAME if generator._cdata in Generator.on_sim else "cpu"
        raise RuntimeError(f"Expected a '{device.type}' device type for generator but found '{found}'")


def _inner(each: Any) -> Any:
    return each.inner if isinstance(each, Sim) else each


def _outer(each: Any, index: int) -> Any:
    return Sim(each, index) if isinstance(each, torch.Tensor) else each


def _check_devices(func: Any, sims: list[Sim], others: list[torch.Tensor]) -> None:
    """CUDA takes 0-d tensors of the CPU, and indices."""
    places = {f"{NAME}:{each.index}" for each in sims}
    strangers = [each for each in others if each.dim() > 0 and "index" not in func.name()]
    if len(places) + bool(sims and strangers) > 1:
        places |= {"cpu"} if strangers else set()
        raise RuntimeError(f"Expected all tensors to be on the same device, but found {sorted(places)}: {func}")


@functools.cache
def _written(func: Any) -> list[tuple[int, str]]:
    """Which arguments an operation writes."""
    each = enumerate(func._schema.arguments)
    return [(place, argument.name) for place, argument in each if argument.alias_info and argument.alias_info.is_write]


def _order(func: Any, args: Any, kwargs: dict[str, Any], sims: list[Sim], used: set[int]) -> None:
    """Give the operation to the current stream of its device; a copy from another one to both, in step."""
    if streams.faults:
        raise streams.OrderError(streams.faults.pop())
    lines = [streams.current(index) for index in used]
    for line in lines:
        line.tick()
    for line in lines:
        for other in lines:
            line.wait(other.clock)
    parts = [args[place] if place < len(args) else kwargs.get(name) for place, name in _written(func)]
    written = {id(each) for each in leaves(parts)}
    for each in sims:
        each.use.note(streams.current(each.index), write=id(each) in written)
    source = args[min(1, len(args) - 1)] if func in TRANSFERS[:2] else None
    if lines and isinstance(source, torch.Tensor) and source in streams.pinned:
        streams.pinned.copy(source, lines[0])


def _copies_with_a_wait(func: Any, args: Any, kwargs: dict[str, Any], device: torch.device | None) -> bool:
    """Whether a transfer keeps the host: all do but those that may not (`non_blocking`) from or to pinned memory."""
    if func is aten._to_copy.default and device is not None:
        source, here, there = args[0], args[0].device.type, device.type
        free = kwargs.get("non_blocking", False) and (there != NAME or source.is_pinned())
    elif func is aten.copy_.default:
        source, here, there = args[1], args[1].device.type, args[0].device.type
        free = (args[2] if len(args) > 2 else kwargs.get("non_blocking", False)) and source.is_pinned()
    else:
        return False
    return here != there and NAME in (here, there) and not free and source.numel() > 0


def _masks(func: Any, args: Any) -> bool:
    """Whether the host needs to know how many elements a mask takes."""
    return func in INDEXED and any(isinstance(each, Sim) and each.dtype == torch.bool for each in args[1])


class Mode(TorchDispatchMode):
    """Where factories may be asked for a tensor on the device."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {})


class _Module(backend_registration._DummyBackendModule):
    """`torch.sim`."""

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.float16, torch.bfloat16]

    def is_bf16_supported(self, including_emulation: bool = True) -> bool:
        return True

    def is_initialized(self) -> bool:
        return True

    def set_device(self, index: int) -> None:
        pass

    def synchronize(self, device: Any = None) -> None:
        _synchronize(device)

    def get_rng_state(self, device: Any = 0) -> torch.Tensor:
        return torch.get_rng_state()

    def set_rng_state(self, state: torch.Tensor, device: Any = 0) -> None:
        pass

    def get_device_name(self, device: Any = None) -> str:
        return "pretend accelerator"


def _synchronize(device: Any = None) -> None:
    _wait("synchronize")
    streams.host_waits(streams.everything(_index(device)))


def install() -> None:
    """Make `sim` this process's accelerator, once and for the rest of it; threads begin in `Mode`."""
    guard = backend_registration._DummyDeviceGuard()
    _mend_guard(guard)
    backend_registration._setup_privateuseone_for_python_backend(NAME, backend_module=_Module(), device_guard=guard)
    for operation, function in ((aten.empty_strided.default, _empty_strided), (aten._copy_from.default, _copy_from)):
        _library.impl(operation, function, "PrivateUse1")
    autocast.register()
    _keep_whole()
    says: dict[str, Callable[..., Any]] = {
        "current_accelerator": lambda check_available=False: torch.device(NAME),
        "is_available": lambda: True,
        "device_count": lambda: COUNT,
        "current_device_index": streams.device_index,
        "set_device_index": streams.choose,
        "synchronize": _synchronize,
        "empty_cache": lambda: None,
        "current_stream": lambda device=None: streams.Stream(line=streams.current(_index(device))),
        "get_memory_info": lambda device=None: (limit - memory[_index(device)].allocated, limit),
        "max_memory_allocated": lambda device=None: memory[_index(device)].peak,
        "memory_allocated": lambda device=None: memory[_index(device)].allocated,
        "reset_peak_memory_stats": lambda device=None: memory[_index(device)].forget(),
    }
    for name, function in says.items():
        setattr(torch.accelerator, name, function)
    torch.tensor, torch.as_tensor = _from_data(torch.tensor), _from_data(torch.as_tensor)
    torch.Generator = Generator
    copy_ = torch.UntypedStorage.copy_
    torch.UntypedStorage.copy_ = lambda to, source, non_blocking=False: (
        source.sent(to, non_blocking) if isinstance(source, Storage) else copy_(to, source, non_blocking)
    )
    torch.Stream, torch.Event = streams.Stream, streams.Event
    streams.Stream.waited = staticmethod(_wait)
    torch.Tensor.pin_memory = _pin
    torch.Tensor.is_pinned = lambda tensor, *_: tensor in streams.pinned
    run = threading.Thread.run

    def within(thread: threading.Thread) -> None:
        with Mode():
            run(thread)

    threading.Thread.run = within


def _mend_guard(guard: Any) -> None:
    """Autograd has a queue of work for each device that the guard tells of. One made in Python tells of one device
    and lets nobody say otherwise: `deviceCount` is replaced in the table of its C++ object's virtual functions.

    So is `exchangeStream`, which asks Python for the device's type: where an error leaves a backward pass, the guard of
    its stream does so with that error still set, and the process aborts. The CPU's guard has no streams either.
    """
    place = ctypes.c_void_p.from_address(id(guard) + object.__basicsize__).value  # pybind11's first field
    table, function = ctypes.c_void_p.from_address(place), ctypes.CFUNCTYPE(ctypes.c_int8, ctypes.c_void_p)
    before = 2  # entries that describe the type
    slots = (ctypes.c_void_p * 32)(*(ctypes.c_void_p * 32).from_address(table.value - before * 8))
    stream, number = before + 9, before + 15  # c10/core/impl/DeviceGuardImplInterface.h
    assert function(slots[number])(place) == 1, "this torch has another order of virtual functions"
    counting = function(lambda _: COUNT)
    slots[number] = ctypes.cast(counting, ctypes.c_void_p).value
    cpu = ctypes.c_void_p.in_dll(ctypes.CDLL(torch._C.__file__), "_ZN3c104impl26device_guard_impl_registryE").value
    slots[stream] = ctypes.c_void_p.from_address(ctypes.c_void_p.from_address(cpu).value + 8 * 9).value
    table.value = ctypes.addressof(slots) + before * 8
    _kept.extend([guard, slots, counting])


def _empty_strided(size: Any, stride: Any, **how: Any) -> torch.Tensor:
    """Of an index or a list that C++ copies to the device where no mode sees it."""
    return Sim(torch.empty_strided(size, stride, dtype=how.get("dtype")), _index(how["device"]))


def _copy_from(source: torch.Tensor, target: Sim, non_blocking: bool = False) -> torch.Tensor:
    _wait("_copy_from")
    return target.inner.copy_(_inner(source))


def _keep_whole() -> None:
    """Operations that CUDA has kernels of its own for, and that would be taken apart on a device that has none."""
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    for name in torch._C._dispatch_get_all_op_names():
        if name.startswith("aten::") and has(name, "CompositeImplicitAutograd") and has(name, "CUDA"):
            _library.impl(name.removeprefix("aten::"), _never, "PrivateUse1")


def _never(*_: Any) -> Any:
    raise AssertionError("reached by tensors that are not of the device's own type")


def _from_data(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """torch.tensor: it copies inside C++, where no mode sees it."""

    def made(*args: Any, device: Any = None, **kwargs: Any) -> torch.Tensor:
        if device is None or torch.device(device).type != NAME:
            return make(*args, device=device, **kwargs)
        return make(*args, **kwargs).to(device)

    return made


def _pin(tensor: torch.Tensor, *_: Any) -> torch.Tensor:
    return tensor if tensor in streams.pinned else streams.pinned.add(tensor.clone())


def _index(device: Any) -> int:
    return 0 if device is None else device if isinstance(device, int) else torch.device(device).index or 0
