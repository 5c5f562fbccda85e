"""One checkpoint being written: files go to a hidden directory beside the tag's, which takes the tag's name when all is there.

    save_dir/.TAG.staged/   every rank's files, each durable when it is written
    save_dir/TAG/           the same directory, renamed, or exchanged with the one that a save under the same tag replaces
    save_dir/latest         replaced atomically after that

So whatever happens at whatever moment, `latest` names a directory that all ranks completed. What a crash leaves behind is hidden,
matches no tool's glob, is never loaded, and goes with the next save.
"""
from __future__ import annotations

import os
import re
import secrets
import shutil
from pathlib import Path
from typing import Callable, Collection

from ..archive import files
from ..errors import CommitError, DirectoryError, DsNvcompError
from ..log import logger
from . import STATES_SUFFIX, manifest
from .exchange import exchange
from .ranks import Ranks

_SUFFIX = ".staged"
_ASIDE = re.compile(r"\.(?P<name>.+)\.[0-9a-f]{8}\.old")  # see exchange(), where the kernel cannot


class Commit:
    """The directory of one tag, on every rank. Collective: `begin` and `finish` are called by all ranks."""

    def __init__(self, final, ranks: Ranks, *, fsync: bool):
        self.final, self._ranks, self._fsync = Path(final).absolute(), ranks, fsync
        self.staged = self.final.with_name(f".{self.final.name}{_SUFFIX}")
        self._published = False
        self._used = False

    def begin(self) -> None:
        """Clear what crashed saves left behind, and make the staging directory. Raises `CommitError` on all ranks."""
        self._together("clear leftovers", self._clear_leftovers, self.final.parent, by=self._ranks.leads_node)
        self._together("make the staging directory", self._make_staging, self.staged, undo=self.abandon)

    def _together(self, step: str, action: Callable[[], None], path: Path, *, by=True, undo=None) -> None:
        """Do `action` on the ranks `by`, and agree on the outcome. `undo` is done where it is certain that all ranks give up."""
        failure = None
        try:
            if by:
                action()
        except DsNvcompError as err:
            failure = err
        except Exception as err:  # of any kind: the other ranks are waiting to hear of it
            failure = DirectoryError(f"{type(err).__name__}: {err}", path=str(path))
            failure.__cause__ = err
        self._ranks.agree(failure, step, undo)

    def _clear_leftovers(self):
        for leftover in self.final.parent.glob(f".*{_SUFFIX}"):
            shutil.rmtree(leftover, ignore_errors=True)
        for aside in self.final.parent.glob(".*.old"):
            if match := _ASIDE.fullmatch(aside.name):
                place = aside.with_name(match["name"])
                if place.exists():
                    shutil.rmtree(aside, ignore_errors=True)
                else:
                    logger.warning(f"a save was cut off while it replaced {str(place)!r}; what was there before is put back.")
                    os.rename(aside, place)

    def _make_staging(self):
        if self.final.exists() and not self.final.is_dir():
            raise DirectoryError("A file is where the checkpoint directory should be; move it away.", path=str(self.final))
        self.staged.mkdir(parents=True, exist_ok=True)
        if stale := sorted(os.listdir(self.staged)):  # they would become part of the checkpoint
            raise DirectoryError(f"Leftovers of a save that was cut off cannot be removed: {', '.join(stale[:4])}. Remove the directory.",
                                 path=str(self.staged))

    def stage(self, path) -> Path | None:
        """Where to write a file whose place is `path`: in the staging directory, or None if it is not one of this checkpoint's."""
        try:
            inside = Path(path).absolute().relative_to(self.final)
        except ValueError:
            return None
        self._used = True
        target = self.staged / inside
        target.parent.mkdir(parents=True, exist_ok=True)
        return target

    def finish(self, failure: Exception | None, latest: str | None, written: dict[str, tuple[int, int]],
               links: Collection[str] = (), linkable: Collection[str] = ()) -> None:
        """Publish if no rank has a `failure`; then let `save_dir/latest` name `latest` if given. Raises `CommitError` on all ranks.

        Where no rank has staged a file, nothing is published. `written` are the staged files of this rank for the manifest:
        {path: (bytes, digest)}. `links` stand for the weights that files of this rank refer to in others, `linkable` for those that its
        own files have.
        """
        def durable():
            if failure is not None:
                raise failure
            if self._fsync:
                for directory, _, _ in os.walk(self.staged):
                    files.sync_directory(directory)
        self._together("save", durable, self.staged, undo=self.abandon)

        written, used, links, linkable = zip(*self._ranks.gather((written, self._used, links, linkable), "list the files"))
        if not any(used):  # DeepSpeed's save_16bit_model begins a checkpoint and writes beside it: what is there stays
            self.abandon()
            return
        self._check_links(links, linkable)
        self._together("write the manifest", lambda: self._write_manifest(written), self.staged / manifest.NAME,
                       by=self._ranks.rank == 0, undo=self.abandon)
        # Rank 0 first: where all see one file system, nothing is left for the leaders of other nodes.
        self._together("publish the checkpoint directory", self._publish, self.final, by=self._ranks.rank == 0, undo=self._give_up)
        self._together("publish the checkpoint directory on other nodes", self._publish, self.final, undo=self._give_up,
                       by=self._ranks.leads_node and self._ranks.rank != 0 and self.staged.exists())
        self._together("update 'latest'", lambda: write_latest(self.final.parent, latest, fsync=self._fsync),
                       self.final.parent / "latest", by=latest is not None and self._ranks.rank == 0)

    def _check_links(self, links, linkable):
        """All ranks know the same here, and come to the same end."""
        there = set().union(*linkable)
        others = [rank for rank, mine in enumerate(links) if not there.issuperset(mine)]
        if others:
            self.abandon()
            raise CommitError(f"The 16-bit weights of rank {', '.join(map(str, others[:16]))} are not those of the rank that writes the "
                              "model file, from which the master weights are stored as a difference: replicas that should be equal have "
                              "come apart, and the training is in doubt. The checkpoint is not current; the previous one is. To save all "
                              "the same, set nvcomp_checkpoint.link_master_weights to 'off'.", rank=others[0])

    def _write_manifest(self, written):
        entries = {str(Path(path).relative_to(self.staged)): entry for mine in written for path, entry in mine.items()}
        manifest.write(self.staged, self.final.name, self._ranks.world, entries, fsync=self._fsync)
        if self._fsync:
            files.sync_directory(self.staged)

    def abandon(self) -> None:
        """Forget the staged files; nothing that was there before has changed."""
        shutil.rmtree(self.staged, ignore_errors=True)

    def _give_up(self):
        """Where this rank should have published and did not. Elsewhere, the staged directory may be another's, or the replaced one."""
        if self._ranks.leads_node and not self._published:
            self.abandon()

    def _publish(self):
        replaced = None
        if not self.final.exists():
            os.rename(self.staged, self.final)
            self._published = True
        else:
            self._keep_strangers()
            exchange(self.final, self.staged)
            self._published = True
            # Of another name, so that nobody publishes it again if it cannot be removed (NFS keeps files that are open).
            replaced = self.final.with_name(f".{self.final.name}.{secrets.token_hex(4)}{_SUFFIX}")
            os.rename(self.staged, replaced)
        if self._fsync:
            files.sync_directory(self.final.parent)
        if replaced is not None:
            shutil.rmtree(replaced, ignore_errors=True)

    def _keep_strangers(self):
        """Files that somebody else put into the tag's directory stay in it; the host's own state files are replaced as a set."""
        for directory, _, names in os.walk(self.final):
            inside = Path(directory).relative_to(self.final)
            for name in names:
                target = self.staged / inside / name
                if not name.endswith(STATES_SUFFIX) and name != manifest.NAME and not target.exists():
                    target.parent.mkdir(parents=True, exist_ok=True)
                    os.link(Path(directory) / name, target, follow_symlinks=False)


def write_latest(save_dir: Path, tag: str, *, fsync: bool) -> None:
    """Replace `save_dir/latest`: a reader sees the old tag or the new one, never an empty or missing file."""
    with files.replacing(save_dir / "latest", fsync=fsync, name=".latest.part") as part, files.Writer(part, fsync=fsync) as file:
        file.write_at(0, [tag.encode()])
