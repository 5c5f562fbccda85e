"""Room to decode into. Linux promises memory that it does not have, and ends the process that takes it at its word: few bytes in a file
can announce many, so what they announce is held against what is there before it is asked for.
"""
from __future__ import annotations

from pathlib import Path, PurePosixPath

from ..errors import NotEnoughMemoryError

_PROC, _GROUPS = Path("/proc"), Path("/sys/fs/cgroup")
# By version of control groups: where they are, the limit, what is used, and what of that is cache that the kernel takes back first.
_FILES = {
    "": ("", "memory.max", "memory.current", ("inactive_file", "active_file")),
    "memory": ("memory", "memory.limit_in_bytes", "memory.usage_in_bytes", ("total_inactive_file", "total_active_file")),
}


def expect_room(nbytes: int) -> None:
    """Raise `NotEnoughMemoryError` if decoding to `nbytes` of host memory would take more than there is."""
    room = available()
    if room is not None and nbytes > room:
        raise NotEnoughMemoryError(
            f"A tensor decodes to {nbytes} bytes, and {room} bytes of memory are available here. Load the file where there is more, or to "
            "a GPU with map_location. If it is not to be that large, the file was made to exhaust memory.")


def available() -> int | None:
    """Bytes of host memory that this process can still get, swap included; None where the system does not tell (only Linux does).

    Rather too much than too little: a file that fits must load.
    """
    machine = _table(_PROC / "meminfo")
    if "MemAvailable" not in machine:
        return None
    swap = machine.get("SwapFree", 0) << 10
    return min([machine["MemAvailable"] << 10, *_left_in_groups(machine["MemTotal"] << 10)]) + swap


def _left_in_groups(total):
    """Bytes that each control group with a limit below `total`, of those that this process is in, has left."""
    for line in _text(_PROC / "self" / "cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        version = "memory" if "memory" in controllers.split(",") else controllers
        if version in _FILES:
            below, limit, used, cache = _FILES[version]
            inside = PurePosixPath(path.lstrip("/"))
            for group in (inside, *inside.parents):  # in a container, perhaps only the last is to be seen
                group = _GROUPS / below / group
                most = _text(group / limit).strip()
                if most.isdigit() and int(most) < total:  # version 2 says "max" where there is none, version 1 a huge number
                    spare = _table(group / "memory.stat")
                    yield max(0, int(most) - int(_text(group / used) or 0) + sum(spare.get(name, 0) for name in cache))


def _table(path) -> dict[str, int]:
    """The lines `name: number ...` or `name number` of a file."""
    rows = (line.replace(":", " ").split() for line in _text(path).splitlines())
    return {row[0]: int(row[1]) for row in rows if len(row) > 1 and row[1].isdigit()}


def _text(path) -> str:
    """What is in a file of the kernel's, which may have no such file."""
    try:
        return path.read_text()
    except OSError:
        return ""
