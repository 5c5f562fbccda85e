"""Agreement among the ranks that write one checkpoint."""
from __future__ import annotations

import itertools
import os
import pickle
import time
from datetime import timedelta
from typing import Callable

import torch.distributed as dist

from ..errors import CommitError


class Ranks:
    """All ranks of the job, over a gloo group of our own: its timeout is ours to set, and NCCL's watchdog, which would abort the
    training while a slow rank writes, does not see it. Made with the first use, which must happen on all ranks."""

    def __init__(self, timeout: float):
        self.timeout = timeout
        self.rank = dist.get_rank() if dist.is_initialized() else 0
        self.world = dist.get_world_size() if dist.is_initialized() else 1
        self._group = None

    @property
    def leads_node(self) -> bool:
        """Whether this is the first rank on its machine; that is rank 0 where the launcher does not say."""
        local = os.environ.get("LOCAL_RANK")
        return local == "0" if local is not None else self.rank == 0

    def gather(self, value, step: str) -> list:
        """`value` of every rank, in order. Raises `CommitError` after the timeout, or when a rank is gone, or elsewhere. Then nobody
        knows what the others know: they may have had their answers."""
        if self.world == 1:
            return [value]
        try:
            found = self._all_gather((step, value))
        except Exception as err:  # gloo: RuntimeError of many wordings
            self._leave()
            raise CommitError(f"Not all {self.world} ranks answered at step {step!r} within {self.timeout:.0f} s: a rank died or hangs. "
                              f"'latest' names the previous checkpoint, or this one if all of it is there. ({err})",
                              rank=self.rank) from err
        for rank, (other, _) in enumerate(found):
            if other != step:
                raise CommitError(f"Rank {rank} is at step {other!r} and rank {self.rank} at {step!r}: they do not save the same "
                                  "checkpoints in the same order.", rank=rank)
        return [value for _, value in found]

    def _all_gather(self, value) -> list:
        found = [None] * self.world
        if self._group is None:
            self._group = dist.new_group(backend="gloo", timeout=timedelta(seconds=self.timeout))
        dist.all_gather_object(found, value, group=self._group)
        return found

    def _leave(self):
        """A group in which one collective failed is of no use any more; the next save makes another."""
        group, self._group = self._group, None
        if group is not None:
            try:
                dist.destroy_process_group(group)
            except Exception:  # its connections are broken already
                pass

    def agree(self, failure: Exception | None, step: str, undo: Callable[[], None] | None = None) -> None:
        """Return on all ranks if none has a failure, else raise `CommitError` on all of them, naming the ranks and causes. `undo` is
        called before that, on ranks that know that all others know: never where a rank did not answer."""
        failures = self.gather(None if failure is None else f"{type(failure).__name__}: {failure}", step)
        failed = [rank for rank, message in enumerate(failures) if message is not None]
        if failed:
            if undo is not None:
                undo()
            causes = "; ".join(f"rank {rank}: {failures[rank]}" for rank in failed[:8])
            raise CommitError(f"{len(failed)} of {self.world} ranks failed to {step}. The checkpoint is not current; the previous one "
                              f"is. {causes}", rank=failed[0]) from failure


class StoreRanks(Ranks):
    """The same for one save that goes on behind training. A collective on another thread would get between those of the training, so
    the ranks meet in the key-value store over which the job was set up: rank 0 collects, and says what it has."""

    def __init__(self, timeout: float, store, name: str):
        super().__init__(timeout)
        self._store = dist.PrefixStore(f"ds_nvcomp/{name}", store) if store is not None else None
        self._rounds = itertools.count()
        self._grace = min(10.0, timeout)  # seconds, for the answer of a rank 0 that had to wait as long as it may

    def _all_gather(self, value):
        here = f"{next(self._rounds)}"
        self._store.set(f"{here}/{self.rank}", pickle.dumps(value))
        end = time.monotonic() + self.timeout
        if self.rank:
            if not self._await([f"{here}/all"], end + self._grace):
                raise TimeoutError("rank 0 did not answer")
        elif self._await([f"{here}/{rank}" for rank in range(self.world)], end):
            self._store.set(f"{here}/all", pickle.dumps([pickle.loads(self._store.get(f"{here}/{rank}")) for rank in range(self.world)]))
        else:
            missing = [str(rank) for rank in range(self.world) if not self._store.check([f"{here}/{rank}"])]
            self._store.set(f"{here}/all", pickle.dumps(f"no answer from rank {', '.join(missing[:16])}"))
        found = pickle.loads(self._store.get(f"{here}/all"))
        if isinstance(found, str):
            raise TimeoutError(found)
        return found

    def _await(self, keys, end) -> bool:
        """Whether all keys are there before `end`. Asking now and then, since a client that waits in the store blocks all threads of its
        process there."""
        pause = 0.001
        while not self._store.check(keys):
            if time.monotonic() > end:
                return False
            time.sleep(pause)
            pause = min(1.5 * pause, 0.25)
        return True

    def _leave(self):
        pass

    def part(self) -> None:
        """After the last step: rank 0, in which the store may live, waits until the others have had their answers."""
        if self.world == 1:
            return
        if self.rank:
            self._store.set(f"parted/{self.rank}", b"")
        else:
            self._await([f"parted/{rank}" for rank in range(1, self.world)], time.monotonic() + self._grace)


def job_store():
    """The store over which torch.distributed was initialised, or None where it was not."""
    return dist.distributed_c10d._get_default_store() if dist.is_initialized() else None
