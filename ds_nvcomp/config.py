"""The configuration: one frozen dataclass, validated once, the same keys in every host (JSON block, argument, keyword)."""
from __future__ import annotations

import difflib
from dataclasses import dataclass, field, fields, replace
from typing import Any, Mapping

from .errors import ConfigError

CODECS = ("deflate", "zstd", "lz4", "snappy", "ans", "gdeflate", "bitcomp", "cascaded", "none")
AUTO = "auto"  # as a codec: to be resolved before anything is encoded, by a host's `checkpoint.auto.Chooser` or by `Config.concrete`
DEVICES = ("auto", "gpu", "cpu")
VERIFY = ("auto", "encode", "none")

MIB = 1 << 20


def _key(default, explain: str, *, choices=None, at_least=None, at_most=None, power_of_two=False):
    return field(default=default, metadata=dict(explain=explain, choices=choices, at_least=at_least, at_most=at_most,
                                                power_of_two=power_of_two))


def key(spec) -> str:
    """The name in the block of a field; `async` is a word of Python's."""
    return spec.name.rstrip("_")


@dataclass(frozen=True)
class Config:
    """What to compress and how. Every field is a key of the `nvcomp_checkpoint` block; the explanations are its documentation.

    Raises `ConfigError`, naming the key, the value and the allowed ones.
    """
    enabled: bool = _key(True, "Switch for the whole block; false leaves DeepSpeed's own engine in place.")
    codec: str = _key("deflate", "Entropy coder of the exponent bytes. deflate is readable anywhere and for ever; ans restores "
                      "fastest but only on an NVIDIA GPU with the same nvCOMP major version; none splits and stores; auto measures "
                      "this machine and the target, chooses the shortest wait among deflate, ans, zstd and none, and logs why.",
                      choices=(*CODECS, AUTO))
    device: str = _key("auto", "Where to encode: gpu, cpu, or auto (where CuPy and nvCOMP are installed, the GPU for CUDA tensors, and for "
                       "64 MiB and more of CPU tensors once the process uses it; otherwise the CPU).", choices=DEVICES)
    verify: str = _key("auto", "encode decodes every chunk again right after encoding and compares it with the input; a chunk "
                       "that differs is stored uncoded, with a warning. auto does so for the codecs that only nvCOMP can read.",
                       choices=VERIFY)
    link_master_weights: str = _key("auto", "auto stores fp32 master weights as their difference from the 16-bit weights that the same "
                                    "checkpoint has in its model file (ZeRO-1 and -2): half their size. The files then belong together. "
                                    "off stores them in full.", choices=("auto", "off"))
    min_bytes: int = _key(4096, "Storages smaller than this many bytes are written as torch writes them.", at_least=0)
    chunk_bytes: int = _key(0, "Bytes of one coded chunk, a power of two; 0 takes the codec's own best (64 KiB; 256 KiB for ans).",
                            at_least=0, at_most=MIB, power_of_two=True)
    gpu_memory: int = _key(512 * MIB, "GPU work memory, bytes; what bounds the size of a tile.", at_least=32 * MIB)
    threads: int = _key(0, "CPU threads per process; 0 shares the machine's cores among the processes on it.",
                        at_least=0, at_most=1024)
    write_threads: int = _key(4, "Threads per file that write to disk.", at_least=1, at_most=256)
    fsync: bool = _key(True, "Make files and directories durable before a checkpoint counts as complete.")
    async_: bool = _key(False, "save_checkpoint returns when the compressed state is in host memory; writing, agreement of the ranks "
                        "and `latest` go on behind training. Errors are raised by the next save, wait() or load.")
    overlap: bool = _key(False, "Like async, and the snapshot itself is taken during the next forward and backward; only the optimizer "
                         "step waits for it. Parameters and optimizer state must change nowhere else.")
    in_flight: int = _key(1, "Asynchronous saves that may be unfinished; the next one waits.", at_least=1, at_most=16)
    timeout: float = _key(1800.0, "Seconds the ranks wait for one another at commit before the save fails on all of them.",
                          at_least=1)

    def __post_init__(self):
        for spec in fields(self):
            _check(spec, getattr(self, spec.name))

    @classmethod
    def from_dict(cls, block: Mapping[str, Any] | None) -> "Config":
        """Build from a JSON block. Unknown keys are errors, so that a typo cannot switch a guarantee off."""
        if block is None:
            return cls()
        if not isinstance(block, Mapping):
            raise ConfigError(f"'nvcomp_checkpoint' must be a JSON object such as {{\"enabled\": true}}, got {block!r}.")
        known = {key(spec): spec.name for spec in fields(cls)}
        for name in block:
            if name not in known:
                near = difflib.get_close_matches(str(name), known, n=1)
                hint = f" Did you mean {near[0]!r}?" if near else ""
                raise ConfigError(f"nvcomp_checkpoint: unknown key {name!r}.{hint} Allowed keys: {', '.join(known)}.")
        return cls(**{known[name]: value for name, value in block.items()})

    def as_dict(self) -> dict[str, Any]:
        """The block that `from_dict` makes this of."""
        return {key(spec): getattr(self, spec.name) for spec in fields(self)}

    @property
    def behind(self) -> bool:
        """Whether saves are completed behind training."""
        return self.async_ or self.overlap

    @property
    def verifies(self) -> bool:
        """Whether chunks are decoded again while encoding. Not by default for codecs of which there are independent decoders: on an
        H200, decoding Deflate takes twice as long as encoding it, and every chunk's decoded checksum is verified on load anyway."""
        return self.verify == "encode" or self.verify == "auto" and self.codec in ("ans", "gdeflate", "bitcomp", "cascaded")

    @property
    def concrete(self) -> "Config":
        """With a real codec: deflate in place of "auto", for a file by itself has no target to measure and may be read anywhere."""
        return replace(self, codec="deflate") if self.codec == AUTO else self

    @classmethod
    def of(cls, config: "Config | Mapping[str, Any] | None") -> "Config":
        """Accept a `Config`, a mapping of keys, or None for the defaults."""
        return config if isinstance(config, cls) else cls.from_dict(config)


def _check(spec, value):
    rule, name = spec.metadata, f"nvcomp_checkpoint.{key(spec)}"
    kinds = {"bool": bool, "int": int, "float": (int, float), "str": str}[spec.type]
    # bool is an int to Python; `"threads": true` is still a mistake. "auto" is Accelerate's placeholder.
    if not isinstance(value, kinds) or (isinstance(value, bool) and spec.type != "bool"):
        hint = " (\"auto\" is not resolved by the launcher for this block: leave the key out instead)" if value == "auto" else ""
        raise ConfigError(f"{name}: expected {spec.type}, got {value!r}{hint}. {rule['explain']}")
    if rule["choices"] and value not in rule["choices"]:
        near = difflib.get_close_matches(value, rule["choices"], n=1)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        raise ConfigError(f"{name}: {value!r} is not one of {', '.join(rule['choices'])}.{hint}")
    if rule["at_least"] is not None and not value >= rule["at_least"]:
        raise ConfigError(f"{name}: {value!r} is below the least allowed, {rule['at_least']}. {rule['explain']}")
    if rule["at_most"] is not None and value > rule["at_most"]:
        raise ConfigError(f"{name}: {value!r} is above the most allowed, {rule['at_most']}. {rule['explain']}")
    if rule["power_of_two"] and value and (value & (value - 1) or value < 4096):
        raise ConfigError(f"{name}: {value!r} is not a power of two of at least 4096. {rule['explain']}")


def explain() -> list[tuple[str, str, str, str]]:
    """Rows (key, default, allowed, explanation) for `ds-nvcomp config --explain` and the README."""
    rows = []
    for spec in fields(Config):
        rule = spec.metadata
        if rule["choices"]:
            allowed = ", ".join(rule["choices"])
        elif spec.type == "bool":
            allowed = "true, false"
        else:
            low, high = rule["at_least"], rule["at_most"]
            allowed = f"{spec.type} >= {low}" + (f", <= {high}" if high is not None else "")
        default = str(spec.default).lower() if spec.type == "bool" else str(spec.default)
        rows.append((key(spec), default, allowed, rule["explain"]))
    return rows
