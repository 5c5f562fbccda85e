"""Swap two names of one file system in a single step, so that a reader of either finds the old or the new and never neither."""
from __future__ import annotations

import ctypes
import errno
import os
import secrets
from functools import lru_cache

_AT_FDCWD = -100
_RENAME_EXCHANGE = 2
# What kernels and file systems without the flag say: NFS, some FUSE ones, Linux before 3.15.
_UNSUPPORTED = {errno.EINVAL, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP}


def exchange(a, b) -> bool:
    """Swap what the paths `a` and `b` name: files or directories, both existing, on one file system.

    Returns True where the kernel did it in one step (Linux `renameat2` with `RENAME_EXCHANGE`). Where it cannot, three renames
    do it and False is returned: then `a`, the name that readers use, is missing for an instant, and what it named is found under a
    hidden sibling `.<name>.<hex>.old` should the machine stop just there. Not durable by itself: sync the parent directories.

    Raises OSError as os.rename does; both names are then as they were.
    """
    a, b = os.fspath(a), os.fspath(b)
    for path in (a, b):
        os.lstat(path)  # a name that is missing is said so by its own path, before anything is moved
    if (code := _renameat2(a, b)) == 0:
        return True
    if code not in _UNSUPPORTED:
        raise OSError(code, os.strerror(code), a, None, b)
    _three_renames(a, b)
    return False


@lru_cache(maxsize=1)
def _libc_renameat2():
    """The C library's function (glibc 2.28, musl 1.2.6), or None."""
    function = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if function is not None:
        function.argtypes = [ctypes.c_int, ctypes.c_char_p, ctypes.c_int, ctypes.c_char_p, ctypes.c_uint]
    return function


def _renameat2(a: str, b: str) -> int:
    """0 or an errno."""
    function = _libc_renameat2()
    if function is None:
        return errno.ENOSYS
    done = function(_AT_FDCWD, os.fsencode(a), _AT_FDCWD, os.fsencode(b), _RENAME_EXCHANGE)
    return 0 if done == 0 else ctypes.get_errno()


def _three_renames(a: str, b: str) -> None:
    parent, name = os.path.split(os.path.abspath(a))
    aside = os.path.join(parent, f".{name}.{secrets.token_hex(4)}.old")
    os.rename(a, aside)
    try:
        os.rename(b, a)
    except BaseException:
        os.rename(aside, a)
        raise
    try:
        os.rename(aside, b)
    except BaseException:
        os.rename(a, b)
        os.rename(aside, a)
        raise
