"""The README's table of keys is the configuration's own."""
from pathlib import Path

from ds_nvcomp.config import explain


def test_every_key_is_documented_as_it_is():
    readme = (Path(__file__).parent.parent / "README.md").read_text()
    for key, default, allowed, meaning in explain():
        assert f"| `{key}` | `{default}` | {allowed} | {meaning} |" in readme
