"""Work behind training: one thread, one thing after the other, and no failure that goes unheard."""
from __future__ import annotations

import atexit
import queue
import threading
import time
import weakref
from typing import Callable

from ..log import logger


_all: "weakref.WeakSet[Background]" = weakref.WeakSet()


def wait() -> None:
    """Wait until all asynchronous saves of this process are complete and current. Raises what one of them raised (`CommitError`)."""
    for background in list(_all):
        background.wait()


class Background:
    """Runs jobs in order on one thread, at most `limit` of them waiting or running. What a job raises is raised by the next `wait` or
    `make_room`; at the exit of the interpreter jobs are finished, and failures logged."""

    def __init__(self, limit: int = 1):
        self._limit = limit
        _all.add(self)
        self._pending: list[tuple[str, threading.Event]] = []
        self._errors: list[Exception] = []
        self._jobs: queue.SimpleQueue = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def submit(self, name: str, job: Callable[[], None]) -> None:
        """Run `job` after those before it. `name` is for messages."""
        done = threading.Event()
        self._pending.append((name, done))
        if self._thread is None or not self._thread.is_alive():  # threads do not survive a fork
            self._jobs = queue.SimpleQueue()
            self._thread = threading.Thread(target=self._run, args=(self._jobs,), name="ds_nvcomp save", daemon=True)
            self._thread.start()
            _finish_at_exit(self._finish)  # which also keeps this alive until then
        self._jobs.put((name, job, done))

    def _run(self, jobs):
        while True:
            name, job, done = jobs.get()
            try:
                job()
            except Exception as err:
                logger.error(f"{name} failed: {err}")
                self._errors.append(err)
            finally:
                done.set()
                job = None  # what it held is not needed until the next one comes

    @property
    def busy(self) -> bool:
        """Whether a job waits or runs."""
        self._pending = [entry for entry in self._pending if not entry[1].is_set()]
        return bool(self._pending)

    def make_room(self) -> None:
        """Wait until another job may be submitted, and say so. Raises what an earlier job raised."""
        if self.busy and len(self._pending) >= self._limit:
            began, (name, done) = time.perf_counter(), self._pending[-self._limit]
            done.wait()
            logger.info(f"waited {time.perf_counter() - began:.2f} s for {name}: saves come faster than they are written.")
        self._raise()

    def wait(self) -> None:
        """Wait for all jobs. Raises what one of them raised."""
        for _, done in list(self._pending):
            done.wait()
        self._pending.clear()
        self._raise()

    def _raise(self):
        if self._errors:
            error, *others = self._errors
            self._errors = []
            for other in others:
                logger.error(f"and before that was heard: {other}")
            raise error

    def _finish(self):
        try:
            self.wait()
        except Exception as err:
            logger.error(f"at exit: {err}")


# Before the interpreter stops taking threads, which atexit comes after. The function has no public name (CPython 3.9 to 3.14).
_finish_at_exit = getattr(threading, "_register_atexit", atexit.register)
