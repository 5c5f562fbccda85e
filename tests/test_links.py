"""Files of which one has fp32 weights as their difference from 16-bit weights in the other: every reader, and all that can be wrong."""
import gc
import io
import itertools
import json
import os
import pickle
import re
import shutil
import zipfile
import zlib
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from typer.testing import CliRunner

import ds_nvcomp
from ds_nvcomp.archive.link import Link
from ds_nvcomp.archive.scan import NAME_CHARS, scan
from ds_nvcomp.archive.writer import snapshot, snapshot_later, write
from ds_nvcomp.checkpoint.convert import pack, unpack
from ds_nvcomp.checkpoint.verify import Tally, verify_file, verify_tree
from ds_nvcomp.cli import app
from ds_nvcomp.config import Config
from ds_nvcomp.deepspeed_links import links_of
from ds_nvcomp.errors import FormatError, HeaderError, LinkError, UnsupportedVersionError
from ds_nvcomp.pipeline import Weights

# What torch.load and its unpickler raise for damaged files, besides ours.
KNOWN = (FormatError, pickle.UnpicklingError, RuntimeError, zipfile.BadZipFile, ValueError, LookupError, EOFError, OSError, TypeError,
         AttributeError, AssertionError, ImportError, MemoryError)
MODEL, OPTIMIZER = "mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_optim_states.pt"
CONFIG = Config(min_bytes=512, fsync=False, device="cpu")
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}
N, PADDING = 150_000, 10


def raw(tensor):
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def same(a, b):
    return a.shape == b.shape and a.dtype == b.dtype and torch.equal(raw(a.cpu()), raw(b.cpu()))


def make(kind="bfloat16", padding=PADDING, seed=0):
    """(model, optimizer, links) of a ZeRO-2 rank: a flat buffer of weights, and the master of all of it with some padding."""
    generator = torch.Generator().manual_seed(seed)
    master = torch.randn(N + padding, generator=generator) * 0.02
    master[N:] = 0
    flat = master[:N].to(DTYPES[kind])
    a, b = flat[:100_000].view(400, 250), flat[100_000:]
    model = {"module": {"a.weight": torch.nn.Parameter(a), "tied": a, "b": b}, "step": 3}
    moment = torch.randn(N + padding, generator=generator)
    optimizer = {"optimizer_state_dict": {"single_partition_of_fp32_groups": [master], "moment": moment}}
    link = Link(Weights(raw(flat), kind), MODEL, [("module.a.weight", 0, 100_000), ("module.b", 0, 50_000)])
    return model, optimizer, {master.data_ptr(): link}


def master_of(state):
    return state["optimizer_state_dict"]["single_partition_of_fp32_groups"][0]


NAME = "optimizer_state_dict.single_partition_of_fp32_groups.0"


def save(folder, config=CONFIG, **options):
    folder.mkdir(parents=True, exist_ok=True)
    model, optimizer, links = make(**options)
    write(model, folder / MODEL, config, root="mp_rank_00_model_states")
    write(optimizer, folder / OPTIMIZER, config, root=Path(OPTIMIZER).stem, links=links)
    assert linked(folder / OPTIMIZER)
    return master_of(optimizer).clone()


def linked(path):
    return [row.name for row in scan(path).rows if row.storage.encoding is not None and row.storage.encoding.linked is not None]


@pytest.fixture
def pair(tmp_path):
    """(folder, the master weights that are linked)."""
    return tmp_path / "pair", save(tmp_path / "pair")


READERS = {
    "torch.load": lambda path: master_of(torch.load(path, weights_only=False)),
    "weights only": lambda path: master_of(torch.load(path, weights_only=True)),
    "mmap": lambda path: master_of(torch.load(path, weights_only=False, mmap=True)),
    "weights only, mmap": lambda path: master_of(torch.load(path, weights_only=True, mmap=True)),
    "load": lambda path: master_of(ds_nvcomp.load(path)),
    "load, pickle": lambda path: master_of(ds_nvcomp.load(path, weights_only=False)),
    "load, mmap": lambda path: master_of(ds_nvcomp.load(path, mmap=True)),
    "select": lambda path: ds_nvcomp.load(path, select="*.single_partition_of_fp32_groups.*")[NAME],
}
readers = pytest.mark.parametrize("reader", READERS.values(), ids=READERS)


# --- what loads -------------------------------------------------------------------------------------------------------

@readers
@pytest.mark.parametrize("kind", DTYPES)
@pytest.mark.parametrize("codec", ["deflate", "none"])
def test_every_reader_follows_the_link(tmp_path, reader, kind, codec):
    master = save(tmp_path, Config(min_bytes=512, fsync=False, device="cpu", codec=codec), kind=kind)
    assert linked(tmp_path / OPTIMIZER) == [NAME] and same(reader(tmp_path / OPTIMIZER), master)


@pytest.mark.parametrize("padding", [0, 1, 2000])
def test_what_is_behind_the_last_fragment(tmp_path, padding):
    master = save(tmp_path, padding=padding)
    assert same(READERS["torch.load"](tmp_path / OPTIMIZER), master) and not master[N:].any()


@readers
def test_nans_infinities_and_what_was_not_rounded(tmp_path, reader):
    model, optimizer, links = make()
    master, bits = master_of(optimizer), torch.randint(-2 ** 31, 2 ** 31, (200,), generator=torch.Generator().manual_seed(1))
    master[:5] = torch.tensor([float("nan"), float("inf"), -float("inf"), -0.0, 1e-45])
    master.view(torch.int32)[1000:1200] = bits.int()
    write(model, tmp_path / MODEL, CONFIG, root="m")
    write(optimizer, tmp_path / OPTIMIZER, CONFIG, root="o", links=links)
    assert linked(tmp_path / OPTIMIZER) and same(reader(tmp_path / OPTIMIZER), master)


def test_what_was_not_rounded_is_stored_in_full(tmp_path):
    model, optimizer, links = make()
    master = master_of(optimizer)
    master.normal_()
    write(optimizer, tmp_path / OPTIMIZER, CONFIG, root="o", links=links)
    encoding = scan(tmp_path / OPTIMIZER).rows[0].storage.encoding
    assert encoding.linked is None and encoding.meta["version"] == 1 and "link" not in encoding.meta
    assert same(master_of(torch.load(tmp_path / OPTIMIZER)), master)  # and no other file is there


def test_other_dtypes_and_held_spans_are_not_linked(tmp_path):
    for change in (lambda master: master.to(torch.float64), lambda master: master.view(torch.int32)):
        _, optimizer, links = make()
        [link], odd = links.values(), change(master_of(optimizer))
        write({"w": odd}, tmp_path / "x.pt", CONFIG, root="x", links={odd.data_ptr(): link})
        assert not linked(tmp_path / "x.pt") and same(torch.load(tmp_path / "x.pt")["w"], odd)


def test_tied_weights_are_one_fragment(pair):
    folder, _ = pair
    found = torch.load(folder / MODEL, weights_only=False)["module"]
    assert found["tied"].data_ptr() == found["a.weight"].data_ptr()
    text = scan(folder / OPTIMIZER).rows[0].storage.encoding.link
    assert json.loads(text)["fragments"] == [["module.a.weight", 0, 100_000], ["module.b", 0, 50_000]]


@pytest.mark.parametrize("where", ["cpu", "meta", torch.device("cpu"), {"cpu": "cpu"}, lambda storage, location: storage,
                                   lambda storage, location: None], ids=["cpu", "meta", "device", "dict", "function", "function of none"])
def test_map_locations(pair, where):
    folder, master = pair
    for load in (torch.load, ds_nvcomp.load):
        found = master_of(load(folder / OPTIMIZER, map_location=where, weights_only=False))
        assert found.shape == master.shape and (found.device.type == "meta" if where == "meta" else same(found, master))


def test_meta_needs_no_other_file(pair):
    folder, master = pair
    (folder / MODEL).unlink()
    assert master_of(torch.load(folder / OPTIMIZER, map_location="meta")).shape == master.shape


# --- where the file is ------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("load", [torch.load, ds_nvcomp.load])
def test_file_objects(pair, load, tmp_path):
    folder, master = pair
    data = (folder / OPTIMIZER).read_bytes()
    with pytest.raises(LinkError, match="does not say where") as caught:
        load(io.BytesIO(data), weights_only=False)
    assert caught.value.tensor == NAME and MODEL in str(caught.value) and "unpack" in str(caught.value)
    for path in (folder / OPTIMIZER, str(folder / OPTIMIZER), os.fsencode(folder / OPTIMIZER)):
        with open(path, "rb") as file:
            assert same(master_of(load(file, weights_only=False)), master)
    named = io.BytesIO(data)
    named.name = str(folder / OPTIMIZER)
    assert same(master_of(load(named, weights_only=False)), master)
    with open(os.open(folder / OPTIMIZER, os.O_RDONLY), "rb") as file, pytest.raises(LinkError, match="does not say where"):
        load(file, weights_only=False)
    elsewhere = io.BytesIO(data)
    elsewhere.name = str(tmp_path / "nothing" / OPTIMIZER)
    with pytest.raises(LinkError, match="No such file"):
        load(elsewhere, weights_only=False)


@readers
def test_relative_paths(pair, reader, monkeypatch):
    folder, master = pair
    monkeypatch.chdir(folder)
    assert same(reader(OPTIMIZER), master) and same(reader(f"./{OPTIMIZER}"), master)
    assert verify_file(OPTIMIZER) == verify_file(OPTIMIZER, decode=True) == []
    monkeypatch.chdir(folder.parent)
    assert same(reader(f"pair/../pair/{OPTIMIZER}"), master)


@readers
def test_symbolic_links(pair, reader, tmp_path):
    """The other file is looked for beside the path as it is given, and then beside what that leads to."""
    folder, master = pair
    alone, both, store = tmp_path / "alone", tmp_path / "both", tmp_path / "store"
    for made in (alone, both, store):
        made.mkdir()
    (alone / "any name.pt").symlink_to(folder / OPTIMIZER)
    (tmp_path / "directory").symlink_to(folder)
    for number, name in enumerate((MODEL, OPTIMIZER)):  # as a cache of blobs has them
        shutil.copy(folder / name, store / f"blob{number}")
        (both / name).symlink_to(store / f"blob{number}")
    for path in (alone / "any name.pt", tmp_path / "directory" / OPTIMIZER, both / OPTIMIZER):
        assert same(reader(path), master) and verify_file(path, decode=True) == []
    save(tmp_path / "other", seed=1)
    shutil.copy(tmp_path / "other" / MODEL, alone / MODEL)  # what is beside it comes first, right or not
    with pytest.raises((FormatError, pickle.UnpicklingError), match="checksum"):
        reader(alone / "any name.pt")
    (alone / MODEL).unlink()
    (alone / MODEL).symlink_to("nowhere")
    with pytest.raises((FormatError, pickle.UnpicklingError), match="No such file"):
        reader(alone / "any name.pt")


# --- what is wrong ----------------------------------------------------------------------------------------------------

def forge(source, target, change):
    """A copy of the file in which the description of the linked storage is what `change` makes of it, and the seal is right."""
    with zipfile.ZipFile(source) as zipped:
        entries = [(info.filename, zipped.read(info)) for info in zipped.infolist()]
    root = entries[0][0].partition("/")[0]
    for i, (name, data) in enumerate(entries):
        if name == f"{root}/data.pkl":
            entries[i] = name, change(data)
    text, records = None, dict(entries)
    seal = json.loads(records[f"{root}/ds_nvcomp/seal"].rpartition(b"\n")[0])
    seal["records"]["data.pkl"] = [len(records[f"{root}/data.pkl"]), zlib.crc32(records[f"{root}/data.pkl"])]
    text = json.dumps(seal, separators=(",", ":")).encode()
    records[f"{root}/ds_nvcomp/seal"] = text + b"\n%08x" % zlib.crc32(text)
    with zipfile.ZipFile(target, "w", zipfile.ZIP_STORED) as zipped:
        for name, data in records.items():
            zipped.writestr(name, data)


def string(text):
    data = text.encode("utf-8", "surrogatepass")
    return b"X" + len(data).to_bytes(4, "little") + data


def with_link(folder, value):
    """The link replaced by a str, or by the opcodes of something else."""
    old = scan(folder / OPTIMIZER).rows[0].storage.encoding.link
    new = value if isinstance(value, bytes) else string(value)
    forge(folder / OPTIMIZER, folder / "forged.pt", lambda data: (data.replace(string(old), new)
                                                                  if data.count(string(old)) == 1 else pytest.fail("no link in it")))
    return folder / "forged.pt"


def refuse(path, errors, verify=True, decode=True):
    """Every reader raises one of `errors`, which name the tensor; `verify` reports it, too."""
    for name, reader in READERS.items():
        gc.collect()
        with pytest.raises((*errors, pickle.UnpicklingError)) as caught:
            reader(path)
        err = caught.value
        if not isinstance(err, errors):
            assert any(kind.__name__ in str(err) or kind in {type(err.__cause__), type(err.__context__)} for kind in errors), (name, err)
            err = err.__cause__ or err.__context__
        if isinstance(err, errors):
            assert err.tensor == NAME, (name, err)
            assert "load" not in name.split(",")[0] or "torch" in name or err.path == str(path), (name, err)
    for deep, wanted in ((False, verify), (True, decode)):
        found = verify_file(path, decode=deep)
        assert bool(found) == wanted, found
        assert all(problem.tensor == NAME and problem.path == str(path) for problem in found), found
        assert {problem.kind for problem in found} <= {kind.__name__ for kind in errors}, found


GOOD = {"file": MODEL, "kind": "bfloat16", "fragments": [["module.a.weight", 0, 100_000], ["module.b", 0, 50_000]]}
FRAGMENTS = GOOD["fragments"]
NOT_WRITTEN = {
    "file outside": dict(file="../pair/" + MODEL), "file below": dict(file="x/" + MODEL), "file absolute": dict(file="/etc/passwd"),
    "file backslash": dict(file="..\\" + MODEL), "file empty": dict(file=""), "file dot": dict(file="."), "file dots": dict(file=".."),
    "file NUL": dict(file=MODEL + "\0"), "file control": dict(file="a\nb"),
    "file surrogate": dict(file="\ud800"), "file long": dict(file="x" * 256),
    "file long in bytes": dict(file="\u00fc" * 128), "file int": dict(file=3),
    "file None": dict(file=None), "file list": dict(file=[MODEL]),
    "kind": dict(kind="float32"), "kind list": dict(kind=["bfloat16"]), "kind None": dict(kind=None),
    "crc negative": dict(crc=-1), "crc wide": dict(crc=1 << 32), "crc float": dict(crc=1.0), "crc str": dict(crc="1"),
    "crc bool": dict(crc=True),
    "crc None": dict(crc=None), "no fragments": dict(fragments=[]), "fragments None": dict(fragments=None),
    "fragments str": dict(fragments="abc"),
    "fragments dict": dict(fragments={"abc": 1}), "fragment short": dict(fragments=[["module.b", 0]]),
    "fragment long": dict(fragments=[["module.b", 0, 1, 1]]), "name int": dict(fragments=[[1, 0, 1]]), 
    "name None": dict(fragments=[[None, 0, 1]]),
    "first negative": dict(fragments=[["module.b", -1, 1]]), "first huge": dict(fragments=[["module.b", 1 << 62, 1]]),
    "first float": dict(fragments=[["module.b", 0.0, 1]]), "first bool": dict(fragments=[["module.b", False, 1]]),
    "count 0": dict(fragments=[["module.b", 0, 0]]), "count negative": dict(fragments=[["module.b", 0, -5]]),
    "count huge": dict(fragments=[["module.b", 0, 1 << 61]]), "count overlong": dict(fragments=[["module.b", 0, int("9" * 4000)]]),
    "count of more": dict(fragments=[*FRAGMENTS, ["module.a.weight", 0, PADDING + 1]]), 
    "count bool": dict(fragments=[["module.b", 0, True]]),
    "count str": dict(fragments=[["module.b", 0, "1"]]), "no file": dict(file=...), "no kind": dict(kind=...), "no crc": dict(crc=...),
    "fragments missing": dict(fragments=...),
}
NOT_JSON = {"nothing": "", "text": "hello", "list": "[]", "number": "3", "null": "null", "open": '{"file":', "deep": "[" * 100_000,
            "deep objects": '{"a":' * 100_000, "deep fragments": '{"file":"x","kind":"bfloat16","crc":1,"fragments":' + "[" * 50_000,
            "digits": '{"file":"x","kind":"bfloat16","crc":' + "9" * 100_000 + ',"fragments":[["a",0,1]]}', "NaN": "NaN",
            "surrogate": '"\ud800"'}


@pytest.mark.parametrize("change", NOT_WRITTEN.values(), ids=NOT_WRITTEN)
def test_a_field_that_is_not_what_is_written(pair, change):
    folder, _ = pair
    old = json.loads(scan(folder / OPTIMIZER).rows[0].storage.encoding.link)
    refuse(with_link(folder, json.dumps({key: value for key, value in {**old, **change}.items() if value is not ...})), (LinkError,))


@pytest.mark.parametrize("text", NOT_JSON.values(), ids=NOT_JSON)
def test_what_is_no_json(pair, text):
    refuse(with_link(pair[0], text), (LinkError,))


def test_unknown_keys_are_ignored(pair):
    folder, master = pair
    old = json.loads(scan(folder / OPTIMIZER).rows[0].storage.encoding.link)
    path = with_link(folder, json.dumps({**old, "more": [1]}))
    assert all(same(reader(path), master) for reader in READERS.values()) and verify_file(path, decode=True) == []


OPCODES = {"int": b"K\1", "None": b"N", "list": b"]", "dict": b"}"}


@pytest.mark.parametrize("value", OPCODES.values(), ids=OPCODES)
def test_a_link_that_is_no_string(pair, value):
    refuse(with_link(pair[0], value), (HeaderError,))


def field(key, value):
    """Opcodes of a key, its place in the memo whatever it is, and its value."""
    pattern = re.compile(re.escape(string(key)) + rb"(q.|r....)" + re.escape(value), re.S)
    return lambda data, new: pattern.sub(lambda found: string(key) + found[1] + new, data, count=1)


def test_versions(pair):
    """A link needs version 2, and version 2 needs a link; version 3 is not known."""
    folder, _ = pair
    data = {}
    change = field("version", b"K\2")

    def to(version):
        def made(pickled):
            data["changed"] = change(pickled, b"K" + bytes([version]))
            assert data["changed"] != pickled
            return data["changed"]
        return made

    forge(folder / OPTIMIZER, folder / "forged.pt", to(1))
    refuse(folder / "forged.pt", (HeaderError,))
    forge(folder / OPTIMIZER, folder / "forged.pt", to(3))
    refuse(folder / "forged.pt", (UnsupportedVersionError,))
    forge(folder / OPTIMIZER, folder / "forged.pt", lambda pickled: pickled.replace(string("link"), string("lint")))
    refuse(folder / "forged.pt", (HeaderError,))


def test_a_link_of_version_1_that_is_no_string_is_no_other_key(pair):
    """Version 1 lets readers ignore other keys; not this one, whose numbers would come out as they are stored."""
    folder, _ = pair
    old, change = scan(folder / OPTIMIZER).rows[0].storage.encoding.link, field("version", b"K\2")
    forge(folder / OPTIMIZER, folder / "forged.pt", lambda pickled: change(pickled, b"K\1").replace(string(old), b"N"))
    refuse(folder / "forged.pt", (HeaderError,))


def test_other_dtypes_have_no_link(pair):
    folder, _ = pair
    change = field("dtype", string("float32"))
    forge(folder / OPTIMIZER, folder / "forged.pt", lambda pickled: change(pickled, string("complex64")))
    refuse(folder / "forged.pt", (HeaderError,))


# --- another file -----------------------------------------------------------------------------------------------------

def changed(folder, **change):
    old = json.loads(scan(folder / OPTIMIZER).rows[0].storage.encoding.link)
    return with_link(folder, json.dumps({**old, **change}))


NOT_THERE = {
    "name": [["module.c", 0, 10]], "name empty": [["", 0, 10]], "name surrogate": [["\ud800", 0, 10]],
    "over the end": [["module.b", 49_990, 11]], "behind the end": [["module.b", 1 << 61, 1]], "a number": [["step", 0, 1]],
    "not the kind": [["fp32", 0, 10]], "not contiguous": [["columns", 0, 10]], "empty": [["empty", 0, 1]]}


@pytest.mark.parametrize("fragments", NOT_THERE.values(), ids=NOT_THERE)
def test_fragments_that_are_not_there(pair, fragments):
    folder, _ = pair
    model, _, _ = make()
    model.update(fp32=torch.randn(3000), columns=model["module"]["a.weight"].data.T, empty=torch.empty(0, dtype=torch.bfloat16))
    write(model, folder / MODEL, CONFIG, root="m")
    refuse(changed(folder, fragments=fragments), (LinkError,))


def test_wrong_checksums_and_orders(pair):
    """Only decoding tells."""
    folder, _ = pair
    crc = json.loads(scan(folder / OPTIMIZER).rows[0].storage.encoding.link)["crc"]
    for change in (dict(crc=crc ^ 1), dict(crc=0), dict(fragments=FRAGMENTS[::-1]), dict(fragments=FRAGMENTS[:1]),
                   dict(fragments=[["module.a.weight", 1, 99_999], ["module.b", 0, 50_000]])):
        refuse(changed(folder, **change), (LinkError,), verify=False)


def test_the_file_is_missing_or_another(pair, tmp_path):
    folder, _ = pair
    (folder / MODEL).rename(folder / "kept")
    refuse(folder / OPTIMIZER, (LinkError,))
    (folder / MODEL).mkdir()
    refuse(folder / OPTIMIZER, (LinkError,))
    (folder / MODEL).rmdir()
    os.mkfifo(folder / MODEL)  # nobody writes there: opening it would wait for ever
    refuse(folder / OPTIMIZER, (LinkError,))
    (folder / MODEL).unlink()
    for content in (b"", b"PK\3\4", os.urandom(3000), (folder / "kept").read_bytes()[:-100]):
        (folder / MODEL).write_bytes(content)
        refuse(folder / OPTIMIZER, (LinkError,))
    torch.save(torch.ones(3), folder / MODEL)
    refuse(folder / OPTIMIZER, (LinkError,))
    save(tmp_path / "other", seed=1)
    shutil.copy(tmp_path / "other" / MODEL, folder / MODEL)
    refuse(folder / OPTIMIZER, (LinkError,), verify=False)


def test_a_loop(pair):
    """A file that is linked to itself, and to tensors that are linked."""
    folder, _ = pair
    refuse(changed(folder, file="forged.pt", fragments=[[NAME, 0, 10]]), (LinkError,))
    refuse(changed(folder, file=OPTIMIZER, fragments=[[NAME, 0, 10]]), (LinkError,))


def test_weights_that_are_stored_otherwise_do(pair, tmp_path):
    """By torch.save, by another codec, each tensor by itself: what counts are names and bits."""
    folder, master = pair
    model, _, _ = make()
    apart = {"module": {name: tensor.detach().clone() for name, tensor in model["module"].items()}}
    for store in (lambda: torch.save(model, folder / MODEL), lambda: torch.save(apart, folder / MODEL),
                  lambda: write(apart, folder / MODEL, Config(codec="zstd", fsync=False, device="cpu"), root="m")):
        store()
        assert same(READERS["weights only"](folder / OPTIMIZER), master) and verify_file(folder / OPTIMIZER, decode=True) == []


def test_damaged_weights_are_no_weights(pair):
    folder, master = pair
    data = bytearray((folder / MODEL).read_bytes())
    data[len(data) // 2] ^= 4  # in a chunk: the pickle and the directory are at the end
    (folder / MODEL).write_bytes(data)
    refuse(folder / OPTIMIZER, (LinkError,), verify=False)
    kinds = {(Path(problem.path).name, problem.kind) for problem in verify_tree(folder, decode=True)}
    assert kinds == {(MODEL, "ChecksumError"), (OPTIMIZER, "LinkError")}


# --- hostile pairs ----------------------------------------------------------------------------------------------------

def test_no_more_is_allocated_than_what_is_linked(pair, monkeypatch):
    """Zeros decode to any size: only the chunks that fragments touch are decoded."""
    folder, master = pair
    zeros = torch.zeros(1 << 27, dtype=torch.bfloat16)  # 256 MiB in some kilobytes
    write({"module": {"z": zeros}}, folder / MODEL, CONFIG, root="m")
    crc = zlib.crc32(bytes(20))
    path = changed(folder, crc=crc, fragments=[["module.z", 0, 5], ["module.z", (1 << 27) - 5, 5]])
    decoded = []
    monkeypatch.setattr("ds_nvcomp.archive.part.decode_payload",
                        lambda data, parsed, **options: (decoded.append(parsed[0].raw_bytes), original(data, parsed, **options))[1])
    from ds_nvcomp.pipeline import decode_payload as original
    READERS["select"](path)
    assert decoded and max(decoded) <= 2 << 20, decoded


def test_very_many_places_are_refused(pair):
    folder, _ = pair
    zeros = torch.zeros(1 << 22, dtype=torch.bfloat16)
    write({"module": {"z": zeros}}, folder / MODEL, CONFIG, root="m")
    refuse(changed(folder, fragments=[["module.z", 2 * i, 1] for i in range(5000)]), (LinkError,), verify=False)


def test_overlapping_fragments_are_read_once(pair):
    folder, _ = pair
    zeros = torch.zeros(1 << 20, dtype=torch.bfloat16)
    write({"module": {"z": zeros}}, folder / MODEL, CONFIG, root="m")
    path = changed(folder, crc=zlib.crc32(bytes(2 * 100_000)), fragments=[["module.z", i, 1] for i in range(50_000)] * 2)
    READERS["select"](path)


def test_weights_only_reaches_the_other_file_by_safe_decoders_only(pair, monkeypatch):
    folder, _ = pair
    seen = []
    from ds_nvcomp.archive import link as module
    original = module.decode_range
    monkeypatch.setattr(module, "decode_range", lambda *args: (seen.append(args[-1]), original(*args))[1])
    for name, reader in READERS.items():
        seen.clear()
        reader(folder / OPTIMIZER)
        assert set(seen) == {name in ("torch.load", "mmap", "load, pickle")}, name


def test_the_other_files_pickle_is_not_run(pair):
    folder, _ = pair
    model, _, _ = make()

    class Runs:
        def __reduce__(self):
            return os.mkdir, (str(folder / "ran"),)
    model["more"] = Runs()
    write(model, folder / MODEL, CONFIG, root="m")
    (folder / "ran").rmdir() if (folder / "ran").exists() else None
    for reader in READERS.values():
        reader(folder / OPTIMIZER)
    assert not (folder / "ran").exists()


def test_items_of_distributed_checkpoints_have_no_links(pair):
    """What reads an item takes its numbers as they are stored."""
    from ds_nvcomp.archive.part import load_part
    folder, _ = pair
    with pytest.raises(FormatError):
        model, optimizer, links = make()
        write(master_of(optimizer), folder / "item", CONFIG, root="archive", links=links)
        size = (folder / "item").stat().st_size
        mapped = torch.UntypedStorage.from_file(str(folder / "item"), False, size)
        load_part(folder / "item", mapped, 0, size, "cpu", (0,), (N + PADDING,))


# --- the moment of the save -------------------------------------------------------------------------------------------

def test_a_snapshot_is_of_its_moment(tmp_path):
    """Masters and weights may change as soon as it is taken; the model file has those of the moment, too."""
    for take in (lambda *args, **options: snapshot(*args, **options), lambda *args, **options: snapshot_later(*args, **options)()):
        big = 600_000
        master = torch.randn(big) * 0.02
        flat = master.bfloat16()
        expected = master.clone()
        links = {master.data_ptr(): Link(Weights(raw(flat), "bfloat16"), "m.pt", [("module.w", 0, big)])}
        model = take({"module": {"w": flat}}, CONFIG, root="m")
        optimizer = take({"fp32": master}, CONFIG, root="o", links=links)
        flat.zero_(), master.zero_()
        model.write(tmp_path / "m.pt"), optimizer.write(tmp_path / "o.pt")
        assert linked(tmp_path / "o.pt") == ["fp32"] and same(torch.load(tmp_path / "o.pt")["fp32"], expected)


@pytest.mark.parametrize("block", [{"async": True}, {"overlap": True}, {}], ids=["async", "overlap", "sync"])
def test_the_engine_links_what_was_there_at_the_save(tmp_path, monkeypatch, block):
    """As DeepSpeed calls it; weights and masters change when the optimizer steps, buffers before."""
    engines = pytest.importorskip("ds_nvcomp.deepspeed_engine")
    from deepspeed.runtime.checkpoint_engine.checkpoint_engine import CheckpointCommitInfo
    monkeypatch.setattr(torch.distributed, "get_rank", lambda group=None: 0)
    master = torch.randn(600_000) * 0.02
    flat, buffer, expected = master.bfloat16(), torch.randn(300_000).bfloat16(), master.clone()
    module = torch.nn.Module()
    module.register_buffer("buffer", buffer)
    weights = {"w": flat.view(600, 1000), "buffer": buffer}
    host = host_of(weights, master, flat, module=module)
    engine = engines.NvcompCheckpointEngine(config=Config.from_dict(block))
    engine.attach(host)
    info = CheckpointCommitInfo(tag="tag", save_dir=str(tmp_path), save_latest=True)
    engine.create(info)
    engine.makedirs(str(tmp_path / "tag"), exist_ok=True)
    engine.save({"module": weights}, str(tmp_path / "tag" / MODEL))
    engine.save({"fp32": master}, str(tmp_path / "tag" / OPTIMIZER))
    engine.commit(info)
    kept = buffer.clone()
    buffer.zero_()
    engine.settle()
    master.zero_(), flat.zero_()
    engine.wait()
    assert linked(tmp_path / "tag" / OPTIMIZER) == ["fp32"] and verify_tree(tmp_path, decode=True) == []
    assert same(engine.load(str(tmp_path / "tag" / OPTIMIZER))["fp32"], expected)
    assert same(engine.load(str(tmp_path / "tag" / MODEL))["module"]["buffer"], kept)


def test_small_masters_of_an_overlap_are_not_linked(tmp_path):
    """They are copied at once, and their weights are not."""
    model, optimizer, links = make()
    later = snapshot_later(optimizer, CONFIG, root="o", links=links)
    expected = master_of(optimizer).clone()
    master_of(optimizer).zero_()
    [link] = links.values()
    link.weights.data.zero_()
    later().write(tmp_path / "o.pt")
    assert not linked(tmp_path / "o.pt") and same(master_of(torch.load(tmp_path / "o.pt")), expected)


# --- tools ------------------------------------------------------------------------------------------------------------

def test_inspect_names_the_file(pair):
    folder, _ = pair
    told = CliRunner().invoke(app, ["inspect", str(folder / OPTIMIZER)], env={"COLUMNS": "400"})
    assert told.exit_code == 0 and f"difference from the bfloat16 weights in {MODEL}" in " ".join(told.output.split())
    told = json.loads(CliRunner().invoke(app, ["inspect", str(folder / OPTIMIZER), "--json"]).output)["tensors"]
    assert [(row["name"], row["linked_to"], row["linked_kind"]) for row in told if "linked_to" in row] == [(NAME, MODEL, "bfloat16")]


def test_unpack_pack_and_compare(pair, tmp_path):
    folder, master = pair
    expected = torch.load(folder / OPTIMIZER, weights_only=False)
    unpack(folder, tmp_path / "plain")
    for name in (MODEL, OPTIMIZER):
        assert not scan(tmp_path / "plain" / name).compressed
    (tmp_path / "plain" / MODEL).rename(tmp_path / "plain" / "away.pt")
    assert same(READERS["torch.load"](tmp_path / "plain" / OPTIMIZER), master)
    pack(folder, tmp_path / "zstd", Config(codec="zstd", fsync=False))
    assert not linked(tmp_path / "zstd" / OPTIMIZER) and same(READERS["load"](tmp_path / "zstd" / OPTIMIZER), master)
    shutil.copytree(folder, tmp_path / "one")
    pack(tmp_path / "one" / MODEL, None, Config(codec="none", fsync=False))  # one file of the two
    assert linked(tmp_path / "one" / OPTIMIZER) and same(READERS["load"](tmp_path / "one" / OPTIMIZER), master)
    unpack(tmp_path / "one" / MODEL)
    assert not scan(tmp_path / "one" / MODEL).compressed and same(READERS["load"](tmp_path / "one" / OPTIMIZER), master)
    unpack(tmp_path / "one" / OPTIMIZER)
    (tmp_path / "one" / MODEL).unlink()
    found = torch.load(tmp_path / "one" / OPTIMIZER, weights_only=False)
    assert same(found["optimizer_state_dict"]["moment"], expected["optimizer_state_dict"]["moment"]) and same(master_of(found), master)
    unpack(folder)  # in place
    assert same(READERS["weights only"](folder / OPTIMIZER), master) and verify_tree(folder, decode=True) == []


def test_unpack_without_the_other_file_leaves_all_as_it_was(pair):
    folder, _ = pair
    (folder / MODEL).unlink()
    before = (folder / OPTIMIZER).read_bytes()
    for run in (unpack, pack):
        with pytest.raises(LinkError, match="belong together"):
            run(folder / OPTIMIZER)
    assert sorted(os.listdir(folder)) == [OPTIMIZER] and (folder / OPTIMIZER).read_bytes() == before


def test_verify_of_the_tree(pair, tmp_path):
    folder, _ = pair
    tally = Tally()
    assert verify_tree(folder) == verify_tree(folder, decode=True, tally=tally) == [] and tally.files == 2
    save(tmp_path / "other", seed=1)
    shutil.copy(tmp_path / "other" / MODEL, folder / MODEL)
    assert verify_tree(folder) == []
    [problem] = verify_tree(folder, decode=True)
    assert problem.kind == "LinkError" and problem.tensor == NAME and "checksum" in problem.message
    told = CliRunner().invoke(app, ["verify", str(folder), "--decode"])
    assert told.exit_code == 1 and "belong together" in told.output
    (folder / MODEL).unlink()
    assert "LinkError" in {problem.kind for problem in verify_tree(folder)}


# --- which are linked -------------------------------------------------------------------------------------------------

class Host(SimpleNamespace):
    """As a DeepSpeedEngine, it can be referred to weakly."""


def host_of(model, master, flat, **more):
    """What links_of asks a DeepSpeedEngine for."""
    optimizer = SimpleNamespace(single_partition_of_fp32_groups=[master], parallel_partitioned_bit16_groups=[[flat]],
                                real_dp_process_group=[None])
    usual = dict(module=torch.nn.Module(), optimizer=optimizer, zero_optimization_stage=lambda: 2, _config=SimpleNamespace(),
                 module_state_dict=lambda: model, _get_ckpt_name=lambda *args: f"/x/{MODEL}")
    return Host(**{**usual, "monitor": None, **more})


def strange():
    raise RuntimeError("Cannot access data pointer of Tensor that doesn't have storage")


def test_which_are_linked(monkeypatch):
    monkeypatch.setattr(torch.distributed, "get_rank", lambda group=None: 0)
    master = torch.randn(10_000)
    flat = master.bfloat16()
    halves = {"a": flat[:5000], "b": flat[5000:]}
    [link] = links_of(host_of(halves, master, flat)).own.values()
    assert link.fragments == [("module.a", 0, 5000), ("module.b", 0, 5000)] and link.file == MODEL
    [link] = links_of(host_of({**halves, "0 tied": flat[5000:]}, master, flat)).own.values()
    assert link.fragments == [("module.a", 0, 5000), ("module.0 tied", 0, 5000)]
    longest = "b" * (NAME_CHARS - len("module."))
    [link] = links_of(host_of({"a": flat[:5000], longest: flat[5000:]}, master, flat)).own.values()
    assert link.fragments[1][0] == f"module.{longest}"
    refused = dict(
        nothing=host_of({}, master, flat), half=host_of({"a": flat[:5000]}, master, flat),
        name=host_of({"a": flat[:5000], "b" * (NAME_CHARS + 1): flat[5000:]}, master, flat),  # a reader would see it cut
        size=host_of(halves, master[:-1], flat), stage=host_of(halves, master, flat, zero_optimization_stage=lambda: 3),
        local=host_of(halves, master, flat, _config=SimpleNamespace(use_node_local_storage=True)),
        fp32=host_of({"a": master}, master, master), raises=host_of(halves, master, flat, module_state_dict=strange),
        other=host_of(halves, master, flat, optimizer=SimpleNamespace()), none=None)
    assert {name for name, host in refused.items() if links_of(host).own} == set()


@pytest.mark.parametrize("name", ["w" * NAME_CHARS, "layers.0.\u00fc weight", "a.b|c*"])
def test_names_are_found_as_they_were_written(tmp_path, name):
    master = torch.randn(5000)
    flat = master.bfloat16()
    write({"module": {name: flat}}, tmp_path / "m.pt", CONFIG, root="m")
    links = {master.data_ptr(): Link(Weights(raw(flat), "bfloat16"), "m.pt", [(f"module.{name}", 0, 5000)])}
    write({"w": master}, tmp_path / "o.pt", CONFIG, root="o", links=links)
    assert linked(tmp_path / "o.pt") and same(torch.load(tmp_path / "o.pt")["w"], master)


# --- flipped bits -----------------------------------------------------------------------------------------------------

def test_flipped_bits_in_either_file_never_give_other_numbers(tmp_path):
    """Wherever in the two files: the right numbers or an error. The readers in turn, the places at a stride."""
    folder = tmp_path
    generator = torch.Generator().manual_seed(5)
    master = torch.randn(4000, generator=generator) * 0.02
    flat = master.bfloat16()
    write({"module": {"w": flat[:3000], "v": flat[3000:]}}, folder / MODEL, CONFIG, root="m")
    optimizer = {"optimizer_state_dict": {"single_partition_of_fp32_groups": [master]}}
    link = Link(Weights(raw(flat), "bfloat16"), MODEL, [("module.w", 0, 3000), ("module.v", 0, 1000)])
    write(optimizer, folder / OPTIMIZER, CONFIG, root="o", links={master.data_ptr(): link})
    turn, outcomes = itertools.cycle(READERS.values()), {"same": 0, "refused": 0}
    for name in (MODEL, OPTIMIZER):
        data = (folder / name).read_bytes()
        for at in range(0, len(data), 23):
            broken = bytearray(data)
            broken[at] ^= 1 << at % 8
            (folder / name).write_bytes(broken)
            try:
                found = next(turn)(folder / OPTIMIZER)
            except KNOWN:
                outcomes["refused"] += 1
            else:
                outcomes["same"] += 1
                assert same(found, master), f"byte {at} of {name}"
        (folder / name).write_bytes(data)
    assert outcomes["same"] > 10 and outcomes["refused"] > 500, outcomes
    assert same(READERS["load"](folder / OPTIMIZER), master)
