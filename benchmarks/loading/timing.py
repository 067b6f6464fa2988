"""How the contenders of a benchmark are timed: alternating, in rotating order, the median of the repeats."""

import gc
import itertools
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch

Stream = Iterator[tuple[torch.Tensor, torch.Tensor]]  # images [n, C, H, W] and labels [n]
Rates = dict[str, list[float]]  # contender -> one number for each repeat


@dataclass(frozen=True, kw_only=True)
class Window:
    """Batches of a stream that are passed over, so that workers have started and queues are in balance, and batches
    that are timed. Both multiples of every number of workers: batches arrive in groups of that many.
    """

    skipped: int
    timed: int


def stream_rate(open_stream: Callable[[], Stream], window: Window) -> float:
    """Images per second of a stream that is opened for this measurement and closed after it.

    Without skipped batches the time includes the opening. Raises ValueError if the stream ends within the window.
    """
    started = time.perf_counter()
    stream = open_stream()
    for _ in itertools.islice(stream, window.skipped):
        pass
    if window.skipped:
        started = time.perf_counter()
    count = batches = 0
    for images, labels in itertools.islice(stream, window.timed):
        if len(images) != len(labels):
            raise ValueError(f"{len(images)} images with {len(labels)} labels")
        count += len(labels)
        batches += 1
    seconds = time.perf_counter() - started
    if batches < window.timed:
        raise ValueError(f"the stream ended after {batches} of {window.timed} timed batches")
    del stream
    gc.collect()  # ends its worker processes, so that they do not run beside the next contender
    return count / seconds


def endless(open_epoch: Callable[[], Stream]) -> Stream:
    """One epoch after the other."""
    while True:
        yield from open_epoch()


def best_of(name: str, unit: str, rate: Callable[[int], float], counts: tuple[int, ...]) -> int:
    """The count (of workers, say) with the highest rate; each is tried once and printed."""
    rates = {count: rate(count) for count in counts}
    print(f"  {name}: " + ", ".join(f"{count} {unit} {rates[count]:,.0f}/s" for count in counts), flush=True)
    return max(counts, key=lambda count: rates[count])


def alternate(contenders: Mapping[str, Callable[[], float]], repeats: int) -> Rates:
    """Measure every contender once in each repeat; each repeat begins with another one."""
    names = list(contenders)
    rates: Rates = {name: [] for name in names}
    for repeat in range(repeats):
        for place in range(len(names)):
            name = names[(repeat + place) % len(names)]
            rates[name].append(contenders[name]())
    return rates


def ratio(rates: Rates, ours: str, other: str) -> float:
    """The median over the repeats of one contender's number divided by another's."""
    return statistics.median(a / b for a, b in zip(rates[ours], rates[other], strict=True))
