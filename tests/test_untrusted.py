"""weights_only=True decodes bytes from a stranger: never by a decoder of nvCOMP's that is not safe on them, whatever GPU is there."""
import json
import os
import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

import ds_nvcomp
import payloads
from ds_nvcomp import pipeline
from ds_nvcomp.encoding import codecs
from ds_nvcomp.errors import UntrustedCodecError
from ds_nvcomp.pipeline import decode_payload, parse_payload

UNSAFE = ("gdeflate", "bitcomp", "cascaded")
ON_CPU = ("deflate", "zstd", "lz4", "snappy")

# Every call of decode_payload tells whether it is told to trust.
WATCH = """
import json, sys, torch
told = []
def watch(frame, event, arg):
    if event == "call" and frame.f_code.co_name == "decode_payload":
        told.append(frame.f_locals["trusted"])
sys.setprofile(watch)
"""
LOAD = """
for arguments in ({}, {"weights_only": True}, {"weights_only": False}, {"weights_only": True, "mmap": True}):
    torch.load(sys.argv[1], **arguments)
import ds_nvcomp
ds_nvcomp.load(sys.argv[1], weights_only=True)
ds_nvcomp.load(sys.argv[1], weights_only=False)
print(json.dumps(told))
"""


@pytest.fixture
def file(tmp_path):
    ds_nvcomp.save({"w": torch.randn(20_000)}, tmp_path / "x.pt", {"fsync": False})
    return tmp_path / "x.pt"


@pytest.mark.parametrize("register", [
    "from ds_nvcomp.autoload import autoload; autoload()",                  # stand-ins; the load imports archive
    "import ds_nvcomp; ds_nvcomp.install(); import ds_nvcomp.archive",      # stand-ins, and then archive, which leaves them
    "import ds_nvcomp.archive",                                             # archive's own
    "import ds_nvcomp.archive; ds_nvcomp.install()",                        # stand-ins over archive's own
], ids=["autoload", "install, archive", "archive", "archive, install"])
def test_weights_only_reaches_the_safe_decoders_only(file, register):
    alone = register == "import ds_nvcomp.archive"
    environment = {**os.environ, "DS_NVCOMP_AUTOLOAD": "0" if alone else "1"}
    if not alone:
        register = f"import os; os.environ['DS_NVCOMP_AUTOLOAD'] = '1'; {register}"
    done = subprocess.run([sys.executable, "-c", WATCH + register + LOAD, str(file)], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [False, False, True, False, False, True]


def test_what_counts_as_safe():
    assert {name for name, codec in codecs.BY_NAME.items() if not codec.safe} == set(UNSAFE)
    assert {name for name, codec in codecs.BY_NAME.items() if codec.checked} == {"ans"}


# -- decode_payload with a GPU that only notes what it is given ---------------------------------------------------------------

@pytest.fixture
def gpu(monkeypatch):
    seen = []

    def decode(data, header, table, codec, device):
        seen.append(codec.name)
        return torch.zeros(header.raw_bytes, dtype=torch.uint8)
    fake = SimpleNamespace(decode=decode)
    monkeypatch.setattr(pipeline, "gpu_missing", lambda: None)
    monkeypatch.setattr(pipeline, "gpu", fake, raising=False)
    monkeypatch.setitem(sys.modules, "ds_nvcomp.pipeline.gpu", fake)
    return seen


def payload(codec, *, coded=True):
    """(bytes, parsed): for codecs of the GPU's, streams that they would not make."""
    found = codecs.BY_NAME[codec]
    data = payloads.payload(codec=codec if found.cpu else "deflate" if coded else "none")
    data = payloads.put(data, codec=found.number, revision=found.revision)
    tensor = torch.frombuffer(data, dtype=torch.uint8)
    return tensor, parse_payload(tensor)


class OnCuda:
    """A tensor that says it is in GPU memory."""
    is_cuda, device = True, torch.device("cpu")

    def __init__(self, tensor):
        self.cpu = lambda: tensor


@pytest.mark.parametrize("place", [lambda tensor: tensor, OnCuda], ids=["host", "cuda"])
@pytest.mark.parametrize("codec", UNSAFE)
def test_unsafe_decoders_are_refused(gpu, codec, place):
    data, parsed = payload(codec)
    with pytest.raises(UntrustedCodecError, match=f"{codec}.*weights_only=False.*ds-nvcomp pack"):
        decode_payload(place(data), parsed, trusted=False)
    assert gpu == []
    decode_payload(place(data), parsed)
    assert gpu == [codec]


@pytest.mark.parametrize("codec", UNSAFE)
def test_what_has_no_streams_needs_no_trust(gpu, codec):
    data, parsed = payload(codec, coded=False)
    assert torch.equal(decode_payload(data, parsed, trusted=False), decode_payload(data, parsed))
    assert gpu == []
    decode_payload(OnCuda(data), parsed, trusted=False)
    assert gpu == [codec]


@pytest.mark.parametrize("codec", ON_CPU)
def test_what_the_cpu_can_decode_is_decoded_there(gpu, codec):
    data, parsed = payload(codec)
    expected = decode_payload(data, parsed)
    assert torch.equal(decode_payload(OnCuda(data), parsed, trusted=False), expected) and expected.any()
    assert gpu == []
    decode_payload(OnCuda(data), parsed)
    assert gpu == [codec]


@pytest.mark.parametrize("trusted", [True, False])
@pytest.mark.parametrize("place", [lambda tensor: tensor, OnCuda], ids=["host", "cuda"])
def test_ans_has_its_streams_checked_and_goes_to_the_gpu(gpu, place, trusted):
    data, parsed = payload("ans")
    decode_payload(place(data), parsed, trusted=trusted)
    assert gpu == ["ans"]


def test_a_whole_file(tmp_path, monkeypatch, gpu):
    """A file that says gdeflate: refused by what loads files from strangers, with the names of file and tensor."""
    monkeypatch.setitem(codecs.BY_NAME, "deflate", replace(codecs.BY_NAME["gdeflate"], cpu="deflate"))
    ds_nvcomp.save({"layer": {"w": torch.randn(20_000)}}, tmp_path / "x.pt", {"fsync": False})
    monkeypatch.undo()
    for arguments in (dict(), dict(weights_only=True), dict(weights_only=True, mmap=True)):
        with pytest.raises(UntrustedCodecError, match="gdeflate") as caught:
            ds_nvcomp.load(tmp_path / "x.pt", **arguments)
        assert (caught.value.path, caught.value.tensor) == (str(tmp_path / "x.pt"), "layer.w")
    assert not gpu
