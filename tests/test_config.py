"""Every key's defaults and errors: each message names the key, the value and what is allowed."""
import dataclasses
import math

import pytest

from ds_nvcomp.config import CODECS, Config, explain, key
from ds_nvcomp.errors import ConfigError

MIB = 1 << 20


def fails(block, *words):
    with pytest.raises(ConfigError) as caught:
        Config.from_dict(block)
    for word in words:
        assert word in str(caught.value), f"{word!r} is not in: {caught.value}"
    assert isinstance(caught.value, ValueError)


def test_defaults():
    assert Config() == Config.from_dict(None) == Config.from_dict({}) == Config.of(None) == Config.of({})
    assert Config().as_dict() == {
        "enabled": True, "codec": "deflate", "device": "auto", "verify": "auto", "min_bytes": 4096, "chunk_bytes": 0,
        "gpu_memory": 512 * MIB, "threads": 0, "write_threads": 4, "fsync": True, "async": False, "overlap": False, "in_flight": 1, "timeout": 1800.0,
        "link_master_weights": "auto"}


def test_of_takes_what_it_gives():
    config = Config(codec="zstd")
    assert Config.of(config) is config and Config.of({"codec": "zstd"}) == config


def test_async_is_a_key_and_no_name():
    assert Config.from_dict({"async": True}) == Config(async_=True) == Config.from_dict(Config(async_=True).as_dict())
    assert Config(async_=True).behind and Config(overlap=True).behind and not Config().behind
    fails({"async_": True}, "unknown key 'async_'", "Did you mean 'async'?")


def test_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        Config().codec = "zstd"
    assert hash(Config()) == hash(Config())


@pytest.mark.parametrize("block", [5, "deflate", [], True, ("codec", "zstd")])
def test_block_of_another_type(block):
    fails(block, "'nvcomp_checkpoint' must be a JSON object", repr(block))


def test_keys_from_the_keyword_are_checked_too():
    with pytest.raises(ConfigError, match="nvcomp_checkpoint.codec"):
        Config(codec="gzip")


@pytest.mark.parametrize("key,hint", [("codek", "codec"), ("thread", "threads"), ("chunk_size", None), ("gpu_mem", "gpu_memory"),
                                      ("verfy", "verify"), ("Codec", "codec"), (5, None)])
def test_unknown_key(key, hint):
    words = ["unknown key", repr(key), "Allowed keys: enabled, codec, device"]
    fails({key: 1}, *words, *([f"Did you mean {hint!r}?"] if hint else []))


@pytest.mark.parametrize("key", ["enabled", "fsync"])
@pytest.mark.parametrize("value", [0, 1, "true", None, 1.0, [], "auto"])
def test_booleans(key, value):
    fails({key: value}, f"nvcomp_checkpoint.{key}", "expected bool", repr(value))
    assert getattr(Config.from_dict({key: False}), key) is False


@pytest.mark.parametrize("key,choices,near", [
    ("codec", CODECS, {"deflat": "deflate", "zst": "zstd", "ANS": None, "gzip": None}),
    ("device", ("auto", "gpu", "cpu"), {"gpuu": "gpu", "cuda": None}),
    ("verify", ("auto", "encode", "none"), {"encod": "encode", "all": None})])
def test_choices(key, choices, near):
    for choice in choices:
        assert getattr(Config.from_dict({key: choice}), key) == choice
    for wrong, hint in near.items():
        fails({key: wrong}, f"nvcomp_checkpoint.{key}", repr(wrong), "is not one of " + ", ".join(choices),
              *([f"Did you mean {hint!r}?"] if hint else []))
    for wrong in (5, None, True, ["deflate"]):
        fails({key: wrong}, f"nvcomp_checkpoint.{key}", "expected str", repr(wrong))


@pytest.mark.parametrize("key,least,most", [
    ("min_bytes", 0, None), ("gpu_memory", 32 * MIB, None), ("threads", 0, 1024)])
def test_integers(key, least, most):
    assert getattr(Config.from_dict({key: least}), key) == least
    fails({key: least - 1}, f"nvcomp_checkpoint.{key}", str(least - 1), f"below the least allowed, {least}")
    if most is not None:
        assert getattr(Config.from_dict({key: most}), key) == most
        fails({key: most + 1}, f"nvcomp_checkpoint.{key}", str(most + 1), f"above the most allowed, {most}")
    for wrong in (True, 4096.0, "4096", None, [4096]):
        fails({key: wrong}, f"nvcomp_checkpoint.{key}", "expected int", repr(wrong))


def test_chunk_bytes():
    for good in (0, 4096, 65536, MIB):
        assert Config(chunk_bytes=good).chunk_bytes == good
    for wrong in (1, 16, 2048, 4097, 65535, 3 * 4096, MIB - 4096):
        fails({"chunk_bytes": wrong}, "nvcomp_checkpoint.chunk_bytes", str(wrong), "power of two of at least 4096")
    fails({"chunk_bytes": 2 * MIB}, "above the most allowed, 1048576")
    fails({"chunk_bytes": -4096}, "below the least allowed, 0")
    fails({"chunk_bytes": 65536.0}, "expected int")
    fails({"chunk_bytes": True}, "expected int")


def test_timeout():
    for good in (1, 1.5, 86400, math.inf):
        assert Config(timeout=good).timeout == good
    for wrong in (0, 0.5, -1, math.nan, -math.inf):
        fails({"timeout": wrong}, "nvcomp_checkpoint.timeout", "below the least allowed, 1")
    for wrong in ("30", None, True):
        fails({"timeout": wrong}, "expected float", repr(wrong))


@pytest.mark.parametrize("key", [key(field) for field in dataclasses.fields(Config)
                                 if field.name not in ("device", "codec", "verify", "link_master_weights")])
def test_auto_of_the_launcher(key):
    """Accelerate resolves "auto" in DeepSpeed's own blocks only; the message says to leave the key out."""
    fails({key: "auto"}, f"nvcomp_checkpoint.{key}", "auto", "leave the key out")


def test_every_key_is_explained():
    rows = explain()
    assert [row[0] for row in rows] == [key(field) for field in dataclasses.fields(Config)]
    for name, default, allowed, text in rows:
        assert default and allowed and len(text) > 20, name
    assert dict((row[0], row[1:3]) for row in rows)["threads"] == ("0", "int >= 0, <= 1024")
    assert dict((row[0], row[1:3]) for row in rows)["enabled"] == ("true", "true, false")


@pytest.mark.parametrize("verify, codec, verifies", [("auto", "deflate", False), ("auto", "ans", True), ("encode", "deflate", True),
                                                     ("none", "ans", False), ("auto", "none", False)])
def test_what_is_verified_while_encoding(verify, codec, verifies):
    assert Config(verify=verify, codec=codec).verifies is verifies
