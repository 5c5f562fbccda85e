"""One checkpoint being written: files go to a hidden directory beside the tag's, which takes the tag's name when all is there.

    save_dir/.TAG.staged/   every rank's files, each durable when it is written
    save_dir/TAG/           the same directory, renamed, or exchanged with the one that a save under the same tag replaces
    save_dir/latest         replaced atomically after that

So whatever happens at whatever moment, `latest` names a directory that all ranks completed. What a crash leaves behind is hidden,
matches no tool's glob, is never loaded, and goes with the next save.
"""
from __future__ import annotations

import os
import shutil
from pathlib import Path

from ..archive import files
from ..errors import DirectoryError
from . import manifest
from .exchange import exchange
from .ranks import Ranks

_SUFFIX = ".staged"


class Commit:
    """The directory of one tag, on every rank. Collective: `begin`, `finish` and `abandon` are called by all ranks."""

    def __init__(self, final, ranks: Ranks, *, fsync: bool):
        self.final, self._ranks, self._fsync = Path(final).absolute(), ranks, fsync
        self.staged = self.final.with_name(f".{self.final.name}{_SUFFIX}")

    def begin(self) -> None:
        """Clear what crashed saves left behind, and make the staging directory. Raises `CommitError` on all ranks."""
        failure = None
        try:
            if self._ranks.leads_node:
                for leftover in self.final.parent.glob(f".*{_SUFFIX}"):
                    shutil.rmtree(leftover, ignore_errors=True)
        except OSError as err:
            failure = err
        self._ranks.agree(failure, "clear leftovers")
        try:
            if self.final.exists() and not self.final.is_dir():
                raise DirectoryError("A file is where the checkpoint directory should be; move it away.", path=str(self.final))
            self.staged.mkdir(parents=True, exist_ok=True)
        except (OSError, DirectoryError) as err:
            failure = err
        self._ranks.agree(failure, "make the staging directory")

    def stage(self, path) -> Path | None:
        """Where to write a file whose place is `path`: in the staging directory, or None if it is not one of this checkpoint's."""
        try:
            inside = Path(path).absolute().relative_to(self.final)
        except ValueError:
            return None
        target = self.staged / inside
        target.parent.mkdir(parents=True, exist_ok=True)
        return target

    def finish(self, failure: Exception | None, latest: str | None, written: dict[str, tuple[int, int]]) -> None:
        """Publish if no rank has a `failure`; then let `save_dir/latest` name `latest` if given. Raises `CommitError` on all ranks.

        `written` are the staged files of this rank for the manifest: {path: (bytes, digest)}.
        """
        if failure is None and self._fsync:
            try:
                for directory, _, _ in os.walk(self.staged):
                    files.sync_directory(directory)
            except OSError as err:
                failure = err
        try:
            self._ranks.agree(failure, "save")
            self._write_manifest(written)
        except Exception:
            self.abandon()
            raise
        # Rank 0 first: where all see one file system, nothing is left for the leaders of other nodes.
        for mine in (self._ranks.rank == 0, self._ranks.leads_node):
            failure = None
            try:
                if mine and self.staged.exists():
                    self._publish()
            except OSError as err:
                failure = err
            self._ranks.agree(failure, "publish the checkpoint directory")
        failure = None
        try:
            if latest is not None and self._ranks.rank == 0:
                write_latest(self.final.parent, latest, fsync=self._fsync)
        except OSError as err:
            failure = err
        self._ranks.agree(failure, "update 'latest'")

    def _write_manifest(self, written):
        entries = {str(Path(path).relative_to(self.staged)): entry for mine in self._ranks.gather(written, "list the files")
                   for path, entry in mine.items()}
        failure = None
        try:
            if self._ranks.rank == 0:
                manifest.write(self.staged, self.final.name, self._ranks.world, entries, fsync=self._fsync)
                if self._fsync:
                    files.sync_directory(self.staged)
        except OSError as err:
            failure = err
        self._ranks.agree(failure, "write the manifest")

    def abandon(self) -> None:
        """Forget the staged files; nothing that was there before has changed."""
        shutil.rmtree(self.staged, ignore_errors=True)

    def _publish(self):
        if not self.final.exists():
            os.rename(self.staged, self.final)
        else:
            self._keep_strangers()
            exchange(self.staged, self.final)
        if self._fsync:
            files.sync_directory(self.final.parent)
        shutil.rmtree(self.staged, ignore_errors=True)  # now the replaced directory, if there was one

    def _keep_strangers(self):
        """Files that somebody else put into the tag's directory stay in it; the host's own state files are replaced as a set."""
        for directory, _, names in os.walk(self.final):
            inside = Path(directory).relative_to(self.final)
            for name in names:
                target = self.staged / inside / name
                if not name.endswith("_states.pt") and name != manifest.NAME and not target.exists():
                    target.parent.mkdir(parents=True, exist_ok=True)
                    os.link(Path(directory) / name, target, follow_symlinks=False)


def write_latest(save_dir: Path, tag: str, *, fsync: bool) -> None:
    """Replace `save_dir/latest`: a reader sees the old tag or the new one, never an empty or missing file."""
    part = save_dir / ".latest.part"
    with files.Writer(part, fsync=fsync) as file:
        file.write_at(0, [tag.encode()])
    os.replace(part, save_dir / "latest")
    if fsync:
        files.sync_directory(save_dir)
