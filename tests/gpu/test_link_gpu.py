"""Links on the GPU: the bytes that the CPU makes, from data and weights on either side."""
import pytest
import torch
from isal.isal_zlib import crc32

from conformance import gpu_or_skip

gpu_or_skip()

from ds_nvcomp.archive.link import Link  # noqa: E402
from ds_nvcomp.archive.writer import write  # noqa: E402
from ds_nvcomp.config import Config  # noqa: E402
from ds_nvcomp.encoding import link as arithmetic, transforms  # noqa: E402
from ds_nvcomp.pipeline import Source, Weights, encode, link  # noqa: E402

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}


def raw(tensor):
    return tensor.reshape(-1).view(torch.uint8)


def numbers(count):
    """Of all kinds: what a step may leave, and any bits at all."""
    generator = torch.Generator().manual_seed(11)
    some = torch.randn(count, generator=generator) * 0.02
    some[: count // 3] = torch.randint(-2 ** 31, 2 ** 31 - 1, (count // 3,), generator=generator, dtype=torch.int32).view(torch.float32)
    return some


def payload_bytes(source, **config):
    (_, payload), = encode([source], Config(**config))
    return b"".join(bytes(memoryview(part).cast("B")) for part in payload.parts)


@pytest.mark.parametrize("kind", arithmetic.KINDS)
@pytest.mark.parametrize("count, covered", [(1_000_003, 1_000_003), (1_000_003, 700_001), (65_536, 0), (5, 5), (3_000_000, 2_999_999)])
@pytest.mark.parametrize("data_on, weights_on", [("cuda", "cuda"), ("cpu", "cuda"), ("cuda", "cpu")])
def test_the_bytes_that_the_cpu_makes(kind, count, covered, data_on, weights_on):
    master = numbers(count)
    weights = Weights(raw(master.to(DTYPES[kind]))[:2 * covered], kind)
    there = Source(raw(master).to(data_on), transforms.SPLIT32, "w", weights.to(weights_on))
    # Uncoded, so that no codec's choices are compared.
    assert payload_bytes(there, codec="none", device="gpu", gpu_memory=64 << 20) == \
        payload_bytes(Source(raw(master), transforms.SPLIT32, "w", weights), codec="none", device="cpu")


@pytest.mark.parametrize("kind", arithmetic.KINDS)
@pytest.mark.parametrize("count, covered", [(1_000_003, 1_000_003), (1_000_003, 700_001), (1, 1), (4097, 0)])
def test_restore(kind, count, covered):
    master = numbers(count)
    weights = Weights(raw(master.to(DTYPES[kind]))[:2 * covered], kind)
    data = torch.from_numpy(arithmetic.difference(raw(master).numpy(), weights.data.numpy(), kind)).cuda()
    link.restore(data, weights.to("cuda"))
    assert torch.equal(data.cpu(), raw(master))


@pytest.mark.parametrize("nbytes, start", [(0, 0), (2, 0), (16, 0), (1 << 20, 0), (3_000_002, 0), (3_000_002, 2), ((5 << 20) + 34, 16)])
def test_digest(nbytes, start):
    data = torch.randint(0, 256, (start + nbytes,), dtype=torch.uint8)[start:]
    assert link.digest(data.cuda()) == crc32(data.numpy())
    shifted = torch.zeros(start + nbytes, dtype=torch.uint8, device="cuda")[start:]
    shifted.copy_(data)
    assert link.digest(shifted) == crc32(data.numpy())


@pytest.mark.parametrize("codec", ["deflate", "ans", "zstd"])
@pytest.mark.parametrize("where", ["cuda", "cpu"])
def test_files(tmp_path, codec, where):
    master = (torch.randn(9_000_001) * 0.02).cuda()
    weights = master.bfloat16()
    config = Config(codec=codec)
    write({"module": {"a": weights[:4_000_000], "b": weights[4_000_000:9_000_000].view(5000, 1000)}}, tmp_path / "m.pt", config, root="m")
    linked = Link(Weights(raw(weights)[:18_000_000], "bfloat16"), "m.pt", [("module.a", 0, 4_000_000), ("module.b", 0, 5_000_000)])
    report = write({"fp32": master}, tmp_path / "o.pt", config, root="o", links={master.data_ptr(): linked})
    assert report.ratio < 0.53
    found = torch.load(tmp_path / "o.pt", map_location=where)["fp32"]
    assert found.device.type == where and torch.equal(raw(found).cpu(), raw(master).cpu())
