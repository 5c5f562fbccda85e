"""What a description says of a link, read and held against what it may be; bytes from a file, and nothing is opened for them here."""
from __future__ import annotations

import json
from dataclasses import dataclass

from ..encoding.link import KINDS
from ..errors import LinkError

NAME_BYTES = 255


@dataclass(frozen=True)
class Linked:
    """The numbers of a storage are differences from weights of `kind` in `file`, which is beside the file that says so.

    `fragments` are (name of a tensor in it, first element, elements), one behind another; `crc` is the CRC-32 of all their bytes.
    """
    file: str
    kind: str
    crc: int
    fragments: list[tuple[str, int, int]]

    @property
    def count(self) -> int:
        return sum(numbers for _, _, numbers in self.fragments)


def parse(text: str, count: int) -> Linked:
    """Of a storage of `count` numbers. Raises `LinkError`."""
    try:
        found = json.loads(text)
        fragments = [(name, first, numbers) for name, first, numbers in found["fragments"]]
        linked = Linked(found["file"], found["kind"], found["crc"], fragments)
        sound = _is_name(linked.file) and linked.kind in KINDS and type(linked.crc) is int and 0 <= linked.crc < 1 << 32 and fragments and \
            all(type(name) is str and type(first) is type(numbers) is int and 0 <= first < 1 << 62 and 0 < numbers <= count
                for name, first, numbers in fragments) and linked.count <= count
    except (ValueError, KeyError, TypeError, RecursionError):
        sound = False
    if not sound:
        raise LinkError(f"The link {str(text)[:200]!r} is not what ds_nvcomp writes. The file is damaged; restore it from a copy.")
    return linked


def _is_name(file) -> bool:
    """Whether it names a file in a directory, and nothing outside of it on any system."""
    return type(file) is str and file not in ("", ".", "..") and len(file.encode("utf-8", "surrogatepass")) <= NAME_BYTES and \
        not any(c in "/\\" or c < " " or "\ud800" <= c < "\ue000" for c in file)
