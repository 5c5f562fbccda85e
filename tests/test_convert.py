"""pack and unpack: bit for bit, atomic, and nothing lost whatever fails."""
import os
import pickle
from collections import OrderedDict
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch.serialization import location_tag

import ds_nvcomp
from ds_nvcomp.archive.scan import scan
from ds_nvcomp.checkpoint import convert
from ds_nvcomp.checkpoint.compare import assert_same
from ds_nvcomp.checkpoint.convert import pack, unpack
from ds_nvcomp.checkpoint.locations import Loaded
from ds_nvcomp.checkpoint.verify import verify_tree
from ds_nvcomp.errors import ArchiveError, ChecksumError, DirectoryError, FormatError

FAST = {"fsync": False}


class Scaler:
    """Stands for the host's own classes in a pickle."""

    def __init__(self, scale):
        self.scale = scale

    def __eq__(self, other):
        return self.scale == other.scale


def model_states():
    flat = torch.randn(40_000).bfloat16()
    bits = torch.randint(-2**31, 2**31 - 1, (20_000,), dtype=torch.int32)  # every NaN payload, -0.0, denormals
    tagged = torch.randn(9_000)
    tagged.ds_id, tagged.ds_shape = 7, (3, 3000)
    weight = torch.nn.Parameter(torch.randn(100, 90), requires_grad=True)
    return {
        "module": OrderedDict(a=flat[:16_000].view(160, 100), b=flat[16_000:], tied=flat[:16_000].view(160, 100),
                              t=weight.data.t()),
        "weight": weight, "bits": bits.view(torch.float32), "tagged": tagged, "frozen": torch.randn(8_000).requires_grad_(),
        "zeros": torch.zeros(50_000), "empty": torch.empty(0, 3), "scalar": torch.tensor(-0.0),
        "every_other": torch.randn(30_000)[::2], "ints": torch.arange(10_000),
        "fp8": torch.randn(9_000).to(torch.float8_e4m3fn),
        "sparse": torch.eye(80).to_sparse(),
        "scaler": Scaler(2.0**16), "names": {"x", "y", "z"}, "dp_world_size": 2, "nothing": None,
    }


def optim_states():
    return {"optimizer_state_dict": {"partition_count": [2], "zero_stage": 1, "base_optimizer_state": {
        "state": {0: {"exp_avg": torch.randn(30_000) * 1e-4, "exp_avg_sq": torch.rand(30_000) * 1e-9, "step": 3.0}}}}}


@pytest.fixture
def save_dir(tmp_path):
    root = tmp_path / "ckpt"
    tag = root / "global_step3"
    tag.mkdir(parents=True)
    torch.save(model_states(), tag / "mp_rank_00_model_states.pt")
    for dp in range(2):
        torch.save(optim_states(), tag / f"bf16_zero_pp_rank_{dp}_mp_rank_00_optim_states.pt")
    torch.save({"w": torch.randn(20_000)}, root / "pytorch_model.bin")
    (root / "latest").write_text("global_step3")
    (root / "zero_to_fp32.py").write_text("print('script')\n")
    (root / "zero_to_fp32.py").chmod(0o755)
    (root / "config.json").write_text("{}")
    (root / "newest").symlink_to("global_step3")
    os.utime(root / "latest", ns=(1_600_000_000_123456789,) * 2)
    return root


def contents(root):
    return {str(path.relative_to(root)): os.readlink(path) if path.is_symlink() else path.read_bytes()
            for path in sorted(root.rglob("*")) if path.is_symlink() or path.is_file()}


def loaded(root):
    return {str(path.relative_to(root)): torch.load(path, weights_only=False, map_location="cpu")
            for path in root.rglob("*.pt")}


def assert_same_tree(before, after):
    assert before.keys() == after.keys()
    for name in before:
        assert_same(before[name], after[name], path=name)


@pytest.mark.parametrize("in_place", [True, False])
def test_round_trip_of_a_deepspeed_checkpoint(save_dir, in_place):
    before, objects = contents(save_dir), loaded(save_dir)
    dst = None if in_place else save_dir.with_name("packed")
    report = pack(save_dir, dst, FAST)
    packed = dst or save_dir
    assert len(report.converted) == 3 and report.bytes_after < report.bytes_before
    assert all(scan(packed / name).compressed for name in report.converted)
    assert not verify_tree(packed, decode=True)
    assert_same_tree(objects, loaded(packed))
    after = contents(packed)
    assert after.keys() == before.keys()
    assert all(after[name] == before[name] for name in before if not name.endswith("_states.pt"))
    assert (packed / "latest").stat().st_mtime_ns == 1_600_000_000_123456789
    assert (packed / "zero_to_fp32.py").stat().st_mode & 0o777 == 0o755
    if not in_place:
        assert contents(save_dir) == before

    dst = None if in_place else save_dir.with_name("plain")
    report = unpack(packed, dst, fsync=False)
    plain = dst or save_dir
    assert len(report.converted) == 3
    assert not any(scan(path).compressed for path in plain.rglob("*.pt"))
    assert_same_tree(objects, loaded(plain))
    tensors = loaded(plain)["global_step3/mp_rank_00_model_states.pt"]
    assert tensors["tagged"].ds_id == 7 and type(tensors["weight"]) is torch.nn.Parameter
    assert tensors["module"]["a"].data_ptr() == tensors["module"]["tied"].data_ptr()
    assert not [path.name for path in save_dir.parent.iterdir() if path.name.startswith(".")]


def test_all_packs_what_is_for_other_readers_too(save_dir):
    assert "pytorch_model.bin" in pack(save_dir, None, FAST, all_files=True).converted


def test_a_tree_without_deepspeed_names(tmp_path):
    for name in ("a.pt", "b.pth", "c.bin", "d.ckpt"):
        torch.save({"w": torch.randn(20_000)}, tmp_path / name)
    (tmp_path / "e.pt").write_bytes(b"not torch")
    src = tmp_path / "src"
    src.mkdir()
    for name in ("a.pt", "b.pth", "c.bin", "d.ckpt", "e.pt"):
        (tmp_path / name).rename(src / name)
    assert sorted(pack(src, None, FAST).converted) == ["a.pt", "b.pth", "c.bin"]


@pytest.mark.parametrize("in_place", [True, False])
def test_single_file(tmp_path, in_place):
    obj = model_states()
    src = tmp_path / "model.pth"
    torch.save(obj, src)
    dst = None if in_place else tmp_path / "small.pt"
    assert pack(src, dst, FAST).converted == ["."]
    path = dst or src
    assert scan(path).compressed
    assert_same(obj, torch.load(path, weights_only=False), path="")
    unpack(path, fsync=False)
    assert not scan(path).compressed
    assert_same(obj, torch.load(path, weights_only=False), path="")


def test_repacks_with_another_codec(tmp_path):
    path = tmp_path / "x.pt"
    torch.save({"w": torch.randn(50_000)}, path)
    for codec in ("deflate", "zstd"):
        pack(path, None, {"codec": codec, **FAST})
        assert scan(path).rows[0].storage.encoding.codec.name == codec


def test_what_does_not_shrink_stays_as_it_is(tmp_path):
    path = tmp_path / "x.pt"
    torch.save({"small": torch.randn(10)}, path)
    before = path.read_bytes()
    assert pack(path, None, FAST).converted == [] and path.read_bytes() == before


@contextmanager
def located(tensor, location):
    """`tensor` says that it is at `location`. Only in here: its storage's identity becomes another's when it is gone, which a later
    test then could not load."""
    here, registry = tensor.untyped_storage()._cdata, torch.serialization._package_registry
    before = list(registry)
    torch.serialization.register_package(2, lambda storage: location if storage._cdata == here else None, lambda storage, location: None)
    try:
        yield
    finally:
        registry[:] = before


def test_locations_are_kept(tmp_path):
    """A file of CUDA tensors, written where there is no GPU."""
    path = tmp_path / "x.pt"
    tensor = torch.randn(50_000)
    with located(tensor, "cuda:1"):
        torch.save({"gpu": tensor, "cpu": torch.randn(50_000)}, path)
    for step in (pack, unpack):
        step(path)
        assert [row.storage.location for row in scan(path).rows] == ["cuda:1", "cpu"]
    assert torch.equal(torch.load(path, map_location="cpu")["gpu"], tensor)


def test_locations_are_those_of_the_loaded_storages_only(tmp_path):
    """Storages are known by identities, which are used again: none may be while it stands for a location."""
    tensor = torch.randn(50_000)
    with located(tensor, "cuda:1"):
        torch.save({"gpu": tensor}, tmp_path / "plain.pt")
        ds_nvcomp.save({"gpu": tensor}, tmp_path / "packed.pt")
    for name in ("plain.pt", "packed.pt"):
        loaded = Loaded(tmp_path / name)
        with loaded:
            loaded.object.clear()
            strangers = [torch.empty(50_000) for _ in range(100)]
            assert {location_tag(tensor.untyped_storage()) for tensor in strangers} == {"cpu"}
        del loaded
        strangers += [torch.empty(50_000) for _ in range(100)]
        assert {location_tag(tensor.untyped_storage()) for tensor in strangers} == {"cpu"}


@pytest.mark.parametrize("in_place", [True, False])
@pytest.mark.parametrize("where", ["write", "compare", "publish"])
def test_a_failure_leaves_the_source_as_it_was(save_dir, monkeypatch, where, in_place):
    before = contents(save_dir)
    calls = []

    def crash(*args, **kwargs):
        calls.append(args)
        if len(calls) > 1 or where == "publish":
            raise KeyboardInterrupt("injected")

    if where == "write":
        import ds_nvcomp.archive
        save = ds_nvcomp.archive.save
        monkeypatch.setattr(ds_nvcomp.archive, "save", lambda *args, **kwargs: (save(*args, **kwargs), crash()))
    elif where == "compare":
        monkeypatch.setattr("ds_nvcomp.checkpoint.compare.assert_same", crash)
    else:
        monkeypatch.setattr(convert._Conversion, "_publish", crash)
    dst = None if in_place else save_dir.with_name("packed")
    with pytest.raises(KeyboardInterrupt):
        pack(save_dir, dst, FAST)
    assert contents(save_dir) == before
    assert [path.name for path in save_dir.parent.iterdir()] == ["ckpt"]


def test_a_wrong_write_is_noticed(tmp_path, monkeypatch):
    path = tmp_path / "x.pt"
    torch.save({"layers": [{"w": torch.randn(50_000)}]}, path)
    before = path.read_bytes()
    import ds_nvcomp.archive
    save = ds_nvcomp.archive.save

    def wrong(obj, *args, **kwargs):
        w = obj["layers"][0]["w"].clone()
        w[1234] = -w[1234]
        return save({"layers": [{"w": w}]}, *args, **kwargs)

    monkeypatch.setattr(ds_nvcomp.archive, "save", wrong)
    with pytest.raises(ChecksumError) as caught:
        pack(path, None, FAST)
    assert caught.value.tensor == "layers.0.w" and path.read_bytes() == before


@pytest.mark.parametrize("change", ["new tag", "rewritten", "removed"])
def test_a_tree_that_changes_meanwhile_is_not_replaced(save_dir, monkeypatch, change):
    make_durable = convert._copy_attributes

    def interfere(source, target):
        make_durable(source, target)
        if change == "new tag":
            (save_dir / "global_step4").mkdir(exist_ok=True)
        elif change == "rewritten":
            (save_dir / "latest").write_text("global_step4")
        else:
            (save_dir / "config.json").unlink(missing_ok=True)

    monkeypatch.setattr(convert, "_copy_attributes", interfere)
    if change == "removed":
        monkeypatch.setattr(convert, "_copy_attributes", lambda source, target: None)
        monkeypatch.setattr(convert._Conversion, "_publish", lambda self, new, before, publish=convert._Conversion._publish: (
            (save_dir / "config.json").unlink(), publish(self, new, before)))
    with pytest.raises(DirectoryError, match="was changed while"):
        pack(save_dir, None, FAST)
    assert not scan(save_dir / "global_step3" / "mp_rank_00_model_states.pt").compressed


def test_a_tag_that_comes_at_the_last_moment_is_not_lost(save_dir, monkeypatch):
    exchange, calls = convert.exchange, []

    def late(a, b):
        if not calls:
            (save_dir / "global_step4").mkdir()
        calls.append(a)
        return exchange(a, b)

    monkeypatch.setattr(convert, "exchange", late)
    with pytest.raises(DirectoryError, match="global_step4"):
        pack(save_dir, None, FAST)
    assert len(calls) == 2 and (save_dir / "global_step4").is_dir()


def test_destinations_that_are_refused(save_dir):
    for dst in (save_dir.with_name("there"), save_dir / "inside", save_dir.parent / "no" / "such"):
        if dst.name == "there":
            dst.mkdir()
        for step in (pack, unpack):
            with pytest.raises(DirectoryError):
                step(save_dir, dst)
    with pytest.raises(DirectoryError, match="no such file"):
        pack(save_dir / "missing.pt")
    with pytest.raises(ArchiveError, match="not a torch zip"):
        pack(save_dir / "config.json")


def test_links_out_of_the_tree_are_not_followed(save_dir, tmp_path):
    outside = tmp_path / "outside_states.pt"
    torch.save({"w": torch.randn(50_000)}, outside)
    before = outside.read_bytes()
    (save_dir / "out_states.pt").symlink_to("../outside_states.pt")
    dst = tmp_path / "deep" / "packed"
    dst.parent.mkdir()
    pack(save_dir, dst, FAST)
    assert Path(os.readlink(dst / "out_states.pt")) == outside and (dst / "newest" / "mp_rank_00_model_states.pt").exists()
    assert os.readlink(dst / "newest") == "global_step3"
    pack(save_dir, None, FAST)
    assert os.readlink(save_dir / "out_states.pt") == "../outside_states.pt" and outside.read_bytes() == before


def test_damaged_files_are_refused(tmp_path):
    path = tmp_path / "x_states.pt"
    torch.save({"w": torch.randn(50_000)}, path)
    pack(path, None, FAST)
    data = bytearray(path.read_bytes())
    at = bytes(data).find(b"DSNVCOMP") + 2000
    data[at] ^= 1
    path.write_bytes(data)
    with pytest.raises(FormatError) as caught:
        unpack(path)
    assert caught.value.path == str(path) and path.read_bytes() == data


def test_missing_module_is_named(tmp_path, monkeypatch):
    path = tmp_path / "x.pt"
    with open(tmp_path / "nowhere_module.py", "w") as file:
        file.write("class C: pass\n")
    monkeypatch.syspath_prepend(tmp_path)
    import nowhere_module
    torch.save({"c": nowhere_module.C(), "w": torch.randn(50_000)}, path)
    monkeypatch.undo()
    import sys
    del sys.modules["nowhere_module"]
    with pytest.raises(ArchiveError, match="nowhere_module"):
        pack(path, None, FAST)


def change_bits(obj):
    obj["bits"].view(torch.int32)[5] ^= 1


CHANGES = {
    "a mantissa bit": change_bits,
    "-0.0": lambda obj: obj.update(scalar=torch.tensor(0.0)),
    "stride": lambda obj: obj["module"].update(t=obj["module"]["t"].contiguous()),
    "requires_grad": lambda obj: obj["frozen"].requires_grad_(False),
    "Parameter": lambda obj: obj.update(weight=obj["weight"].data),
    "attribute": lambda obj: setattr(obj["tagged"], "ds_id", 8),
    "sharing": lambda obj: obj["module"].update(tied=obj["module"]["tied"].clone()),
    "shape": lambda obj: obj.update(empty=torch.empty(3, 0)),
    "dtype": lambda obj: obj.update(ints=obj["ints"].view(torch.float64)),
    "object": lambda obj: setattr(obj["scaler"], "scale", 1.0),
    "set": lambda obj: obj["names"].add("w"),
    "key": lambda obj: obj.update(more=1),
    "sparse": lambda obj: obj.update(sparse=torch.eye(80).mul(2).to_sparse()),
}


@pytest.mark.parametrize("change", CHANGES)
def test_the_comparison_sees(tmp_path, change):
    torch.save(model_states(), tmp_path / "x.pt")
    mine, other = Loaded(tmp_path / "x.pt").object, torch.load(tmp_path / "x.pt", weights_only=False)
    assert_same(mine, other, path="x")
    CHANGES[change](other)
    with pytest.raises(ChecksumError):
        assert_same(mine, other, path="x")


def test_the_comparison_takes_equal_objects_that_pickle_differently():
    word = "".join(["w", "ord"])
    a, b = {"x": [word, word]}, {"x": [word, "".join(["wo", "rd"])]}
    assert pickle.dumps(a) != pickle.dumps(b)
    assert_same(a, b, path="x")
