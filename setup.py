"""Packaging. CUDA, DeepSpeed and Megatron come as extras: the core runs, slower, on any machine with torch."""
from pathlib import Path

from setuptools import find_packages, setup

here = Path(__file__).parent
version = next(line.split('"')[1] for line in (here / "ds_nvcomp/__init__.py").read_text().splitlines() if line.startswith("__version__"))

test = ["pytest>=8", "pytest-timeout>=2.3", "hypothesis>=6.100"]
deepspeed = ["deepspeed>=0.16,<0.20", "ninja"]

setup(
    name="ds_nvcomp",
    version=version,
    description="Lossless compression of DeepSpeed, Megatron and PyTorch checkpoints, on the GPU with NVIDIA nvCOMP",
    long_description=(here / "README.md").read_text(),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    python_requires=">=3.10",
    packages=find_packages(include=["ds_nvcomp", "ds_nvcomp.*", "megatron_patch"]),
    package_data={"ds_nvcomp.encoding": ["kernels.cu"]},
    install_requires=["torch>=2.6", "numpy>=1.26", "isal>=1.8", "zlib-ng>=0.5", "zstandard>=0.22", "cramjam>=2.9", "typer>=0.12", "rich>=13"],
    extras_require={
        "cu12": ["nvidia-nvcomp-cu12>=6,<7", "cupy-cuda12x>=13"],
        "cu13": ["nvidia-nvcomp-cu13>=6,<7", "cupy-cuda13x>=13"],
        "deepspeed": deepspeed,
        "megatron": ["megatron-core>=0.16"],
        "plots": ["matplotlib>=3.8"],  # of benchmarks/plots.py
        "test": test + deepspeed,
    },
    entry_points={
        "console_scripts": ["ds-nvcomp = ds_nvcomp.cli:main"],
        "torch.backends": ["ds_nvcomp = ds_nvcomp.autoload:autoload"],
    },
)
