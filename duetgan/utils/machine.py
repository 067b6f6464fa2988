"""The machine: cores, memory, native precision, the number of torch's threads, copies to a device.

The threads of an operation spin while they wait for each other. If the system suspends one thread
for another program, the spinning threads occupy the core that the suspended one needs. Next to one
busy process on two cores, two threads train at a tenth of their usual speed, and one thread at two
thirds of it (benchmarks/busy.py). Therefore torch gets only as many threads as there are cores that
other programs leave free.
"""

import ctypes
import mmap
import os
import resource
import sys
import time
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:  # this module is used before the accelerators are chosen
    import torch

Fixed = Literal["fp32", "bf16", "fp16"]  # a precision that is not "auto"
CGROUP = Path("/sys/fs/cgroup")
MEMINFO = Path("/proc/meminfo")

NO_LIMIT = 1 << 63
MIB = 2**20
HUGE_PAGE = 2 * MIB
# glibc's upper limit for blocks that it takes from the heap, not from the system one by one.
LARGEST_BLOCK = 32 * MIB

# Out-of-memory errors of CUDA's libraries that are not a torch.OutOfMemoryError.
REFUSED = (
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_ALLOC_FAILED",
    "CUDA error: out of memory",
    "'out of memory'",
)

# constants of <malloc.h> and <sys/mman.h>
M_TRIM_THRESHOLD = -1
M_TOP_PAD = -2
M_MMAP_THRESHOLD = -3
MADV_HUGEPAGE = getattr(mmap, "MADV_HUGEPAGE", 14)

STAT = Path("/proc/stat")
THREADS_VARIABLE = "OMP_NUM_THREADS"  # environment variable, set by the user or a launcher
# fraction of a core that other programs may use before Duet leaves that core to them
TOLERATED_LOAD = 0.3
SHORTEST = 0.1  # seconds: the shortest measurement, because the system counts in hundredths


def _container_limit() -> int:
    """Return the memory limit of the container (cgroup 2) in bytes; NO_LIMIT if there is none."""
    limit = CGROUP / "memory.max"
    text = limit.read_text().strip() if limit.exists() else "max"
    return NO_LIMIT if text == "max" else int(text)


def available_bytes() -> int:
    """Return the number of bytes that can be used without swapping.

    This is the machine's free memory, or the container's (cgroup 2) if that is less.
    """
    free = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if MEMINFO.exists():
        lines = dict(line.split(":", 1) for line in MEMINFO.read_text().splitlines())
        free = int(lines["MemAvailable"].split()[0]) * 1024
    if (limit := _container_limit()) < NO_LIMIT:
        counts = dict(line.split() for line in (CGROUP / "memory.stat").read_text().splitlines())
        # The page cache counts as used, but the kernel can reclaim it.
        cached = int(counts["inactive_file"]) + int(counts["active_file"])
        used = int((CGROUP / "memory.current").read_text()) - cached
        free = min(free, max(0, limit - used))
    return free


def total_bytes(device: "torch.device", *, several: bool) -> int:
    """Return the total memory of `device` in bytes.

    For the CPU this is the memory of the machine, or of the container if that is less. For an
    accelerator, `several=True` returns the sum over all accelerators that this process sees.
    """
    if device.type != "cpu":
        import torch

        devices = range(torch.accelerator.device_count()) if several else [device]
        return sum(torch.accelerator.get_memory_info(index)[1] for index in devices)
    return min(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"), _container_limit())


def peak_bytes(device: "torch.device") -> int:
    """Return the peak memory of this process in bytes.

    This is the memory of its tensors on all accelerators, or its resident memory if `device` is the
    CPU.
    """
    if device.type != "cpu":
        import torch

        return sum(
            torch.accelerator.max_memory_allocated(index)
            for index in range(torch.accelerator.device_count())
        )
    unit = 1 if sys.platform == "darwin" else 1024  # bytes per unit of ru_maxrss
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def ran_out(error: BaseException) -> bool:
    """Return True if `error` means that memory ran out.

    This rarely happens on a CPU, because Linux usually grants the memory and kills the process
    later.
    """
    import torch  # late, because this module is used before the accelerators are chosen

    refused = "DefaultCPUAllocator" in str(error) and "memory" in str(error)
    refused |= any(sign in str(error) for sign in REFUSED)
    return isinstance(error, (torch.OutOfMemoryError, MemoryError)) or (
        isinstance(error, RuntimeError) and refused
    )


def native_precision(device: "torch.device") -> Fixed:
    """Return the precision for a device: bf16 if the hardware computes it natively.

    If the hardware only emulates bf16, this is fp32 on a CPU and fp16 on an accelerator.
    """
    import torch

    if device.type == "cpu":
        return "bf16" if torch.cpu._is_avx512_bf16_supported() else "fp32"

    # CUDA, ROCm and XPU have this function, MPS does not.
    is_supported = getattr(torch.get_device_module(device), "is_bf16_supported", None)
    if is_supported is None or is_supported(including_emulation=False):
        return "bf16"
    return "fp16"


def local_processes() -> int:
    """Return the number of this run's processes on this machine, which the launcher has set."""
    return max(1, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))


def cores() -> int:
    """Return the number of cores for this process, at least 1.

    The cores of the machine or container are divided among this run's processes on it.
    """
    allowed = len(os.sched_getaffinity(0))
    quota = CGROUP / "cpu.max"
    if quota.exists():
        microseconds, period = quota.read_text().split()
        if microseconds != "max":
            allowed = min(allowed, int(microseconds) // int(period))
    return max(1, allowed // local_processes())


def tune_malloc(reserve: int = 1024 * MIB) -> bool:
    """Make malloc keep freed memory, and put the first `reserve` bytes of the heap in huge pages.

    Call this once, before training begins. Returns False without glibc, where this cannot be set.

    Training on the CPU frees and allocates the same blocks of a few MiB in every step. By default
    glibc returns them to the system and later gets new pages, which the system zeroes one by one:
    11,000 page faults per step of a small GAN, 5 to 10 % of its time. Reserved memory is not in use
    before it is touched.
    """
    libc = ctypes.CDLL(None)
    if not all(
        hasattr(libc, name) for name in ("mallopt", "sbrk", "madvise", "gnu_get_libc_version")
    ):
        return False
    libc.sbrk.restype = libc.malloc.restype = ctypes.c_void_p
    libc.sbrk.argtypes = [ctypes.c_ssize_t]
    libc.malloc.argtypes = [ctypes.c_size_t]
    libc.free.argtypes = [ctypes.c_void_p]
    libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    libc.mallopt(M_MMAP_THRESHOLD, LARGEST_BLOCK)
    libc.mallopt(M_TRIM_THRESHOLD, 2**31 - 1)
    # The heap grows once, by all of `reserve`, because later growth does not get the advice below.
    libc.mallopt(M_TOP_PAD, min(reserve, 2**31 - 1))
    start = libc.sbrk(0)
    libc.free(libc.malloc(LARGEST_BLOCK - 4096))
    end = libc.sbrk(0)
    libc.mallopt(M_TOP_PAD, 64 * MIB)
    first = -(-start // HUGE_PAGE) * HUGE_PAGE
    if end - first >= HUGE_PAGE:
        # A kernel without huge pages refuses this, which does no harm.
        libc.madvise(first, end - first, MADV_HUGEPAGE)
    return True


def upload(tensor: "torch.Tensor", device: "torch.device") -> "torch.Tensor":
    """Return `tensor` on `device`.

    A copy from main memory to an accelerator is asynchronous, by way of pinned memory.
    """
    if tensor.device.type != "cpu" or device.type == "cpu":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


# --- threads


class ProgramLoad:
    """A meter of the number of cores that other programs use between two calls of `busy_cores`."""

    def __init__(self) -> None:
        self._previous = _clocks()
        self._busy_cores = 0.0

    def busy_cores(self) -> float:
        """Return the mean number of cores that other programs have used since the last call.

        Returns 0 if the system does not report it, and the last result if that is less than
        SHORTEST seconds old.
        """
        current = _clocks()
        seconds, busy, process = (
            end - start for end, start in zip(current, self._previous, strict=True)
        )
        if seconds >= SHORTEST:
            self._previous = current
            self._busy_cores = max(0.0, (busy - process) / seconds)
        return self._busy_cores


def _clocks() -> tuple[float, float, float]:
    """Return three times in seconds: the clock, busy time of all cores, CPU time of this process.

    The busy time is 0 if the system does not report it. It includes time that the host takes from a
    virtual machine. The CPU time includes that of ended child processes.
    """
    busy = 0.0
    if STAT.exists():
        user, nice, system, _, _, interrupts, soft, stolen = map(
            int, STAT.read_text().split(maxsplit=9)[1:9]
        )
        busy = (user + nice + system + interrupts + soft + stolen) / os.sysconf("SC_CLK_TCK")
    return time.perf_counter(), busy, sum(os.times()[:4])


@cache
def max_threads() -> int:
    """Return the largest number of threads that torch should use in this process.

    This is torch's initial number, but not more than `cores()` unless OMP_NUM_THREADS is set.
    """
    import torch

    if THREADS_VARIABLE in os.environ:
        return torch.get_num_threads()
    return min(torch.get_num_threads(), cores())


def is_adjustable() -> bool:
    """Return True unless OMP_NUM_THREADS is set or several ranks share this machine.

    Only then may Duet change the number of threads. Each of several ranks would otherwise count the
    other ranks as other programs.
    """
    return THREADS_VARIABLE not in os.environ and local_processes() == 1


def fitting(busy_cores: float) -> int:
    """Return the number of threads that have a core each if other programs use `busy_cores` cores.

    Returns `max_threads()` if the number must not be changed (see `is_adjustable`).
    """
    if not is_adjustable():
        return max_threads()
    free_cores = int((os.cpu_count() or 1) - busy_cores + TOLERATED_LOAD)
    return max(1, min(max_threads(), free_cores))


def load_text(busy_cores: float) -> str:
    return f"other programs take {busy_cores:.1f} of {os.cpu_count()} cores"


_since_start: ProgramLoad | None = None


def start_measuring() -> None:
    global _since_start
    _since_start = ProgramLoad()


def busy_since_start() -> float:
    """Return the number of cores that other programs have used since the last call.

    The first call measures from the call of `start_measuring`. Returns 0 if that was never called.
    """
    return 0.0 if _since_start is None else _since_start.busy_cores()


def settle() -> None:
    """Set the number of torch's threads to the number of free cores.

    Does nothing unless a script has called `start_measuring`, so that a program that uses Duet as a
    library keeps its own number of threads.
    """
    if _since_start is not None:
        use_threads(fitting(busy_since_start()))


def use_threads(count: int) -> None:
    """Set the number of torch's threads. No other function of Duet sets it."""
    import torch

    torch.set_num_threads(count)
