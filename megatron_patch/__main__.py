"""`python -m megatron_patch SCRIPT ARGS...`: run a Megatron script with `--nvcomp-checkpoint` in its arguments.

For machines where the entry point is switched off. The script runs as `__main__`, in its own name and file, so that children that
multiprocessing spawns find what they look for in it. They write what they are given, and need no patch of ours.
"""
from __future__ import annotations

import os
import sys

import megatron_patch  # noqa: F401  the post-import hook

if __name__ == "__main__":
    if len(sys.argv) < 2 or sys.argv[1] in ("-h", "--help"):
        sys.exit(__doc__)
    del sys.argv[0]
    __file__, __spec__ = os.path.abspath(sys.argv[0]), None  # children skip a `__main__` that was found as a package's, and run files
    sys.path.insert(0, os.path.dirname(__file__))
    with open(__file__, "rb") as _file:
        exec(compile(_file.read(), __file__, "exec", dont_inherit=True), globals())
