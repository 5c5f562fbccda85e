"""`codec: "auto"`: measures once, chooses, learns from the saves, and says so when it changes its mind."""
from __future__ import annotations

import logging
import os
from dataclasses import replace
from pathlib import Path

import torch

from ..config import Config
from ..errors import DsNvcompError
from ..log import logger
from ..pipeline import speeds
from .choose import CANDIDATES, Choice, Target, choose, rate
from .probe import probe

GB = 1e9
NEWEST = 0.5        # weight of the latest save in what is believed of the target
WORTH = 0.10        # of stall or total: what a change of mind must gain
TELLING = 64 << 20  # raw bytes; a smaller save tells latencies, not speeds


class Chooser:
    """One for each process that saves. It talks to no other: ranks may choose differently, and all files are readable alike."""

    def __init__(self, config: Config, *, device=None, rank: int = 0):
        """`device` is where the tensors to save are; left out, the GPU if this configuration would use one. Only rank 0 logs."""
        self._given, self._rank = config, rank
        self._device = None if device is None else torch.device(device)
        self._speeds: list[speeds.Speed] | None = None
        self._copy: float | None = None
        self._place: int | None = None     # the file system that `_write` is of
        self._write: float | None = None   # GB/s
        self._choice: Choice | None = None

    def config(self, directory) -> Config:
        """The configuration to save to `directory` with: the given one, with a codec in place of "auto".

        The first call measures codecs and the directory's file system (or that of its nearest parent, if it is not there yet), for a
        few seconds at most. Where that fails there is a warning, and deflate until a save has told more: it never fails a save.
        """
        if self._given.codec != "auto":
            return self._given
        try:
            self._measure(Path(directory))
        except (DsNvcompError, OSError, torch.OutOfMemoryError) as err:
            logger.warning(f"codec auto: could not measure here ({err}); using deflate.")
        if self._write is not None and self._speeds:
            self._decide()
        if self._choice is None:
            return self._given.concrete
        chosen = self._choice.speed
        return replace(self._given, codec=chosen.codec, chunk_bytes=chosen.chunk_bytes, threads=chosen.threads)

    def observe(self, raw_bytes: int, stored_bytes: int, encode_seconds: float, write_seconds: float) -> None:
        """Learn from a save of this process that began with `config`.

        Of a sync save, whose encoding and writing overlap, both begin with the save, and `write_seconds` lasts until its files are
        written (and durable): unless that is clearly later than the last byte was encoded, the target may be faster than what it was
        given, so it is believed to be at least that fast. Of an asynchronous one, `write_seconds` is the writing alone. A thread other
        than `config`'s may call this.
        """
        if raw_bytes < TELLING or write_seconds <= 0:
            return
        seen = stored_bytes / GB / write_seconds
        if self._given.behind or write_seconds > encode_seconds * (1 + WORTH):
            self._write = seen if self._write is None else self._write + NEWEST * (seen - self._write)
        elif self._write is not None:
            self._write = max(self._write, seen)

    def _measure(self, directory):
        while not directory.is_dir() and directory != directory.parent:
            directory = directory.parent
        place = os.stat(directory).st_dev
        if place != self._place:
            self._place, self._write, self._choice = place, None, None  # also when it fails: it is not tried again at each save
            self._write = probe(directory, self._given).write
        if self._speeds is None:
            self._speeds = []
            device = self._device or speeds.default_device(self._given)
            try:
                self._speeds = list(speeds.measure(speeds.settings(self._given, device, CANDIDATES, tuned=CANDIDATES), device))
                self._copy = speeds.copy_speed(device)
            finally:
                torch.cuda.empty_cache()  # training needs what the sample took; does nothing where CUDA is not in use

    def _decide(self):
        target = Target(self._write, self._copy, self._given.behind)
        found, before = choose(self._speeds, target), self._choice
        if before is not None:
            now = rate(before.speed, target)
            if not (found.stall < now.stall * (1 - WORTH) or found.stall <= now.stall and found.total < now.total * (1 - WORTH)):
                return
        self._choice = found
        logger.log(logging.DEBUG if self._rank else logging.INFO,
                   f"codec auto: {found.reason}" + (f"; before: {before.speed.codec}" if before else ""))
