"""What checkpoints cost: the specification's figures, and the laws that any such arithmetic obeys."""
import dataclasses

import pytest
from hypothesis import given, strategies as st

from ds_nvcomp.costs import BYTES_PER_PARAM, MONTH, Job, costs, duration
from ds_nvcomp.errors import ConfigError

SPECIFIED = Job(checkpoint=782, gpus=8, gpu_hour=4.40, interval=1800, bandwidth=5)
SIZES = st.floats(0.1, 1e5)
JOBS = st.builds(Job, checkpoint=SIZES, gpus=st.integers(1, 10_000), gpu_hour=st.floats(0.1, 20), interval=st.floats(1, 1e5),
                 bandwidth=st.floats(0.1, 1e3))


def test_the_figures_of_the_specification():
    plain, sync, background = costs(SPECIFIED)
    assert plain.save_seconds == plain.stall_seconds == pytest.approx(156.4)
    assert plain.saves == 1440 and plain.gpu_hours == pytest.approx(1440 * 156.4 * 8 / 3600)
    assert plain.money == pytest.approx(2202, abs=1)
    assert sync.save_seconds == sync.stall_seconds == pytest.approx(156.4 * 0.81) and sync.stored == pytest.approx(782 * 0.81)
    assert background.stall_seconds == pytest.approx(782 / 8 / 55)
    assert background.save_seconds == pytest.approx(782 / 8 / 55 + 156.4 * 0.81)
    assert BYTES_PER_PARAM == 14 and MONTH == 30 * 24 * 3600


def test_measured_figures_replace_the_documented_ones():
    _, sync, background = costs(SPECIFIED, ratio=0.5, snapshot=100)
    assert sync.save_seconds == pytest.approx(78.2) and background.stall_seconds == pytest.approx(782 / 8 / 100)


def test_an_encoder_slower_than_the_storage_decides():
    job = Job(checkpoint=100, gpus=1, gpu_hour=1, interval=1e4, bandwidth=1000)
    assert costs(job, snapshot=2)[1].save_seconds == pytest.approx(50)


def test_saves_longer_than_the_interval():
    """They follow one another at once, and asynchronous ones wait for the one before."""
    job = Job(checkpoint=1000, gpus=10, gpu_hour=1, interval=60, bandwidth=1)
    plain, sync, background = costs(job, ratio=0.8, snapshot=100)
    assert plain.gpu_hours == pytest.approx(720 * 10)  # never anything else
    assert sync.saves == pytest.approx(MONTH / 800)
    assert background.save_seconds == pytest.approx(801) and background.stall_seconds == pytest.approx(1 + 801 - 60)


@given(JOBS, st.floats(0.05, 1), st.floats(1, 500))
def test_laws(job, ratio, snapshot):
    plain, sync, background = costs(job, ratio=ratio, snapshot=snapshot)
    for cost in (plain, sync, background):
        assert 0 < cost.stall_seconds and cost.gpu_hours <= job.gpus * MONTH / 3600 * (1 + 1e-9)
        assert cost.money == pytest.approx(cost.gpu_hours * job.gpu_hour)
    assert sync.save_seconds <= plain.save_seconds and sync.stored <= plain.stored
    faster = costs(dataclasses.replace(job, bandwidth=job.bandwidth * 2), ratio=ratio, snapshot=snapshot)
    assert all(new.save_seconds <= old.save_seconds for new, old in zip(faster, (plain, sync, background)))


@pytest.mark.parametrize("field", ["checkpoint", "gpus", "gpu_hour", "interval", "bandwidth"])
@pytest.mark.parametrize("value", [0, -1, float("nan"), float("inf")])
def test_what_is_not_above_zero_is_named(field, value):
    with pytest.raises(ConfigError, match=field.replace("_", " ")):
        dataclasses.replace(SPECIFIED, **{field: value})


@pytest.mark.parametrize("text, seconds", [("90s", 90), ("30m", 1800), ("2h", 7200), ("1.5h", 5400), (".5d", 43200), (" 5 m ", 300)])
def test_durations(text, seconds):
    assert duration(text) == seconds


@pytest.mark.parametrize("text", ["", "30", "m", "30 min", "-5m", "1h30m", "0s", "0.0h", "nan s", "infm", "1e3s", "30M",
                                  "\u0663m", "9" * 400 + "s"])
def test_what_is_no_duration(text):
    with pytest.raises(ConfigError, match="90s, 30m or 2h") as caught:
        duration(text)
    assert repr(text) in str(caught.value)
