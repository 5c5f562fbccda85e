"""The cut into planes is a bijection on bits, and is the one of FORMAT.md section 4."""
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from ds_nvcomp.encoding import transforms as T

ALL = list(T.BY_ID.values())
SPLITS = [t for t in ALL if t is not T.WHOLE]


def named(transforms):
    return pytest.mark.parametrize("transform", transforms, ids=lambda t: t.name)


def chunk_of(transform, data: bytes) -> np.ndarray:
    return np.frombuffer(data, np.uint8)[:len(data) // transform.width * transform.width].copy()


@named(ALL)
@given(data=st.binary(max_size=400))
@settings(max_examples=60, deadline=None)
def test_merge_undoes_split(transform, data):
    chunk = chunk_of(transform, data)
    planes = T.split(transform, chunk.copy())
    elements = len(chunk) // transform.width
    assert [len(plane) for plane in planes] == [plane.raw_bytes(elements) for plane in transform.planes]
    out = np.full(len(chunk), 0xA5, np.uint8)
    T.merge(transform, planes, out)
    assert np.array_equal(out, chunk)


@named(ALL)
@given(data=st.binary(max_size=400), absent=st.sets(st.integers(0, 2)))
@settings(max_examples=40, deadline=None)
def test_an_absent_plane_is_all_zero(transform, data, absent):
    chunk = chunk_of(transform, data)
    planes = T.split(transform, chunk.copy())
    zeroed = [np.zeros_like(plane) if p in absent else plane for p, plane in enumerate(planes)]
    expected, found = np.full(len(chunk), 0xA5, np.uint8), np.full(len(chunk), 0x5A, np.uint8)
    T.merge(transform, zeroed, expected)
    T.merge(transform, [None if p in absent else plane for p, plane in enumerate(planes)], found)
    assert np.array_equal(found, expected)


@named([T.SPLIT8, T.SPLIT16])
def test_every_bit_pattern(transform):
    chunk = np.arange(1 << 8 * transform.width, dtype=f"<u{transform.width}").view(np.uint8).copy()
    out = np.empty_like(chunk)
    T.merge(transform, T.split(transform, chunk.copy()), out)
    assert np.array_equal(out, chunk)


@pytest.mark.parametrize("transform,bits", [(T.SPLIT16, 16), (T.SPLIT32, 32), (T.SPLIT64, 64)], ids=lambda v: getattr(v, "name", v))
@given(data=st.data())
@settings(max_examples=40, deadline=None)
def test_wide_cut_is_the_documented_formula(transform, bits, data):
    value = data.draw(st.integers(0, 2**bits - 1))
    planes = T.split(transform, np.frombuffer(value.to_bytes(bits // 8, "little"), np.uint8).copy())
    t = value >> bits - 16
    assert planes[0].tolist() == [t >> 7 & 0xff]
    assert planes[1].tolist() == [t >> 8 & 0x80 | t & 0x7f]
    if bits > 16:
        assert planes[2].tobytes() == value.to_bytes(bits // 8, "little")[:-2]


@given(values=st.lists(st.integers(0, 255), max_size=33))
@settings(max_examples=60, deadline=None)
def test_nibble_cut_is_the_documented_formula(values):
    x, h = T.split(T.SPLIT8, np.array(values, np.uint8))
    for plane, cut in ((x, lambda b: b >> 3 & 0x0f), (h, lambda b: b >> 4 & 8 | b & 7)):
        nibbles = [cut(b) for b in values] + [0] * (len(values) % 2)
        assert plane.tolist() == [low | high << 4 for low, high in zip(nibbles[::2], nibbles[1::2])]


def test_bfloat16_and_float32_exponents_are_exact():
    """What the coder gets has to be the exponent, or there is nothing to compress."""
    values = np.array([1.0, -1.0, 0.5, 3.0, 2.0**-100], np.float32)
    exponents = [127, 127, 126, 128, 27]
    assert T.split(T.SPLIT32, values.view(np.uint8).copy())[0].tolist() == exponents
    assert T.split(T.SPLIT16, np.ascontiguousarray(values.view(np.uint16)[1::2]).view(np.uint8).copy())[0].tolist() == exponents


@named(SPLITS)
@given(data=st.binary(max_size=200))
@settings(max_examples=60, deadline=None)
def test_dropping_signs(transform, data):
    chunk = chunk_of(transform, data)
    elements = len(chunk) // transform.width
    bits = transform.planes[1].bits - 1
    plane = T.split(transform, chunk.copy())[1] & (0x77 if transform is T.SPLIT8 else 0x7f)
    packed = T.drop_sign(transform, plane, elements)
    assert len(packed) == transform.planes[1].unsigned_bytes(elements)
    # An independent packing: one long integer, the first element in its lowest bits.
    nibbles = np.stack([plane & 15, plane >> 4], 1).ravel()[:elements] if transform is T.SPLIT8 else plane
    stream = sum(int(v) << bits * i for i, v in enumerate(nibbles))
    assert bytes(packed) == stream.to_bytes(len(packed), "little")
    assert np.array_equal(T.restore_sign(transform, packed, elements), plane)


@named(SPLITS)
def test_restoring_ignores_padding_bits_and_sets_no_sign(transform):
    for elements in (1, 2, 3, 7, 8, 9, 15):
        packed = np.full(transform.planes[1].unsigned_bytes(elements), 0xff, np.uint8)
        plane = T.restore_sign(transform, packed, elements)
        assert len(plane) == transform.planes[1].raw_bytes(elements)
        assert not T.has_sign(transform, plane)


@named(SPLITS)
def test_has_sign_sees_any_one(transform):
    raw = np.zeros(37 * transform.width, np.uint8)
    assert not T.has_sign(transform, T.split(transform, raw)[1])
    for element in range(37):
        raw[:] = 0
        raw[(element + 1) * transform.width - 1] = 0x80
        assert T.has_sign(transform, T.split(transform, raw.copy())[1])
    assert not T.has_sign(transform, np.zeros(0, np.uint8))


def test_has_no_say_on_lower_bits():
    for transform in SPLITS:
        assert not T.has_sign(transform, np.array([0x77 if transform is T.SPLIT8 else 0x7f], np.uint8))


def test_ids_and_layouts_are_the_documented_ones():
    """They are in files: none may ever change."""
    assert {t.id: (t.name, t.width, [(p.bits, p.codable, p.has_sign) for p in t.planes]) for t in ALL} == {
        0: ("whole", 1, [(8, True, False)]),
        1: ("split8", 1, [(4, True, False), (4, False, True)]),
        2: ("split16", 2, [(8, True, False), (8, False, True)]),
        3: ("split32", 4, [(8, True, False), (8, False, True), (16, False, False)]),
        4: ("split64", 8, [(8, True, False), (8, False, True), (48, False, False)]),
    }


def test_which_dtype_goes_where():
    table = {"split8": ["float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz"],
             "split16": ["bfloat16", "float16", "complex32"], "split32": ["float32", "complex64"], "split64": ["float64", "complex128"],
             "whole": ["int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64", "bool", "quint8", "qint8", "qint32",
                       "float8_e8m0fnu", "float4_e2m1fn_x2", "a dtype of the future"]}
    for transform, names in table.items():
        for name in names:
            assert T.for_dtype(name).name == transform


@pytest.mark.parametrize("chunk_bytes", [4096, 65536, 1 << 20])
def test_elements_of_a_chunk(chunk_bytes):
    for transform in ALL:
        elements = transform.chunk_elements(chunk_bytes)
        assert transform.planes[0].raw_bytes(elements) == chunk_bytes and elements % 16 == 0
