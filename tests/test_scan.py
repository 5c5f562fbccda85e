"""scan: what is in a file, and that nothing in it runs."""
import io
import os
import pickle
import resource
import struct
import time
import zipfile

import pytest
import torch

import ds_nvcomp
from ds_nvcomp.archive import symbolic
from ds_nvcomp.archive.scan import scan
from ds_nvcomp.errors import (ArchiveError, DsNvcompError, FormatError, HeaderError, TableError, TruncatedError,
                              UnsupportedVersionError)


def rewrite(path, edit):
    """Write the zip again with `edit(records)` done to its records, a dict of bytes by name below the root."""
    with zipfile.ZipFile(path) as zipped:
        root = zipped.namelist()[0].partition("/")[0]
        records = {name.partition("/")[2]: zipped.read(name) for name in zipped.namelist()}
    edit(records)
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as zipped:
        for name, data in records.items():
            zipped.writestr(f"{root}/{name}", data)


def with_pickle(path, data):
    """A torch zip with this pickle."""
    torch.save({}, path)
    rewrite(path, lambda records: records.update({"data.pkl": data}))
    return path


@pytest.fixture
def path(tmp_path):
    return tmp_path / "x.pt"


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
@pytest.mark.parametrize("save", ["torch", "ds_nvcomp"])
def test_rows_are_the_tensors(path, save, protocol):
    flat = torch.randn(30_000)
    tagged = torch.zeros(40_000, dtype=torch.bfloat16)
    tagged.ds_id = 1
    obj = {"a": {"flat": flat, 3: [flat[100:400].view(20, 15), flat[::2]]}, "tagged": tagged, "small": torch.arange(3),
           "param": torch.nn.Parameter(torch.randn(50, 100).t()), "fp8": torch.randn(9_000).to(torch.float8_e5m2),
           "bool": torch.ones(5, dtype=torch.bool), "sparse": torch.eye(4).to_sparse(), "scalar": torch.tensor(1.5),
           "meta": torch.empty(7, device="meta"), "other": {"x": 1, "y": (1.5, None, {"z"}, b"bytes", 1 << 70)}}
    if save == "torch":
        torch.save(obj, path, pickle_protocol=protocol)
    else:
        ds_nvcomp.save(obj, path, pickle_protocol=protocol)
    found = scan(path)
    rows = {row.name: row for row in found.rows}
    assert list(rows) == ["a.flat", "a.3.0", "a.3.1", "tagged", "small", "param", "fp8", "bool", "sparse.1.0",
                          "sparse.1.1", "scalar"]
    for name, tensor in {"a.flat": flat, "a.3.0": obj["a"][3][0], "a.3.1": obj["a"][3][1], "tagged": tagged,
                         "small": obj["small"],
                         "param": obj["param"], "fp8": obj["fp8"], "bool": obj["bool"], "scalar": obj["scalar"]}.items():
        row = rows[name]
        assert (row.dtype, row.shape, row.stride) == (str(tensor.dtype)[6:], tuple(tensor.shape), tensor.stride())
        assert row.storage.location == "cpu"
    assert rows["a.3.0"].shares == rows["a.3.1"].shares == "a.flat"
    assert rows["a.3.0"].raw_bytes == rows["a.3.0"].stored_bytes == 0
    assert rows["a.flat"].raw_bytes == 120_000 and rows["a.3.0"].offset == 100
    assert found.bytes == path.stat().st_size
    assert found.compressed == (save == "ds_nvcomp")
    assert found.value("other", "x") == 1 and found.value("other", "no") is None and found.value("other", "x", "y") is None
    if save == "ds_nvcomp":
        encoding = rows["a.flat"].storage.encoding
        assert (encoding.codec.name, encoding.header.transform.name, encoding.header.chunks) == ("deflate", "split32", 1)
        assert encoding.by == f"ds_nvcomp {ds_nvcomp.__version__}"
        assert encoding.pieces == dict(coded=1, raw=2, zero=0, unsigned=0)
        assert rows["tagged"].storage.encoding.pieces == dict(coded=0, raw=0, zero=2, unsigned=0)
        assert not rows["small"].storage.compressed


def test_a_storage_by_itself_is_a_row(path):
    torch.save({"s": torch.randn(12).untyped_storage()}, path)
    row, = scan(path).rows
    assert (row.name, row.shape, row.stride, row.raw_bytes) == ("s", (48,), None, 48)


class Hostile:
    def __init__(self, marker):
        self.marker = marker

    def __reduce__(self):
        return os.system, (f"touch {self.marker}",)


@pytest.mark.parametrize("protocol", [0, 1, 2, 3, 4, 5])
def test_a_hostile_pickle_does_not_run(path, tmp_path, protocol):
    marker = tmp_path / "executed"
    with_pickle(path, pickle.dumps({"a": Hostile(marker)}, protocol))
    assert any(name.endswith(".system") for name in scan(path).globals)
    assert not marker.exists()
    torch.load(path, weights_only=False)
    assert marker.exists()  # it was a live one


def test_globals_are_not_imported(path, tmp_path, monkeypatch):
    (tmp_path / "surprise.py").write_text("raise SystemExit('imported')")
    monkeypatch.syspath_prepend(tmp_path)
    with_pickle(path, b"\x80\x02csurprise\nx\n)R.")
    assert scan(path).globals == ["surprise.x"]


PROTO = b"\x80\x02"
HOSTILE = {
    "memo index of 2^32": PROTO + b"K\x01r" + struct.pack("<I", 0xFFFFFFF0) + b".",
    "deep lists": PROTO + b"]" * 150_000 + b"a" * 149_999 + b".",
    "deep tuples": PROTO + b")" + b"\x85" * 150_000 + b".",
    "a deep tuple as a key": PROTO + b"})" + b"\x85" * 150_000 + b"K\x01s.",
    "doubling tuples": PROTO + b")" + b"2\x86" * 20_000 + b".",
    "doubling keys": PROTO + b"}(" + b")" + b"2\x86" * 200 + b"K\x01u.",
    "deep dicts with a tensor name": PROTO + b"}X\x01\x00\x00\x00a" * 50_000 + b"N" + b"s" * 50_000 + b".",
    "a list in itself": PROTO + b"]q\x00h\x00a.",
}


@pytest.mark.parametrize("name", HOSTILE)
def test_costly_pickles_cost_little(path, name):
    with_pickle(path, HOSTILE[name])
    before, began = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.perf_counter()
    try:
        scan(path)
    except ArchiveError:
        pass
    assert time.perf_counter() - began < 10
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 500 << 10


MALFORMED = {
    "empty": b"", "no stop": PROTO + b"}", "cut": PROTO + b"X\xff\x00\x00\x00abc", "pop of nothing": PROTO + b"0.",
    "stop on nothing": PROTO + b".", "mark as a value": PROTO + b"(.", "no mark": PROTO + b"t.",
    "unknown opcode": PROTO + b"\xff.",
    "unset memo": PROTO + b"h\x07.", "huge bytes": b"\x80\x04\x8e" + struct.pack("<Q", 1 << 62) + b"x.",
    "items of an int": PROTO + b"K\x01K\x02a.", "state of an int": PROTO + b"K\x01}b.", "odd pairs": PROTO + b"}(K\x01u.",
    "global named by ints": b"\x80\x04K\x01K\x02\x93.", "buffer": b"\x80\x05\x97.",
    "long text": PROTO + b"L" + b"9" * 5000 + b"L\n.",
}


@pytest.mark.parametrize("name", MALFORMED)
def test_malformed_pickles(path, name):
    with_pickle(path, MALFORMED[name])
    with pytest.raises(ArchiveError) as caught:
        scan(path)
    assert caught.value.path == str(path)


def rebuild(storage, *args):
    """Opcodes for `_rebuild_tensor_v2(storage, *args, False, OrderedDict())`, the arguments given as a tuple to pickle."""
    rest = b"".join(pickle.dumps(arg, 2)[2:-1] for arg in args)
    return PROTO + b"ctorch._utils\n_rebuild_tensor_v2\n(" + storage + rest + b"\x89ccollections\nOrderedDict\n)RtR."


def storage(key=b"0", kind=b"FloatStorage", numel=4):
    return b"(X\x07\x00\x00\x00storagectorch\n" + kind + b"\nX" + struct.pack("<I", len(key)) + key + \
        b"X\x03\x00\x00\x00cpuJ" + \
        struct.pack("<i", numel) + b"tQ"


TENSORS = {
    "fine": (storage(), (0, (2, 2), (2, 1)), None),
    "longer than its record": (storage(numel=400), (0, (2, 2), (2, 1)), TruncatedError),
    "beyond its storage": (storage(), (1, (2, 2), (2, 1)), TruncatedError),
    "huge stride": (storage(), (0, (2, 2), (1 << 62, 1)), TruncatedError),
    "negative stride": (storage(), (3, (2,), (-1,)), ArchiveError),
    "negative offset": (storage(), (-1, (2,), (1,)), ArchiveError),
    "shape and stride differ": (storage(), (0, (2, 2), (1,)), ArchiveError),
    "shape of strings": (storage(), (0, ("2",), (1,)), ArchiveError),
    "no such record": (storage(key=b"../7"), (0, (2, 2), (2, 1)), ArchiveError),
    "unknown class": (storage(kind=b"SecretStorage"), (0, (2, 2), (2, 1)), UnsupportedVersionError),
    "negative numel": (storage(numel=-4), (0, (2, 2), (2, 1)), ArchiveError),
    "no storage": (b"K\x05", (0, (2, 2), (2, 1)), ArchiveError),
    "not a storage's id": (b"K\x05Q", (0, (2, 2), (2, 1)), ArchiveError),
}


@pytest.mark.parametrize("name", TENSORS)
def test_tensors_that_lie(path, name):
    stored, args, error = TENSORS[name]
    torch.save({"x": torch.ones(4)}, path)
    opcodes = rebuild(stored, *args)
    rewrite(path, lambda records: records.update({"data.pkl": opcodes}))
    if error is None:
        assert scan(path).rows[0].shape == (2, 2)
    else:
        with pytest.raises(error) as caught:
            scan(path)
        assert type(caught.value) is error and caught.value.path == str(path)


def edit_payload(at, value):
    def edit(records):
        payload = bytearray(records["data/0"])
        payload[at:at + len(value)] = value
        records["data/0"] = bytes(payload)
    return edit


def replace_in_pickle(old, new):
    def edit(records):
        assert old in records["data.pkl"]
        records["data.pkl"] = records["data.pkl"].replace(old, new)
    return edit


PAYLOADS = {
    "magic": (edit_payload(0, b"X"), HeaderError),
    "version": (edit_payload(8, b"\x09"), UnsupportedVersionError),
    "header": (edit_payload(32, b"\x77"), HeaderError),
    "table": (edit_payload(65, b"\x77"), TableError),
    "cut off": (lambda records: records.update({"data/0": records["data/0"][:-32]}), TruncatedError),
    "nothing left": (lambda records: records.update({"data/0": b""}), TruncatedError),
    "gone": (lambda records: records.pop("data/0"), ArchiveError),
    "described as another dtype": (replace_in_pickle(b"float32", b"float64"), HeaderError),
    "described as an unknown dtype": (replace_in_pickle(b"float32", b"float77"), UnsupportedVersionError),
    "described as an attribute of torch": (replace_in_pickle(b"float32", b"_dynamo"), UnsupportedVersionError),
    "described as more bytes": (replace_in_pickle(b"M@\x9c", b"M@\x9d"), HeaderError),
}


@pytest.mark.parametrize("name", PAYLOADS)
def test_payloads_that_are_damaged(path, name):
    edit, error = PAYLOADS[name]
    ds_nvcomp.save({"w": torch.randn(10_000)}, path)
    rewrite(path, edit)
    with pytest.raises(error) as caught:
        scan(path)
    assert type(caught.value) is error and caught.value.path == str(path) and caught.value.tensor == "w"


def test_zips_that_are_damaged(path):
    ds_nvcomp.save({"w": torch.randn(10_000)}, path)
    whole = path.read_bytes()
    for size in (0, 3, 100, 5_000, len(whole) - 30, len(whole) - 1):
        path.write_bytes(whole[:size])
        with pytest.raises((ArchiveError, TruncatedError)) as caught:
            scan(path)
        assert caught.value.path == str(path)
    path.write_bytes(b"something else altogether")
    with pytest.raises(ArchiveError, match="not a torch zip"):
        scan(path)


def test_a_name_twice_is_refused(path):
    """torch's reader would take one, a scanner the other."""
    torch.save({"w": torch.randn(10)}, path)
    with zipfile.ZipFile(path) as zipped:
        root, data = zipped.namelist()[0].partition("/")[0], zipped.read(zipped.namelist()[0])
    for name in ("data.pkl", "DATA.PKL"):
        file = io.BytesIO(path.read_bytes())
        with pytest.warns(UserWarning) if name == "data.pkl" else _nothing(), zipfile.ZipFile(file, "a") as zipped:
            zipped.writestr(f"{root}/{name}", data)
        other = path.with_name("twice.pt")
        other.write_bytes(file.getvalue())
        with pytest.raises(ArchiveError, match="two entries"):
            scan(other)


def _nothing():
    import contextlib
    return contextlib.nullcontext()


@pytest.mark.parametrize("method", [zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2])
def test_files_that_were_zipped_again(path, method):
    torch.save({"w": torch.zeros(10_000)}, path)
    with zipfile.ZipFile(path) as zipped:
        records = {name: zipped.read(name) for name in zipped.namelist()}
    with zipfile.ZipFile(path, "w", method) as zipped:
        for name, data in records.items():
            zipped.writestr(name, data)
    if method == zipfile.ZIP_DEFLATED:  # torch.load reads these
        assert scan(path).rows[0].raw_bytes == 40_000
        torch.load(path)
    else:
        with pytest.raises(ArchiveError, match="does not read"):
            scan(path)


def test_random_damage_raises_only_our_errors(path):
    ds_nvcomp.save({"w": torch.randn(3_000), "v": [torch.arange(5), torch.zeros(5_000)]}, path)
    whole = path.read_bytes()
    generator = torch.Generator().manual_seed(0)
    for at, bit in zip(torch.randint(len(whole), (400,), generator=generator).tolist(),
                       torch.randint(8, (400,), generator=generator).tolist()):
        damaged = bytearray(whole)
        damaged[at] ^= 1 << bit
        path.write_bytes(damaged)
        try:
            scan(path)
        except DsNvcompError as err:
            assert isinstance(err, FormatError) and err.path == str(path)


def test_random_pickles_raise_only_our_errors():
    good = pickle.dumps({"a": [1, 2.5, "x", b"y", (None, True)], "b": Hostile("x"), "c": {1, 2}}, 2)
    generator = torch.Generator().manual_seed(0)
    for _ in range(3_000):
        data = bytearray(good)
        for at in torch.randint(len(data), (3,), generator=generator).tolist():
            data[at] = int(torch.randint(256, (1,), generator=generator))
        try:
            symbolic.read(bytes(data))
        except ArchiveError:
            pass
