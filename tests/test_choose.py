"""`codec: "auto"`: the decision obeys its own rules on any figures, and the chooser learns from saves and says so."""
import dataclasses
import logging
import os
import types

import pytest
import torch
from hypothesis import given, strategies as st

import ds_nvcomp.checkpoint.auto as auto
from ds_nvcomp.checkpoint.choose import CANDIDATES, RATIO_TOLERANCE, TOLERANCE, Target, choose, rate
from ds_nvcomp.checkpoint.probe import DiskSpeed
from ds_nvcomp.config import Config
from ds_nvcomp.errors import DirectoryError
from ds_nvcomp.log import logger
from ds_nvcomp.pipeline.speeds import Speed

SLACK = 1 + 1e-9
RATES = st.floats(0.01, 1000)
SPEEDS = st.lists(st.builds(Speed, st.sampled_from(CANDIDATES), st.sampled_from([65536, 262144]), st.sampled_from([0, 4]),
                            st.floats(0.1, 1.001), RATES, RATES), min_size=1, max_size=8)
TARGETS = st.builds(Target, RATES, st.none() | RATES, st.booleans())

DEFLATE = Speed("deflate", 65536, 0, 0.80, 55, 35)   # as on an H200
ANS = Speed("ans", 262144, 0, 0.801, 39, 220)
ZSTD = Speed("zstd", 65536, 0, 0.82, 9.5, 65)
NONE = Speed("none", 65536, 0, 1.0, 47, 380)
GPU = [DEFLATE, ANS, ZSTD, NONE]
CPU = [Speed("deflate", 65536, 0, 0.80, 0.8, 1.2), Speed("zstd", 65536, 0, 0.82, 0.85, 1.9), Speed("none", 65536, 0, 1.0, 1.9, 3)]


@given(SPEEDS, TARGETS)
def test_the_least_stall_then_total_then_bytes(rows, target):
    chosen, rated = choose(rows, target), [rate(row, target) for row in rows]
    assert chosen.speed in rows
    least = min(choice.stall for choice in rated)
    assert chosen.stall <= least * (1 + TOLERANCE) * SLACK
    alike = [choice for choice in rated if choice.stall <= least * (1 + TOLERANCE)]
    soonest = min(choice.total for choice in alike)
    assert chosen.total <= soonest * (1 + TOLERANCE) * SLACK
    alike = [choice.speed.ratio for choice in alike if choice.total <= soonest * (1 + TOLERANCE)]
    assert chosen.speed.ratio <= min(alike) * (1 + RATIO_TOLERANCE) * SLACK


@given(SPEEDS, TARGETS, st.floats(1, 100))
def test_more_bandwidth_never_makes_it_slower(rows, target, factor):
    before, after = choose(rows, target), choose(rows, dataclasses.replace(target, write=target.write * factor))
    assert after.stall <= before.stall * (1 + TOLERANCE) * SLACK


@given(SPEEDS, TARGETS, st.randoms())
def test_the_order_of_rows_matters_only_between_equals(rows, target, random):
    other = random.sample(rows, len(rows))
    one, two = choose(rows, target), choose(other, target)
    assert one.speed.codec == two.speed.codec


@given(RATES, RATES, st.floats(0.1, 1), RATES)
def test_rates(write, encode, ratio, copy):
    row = Speed("deflate", 65536, 0, ratio, encode, 1)
    sync, background = rate(row, Target(write, copy)), rate(row, Target(write, copy, asynchronous=True))
    assert sync.stall == sync.total == max(1 / encode, ratio / copy, ratio / write)
    assert background.stall == max(1 / encode, ratio / copy) <= sync.stall
    assert background.total >= sync.total
    assert rate(row, Target(write)).stall == max(1 / encode, ratio / write)


@pytest.mark.parametrize("rows, target, codec", [
    (GPU, Target(1.6, 55), "deflate"),           # ans is as small and as quick to disk: deflate can be read anywhere
    (GPU, Target(1.6, 55, True), "deflate"),     # encoded, less is to be copied
    (CPU, Target(1.7), "none"),                  # the disk takes more than the CPU can encode
    (CPU, Target(0.1), "deflate"),
    (CPU, Target(0.1, asynchronous=True), "none"),
    ([*CPU, dataclasses.replace(ANS, encode=6)], Target(1.7), "ans")])
def test_machines_that_there_are(rows, target, codec):
    assert choose(rows, target).speed.codec == codec


def test_noise_does_not_decide():
    for noise in (0.98, 1.02):
        other = dataclasses.replace(ANS, encode=55 * noise, ratio=0.8 + (noise - 1) / 5)
        assert choose([other, DEFLATE], Target(1e3, 1e3)).speed == DEFLATE


def test_codecs_that_are_no_candidates():
    assert choose([Speed("cascaded", 65536, 0, 0.1, 900, 900), NONE], Target(1)).speed == NONE


@given(SPEEDS, TARGETS)
def test_the_reason_states_the_figures(rows, target):
    chosen = choose(rows, target)
    assert "\n" not in chosen.reason and chosen.reason.startswith(f"{chosen.speed.codec}, chunks of ")
    assert f"{chosen.stall:.3g} s for a GB" in chosen.reason and f"ratio is {chosen.speed.ratio:.2f}" in chosen.reason
    assert ("async" if target.asynchronous else "(sync") in chosen.reason
    assert all(f"; {row.codec} " in chosen.reason for row in rows if row.codec != chosen.speed.codec)


def test_the_reason_names_what_limits():
    assert "the target takes 1.6 GB/s" in choose(GPU, Target(1.6, 55)).reason
    assert "encoding into host memory reaches 55 GB/s" in choose([DEFLATE], Target(1.6, 55, True)).reason
    assert "copies to the host reach 5 GB/s" in choose([DEFLATE], Target(100, 5)).reason


# -- the chooser --------------------------------------------------------------------------------------------------------------

@pytest.fixture
def log(monkeypatch):
    lines = []
    monkeypatch.setattr(logger, "handlers", [handler := logging.Handler()])
    handler.emit = lambda record: lines.append((record.levelname, record.getMessage()))
    return lines


@pytest.fixture
def machine(monkeypatch):
    """A machine of which a test sets the figures; `probed` are the directories asked for."""
    made = types.SimpleNamespace(rows=CPU, write=1.7, copy=None, probed=[], measured=0)

    def probe(directory, config):
        made.probed.append(directory)
        if isinstance(made.write, Exception):
            raise made.write
        return DiskSpeed(made.write, 1, 1, True)

    def measure(configs, device):
        made.measured += 1
        if isinstance(made.rows, Exception):
            raise made.rows
        return made.rows

    monkeypatch.setattr(auto, "probe", probe)
    monkeypatch.setattr(auto.speeds, "measure", measure)
    monkeypatch.setattr(auto.speeds, "copy_speed", lambda device: made.copy)
    return made


def saved(ratio, seconds, encode=0.001, raw=10**9):
    return dict(raw_bytes=raw, stored_bytes=int(raw * ratio), encode_seconds=encode, write_seconds=seconds)


def test_a_codec_that_is_given_is_kept(machine, tmp_path, log):
    config = Config(codec="zstd")
    assert auto.Chooser(config).config(tmp_path) is config and not machine.probed and not log


def test_it_measures_once_and_says_what_it_chose(machine, tmp_path, log):
    machine.rows = [Speed("deflate", 65536, 4, 0.8, 0.8, 1), Speed("none", 65536, 0, 1, 1.9, 3)]
    machine.write = 0.1
    chooser = auto.Chooser(Config(codec="auto", fsync=False, min_bytes=1))
    chosen = chooser.config(tmp_path)
    assert chosen == Config(codec="deflate", chunk_bytes=65536, threads=4, fsync=False, min_bytes=1)
    assert chooser.config(tmp_path) == chosen
    assert machine.probed == [tmp_path] and machine.measured == 1
    assert len(log) == 1 and log[0][0] == "INFO" and log[0][1].startswith("codec auto: deflate") and "0.1 GB/s" in log[0][1]


def test_only_rank_0_says_so(machine, tmp_path, log):
    auto.Chooser(Config(codec="auto"), rank=3).config(tmp_path)
    assert machine.measured and not [line for line in log if line[0] != "DEBUG"]


def test_it_changes_its_mind_on_a_slow_disk_and_says_so(machine, tmp_path, log):
    chooser = auto.Chooser(Config(codec="auto"))
    assert chooser.config(tmp_path).codec == "none"
    chooser.observe(**saved(1.0, seconds=100))       # not at 1.7 GB/s, but at 0.01
    assert chooser.config(tmp_path).codec == "none"  # once is an accident
    chooser.observe(**saved(1.0, seconds=100))
    assert chooser.config(tmp_path).codec == "deflate"
    assert len(log) == 2 and log[0][1].startswith("codec auto: none") and log[1][1].startswith("codec auto: deflate")
    assert "before: none" in log[1][1] and machine.measured == 1
    for _ in range(8):
        chooser.observe(**saved(0.8, seconds=0.4))
    assert chooser.config(tmp_path).codec == "none" and len(log) == 3  # and back, when it is fast again


def test_it_stays_where_a_change_gains_little(machine, tmp_path, log):
    machine.write = 0.99  # none takes 1 / 0.99 = 1.01 s a GB, deflate 1 / 0.95 = 1.05 s
    machine.rows = [Speed("deflate", 65536, 0, 0.8, 0.95, 1), Speed("none", 65536, 0, 1.0, 1.9, 3)]
    chooser = auto.Chooser(Config(codec="auto"))
    first = chooser.config(tmp_path).codec
    for write in (0.93, 0.99, 1.02, 0.93, 1.02):
        chooser._write = write
        assert chooser.config(tmp_path).codec == first
    assert len(log) == 1


def test_a_save_that_waited_for_its_encoder_tells_little_of_the_disk(machine, tmp_path):
    machine.write = 0.1
    chooser = auto.Chooser(Config(codec="auto"))
    assert chooser.config(tmp_path).codec == "deflate"
    for _ in range(10):
        chooser.observe(**saved(0.8, seconds=10.1, encode=10))
    assert chooser._write == pytest.approx(0.1)  # 0.08 GB/s is all that it was given
    chooser.observe(**saved(0.8, seconds=1.01, encode=1))
    assert chooser._write == pytest.approx(0.8 / 1.01)  # it takes at least that
    background = auto.Chooser(Config(codec="auto", async_=True))  # there, writing is timed by itself
    background.config(tmp_path)
    background.observe(**saved(0.8, seconds=10.1, encode=10))
    assert background._write < 0.1


def test_small_saves_tell_nothing(machine, tmp_path):
    chooser = auto.Chooser(Config(codec="auto"))
    chooser.config(tmp_path)
    chooser.observe(**saved(1.0, seconds=100, raw=10**6))
    chooser.observe(raw_bytes=0, stored_bytes=0, encode_seconds=0, write_seconds=0)
    assert chooser._write == 1.7


def test_another_file_system_is_measured_anew(machine, tmp_path, monkeypatch):
    chooser = auto.Chooser(Config(codec="auto"))
    chooser.config(tmp_path / "not" / "yet")
    assert machine.probed == [tmp_path]
    monkeypatch.setattr(auto, "os", types.SimpleNamespace(stat=lambda path: types.SimpleNamespace(st_dev=os.stat(path).st_dev + 1)))
    machine.write = 0.01
    assert chooser.config(tmp_path).codec == "deflate" and len(machine.probed) == 2 and machine.measured == 1


@pytest.mark.parametrize("what, failure", [("write", DirectoryError("no room")), ("write", PermissionError("not yours")),
                                           ("rows", torch.OutOfMemoryError("full"))])
def test_what_cannot_be_measured_is_said_and_fails_no_save(machine, tmp_path, log, what, failure):
    setattr(machine, what, failure)
    chooser = auto.Chooser(Config(codec="auto"))
    assert chooser.config(tmp_path).codec == "deflate" and chooser.config(tmp_path).codec == "deflate"
    assert [level for level, _ in log] == ["WARNING"] and str(failure) in log[0][1] and "deflate" in log[0][1]


def test_after_a_failed_probe_saves_tell(machine, tmp_path):
    machine.write = DirectoryError("no room")
    chooser = auto.Chooser(Config(codec="auto"))
    assert chooser.config(tmp_path).codec == "deflate"
    chooser.observe(**saved(0.8, seconds=0.1, encode=0.001))
    assert chooser.config(tmp_path).codec == "none"
