"""Saves, overwrites, crashes and conversions of one checkpoint directory in random order: what `latest` names always loads as
committed.

A crash is an exception at the n-th call that changes the disk, after which every such call fails: no cleanup of a killed
process runs. A failure is one OSError, and the process lives on. Hypothesis looks for the shortest sequence that breaks a
promise.
"""
import errno
import os
import shutil
import sys
import tempfile
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule, run_state_machine_as_test

import ds_nvcomp
from ds_nvcomp.archive import files
from ds_nvcomp.archive.writer import write
from ds_nvcomp.checkpoint import exchange as exchange_module
from ds_nvcomp.checkpoint.commit import Commit
from ds_nvcomp.checkpoint.convert import pack, unpack
from ds_nvcomp.checkpoint.ranks import Ranks
from ds_nvcomp.checkpoint.verify import verify_tree
from ds_nvcomp.config import Config
from ds_nvcomp.errors import DsNvcompError

sys.path.insert(0, str(Path(__file__).parent / "hostile"))
from readers import fingerprint  # noqa: E402

CONFIG = Config(device="cpu", min_bytes=512, threads=1)
NAMES = ("mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_optim_states.pt")
CALLS = ("open", "pwritev", "fsync", "rename", "replace", "mkdir", "unlink", "remove", "rmdir", "link", "symlink", "chmod",
         "utime", "sendfile")


class Killed(BaseException):
    """The process is no more; nothing that handles exceptions may handle this one."""


def content(version: int, name: str):
    generator = torch.Generator().manual_seed(2 * version + (name == NAMES[0]))
    weight = torch.randn(1500, generator=generator)
    return {"version": version, "name": name, "weight": weight, "row": weight[10:20], "half": (weight * 0.01).bfloat16(),
            "step": torch.tensor(version)}


@lru_cache(maxsize=None)
def expected(version: int, name: str) -> str:
    return fingerprint(content(version, name))


def version_of(directory: Path):
    """The version that all files of a directory have, bit for bit; a sentence about what is wrong where there is none."""
    found = set()
    for name in NAMES:
        state = torch.load(directory / name, weights_only=True)
        if fingerprint(state) != expected(state["version"], name):
            return f"{name} is not what was saved"
        found.add(state["version"])
    return found.pop() if len(found) == 1 else f"files of several saves: {found}"


@contextmanager
def breaking(step: int | None, kind: str):
    """The `step`-th call that changes the disk is the last one (`kill`), or fails (`fail`). A write that is cut off is half
    done.
    """
    count, dead = 0, False

    def tick(half=lambda: None):
        nonlocal count, dead
        count += 1
        if dead:
            raise Killed()
        if count == step:
            half()
            if kind == "kill":
                dead = True
                raise Killed()
            raise OSError(errno.ENOSPC if step % 2 else errno.EIO, os.strerror(errno.ENOSPC if step % 2 else errno.EIO))

    def wrapped(name, original):
        def call(*args, **kwargs):
            if name == "fsync":
                return tick()
            if name == "pwritev":
                fd, buffers, offset = args
                whole = b"".join(map(bytes, buffers))
                tick(lambda: os.pwrite(fd, whole[:len(whole) // 2], offset))
            elif name == "save":
                tick(lambda: Path(args[1]).write_bytes(b"PK\3\4 half a file"))
            else:
                tick()
            return original(*args, **kwargs)
        return call

    places = [(os, name) for name in CALLS] + [(exchange_module, "_renameat2"), (torch, "save")]
    originals = [getattr(module, name) for module, name in places]
    try:
        for (module, name), original in zip(places, originals):
            setattr(module, name, wrapped(name, original))
        yield lambda: count
    finally:
        for (module, name), original in zip(places, originals):
            setattr(module, name, original)


STEPS = st.one_of(st.integers(1, 30), st.integers(1, 90))
KINDS = st.sampled_from(["kill", "kill", "fail"])
TAGS = st.sampled_from(["a", "b", "global_step7"])


class Checkpoints(RuleBasedStateMachine):
    """`tags` and `latest` are what was committed last; a save that broke leaves the old or the new, and then that is it."""

    @initialize()
    def begin(self):
        self.root = Path(tempfile.mkdtemp(dir="/dev/shm" if os.path.isdir("/dev/shm") else None))
        self.dir = self.root / "run"
        self.dir.mkdir()
        self.tags: dict[str, int] = {}
        self.latest = self.file = None
        self.version = 0

    def teardown(self):
        if hasattr(self, "root"):
            shutil.rmtree(self.root)

    # --- what is done ---------------------------------------------------------------------------------------------------

    def _save(self, tag):
        commit = Commit(self.dir / tag, Ranks(60), fsync=True)
        commit.begin()
        written = {}
        failure = None
        for name in NAMES:
            try:
                target = commit.stage(self.dir / tag / name)
                report = write(content(self.version, name), target, CONFIG, root=target.stem)
                written[str(target)] = report.stored_bytes, report.digest
            except OSError as err:  # kept until the commit, as the engine keeps it
                failure = failure or err
        commit.finish(failure, tag, written)

    @rule(tag=TAGS)
    def save(self, tag):
        self.version += 1
        self._save(tag)
        self.tags[tag] = self.version
        self.latest = tag
        left = [path.name for path in self.dir.iterdir() if path.name.endswith(".staged")]
        assert not left, f"a finished save leaves {left}"

    @rule(tag=TAGS, step=STEPS, kind=KINDS)
    def save_that_breaks(self, tag, step, kind):
        self.version += 1
        try:
            with breaking(step, kind):
                self._save(tag)
            survived = True
        except Killed:
            assert kind == "kill"
            survived = False
        except DsNvcompError:
            assert kind == "fail"
            survived = False
        latest = self._latest()
        there = version_of(self.dir / tag) if (self.dir / tag).exists() else None
        if survived:
            assert (latest, there) == (tag, self.version)
        else:
            assert there in (self.tags.get(tag), self.version), f"{tag} has {there}"
            assert latest == self.latest or latest == tag and there == self.version
        self.latest = latest
        if there is not None:
            self.tags[tag] = there

    @precondition(lambda self: self.tags)
    @rule(tag=TAGS, packs=st.booleans(), whole=st.booleans(), step=st.one_of(st.none(), STEPS), kind=KINDS)
    def convert(self, tag, packs, whole, step, kind):
        """In place. Broken or not, every tag keeps its content."""
        place = self.dir if whole or tag not in self.tags else self.dir / tag
        try:
            with breaking(step, kind):
                pack(place, config=CONFIG) if packs else unpack(place)
        except Killed:
            assert kind == "kill" and step
        except DsNvcompError:
            assert kind == "fail" and step

    @rule(step=st.one_of(st.none(), st.integers(1, 12)), kind=KINDS)
    def save_one_file(self, step, kind):
        """`ds_nvcomp.save` to a path: the old file or the new one."""
        self.version += 1
        path, new = self.root / "one.pt", (self.version, NAMES[0])
        try:
            with breaking(step, kind):
                ds_nvcomp.save(content(*new), path, CONFIG)
            self.file = new
        except (Killed, OSError):
            assert step
        if path.exists():
            found = fingerprint(torch.load(path, weights_only=True))
            assert found in [expected(*one) for one in (self.file, new) if one]
            self.file = new if found == expected(*new) else self.file
        else:
            assert self.file is None

    @rule()
    def verify(self):
        if self.tags:
            assert verify_tree(self.dir, decode=True) == []

    # --- what always holds ------------------------------------------------------------------------------------------------

    def _latest(self):
        path = self.dir / "latest"
        return path.read_text() if path.exists() else None

    @invariant()
    def latest_loads_as_committed(self):
        if not hasattr(self, "root"):
            return
        assert self._latest() == self.latest
        if self.latest is not None:
            assert version_of(self.dir / self.latest) == self.tags[self.latest]

    @invariant()
    def every_tag_loads_as_committed(self):
        if hasattr(self, "root"):
            assert {path.name for path in self.dir.iterdir() if not path.name.startswith(".")} - {"latest"} == set(self.tags)
            for tag, version in self.tags.items():
                assert version_of(self.dir / tag) == version


def run(examples, steps):
    run_state_machine_as_test(Checkpoints, settings=settings(
        max_examples=examples, stateful_step_count=steps, deadline=None, derandomize=examples < 100, database=None,
        suppress_health_check=list(HealthCheck)))


def test_a_few_sequences():
    run(30, 12)


@pytest.mark.slow
def test_many_sequences():
    run(400, 30)


def test_every_step_of_an_overwriting_save():
    """All of them in order: so that none is left to chance."""
    break_every_step()


def test_a_publish_in_two_steps_is_found(monkeypatch):
    """Would the machine see it if the old directory went before the new one came?"""
    def exchange(final, staged):
        shutil.rmtree(final)
        os.rename(staged, final)
        os.mkdir(staged)

    monkeypatch.setattr("ds_nvcomp.checkpoint.commit.exchange", exchange)
    with pytest.raises((AssertionError, FileNotFoundError)):
        break_every_step()


def test_a_latest_that_is_written_in_place_is_found(monkeypatch):
    def write_latest(save_dir, tag, *, fsync):
        with files.Writer(save_dir / "latest", fsync=fsync) as file:
            file.write_at(0, [tag.encode()])

    monkeypatch.setattr("ds_nvcomp.checkpoint.commit.write_latest", write_latest)
    with pytest.raises(AssertionError):
        break_every_step()


def break_every_step():
    machine = Checkpoints()
    machine.begin()
    try:
        machine.save("a")
        with breaking(None, "kill") as steps:
            machine._save("a")
        total = steps()
        assert total > 20
        machine.version = machine.tags["a"] = 1
        for kind in ("kill", "fail"):
            for step in range(1, total + 2):
                machine.save_that_breaks("a", step, kind)
                machine.latest_loads_as_committed()
                machine.every_tag_loads_as_committed()
                machine.verify()
    finally:
        machine.teardown()
