"""The fuzzer's corpus through its target, without the fuzzer: what it has found is gone through in every run of the tests."""
import sys
from pathlib import Path

import pytest

import corrupt

ROOT = Path(__file__).resolve().parents[2]
CORPUS = sorted((ROOT / "fuzz" / "corpus").iterdir())


@pytest.fixture(scope="module")
def target():
    path = list(sys.path)
    sys.path.insert(0, str(ROOT / "fuzz"))
    try:
        import payload
        yield payload
    finally:
        sys.path[:] = path
        Path(payload.FILE).unlink(missing_ok=True)


def test_every_input(target):
    for path in CORPUS:
        target.one_input(path.read_bytes())


def test_the_corpus_is_small_and_has_both_kinds():
    assert sum(path.stat().st_size for path in CORPUS) < 300 << 10
    kinds = {path.read_bytes()[:4] for path in CORPUS}
    assert {b"PK\3\4", corrupt.MAGIC[:4]} <= kinds


def test_the_target_sees_a_decoder_that_is_wrong(target, monkeypatch):
    """One that gives other bytes, one that accepts what the format forbids, one that refuses what it allows."""
    whole = (ROOT / "fuzz" / "corpus" / "seed-deflate-bfloat16").read_bytes()
    target.one_input(whole)
    decode = target.decode_payload

    def other(tensor, parsed):
        found = decode(tensor, parsed)
        found[0] ^= 1
        return found

    def refusing(tensor, parsed):
        raise target.DsNvcompError("refused without a reason, and said at some length")

    def careless(tensor, parsed):
        import torch
        return torch.zeros(parsed[0].raw_bytes, dtype=torch.uint8)

    damaged = bytearray(whole)
    damaged[-3] ^= 1
    for wrong, data, message in ((other, whole, "other bytes"), (refusing, whole, "refused what"),
                                 (careless, damaged, "decoded what")):
        monkeypatch.setattr(target, "decode_payload", wrong)
        with pytest.raises(AssertionError, match=message):
            target.one_input(bytes(data))
