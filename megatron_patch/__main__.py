"""`python -m megatron_patch SCRIPT ARGS...`: run a Megatron script with `--nvcomp-checkpoint` in its arguments.

For machines where the entry point is switched off. The script runs in this module's own `__main__`, and again in children that
multiprocessing spawns, which re-import that: as it would without us.
"""
from __future__ import annotations

import os
import sys

import megatron_patch  # noqa: F401  the post-import hook

_SCRIPT = "MEGATRON_PATCH_SCRIPT"


def script() -> str:
    """The script to run: the first argument; in a spawned child, which has the arguments without us, what its parent ran."""
    if __name__ != "__main__":
        return os.environ[_SCRIPT]
    if len(sys.argv) < 2 or sys.argv[1] in ("-h", "--help"):
        sys.exit(__doc__)
    del sys.argv[0]
    os.environ[_SCRIPT] = os.path.abspath(sys.argv[0])
    sys.path.insert(0, os.path.dirname(os.environ[_SCRIPT]))
    return os.environ[_SCRIPT]


if __name__ in ("__main__", "__mp_main__"):
    __file__ = script()
    with open(__file__) as _file:
        exec(compile(_file.read(), __file__, "exec"), globals())
