"""`load` straight from the file, and `load(select=...)`."""
import os
import zipfile

import pytest
import torch

import ds_nvcomp
from ds_nvcomp.archive import reader
from ds_nvcomp.archive import select as selecting
from ds_nvcomp.errors import ChecksumError, FormatError


def readable(value) -> str:
    """A test id that is the same in every process: str of a function has an address in it."""
    return getattr(value, "__name__", str(value))


@pytest.fixture
def state():
    base = torch.randn(300, 100)
    return {"module": {"w": base, "row": base[3], "b": torch.randn(50_000).bfloat16(), "small": torch.arange(10)},
            "optimizer_state_dict": {"state": {0: {"exp_avg": torch.randn(40_000), "exp_avg_sq": torch.randn(40_000) ** 2, "step": 3},
                                               1: {"exp_avg": torch.zeros(9000), "step": 4}}}}


@pytest.fixture(params=[True, False], ids=["ours", "plain"])
def path(request, state, tmp_path):
    path = tmp_path / "x.pt"
    ds_nvcomp.save(state, path, {"fsync": False}) if request.param else torch.save(state, path)
    return path


def test_the_file_may_go_once_it_is_loaded(path, state):
    """Nothing that was loaded without mmap is a view of the file."""
    found = ds_nvcomp.load(path, weights_only=False)
    with open(path, "r+b") as file:
        file.write(bytes(os.path.getsize(path)))
    os.truncate(path, 10)
    assert torch.equal(found["module"]["small"], state["module"]["small"]) and torch.equal(found["module"]["row"], state["module"]["row"])
    found["module"]["small"] += 1  # and it is ours to change


def test_with_mmap_plain_tensors_stay_mapped(state, tmp_path):
    torch.save(state, tmp_path / "x.pt")
    found = ds_nvcomp.load(tmp_path / "x.pt", mmap=True)
    assert str(tmp_path / "x.pt") in open("/proc/self/maps").read() and torch.equal(found["module"]["w"], state["module"]["w"])


@pytest.mark.parametrize("location", [None, "cpu", torch.device("cpu"), {"cpu": "cpu"}, lambda storage, location: storage, "meta"],
                         ids=readable)
@pytest.mark.parametrize("weights_only", [True, False])
def test_map_locations(path, state, location, weights_only):
    found = ds_nvcomp.load(path, location, weights_only=weights_only)
    expected = torch.load(path, map_location=location, weights_only=weights_only)
    for name, tensor in found["module"].items():
        assert tensor.device == expected["module"][name].device and tensor.shape == expected["module"][name].shape
        assert location == "meta" or torch.equal(tensor, state["module"][name])


def test_payloads_are_not_copied_before_they_are_decoded(state, tmp_path, monkeypatch):
    ds_nvcomp.save(state, tmp_path / "x.pt", {"fsync": False})
    seen = []
    decode = ds_nvcomp.archive.storage.decode_payload

    def noting(data, *args, **kwargs):
        base = next(int(line.split("-")[0], 16) for line in open("/proc/self/maps") if str(tmp_path / "x.pt") in line)
        seen.append(0 <= data.data_ptr() - base < os.path.getsize(tmp_path / "x.pt"))
        return decode(data, *args, **kwargs)

    monkeypatch.setattr("ds_nvcomp.archive.storage.decode_payload", noting)
    ds_nvcomp.load(tmp_path / "x.pt")
    assert len(seen) == 5 and all(seen)


def test_a_tensor_that_looks_like_a_payload(tmp_path):
    """It is one to the eye only: it has to be where map_location says, and not mapped."""
    data = torch.frombuffer(bytearray(b"DSNVCOMP" + bytes(1000)), dtype=torch.uint8)
    ds_nvcomp.save({"bytes": data, "w": torch.randn(9000)}, tmp_path / "x.pt", {"fsync": False})
    calls = []
    found = ds_nvcomp.load(tmp_path / "x.pt", lambda storage, location: calls.append(location) or storage.clone())
    assert torch.equal(found["bytes"], data) and "cpu" in calls
    assert str(tmp_path / "x.pt") not in open("/proc/self/maps").read()


# -- select -------------------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("pattern, names", [
    ("module.w", ["module.w"]), ("*.exp_avg", ["optimizer_state_dict.state.0.exp_avg", "optimizer_state_dict.state.1.exp_avg"]),
    ("module.row | module.small", ["module.row", "module.small"]), ("nothing", []), ("*", None),
    (lambda name: name.endswith("_sq"), ["optimizer_state_dict.state.0.exp_avg_sq"])], ids=readable)
def test_select(path, state, pattern, names):
    found = ds_nvcomp.load(path, select=pattern)
    assert names is None and len(found) == 7 or sorted(found) == names
    for name, tensor in found.items():
        value = state
        for key in name.split("."):
            value = value[int(key) if key.isdigit() else key]
        assert torch.equal(tensor, value) and tensor.dtype == value.dtype and tensor.stride() == value.stride(), name
    if names is None:
        assert found["module.w"].untyped_storage().data_ptr() == found["module.row"].untyped_storage().data_ptr()


def test_select_decodes_nothing_else(state, tmp_path, monkeypatch):
    ds_nvcomp.save(state, tmp_path / "x.pt", {"fsync": False})
    seen, decode = [], selecting.decode_payload
    monkeypatch.setattr(selecting, "decode_payload", lambda data, parsed, **how: seen.append(parsed[0].raw_bytes) or decode(data, parsed, **how))
    ds_nvcomp.load(tmp_path / "x.pt", select="*.exp_avg_sq")
    assert seen == [160_000]


def test_select_runs_no_code_of_the_pickle(tmp_path):
    class Evil:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "ran"),)
    torch.save({"w": torch.ones(5), "evil": Evil()}, tmp_path / "x.pt")
    assert torch.equal(ds_nvcomp.load(tmp_path / "x.pt", select="w")["w"], torch.ones(5)) and not (tmp_path / "ran").exists()


def test_select_finds_damage_in_what_it_loads(path, state):
    with zipfile.ZipFile(path) as zipped:
        [info] = [info for info in zipped.infolist() if info.file_size == 80]  # `small`
    data = bytearray(path.read_bytes())
    at = data.index(torch.arange(10).numpy().tobytes())
    data[at + 3] ^= 1
    path.write_bytes(data)
    assert torch.equal(ds_nvcomp.load(path, select="module.w")["module.w"], state["module"]["w"])
    with pytest.raises(ChecksumError) as caught:
        ds_nvcomp.load(path, select="module.*")
    assert caught.value.tensor == "module.small" and caught.value.path == str(path)


def test_select_takes_paths_of_torch_files(tmp_path):
    with pytest.raises(ValueError, match="path"):
        ds_nvcomp.load(open(os.devnull, "rb"), select="*")
    (tmp_path / "no.pt").write_bytes(b"no zip")
    with pytest.raises(FormatError, match="not a torch zip"):
        ds_nvcomp.load(tmp_path / "no.pt", select="*")
    assert reader.restorer("cpu")
