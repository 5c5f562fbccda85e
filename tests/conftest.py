"""Settings of the whole suite: the tests run from a checkout, also where the package is not installed."""
import os
import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))
# Tests that start a fresh process mean this checkout too.
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))


def pytest_collection_modifyitems(items):
    """Ids are the same in every process, or pytest-xdist refuses to run."""
    for item in items:
        if re.search(r" at 0x[0-9a-f]+", item.name):
            raise pytest.UsageError(f"the id of {item.nodeid} has an address in it; name the parameter with `ids`")
