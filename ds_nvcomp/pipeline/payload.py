"""What goes into and comes out of a pipeline."""
from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Sequence

import numpy as np
from isal.isal_zlib import crc32

from ..encoding import checksums, format
from ..encoding.codecs import CodecId
from ..encoding.transforms import Transform


@dataclass(frozen=True)
class Source:
    """Bytes to encode: `data` is a uint8 [bytes] torch tensor on any device, a whole number of the transform's elements.

    With `weights`, fp32 data are encoded as their difference from those.
    """
    data: "torch.Tensor"  # noqa: F821
    transform: Transform
    name: str = ""
    weights: "Weights | None" = None

    @property
    def elements(self) -> int:
        return self.data.numel() // self.transform.width

    def on_host(self) -> "Source":
        return replace(self, data=self.data.cpu(), weights=self.weights and self.weights.to("cpu"))


@dataclass(frozen=True)
class Weights:
    """16-bit weights, one for each of the first elements of something: uint8 [2 k], of a `kind` in `link.KINDS`, on any device."""
    data: "torch.Tensor"  # noqa: F821
    kind: str

    def part(self, begin: int, end: int) -> "torch.Tensor":  # noqa: F821
        """Those of the fp32 bytes [`begin`, `end`)."""
        return self.data[begin // 2:end // 2]

    def to(self, device) -> "Weights":
        return replace(self, data=self.data.to(device))


@dataclass(frozen=True)
class Payload:
    """An encoded storage: buffers on the host that follow one another in the file."""
    header: format.Header
    table: format.Table
    parts: Sequence

    @property
    def nbytes(self) -> int:
        return self.header.data_start + self.header.data_bytes

    @property
    def crc(self) -> int:
        """The checksum that ends the header."""
        return int.from_bytes(self.parts[0][format.HEADER.size - 4:format.HEADER.size], "little")

    def checksum(self) -> int:
        """CRC-32 of the whole payload, from those of its chunks: its bytes need not be read for it."""
        crcs = np.concatenate([[crc32(self.parts[0])], self.table.crc]).astype(np.uint32)
        return checksums.join(crcs, np.concatenate([[len(self.parts[0])], self.table.chunk_bytes]))

    @classmethod
    def assemble(cls, source: Source, codec: CodecId, chunk_elements: int, table: format.Table, data: Sequence) -> "Payload":
        header = format.Header(source.transform, codec.number, codec.revision, chunk_elements, source.elements,
                               int(table.chunk_bytes.sum()))
        return cls(header, table, [format.preamble(header, table), *data])


def chunk_elements(transform: Transform, codec: CodecId, chunk_bytes: int) -> int:
    return transform.chunk_elements(chunk_bytes or codec.chunk_bytes)
