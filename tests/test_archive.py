"""`save` against torch.save, and `torch.load` of what it wrote: the same objects, the same bits, the same sharing.

`copy_through` saves an object both ways and compares the two loads bit by bit, so torch itself says what is right.
"""
import copy
import io
import os
import pickle
import random
import zipfile
from collections import OrderedDict, namedtuple
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

import ds_nvcomp
from conformance import DTYPES, make
from ds_nvcomp.archive import save
from ds_nvcomp.config import CODECS, Config
from ds_nvcomp.errors import ChecksumError, ConfigError, FormatError, HeaderError, TruncatedError, UnsupportedVersionError

ANY_SIZE = {"min_bytes": 0, "fsync": False}   # compress storages of a few bytes too
PLAIN = {"fsync": False}


def bits(tensor) -> bytes:
    """A strided tensor's elements in order, as bytes."""
    tensor = tensor.detach().resolve_conj().resolve_neg().contiguous()
    return tensor.cpu().reshape(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""


def alike(a, b, path="", seen=None):
    """Assert that `b` is what `a` is: types, structure, bits, strides, flags, attributes."""
    seen = {} if seen is None else seen
    if id(a) in seen:
        assert seen[id(a)][1] is b, f"{path}: identity is lost"
        return
    seen[id(a)] = a, b   # both, so that neither goes and its id is used again
    assert type(a) is type(b), path
    if isinstance(a, torch.Tensor):
        assert (a.dtype, a.layout, a.requires_grad, a.is_nested) == (b.dtype, b.layout, b.requires_grad, b.is_nested), path
        assert a.is_nested or a.shape == b.shape, path
        alike(dict(a.__dict__), dict(b.__dict__), f"{path}.__dict__", seen)
        if a.is_meta:
            assert b.is_meta and a.stride() == b.stride(), path
        elif a.is_nested:
            for i, (x, y) in enumerate(zip(a.unbind(), b.unbind())):
                alike(x, y, f"{path}<{i}>", seen)
        elif a.layout is not torch.strided:
            parts = (("_indices", "_values") if a.layout is torch.sparse_coo else ("ccol_indices", "row_indices", "values")
                     if a.layout is torch.sparse_csc else ("crow_indices", "col_indices", "values"))
            for part in parts:
                alike(getattr(a, part)(), getattr(b, part)(), f"{path}.{part}", seen)
        elif a.is_quantized:
            assert a.qscheme() == b.qscheme() and a.stride() == b.stride(), path
            assert torch.equal(a.int_repr(), b.int_repr()) and torch.equal(a.dequantize(), b.dequantize()), path
        else:
            assert (a.stride(), a.is_conj(), a.is_neg()) == (b.stride(), b.is_conj(), b.is_neg()), path
            assert bits(a) == bits(b), f"{path}: other bits"
    elif isinstance(a, (torch.storage.TypedStorage, torch.UntypedStorage)):
        assert a.nbytes() == b.nbytes() and bytes(a.untyped()) == bytes(b.untyped()), path
    elif isinstance(a, torch.nn.Module):
        alike(a.__dict__, b.__dict__, path, seen)
    elif isinstance(a, dict):
        assert list(map(repr, a)) == list(map(repr, b)), path
        for key, other in zip(a, b):
            alike(a[key], b[other], f"{path}.{key}", seen)
    elif isinstance(a, (list, tuple)):
        assert len(a) == len(b), path
        for i, (x, y) in enumerate(zip(a, b)):
            alike(x, y, f"{path}[{i}]", seen)
    elif isinstance(a, np.ndarray):
        assert a.dtype == b.dtype and a.tobytes() == b.tobytes(), path
    elif hasattr(a, "__dict__") and not callable(a):
        alike(a.__dict__, b.__dict__, path, seen)
    else:
        assert a == b or a != a and b != b, path


def loaded(obj, config=None, weights_only=False, **load_args):
    buffer = io.BytesIO()
    save(obj, buffer, config or ANY_SIZE)
    buffer.seek(0)
    return torch.load(buffer, weights_only=weights_only, **load_args)


def torch_loaded(obj):
    buffer = io.BytesIO()
    torch.save(obj, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


def copy_through(obj, config=None):
    """Save and load; hold the result against what torch.save and torch.load make of it, and return it."""
    found = loaded(obj, config)
    alike(torch_loaded(obj), found)
    return found


def numbers(*shape, dtype=torch.float32, content="normal", seed=""):
    count = int(np.prod(shape)) if shape else 1
    if not count:
        return torch.empty(shape, dtype=dtype)
    raw = make(str(dtype).removeprefix("torch."), content, count * dtype.itemsize, seed)
    return torch.from_numpy(raw.copy()).view(dtype).reshape(shape)


def compressed(data: bytes) -> list[dict]:
    """The `meta` of each compressed storage in a file, by asking its pickle."""
    found = []

    class Unpickler(pickle.Unpickler):
        def find_class(self, module, name):
            if (module, name) == ("ds_nvcomp.archive", "unpack"):
                return lambda payload, meta: found.append(meta) or torch.UntypedStorage(0)
            if module in ("torch._utils", "torch") and name != "Size" or module.startswith("torch._tensor") or name == "OrderedDict":
                return lambda *args: {}
            return super().find_class(module, name)

        def persistent_load(self, pid):
            return pid

    with zipfile.ZipFile(io.BytesIO(data)) as file:
        [name] = [name for name in file.namelist() if name.endswith("/data.pkl")]
        Unpickler(io.BytesIO(file.read(name))).load()
    return found


def saved(obj, config=None) -> bytes:
    buffer = io.BytesIO()
    save(obj, buffer, config or ANY_SIZE)
    return buffer.getvalue()


# --- tensors of every kind --------------------------------------------------------------------------------------------

@pytest.mark.parametrize("content", ["normal", "special", "zero", "random"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_dtypes(dtype, content):
    tensor = numbers(9001, dtype=getattr(torch, dtype), content=content)
    found = copy_through({"x": tensor, "view": tensor[3:-1]})
    assert bits(found["x"]) == bits(tensor) and shares(found["x"], found["view"])
    if content in ("normal", "zero"):
        [meta] = compressed(saved({"x": tensor}))
        assert (meta["dtype"], meta["bytes"], meta["name"]) == (dtype, 9001 * tensor.itemsize, "x")


@pytest.mark.parametrize("dtype", ["float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu", "float4_e2m1fn_x2", "uint16", "uint32", "uint64",
                                   "int16", "complex128"])
def test_later_dtypes(dtype):
    """Those without a storage class of their own are rebuilt in another way, and were once left uncompressed for it."""
    if not hasattr(torch, dtype):
        pytest.skip(f"this torch has no {dtype}")
    kind = getattr(torch, dtype)
    tensor = torch.from_numpy(make("int8", "normal", 9000 * kind.itemsize).copy()).view(kind)
    found = loaded({"x": tensor, "view": tensor[17:]})
    assert found["x"].dtype is kind and bits(found["x"]) == bits(tensor) and bits(found["view"]) == bits(tensor[17:])
    assert shares(found["x"], found["view"])
    assert [meta["dtype"] for meta in compressed(saved([tensor]))] == [dtype]


@pytest.mark.parametrize("views", [
    lambda raw: [raw, raw.view(torch.float8_e5m2)], lambda raw: [raw.view(torch.float8_e5m2), raw],
    lambda raw: [raw.view(torch.uint16), raw.view(torch.float8_e4m3fn)[100:]],
    lambda raw: [raw.view(torch.float8_e4m3fn)[101:5001], raw.view(torch.uint32)[:2000], raw.view(torch.uint64)[500:1000]],
], ids=range(4))
def test_later_dtypes_may_share_a_storage(views):
    """torch takes their storages for bytes, whatever the dtype: the one case of two dtypes on one storage that it saves."""
    group = views(torch.from_numpy(make("int8", "normal", 16_000).copy()).view(torch.uint8))
    torch_loaded(group)
    found = loaded(group)
    assert [bits(a) for a in found] == [bits(a) for a in group] and [a.dtype for a in found] == [a.dtype for a in group]
    assert all(shares(found[0], other) for other in found)


def test_later_dtypes_that_share_an_odd_number_of_bytes():
    raw = torch.from_numpy(make("int8", "normal", 16_000).copy())
    group = [raw.view(torch.uint16)[:1000], raw.view(torch.float8_e4m3fn)[1500:2501]]
    torch_loaded(group)
    found = loaded(group)
    assert [bits(a) for a in found] == [bits(a) for a in group] and [a.dtype for a in found] == [a.dtype for a in group]


@pytest.mark.parametrize("codec", [codec for codec in CODECS if codec not in ("ans", "gdeflate", "bitcomp", "cascaded")])
def test_codecs(codec):
    copy_through({"w": numbers(300, 300), "i": numbers(50, 50, dtype=torch.int64)}, {"codec": codec, "verify": "encode"})


def test_it_is_compressed_at_all():
    data = saved({"w": numbers(512, 512), "tiny": torch.ones(3), "noise": numbers(1 << 16, dtype=torch.uint8, content="random")}, PLAIN)
    assert [meta["name"] for meta in compressed(data)] == ["w", "noise"]  # noise does not shrink, but gets checksums
    assert len(data) < 4 * 512 * 512 * 0.9 + (1 << 16) + 8192


@pytest.mark.filterwarnings("ignore:ComplexHalf")
@pytest.mark.parametrize("name,tensor", [
    ("0-d", torch.tensor(1.5)), ("0-d int", torch.tensor(7)), ("empty", torch.empty(0)), ("empty 2-d", torch.empty(3, 0, 5)),
    ("one", torch.ones(1)), ("transposed", numbers(70, 90).T), ("permuted", numbers(7, 30, 20).permute(2, 0, 1)),
    ("expanded", numbers(1, 900).expand(5, 900)), ("expanded scalar", torch.tensor(2.5).expand(100, 100)),
    ("step", numbers(5000)[::3]), ("middle", numbers(5000)[1000:2000]), ("column", numbers(80, 80)[:, 3]),
    ("diagonal", numbers(80, 80).diagonal()), ("overlapping windows", numbers(1000).unfold(0, 100, 10)),
    ("channels last", numbers(2, 8, 16, 16).to(memory_format=torch.channels_last)), ("empty slice", numbers(5000)[2500:2500]),
    ("requires grad", numbers(4000).requires_grad_()), ("view as real", torch.view_as_real(numbers(2000, dtype=torch.complex64))),
    ("conj", numbers(2000, dtype=torch.complex64).conj()), ("neg", numbers(2000, dtype=torch.complex64).conj().imag),
    ("real part", numbers(2000, dtype=torch.complex64).real), ("complex half", numbers(2000, dtype=torch.complex64).to(torch.complex32)),
    ("int view", numbers(2000).view(torch.int32)), ("uint16", numbers(4000, dtype=torch.int32).to(torch.uint16)),
], ids=lambda v: v if isinstance(v, str) else "")
def test_shapes_strides_and_views(name, tensor):
    found = copy_through([tensor, {"again": tensor}])
    assert found[0] is found[1]["again"]


@pytest.mark.parametrize("name,make_tensor", [
    ("quantized", lambda: torch.quantize_per_tensor(numbers(5000), 0.1, 3, torch.qint8)),
    ("per channel", lambda: torch.quantize_per_channel(numbers(50, 100), torch.rand(50) + .1, torch.zeros(50), 0, torch.qint8)),
    ("sparse coo", lambda: (numbers(100, 100) * (numbers(100, 100, seed="mask") > 0.02)).to_sparse()),
    ("sparse csr", lambda: (numbers(100, 100) * (numbers(100, 100, seed="mask") > 0.02)).to_sparse_csr()),
    ("sparse csc", lambda: (numbers(100, 100) * (numbers(100, 100, seed="mask") > 0.02)).to_sparse_csc()),
    ("nested", lambda: torch.nested.nested_tensor([numbers(30, 50), numbers(20, 50)])),
    ("meta", lambda: torch.empty(100, 100, device="meta")),
    ("parameter", lambda: torch.nn.Parameter(numbers(90, 90))),
    ("frozen parameter", lambda: torch.nn.Parameter(numbers(90, 90), requires_grad=False)),
    ("integer parameter", lambda: torch.nn.Parameter(numbers(9000, dtype=torch.int8), requires_grad=False)),
    ("buffer", lambda: torch.nn.Buffer(numbers(90, 90))),
], ids=lambda v: v if isinstance(v, str) else "")
@pytest.mark.filterwarnings("ignore")
def test_other_kinds_are_as_torch_has_them(name, make_tensor):
    copy_through({"x": make_tensor(), "plain": numbers(3000)})


class Subclass(torch.Tensor):
    pass


def test_subclasses():
    plain = numbers(4000)
    tensor = plain.as_subclass(Subclass)
    tensor.note = "kept"
    found = copy_through({"x": tensor, "again": tensor, "p": torch.nn.Parameter(numbers(3000))})
    assert type(found["x"]) is Subclass and found["x"].note == "kept" and found["x"] is found["again"]


def test_tensor_attributes():
    """ZeRO-3 finds its parameters again by `ds_id` on them."""
    tensor, parameter = numbers(4000), torch.nn.Parameter(numbers(4000, seed="p"))
    tensor.ds_id, tensor.ds_shape, tensor.other = 17, torch.Size([40, 100]), {"t": numbers(3000, seed="attribute")}
    parameter.ds_id = 18
    found = copy_through({"x": tensor, "p": parameter, "view": tensor[10:20]})
    assert found["x"].ds_id == 17 and found["x"].ds_shape == torch.Size([40, 100]) and found["p"].ds_id == 18
    assert bits(found["x"].other["t"]) == bits(tensor.other["t"])


def test_storage_that_begins_at_an_odd_address():
    """torch.frombuffer with an offset: NumPy's views of it are not aligned."""
    for dtype in (torch.float32, torch.bfloat16, torch.float64, torch.int64):
        raw = bytearray(b"\1\2\3") + bytearray(numbers(5000, dtype=dtype).view(torch.uint8).numpy().tobytes())
        tensor = torch.frombuffer(raw, dtype=dtype, offset=3)
        found = loaded([tensor, tensor[10:]])
        assert bits(found[0]) == bits(tensor) and bits(found[1]) == bits(tensor[10:])


def test_gradients_are_not_saved_and_non_leaves_are():
    leaf = numbers(3000).requires_grad_()
    middle = leaf * 2
    middle.sum().backward()
    found = copy_through({"leaf": leaf, "middle": middle})
    assert found["leaf"].grad is None and found["middle"].is_leaf


# --- sharing ----------------------------------------------------------------------------------------------------------

def shares(a, b):
    return a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()


def test_views_share_their_storage():
    base = numbers(100, 100)
    found = copy_through({"base": base, "row": base[3], "transposed": base.T, "flat": base.view(-1)[17:]})
    for name in ("row", "transposed", "flat"):
        assert shares(found["base"], found[name])
    found["row"].fill_(7)
    assert (found["base"][3] == 7).all() and (found["transposed"][:, 3] == 7).all()


def test_tied_weights_are_stored_once():
    weight = torch.nn.Parameter(numbers(300, 300))
    data = saved({"embed": weight, "head": weight, "data": weight.data, "detached": weight.detach()})
    assert len(compressed(data)) == 1
    found = copy_through({"embed": weight, "head": weight, "data": weight.data})
    assert found["embed"] is found["head"] and shares(found["embed"], found["data"])


def test_overlapping_views_stay_shared():
    flat = numbers(60000)
    found = copy_through([flat[0:30000], flat[20000:60000]])
    assert shares(*found)
    found[0][25000] = 5
    assert found[1][5000] == 5


def test_equal_but_separate_tensors_stay_separate():
    a, b = torch.ones(5000), torch.ones(5000)
    found = copy_through([a, b])
    assert not shares(*found)


@pytest.mark.parametrize("whole_first", [True, False])
def test_raw_storage_shared_with_a_tensor(whole_first):
    tensor = numbers(5000, dtype=torch.uint8)
    pair = [tensor.untyped_storage(), tensor] if whole_first else [tensor, tensor.untyped_storage()]
    found = copy_through(pair)
    storage, tensor = found if whole_first else found[::-1]
    assert storage.data_ptr() == tensor.data_ptr()


@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated")
def test_typed_storage_shared_with_a_tensor():
    tensor = numbers(5000)
    found = copy_through({"s": tensor.storage(), "t": tensor[100:], "alone": numbers(100, seed="a").storage()})
    assert found["s"].data_ptr() == found["t"].untyped_storage().data_ptr()


@pytest.mark.parametrize("pair", [
    lambda x: [x, x.view(torch.int32)], lambda x: [x.view(torch.int32), x], lambda x: [x, x.view(torch.int32)[100:]],
    lambda x: [x, x.untyped_storage()], lambda x: [x.untyped_storage(), x],
    lambda x: [torch.view_as_complex(x.view(-1, 2)), x],
], ids=range(6))
def test_two_dtypes_on_one_storage_are_torchs_error(pair):
    obj = pair(numbers(5000))
    with pytest.raises(RuntimeError) as torchs:
        torch.save(obj, io.BytesIO())
    with pytest.raises(RuntimeError) as ours:
        save(obj, io.BytesIO(), ANY_SIZE)
    assert str(ours.value) == str(torchs.value)


def test_expert_does_not_carry_its_neighbours():
    flat = numbers(1_000_000)
    expert = flat[400_000:410_000]
    data = saved({"expert": expert})
    assert len(data) < 45_000
    found = loaded({"expert": expert})
    assert bits(found["expert"]) == bits(expert)
    assert found["expert"].untyped_storage().nbytes() == 40_000 and found["expert"].storage_offset() == 0


def test_far_slices_become_spans_and_near_ones_stay_together():
    flat = numbers(1_000_000)
    near = [flat[1000:2000], flat[2100:3000]]      # 400 bytes apart: the padding of a flat buffer
    far = [flat[500_000:501_000], flat[900_000:901_000]]
    found = loaded(near + far)
    assert [bits(a) for a in found] == [bits(a) for a in near + far]
    assert shares(found[0], found[1]) and not shares(found[0], found[2]) and not shares(found[2], found[3])
    assert len(saved(near + far)) < 20_000


def test_gap_is_bridged_up_to_its_bound():
    from ds_nvcomp.archive.pickler import GAP
    flat = numbers(1 << 20, dtype=torch.int8, content="random")
    for gap, together in ((GAP, True), (GAP + 1, False)):
        found = loaded([flat[:10_000], flat[10_000 + gap:30_000]])
        assert shares(*found) is together


def test_empty_tensor_at_the_end_of_a_shared_storage():
    flat = numbers(100_000)
    for group in ([flat[50_000:60_000], flat[100_000:]], [flat[100_000:], flat[50_000:60_000]], [flat[:0]], [flat[5:5], flat[7:9]]):
        found = loaded(group)
        assert [bits(a) for a in found] == [bits(a) for a in group]
        assert [a.shape for a in found] == [a.shape for a in group]


@given(st.lists(st.tuples(st.integers(0, 40_000), st.integers(0, 3000), st.integers(1, 3)), min_size=1, max_size=8))
@settings(max_examples=40, deadline=None)
def test_any_slices_of_a_flat_buffer(slices):
    flat = torch.arange(40_000, dtype=torch.int16)
    group = [flat[start:start + length:step] for start, length, step in slices]
    found = loaded(group)
    assert [a.tolist() for a in found] == [a.tolist() for a in group]
    taken = [set(range(s, min(s + n, 40_000), k)) for s, n, k in slices]
    for i in range(len(group)):
        for j in range(i):
            if taken[i] & taken[j]:
                assert shares(found[i], found[j]), "tensors that overlapped do not any more"


# --- objects around tensors -------------------------------------------------------------------------------------------

Pair = namedtuple("Pair", "left right")


class Custom:
    def __init__(self, **fields):
        self.__dict__.update(fields)


class Slots:
    __slots__ = ("tensor",)

    def __reduce__(self):
        return _slots, (self.tensor,)


def _slots(tensor):
    result = Slots()
    result.tensor = tensor
    return result


class Fresh:
    """Makes a new tensor each time it is pickled, as lazily gathered parameters do."""
    calls = 0

    def __reduce__(self):
        Fresh.calls += 1
        return _identity, ({"t": numbers(5000, seed="fresh") + 0, "calls": "any"},)


def _identity(x):
    return x


def test_nested_objects():
    tensor = numbers(4000)
    copy_through({"list": [tensor, (tensor, [tensor])], "pair": Pair(tensor, numbers(2000)), "custom": Custom(a=tensor, b=[1, None]),
                  "ordered": OrderedDict(x=tensor), ("tuple", 1): "key", 5: {6, 7}, "numpy": np.arange(1000.0), "bytes": b"x" * 10_000,
                  "none": None, "nan": float("nan"), "dtype": torch.bfloat16, "device": torch.device("cpu"), "size": torch.Size([2, 3]),
                  "generator": torch.get_rng_state(), "python": random.getstate(), "path": Path("/a/b")})


def test_slots_and_cycles():
    obj = Slots()
    obj.tensor = numbers(3000)
    assert bits(loaded({"s": obj})["s"].tensor) == bits(obj.tensor)
    cycle = [numbers(3000)]
    cycle.append(cycle)
    found = loaded(cycle)
    assert found[1] is found and bits(found[0]) == bits(cycle[0])


def test_objects_that_make_new_tensors_each_time_they_are_pickled():
    found = loaded({"a": Fresh(), "b": Fresh(), "plain": numbers(3000)})
    assert bits(found["a"]["t"]) == bits(found["b"]["t"]) == bits(numbers(5000, seed="fresh") + 0)
    many = loaded([Fresh() for _ in range(50)])
    assert all(bits(one["t"]) == bits(many[0]["t"]) for one in many)


class Moving:
    """Pickles another window of one buffer each time, as ring buffers and lazily made views do."""

    def __init__(self, step):
        self.base, self.at, self.step = numbers(100_000, seed="moving"), 50_000, step

    def __reduce__(self):
        self.at += self.step
        return _identity, ({"t": self.base[self.at:self.at + 1000], "at": self.at},)


@pytest.mark.parametrize("step", [10, -10, 20_000, -20_000])
def test_objects_that_show_another_part_of_a_storage_each_time(step):
    moving = Moving(step)
    found = loaded({"m": moving, "plain": numbers(3000)})["m"]
    assert bits(found["t"]) == bits(moving.base[found["at"]:found["at"] + 1000])


def test_pickle_errors_are_raised_before_anything_is_written():
    buffer = io.BytesIO()
    with pytest.raises((AttributeError, pickle.PicklingError)):
        save({"x": numbers(3000), "f": lambda: 1}, buffer, PLAIN)
    assert buffer.getvalue() == b""


def test_optimizer_and_module_state():
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.BatchNorm1d(64), torch.nn.Embedding(10, 64))
    optimizer = torch.optim.AdamW(list(model[0].parameters()) + list(model[1].parameters()))
    for _ in range(2):
        model[1](model[0](numbers(32, 64))).square().sum().backward()
        optimizer.step()
    found = copy_through({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": 2})
    again = copy.deepcopy(model)
    again.load_state_dict(found["model"])
    torch.optim.AdamW(list(again[0].parameters()) + list(again[1].parameters())).load_state_dict(found["optimizer"])
    assert [bits(p) for p in again.parameters()] == [bits(p) for p in model.parameters()]


def test_whole_modules():
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 64))
    model[2].weight = model[0].weight
    found = loaded(model)
    assert found[0].weight is found[2].weight
    assert [bits(p) for p in found.parameters()] == [bits(p) for p in model.parameters()]
    x = numbers(3, 64)
    assert bits(found(x)) == bits(model(x))


LEAVES = st.one_of(
    st.none(), st.integers(), st.floats(), st.text(max_size=5),
    st.builds(lambda dtype, shape, seed: numbers(*shape, dtype=getattr(torch, dtype), seed=str(seed)), st.sampled_from(sorted(DTYPES)),
              st.lists(st.integers(0, 40), max_size=3), st.integers(0, 9)))
POOL = [numbers(50, 60, seed="pool").requires_grad_(), numbers(3000)]
TREES = st.recursive(
    st.one_of(LEAVES, st.sampled_from(POOL), st.sampled_from(POOL).map(lambda t: t.detach()), st.just(POOL[1]).map(lambda t: t[10:-10])),
    lambda tree: st.one_of(st.lists(tree, max_size=4), st.dictionaries(st.text(max_size=4), tree, max_size=4),
                           st.tuples(tree, tree), st.builds(Pair, tree, tree)), max_leaves=12)


@given(TREES, st.sampled_from(["deflate", "zstd", "none"]))
@settings(max_examples=60, deadline=None)
def test_any_object(tree, codec):
    copy_through(tree, {**ANY_SIZE, "codec": codec})


# --- ways to load -----------------------------------------------------------------------------------------------------

@pytest.fixture
def state():
    base = numbers(200, 200)
    return {"w": base, "row": base[5], "b": numbers(9000, dtype=torch.bfloat16), "z": torch.zeros(9000), "n": 3}


@pytest.fixture
def file(tmp_path, state):
    path = tmp_path / "state.pt"
    save(state, path, PLAIN)
    return path


@pytest.mark.parametrize("mmap", [False, True])
@pytest.mark.parametrize("weights_only", [False, True])
@pytest.mark.parametrize("location", [None, "cpu", torch.device("cpu"), {"cpu": "cpu"}, lambda storage, tag: storage,
                                      lambda storage, tag: None], ids=["none", "str", "device", "dict", "storage", "nothing"])
def test_load_arguments(file, state, mmap, weights_only, location):
    found = torch.load(file, map_location=location, mmap=mmap, weights_only=weights_only)
    alike(state, found)
    assert shares(found["w"], found["row"])
    alike(state, ds_nvcomp.load(file, map_location=location, mmap=mmap, weights_only=weights_only))


def test_load_defaults(file, state):
    alike(state, torch.load(file))
    alike(state, torch.load(str(file)))
    with open(file, "rb") as opened:
        alike(state, ds_nvcomp.load(opened))


def test_a_default_device_does_not_disturb(state):
    buffer = io.BytesIO()
    torch.save(state, buffer)
    with torch.device("meta"):  # stands for "cuda", which fresh tensors are often told to be on
        data = saved(state)
        buffer.seek(0)
        expected, found = torch.load(buffer), torch.load(io.BytesIO(data))
    alike(expected, found)


def test_load_to_meta(file, state):
    for arguments in (dict(weights_only=True), dict(weights_only=False), dict(mmap=True)):
        found = torch.load(file, map_location="meta", **arguments)
        assert all(found[k].is_meta and (found[k].shape, found[k].dtype, found[k].stride()) == (v.shape, v.dtype, v.stride())
                   for k, v in state.items() if k != "n")


def test_loaded_tensors_can_be_written_to(file):
    """Also what came from a read-only mapping."""
    for mmap in (False, True):
        found = torch.load(file, mmap=mmap)
        for tensor in (found["w"], found["b"], found["z"]):
            tensor.add_(1)


def test_torch_save_of_a_loaded_file(file, state):
    alike(state, torch_loaded(torch.load(file)))
    alike(state, loaded(torch.load(file, mmap=True)))


@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
def test_pickle_protocols(state, protocol):
    buffer = io.BytesIO()
    save(state, buffer, PLAIN, pickle_protocol=protocol)
    buffer.seek(0)
    alike(state, torch.load(buffer, weights_only=False))


# --- file objects and paths -------------------------------------------------------------------------------------------

def test_path_kinds(tmp_path, state):
    for path in (str(tmp_path / "a.pt"), tmp_path / "b.pt", tmp_path / "no_suffix", tmp_path / "two.dots.pt", tmp_path / ".hidden",
                 tmp_path / "modèle ß.pt"):
        save(state, path, PLAIN)
        alike(state, torch.load(path))


def test_file_object_that_cannot_seek(state):
    """A pipe: `save` only ever appends."""
    class Sink(io.RawIOBase):
        def __init__(self):
            self.data = bytearray()

        def writable(self):
            return True

        def write(self, data):
            self.data += data
            return len(data)

    sink = Sink()
    save(state, sink, PLAIN)
    alike(state, torch.load(io.BytesIO(bytes(sink.data))))


def test_file_object_with_short_writes(state):
    """An unbuffered file may take less than it is given, 2 GiB at most on Linux: a checkpoint must not lose the rest in silence."""
    class Short(io.RawIOBase):
        def __init__(self):
            self.data = bytearray()

        def writable(self):
            return True

        def write(self, data):
            taken = memoryview(data).cast("B")[:5000]
            self.data += taken
            return len(taken)

    sink = Short()
    try:
        save(state, sink, PLAIN)
    except Exception:
        return  # refusing such a file is an answer as well
    alike(state, torch.load(io.BytesIO(bytes(sink.data))))


def test_unbuffered_file(tmp_path, state):
    with open(tmp_path / "u.pt", "wb", buffering=0) as opened:
        save(state, opened, PLAIN)
    alike(state, torch.load(tmp_path / "u.pt"))


def test_file_object_behind_other_bytes(state):
    """As torch has it: bytes in front are kept, and the archive is read from where it begins."""
    def behind(write):
        buffer = io.BytesIO(b"x" * 100)
        buffer.seek(100)
        write(buffer)
        assert buffer.getvalue()[:100] == b"x" * 100
        return io.BytesIO(buffer.getvalue()[100:])

    alike(torch.load(behind(lambda buffer: torch.save(state, buffer))), torch.load(behind(lambda buffer: save(state, buffer, PLAIN))))


def test_report(tmp_path, state):
    done = []
    report = save(state, tmp_path / "r.pt", PLAIN, progress=done.append)
    assert report.stored_bytes == (tmp_path / "r.pt").stat().st_size
    assert report.raw_bytes == 200 * 200 * 4 + 9000 * 2 + 9000 * 4 == sum(done)
    assert 0 < report.ratio == report.stored_bytes / report.raw_bytes < 1 and report.seconds > 0
    assert save({}, tmp_path / "e.pt", PLAIN).ratio == 1.0
    raw = numbers(5000).untyped_storage()
    assert save([raw, raw], tmp_path / "s.pt", PLAIN).raw_bytes == 20_000


def test_configuration_is_checked_first(tmp_path):
    with pytest.raises(ConfigError, match="unknown key 'codek'.*'codec'"):
        save({}, tmp_path / "x.pt", {"codek": "zstd"})
    assert list(tmp_path.iterdir()) == []
    save({}, tmp_path / "x.pt", Config(fsync=False))


def test_unavailable_codec_leaves_nothing(tmp_path, state):
    if torch.cuda.is_available():
        pytest.skip("this machine may have what it takes")
    for config in ({"codec": "ans"}, {"device": "gpu"}):
        with pytest.raises(ds_nvcomp.CodecUnavailableError):
            save(state, tmp_path / "x.pt", config)
    assert list(tmp_path.iterdir()) == []


# --- replacing a file -------------------------------------------------------------------------------------------------

class Unpicklable:
    def __reduce__(self):
        raise RuntimeError("cannot be pickled")


def test_failing_save_leaves_the_old_file(tmp_path, state, monkeypatch):
    path = tmp_path / "x.pt"
    save(state, path, PLAIN)
    before = path.read_bytes()
    with pytest.raises(RuntimeError, match="cannot be pickled"):
        save({"w": numbers(3000), "bad": Unpicklable()}, path, PLAIN)
    from ds_nvcomp.archive import files

    def full(self, offset, buffers):
        if offset:
            raise OSError(28, "No space left on device")
        os.pwrite(self._fd, b"begun", 0)

    monkeypatch.setattr(files.Writer, "write_at", full)
    with pytest.raises(OSError, match="No space left"):
        save(state, path, PLAIN)
    monkeypatch.undo()
    monkeypatch.setattr(os, "replace", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt()))
    with pytest.raises(KeyboardInterrupt):
        save(state, path, PLAIN)
    assert path.read_bytes() == before and os.listdir(tmp_path) == ["x.pt"]


def test_replacing_is_one_step(tmp_path, state, monkeypatch):
    """Until the rename, the name holds the old file; the temporary one begins with a dot, out of the reach of globs, and is short."""
    path, seen = tmp_path / "x.pt", []
    save({"old": 1}, path, PLAIN)
    real = os.replace

    def replace(source, target):
        seen.append(Path(source).name)
        assert torch.load(path) == {"old": 1}
        alike(state, torch.load(source))
        real(source, target)

    monkeypatch.setattr(os, "replace", replace)
    save(state, path, PLAIN)
    assert len(seen) == 1 and seen[0].startswith(".ds_nvcomp-") and seen[0].endswith(".part")
    alike(state, torch.load(path))


def test_durable_before_it_is_renamed(tmp_path, state, monkeypatch):
    calls = []
    for name in ("fsync", "replace"):
        monkeypatch.setattr(os, name, lambda *args, name=name, real=getattr(os, name): calls.append(name) or real(*args))
    save(state, tmp_path / "x.pt", {"fsync": True})
    assert calls == ["fsync", "replace", "fsync"]
    calls.clear()
    save(state, tmp_path / "x.pt", {"fsync": False})
    assert calls == ["replace"]


@pytest.mark.parametrize("most", [1, 7, 1000, 1 << 30])
def test_file_writer_finishes_what_the_system_began(tmp_path, monkeypatch, most):
    """A short write is no error to the system: a full quota, a signal, more than 2 GiB."""
    from ds_nvcomp.archive import files
    buffers = [bytes([i % 256]) * (i % 23) for i in range(3000)]  # more than one call may take, empty ones among them
    expected, real = b"".join(buffers), os.pwritev

    def short(fd, parts, offset):
        assert 0 < len(parts) <= os.sysconf("SC_IOV_MAX") and all(len(part) for part in parts)
        return os.pwrite(fd, b"".join(parts)[:most], offset) if most < 1 << 30 else real(fd, parts, offset)

    monkeypatch.setattr(os, "pwritev", short)
    with files.Writer(tmp_path / "x", fsync=False) as file:
        file.write_at(10, buffers if most > 1 else buffers[:200])
        file.write_at(0, [b"0123456789", np.zeros(0)])
    expected = expected if most > 1 else b"".join(buffers[:200])
    assert (tmp_path / "x").read_bytes() == b"0123456789" + expected


def test_missing_directory(tmp_path, state):
    with pytest.raises(FileNotFoundError):
        save(state, tmp_path / "none" / "x.pt", PLAIN)


# --- the zip ----------------------------------------------------------------------------------------------------------

def test_zip_is_sound_and_named_as_torch_names_it(tmp_path, state):
    save(state, tmp_path / "state.pt", PLAIN)
    torch.save(state, tmp_path / "torch.pt")
    with zipfile.ZipFile(tmp_path / "state.pt") as ours, zipfile.ZipFile(tmp_path / "torch.pt") as torchs:
        assert ours.testzip() is None
        strip = lambda names, root: {name.removeprefix(root) for name in names}  # noqa: E731
        missing = strip(torchs.namelist(), "torch/") - strip(ours.namelist(), "state/")
        assert missing <= {".data/serialization_id", ".format_version", ".storage_alignment"}
        assert "state/.format_version" not in ours.namelist(), "it promises where torch.save would have put the records"
        for name in ("byteorder", "version"):
            assert ours.read(f"state/{name}") == torchs.read(f"torch/{name}")
        for entry in ours.infolist():
            assert entry.compress_type == zipfile.ZIP_STORED and entry.date_time == (1980, 1, 1, 0, 0, 0)


def test_entries_are_aligned(tmp_path, state):
    path = tmp_path / "state.pt"
    save(state, path, PLAIN)
    data = path.read_bytes()
    with zipfile.ZipFile(path) as file:
        for entry in file.infolist():
            name, extra = (int.from_bytes(data[entry.header_offset + at:entry.header_offset + at + 2], "little") for at in (26, 28))
            assert (entry.header_offset + 30 + name + extra) % 64 == 0, entry.filename


def test_same_object_same_bytes(state):
    assert saved(state) == saved(state)


def test_payload_decodes_by_the_document_alone(file, state):
    import reference_decoder
    metas = {meta["name"]: meta for meta in compressed(file.read_bytes())}
    assert set(metas) == {"w", "b", "z"}
    with zipfile.ZipFile(file) as opened:
        stored = [opened.read(name) for name in opened.namelist() if "/data/" in name]
    crc = metas["b"].pop("crc")
    assert metas["b"] == {"version": 1, "dtype": "bfloat16", "bytes": 18000, "name": "b", "by": f"ds_nvcomp {ds_nvcomp.__version__}"}
    assert {int.from_bytes(data[60:64], "little") for data in stored} == {crc, metas["w"]["crc"], metas["z"]["crc"]}
    found = {reference_decoder.decode(data) for data in stored}
    assert found == {bits(state["w"]), bits(state["b"]), bits(state["z"])}


class Sparse(io.RawIOBase):
    """What was written, without keeping the gigabytes: large buffers are one byte and a length."""

    def __init__(self):
        self.pieces, self.size, self.at = {}, 0, 0

    def write_at(self, offset, buffers):
        assert offset == self.size, "offsets only grow, without holes"
        for buffer in buffers:
            view = memoryview(buffer).cast("B")
            if view.nbytes < 1 << 20:
                self.pieces[self.size] = bytes(view)
            self.size += view.nbytes

    def seekable(self):
        return True

    def readable(self):
        return True

    def seek(self, offset, whence=0):
        self.at = offset + (0, self.at, self.size)[whence]
        return self.at

    def tell(self):
        return self.at

    def read(self, count=-1):
        stop = self.size if count < 0 else min(self.size, self.at + count)
        assert stop - self.at < 1 << 22
        data = bytearray(stop - self.at)
        for start, piece in self.pieces.items():
            low, high = max(start, self.at), min(start + len(piece), stop)
            if low < high:
                data[low - self.at:high - self.at] = piece[low - start:high - start]
        self.at = stop
        return bytes(data)


@pytest.mark.parametrize("sizes", [
    [100, (1 << 32) - 2, 100], [(1 << 32) - 1], [(1 << 32) + 5, 77], [3 << 30, 3 << 30, 50], [(1 << 32) - 1 - 64, 50], [],
], ids=["below", "at", "large entry", "large offset", "offset at", "empty"])
def test_zip64(sizes, monkeypatch):
    from ds_nvcomp.archive import container
    monkeypatch.setattr(container, "crc32", lambda part, crc=0: 0x12345678)  # 4 GiB of it would be a second each
    block = bytes(256 << 20)
    sink = Sparse()
    zipped = container.Container(sink.write_at, "root")
    starts = [zipped.add(f"data/{i}", [block] * (n // len(block)) + [memoryview(block)[:n % len(block)]]) for i, n in enumerate(sizes)]
    assert zipped.close() == (sink.size, 0x12345678)
    with zipfile.ZipFile(sink) as file:
        assert [(entry.filename, entry.file_size, entry.CRC) for entry in file.infolist()] == [
            (f"root/data/{i}", n, 0x12345678) for i, n in enumerate(sizes)]
        for entry, start, size in zip(file.infolist(), starts, sizes):
            assert start % 64 == 0
            file.open(entry).close()   # reads the local header and holds it against the directory
            sink.seek(entry.header_offset)
            local = sink.read(start - entry.header_offset)
            assert len(local) == 30 + int.from_bytes(local[26:28], "little") + int.from_bytes(local[28:30], "little")
            small = int.from_bytes(local[18:22], "little"), int.from_bytes(local[22:26], "little")
            if size >= 0xFFFFFFFF:
                assert small == (0xFFFFFFFF, 0xFFFFFFFF)
                at = 30 + int.from_bytes(local[26:28], "little")
                assert local[at:at + 20] == b"\1\0\x10\0" + 2 * size.to_bytes(8, "little")
            else:
                assert small == (size, size)


def test_zip64_many_entries():
    from ds_nvcomp.archive.container import Container
    sink = io.BytesIO()
    zipped = Container(lambda offset, buffers: [sink.write(buffer) for buffer in buffers], "r")
    for i in range(66_000):
        zipped.add(str(i), [])
    zipped.add("version", [b"3\n"])
    size, crc = zipped.close()
    assert size == len(sink.getvalue())
    with zipfile.ZipFile(sink) as file:
        assert len(file.namelist()) == 66_001
        assert crc == zipfile.crc32(sink.getvalue()[file.start_dir:])  # of the directory and what ends it
    assert torch._C.PyTorchFileReader(io.BytesIO(sink.getvalue())).has_record("65999")


def test_crc_of_an_entry_is_that_of_all_its_parts():
    from ds_nvcomp.archive.container import Container
    sink = io.BytesIO()
    zipped = Container(lambda offset, buffers: [sink.write(buffer) for buffer in buffers], "r")
    zipped.add("x", [b"abc", memoryview(np.arange(10.0)), b"", bytearray(b"def")])
    zipped.close()
    with zipfile.ZipFile(sink) as file:
        assert file.testzip() is None and file.read("r/x") == b"abc" + np.arange(10.0).tobytes() + b"def"


# --- damaged files ----------------------------------------------------------------------------------------------------

def payload_at(data: bytes, key="0") -> tuple[int, int]:
    with zipfile.ZipFile(io.BytesIO(data)) as file:
        [entry] = [entry for entry in file.infolist() if entry.filename.endswith(f"/data/{key}")]
    name, extra = (int.from_bytes(data[entry.header_offset + at:entry.header_offset + at + 2], "little") for at in (26, 28))
    return entry.header_offset + 30 + name + extra, entry.file_size


@pytest.mark.parametrize("mmap", [False, True])
def test_a_flipped_byte_names_file_tensor_and_chunk(file, mmap):
    data = bytearray(file.read_bytes())
    start, size = payload_at(bytes(data))
    data[start + size - 100] ^= 4
    file.write_bytes(data)
    with pytest.raises(ChecksumError) as caught:
        ds_nvcomp.load(file, mmap=mmap)
    assert (caught.value.path, caught.value.tensor, caught.value.chunk) == (str(file), "w", 0)
    with pytest.raises(ChecksumError):
        torch.load(file, mmap=mmap)


def test_errors_pass_through_weights_only(file):
    """torch's restricted unpickler turns errors into UnpicklingError; ours must still be found by their type."""
    data = bytearray(file.read_bytes())
    data[payload_at(bytes(data))[0] + 1] ^= 4
    file.write_bytes(data)
    for weights_only in (True, False):
        with pytest.raises(HeaderError) as caught:
            ds_nvcomp.load(file, weights_only=weights_only)
        assert caught.value.tensor == "w"


def damage(file, record, at):
    """Flip a bit of a record's byte, counted from the end where negative."""
    data = bytearray(file.read_bytes())
    with zipfile.ZipFile(file) as opened:
        [entry] = [entry for entry in opened.infolist() if entry.filename.split("/", 1)[1] == record]
    start = payload_at(bytes(data), record.removeprefix("data/")) if record.startswith("data/") else None
    if start is None:
        name, extra = (int.from_bytes(data[entry.header_offset + i:][:2], "little") for i in (26, 28))
        start = entry.header_offset + 30 + name + extra, entry.file_size
    data[start[0] + at % start[1]] ^= 1
    file.write_bytes(data)


@pytest.mark.parametrize("mmap", [False, True])
@pytest.mark.parametrize("weights_only", [True, False])
@pytest.mark.parametrize("record", ["data/3", "data.pkl", "version", "byteorder", "ds_nvcomp/seal"])
def test_what_no_payload_guards_is_sealed(tmp_path, state, record, weights_only, mmap):
    """torch.load itself checks none of these: a flipped bit in a small tensor would come back as a number."""
    file = tmp_path / "x.pt"
    for at in (0, 1, 70, -1, -2):
        save({**state, "tiny": torch.arange(9.0)}, file, PLAIN)
        torch.load(file, weights_only=weights_only, mmap=mmap)
        damage(file, record, at)
        with pytest.raises(Exception) as caught:
            torch.load(file, weights_only=weights_only, mmap=mmap)
        if record in ("data/3", "ds_nvcomp/seal"):
            assert isinstance(caught.value, ChecksumError), at


def test_every_bit_of_the_pickle_is_sealed(tmp_path, state):
    file = tmp_path / "x.pt"
    save(state, file, PLAIN)
    good = file.read_bytes()
    with zipfile.ZipFile(file) as opened:
        size = len(opened.read("x/data.pkl"))
    begun = 0
    for at in range(0, size, 3):
        file.write_bytes(good)
        damage(file, "data.pkl", at)
        with pytest.raises(Exception) as caught:
            torch.load(file, weights_only=False)
        begun += not isinstance(caught.value, ChecksumError)
    assert begun < 50, "only what comes before the check itself may fail otherwise"


def test_payloads_cannot_change_places(tmp_path):
    """Both are sound, and of the same size and dtype."""
    state = {"a": numbers(5000, dtype=torch.uint8, content="random"), "b": numbers(5000, dtype=torch.uint8, content="random", seed="b")}
    save(state, tmp_path / "x.pt", PLAIN)
    data = bytearray((tmp_path / "x.pt").read_bytes())
    (a, n), (b, m) = payload_at(bytes(data), "0"), payload_at(bytes(data), "1")
    assert n == m
    data[a:a + n], data[b:b + m] = data[b:b + m], data[a:a + n]
    with pytest.raises(ChecksumError, match="another tensor's") as caught:
        torch.load(io.BytesIO(bytes(data)))
    assert caught.value.tensor == "a"


@pytest.mark.parametrize("record,error,match", [
    (None, "ArchiveError", "'ds_nvcomp/seal' is missing"), (b'{"version":2,"records":{}}', "UnsupportedVersionError", "version 2"),
    (b'{"version":1,"records":{"data/9":[1,2]}}', "ArchiveError", "'data/9' is missing"),
    (b'{"version":1,"records":{"version":[2,5]}}', "ChecksumError", "Record 'version'")])
def test_seals_that_do_not_fit(state, record, error, match):
    import zlib
    from ds_nvcomp.archive.container import Container
    sink = io.BytesIO()
    zipped = Container(lambda offset, buffers: [sink.write(buffer) for buffer in buffers], "r")
    with zipfile.ZipFile(io.BytesIO(saved(state))) as file:
        for name in file.namelist():
            short = name.split("/", 1)[1]
            if short != "ds_nvcomp/seal":
                zipped.add(short, [file.read(name)])
            elif record is not None:
                zipped.add(short, [record + b"\n%08x" % zlib.crc32(record)])
    zipped.close()
    with pytest.raises(FormatError, match=match) as caught:
        torch.load(io.BytesIO(sink.getvalue()))
    assert type(caught.value).__name__ == error


def unpack_with(payload: bytes, meta):
    from ds_nvcomp.archive import unpack
    if isinstance(meta, dict) and meta:
        meta = {"crc": int.from_bytes(payload[60:64], "little"), **meta}
    storage = torch.frombuffer(bytearray(payload or b"\0"), dtype=torch.uint8)[:len(payload)].clone().untyped_storage()
    return unpack(torch.storage.TypedStorage(wrap_storage=storage, dtype=torch.uint8, _internal=True), meta)


GOOD_META = {"version": 1, "dtype": "bfloat16", "bytes": 200, "name": "model.w", "by": "ds_nvcomp"}


@pytest.fixture(scope="module")
def small_payload():
    from payloads import payload
    return bytes(payload("bfloat16", "normal", elements=100))


def test_unpack(small_payload):
    found = unpack_with(small_payload, GOOD_META)
    assert found.dtype is torch.bfloat16 and found._size() == 100
    assert bytes(found._untyped_storage) == make("bfloat16", "normal", 200).tobytes()
    assert bytes(unpack_with(small_payload, {**GOOD_META, "new key": 5})._untyped_storage) == bytes(found._untyped_storage)


@pytest.mark.parametrize("change,error,match", [
    ({"version": 3}, UnsupportedVersionError, "version 3.*reads versions up to 2.*Install"),
    ({"version": 2}, HeaderError, "version 2 with a link"), ({"link": "{}"}, HeaderError, "version 2 with a link"),
    ({"version": 2, "link": "{}"}, HeaderError, "is of float32"), ({"link": None}, HeaderError, "version 2 with a link"),
    ({"version": None}, HeaderError, "description"), ({"version": "1"}, HeaderError, "description"),
    ({"dtype": "float8_of_tomorrow"}, UnsupportedVersionError, "float8_of_tomorrow.*Install a newer torch"),
    ({"dtype": "nn"}, UnsupportedVersionError, "'nn'"), ({"dtype": None}, UnsupportedVersionError, "None"),
    ({"bytes": 0}, HeaderError, "0 bytes"), ({"bytes": -200}, HeaderError, "-200"), ({"bytes": 199}, HeaderError, "199"),
    ({"bytes": "200"}, HeaderError, "'200'"), ({"bytes": None}, HeaderError, "None"), ({"bytes": 200.0}, HeaderError, "200.0"),
    ({"bytes": 198}, HeaderError, "holds 200 bytes.*expects 198"), ({"bytes": 2**70}, HeaderError, "holds 200 bytes"),
    ({"crc": 5}, ChecksumError, "another tensor's"), ({"crc": None}, ChecksumError, "None"), ({"crc": "x"}, ChecksumError, "'x'"),
    ({"dtype": "float32"}, HeaderError, "split16.*float32"), ({"dtype": "int16"}, HeaderError, "split16.*int16"),
])
def test_meta_is_checked(small_payload, change, error, match):
    with pytest.raises(error, match=match) as caught:
        unpack_with(small_payload, {**GOOD_META, **change})
    assert type(caught.value) is error and caught.value.tensor == "model.w"


def test_bytes_of_meta_are_whole_elements():
    from payloads import payload
    odd = bytes(payload("uint8", "normal", elements=199))
    assert unpack_with(odd, {**GOOD_META, "dtype": "uint8", "bytes": 199})._size() == 199
    with pytest.raises(HeaderError, match="described as 199 bytes of int16"):
        unpack_with(odd, {**GOOD_META, "dtype": "int16", "bytes": 199})


@pytest.mark.parametrize("meta", [None, 5, [], {}, "meta"])
def test_meta_of_another_type(small_payload, meta):
    with pytest.raises(HeaderError, match="comes with a description"):
        unpack_with(small_payload, meta)


@pytest.mark.parametrize("length", [0, 1, 63, 64, 100])
def test_truncated_payload(small_payload, length):
    with pytest.raises(TruncatedError) as caught:
        unpack_with(small_payload[:length], GOOD_META)
    assert caught.value.tensor == "model.w"


@pytest.mark.parametrize("payload", [5, None, "payload", b"bytes"])
def test_payload_of_another_type(payload):
    from ds_nvcomp.archive import unpack
    with pytest.raises(FormatError):
        unpack(payload, GOOD_META)


def test_truncated_file_is_not_loaded(file):
    data = file.read_bytes()
    for length in (0, 10, len(data) // 2, len(data) - 1):
        file.write_bytes(data[:length])
        with pytest.raises(Exception):
            ds_nvcomp.load(file)


def test_weights_only_accepts_whichever_function_it_was_given_first():
    """torch holds the functions of a file against the values of {name: function}, and a file's first call imports `archive`: two
    functions under one name once made one process in six fail at the second compressed storage, by the order of a set."""
    import subprocess
    import sys
    script = ("import torch, ds_nvcomp; ds_nvcomp.install(); before = torch.serialization.get_safe_globals()\n"
              "import ds_nvcomp.archive\n"
              "pair = lambda e: e if isinstance(e, tuple) else (e, e.__module__ + '.' + e.__name__)\n"
              "of = lambda entries: {name: function for function, name in map(pair, entries)}\n"
              "given = [f for name, f in of(before).items() if name.startswith('ds_nvcomp.')]\n"
              "after = torch.serialization.get_safe_globals()\n"
              "print(bool(given) and all(f in of(order).values() for order in (after, after[::-1]) for f in given))")
    out = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout
    assert out.strip() == "True"


def test_without_the_package(file, tmp_path):
    """What FORMAT.md section 10 promises that others see."""
    import subprocess
    import sys
    script = ("import sys, torch; sys.modules['ds_nvcomp'] = None\n"
              f"try: torch.load({str(file)!r}, weights_only=False)\n"
              "except ModuleNotFoundError as err: print(type(err).__name__, err)\n"
              f"try: torch.load({str(file)!r})\n"
              "except Exception as err: print(type(err).__name__, 'ds_nvcomp.archive.' in str(err))\n")
    out = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=tmp_path, check=True,
                         env={**os.environ, "DS_NVCOMP_AUTOLOAD": "0"}).stdout.splitlines()
    assert out[0].startswith("ModuleNotFoundError") and "ds_nvcomp" in out[0]
    assert out[1] == "UnpicklingError True"
