"""Files of format version 1 as they were released: the valid ones decode to the same bits, the others are refused with their error.

Nothing here writes. A missing or changed golden file is a failure; see golden/make.py.
"""
import hashlib
import json
import subprocess
import sys
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch

import payloads
import reference_decoder
ROOT = Path(__file__).resolve().parent.parent
import ds_nvcomp
from ds_nvcomp import errors
from ds_nvcomp.checkpoint.verify import verify_file
from ds_nvcomp.encoding import codecs

GOLDEN = ROOT / "tests" / "golden"
INDEX = json.loads((GOLDEN / "index.json").read_text())


def entries(folder):
    return pytest.mark.parametrize("name", sorted(name for name in INDEX if name.startswith(folder + "/")))


def sha(data):
    return hashlib.sha256(bytes(data)).hexdigest()


def read(name):
    data = (GOLDEN / name).read_bytes()
    assert sha(data) == INDEX[name]["sha256"], f"{name} is not the file that was committed; restore it, golden files never change"
    return data


def test_files_are_those_of_the_index():
    there = {str(path.relative_to(GOLDEN)) for path in GOLDEN.rglob("*") if path.suffix in (".payload", ".pt")}
    assert there == set(INDEX)
    assert all((GOLDEN / name).stat().st_size < 20 << 10 for name in INDEX)


def test_every_cpu_codec_dtype_and_error_is_there():
    from conformance import CPU_CODECS, DTYPES
    assert {f"valid/{codec}-{dtype}.payload" for codec in CPU_CODECS for dtype in DTYPES} <= set(INDEX)
    assert {f"archive/{codec}.pt" for codec in CPU_CODECS} <= set(INDEX)
    invalid = [INDEX[name] for name in INDEX if name.startswith("invalid/")]
    steps = {entry["step"] for entry in invalid}
    assert steps == set(range(1, 24)) - {19, 20}  # those two are not about the payload's bytes
    of_payloads = {"TruncatedError", "HeaderError", "UnsupportedVersionError", "TableError", "ChecksumError", "DecodeError"}
    assert {entry["error"] for entry in invalid} == of_payloads
    links = [INDEX[name] for name in INDEX if name.startswith("links/")]
    assert {entry["step"] for entry in links if "step" in entry} == set(range(1, 9)) - {3}  # that one is about what is in section 8
    assert {entry["kind"] for entry in links if "kind" in entry} == {"bfloat16", "float16"}


@entries("valid")
def test_valid(name):
    entry, data = INDEX[name], read(name)
    if codecs.BY_NAME[entry["codec"]].cpu is None and entry["codec"] != "none":
        pytest.importorskip("nvidia.nvcomp", reason="this codec needs a GPU")
        if not torch.cuda.is_available():
            pytest.skip("this codec needs a GPU")
    else:
        assert sha(reference_decoder.decode(data)) == entry["decodes_to"]
    assert sha(payloads.decode(data)) == entry["decodes_to"]


@entries("valid")
def test_recipes_still_make_what_they_made(name):
    """Only then does a golden file say what is in it. A failure here is about the recipe, not about a reader."""
    sys.path.insert(0, str(GOLDEN))
    try:
        from make import raw_bytes
    finally:
        sys.path.remove(str(GOLDEN))
    entry = INDEX[name]
    assert sha(raw_bytes(entry["dtype"], entry["recipe"])) == entry["decodes_to"]


@entries("invalid")
def test_invalid(name):
    entry, data = INDEX[name], read(name)
    with pytest.raises(errors.DsNvcompError) as caught:
        payloads.decode(data)
    assert type(caught.value).__name__ == entry["error"]
    assert len(str(caught.value)) > 40, "says too little"
    with pytest.raises(reference_decoder.Refused) as reference:
        reference_decoder.decode(data)
    assert reference.value.step == entry["step"]


MASTER = "optimizer_state_dict.single_partition_of_fp32_groups.0"


@pytest.mark.parametrize("name", sorted(name for name in INDEX if "kind" in INDEX[name]))
def test_links(name):
    read(name), read(str(Path(name).with_name("mp_rank_00_model_states.pt")))
    for weights_only in (False, True):
        master = torch.load(GOLDEN / name, weights_only=weights_only)["optimizer_state_dict"]["single_partition_of_fp32_groups"][0]
        assert sha(master.view(torch.uint8).numpy()) == INDEX[name]["decodes_to"]
    assert sha(ds_nvcomp.load(GOLDEN / name, select=MASTER)[MASTER].view(torch.uint8).numpy()) == INDEX[name]["decodes_to"]
    assert verify_file(GOLDEN / name) == verify_file(GOLDEN / name, decode=True) == []
    assert sha(reference_decoder.tensors(GOLDEN / name)[MASTER][1]) == INDEX[name]["decodes_to"]


@pytest.mark.parametrize("name", sorted(name for name in INDEX if name.startswith("links/") and "error" in INDEX[name]))
def test_invalid_links(name):
    entry = INDEX[name]
    read(name)
    for load in (lambda path: torch.load(path, weights_only=False), ds_nvcomp.load, lambda path: ds_nvcomp.load(path, select=MASTER)):
        with pytest.raises(errors.FormatError) as caught:
            load(GOLDEN / name)
        assert type(caught.value).__name__ == entry["error"] and len(str(caught.value)) > 40
    assert {problem.kind for problem in verify_file(GOLDEN / name, decode=True)} == {entry["error"]}
    assert bool(verify_file(GOLDEN / name)) == (name != "links/bfloat16/linked-damaged.pt" and entry["step"] < 8)
    with pytest.raises(reference_decoder.Refused) as reference:
        reference_decoder.tensors(GOLDEN / name)
    assert reference.value.link == entry["step"]


def test_the_example_of_a_link():
    """FORMAT.md, section 12.3."""
    assert reference_decoder.numbers_from(bytes.fromhex("65660000 00008000"), bytes.fromhex("cd3d 803f"), "bfloat16") == \
        bytes.fromhex("cdcccc3d 0080803f")
    assert zlib.crc32(bytes.fromhex("cd3d 803f")) == 70593138


def test_the_reference_widens_as_the_package():
    from ds_nvcomp.encoding import link
    every = np.arange(1 << 16, dtype=np.uint16)
    for kind in link.KINDS:
        assert link.widened(every.view(np.uint8), kind, len(every)).tolist() == [reference_decoder.widen(int(half), kind) for half in every]


FRESH = """
import hashlib, json, sys, torch
{register}
result = {{}}
for path in sys.argv[1:]:
    state = torch.load(path, weights_only={weights_only}, mmap={mmap})
    weight = state["weight"]
    assert state["tied"] is weight and weight.ds_id == 7 and type(weight) is torch.nn.Parameter, path
    for name in ("row", "transposed"):
        assert state[name].untyped_storage().data_ptr() == weight.untyped_storage().data_ptr(), path
    assert state["transposed"].stride() == (1, 40) and state["nested"][0]["step"] == 12, path
    assert state["nested"][0]["half"].untyped_storage().data_ptr() == state["half"].untyped_storage().data_ptr(), path
    result[path] = {{name: hashlib.sha256(t.detach().contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()
                    for name, t in state.items() if isinstance(t, torch.Tensor)}}
print(json.dumps(result))
"""


@pytest.mark.parametrize("weights_only,mmap,register", [
    (False, False, ""), (True, False, "import ds_nvcomp.archive"), (True, True, "import ds_nvcomp.archive")],
    ids=["pickle", "weights only", "mmap"])
def test_archives_in_a_fresh_process(weights_only, mmap, register):
    names = sorted(name for name in INDEX if name.startswith("archive/"))
    for name in names:
        read(name)
    code = FRESH.format(weights_only=weights_only, mmap=mmap, register=register)
    out = subprocess.run([sys.executable, "-c", code, *(str(GOLDEN / name) for name in names)], capture_output=True, text=True, cwd=ROOT)
    assert out.returncode == 0, out.stderr
    assert json.loads(out.stdout) == {str(GOLDEN / name): INDEX[name]["decodes_to"] for name in names}


def test_valid_files_use_every_mode():
    for codec in ("deflate", "zstd", "none"):
        data = read(f"valid/{codec}-float32.payload")
        modes = {data[at] for plane in payloads.table_of(data)[2] for at in plane}
        assert modes == ({0, 1, 3} if codec == "none" else {0, 1, 2, 3})
