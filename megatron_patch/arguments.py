"""`--nvcomp-checkpoint` and its options, in Megatron's own parser. They are the keys of the JSON block that DeepSpeed has."""
from __future__ import annotations

import argparse
import functools
from dataclasses import fields

from ds_nvcomp.config import AUTO, CODECS, Config, key
from ds_nvcomp.errors import DsNvcompError

from . import apply, revert

OFF = "off"
NAME = "--nvcomp-checkpoint"
_NOT_HERE = ("enabled", "codec", "async", "overlap", "in_flight", "timeout", "link_master_weights")  # said otherwise, or DeepSpeed's


def wrap(module) -> None:
    """Add the arguments to those of `megatron.training.arguments`. Every version looks its function up as a global of that module."""
    original = module.add_megatron_arguments
    if getattr(original, "adds_nvcomp", False):
        return

    @functools.wraps(original)
    def add_megatron_arguments(parser):
        parser = original(parser)
        add(parser)
        return parser

    add_megatron_arguments.adds_nvcomp = True
    module.add_megatron_arguments = add_megatron_arguments


def add(parser: argparse.ArgumentParser) -> None:
    """The arguments, as a group of their own. One that is seen is validated, and in force, when the parser meets it."""
    given: dict = {}
    group = parser.add_argument_group("ds_nvcomp", "Compress checkpoints, losslessly, per rank, on the GPU. Loading needs no argument.")
    group.add_argument(NAME, nargs="?", const=Config().codec, default=OFF, choices=[*CODECS, AUTO, OFF], action=_Kept, given=given,
                       help="Compress what is saved with this codec; without a value, deflate. auto measures this machine and the target. "
                            "Files decode themselves: a checkpoint is loaded as ever, compressed or not. Default: off.")
    for spec in options():
        kind = {"bool": _yes_or_no, "int": int, "float": float, "str": str}[spec.type]
        group.add_argument(f"{NAME}-{key(spec).replace('_', '-')}", type=kind, default=spec.default, action=_Kept, given=given, option=spec.name,
                           choices=spec.metadata["choices"], metavar=None if spec.metadata["choices"] else key(spec).upper(),
                           help=f"{spec.metadata['explain']} Default: {spec.default}.".replace("%", "%%"))


def options() -> list:
    """The fields of `Config` that are arguments, beside the codec."""
    return [spec for spec in fields(Config) if key(spec) not in _NOT_HERE]


class _Kept(argparse.Action):
    """Keeps a plain value in the namespace: Megatron saves it with the checkpoint, and reads it back with weights_only=True."""

    def __init__(self, *args, given: dict, option: str = "codec", **kwargs):
        self._given, self._option = given, option
        super().__init__(*args, **kwargs)

    def __call__(self, parser, namespace, values, option_string=None):
        setattr(namespace, self.dest, values)
        self._given[self._option] = values
        try:
            self.enforce(self._given)
        except DsNvcompError as err:
            parser.error(f"argument {option_string}: {err}")

    @staticmethod
    def enforce(given: dict) -> None:
        """Validate what is known so far; once the codec is, put it in force: there is no later moment that every version has."""
        if given.get("codec") == OFF:
            revert()
        elif "codec" in given:
            apply(Config(**given))
        else:
            Config(**given)


def _yes_or_no(text: str) -> bool:
    if text.lower() not in ("true", "false"):
        raise argparse.ArgumentTypeError(f"expected true or false, found {text!r}")
    return text.lower() == "true"
