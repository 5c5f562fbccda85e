"""DeepSpeed's CheckpointEngine over compressed, committed checkpoints; and the two hooks that put it in place.

DeepSpeed (0.16 to 0.19) calls, on every rank: create(info), makedirs, save for each file that rank writes, commit(info), and then
writes `latest` by itself. `info` is a tag or a CheckpointCommitInfo, by version.
"""
from __future__ import annotations

import copy
import functools
import os
import time
import weakref
from pathlib import Path

import torch
from deepspeed.runtime.checkpoint_engine.checkpoint_engine import CheckpointEngine


from .archive import SaveReport, load
from .archive.writer import save, write
from .checkpoint import STATES_SUFFIX
from .checkpoint.commit import Commit
from .checkpoint.ranks import Ranks
from .config import Config
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
        self._host = lambda: None
        self._tag: str | None = None
        self._commit: Commit | None = None
        self._failure: Exception | None = None
        self._reports: list[SaveReport] = []
        self._written: dict[str, tuple[int, int]] = {}
        self._began = 0.0
        self._cached = None

    def attach(self, host) -> None:
        """Remember the DeepSpeedEngine (weakly), whose monitor gets an event per save."""
        self._host = weakref.ref(host)

    # -- saving ---------------------------------------------------------------------------------------------------------------

    def create(self, info) -> None:
        """Begin the checkpoint `info`. One that was begun and never committed is forgotten."""
        if self._commit is not None:
            logger.warning(f"checkpoint {self._tag!r} was begun and never committed; it is discarded.")
            self._commit.abandon()
        self._began, self._tag = time.perf_counter(), str(getattr(info, "tag", info))
        self._commit, self._failure, self._reports, self._written, self._cached = None, None, [], {}, None
        save_dir = getattr(info, "save_dir", None)
        if save_dir is not None:
            self._open(Path(save_dir) / self._tag)

    def _open(self, final: Path) -> None:
        commit = Commit(final, self._ranks, fsync=self.config.fsync)
        commit.begin()
        self._commit = commit

    def makedirs(self, path, exist_ok=False):
        """Make `path`, unless it is the checkpoint's own directory: that one appears when it is complete."""
        if self._tag is not None and Path(path).parts[-len(Path(self._tag).parts):] == Path(self._tag).parts:
            if self._commit is None:  # DeepSpeed < 0.17 passes no directory to create()
                self._open(Path(path))
            return
        os.makedirs(path, exist_ok=exist_ok)

    def save(self, state_dict, path: str) -> None:
        """Write one file. A failure is kept until `commit`, where all ranks learn of it; raising here would hang the others."""
        try:
            target = self._commit.stage(path) if self._commit is not None else None
            if not str(path).endswith(STATES_SUFFIX):
                _save_plain(state_dict, target or Path(path))
            elif target is not None:
                report = write(state_dict, target, self.config, root=target.stem)
                self._reports.append(report)
                self._written[str(target)] = report.stored_bytes, report.digest
            else:
                self._reports.append(save(state_dict, path, self.config))
        except Exception as err:
            where = dict(path=str(path), rank=self._ranks.rank)
            failure = err.at(**where) if isinstance(err, DsNvcompError) else SaveError(f"{type(err).__name__}: {err}", **where)
            self._failure = self._failure or failure  # the first one is the cause
            logger.error(f"{failure} The other ranks are told at commit.")

    def commit(self, info) -> bool:
        """Publish the checkpoint on all ranks, or raise `CommitError` on all of them and leave the previous one current."""
        commit, self._commit = self._commit, None
        failure, self._failure = self._failure, None
        save_latest, self.save_latest = self.save_latest, None
        if commit is not None:
            commit.finish(failure, save_latest, self._written)
        else:
            self._ranks.agree(failure, "save")
        try:
            self._report()
        except CommitError as err:  # the checkpoint is complete and current all the same
            logger.warning(f"checkpoint {self._tag} is committed, but: {err}")
        return True

    def _report(self):
        mine = sum(r.raw_bytes for r in self._reports), sum(r.stored_bytes for r in self._reports), len(self._reports)
        raw, stored, count = (sum(column) for column in zip(*self._ranks.gather(mine, "report")))
        seconds = time.perf_counter() - self._began
        if self._ranks.rank != 0 or not raw:
            return
        logger.info(f"checkpoint {self._tag}: {count} files, {raw / 1e9:.3f} GB stored as {stored / 1e9:.3f} GB "
                    f"(ratio {stored / raw:.3f}, {raw / stored:.2f}x) in {seconds:.2f} s, {raw / seconds / 1e9:.2f} GB/s")
        host = self._host()
        if host is not None and getattr(host.monitor, "enabled", False):
            host.monitor.write_events([(f"Checkpoint/nvcomp/{name}", value, host.global_samples) for name, value in (
                ("raw_bytes", raw), ("stored_bytes", stored), ("ratio", stored / raw), ("seconds", seconds),
                ("GB_per_second", raw / seconds / 1e9))])

    # -- loading --------------------------------------------------------------------------------------------------------------

    def load(self, path: str, map_location=None):
        """torch.load of `path`. DeepSpeed reads a model file twice in a row; the second read gets what the first one decoded."""
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

    def cleanup(self) -> None:
        if self._commit is not None:
            self._commit.abandon()
            self._commit = None


def _block(config_params) -> dict:
    return dict(getattr(config_params, "_param_dict", None) or {}).get(BLOCK)


def _save_plain(state_dict, path: Path) -> None:
    """torch.save's own format, replacing `path` only when the new file is whole."""
    part = path.with_name(f".{path.name}.part")
    try:
        with open(part, "wb") as file:
            torch.save(state_dict, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)


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
