"""Run whole training steps as CUDA graphs.

A step of a small network launches a thousand kernels. Python takes longer to launch one than the
GPU takes to run it. A CUDA graph launches all of them at once. Steps that launch the same kernels
are of one *kind*. The first step of a kind runs as usual. The second is captured as a graph, which
is replayed for this step and all later ones.

A replay repeats kernels on the same memory. Everything else in a step needs these functions:

- `value`, `number`: tensors and numbers that depend on the step, such as random draws. They are
  computed before the replay and copied into the memory that the captured kernels read.
- `outside`: work between kernels, such as the update of an optimizer, which reads its settings on
  the host. The graph is captured in parts, with this work between them. An update is a few kernels,
  so replaying it would gain nothing.

Collective operations of several processes are also run between the parts (`collectives.perform`),
so NCCL's timeouts work as usual. In a backward pass, the graph is split where autograd has the
gradients. The exchange of gradients then still overlaps with the rest of the pass.

In a run without graphs, these functions only call the function that they are given.
"""

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import wraps
from typing import Concatenate, Literal, ParamSpec, TypeVar

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map_only

from duetgan.data.reading.loader import Batch
from duetgan.training.base.phases import is_listening
from duetgan.utils.distributed import collectives
from duetgan.utils.runlog.run_log import say_main
from duetgan.utils.text import counted

GraphSetting = Literal["auto", "off"]
MANY = 240  # number of steps that include every usual kind
P = ParamSpec("P")
S = TypeVar("S")
T = TypeVar("T")
Metrics = dict[str, Tensor]

_step: "CapturedStep | None" = None  # the step that is being recorded or captured


def value(function: Callable[[int], T], step: int) -> T:
    """Return `function(step)`, in such a way that a replay of the step can compute it anew.

    The result is a tensor on the device, or a tuple, list or dict of tensors. The tensors must have
    the same shapes in every step. The function may read the step's batches. Except for these, it
    may depend on the step only by its argument, because it is called with the number of every later
    step of the kind.
    """
    return function(step) if _step is None else _step.value(function, step)


def per_step(method: Callable[Concatenate[S, int, P], T]) -> Callable[Concatenate[S, int, P], T]:
    """Wrap a method whose first argument is the step, so that its result is computed by `value`."""

    @wraps(method)
    def drawn(self: S, step: int, *args: P.args, **kwargs: P.kwargs) -> T:
        return value(lambda step: method(self, step, *args, **kwargs), step)

    return drawn


def number(function: Callable[[int], float], step: int, factor: Tensor) -> float | Tensor:
    """Return `function(step)`. In a graph the result is a 0-d tensor.

    This tensor has the dtype and device of `factor`.
    """
    if _step is None:
        return function(step)
    dtype, device = factor.dtype, factor.device
    return _step.value(
        lambda step: torch.full((), function(step), dtype=dtype, device=device), step
    )


def outside(action: Callable[[int], object], step: int) -> None:
    """Call `action(step)` outside the graph. A replay calls it between two parts of the graph.

    Tensors that the action reads or writes must exist before the call. Its result is not used.
    """
    if _step is None:
        action(step)
    else:
        _step.outside(action, step)


class CudaDevice:
    """The functions of torch.cuda that graphs need. Tests replace this class."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stream = torch.cuda.Stream(device)
        # Graphs of all kinds share their memory, since they never run at once.
        self.pool = torch.cuda.graph_pool_handle()

    @contextmanager
    def working(self) -> Iterator[None]:
        """Run the block on the stream of the graphs, in order with the current stream.

        The block waits for earlier work on the current stream, and later work there waits for the
        block. Steps that are not captured use the graphs' stream too: autograd accumulates a
        gradient on the stream of its first use, and a capture must not wait for another stream.
        """
        current = torch.cuda.current_stream(self.device)
        self.stream.wait_stream(current)
        with torch.cuda.stream(self.stream):
            yield
        current.wait_stream(self.stream)

    @contextmanager
    def capturing(self) -> Iterator[torch.cuda.CUDAGraph]:
        """Capture the kernels of the block in a graph. They do not run yet."""
        graph = torch.cuda.CUDAGraph()
        # In the default mode a loader's thread that pins memory would end the capture.
        mode = "thread_local"
        with torch.cuda.graph(graph, pool=self.pool, stream=self.stream, capture_error_mode=mode):
            yield graph


# device type -> class that captures graphs on such a device
DEVICES: dict[str, Callable[[torch.device], CudaDevice]] = {"cuda": CudaDevice}


# memory of the values that enter steps, by shape and type; all kinds of steps share it
Memory = dict[Hashable, list[Tensor]]


class CapturedStep:
    """The record of one kind of step: the values that enter it, and the parts of its graph.

    `record` is called for the first step of the kind, `capture` and `replay` for the second, and
    `replay` for all later ones.
    """

    def __init__(self, device: CudaDevice, memory: Memory) -> None:
        self.device = device
        self.memory = memory
        self._used: Counter[Hashable] = Counter()  # tensors of `memory` that this kind uses
        self.batches: list[Batch] = []  # in static memory
        # functions of the step, with their results in static memory
        self._values: list[tuple[Callable[[int], object], object]] = []
        self.parts: list[Callable[[int], object]] = []  # empty before the capture
        self._next = 0  # number of the next value while the step is captured
        self._open: ExitStack | None = None  # of the part that is being captured
        self._names: list[str] = []  # of the metrics
        self._metrics = torch.zeros(0)  # [names]

    def value(self, function: Callable[[int], T], step: int) -> T:
        if self._open is None:
            result = tree_map_only(Tensor, self._store, function(step))
            self._values.append((function, result))
            return result
        recorded = self._values[self._next][1]
        self._next += 1
        return recorded  # type: ignore[return-value]

    def outside(self, action: Callable[[int], object], step: int) -> None:
        if self._open is None:
            action(step)
            return
        self._open.close()
        self.parts.append(action)
        self._begin_part()

    def _begin_part(self) -> None:
        self._open = ExitStack()
        graph = self._open.enter_context(self.device.capturing())
        self.parts.append(lambda _: graph.replay())

    def _store(self, tensor: Tensor) -> Tensor:
        """Copy a tensor to static memory, which replays read, and return the copy."""
        key = (tensor.shape, tensor.dtype, tensor.stride(), tensor.device)
        tensors = self.memory.setdefault(key, [])
        if self._used[key] == len(tensors):
            tensors.append(torch.empty_like(tensor))
        self._used[key] += 1
        return tensors[self._used[key] - 1].copy_(tensor)

    def record(
        self, update: "Callable[[list[Batch], int], Metrics]", batches: Sequence[Batch], step: int
    ) -> Metrics:
        """Return `update(batches, step)` without a graph; record the batches and values it uses."""
        for batch in batches:
            self.batches.append(Batch(**tree_map_only(Tensor, self._store, batch.tensors())))
        with self._active():
            return update(self.batches, step)

    def capture(self, update: "Callable[[list[Batch], int], Metrics]", step: int) -> None:
        """Capture the kernels that `update` launches for a step, without running them."""
        # A capture ends in the thread that began it, also if it ends within a backward pass.
        with self._active(), torch.autograd.set_multithreading_enabled(False):
            self._begin_part()
            try:
                metrics = update(self.batches, step)
                self._names = list(metrics)
                dtype = collectives.widest(self.device.device)
                self._metrics = torch.stack([metric.to(dtype) for metric in metrics.values()])
            finally:
                assert self._open is not None
                self._open.close()
                self._open = None
        assert self._next == len(self._values), "the capture used other values than the record"

    def replay(self, batches: Sequence[Batch], step: int) -> Metrics:
        """Run the captured kernels with the batches and the number of this step; return metrics."""
        for static, batch in zip(self.batches, batches, strict=True):
            _copy(static.tensors(), batch.tensors())
        for function, static_values in self._values:
            _copy(static_values, function(step))
        for part in self.parts:
            part(step)
        return dict(zip(self._names, self._metrics.clone().unbind(), strict=True))

    @contextmanager
    def _active(self) -> Iterator[None]:
        global _step
        _step = self
        try:
            with collectives.intercepted(self._between_parts):
                yield
        finally:
            _step = None

    def _between_parts(self, operation: Callable[[], object]) -> None:
        """Run a collective operation now or, during a capture, later in every replay."""
        self.outside(lambda _: operation(), 0)


def _copy(targets: object, sources: object) -> None:
    """Copy each tensor of `sources` to the tensor at the same place in `targets`.

    Both are structures of the same form, such as nested dicts.
    """
    static, spec = tree_flatten(targets)
    fresh, fresh_spec = tree_flatten(sources)
    assert spec == fresh_spec, f"a captured step got {fresh_spec}, not {spec}"
    for target, source in zip(static, fresh, strict=True):
        if isinstance(target, Tensor):
            assert target.shape == source.shape, (
                f"{source.shape} is not the captured {target.shape}"
            )
            target.copy_(source, non_blocking=True)


class Graphs:
    """The CUDA graphs of a task's steps: one for each kind of step.

    Args:
        obstacle: The reason why the task's steps cannot be captured; empty if they can.
    """

    def __init__(self, setting: GraphSetting, device: torch.device, obstacle: str) -> None:
        # the reason why steps run one kernel at a time; empty if they are captured
        self.obstacle = obstacle
        if setting == "off":
            self.obstacle = "graphs is off"
        elif device.type not in DEVICES:
            self.obstacle = f"the device is {device.type}"
        self._device = None if self.obstacle else DEVICES[device.type](device)
        self._structure: Hashable = None
        self._steps: dict[Hashable, CapturedStep] = {}
        self._memory: Memory = {}

    def describe(self, kinds: Iterable[Hashable]) -> str:
        """Return a row for the printed plan that tells if steps of `kinds` run as CUDA graphs.

        The kind None stands for steps that are not captured.
        """
        if self.obstacle:
            return f"eager, because {self.obstacle}"
        distinct = set(kinds)
        text = f"CUDA graph, {counted(len(distinct - {None}), 'kind')} of steps"
        return f"{text}; eager where diagnostics are due" if None in distinct else text

    def run(
        self,
        update: Callable[[list[Batch], int], Metrics],
        batches: list[Batch],
        step: int,
        *,
        kind: Callable[[int], Hashable],
        structure: Callable[[int], Hashable],
    ) -> Metrics:
        """Return `update(batches, step)`; replay a graph if there is one for this kind of step.

        Args:
            update: Changes state in place, and on the device only. A call during the capture
                records the kernels but changes nothing.
            kind: Returns the kind of a step, equal for steps that launch the same kernels; None if
                the step must run eagerly.
            structure: Returns a value for a step, which must change if networks, optimizers or
                sizes change. All graphs are then dropped.
        """
        if self._device is None:
            return update(batches, step)
        current = structure(step)
        if current != self._structure:
            self._steps.clear()
            self._memory = {}
            self._structure = current
        with self._device.working():
            # A profile cannot see its phases inside a graph.
            kind_of_step = kind(step)
            if kind_of_step is None or is_listening():
                return update(batches, step)
            key = (
                kind_of_step,
                *((name, x.shape) for b in batches for name, x in b.tensors().items()),
            )
            captured = self._steps.get(key)
            if captured is None:
                captured = CapturedStep(self._device, self._memory)
                metrics = captured.record(update, batches, step)
                self._steps[key] = captured  # not before the whole step was recorded
                return metrics
            if not captured.parts:
                try:
                    captured.capture(update, step)
                except RuntimeError as error:
                    self._give_up(error)
                    return update(batches, step)
            return captured.replay(batches, step)

    def _give_up(self, error: RuntimeError) -> None:
        """Make all later steps run eagerly, and print the reason."""
        # After an error in a capture the end of the capture fails as well.
        cause = error.__context__ or error
        reason = (str(cause).strip() or type(cause).__name__).splitlines()[0]
        self.obstacle = f"the capture of a step failed: {reason}"
        say_main(f"graphs: steps run eagerly, because {self.obstacle}")
        self._device = None
        self._steps.clear()
        self._memory = {}
