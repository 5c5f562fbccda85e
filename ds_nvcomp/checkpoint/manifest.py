"""The manifest of a checkpoint directory: which files it consists of, with sizes and digests. Its name matches no tool's glob.

A file's digest is the CRC-32 of its zip directory (all bytes from the first central header to the end), which in turn holds the
name, place, size and CRC-32 of every entry: one number for the whole file, that costs nothing to compute while writing.
"""
from __future__ import annotations

import json
import struct
import zipfile
from pathlib import Path

from isal.isal_zlib import crc32

from .. import __version__
from ..archive import files
from ..errors import DirectoryError

NAME = "nvcomp_manifest.json"
VERSION = 1


def write(directory: Path, tag: str, world: int, entries: dict[str, tuple[int, int]], *, fsync: bool) -> None:
    """Write the manifest for {file name relative to `directory`: (bytes, digest)}."""
    _write(directory, {"version": VERSION, "by": f"ds_nvcomp {__version__}", "tag": tag, "world_size": world, "files": _rows(entries)}, fsync)


def renew(directory: Path, *, fsync: bool) -> None:
    """Write the manifest again for the same files as they are now, after a conversion. The old one may be a link to the source's."""
    manifest = json.loads((directory / NAME).read_bytes())
    there = [name for name in read(directory) if (directory / name).is_file()]
    manifest["files"] = _rows({name: ((directory / name).stat().st_size, directory_digest(directory / name)) for name in there})
    (directory / NAME).unlink()
    _write(directory, manifest, fsync)


def _rows(entries):
    return {name: {"bytes": nbytes, "digest": f"{digest:08x}"} for name, (nbytes, digest) in sorted(entries.items())}


def _write(directory, manifest, fsync):
    with files.Writer(directory / NAME, fsync=fsync) as file:
        file.write_at(0, [json.dumps(manifest, indent=1).encode() + b"\n"])


def read(directory: Path) -> dict[str, tuple[int, int]] | None:
    """{file name: (bytes, digest)}, or None where there is no manifest. Raises `DirectoryError` for one that cannot be read."""
    path = directory / NAME
    if not path.exists():
        return None
    try:
        manifest = json.loads(path.read_bytes())
        if manifest["version"] != VERSION:
            raise DirectoryError(f"The manifest is of version {manifest['version']!r}, this ds_nvcomp reads version {VERSION}. Install a "
                                 "newer ds_nvcomp.", path=str(path))
        return {str(name): (int(entry["bytes"]), int(entry["digest"], 16)) for name, entry in manifest["files"].items()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as err:
        raise DirectoryError(f"The manifest is damaged ({type(err).__name__}: {err}).", path=str(path)) from err


def problems(directory: Path) -> list[tuple[str, str]]:
    """(path, what is wrong) for each file that is missing from `directory` or is not the one that was committed."""
    found = []
    for name, (nbytes, digest) in (read(directory) or {}).items():
        path = directory / name
        if Path(name).is_absolute() or ".." in Path(name).parts:
            found.append((str(path), "the manifest names a file outside of its directory"))
        elif not path.is_file():
            found.append((str(path), "the manifest lists this file, and it is missing"))
        elif path.stat().st_size != nbytes:
            found.append((str(path), f"the manifest says {nbytes} bytes, found {path.stat().st_size}"))
        elif (actual := directory_digest(path)) != digest:
            found.append((str(path), f"the manifest says digest {digest:08x}, found {actual:08x}: another file than the one committed"))
    return found


def directory_digest(path: Path) -> int:
    """The digest of a zip file, as `archive.container.Container.close` computes it; 0 for what is no zip."""
    try:
        with zipfile.ZipFile(path) as zipped:
            start = zipped.start_dir
    except (zipfile.BadZipFile, NotImplementedError, ValueError, struct.error):  # what zipfile raises for damaged bytes
        return 0
    with open(path, "rb") as file:
        file.seek(start)
        crc = 0
        while data := file.read(1 << 20):
            crc = crc32(data, crc)
        return crc
