"""What `python -m metalcore info` says of CUDA, for everything that the backend may find."""

import pytest
import torch

import metalcore
from metalcore.cli import info
from metalcore.msl.nvidia import nvrtc

H100 = {
    "driver": "13.0",
    "devices": [{"name": "NVIDIA H100", "arch": 90, "memory": 80 * 2**30, "multiprocessors": 132}],
}


def collected(monkeypatch, found, cuda="13.0"):
    monkeypatch.setattr(metalcore._C, "cuda_info", lambda: found, raising=False)
    monkeypatch.setattr(torch.version, "cuda", cuda)
    return info.collect()


@pytest.mark.only_on("simulator", "cuda")
def test_a_device(monkeypatch):
    found = collected(monkeypatch, H100)
    assert found["devices"]["cuda"] == "NVIDIA H100 (compute capability 9.0, 80 GiB)"
    assert found["backends"]["cuda"] == f"driver for CUDA 13.0, {nvrtc.find()}"
    assert all("cuda" in family["built for"] and family["kernels"] for family in found["kernels"].values())


def test_no_driver(monkeypatch):
    found = collected(monkeypatch, {"reason": "metalcore: there is no NVIDIA driver: libcuda.so.1: not found"})
    assert found["devices"]["cuda"] == "none"
    assert found["backends"]["cuda"] == "there is no NVIDIA driver: libcuda.so.1: not found"


def test_a_pytorch_without_cuda(monkeypatch):
    assert "this PyTorch is built without CUDA" in collected(monkeypatch, H100, cuda=None)["backends"]["cuda"]


def test_no_nvrtc(monkeypatch, tmp_path):
    monkeypatch.setenv("METALCORE_NVRTC", str(tmp_path / "nothing.so"))
    assert "pip install nvidia-cuda-nvrtc" in collected(monkeypatch, H100)["backends"]["cuda"]
