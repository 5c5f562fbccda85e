"""The error catalogue lists every error there is, and only those; the guarantees name tests that exist."""
import re
from pathlib import Path

from ds_nvcomp import errors

DOCS = Path(__file__).parent.parent / "docs"
GROUPS = {"DsNvcompError", "FormatError", "CheckpointError"}  # never raised themselves


def test_every_error_is_in_the_catalogue():
    listed = re.findall(r"^\| `(\w+)` \|", (DOCS / "ERRORS.md").read_text(), re.M)
    assert len(listed) == len(set(listed))
    assert set(listed) == set(errors.__all__) - GROUPS


def test_guarantees_name_tests_that_exist():
    named = re.findall(r"`(tests/[\w/]+\.py)(?:::(\w+))?`", (DOCS / "GUARANTEES.md").read_text())
    assert len(named) > 15
    for path, function in named:
        file = DOCS.parent / path
        assert file.exists(), path
        assert not function or re.search(rf"def {function}\b", file.read_text()), f"{path}::{function}"
