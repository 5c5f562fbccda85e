"""Every codec with a CPU implementation, on the CPU, and the reference decoder against it."""
import numpy as np
import pytest
import torch

from conformance import CPU_CODECS, Conformance, in_order, reference
from ds_nvcomp.encoding import codecs
from ds_nvcomp.errors import CodecUnavailableError
from ds_nvcomp.pipeline import cpu, parse_payload


def cpu_decode(payload):
    header, table, codec = parse_payload(torch.from_numpy(payload.copy()))
    out = np.full(header.raw_bytes, 0xA5, np.uint8)  # not zeros: a decoder that leaves bytes out must not pass by luck
    cpu.decode(payload, header, table, codec, out)
    return out


class CpuConformance(Conformance):
    def encode(self, sources, config, *progress):
        return in_order(cpu.encode(sources, config, *progress))

    def decoders(self):
        return {"cpu": cpu_decode, "reference": reference}


class TestNone(CpuConformance):
    codec = "none"


class TestDeflate(CpuConformance):
    codec = "deflate"


class TestZstd(CpuConformance):
    codec = "zstd"


class TestLz4(CpuConformance):
    codec = "lz4"


class TestSnappy(CpuConformance):
    codec = "snappy"


def test_every_cpu_codec_has_its_class():
    assert {kind.codec for kind in CpuConformance.__subclasses__()} == set(CPU_CODECS)


@pytest.mark.parametrize("name", [name for name in codecs.BY_NAME if name not in CPU_CODECS])
def test_gpu_only_codecs_say_so(name):
    with pytest.raises(CodecUnavailableError, match=f"'{name}'.*GPU.*ds-nvcomp pack --codec deflate"):
        codecs.cpu(codecs.BY_NAME[name])
