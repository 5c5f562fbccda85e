"""Where sources are encoded: what the configuration, their bytes and the machine suggest."""
import pytest
import torch

from ds_nvcomp import pipeline
from ds_nvcomp.config import Config
from ds_nvcomp.encoding import transforms
from ds_nvcomp.errors import CodecUnavailableError
from ds_nvcomp.pipeline import Source


def on_gpu(monkeypatch, sizes, *, initialised=True, missing=None, worth=1000, **keys):
    """Which of CPU sources of these sizes (bytes) would be encoded on the GPU."""
    asked = []
    monkeypatch.setattr(pipeline, "gpu_missing", lambda: missing)
    monkeypatch.setattr(pipeline, "WORTH_THE_WAY", worth)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: initialised)
    monkeypatch.setattr(pipeline.cpu, "encode", lambda sources, config, progress: iter(()))
    monkeypatch.setattr(pipeline, "_gpu_encode", lambda sources, config, progress: (asked.extend(s.name for s in sources), iter(()))[1])
    sources = [Source(torch.zeros(size, dtype=torch.uint8), transforms.for_dtype("uint8"), str(i)) for i, size in enumerate(sizes)]
    list(pipeline.encode(sources, Config(**keys)))
    return asked


def test_little_stays_on_the_cpu(monkeypatch):
    assert on_gpu(monkeypatch, [900]) == []


def test_much_goes_to_a_gpu_that_is_in_use(monkeypatch):
    assert on_gpu(monkeypatch, [2000]) == ["0"]
    assert on_gpu(monkeypatch, [600, 600]) == ["0", "1"]  # offloaded states are many tensors at times


def test_a_process_without_cuda_does_not_start_it(monkeypatch):
    assert on_gpu(monkeypatch, [2000], initialised=False) == []


def test_a_machine_without_nvcomp_uses_the_cpu(monkeypatch):
    assert on_gpu(monkeypatch, [2000], missing="nvCOMP is not installed") == []


def test_what_is_not_coded_has_no_business_on_the_gpu(monkeypatch):
    assert on_gpu(monkeypatch, [2000], codec="none") == []


def test_what_only_the_gpu_can_code_goes_there(monkeypatch):
    assert on_gpu(monkeypatch, [10], codec="ans", initialised=False) == ["0"]


def test_the_configuration_decides(monkeypatch):
    assert on_gpu(monkeypatch, [2000], device="cpu") == []
    assert on_gpu(monkeypatch, [10], device="gpu", initialised=False) == ["0"]
    with pytest.raises(CodecUnavailableError, match="'gpu', but no GPU"):
        on_gpu(monkeypatch, [10], device="gpu", missing="no GPU")
