"""torch.distributed.checkpoint (DCP): a writer and a reader for FSDP2, torchtitan and whoever calls dcp.save and dcp.load.

    dcp.save(state_dict, storage_writer=NvcompWriter(path))
    dcp.load(state_dict, storage_reader=NvcompReader(path))     # or torch's own FileSystemReader

A DCP directory is files of items and `.metadata`, which says where each item is. Torch's writer makes an item of a tensor by torch.save,
ours by `ds_nvcomp.save`: a torch zip that decodes itself. Nothing else differs, so whatever reads the one reads the other, a directory
with both, and at another world size.
"""
from __future__ import annotations

import io
import os
import re
import threading
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Callable, Iterable, Iterator

import torch
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.filesystem import FileSystem, SerializationFormat, _StoragePrefix
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import (
    LoadItemType, LoadPlan, LoadPlanner, ReadItem, SavePlan, SavePlanner, WriteItem, WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import _create_write_items
from torch.distributed.tensor import DTensor
from torch.futures import Future

from .archive import files
from .archive.items import encode_items
from .archive.part import Part, check_records, find_part, read_parts
from .checkpoint import metadata_seal
from .checkpoint.auto import Chooser
from .config import Config
from .errors import ArchiveError, ConfigError, DsNvcompError, EncodeError, SaveError

__all__ = ["NvcompWriter", "NvcompReader"]

GROUP = 1 << 30  # raw bytes that are encoded together, while those before are written, or decoded together

_ITEMS = re.compile(r"__\d+_.*\.distcp")


class NvcompWriter(FileSystemWriter):
    """torch's FileSystemWriter, with each item compressed: on the GPU where tensors are there, before they are copied to the host.

    `path` is a directory, or a URL for fsspec; `config` a `Config` or a mapping of its keys; the rest are FileSystemWriter's arguments.
    For dcp.save, and for dcp.async_save in a thread or a process, which returns when what is on GPUs is in host memory, compressed. A save
    over a complete checkpoint leaves that one complete until the new one is.

    Raises `ConfigError`; `EncodeError` and `CodecUnavailableError` come out of dcp.save as it wraps errors of any rank.
    """

    def __init__(self, path: str | os.PathLike, config: "Config | dict | None" = None, **kwargs):
        self.config = Config.of(config)
        if self.config.behind:
            raise ConfigError("nvcomp_checkpoint.async and .overlap are for DeepSpeed; with DCP, call dcp.async_save.")
        if kwargs.get("serialization_format", SerializationFormat.TORCH_SAVE) is not SerializationFormat.TORCH_SAVE:
            raise ConfigError("NvcompWriter writes torch zips; safetensors files have a format of their own. Leave out "
                              "serialization_format.")
        kwargs.setdefault("sync_files", self.config.fsync)
        super().__init__(path, **kwargs)
        self.fs, self.path = _file_system(path, _Local)
        self._chooser = Chooser(self.config, rank=int(os.environ.get("RANK", 0)))

    def _chosen(self) -> Config:
        return self._chooser.config(self.path) if isinstance(self.fs, _Local) else self.config.concrete

    def stage(self, state_dict):
        """What dcp.async_save writes while training goes on: tensors on GPUs encoded, all else copied by torch."""
        leaves: list[_Leaf] = []

        def mark(tensor):
            leaves.append(_Leaf(tensor))
            return leaves[-1]
        rest = super().stage(_replace(state_dict, _is_encoded_here, mark))
        for leaf, item in zip(leaves, self._encode_here([_local(leaf.tensor) for leaf in leaves])):
            leaf.tensor = _Staged(_create_write_items("", leaf.tensor), leaf.tensor.shape, leaf.tensor.dtype, item)
        return _replace(rest, lambda value: isinstance(value, _Leaf), lambda leaf: leaf.tensor)

    def _encode_here(self, tensors: list[torch.Tensor]) -> list:
        """Items, or in the place of each the error that there was: raised here, where no other rank hears of it, it would leave those
        waiting for this one."""
        try:
            return encode_items(tensors, self._chosen()) if tensors else []
        except Exception as err:
            error = err if isinstance(err, DsNvcompError) else EncodeError(f"{type(err).__name__}: {err}", rank=self.rank)
            return [error] * len(tensors)

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        plan = super().prepare_local_plan(plan)
        return replace(plan, storage_data=self._fresh(plan.storage_data)) if plan.storage_data is not None else plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        before = [plan.storage_data for plan in plans]
        plans = super().prepare_global_plan(plans)
        return [plan if had is not None else replace(plan, storage_data=self._fresh(plan.storage_data)) for had, plan in zip(before, plans)]

    def _fresh(self, prefix: _StoragePrefix) -> _StoragePrefix:
        """Names that no file has: the checkpoint that is being replaced stays whole until its metadata are."""
        return _StoragePrefix(f"{prefix.prefix}{self.save_id[:8]}_") if self._metadata_exists() else prefix

    def write_data(self, plan: SavePlan, planner: SavePlanner):
        encoded = _Encoded(planner, plan.items, self._chosen())
        try:
            written = super().write_data(replace(plan, items=[_as_bytes(item) for item in plan.items]), encoded)
        finally:
            encoded.close()
        if len(written.value()) != len(plan.items):  # torch loses what its further threads raise
            raise SaveError(f"{len(plan.items)} items were to be written, {len(written.value())} are. The first failure is above, or: "
                            f"{encoded.failure or 'unknown'}", path=str(self.path), rank=self.rank)
        return written

    def finish(self, metadata: Metadata, results) -> None:
        super().finish(metadata, results)
        if isinstance(self.fs, _Local) and self.use_collectives:  # else the others' metadata are not known here
            used = {result.storage_data.relative_path for of_rank in results for result in of_rank}
            for path in Path(self.path).iterdir():
                if _ITEMS.fullmatch(path.name) and path.name not in used:
                    path.unlink()

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike) -> bool:
        return _is_url(checkpoint_id) or super().validate_checkpoint_id(checkpoint_id)


class NvcompReader(FileSystemReader):
    """torch's FileSystemReader, decoding on the device where a tensor is wanted; reads what either writer wrote.

    `path` is a directory, or a URL for fsspec. Items are trusted as dcp.load trusts `.metadata`, which is a pickle.
    Raises `FormatError`s that name file and tensor for damaged bytes.
    """

    def __init__(self, path: str | os.PathLike, **kwargs):
        super().__init__(path, **kwargs)
        self.fs, self.path = _file_system(path, FileSystem)
        self._announced: dict = {}

    def read_metadata(self, *args, **kwargs) -> Metadata:
        path = self._get_metadata_path(kwargs.get("rank"))
        with self.fs.create_stream(path, "rb") as file:
            metadata_seal.check(file.read(), os.fspath(path))
        return super().read_metadata(*args, **kwargs)

    def set_up_storage_reader(self, metadata: Metadata, *args, **kwargs) -> None:
        super().set_up_storage_reader(metadata, *args, **kwargs)
        self._announced = metadata.state_dict_metadata

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future:
        others, by_file = [], defaultdict(list)
        for request in plan.items:
            info = self.storage_data[request.storage_index]
            local = isinstance(self.fs, FileSystem) and not getattr(info, "transform_descriptors", None)
            if request.type == LoadItemType.BYTE_IO or not local:
                others.append(request)
                if local:
                    self._check(request)
            else:
                by_file[info.relative_path].append(request)
        # Where a GPU decodes, those that come next are found meanwhile; without one that gains nothing.
        finding = ThreadPoolExecutor(1, thread_name_prefix="ds_nvcomp find") if torch.cuda.is_initialized() else None
        try:
            found = (finding.map if finding else map)(lambda where: self._find(*where), self._mapped(by_file))
            for group in _groups(self._wanted(*one, planner) for one in found):
                self._read(group, planner)
        finally:
            if finding:
                finding.shutdown(cancel_futures=True)
        return super().read_data(replace(plan, items=others), planner)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike) -> bool:
        return _is_url(checkpoint_id) or super().validate_checkpoint_id(checkpoint_id)

    def _check(self, request: ReadItem) -> None:
        """That an object's bytes are those that were written: torch, which reads them, has no look at their checksums."""
        info = self.storage_data[request.storage_index]
        path = os.fspath(self.fs.concat_path(self.path, info.relative_path))
        try:
            check_records(path, info.offset, info.length)
        except DsNvcompError as err:
            raise err.at(path=path, tensor=request.storage_index.fqn)

    def _mapped(self, by_file: dict[str, list[ReadItem]]) -> Iterator[tuple[str, torch.UntypedStorage, ReadItem]]:
        for name, requests in by_file.items():
            path = os.fspath(self.fs.concat_path(self.path, name))
            mapped = torch.UntypedStorage.from_file(path, False, os.stat(path).st_size)
            for request in requests:
                yield path, mapped, request

    def _find(self, path: str, mapped: torch.UntypedStorage, request: ReadItem) -> tuple[str, ReadItem, Part]:
        """Where one tensor is, or as much of it as is wanted."""
        info = self.storage_data[request.storage_index]
        try:
            part = find_part(path, mapped, info.offset, info.length, request.storage_offsets, request.lengths,
                             self._sizes(request.storage_index))
            self._check_kind(request.storage_index.fqn, part.dtype)
            return path, request, part
        except DsNvcompError as err:
            raise err.at(path=path, tensor=request.storage_index.fqn)

    def _wanted(self, path: str, request: ReadItem, part: Part, planner: LoadPlanner) -> _Wanted:
        target = planner.resolve_tensor(request).detach()
        if tuple(target.size()) != part.sizes:
            raise ArchiveError(f"The planner wants {tuple(target.size())}, the item has {part.sizes}.", path=path,
                               tensor=request.storage_index.fqn)
        return _Wanted(path, request, target, part)

    def _read(self, group: list[_Wanted], planner: LoadPlanner) -> None:
        """Parts that are wanted on one device, decoded together."""
        found = read_parts([wanted.part for wanted in group], group[0].target.device)
        for wanted in group:
            try:
                data = next(found)
            except DsNvcompError as err:
                raise err.at(path=wanted.path, tensor=wanted.request.storage_index.fqn)
            wanted.target.copy_(data)
            planner.commit_tensor(wanted.request, wanted.target)
        found.close()

    def _sizes(self, index: MetadataIndex) -> tuple[int, ...] | None:
        """The shape that the metadata give an item; None where they do not say."""
        chunks = getattr(self._announced.get(index.fqn), "chunks", ())
        chunk = chunks[index.index] if index.index is not None and index.index < len(chunks) else None
        return tuple(chunk.sizes) if chunk is not None and chunk.offsets == index.offset else None

    def _check_kind(self, fqn: str, dtype: torch.dtype) -> None:
        """That an item is of the dtype announced, as far as a planner may not have cast it while saving: floating point or not."""
        tensor = self._announced.get(fqn)
        said = tensor.properties.dtype if isinstance(tensor, TensorStorageMetadata) else dtype
        if said != dtype and not (said.is_floating_point and dtype.is_floating_point):
            raise ArchiveError(f"The item is {dtype}, the metadata say {said}. Files of different saves are mixed here; restore the "
                               "directory from a copy.")


@dataclass
class _Wanted:
    """What is asked for, where it is to be, and where it is."""
    path: str
    request: ReadItem
    target: torch.Tensor
    part: Part


def _groups(found: Iterable[_Wanted]) -> Iterator[list[_Wanted]]:
    """Of about `GROUP` bytes, each for one device."""
    group, filled = [], 0
    for wanted in found:
        if group and (filled + wanted.part.room > GROUP or wanted.target.device != group[0].target.device):
            yield group
            group, filled = [], 0
        group.append(wanted)
        filled += wanted.part.room
    if group:
        yield group


class _Local(FileSystem):
    """Replaces `.metadata` in one step, sealed and durably; torch removes the old one first. It renames nothing else."""

    def rm_file(self, path) -> None:
        """Nothing: `rename` replaces it."""

    def rename(self, path, new_path) -> None:
        metadata_seal.seal_file(path)
        os.replace(path, new_path)
        files.sync_directory(Path(new_path).parent)


class _Staged(torch.Tensor):
    """A tensor that has been encoded. To DCP's planner it is what the tensor was, by the protocol that DTensor has for it; its data are an
    item. Only `_Encoded` can make something of it."""

    @staticmethod
    def __new__(cls, write_items, shape, dtype, item):
        staged = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device="cpu")
        staged.write_items, staged.item = write_items, item
        return staged

    def __create_write_items__(self, fqn: str, _):
        return [replace(write_item, index=replace(write_item.index, fqn=fqn)) for write_item in self.write_items]

    def __get_tensor_shard__(self, index) -> io.BytesIO:
        return self.item

    def __reduce_ex__(self, protocol):
        return _Staged, (self.write_items, self.shape, self.dtype, self.item)

    def __repr__(self, **kwargs):
        return f"_Staged({tuple(self.shape)}, {self.dtype}, {getattr(self.item, 'nbytes', self.item)})"

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        raise NotImplementedError(f"a staged tensor has no numbers to {function} with")


class _Leaf:
    """Where a tensor was that is being encoded."""

    def __init__(self, tensor: torch.Tensor):
        self.tensor = tensor

    def __deepcopy__(self, memo):
        return self  # what torch's stager does with objects that it does not know


def _replace(value, old: Callable, new: Callable):
    """`value`, dicts and lists in it made anew, with new(leaf) in place of each leaf of which old(leaf) is true."""
    if isinstance(value, dict):
        return {key: _replace(item, old, new) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_replace(item, old, new) for item in value)
    return new(value) if old(value) else value


def _is_encoded_here(value) -> bool:
    if isinstance(value, DTensor):
        return value.device_mesh.get_coordinate() is not None and _local(value).is_cuda
    return type(value) in (torch.Tensor, torch.nn.Parameter) and value.is_cuda and value.layout is torch.strided


def _local(tensor: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _is_url(path) -> bool:
    return "://" in os.fspath(path)


def _file_system(path, local):
    if _is_url(path):
        from torch.distributed.checkpoint._fsspec_filesystem import FileSystem as Remote
        found = Remote()
    else:
        found = local()
    return found, found.init_path(path)


def _as_bytes(item: WriteItem) -> WriteItem:
    """What makes torch's writer take an item's bytes as they are. Readers go by the metadata of the plan, where it is a tensor."""
    return replace(item, type=WriteItemType.BYTE_IO)


def _raw_bytes(item: WriteItem) -> int:
    if item.tensor_data is None:
        return 0
    return item.tensor_data.chunk.sizes.numel() * item.tensor_data.properties.dtype.itemsize


class _Encoded:
    """A planner of which the writer gets encoded items. One group of them is encoded while the one before is written."""

    def __init__(self, planner: SavePlanner, items: list[WriteItem], config: Config):
        self._planner, self._config = planner, config
        self._groups, self._group_of, filled = [], {}, GROUP
        for item in items:
            if not self._groups or filled + _raw_bytes(item) > GROUP:
                self._groups.append([])
                filled = 0
            filled += _raw_bytes(item)
            self._group_of[item.index] = len(self._groups) - 1
            self._groups[-1].append(item)
        self._pool, self._lock = ThreadPoolExecutor(1, thread_name_prefix="ds_nvcomp items"), threading.Lock()
        self._futures: dict = {}
        self.failure: Exception | None = None
        self._ready = torch.cuda.current_stream().record_event() if torch.cuda.is_initialized() else None
        self._device = torch.cuda.current_device() if self._ready is not None else None
        self._begin(0)

    def close(self) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)

    def resolve_data(self, item: WriteItem) -> io.BytesIO:
        number = self._group_of[item.index]
        with self._lock:  # torch's writer may have several threads
            self._begin(number)
            self._begin(number + 1)
        try:
            return self._futures[number].result().pop(item.index)
        except Exception as err:
            self.failure = self.failure or err
            raise

    def _begin(self, number: int) -> None:
        if number < len(self._groups) and number not in self._futures:
            self._futures[number] = self._pool.submit(self._encode, self._groups[number])

    def _encode(self, group: list[WriteItem]) -> dict:
        if self._ready is None:
            return self._encoded(group)
        with torch.cuda.device(self._device), torch.cuda.stream(torch.cuda.Stream()):
            torch.cuda.current_stream().wait_event(self._ready)  # what is still being computed where this save was called
            return self._encoded(group)

    def _encoded(self, group):
        data = [self._planner.resolve_data(item) for item in group]
        for error in data:
            if isinstance(error, DsNvcompError):
                raise error
        return dict(zip((item.index for item in group), encode_items(data, self._config)))
