"""GPU tests: each file skips itself where the GPU pipeline cannot run; the summary says on what they did run."""
import importlib.metadata
import platform

import torch


def _version(*names):
    for name in names:
        try:
            return f"{name} {importlib.metadata.version(name)}"
        except importlib.metadata.PackageNotFoundError:
            pass
    return f"{names[0]} not installed"


def pytest_terminal_summary(terminalreporter):
    devices = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())] if torch.cuda.is_available() else []
    terminalreporter.write_sep("-", "GPU tests")
    terminalreporter.write_line(f"devices: {', '.join(devices) or 'none'}")
    terminalreporter.write_line(", ".join([
        f"Python {platform.python_version()}", f"torch {torch.__version__} (CUDA {torch.version.cuda})",
        _version("cupy-cuda13x", "cupy-cuda12x", "cupy"), _version("nvidia-nvcomp-cu13", "nvidia-nvcomp-cu12")]))
    if devices:
        terminalreporter.write_line(f"peak GPU memory of torch: {torch.cuda.max_memory_allocated() / 2**20:.0f} MiB")
