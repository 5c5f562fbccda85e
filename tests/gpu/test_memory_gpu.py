"""Too little GPU memory: smaller tiles, then the CPU, then an error that says so; and nothing is kept afterwards."""
import numpy as np
import pytest
import torch

from conformance import gpu_or_skip, in_order, joined

gpu_or_skip()

from ds_nvcomp.config import Config  # noqa: E402
from ds_nvcomp.encoding import transforms  # noqa: E402
from ds_nvcomp.errors import EncodeError  # noqa: E402
from ds_nvcomp.pipeline import Source, cpu, gpu, parse_payload  # noqa: E402

MIB = 1 << 20
DEVICE = torch.device("cuda", torch.cuda.current_device())


@pytest.fixture
def room():
    """`room(nbytes)` leaves torch that much GPU memory beyond what it has in use now."""
    _, total = torch.cuda.mem_get_info()

    def leave(nbytes):
        torch.cuda.empty_cache()
        torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + nbytes) / total)

    yield leave
    torch.cuda.set_per_process_memory_fraction(1.0)
    torch.cuda.empty_cache()


@pytest.fixture(scope="module")
def source():
    generator = torch.Generator(DEVICE).manual_seed(1)
    data = torch.randn(64 << 20, generator=generator, device=DEVICE)
    return Source(data.view(torch.uint8), transforms.for_dtype("float32"), "weights")


def same(source, payload):
    data = torch.from_numpy(joined(payload)).to(DEVICE)
    return torch.equal(gpu.decode(data, *parse_payload(data)), source.data)


@pytest.mark.parametrize("codec", ["deflate", "ans"])
def test_smaller_tiles(codec, source, room, caplog):
    in_order(gpu.encode([source], Config(codec=codec, gpu_memory=32 * MIB)))  # what nvCOMP and the streams keep is there before
    before = torch.cuda.memory_allocated()
    room(160 * MIB)
    with pytest.raises(torch.OutOfMemoryError):
        torch.empty(512 * MIB, dtype=torch.uint8, device=DEVICE)
    [payload] = in_order(gpu.encode([source], Config(codec=codec, gpu_memory=512 * MIB)))
    assert "trying with 128 MiB" in caplog.text and "on the CPU" not in caplog.text
    assert torch.cuda.memory_allocated() == before
    room(1 << 30)
    assert same(source, payload)


def test_the_cpu_at_last(source, room, caplog):
    room(4 * MIB)
    [payload] = in_order(gpu.encode([source], Config(codec="deflate", gpu_memory=64 * MIB)))
    assert "encoding on the CPU" in caplog.text
    out = np.empty(payload.header.raw_bytes, np.uint8)
    cpu.decode(joined(payload), *parse_payload(torch.from_numpy(joined(payload))), out)
    assert np.array_equal(out, source.data.cpu().numpy())


def test_an_error_where_only_the_gpu_can(source, room):
    room(4 * MIB)
    before = torch.cuda.memory_allocated()
    with pytest.raises(EncodeError, match="weights") as caught:
        in_order(gpu.encode([source], Config(codec="ans", gpu_memory=64 * MIB)))
    assert "deflate" in str(caught.value)
    del caught
    assert torch.cuda.memory_allocated() == before


@pytest.mark.parametrize("fails", ["split", "pack", "checksum"])
def test_out_of_memory_in_the_middle(fails, source, room, monkeypatch, caplog):
    """The third tile finds no memory: what is in flight is waited for, the attempt is dropped, and the next one is right."""
    real, calls = getattr(gpu.kernels, fails), []

    def sometimes(*args):
        calls.append(1)
        if len(calls) == 3:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 B")
        real(*args)

    before = torch.cuda.memory_allocated()
    monkeypatch.setattr(gpu.kernels, fails, sometimes)
    [payload] = in_order(gpu.encode([source], Config(codec="deflate", gpu_memory=128 * MIB)))
    monkeypatch.undo()
    assert "trying with 32 MiB" in caplog.text
    assert torch.cuda.memory_allocated() == before
    assert same(source, payload)
