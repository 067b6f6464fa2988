"""How this process asks the system for main memory."""

import ctypes
import mmap

MIB = 2**20
HUGE_PAGE = 2 * MIB
LARGEST_BLOCK = 32 * MIB  # glibc's upper limit for blocks that do not come from the system one by one

# names of <malloc.h> and <sys/mman.h>
M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_THRESHOLD = -1, -2, -3
MADV_HUGEPAGE = getattr(mmap, "MADV_HUGEPAGE", 14)


def keep_freed_memory(reserve: int = 1024 * MIB) -> bool:
    """Let freed memory stay with the process, the first `reserve` bytes of it in huge pages; False where that cannot be
    told (not glibc).

    Training on the CPU frees and asks for the same blocks of a few MiB in every step. glibc returns them to the system,
    which hands out other pages, zeroed and one by one: 11,000 page faults a step of a small GAN, and 5 to 10 % of
    its time. The memory is not in use before it is touched. Call it once, early, where training begins.
    """
    libc = ctypes.CDLL(None)
    if not all(hasattr(libc, name) for name in ("mallopt", "sbrk", "madvise", "gnu_get_libc_version")):
        return False
    libc.sbrk.restype = libc.malloc.restype = ctypes.c_void_p
    libc.sbrk.argtypes = [ctypes.c_ssize_t]
    libc.malloc.argtypes = [ctypes.c_size_t]
    libc.free.argtypes = [ctypes.c_void_p]
    libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    libc.mallopt(M_MMAP_THRESHOLD, LARGEST_BLOCK)
    libc.mallopt(M_TRIM_THRESHOLD, 2**31 - 1)
    # the heap grows once, by all of `reserve`: what is grown later is another mapping, without the advice
    libc.mallopt(M_TOP_PAD, min(reserve, 2**31 - 1))
    start = libc.sbrk(0)
    libc.free(libc.malloc(LARGEST_BLOCK - 4096))
    end = libc.sbrk(0)
    libc.mallopt(M_TOP_PAD, 64 * MIB)
    first = -(-start // HUGE_PAGE) * HUGE_PAGE
    if end - first >= HUGE_PAGE:
        libc.madvise(first, end - first, MADV_HUGEPAGE)  # refused where the kernel has none: then without
    return True
