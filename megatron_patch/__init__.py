"""Megatron-LM checkpoints, compressed by a launch argument: `--nvcomp-checkpoint`.

Once ds_nvcomp is installed the argument is there, in every Megatron script. Where packages cannot put themselves in place
(DS_NVCOMP_AUTOLOAD=0), `import megatron_patch` at the top of the script does so, or `python -m megatron_patch pretrain_gpt.py ARGS`.

    arguments.py     the arguments, and what is done when they are seen
    patches.py       puts them in place, and takes them out again
    compat.py        what of Megatron they need, looked for before anything is changed
    torch_dist.py    --ckpt-format torch_dist: items are encoded in place of the copy to the host
    torch_save.py    --ckpt-format torch, and local checkpoints: Megatron's own files, and no others, go through ds_nvcomp.save

Files decode themselves, so loading needs no argument, and no patch.
"""
from __future__ import annotations

from ds_nvcomp.autoload import install

__all__ = ["apply", "revert"]


def apply(config=None) -> None:
    """Compress every checkpoint that Megatron saves from now on in this process. `config` is a `ds_nvcomp.Config` or a mapping of its keys.

    Raises `ConfigError`, and `UnsupportedSetupError` for a Megatron that the patches do not fit; then nothing is changed.
    """
    from . import patches  # not before: the argument is in every Megatron script, what it does in few
    patches.apply(config)


def revert() -> None:
    """Save as Megatron does by itself. Files that are compressed stay readable."""
    from . import patches
    patches.revert()


install()
