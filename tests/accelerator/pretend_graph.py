"""A CUDA graph without CUDA: a capture records every operator that the device is given, with the tensors it was given
and those it made; a replay runs the operators again and writes each result where the first one was.

So all that Python decides is frozen by the capture, as on a GPU: numbers, branches, which tensor is meant. A capture
changes nothing: what it has written is put back at its end. A GPU may use memory of a graph that no tensor holds for
another one, so that it is filled with NaN after each step here. What a GPU refuses in a capture is refused: a wait for
the device, a draw from a generator, a copy of the host's memory.
"""

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map_only

ALLOCATIONS = ("aten::empty", "aten::new_empty")
_recording: "PretendGraph | None" = None


class CaptureError(RuntimeError):
    """In place of cudaErrorStreamCaptureUnsupported."""


def refuse(what: str) -> None:
    if _recording is not None:
        raise CaptureError(f"operation not permitted when stream is capturing: {what}")


def before(func: Any, args: Any, kwargs: Any) -> Callable[[Any], None]:
    """Note an operator of the device that is about to run; return what to call with its result."""
    return (lambda _: None) if _recording is None else _recording.record(func, args, kwargs)


def _tensors(values: Any) -> list[torch.Tensor]:
    return [each for each in tree_leaves(values) if isinstance(each, torch.Tensor)]


def _key(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())


class PretendGraph:
    """The operators of a capture."""

    def __init__(self) -> None:
        self.operators: list[tuple[Any, Any, Any, list[tuple[int, torch.Tensor]]]] = []
        self.made: dict[int, torch.Tensor] = {}  # a tensor of each storage that the capture made
        self._saved: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # of the others that it is given

    def record(self, func: Any, args: Any, kwargs: Any) -> Callable[[Any], None]:
        if kwargs.get("generator") is not None:
            refuse(f"{func} draws from a generator")
        # of their own, because `squeeze_` and the like change what a tensor says of its shape
        fixed = tree_map_only(torch.Tensor, torch.Tensor.detach, (args, kwargs))
        given = {_key(each) for each in _tensors(fixed)}
        for each in _tensors(fixed):  # all of them: batch norm does not say that it writes its statistics
            if _key(each) not in self.made and _key(each) not in self._saved:
                self._saved[_key(each)] = (each, _bytes(each).clone())

        def after(found: Any) -> None:
            if torch.Tag.inplace_view in func.tags:
                return
            results = [(place, each.detach()) for place, each in enumerate(_tensors(found)) if _key(each) not in given]
            self.made |= {_key(each): each for _, each in results}
            if results or func._schema.is_mutable:  # others only look at memory in another way
                self.operators.append((func, *fixed, [] if func.name().startswith(ALLOCATIONS) else results))

        return after

    def end(self) -> None:
        for tensor, content in self._saved.values():
            _bytes(tensor).copy_(content)
        self._saved.clear()

    @torch.no_grad()
    def replay(self) -> None:
        for func, args, kwargs, results in self.operators:
            found = _tensors(func(*args, **kwargs))
            for place, target in results:
                target.copy_(found[place])

    def forget(self, held: Callable[[int], bool]) -> None:
        """Overwrite what the capture made and nobody holds."""
        for key, tensor in self.made.items():
            if not held(key):
                _bytes(tensor).fill_(255)


class PretendDevice:
    """In place of training.base.graphs.CudaDevice."""

    made: "list[PretendDevice]" = []

    def __init__(self, device: torch.device) -> None:
        from tests.accelerator.device import memory

        self.device = device
        self.holders = memory[device.index or 0].holders
        self.stream = torch.Stream(device)
        self.graphs: weakref.WeakSet[PretendGraph] = weakref.WeakSet()
        PretendDevice.made.append(self)

    @contextmanager
    def working(self) -> Iterator[None]:
        current = torch.accelerator.current_stream(self.device)
        self.stream.wait_stream(current)
        with self.stream:
            yield
        current.wait_stream(self.stream)
        for graph in self.graphs:
            graph.forget(lambda key: self.holders[key] > 0)

    @contextmanager
    def capturing(self) -> Iterator[PretendGraph]:
        global _recording
        _recording = graph = PretendGraph()
        self.graphs.add(graph)
        try:
            yield graph
        finally:
            _recording = None
            graph.end()
