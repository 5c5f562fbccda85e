"""Imports point one way (DESIGN section 5), and the package is light to import."""
import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

PACKAGE = ROOT / "ds_nvcomp"
FILES = sorted(path for path in PACKAGE.rglob("*.py"))

# Lower layers never import higher ones. What is not listed here is a host's adapter or a tool, on top of everything.
LAYERS = ["errors", "config", "log", "encoding", "pipeline", "archive", "checkpoint"]
BOTTOM = ("errors", "config", "log")  # import nothing of the package but one another: config raises ConfigError


def module_of(path):
    parts = path.relative_to(ROOT).with_suffix("").parts
    return parts[:-1] if parts[-1] == "__init__" else parts


def imports(path):
    """(absolute dotted name, at module level) of each import in a file, relative ones resolved, `from x import y` as x.y."""
    module = module_of(path)
    package = module if path.name == "__init__.py" else module[:-1]
    tree = ast.parse(path.read_text())
    top = set()
    stack = list(tree.body)
    while stack:
        node = stack.pop()
        top.add(node)
        if isinstance(node, (ast.If, ast.Try, ast.With, ast.For)):
            stack += [child for child in ast.walk(node) if child is not node]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, node in top
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(package[:len(package) - node.level + 1]) if node.level else ""
            base = ".".join(filter(None, [base, node.module or ""]))
            for alias in node.names:
                yield f"{base}.{alias.name}", node in top
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module") and node.args:
            if isinstance(node.args[0], ast.Constant) and not node.args[0].value.startswith("."):
                yield node.args[0].value, node in top


def layer(dotted):
    parts = dotted.split(".")
    return parts[1] if parts[0] == "ds_nvcomp" and len(parts) > 1 else None


def test_there_is_something_to_check():
    found = {module_of(path)[1] for path in FILES if len(module_of(path)) > 1}
    assert len(FILES) > 15 and {"errors", "config", "encoding", "pipeline", "archive"} <= found


@pytest.mark.parametrize("path", [p for p in FILES if len(module_of(p)) > 1 and module_of(p)[1] in LAYERS],
                         ids=lambda p: "/".join(module_of(p)[1:]))
def test_imports_point_down(path):
    mine = module_of(path)[1]
    for name, _ in imports(path):
        other = layer(name)
        if other is None or other == mine:
            continue
        if other == "__version__":
            continue
        assert other in LAYERS, f"{mine} imports {name}, which is above it"
        if mine in BOTTOM:
            assert other in BOTTOM, f"{mine} imports {name}"
        else:
            assert LAYERS.index(other) < LAYERS.index(mine), f"{mine} imports {name}, which is above it"


def test_nothing_imports_the_package_by_its_own_full_name():
    """Relative imports only: a copy under another name, as tests of two versions need, stays whole."""
    for path in FILES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and not node.level:
                assert not (node.module or "").startswith("ds_nvcomp"), path


@pytest.mark.parametrize("package,only", [("nvidia", "encoding/codecs/nvcomp.py"), ("cupy", "encoding/kernels.py")])
def test_one_file_imports(package, only):
    found = {str(path.relative_to(PACKAGE)) for path in FILES for name, _ in imports(path) if name.split(".")[0] == package}
    assert found == {only}


def test_gpu_files_are_imported_late():
    """By files that themselves are only imported where there is a GPU."""
    gpu_only = {"ds_nvcomp.encoding.kernels", "ds_nvcomp.encoding.codecs.nvcomp", "ds_nvcomp.pipeline.device", "ds_nvcomp.pipeline.gpu",
                "ds_nvcomp.pipeline.gpu_decode"}
    for path in FILES:
        if ".".join(module_of(path)) in gpu_only:
            continue
        for name, at_top in imports(path):
            assert not (at_top and name in gpu_only), f"{path} imports {name} at its top"


def test_encoding_knows_no_torch_but_for_the_gpu():
    """The format has to be readable with NumPy alone."""
    for path in (PACKAGE / "encoding").rglob("*.py"):
        if path.name not in ("kernels.py", "nvcomp.py"):
            assert not any(name.split(".")[0] == "torch" for name, _ in imports(path)), path


def fresh(code):
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    return json.loads(out.stdout)


def test_import_is_light():
    heavy = fresh("import sys, json; import ds_nvcomp; dir(ds_nvcomp); print(json.dumps(sorted(sys.modules)))")
    assert not {"torch", "cupy", "nvidia.nvcomp", "numpy", "deepspeed"} & set(heavy)


def test_import_is_quick():
    seconds = min(fresh("import time; began = time.perf_counter(); import ds_nvcomp; print(time.perf_counter() - began)") for _ in range(5))
    assert seconds < 0.2


@pytest.mark.parametrize("module", ["ds_nvcomp.archive", "ds_nvcomp.pipeline", "ds_nvcomp.pipeline.cpu", "ds_nvcomp.encoding.codecs"])
def test_no_cuda_where_it_is_not_used(module):
    loaded = fresh(f"import sys, json, {module}; t = sys.modules.get('torch'); "
                   "print(json.dumps([sorted(sys.modules), bool(t and t.cuda.is_initialized())]))")
    assert not {"cupy", "nvidia.nvcomp", "deepspeed"} & set(loaded[0]) and loaded[1] is False


def test_saving_and_loading_on_the_cpu_initialises_no_cuda():
    modules, initialised = fresh(
        "import sys, json, io, torch, ds_nvcomp; f = io.BytesIO(); "
        "ds_nvcomp.save({'x': torch.randn(5000)}, f, {'device': 'cpu'}); f.seek(0); ds_nvcomp.load(f); print(json.dumps([sorted(sys.modules), torch.cuda.is_initialized()]))")
    assert not {"cupy", "nvidia.nvcomp"} & set(modules) and initialised is False
