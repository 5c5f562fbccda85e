"""Pack and unpack checkpoints that exist already: a file, a tag's directory, a whole save_dir, any tree with torch files in it.

    .NAME.<hex>.part/    everything is written here, beside the destination, read back, compared, made durable
    NAME                 then this name is given to it: by one rename, or in place by one exchange

So at every instant the name has a complete checkpoint, the old or the new, and whatever fails leaves the source as it was.
The pickles are executed, as DeepSpeed and torch.load(weights_only=False) execute them: convert only files that you would train
from.
"""
from __future__ import annotations

import os
import secrets
import shutil
import stat
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Callable

from ..archive import files
from ..archive.records import is_torch_zip
from ..archive.scan import scan
from ..config import Config
from ..errors import ArchiveError, DirectoryError, DsNvcompError
from . import STATES_SUFFIX, distributed, manifest
from .exchange import exchange
from .repack import Portion, Progress, Repacking, explaining, plan
from .verify import TORCH_SUFFIXES, refuse_parts

__all__ = ["pack", "unpack", "Report", "Progress"]


@dataclass
class Report:
    """`converted` files (relative paths; "." for a single file) and the bytes of all files before and after."""
    destination: str
    converted: list[str] = field(default_factory=list)
    copied: int = 0
    bytes_before: int = 0
    bytes_after: int = 0


def pack(src, dst=None, config=None, *, all_files: bool = False, check: bool = True,
         progress: Progress | None = None) -> Report:
    """Compress the torch files of `src` (a file or a directory) into `dst`, or in place.

    In a tree that has DeepSpeed's `*_states.pt` only those are compressed, as the engine does: the others are for other
    readers. In a directory of torch.distributed.checkpoint (Megatron's `torch_dist`, too) the items of `*.distcp` are. In
    another tree `*.pt`, `*.pth` and `*.bin` are; with `all_files` every torch zip is. A file given by itself
    always is. What is compressed already is compressed anew with this `config`. Every other file is copied byte for byte, and
    so is one that would not shrink.

    Raises `DirectoryError` for paths that are in the way or change meanwhile, `ConfigError`, `EncodeError`,
    `CodecUnavailableError`, `FormatError`s for damaged files, and OSError. The source is then as it was.
    """
    config = Config.of(config)

    def write(obj, target, note):
        from .. import archive
        # Durable at the end, with all the others: the file is renamed within the staging directory only.
        archive.save(obj, target, replace(config, fsync=False), progress=note)

    def worth(scanned):
        return scanned.compressed or any(stored.raw_bytes >= config.min_bytes for stored in scanned.storages)

    return _Conversion(src, dst, _wanted_to_pack(Path(src), all_files), worth, write, config.fsync, check, progress,
                       must_shrink=True).run()


def unpack(src, dst=None, *, fsync: bool = True, check: bool = True, progress: Progress | None = None) -> Report:
    """Write every torch file of `src` (a file or a directory) that needs ds_nvcomp as torch.save writes it, into `dst` or in place.

    Those are the ones with compressed tensors or a seal. The others are copied byte for byte. Raises as `pack` does.
    """
    def write(obj, target, note):
        import torch
        torch.save(obj, target)

    return _Conversion(src, dst, lambda path: is_torch_zip(path) and _needs_us(scan(path)), _needs_us, write,
                       fsync, check, progress, must_shrink=False).run()


def _needs_us(scanned) -> bool:
    return scanned.compressed or any(name.startswith("ds_nvcomp.") for name in scanned.globals)  # those of the seal, in a small one


def _wanted_to_pack(src: Path, all_files: bool) -> Callable[[Path], bool]:
    if all_files or not src.is_dir():
        return is_torch_zip
    states = any(name.endswith(STATES_SUFFIX) for _, _, names in os.walk(src) for name in names)
    suffixes = (STATES_SUFFIX,) if states else TORCH_SUFFIXES
    # What lies beside items, such as Megatron's common.pt, is what tells its readers what the directory is: it stays plain.
    beside = {folder for folder, _, _ in os.walk(os.path.realpath(src)) if distributed.is_distributed(folder)}
    return lambda path: path.name.endswith(suffixes) and str(path.parent) not in beside and is_torch_zip(path)


class _Conversion:
    """`wanted(path)` says which files are converted, `worth(scan)` which items of distributed checkpoints."""

    def __init__(self, src, dst, wanted, worth, write, fsync, check, progress, *, must_shrink):
        # a link that is named is followed, one that is met is not
        self.src, self.in_place = Path(os.path.realpath(src)), dst is None
        self.dst = self.src if dst is None else Path(os.path.abspath(dst))
        self.wanted, self.worth, self.write = wanted, worth, write
        self.fsync, self.check, self.must_shrink = fsync, check, must_shrink
        self.progress = progress or Progress()
        self.report = Report(str(self.dst))

    def run(self) -> Report:
        self._check_paths()
        before = _snapshot(self.src)
        regular = [path for path, entry in before.items() if stat.S_ISREG(entry.mode)]
        groups = self._distributed(before)
        parts = {path for group in groups for path in self._parts(group)}
        jobs = {path for path in regular if not path.endswith((distributed.SUFFIX, distributed.METADATA)) and self.wanted(self.src / path)}
        if not jobs and self.src.is_file() and self.must_shrink:
            raise ArchiveError("The file is not a torch zip; there is nothing to compress in it.", path=str(self.src))
        self.progress.total(sum(before[path].bytes for path in jobs | {path for path in parts if path.endswith(distributed.SUFFIX)}))
        staging = self.dst.with_name(f".{self.dst.name}.{secrets.token_hex(4)}.part")
        try:
            staging.mkdir()
            # below a directory of its own, so that torch.save names the zip's root after the file
            new = staging / self.dst.name
            if self.src.is_dir():
                new.mkdir()
            for path, entry in before.items():
                if path not in parts:
                    self._stage(path, entry, new / path, path in jobs)
            for group in groups:
                self._repack(group, new)
            for path in regular:
                if Path(path).name == manifest.NAME:
                    manifest.renew((new / path).parent, fsync=self.fsync)
            for path in sorted(before, reverse=True):  # directories after what is in them, which touches their times
                _copy_attributes(self.src / path, new / path)
            if self.fsync:
                _make_durable(new)
            self._publish(new, before)
        except OSError as err:
            if isinstance(err, DsNvcompError):
                raise
            raise DirectoryError(f"Could not write: {err.strerror or err} ({err.filename or staging}). The source is as it "
                                 "was.",
                                 path=str(self.dst)) from err
        finally:
            _remove(staging)
        return self.report

    def _check_paths(self):
        src, dst = str(self.src), str(self.dst)
        if not self.src.exists():
            raise DirectoryError("There is no such file or directory.", path=src)
        refuse_parts(self.src)
        if not (self.src.is_file() or self.src.is_dir()):
            raise DirectoryError("Expected a file or a directory.", path=src)
        if self.in_place:
            return
        if os.path.lexists(self.dst):
            raise DirectoryError("The destination exists. Name one that does not, or none to convert in place.", path=dst)
        if not self.dst.parent.is_dir():
            raise DirectoryError("The directory of the destination does not exist; make it first.", path=dst)
        if self.src.is_dir() and Path(os.path.realpath(self.dst)).is_relative_to(self.src):
            raise DirectoryError(f"The destination is inside the source {src!r}. Name one outside of it.", path=dst)

    def _stage(self, path, entry, target, job):
        source = self.src / path
        if stat.S_ISDIR(entry.mode):
            if path != ".":
                target.mkdir()
        elif stat.S_ISLNK(entry.mode):
            os.symlink(self._retarget(source), target)
        elif stat.S_ISREG(entry.mode):
            self.report.bytes_before += entry.bytes
            if job:
                self._convert(path, entry, source, target)
            else:
                self._copy(source, target)
            self.report.bytes_after += target.stat().st_size
        else:
            raise DirectoryError("There is something that is no file, directory or link; a checkpoint has none. Move it away.",
                                 path=str(source))

    def _distributed(self, before) -> list[Repacking]:
        """What is to be done in directories of distributed checkpoints. Those that are not finished are copied as they are."""
        groups = []
        for path, entry in before.items():
            folder = self.src / path
            if not stat.S_ISDIR(entry.mode) or not distributed.is_distributed(folder):
                continue
            hidden = any(name.startswith(".") for name in Path(path).parts)
            if path != "." and (hidden or not distributed.is_finished(folder)):
                continue
            listing = distributed.read_items(folder)
            for file in (*distributed.by_file(listing), *listing.metadata):
                there = before.get(self._relative(folder / file))
                if (folder / file).exists() and (there is None or not stat.S_ISREG(there.mode)):
                    raise DirectoryError("The file is a link, and what it leads to may have items at other places after a conversion. "
                                         "Convert a checkpoint that has its own files.", path=str(folder / file))
            wanted = plan(listing, self.worth)
            if wanted:
                groups.append(Repacking(listing, wanted, self.write, must_shrink=self.must_shrink, check=self.check,
                                        progress=self.progress))
        return groups

    def _relative(self, path: Path) -> str:
        return path.relative_to(self.src).as_posix()

    def _parts(self, group: Repacking) -> list[str]:
        return [self._relative(group.listing.directory / name) for name in (*group.wanted, *group.listing.metadata)]

    def _repack(self, group: Repacking, new: Path) -> None:
        folder = group.listing.directory
        converted = {self._relative(folder / file) for file in group.run(new / folder.relative_to(self.src))}
        for path in self._parts(group):
            self.report.bytes_before += (self.src / path).stat().st_size
            self.report.bytes_after += (new / path).stat().st_size
            self.report.copied += path not in converted
        self.report.converted += sorted(converted)

    def _retarget(self, link: Path) -> str:
        """What a link says in its new place: links within the tree stay within theirs, links out of it lead where they led."""
        text = os.readlink(link)
        if self.in_place or not self.src.is_dir():
            return text
        leads_to = Path(os.path.normpath(link.parent / text))
        if leads_to.is_relative_to(self.src):
            return os.path.relpath(leads_to, link.parent)
        return str(leads_to)

    def _copy(self, source, target):
        self.report.copied += 1
        if self.in_place:  # the same bytes under a second name: neither time nor space
            try:
                os.link(source, target)
                return
            except OSError:  # file systems without hard links
                pass
        shutil.copyfile(source, target)
        if self.check and not _same_bytes(source, target):
            raise DirectoryError("The copy of a file reads differently from the file. The disk or memory is faulty, or the "
                                 "file is being written; the source is as it was.", path=str(source))

    def _convert(self, path, entry, source, target):
        from .compare import assert_same
        from .locations import Loaded
        self.progress.file(str(source.name if path == "." else path))
        done = Portion(self.progress, entry.bytes)
        with explaining(source):
            loaded = Loaded(source)
            with loaded as obj:
                self.write(obj, target, done.note)
            if self.must_shrink and not scan(source).compressed and \
                    (target.stat().st_size >= entry.bytes or not scan(target).compressed):
                target.unlink()
                self._copy(source, target)
            else:
                if self.check:
                    assert_same(loaded.object, Loaded(target).object, path=str(source))
                self.report.converted.append(path)
        done.finish()

    def _publish(self, new, before):
        """Give the destination's name to `new`, unless the source is not what was read."""
        self._assert_unchanged(before, self.src)
        if not self.in_place:
            if os.path.lexists(self.dst):
                raise DirectoryError("The destination has come into being meanwhile; it is left alone.", path=str(self.dst))
            os.rename(new, self.dst)
        elif self.src.is_dir():
            exchange(self.dst, new)
            try:  # a tag that a training run has just added would go with the old tree
                self._assert_unchanged(before, new)
            except BaseException:
                exchange(self.dst, new)
                raise
        else:
            os.replace(new, self.dst)
        if self.fsync:
            files.sync_directory(self.dst.parent)

    def _assert_unchanged(self, before, where):
        now = _snapshot(where)
        changed = sorted(path for path in before.keys() | now.keys() if before.get(path) != now.get(path))
        if changed:
            raise DirectoryError(f"{changed[0]!r} was changed while the checkpoint was being converted, and so nothing was "
                                 "replaced. Convert when nothing writes here, or to another destination.", path=str(self.src))


@dataclass(frozen=True)
class _Entry:
    """What tells that a file was not touched. A directory's times are left out: reading files may set them on some file
    systems.
    """
    mode: int
    bytes: int
    modified: int
    inode: int


def _snapshot(root: Path) -> dict[str, _Entry]:
    """Everything under `root` by relative path, parents before children; "." is the root itself. Links are not followed."""
    found = {}
    pending = [(".", root)]
    while pending:
        relative, path = pending.pop()
        status = os.lstat(path)
        folder = stat.S_ISDIR(status.st_mode)
        file = (0, 0, 0) if folder else (status.st_size, status.st_mtime_ns, status.st_ino)
        found[relative] = _Entry(status.st_mode, *file)
        if folder:
            names = sorted(os.listdir(path), reverse=True)
            pending += [(name if relative == "." else f"{relative}/{name}", path / name) for name in names]
    return found


def _copy_attributes(source: Path, target: Path) -> None:
    """Mode and times, so that tools that sort by age go on working; the owner where this user may."""
    status, copy = os.lstat(source), os.lstat(target)
    if (status.st_dev, status.st_ino) == (copy.st_dev, copy.st_ino):
        return
    shutil.copystat(source, target, follow_symlinks=False)
    if (status.st_uid, status.st_gid) != (os.geteuid(), os.getegid()):
        try:
            os.chown(target, status.st_uid, status.st_gid, follow_symlinks=False)
        except PermissionError:
            pass


def _make_durable(root: Path) -> None:
    for path, entry in _snapshot(root).items():
        if stat.S_ISDIR(entry.mode):
            files.sync_directory(root / path)
        elif stat.S_ISREG(entry.mode):
            fd = os.open(root / path, os.O_RDONLY)
            try:
                os.fsync(fd)
            finally:
                os.close(fd)
    files.sync_directory(root.parent)


def _same_bytes(a: Path, b: Path) -> bool:
    with open(a, "rb") as mine, open(b, "rb") as other:
        while True:
            left, right = mine.read(1 << 20), other.read(1 << 20)
            if left != right:
                return False
            if not left:
                return True


def _remove(staging: Path) -> None:
    for directory, _, _ in os.walk(staging):  # a read-only directory of the source was copied as one
        with suppress(OSError):  # by now the conversion is done, or has failed for a reason of its own
            os.chmod(directory, 0o700)
    shutil.rmtree(staging, ignore_errors=True)
