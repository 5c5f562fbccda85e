"""A rank is killed (SIGKILL) at each named step of a save by NvcompWriter, or its storage fails: the directory loads whole as the old or
the new checkpoint, by both readers, or has no `.metadata`; the next save works, and leaves nothing of the others.

    python -m pytest tests/faults -m "slow or not slow"      all of it

The ranks are two real processes over gloo (dcp_worker.py), by dcp.save and by dcp.async_save in a thread. What is read is read here, in one
process.
"""
from __future__ import annotations

import errno
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemReader

pytest.importorskip("deepspeed")  # worker.py has it
from ds_nvcomp.checkpoint.verify import verify  # noqa: E402
from ds_nvcomp.dcp import NvcompReader  # noqa: E402
from faults import dcp_worker  # noqa: E402
from faults.rounds import Server, same_bits  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
WORLD = 2
SECONDS = 60  # until a survivor has heard of a death
MODES = ["sync", "async"]
STAGED = "staged"  # async, encoded before async_save returns, as tensors on a GPU are


@pytest.fixture(scope="module")
def dcp_server():
    server = Server(Path(dcp_worker.__file__))
    yield server
    server.close()


def version_in(directory: Path) -> int | None:
    """The one version that all of `directory` is of, bit for bit, by both readers; None where there is no `.metadata`."""
    if not (directory / ".metadata").exists():
        return None
    versions = set()
    for reader in (FileSystemReader, NvcompReader):
        found = {name: torch.zeros_like(value) if isinstance(value, torch.Tensor) else None
                 for name, value in dcp_worker.numbers(0).items()}
        dcp.load(found, storage_reader=reader(directory), no_dist=True)
        assert same_bits(found, dcp_worker.numbers(found["step"])), f"not what was saved as version {found['step']}"
        versions.add(found["step"])
    version, = versions
    return version


def job(where: Path, mode: str, versions, **more) -> dict:
    return dict(out=str(where / "out"), directory=str(where / "saved"), world=WORLD, saves=[dict(version=v) for v in versions],
                **{"async": mode != "sync", "staged": mode == STAGED}, **more)


def save_again(server, where: Path, directory: Path) -> None:
    """New processes save version 3, and leave nothing but that."""
    done = server.run(dict(out=str(where / "again"), directory=str(directory), world=WORLD, saves=[dict(version=3)]))
    done.expect(0, error=None)
    assert version_in(directory) == 3 and verify(directory) == []
    used = {info.relative_path for info in FileSystemReader(directory).read_metadata().storage_data.values()}
    assert {path.name for path in directory.iterdir()} == {".metadata", *used}


# -- kills ------------------------------------------------------------------------------------------------------------------------

def dry_run(server, where: Path, mode: str, versions):
    done = server.run(job(where / "dry", mode, versions, trace=True))
    done.expect(len(versions) - 1, error=None)
    assert version_in(where / "dry" / "saved") == versions[-1]
    kinds = {name.split(" ")[0].split(":")[0] for name in done.traces[0]}
    expected = {"prepare_local_plan", "prepare_global_plan", "reduce_scatter", "encode_items", "write_data", "write_item", "fsync",
                "finish", "seal_file", "replace", "sync_directory", "all_reduce"} | ({"unlink"} if len(versions) > 1 else set())
    assert kinds >= expected, f"no longer a step of a save: {expected - kinds}"
    return done


def kill(server, where: Path, mode: str, versions, trace, rank: int, place: int) -> None:
    step = trace[place]
    done = server.run(job(where, mode, versions, kill=dict(rank=rank, step=[step, trace[:place + 1].count(step)])))
    assert done.exits[rank] == -9, f"not killed: exits {done.exits}\n{done.logs()}"
    other = 1 - rank
    assert done.exits[other] == 0, f"exits {done.exits}\n{done.logs()}"
    assert done.results[other][-1]["seconds"] < SECONDS
    version, old = version_in(where / "saved"), versions[0] if len(versions) > 1 else None
    if rank == 0:  # it writes the metadata, and knows before anybody else
        expected = {versions[-1]} if place >= trace.index("replace:after") else {old}
    else:
        expected = {old} if place < trace.index("write_data:after") else {old, versions[-1]}
    assert version in expected, f"version {version} is there, expected {expected}"
    if done.results[other][-1]["error"] is None:
        assert version == versions[-1], "a survivor was told of a save that is not there"
    save_again(server, where, where / "saved")


def kill_at(server, where: Path, mode: str, versions, rank: int, record_property, choose) -> None:
    trace = dry_run(server, where, mode, versions).traces[rank]
    places = choose(trace)
    record_property("steps", sorted({f"dcp {trace[place]}" for place in places}))
    failures = []

    def one(place):
        try:
            kill(server, where / str(place), mode, versions, trace, rank, place)
        except BaseException as err:
            failures.append(f"killed at {place}, {trace[place]!r}: {type(err).__name__}: {err}")
    with ThreadPoolExecutor(2) as rounds:
        list(rounds.map(one, places))
    record_property("kills", len(places))
    assert not failures, f"{len(failures)} of {len(places)} kills:\n" + "\n".join(failures[:10])


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("rank", range(WORLD))
@pytest.mark.parametrize("versions", [[2], [1, 2]], ids=["first", "over another"])
@pytest.mark.parametrize("mode", MODES)
def test_killed_at_every_step(dcp_server, tmp_path, record_property, mode, versions, rank):
    kill_at(dcp_server, tmp_path, mode, versions, rank, record_property, lambda trace: range(len(trace)))


QUICK = ["write_item:midway", "replace:before", "replace:after", "unlink:before"]


@pytest.mark.parametrize("mode", MODES)
def test_killed_at_some_steps(dcp_server, tmp_path, record_property, mode):
    kill_at(dcp_server, tmp_path, mode, [1, 2], 0, record_property, lambda trace: [trace.index(step) for step in QUICK])


# -- storages that fail -----------------------------------------------------------------------------------------------------------

NO_SPACE, IO_ERROR = (f"[Errno {number}]" for number in (errno.ENOSPC, errno.EIO))
FAULTS = [("enospc_first_item", 1, NO_SPACE), ("enospc_first_item", 0, NO_SPACE), ("eio_second_item", 1, IO_ERROR),
          ("enospc_metadata", 0, NO_SPACE), ("file_size_limit", 1, f"[Errno {errno.EFBIG}]"), ("eio_fsync", 1, IO_ERROR),
          ("eio_fsync", 0, IO_ERROR), ("enospc_seal", 0, NO_SPACE), ("eio_replace", 0, IO_ERROR), ("memory_error", 1, "made up"),
          ("codec_library_raises", 0, "CUDA error: made up")]


@pytest.mark.parametrize("mode", [*MODES, STAGED])
@pytest.mark.parametrize("fault, rank, says", FAULTS, ids=lambda value: str(value))
def test_failing_save(dcp_server, tmp_path, mode, fault, rank, says):
    """Version 1 is saved, version 2 fails on one rank, version 3 is saved by the same processes."""
    saves = job(tmp_path, mode, [1, 2, 3], snapshots=True)
    saves["saves"][1]["faults"] = [[[rank], fault]]
    done = dcp_server.run(saves)
    done.expect(0, error=None)
    for result in done.expect(1, error="CheckpointException"):
        assert says in result["message"], result
    assert version_in(tmp_path / "out" / "after1") == 1
    done.expect(2, error=None)
    assert version_in(tmp_path / "saved") == 3 and len(os.listdir(tmp_path / "saved")) == 1 + WORLD


@pytest.mark.parametrize("threads", [1, 3])
def test_a_first_save_that_fails_has_no_metadata(dcp_server, tmp_path, threads):
    saves = job(tmp_path, "sync", [1], snapshots=True)
    saves["saves"][0].update(faults=[[[1], "enospc_first_item"]], writer={"thread_count": threads})
    done = dcp_server.run(saves)
    for result in done.expect(0, error="CheckpointException"):
        assert "[Errno 28]" in result["message"] or "items were to be written" in result["message"], result
    assert version_in(tmp_path / "saved") is None
    save_again(dcp_server, tmp_path, tmp_path / "saved")
