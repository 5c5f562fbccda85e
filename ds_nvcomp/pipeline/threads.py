"""One pool of CPU threads for a process, sized so that the processes of a machine share its cores."""
from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache


def count(threads: int) -> int:
    """`threads`, or for 0 this process's share of the cores it may run on: LOCAL_WORLD_SIZE is set by every common launcher."""
    if threads:
        return threads
    processes = os.environ.get("LOCAL_WORLD_SIZE", "1")
    return max(1, len(os.sched_getaffinity(0)) // max(1, int(processes) if processes.isdigit() else 1))


@lru_cache(maxsize=None)
def _pool(threads: int, pid: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(threads, thread_name_prefix="ds_nvcomp")


def pool(threads: int = 0) -> ThreadPoolExecutor:
    """The process's pool; a forked child gets one of its own, since threads do not survive a fork."""
    return _pool(count(threads), os.getpid())
