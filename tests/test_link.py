"""Master weights as their difference from 16-bit weights: the arithmetic, over all bits."""
import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st

from ds_nvcomp.config import Config
from ds_nvcomp.encoding import link, transforms
from ds_nvcomp.pipeline import Source, Weights, decode_payload, encode, parse_payload
from ds_nvcomp.pipeline import link as on_devices

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}
SPECIAL = [0x00000000, 0x80000000, 0x7f800000, 0xff800000, 0x7fc00000, 0x7f800001, 0xffffffff, 0x00000001, 0x807fffff, 0x3f808000, 0x3f818000,
           0x7f7fffff, 0x477fe000, 0x33000000, 0x387fc000]
bits = st.lists(st.one_of(st.sampled_from(SPECIAL), st.integers(0, 2 ** 32 - 1)), max_size=70).map(lambda values: np.array(values, np.uint32))


def raw(tensor):
    return tensor.reshape(-1).view(torch.uint8) if tensor.numel() else torch.empty(0, dtype=torch.uint8)


@given(bits, st.sampled_from(link.KINDS))
def test_any_master_comes_back_from_its_rounding(master, kind):
    weights = raw(torch.from_numpy(master.view(np.float32).copy()).to(DTYPES[kind])).numpy()
    data = link.difference(master.view(np.uint8), weights, kind)
    link.restore(data, weights, kind)
    assert np.array_equal(data.view(np.uint32), master)


@given(bits, st.lists(st.integers(0, 2 ** 16 - 1), max_size=70), st.sampled_from(link.KINDS))
def test_any_master_comes_back_from_any_weights(master, weights, kind):
    weights = np.array(weights[:len(master)], np.uint16).view(np.uint8)
    data = link.difference(master.view(np.uint8), weights, kind)
    link.restore(data, weights, kind)
    assert np.array_equal(data.view(np.uint32), master)


@pytest.mark.parametrize("kind", link.KINDS)
def test_widened_is_what_torch_makes_of_every_weight(kind):
    """But for NaNs, whose bits torch may change."""
    every = np.arange(1 << 16, dtype=np.uint16)
    ours = link.widened(every.view(np.uint8), kind, len(every)).view(np.float32)
    theirs = torch.from_numpy(every.view(np.int16)).view(DTYPES[kind]).float().numpy()
    nan = np.isnan(theirs)
    assert np.array_equal(ours.view(np.uint32)[~nan], theirs.view(np.uint32)[~nan]) and np.isnan(ours[nan]).all()
    assert len(np.unique(ours.view(np.uint32))) == len(every)


@pytest.mark.parametrize("kind", link.KINDS)
def test_differences_are_small(kind):
    master = torch.randn(1 << 20, generator=torch.Generator().manual_seed(3)) * 0.02
    weights = raw(master.to(DTYPES[kind])).numpy()
    upper = link.difference(raw(master).numpy(), weights, kind).view(np.uint32) >> 16
    assert np.count_nonzero(upper) < (100 if kind == "bfloat16" else 4000)


@pytest.mark.parametrize("codec", ["deflate", "zstd", "none"])
@pytest.mark.parametrize("kind, covered", [("bfloat16", 1.0), ("float16", 1.0), ("bfloat16", 0.7), ("bfloat16", 0.0)])
def test_through_the_pipeline(codec, kind, covered):
    master = torch.randn(300_001) * 0.02
    weights = Weights(raw(master.to(DTYPES[kind]))[:2 * int(covered * len(master))], kind)
    (_, payload), = encode([Source(raw(master), transforms.SPLIT32, "w", weights)], Config(codec=codec))
    stored = torch.frombuffer(bytearray(b"".join(bytes(part) for part in payload.parts)), dtype=torch.uint8)
    found = decode_payload(stored, parse_payload(stored))
    on_devices.restore(found, weights)
    assert torch.equal(found, raw(master))
    if covered == 1.0 and codec != "none":
        assert len(stored) < {"bfloat16": 0.535, "float16": 0.6}[kind] * 4 * len(master)


def test_fits_what_was_rounded_only():
    master = torch.randn(200_000)
    rounded, other = Weights(raw(master.bfloat16()), "bfloat16"), Weights(raw(torch.randn(200_000).bfloat16()), "bfloat16")
    assert on_devices.fits(raw(master), rounded) and not on_devices.fits(raw(master), other)
    assert not on_devices.fits(raw(master), Weights(torch.empty(0, dtype=torch.uint8), "bfloat16"))
    assert on_devices.fits(raw(torch.zeros(5)), Weights(raw(torch.zeros(5).half()), "float16"))
