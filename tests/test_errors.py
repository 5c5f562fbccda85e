"""The error tree: as documented, whole across processes, and exported."""
import copy
import inspect
import pickle
import re

import pytest

import ds_nvcomp
from ds_nvcomp import errors

CLASSES = [getattr(errors, name) for name in errors.__all__]
each = pytest.mark.parametrize("kind", CLASSES, ids=lambda kind: kind.__name__)


def documented():
    """(name, parent, also) of each line of the tree in the docstring."""
    found, parents = [], {}
    for line in errors.__doc__.splitlines():
        match = re.match(r"    ([│├└─ ]*)(\w+Error)\b(.*)", line)
        if match:
            depth = len(match[1]) // 4
            parents[depth] = match[2]
            also = re.search(r"\(also a (\w+)\)", match[3])
            found.append((match[2], parents.get(depth - 1), also and also[1]))
    return found


def test_docstring_is_the_tree():
    builtins = {"ValueError": ValueError, "RuntimeError": RuntimeError, "MemoryError": MemoryError}
    for name, parent, also in documented():
        kind = getattr(errors, name)
        bases = (getattr(errors, parent) if parent else Exception, *([builtins[also]] if also else []))
        assert kind.__bases__ == bases, name
    assert [name for name, *_ in documented()][0] == "DsNvcompError"


def test_docstring_exports_and_classes_are_the_same():
    defined = [name for name, value in vars(errors).items() if inspect.isclass(value) and issubclass(value, BaseException)]
    assert sorted(errors.__all__) == sorted(defined) == sorted(name for name, *_ in documented())
    assert len(set(errors.__all__)) == len(errors.__all__)


def test_package_exports():
    assert set(errors.__all__) <= set(ds_nvcomp.__all__) == set(dir(ds_nvcomp))
    for name in errors.__all__:
        assert getattr(ds_nvcomp, name) is getattr(errors, name)
    for name in ("save", "load", "SaveReport", "Config", "__version__"):
        assert name in ds_nvcomp.__all__
    for name in ds_nvcomp.__all__:
        assert getattr(ds_nvcomp, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'sav'"):
        ds_nvcomp.sav


@each
def test_pickling_keeps_everything(kind):
    err = kind("what", path="/p", tensor="t", chunk=3, rank=1)
    for again in (pickle.loads(pickle.dumps(err)), copy.copy(err), copy.deepcopy(err)):
        assert type(again) is kind and str(again) == str(err)
        assert (again.message, again.path, again.tensor, again.chunk, again.rank) == ("what", "/p", "t", 3, 1)


@each
def test_message(kind):
    assert str(kind("what")) == "what"
    assert str(kind("what", path="/p", chunk=0)) == "what [path '/p', chunk 0]"
    assert str(kind("what", tensor="a.b", rank=0)) == "what [tensor 'a.b', rank 0]"


def test_at_fills_in_but_does_not_replace():
    err = errors.ChecksumError("what", chunk=5)
    assert err.at(tensor="t").at(tensor="other", path="/p", chunk=9) is err
    assert (err.tensor, err.path, err.chunk, err.rank) == ("t", "/p", 5, None)
    assert errors.ChecksumError("what", chunk=0).at(chunk=7).chunk == 0


def test_fields_are_keywords_only():
    with pytest.raises(TypeError):
        errors.DsNvcompError("what", "/p")
