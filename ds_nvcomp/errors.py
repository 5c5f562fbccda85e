"""Every error this package raises, as one tree; catch `DsNvcompError` for all of them.

    DsNvcompError
    ├── ConfigError                 a configuration key or value is wrong               (also a ValueError)
    ├── CodecUnavailableError       this machine or environment lacks what a codec needs (also a RuntimeError)
    │   └── UntrustedCodecError     the only decoder of a codec is not safe on bytes from a stranger
    ├── NotEnoughMemoryError        a file announces more than the memory that is available   (also a MemoryError)
    ├── EncodeError                 a tensor could not be encoded
    ├── FormatError                 bytes that were read are not what FORMAT.md says     (also a ValueError)
    │   ├── TruncatedError          fewer bytes than the file itself announces
    │   ├── HeaderError             the payload header is damaged or contradicts itself
    │   ├── UnsupportedVersionError written by a newer version, or with an unknown feature, transform or codec
    │   ├── TableError              the chunk table is damaged or contradicts the header
    │   ├── ChecksumError           stored bytes of a chunk or record are not the ones that were written
    │   ├── DecodeError             a decoder refused a chunk, or gave another length than announced
    │   ├── LinkError               weights that a file refers to are not beside it, or are others
    │   └── ArchiveError            the zip container or the pickle inside it is damaged
    └── CheckpointError             a checkpoint directory could not be written or read
        ├── SaveError               a rank could not save; names the rank, the path and the cause
        ├── CommitError             the ranks did not all complete their save; the previous checkpoint is current
        ├── UnsupportedSetupError   the host is configured in a way whose state would escape the checkpoint
        └── DirectoryError          a path is not the checkpoint it should be, or is in the way

An error says what is wrong, where (`path`, `tensor`, `chunk`, `rank` where known), what was expected against what was found,
and what to do about it.
"""
from __future__ import annotations

__all__ = [
    "DsNvcompError", "ConfigError", "CodecUnavailableError", "UntrustedCodecError", "NotEnoughMemoryError", "EncodeError",
    "FormatError", "TruncatedError", "HeaderError", "UnsupportedVersionError", "TableError", "ChecksumError", "DecodeError",
    "LinkError", "ArchiveError", "CheckpointError", "SaveError", "CommitError", "UnsupportedSetupError", "DirectoryError",
]


class DsNvcompError(Exception):
    """Base class. `path`, `tensor`, `chunk` and `rank` say where, and are None where that is not known (yet)."""

    def __init__(self, message: str, *, path: str | None = None, tensor: str | None = None, chunk: int | None = None,
                 rank: int | None = None):
        super().__init__(message)
        self.message, self.path, self.tensor, self.chunk, self.rank = message, path, tensor, chunk, rank

    def at(self, **where) -> "DsNvcompError":
        """Fill in what an outer layer knows (`path=`, `tensor=`, `chunk=`, `rank=`); what is already known stays. A tensor
        that is saved by itself has the name "" until somebody knows a better one."""
        for field, value in where.items():
            if getattr(self, field) in (None, ""):
                setattr(self, field, value)
        return self

    def __str__(self) -> str:
        where = [f"{field} {value!r}" if isinstance(value, str) else f"{field} {value}"
                 for field in ("path", "tensor", "chunk", "rank") if (value := getattr(self, field)) is not None]
        return f"{self.message} [{', '.join(where)}]" if where else self.message

    def __reduce__(self):  # keyword fields survive the trip between processes
        where = {field: getattr(self, field) for field in ("path", "tensor", "chunk", "rank")}
        return _rebuild, (type(self), self.message, where)


def _rebuild(kind, message, where):
    return kind(message, **where)


class ConfigError(DsNvcompError, ValueError):
    pass


class CodecUnavailableError(DsNvcompError, RuntimeError):
    pass


class UntrustedCodecError(CodecUnavailableError):
    pass


class NotEnoughMemoryError(DsNvcompError, MemoryError):
    pass


class EncodeError(DsNvcompError):
    pass


class FormatError(DsNvcompError, ValueError):
    pass


class TruncatedError(FormatError):
    pass


class HeaderError(FormatError):
    pass


class UnsupportedVersionError(FormatError):
    pass


class TableError(FormatError):
    pass


class ChecksumError(FormatError):
    pass


class DecodeError(FormatError):
    pass


class LinkError(FormatError):
    pass


class ArchiveError(FormatError):
    pass


class CheckpointError(DsNvcompError):
    pass


class SaveError(CheckpointError):
    pass


class CommitError(CheckpointError):
    pass


class UnsupportedSetupError(CheckpointError):
    pass


class DirectoryError(CheckpointError):
    pass
