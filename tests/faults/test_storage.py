"""A storage, a rank or an encoder that fails in one save: all ranks learn of it, the last checkpoint stays, the next works.

The ranks of a round (worker.py) save three times in the same processes: version 1 as it should be, version 2 with the fault on
one rank, version 3 without it. After each, the save_dir is copied for the judgement. See test_kills.py for how to run all.
"""
from __future__ import annotations

import errno
import subprocess
from pathlib import Path

import pytest

pytest.importorskip("deepspeed")
from faults.rounds import Round, Server, check, hidden  # noqa: E402

OLD, NEW = "global_step1", "global_step2"
NO_SPACE, IO_ERROR, QUOTA = (f"[Errno {number}]" for number in (errno.ENOSPC, errno.EIO, errno.EDQUOT))


@pytest.fixture(params=["sync", "async"], autouse=True)
def mode(request, server):
    """Every fault while training waits, and on the thread behind it; then it is `wait` that raises."""
    server.block = {"async": request.param == "async"}
    yield request.param
    server.block = {}


def three_saves(server: Server, where: Path, world: int, second: dict, *, overwrite=False, save_dir=None, **job) -> Round:
    new = OLD if overwrite else NEW
    return server.run(dict(
        out=str(where / "out"), save_dir=str(save_dir or where / "checkpoints"), world=world, snapshots=True, **job,
        saves=[dict(tag=OLD, version=1), dict(tag=new, version=2, **second), dict(tag=new, version=3)]))


def fault(ranks: list[int], kind: str, **options) -> dict:
    return dict(faults=[[ranks, kind, options]])


def judge_third(done: Round, overwrite=False) -> None:
    done.expect(2, error=None)
    new = OLD if overwrite else NEW
    assert check(done.out / "after2", done.world) == {OLD: 3 if overwrite else 1, new: 3, "latest": new}
    assert hidden(done.out / "after2") == []


# (fault, its options, the rank it is on; what every rank's error must say, with the path that it must name)
WHILE_SAVING = [
    ("enospc_write", {}, 1, NO_SPACE, "zero_pp_rank_1_mp_rank_00_optim_states.pt"),
    ("enospc_write", {"nth": 12}, 0, NO_SPACE, "mp_rank_00_model_states.pt"),
    ("eio_write", {}, 1, IO_ERROR, "zero_pp_rank_1_mp_rank_00_optim_states.pt"),
    ("edquot_write", {}, 0, QUOTA, "zero_pp_rank_0_mp_rank_00_optim_states.pt"),
    ("eio_fsync", {}, 1, IO_ERROR, "zero_pp_rank_1_mp_rank_00_optim_states.pt"),
    ("eio_fsync_staging", {}, 1, IO_ERROR, ".staged"),
    ("enospc_manifest", {}, 0, NO_SPACE, "nvcomp_manifest.json"),
    ("encoder_raises", {}, 1, "EncodeError: made up", "zero_pp_rank_1_mp_rank_00_optim_states.pt"),
    ("encoder_raises", {}, 0, "EncodeError: made up", "zero_pp_rank_0_mp_rank_00_optim_states.pt"),
    ("codec_library_raises", {}, 1, "RuntimeError: CUDA error: made up", "zero_pp_rank_1_mp_rank_00_optim_states.pt"),
    ("eio_write", {"nth": 13}, 0, IO_ERROR, "mp_rank_00_model_states.pt"),
    ("memory_error", {}, 1, "MemoryError: made up", "zero_pp_rank_1_mp_rank_00_optim_states.pt"),
]
WHILE_PUBLISHING = [("eio_rename", False, NEW), ("eio_exchange", True, OLD)]


def judge_failed(done: Round, rank: int, cause: str, path: str, overwrite=False) -> None:
    """Each rank raised CommitError with rank, cause and path; nothing changed; nothing is left."""
    for result in done.expect(1, error="CommitError"):
        message = result["message"]
        assert f"rank {rank}: " in message and cause in message and path in message, message
        assert result["rank"] == rank
    after = done.out / "after1"
    assert check(after, done.world) == {OLD: 1, "latest": OLD}
    assert hidden(after) == []


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("kind, options, rank, cause, path", WHILE_SAVING,
                         ids=[f"{kind}-rank{rank}" for kind, _, rank, _, _ in WHILE_SAVING])
def test_failing_save(server, tmp_path, kind, options, rank, cause, path, world):
    done = three_saves(server, tmp_path, world, fault([rank], kind, **options))
    judge_failed(done, rank, cause, path)
    judge_third(done)


def test_no_room_for_the_staging_directory(server, tmp_path):
    done = three_saves(server, tmp_path, 2, fault([0, 1], "enospc_mkdir"))
    judge_failed(done, 0, NO_SPACE, f".{NEW}.staged")
    judge_third(done)


@pytest.mark.parametrize("kind, overwrite, path", WHILE_PUBLISHING, ids=[kind for kind, _, _ in WHILE_PUBLISHING])
def test_failing_publication(server, tmp_path, kind, overwrite, path):
    done = three_saves(server, tmp_path, 2, fault([0], kind), overwrite=overwrite)
    judge_failed(done, 0, IO_ERROR, path)
    judge_third(done, overwrite)


@pytest.mark.parametrize("overwrite", [False, True])
def test_failing_sync_of_the_parent(server, tmp_path, overwrite):
    """The new directory has its name, and whether that survives a power cut is not known: `latest` is not moved to it."""
    done = three_saves(server, tmp_path, 2, fault([0], "eio_fsync_parent"), overwrite=overwrite)
    for result in done.expect(1, error="CommitError"):
        assert "rank 0: " in result["message"] and IO_ERROR in result["message"] and "checkpoints" in result["message"]
    found = check(done.out / "after1", 2)
    assert found["latest"] == OLD and found[OLD] in ((1, 2) if overwrite else (1,))
    judge_third(done, overwrite)


@pytest.mark.parametrize("kind, cause", [("eio_replace", IO_ERROR), ("enospc_latest", NO_SPACE)])
def test_failing_latest(server, tmp_path, kind, cause):
    """The new directory is there and whole; `latest` still names the old one; no half-written file is left."""
    done = three_saves(server, tmp_path, 2, fault([0], kind))
    for result in done.expect(1, error="CommitError"):
        assert "rank 0: " in result["message"] and cause in result["message"] and "latest" in result["message"]
    assert check(done.out / "after1", 2) == {OLD: 1, NEW: 2, "latest": OLD}
    assert hidden(done.out / "after1") == []
    judge_third(done)


def test_two_ranks_fail(server, tmp_path):
    done = three_saves(server, tmp_path, 4, dict(faults=[[[1], "enospc_write", {}], [[3], "memory_error", {}]]))
    for result in done.expect(1, error="CommitError"):
        assert all(text in result["message"] for text in ("2 of 4 ranks", "rank 1: ", NO_SPACE, "rank 3: ", "MemoryError"))
    judge_third(done)


@pytest.mark.parametrize("overwrite", [False, True])
def test_short_writes(server, tmp_path, overwrite):
    """pwritev may take less than it is given; that is no failure."""
    done = three_saves(server, tmp_path, 2, fault([0, 1], "short_writes"), overwrite=overwrite)
    done.expect(1, error=None)
    assert check(done.out / "after1", 2) == {OLD: 2 if overwrite else 1, **({} if overwrite else {NEW: 2}),
                                             "latest": OLD if overwrite else NEW}
    judge_third(done, overwrite)


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("world", [2, 4])
def test_order_of_syncs(server, tmp_path, world, overwrite):
    """What a power cut leaves cannot be tried here. It is right if each thing is durable before what depends on it is done: the
    files and their names before the directory gets its name, that before `latest` changes, and that before the save returns."""
    save_dir, new = tmp_path / "checkpoints", OLD if overwrite else NEW
    done = server.run(dict(out=str(tmp_path / "out"), save_dir=str(save_dir), world=world, record=True, saves=[
        dict(tag=OLD, version=1), dict(tag=new, version=2)]))
    done.expect(1, error=None)
    events = [event[1:] for event in done.events]
    staged, part, latest = str(save_dir / f".{new}.staged"), str(save_dir / ".latest.part"), str(save_dir / "latest")
    final = str(save_dir / new)
    published = events.index(["exchange", final, staged] if overwrite else ["rename", staged, final])
    replaced = events.index(["replace", part, latest])

    def last(event, before):
        return max(place for place in range(before) if events[place] == event)

    files = {event[1] for event in events[:published] if event[0] == "write"}
    assert len(files) == world + 2 and all(path.startswith(f"{staged}/") for path in files)  # with the model and the manifest
    for path in files:
        assert last(["fsync", path], published) > last(["write", path], published)
        assert last(["fsync", staged], published) > last(["write", path], published)
    assert published < last(["fsync", str(save_dir)], replaced)
    assert last(["write", part], replaced) < last(["fsync", part], replaced)
    assert last(["fsync", str(save_dir)], len(events)) > replaced


# -- ranks that are slow, or gone ---------------------------------------------------------------------------------------------

@pytest.mark.parametrize("rank", [0, 1])
def test_slow_rank_is_waited_for(server, tmp_path, rank):
    """Everybody's save takes as long as the slow one's, and `latest` changes after that."""
    done = three_saves(server, tmp_path, 2, fault([rank], "slow", seconds=1.5))
    results = done.expect(1, error=None)
    assert all(result["ended"] - result["began"] >= 1.5 for result in results)
    latest = (done.out / "after1" / "latest").stat().st_mtime_ns
    slow = f"{NEW}/zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"
    assert latest >= (done.out / "after1" / slow).stat().st_mtime_ns
    assert check(done.out / "after1", 2) == {OLD: 1, NEW: 2, "latest": NEW}
    judge_third(done)


@pytest.mark.parametrize("world, rank", [
    (2, 1), *(pytest.param(*case, marks=pytest.mark.slow) for case in [(2, 0), (4, 0), (4, 3)])])
def test_rank_slower_than_the_timeout(server, tmp_path, rank, world, mode):
    """The others give it up and go on; the save after that one works again, in the same processes."""
    done = three_saves(server, tmp_path, world, fault([rank], "slow", seconds=6.0), timeout=3.0)
    for result in done.expect(1, error="CommitError"):
        assert f"'{'save' if mode == 'sync' else 'clear leftovers'}'" in result["message"] and "within 3 s" in result["message"]
    assert check(done.out / "after1", world) == {OLD: 1, "latest": OLD}
    judge_third(done)


@pytest.mark.parametrize("world, rank", [(2, 0), (2, 1), (4, 0), (4, 2)])
def test_rank_that_dies(server, tmp_path, world, rank):
    """os._exit in the middle of its save: the others say so within the timeout, and a new job goes on from version 1."""
    survivors = [other for other in range(world) if other != rank]
    save_dir = tmp_path / "checkpoints"
    done = server.run(dict(out=str(tmp_path / "out"), save_dir=str(save_dir), world=world, timeout=3.0, saves=[
        dict(tag=OLD, version=1), dict(tag=NEW, version=2, **fault([rank], "dies"))]))
    assert done.exits[rank] == 3
    for result in done.expect(1, error="CommitError", ranks=survivors):
        assert "a rank died or hangs" in result["message"] and result["ended"] - result["began"] < 15
    assert check(save_dir, world) == {OLD: 1, "latest": OLD}
    again = server.run(dict(out=str(tmp_path / "again"), save_dir=str(save_dir), world=world, saves=[dict(tag=NEW, version=3)]))
    again.expect(0, error=None)
    assert check(save_dir, world) == {OLD: 1, NEW: 3, "latest": NEW} and hidden(save_dir) == []


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("step", ["save", "list the files", "write the manifest", "publish the checkpoint directory",
                                  "update 'latest'"])
@pytest.mark.parametrize("world, rank", [(2, 1), (4, 2)])
def test_rank_that_does_not_hear_the_outcome(server, tmp_path, world, rank, step, overwrite):
    """No agreement is certain to reach everybody. One rank believes that the others are gone, while they go on to publish: it
    must not clear away what they are about to publish."""
    save_dir = tmp_path / "checkpoints"
    new = OLD if overwrite else NEW
    second = dict(faults=[[[rank], "deaf", {"step": step}], [[0], "slow_publish", {"seconds": 0.5}],
                          [[rank], "slow_rmtree", {"seconds": 0.8}]])
    done = server.run(dict(out=str(tmp_path / "out"), save_dir=str(save_dir), world=world, timeout=2.0, saves=[
        dict(tag=OLD, version=1), dict(tag=new, version=2, **second)]))
    done.expect(1, error="CommitError", ranks=[rank])
    found = check(save_dir, world)
    if overwrite:
        assert found == {OLD: found[OLD], "latest": OLD}
    else:
        assert found.pop(NEW, 2) == 2 and found == {OLD: 1, "latest": found["latest"]}


def test_ranks_at_different_steps(server, tmp_path):
    """One rank lost its place, say by an exception in the training script: its answer to another question is refused."""
    done = three_saves(server, tmp_path, 2, fault([1], "other_step"))
    for result in done.expect(1, error="CommitError"):
        assert "is at step 'another' and rank" in result["message"] or "is at step 'save' and rank" in result["message"]
    assert check(done.out / "after1", 2) == {OLD: 1, "latest": OLD}
    judge_third(done)


# -- storages with habits -----------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("world, nodes", [(2, 1), (4, 2)])
def test_replaced_directory_that_cannot_be_removed(server, tmp_path, world, nodes):
    """NFS keeps files that somebody has open. What is left of the old directory must not come back as the checkpoint."""
    done = three_saves(server, tmp_path, world, fault(list(range(world)), "rmtree_refuses"), overwrite=True, nodes=nodes)
    done.expect(1, error=None)
    assert check(done.out / "after1", world) == {OLD: 2, "latest": OLD}
    judge_third(done, overwrite=True)


def test_leftovers_that_cannot_be_removed(server, tmp_path):
    """Stale files in the staging directory would become part of the checkpoint: the save fails instead, and says why."""
    done = three_saves(server, tmp_path, 2, dict(**fault([0, 1], "rmtree_refuses"), plant=[NEW]))
    for result in done.expect(1, error="CommitError"):
        assert f".{NEW}.staged" in result["message"]
    assert check(done.out / "after1", 2) == {OLD: 1, "latest": OLD}
    judge_third(done)


def test_no_exchange(server, tmp_path):
    """NFS again: renames take the place of the exchange."""
    done = three_saves(server, tmp_path, 2, fault([0, 1], "no_exchange"), overwrite=True)
    done.expect(1, error=None)
    assert check(done.out / "after1", 2) == {OLD: 2, "latest": OLD} and hidden(done.out / "after1") == []
    judge_third(done, overwrite=True)


# -- a file system that is full -----------------------------------------------------------------------------------------------

@pytest.fixture
def small_disk(tmp_path):
    """A tmpfs of 1 MB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "ds_nvcomp_faults", str(disk)], capture_output=True,
                             text=True)
    if mounted.returncode:
        pytest.skip(f"a tmpfs cannot be mounted here: {mounted.stderr.strip()}")
    yield disk
    subprocess.run(["umount", "-l", str(disk)], check=True)


@pytest.mark.parametrize("world, rank", [(2, 0), (2, 1), (4, 3)])
@pytest.mark.parametrize("overwrite", [False, True])
def test_full_disk(server, tmp_path, small_disk, world, rank, overwrite):
    """One rank's part has grown beyond what is free."""
    done = three_saves(server, tmp_path, world, dict(extra={str(rank): 1 << 20}), save_dir=small_disk / "checkpoints",
                       overwrite=overwrite)
    judge_failed(done, rank, NO_SPACE, f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")
    judge_third(done, overwrite)


def test_disk_filled_by_others(server, tmp_path, small_disk):
    """It fills up between the saves, byte by byte, so that it is the small files, or the large, or nothing at all that fits."""
    outcomes = set()
    for free in range(0, 160 << 10, 8 << 10):
        done = three_saves(server, tmp_path / str(free), 2, dict(fill=free), save_dir=small_disk / "checkpoints")
        [error] = {result["error"] for result in (results[1] for results in done.results)}
        outcomes.add(error)
        found = check(done.out / "after1", 2)
        if error is None:
            assert found == {OLD: 1, NEW: 2, "latest": NEW}
        else:
            assert error == "CommitError" and found.pop(NEW, 2) == 2 and found == {OLD: 1, "latest": OLD}
            assert all(NO_SPACE in results[1]["message"] for results in done.results)
        assert hidden(done.out / "after1") == []
        judge_third(done)
        subprocess.run(["rm", "-rf", *map(str, small_disk.iterdir())], check=True)
    assert outcomes == {None, "CommitError"}
