"""Make golden files, once: `PYTHONPATH=.:tests python tests/golden/make.py [codec ... | links]`.

Golden files are what format version 1 looked like when it was released. Readers have to take them (or refuse them, those in `invalid`) for
ever, so this script only ever adds files: it refuses to write one that exists, and the tests never run it. A failing golden test is
a broken reader, not an old golden file.

`index.json` has for each file its own SHA-256, and either the SHA-256 of the bytes it decodes to with the recipe that made them, or
the error that it must be refused with. Codecs that need a GPU are only made where they are named and there is one.
"""
import hashlib
import io
import json
import sys
import tempfile
import zlib
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch

from conformance import CPU_CODECS, DTYPES, in_order, joined, make
from ds_nvcomp.archive import save
from ds_nvcomp.encoding import codecs, transforms
from ds_nvcomp.pipeline import Source

HERE = Path(__file__).resolve().parent
CHUNK = 256  # bytes of coded plane: below what the configuration allows a writer, not below what the format does; it keeps files small
RECIPE = [["normal", 256], ["squared", 256], ["zero", 256], ["special", 256], ["constant", 256], ["normal", 33]]
STATE = {"weight": ["float32", "normal", 1200], "half": ["bfloat16", "normal", 1500], "square": ["float32", "squared", 800],
         "ids": ["int64", "normal", 150], "untouched": ["float32", "zero", 4000], "tiny": ["float32", "special", 5]}


def raw_bytes(dtype, recipe, seed="golden") -> np.ndarray:
    """What a recipe of [content, elements] makes: `elements` of the transform each, one segment after the other."""
    width = transforms.for_dtype(dtype).width
    scale = 2 if dtype.startswith("float8") else 1  # two exponents to a byte: as many chunks as the other dtypes have
    return np.concatenate([make(dtype, content, elements * scale * width, f"{seed} {i}") for i, (content, elements) in enumerate(recipe)])


def state():
    """A small checkpoint with what torch.save keeps: shared storages, a parameter, attributes, order and strides."""
    made = {name: torch.from_numpy(make(dtype, content, n * getattr(torch, dtype).itemsize, "golden").copy()).view(getattr(torch, dtype))
            for name, (dtype, content, n) in STATE.items()}
    weight = torch.nn.Parameter(made["weight"].reshape(30, 40))
    weight.ds_id = 7
    return {"weight": weight, "tied": weight, "row": weight.data[3], "transposed": weight.data.T,
            **{name: tensor for name, tensor in made.items() if name != "weight"}, "nested": [{"step": 12, "half": made["half"][100:200]}]}


def sha(data) -> str:
    return hashlib.sha256(bytes(data)).hexdigest()


def encode(codec, dtype) -> bytes:
    source = Source(torch.from_numpy(raw_bytes(dtype, RECIPE)), transforms.for_dtype(dtype))
    config = SimpleNamespace(codec=codec, chunk_bytes=CHUNK, threads=1, verify="encode", verifies=True, gpu_memory=32 << 20)
    if codec in CPU_CODECS:
        from ds_nvcomp.pipeline import cpu as pipeline
    else:
        from ds_nvcomp.pipeline import gpu as pipeline
    return joined(in_order(pipeline.encode([source], config))[0]).tobytes()


def invalid(base: bytearray):
    """(name, bytes, error, step of FORMAT.md section 8); the base is a valid deflate payload of bfloat16 with several chunks."""
    import payloads as p
    table_end, (first, *_, last) = p.table_of(base)[3], p.spans(base)
    flip = lambda at: bytes(base[:at]) + bytes([base[at] ^ 0x10]) + bytes(base[at + 1:])  # noqa: E731
    liar = bytearray(base)
    liar[first[0]:first[0] + 16] = b"\xff" * 16
    yield "truncated-header", base[:63], "TruncatedError", 1
    yield "magic", p.put(base, magic=b"DSNVCOMX"), "HeaderError", 2
    yield "version-2", p.put(base, version=2), "UnsupportedVersionError", 3
    yield "header-checksum", flip(26), "HeaderError", 4
    yield "feature", p.put(base, features=0x8000), "UnsupportedVersionError", 5
    yield "transform", p.put(base, transform=9), "UnsupportedVersionError", 6
    yield "planes", p.put(base, planes=3), "HeaderError", 7
    yield "chunk-elements-0", p.put(base, chunk_elements=0), "HeaderError", 8
    yield "chunk-elements-24", p.put(base, chunk_elements=24), "HeaderError", 8
    yield "chunk-elements-large", p.put(base, chunk_elements=1 << 22), "HeaderError", 8
    yield "chunks", p.put(base, chunks=p.get(base, "chunks") + 1), "HeaderError", 9
    yield "elements-enormous", p.put(base, elements=2**64 - 1), "HeaderError", 9
    yield "truncated-data", base[:-16], "TruncatedError", 10
    yield "announces-exabytes", p.put(base, elements=2**60, chunks=2**60 // p.get(base, "chunk_elements")), "TruncatedError", 10
    yield "bytes-behind", bytes(base) + bytes(16), "HeaderError", 11
    yield "codec", p.put(base, codec=77), "UnsupportedVersionError", 12
    yield "revision", p.put(base, codec=16, revision=5), "UnsupportedVersionError", 12
    yield "table-checksum", flip(table_end - 1), "TableError", 13
    yield "table-padding", bytes(base[:table_end]) + b"\1" + bytes(base[table_end + 1:]), "TableError", 14
    yield "mode-unknown", p.change_table(base, mode=[(0, 0, 9)]), "TableError", 15
    yield "mode-not-for-plane", p.change_table(base, mode=[(1, 0, 2)], size=[(1, 0, 9)]), "TableError", 15
    yield "size-of-mode", p.change_table(base, size=[(1, 0, 255)]), "TableError", 15
    yield "size-enormous", p.change_table(base, size=[(0, 0, 2**32 - 1)]), "TableError", 15
    zero = next(c for c, at in enumerate(p.table_of(base)[2][0]) if base[at] == 0)
    yield "decoded-stray", p.change_table(base, decoded=[(zero, 0xCBF43926)]), "TableError", 16
    yield "sum-of-sizes", p.put(bytes(base) + bytes(16), data_bytes=p.get(base, "data_bytes") + 16), "TableError", 17
    yield "coded-by-none", p.put(base, codec=0), "TableError", 18
    yield "data-bit", flip(first[0] + 5), "ChecksumError", 21
    yield "data-last-byte", flip(last[1] - 1), "ChecksumError", 21
    yield "stream-refused", p.reseal_chunk(liar, 0), "DecodeError", 22
    short = zlib.compressobj(9, zlib.DEFLATED, -15)
    stream = short.compress(bytes(100)) + short.flush()
    short = p.change_table(base, size=[(0, 0, len(stream))])
    padded = stream.ljust(-(-len(stream) // 16) * 16, b"\0")
    before = -(-int.from_bytes(base[p.table_of(base)[1][0][0]:][:4], "little") // 16) * 16
    short[first[0]:first[0] + before] = padded
    short = p.put(short, data_bytes=p.get(base, "data_bytes") + len(padded) - before)
    yield "stream-short", p.reseal_chunk(short, 0), "DecodeError", 22
    assert base[p.table_of(base)[2][0][0]] == 2
    crc = int.from_bytes(base[p.decoded_of(base)[0]:][:4], "little")
    yield "decoded-wrong", p.change_table(base, decoded=[(0, crc ^ 1)]), "DecodeError", 23
    yield "decoded-missing", p.change_table(base, decoded=[(0, 0)]), "DecodeError", 23


MODEL, OPTIMIZER = "mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_optim_states.pt"
MASTER, PADDING, CUT = ["float32", [["normal", 2000], ["special", 200]]], 8, 1500  # elements; `CUT` are in the first of two tensors


def linked_state(kind, seed="golden"):
    """(model, optimizer) with fp32 weights, some padding behind them, and what they are rounded to."""
    master = torch.from_numpy(np.concatenate([raw_bytes(*MASTER, seed), np.zeros(4 * PADDING, np.uint8)])).view(torch.float32)
    flat = master[:-PADDING].to(getattr(torch, kind))
    return ({"module": {"first": torch.nn.Parameter(flat[:CUT].view(-1, 50)), "second": flat[CUT:]}, "fp32": master[:100].clone()},
            {"optimizer_state_dict": {"single_partition_of_fp32_groups": [master]}})


def linked_file(kind, change=lambda meta: meta) -> bytes:
    """The optimizer file, in which `change` has made of the description what it is."""
    from ds_nvcomp.archive import writer
    from ds_nvcomp.archive.link import Link
    from ds_nvcomp.pipeline import Weights
    model, optimizer = linked_state(kind)
    [master] = optimizer["optimizer_state_dict"]["single_partition_of_fp32_groups"]
    flat = torch.cat([tensor.detach().reshape(-1) for tensor in model["module"].values()])
    fragments = [("module.first", 0, CUT), ("module.second", 0, len(flat) - CUT)]
    links = {master.data_ptr(): Link(Weights(flat.view(torch.uint8), kind), MODEL, fragments)}
    original, fits = writer.describe, Link.fits
    writer.describe, Link.fits = (lambda *args: change(original(*args))), lambda *args: True  # random bits, too
    try:
        with tempfile.TemporaryDirectory() as folder:
            writer.write(optimizer, Path(folder) / "x", small(), root=Path(OPTIMIZER).stem, links=links)
            return (Path(folder) / "x").read_bytes()
    finally:
        writer.describe, Link.fits = original, fits


def small():
    from ds_nvcomp.config import Config
    config = Config(min_bytes=512, device="cpu", fsync=False)
    object.__setattr__(config, "chunk_bytes", CHUNK)
    return config


def links():
    """(name, bytes, entry) of pairs, and of files that are to be refused beside the model file of the first pair: `step` is the row of
    FORMAT.md section 9.2."""
    for kind in ("bfloat16", "float16"):
        model, optimizer = linked_state(kind)
        file = io.BytesIO()
        save(model, file, small())
        yield f"{kind}/{MODEL}", file.getvalue(), dict(part="model")
        [master] = optimizer["optimizer_state_dict"]["single_partition_of_fp32_groups"]
        yield f"{kind}/{OPTIMIZER}", linked_file(kind), dict(kind=kind, master=MASTER, padding=PADDING,
                                                             decodes_to=sha(master.view(torch.uint8).numpy()))
    model, other = io.BytesIO(), io.BytesIO()
    save(linked_state("bfloat16")[0], model, small())
    save(linked_state("bfloat16", "other")[0], other, small())
    yield "bfloat16/other_model_states.pt", other.getvalue(), dict(part="model")
    damaged = bytearray(model.getvalue())
    damaged[damaged.index(b"DSNVCOMP") + 1500] ^= 1  # in a chunk of the first payload
    yield "bfloat16/damaged_model_states.pt", bytes(damaged), dict(part="model")
    said = lambda **change: lambda meta: {**meta, **change}  # noqa: E731

    def linked(**change):
        return lambda meta: {**meta, "link": json.dumps({**json.loads(meta["link"]), **change}, separators=(",", ":"))}

    for name, change, error, step in (
            ("version-3", said(version=3), "UnsupportedVersionError", 1),
            ("version-1", said(version=1), "HeaderError", 2),
            ("no-link", lambda meta: {key: value for key, value in meta.items() if key != "link"}, "HeaderError", 2),
            ("no-string", said(link=5), "HeaderError", 2),
            ("int32", said(dtype="int32"), "HeaderError", 2),
            ("no-json", said(link="{"), "LinkError", 4),
            ("no-object", said(link="[]"), "LinkError", 4),
            ("deep", said(link="[" * 5000), "LinkError", 4),
            ("file-outside", linked(file=f"../bfloat16/{MODEL}"), "LinkError", 4),
            ("file-absolute", linked(file="/dev/zero"), "LinkError", 4),
            ("file-dots", linked(file=".."), "LinkError", 4),
            ("kind", linked(kind="float32"), "LinkError", 4),
            ("crc-negative", linked(crc=-1), "LinkError", 4),
            ("crc-wide", linked(crc=1 << 32), "LinkError", 4),
            ("no-fragments", linked(fragments=[]), "LinkError", 4),
            ("fragment-first", linked(fragments=[["module.first", -1, 5]]), "LinkError", 4),
            ("fragment-float", linked(fragments=[["module.first", 0.0, 5]]), "LinkError", 4),
            ("fragment-of-nothing", linked(fragments=[["module.first", 0, 0]]), "LinkError", 4),
            ("fragments-beyond", linked(fragments=[["module.first", 0, 1500]] * 2), "LinkError", 4),
            ("missing", linked(file="no_model_states.pt"), "LinkError", 5),
            ("damaged", linked(file="damaged_model_states.pt"), "LinkError", 6),
            ("no-name", linked(fragments=[["module.third", 0, 5]]), "LinkError", 7),
            ("another-dtype", linked(fragments=[["fp32", 0, 5]]), "LinkError", 7),
            ("over-the-end", linked(fragments=[["module.second", 690, 11]]), "LinkError", 7),
            ("linked", linked(file="linked-linked.pt", fragments=[["optimizer_state_dict.single_partition_of_fp32_groups.0", 0, 5]]),
             "LinkError", 7),
            ("other", linked(file="other_model_states.pt"), "LinkError", 8),
            ("crc", lambda meta: linked(crc=json.loads(meta["link"])["crc"] ^ 1)(meta), "LinkError", 8)):
        yield f"bfloat16/linked-{name}.pt", linked_file("bfloat16", change), dict(error=error, step=step)


def add(index, name, data, **entry):
    path = HERE / name
    assert len(data) < 20 << 10, f"{name} has {len(data)} bytes"
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "xb") as file:  # x: never over an existing one
        file.write(data)
    index[name] = {"sha256": sha(data), **entry}


def main(names):
    at = HERE / "index.json"
    index = json.loads(at.read_text()) if at.exists() else {}
    if "links" in names:
        for name, data, entry in links():
            add(index, f"links/{name}", data, **entry)
    for codec in [name for name in names if name != "links"]:
        for dtype in DTYPES:
            add(index, f"valid/{codec}-{dtype}.payload", encode(codec, dtype), codec=codec, dtype=dtype, recipe=RECIPE,
                decodes_to=sha(raw_bytes(dtype, RECIPE)))
        if codecs.BY_NAME[codec].cpu or codec == "none":
            file = io.BytesIO()
            save(state(), file, {"codec": codec, "min_bytes": 512, "device": "cpu"})
            add(index, f"archive/{codec}.pt", file.getvalue(), codec=codec, state=STATE,
                decodes_to={name: sha(tensor.detach().contiguous().view(torch.uint8).numpy()) for name, tensor in state().items()
                            if isinstance(tensor, torch.Tensor)})
    if not (HERE / "invalid").exists():
        for name, data, error, step in invalid(bytearray(encode("deflate", "bfloat16"))):
            add(index, f"invalid/{name}.payload", bytes(data), error=error, step=step)
    at.write_text(json.dumps(index, indent=1, sort_keys=True) + "\n")
    print(f"{len(index)} golden files")


if __name__ == "__main__":
    main(sys.argv[1:] or CPU_CODECS)
