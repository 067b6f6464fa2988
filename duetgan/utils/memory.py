"""How much memory and how many cores this process may use, how it asks for memory, and copies to a
device.
"""

import ctypes
import mmap
import os
import resource
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

CGROUP = Path("/sys/fs/cgroup")
MEMINFO = Path("/proc/meminfo")

NO_LIMIT = 1 << 63
MIB = 2**20
HUGE_PAGE = 2 * MIB
# glibc's upper limit for blocks that do not come from the system one by one
LARGEST_BLOCK = 32 * MIB

# errors of CUDA's libraries that are no torch.OutOfMemoryError
REFUSED = (
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_ALLOC_FAILED",
    "CUDA error: out of memory",
    "'out of memory'",
)

# names of <malloc.h> and <sys/mman.h>
M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_THRESHOLD = -1, -2, -3
MADV_HUGEPAGE = getattr(mmap, "MADV_HUGEPAGE", 14)


def _container_limit() -> int:
    """Of memory, by cgroup 2; as good as none outside a container."""
    limit = CGROUP / "memory.max"
    text = limit.read_text().strip() if limit.exists() else "max"
    return NO_LIMIT if text == "max" else int(text)


def available_bytes() -> int:
    """Memory that can be taken without swapping: the machine's or, where it is less, the
    container's (cgroup 2).
    """
    free = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if MEMINFO.exists():
        lines = dict(line.split(":", 1) for line in MEMINFO.read_text().splitlines())
        free = int(lines["MemAvailable"].split()[0]) * 1024
    if (limit := _container_limit()) < NO_LIMIT:
        counts = dict(line.split() for line in (CGROUP / "memory.stat").read_text().splitlines())
        # counted as used, but given back
        cached = int(counts["inactive_file"]) + int(counts["active_file"])
        used = int((CGROUP / "memory.current").read_text()) - cached
        free = min(free, max(0, limit - used))
    return free


def total_bytes(device: "torch.device", *, several: bool = False) -> int:
    """All the memory of an accelerator (`several`: of all this process's), or of the machine or
    container.
    """
    if device.type != "cpu":
        import torch

        devices = range(torch.accelerator.device_count()) if several else [device]
        return sum(torch.accelerator.get_memory_info(each)[1] for each in devices)
    return min(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"), _container_limit())


def peak_bytes(device: "torch.device") -> int:
    """The most memory that this process has held so far: its tensors' on its GPUs; on a CPU all of
    it (resident).
    """
    if device.type != "cpu":
        import torch

        return sum(
            torch.accelerator.max_memory_allocated(index)
            for index in range(torch.accelerator.device_count())
        )
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (
        1 if sys.platform == "darwin" else 1024
    )


def ran_out(error: BaseException) -> bool:
    """Whether `error` says that memory could not be had: on an accelerator, or on the CPU where the
    system refuses it (Linux mostly grants it and kills the process later).
    """
    import torch  # here: this module is used before the accelerators are chosen

    refused = "DefaultCPUAllocator" in str(error) and "memory" in str(error)
    refused |= any(sign in str(error) for sign in REFUSED)
    return isinstance(error, (torch.OutOfMemoryError, MemoryError)) or (
        isinstance(error, RuntimeError) and refused
    )


def local_processes() -> int:
    """Processes of this run on this machine, as the launcher says."""
    return max(1, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))


def cores() -> int:
    """Cores that this process may use, the machine's (or the container's) shared among the run's
    processes on it.
    """
    allowed = len(os.sched_getaffinity(0))
    for files in (
        [CGROUP / "cpu.max"],
        [CGROUP / "cpu" / f"cpu.cfs_{name}_us" for name in ("quota", "period")],
    ):
        if all(file.exists() for file in files):
            microseconds, period = " ".join(file.read_text() for file in files).split()
            if microseconds not in ("max", "-1"):
                allowed = min(allowed, int(microseconds) // int(period))
    return max(1, allowed // local_processes())


def tune_malloc(reserve: int = 1024 * MIB) -> bool:
    """Let freed memory stay with the process, the first `reserve` bytes of it in huge pages; False
    where that cannot be told (not glibc).

    Training on the CPU frees and asks for the same blocks of a few MiB in every step. glibc returns
    them to the system, which hands out other pages, zeroed and one by one: 11,000 page faults a
    step of a small GAN, and 5 to 10 % of its time. The memory is not in use before it is touched.
    Call it once, early, where training begins.
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
    # the heap grows once, by all of `reserve`: what is grown later is another mapping, without the
    # advice
    libc.mallopt(M_TOP_PAD, min(reserve, 2**31 - 1))
    start = libc.sbrk(0)
    libc.free(libc.malloc(LARGEST_BLOCK - 4096))
    end = libc.sbrk(0)
    libc.mallopt(M_TOP_PAD, 64 * MIB)
    first = -(-start // HUGE_PAGE) * HUGE_PAGE
    if end - first >= HUGE_PAGE:
        # refused where the kernel has none: then without
        libc.madvise(first, end - first, MADV_HUGEPAGE)
    return True


def upload(tensor: "torch.Tensor", device: "torch.device") -> "torch.Tensor":
    """A tensor on `device`. One of main memory goes through pinned memory, so that nobody waits for
    the copy.
    """
    if tensor.device.type != "cpu" or device.type == "cpu":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)
