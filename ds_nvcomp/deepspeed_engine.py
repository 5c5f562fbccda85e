"""DeepSpeed's CheckpointEngine over compressed, committed checkpoints; and the two hooks that put it in place.

DeepSpeed (0.16 to 0.19) calls, on every rank: create(info), makedirs, save for each file that rank writes, commit(info), and then
writes `latest` by itself. `info` is a tag or a CheckpointCommitInfo, by version.
"""
from __future__ import annotations

import copy
import functools
import hashlib
import io
import os
import secrets
import time
import weakref
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Callable

import torch
from deepspeed.runtime.checkpoint_engine.checkpoint_engine import CheckpointEngine


from .archive import SaveReport, files, load
from .archive.writer import Snapshot, save, snapshot, snapshot_later, write
from .checkpoint import STATES_SUFFIX
from .checkpoint.auto import Chooser
from .checkpoint.background import Background, wait as wait_for_all
from .checkpoint.commit import Commit
from .checkpoint.ranks import Ranks, StoreRanks, job_store
from .config import Config
from .deepspeed_links import Links, links_of
from .errors import CommitError, ConfigError, DsNvcompError, SaveError, UnsupportedSetupError
from .log import logger

BLOCK = "nvcomp_checkpoint"


class NvcompCheckpointEngine(CheckpointEngine):
    """Saves each rank's files compressed, and makes the checkpoint current on all ranks or on none."""

    def __init__(self, config_params=None, config: Config | None = None):
        super().__init__(config_params)
        self.name = "NvcompCheckpointEngine"
        self.config = Config.of(config if config is not None else _block(config_params))
        self.save_latest: str | None = None     # the tag that `latest` shall name, set by the hook around save_checkpoint
        self._ranks = Ranks(self.config.timeout)
        self._chooser, self._chosen = Chooser(self.config, rank=self._ranks.rank), self.config.concrete
        self._host = lambda: None
        self._tag: str | None = None
        self._final: Path | None = None
        self._commit: Commit | None = None
        self._saved: _Saved | None = None
        self._cached = None
        self._background = Background(self.config.in_flight)
        self._overlapped = Background(limit=1 << 30)  # snapshots under way; what bounds them is `_background`
        self._store, self._name, self._saves = job_store(), None, 0
        self._events: list = []

    def attach(self, host) -> None:
        """Remember the DeepSpeedEngine (weakly), whose monitor gets an event per save."""
        self._host = weakref.ref(host)

    # -- saving ---------------------------------------------------------------------------------------------------------------

    def create(self, info) -> None:
        """Begin the checkpoint `info`. One that was begun and never committed is forgotten. Raises what an earlier asynchronous save
        raised; waits for it where it is not done."""
        if self._final is not None:
            logger.warning(f"checkpoint {self._tag!r} was begun and never committed; it is discarded.")
        self._forget()
        self._background.make_room()
        self._tell_monitor()
        self._tag, self._cached = str(getattr(info, "tag", info)), None
        self._saved = _Saved(self._tag)
        save_dir = getattr(info, "save_dir", None)
        if save_dir is not None:
            self._open(Path(save_dir) / self._tag)

    def _open(self, final: Path) -> None:
        self._final = final.absolute()
        self._chosen = self._chooser.config(self._final.parent)
        if not self.config.behind:
            commit = Commit(self._final, self._ranks, fsync=self.config.fsync)
            commit.begin()
            self._commit = commit

    def _forget(self):
        if self._commit is not None:
            self._commit.abandon()
        self._commit = self._final = self._saved = None

    def makedirs(self, path, exist_ok=False):
        """Make `path`, unless it is the checkpoint's own directory: that one appears when it is complete."""
        if self._tag is not None and Path(path).parts[-len(Path(self._tag).parts):] == Path(self._tag).parts:
            if self._final is None:  # DeepSpeed < 0.17 passes no directory to create()
                self._open(Path(path))
            return
        os.makedirs(path, exist_ok=exist_ok)

    def save(self, state_dict, path: str) -> None:
        """Take one file: written when this returns, or with `async` in host memory. A failure is kept until `commit`, where all ranks
        learn of it; raising here would hang the others."""
        if self._saved is None:
            self._saved = _Saved(self._tag)
        try:
            self._save(state_dict, Path(path).absolute())
        except Exception as err:
            self._saved.fail(err, path, self._ranks.rank)

    def _save(self, state_dict, path: Path) -> None:
        saved, states = self._saved, path.name.endswith(STATES_SUFFIX)
        if self._final is None or not path.is_relative_to(self._final):  # such as save_16bit_model's, beside the checkpoints
            if states:
                saved.reports.append(save(state_dict, path, self.config))
            else:
                _save_plain(state_dict, path)
        elif self._commit is None:
            saved.snapshots[path] = self._take(state_dict, path) if states else _plain_file(state_dict)
        elif states:
            target = self._commit.stage(path)
            links = self._links(path)
            report = write(state_dict, target, self._chosen, root=path.stem, links=links.own)
            saved.add(target, report)
            saved.have(links)
            self._chooser.observe(report.raw_bytes, report.stored_bytes, report.encode_seconds, report.seconds)
        else:
            _save_plain(state_dict, self._commit.stage(path))

    def _take(self, state_dict, path) -> Callable[[], Snapshot]:
        """A function that returns the snapshot, when it is taken."""
        saved, links = self._saved, self._links(path)
        if not self.config.overlap:
            taken = snapshot(state_dict, self._chosen, root=path.stem, links=links.own)
            saved.have(links)
            return lambda: taken
        host = self._host()
        buffers = {buffer.untyped_storage().data_ptr() for buffer in host.module.buffers()} if host is not None else ()
        take = Future()
        later = snapshot_later(state_dict, self._chosen, root=path.stem, moving=buffers, links=links.own)  # forward passes change buffers

        def snap():
            taken = later()
            saved.have(links)
            return taken
        self._overlapped.submit(f"the snapshot of {path.name}", lambda: _fulfil(take, snap))
        return take.result

    def _links(self, path: Path) -> Links:
        """What of an optimizer file is stored as a difference from weights in the model file."""
        wanted = self.config.link_master_weights == "auto" and path.name.endswith(f"optim{STATES_SUFFIX}")
        return links_of(self._host()) if wanted else Links()

    def settle(self) -> None:
        """Wait until parameters and optimizer state may change again: called before each optimizer step."""
        if self._overlapped.busy:
            began = time.perf_counter()
            self._overlapped.wait()
            logger.debug(f"the optimizer waited {time.perf_counter() - began:.3f} s for the snapshot.")

    def commit(self, info) -> bool:
        """Publish the checkpoint on all ranks, or raise `CommitError` on all of them and leave the previous one current. With `async`,
        do so behind training: the next save, `wait` or load raises what went wrong."""
        commit, saved, final = self._commit, self._saved or _Saved(self._tag), self._final
        self._commit = self._saved = self._final = None
        latest, self.save_latest = self.save_latest, None
        if commit is not None:
            commit.finish(saved.failure, latest, saved.written, saved.links, saved.linkable)
            self._report(saved, self._ranks)
            self._tell_monitor()
        elif final is not None:
            if self._name is None:  # once, by a collective: what the keys of this engine begin with, on all ranks
                self._name = self._ranks.gather(secrets.token_hex(4), "agree on a name")[0]
            self._saves += 1
            ranks = StoreRanks(self.config.timeout, self._store, f"{self._name}/{self._saves}")
            seconds = time.perf_counter() - saved.began
            self._background.submit(f"the save of checkpoint {saved.tag!r}", lambda: self._finish(saved, ranks, final, latest, seconds))
        else:
            self._ranks.agree(saved.failure, "save")
        return True

    def _finish(self, saved: "_Saved", ranks: StoreRanks, final: Path, latest: str | None, blocked: float) -> None:
        """Write and publish what was taken; on the background thread."""
        commit = Commit(final, ranks, fsync=self.config.fsync)
        commit.begin()
        for path in list(saved.snapshots):
            try:
                taken = saved.snapshots.pop(path)()  # its memory is free for the next save when it is written
                target = commit.stage(path)
                began = time.perf_counter()
                report = taken.write(target)
                if report is not None:
                    saved.add(target, report)
                    self._chooser.observe(report.raw_bytes, report.stored_bytes, report.encode_seconds, time.perf_counter() - began)
            except Exception as err:
                saved.fail(err, path, ranks.rank)
            taken = None
        commit.finish(saved.failure, latest, saved.written, saved.links, saved.linkable)
        self._report(saved, ranks, blocked)
        ranks.part()

    def wait(self) -> None:
        """Wait until asynchronous saves are complete and current. Raises `CommitError` for one that is not."""
        self._background.wait()
        self._tell_monitor()

    def _report(self, saved: "_Saved", ranks: Ranks, blocked: float | None = None):
        mine = sum(r.raw_bytes for r in saved.reports), sum(r.stored_bytes for r in saved.reports), len(saved.reports)
        try:
            raw, stored, count = (sum(column) for column in zip(*ranks.gather(mine, "report")))
        except CommitError as err:
            logger.warning(f"checkpoint {saved.tag} is committed, but: {err}")
            return
        seconds = time.perf_counter() - saved.began
        if ranks.rank != 0 or not raw:
            return
        logger.info(f"checkpoint {saved.tag}: {count} files, {raw / 1e9:.3f} GB stored as {stored / 1e9:.3f} GB "
                    f"(ratio {stored / raw:.3f}, {raw / stored:.2f}x) in {seconds:.2f} s, {raw / seconds / 1e9:.2f} GB/s"
                    + ("" if blocked is None else f"; training waited {blocked:.2f} s"))
        self._events += [(f"Checkpoint/nvcomp/{name}", value) for name, value in (
            ("raw_bytes", raw), ("stored_bytes", stored), ("ratio", stored / raw), ("seconds", seconds),
            ("seconds_blocked", seconds if blocked is None else blocked), ("GB_per_second", raw / seconds / 1e9))]

    def _tell_monitor(self):
        """DeepSpeed's monitors are for its own thread."""
        host, events, self._events = self._host(), self._events, []
        if events and host is not None and getattr(host.monitor, "enabled", False):
            host.monitor.write_events([(name, value, host.global_samples) for name, value in events])

    # -- loading --------------------------------------------------------------------------------------------------------------

    def load(self, path: str, map_location=None):
        """torch.load of `path`. DeepSpeed reads a model file twice in a row; the second read gets what the first one decoded."""
        wait_for_all()
        status = os.stat(path)
        key = os.path.realpath(path), status.st_mtime_ns, status.st_size, _location_key(map_location)
        cached, self._cached = self._cached, None
        if cached is not None and cached[0] == key:
            return cached[1]
        state = load(path, map_location=map_location, weights_only=False)
        if os.path.basename(path).endswith("model_states.pt"):
            self._cached = key, state
            return _copy_containers(state)
        return state

    # -- DeepSpeed's questions ------------------------------------------------------------------------------------------------

    def is_decoupled(self) -> bool:
        return False

    def preserves_storage_sharing(self) -> bool:
        """False spares DeepSpeed a copy of every tensor to the host: only the used span of a storage is written anyway."""
        return False

@dataclass
class _Saved:
    """What one rank has of the checkpoint that is being saved."""
    tag: str | None
    began: float = field(default_factory=time.perf_counter)
    failure: Exception | None = None
    reports: list[SaveReport] = field(default_factory=list)
    written: dict[str, tuple[int, int]] = field(default_factory=dict)   # staged path: bytes and digest
    snapshots: dict[Path, Callable] = field(default_factory=dict)  # what is still to be written, when it is called
    links: set[str] = field(default_factory=set)
    others: set[str] = field(default_factory=set)  # what other ranks may link to
    writes: bool = False                           # whether this rank writes what is linked to

    def add(self, target: Path, report: SaveReport) -> None:
        self.reports.append(report)
        self.written[str(target)] = report.stored_bytes, report.digest
        self.links |= {_short(text) for text in report.links}

    def have(self, links: Links) -> None:
        """While weights are still what they were when `links` were made."""
        self.others |= {_short(str(link)) for link in links.others}
        self.writes |= links.writes

    @property
    def linkable(self) -> set[str]:
        return self.others | (self.links if self.writes else set())

    def fail(self, err: Exception, path, rank: int) -> None:
        where = dict(path=str(path), rank=rank)
        failure = err.at(**where) if isinstance(err, DsNvcompError) else SaveError(f"{type(err).__name__}: {err}", **where)
        self.failure = self.failure or failure  # the first one is the cause
        logger.error(f"{failure} The other ranks are told at commit.")


def _short(text: str) -> str:
    """Stands for a link where ranks compare: there may be thousands of names in one, and thousands of ranks."""
    return hashlib.sha256(text.encode()).hexdigest()[:32]


class _PlainFile:
    """A file in torch.save's own format, in host memory."""

    def __init__(self, state_dict):
        self._bytes = io.BytesIO()
        torch.save(state_dict, self._bytes)

    def write(self, path: Path) -> None:
        with files.Writer(path, fsync=True) as file:
            file.write_at(0, [self._bytes.getbuffer()])


def _plain_file(state_dict):
    taken = _PlainFile(state_dict)
    return lambda: taken


def _fulfil(future: Future, function) -> None:
    """What `function` returns or raises becomes the future's; it is heard of there."""
    try:
        future.set_result(function())
    except Exception as err:
        future.set_exception(err)


def _block(config_params) -> dict:
    return dict(getattr(config_params, "_param_dict", None) or {}).get(BLOCK)


def _save_plain(state_dict, path: Path) -> None:
    """torch.save's own format, replacing `path` only when the new file is whole."""
    with files.replacing(path, fsync=True, name=f".{path.name}.part") as part:
        _PlainFile(state_dict).write(part)


def _location_key(map_location):
    """Equal for map locations that do the same; DeepSpeed passes one lambda from two places."""
    code = getattr(map_location, "__code__", None)
    if code is None or map_location.__closure__:
        return str(map_location) if isinstance(map_location, (str, torch.device, type(None))) else object()
    return code.co_code, code.co_consts, code.co_names


def _copy_containers(value):
    """The same tensors in dicts and lists of their own, so that a caller's changes do not reach the cache."""
    if type(value) is dict:
        return {key: _copy_containers(item) for key, item in value.items()}
    if type(value) is list:
        return [_copy_containers(item) for item in value]
    return copy.copy(value) if isinstance(value, dict) else value  # an OrderedDict keeps its `_metadata`


# -- putting it in place ------------------------------------------------------------------------------------------------------

def patch(engine_module) -> None:
    """Hook `deepspeed.runtime.engine`: which checkpoint engine a DeepSpeedEngine has, and who writes `latest`. Idempotent."""
    if getattr(engine_module, "_ds_nvcomp", False):
        return
    engine_module._ds_nvcomp = True
    host = engine_module.DeepSpeedEngine
    host._configure_checkpointing = _choosing(host._configure_checkpointing)
    host.save_checkpoint = _committing_latest(host.save_checkpoint)
    if hasattr(host, "load_checkpoint"):
        # Another engine of the process may have saved what this one loads.
        host.load_checkpoint = _after(lambda engine: wait_for_all(), host.load_checkpoint)
    for name, first in (("destroy", NvcompCheckpointEngine.wait),
                        ("_take_model_step", NvcompCheckpointEngine.settle)):  # in every engine, before parameters change
        if hasattr(host, name):
            setattr(host, name, _after(lambda engine, first=first: isinstance(engine, NvcompCheckpointEngine) and first(engine),
                                       getattr(host, name)))


def _choosing(original):
    """DeepSpeed makes its own engine first, which costs nothing and answers its questions as ours does: versions before 0.17.1 have
    no function of their own for it."""
    @functools.wraps(original)
    def _configure_checkpointing(self, *args, **kwargs):
        block = _block(self._config)
        config = Config.from_dict(block) if block is not None else None
        if config is not None and config.enabled:
            _refuse_unsupported(self._config)
        result = original(self, *args, **kwargs)
        if config is not None and config.enabled:
            self.checkpoint_engine = NvcompCheckpointEngine(self._config, config)
            self.checkpoint_engine.attach(self)
        return result
    return _configure_checkpointing


def _refuse_unsupported(config_params) -> None:
    raw = config_params._param_dict
    for other, on in (("nebula", raw.get("nebula", {}).get("enabled")), ("datastates_ckpt", raw.get("datastates_ckpt", {}).get("enabled")),
                      ("checkpoint.writer", raw.get("checkpoint", {}).get("writer"))):
        if on:
            raise ConfigError(f"The DeepSpeed configuration asks for two checkpoint engines, {other!r} and {BLOCK!r}. Remove one of them.")
    offload = (raw.get("zero_optimization", {}).get("offload_optimizer") or {}).get("device")
    if offload == "nvme":
        raise UnsupportedSetupError(
            "zero_optimization.offload_optimizer.device is 'nvme': DeepSpeed copies that state as raw swap files past the checkpoint "
            f"engine, so it would be neither compressed nor committed with the rest. Use 'cpu', or remove {BLOCK!r}.")


def _committing_latest(original):
    @functools.wraps(original)
    def save_checkpoint(self, save_dir, tag=None, client_state={}, save_latest=True, *args, **kwargs):
        engine = self.checkpoint_engine
        if isinstance(engine, NvcompCheckpointEngine):
            # DeepSpeed's own way is open('w') after the commit: a crash between the two leaves an empty `latest`.
            engine.save_latest = str(tag if tag is not None else f"global_step{self.global_steps}") if save_latest else None
            save_latest = False
        return original(self, save_dir, tag, client_state, save_latest, *args, **kwargs)
    return save_checkpoint


def _after(first, original):
    @functools.wraps(original)
    def function(self, *args, **kwargs):
        first(getattr(self, "checkpoint_engine", None))  # none yet, where __init__ failed
        return original(self, *args, **kwargs)
    return function
