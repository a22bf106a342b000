"""What `python -m metalcore info` says of the simulated device, the compiler and the cache on different machines, and
of CUDA for everything that the backend may find."""

import json

import pytest
import torch

import metalcore
from metalcore import _device_library
from metalcore._core import routing
from metalcore.cli import info
from metalcore.msl.errors import CompilerNotFoundError
from metalcore.msl.nvidia import nvrtc
from metalcore.msl.runtime import host

pytestmark = pytest.mark.only_on("simulator")


def keys(found):
    return {section: sorted(values) for section, values in found.items() if section != "kernels"}


@pytest.fixture
def complete():
    return info.collect()


def test_a_device_library_for_this_pytorch(complete):
    assert complete["backends"]["simulated device"].endswith(str(_device_library.find()))
    assert complete["compiler"]["needed for"] == "compile_shader on the simulator"


def test_none_for_this_pytorch(complete, monkeypatch):
    monkeypatch.setattr(_device_library, "library_name", lambda: "_device-another.so")
    found = info.collect()
    assert "yet: the first `import metalcore.simulator`" in found["backends"]["simulated device"]
    assert found["compiler"]["needed for"].startswith("the first import of metalcore.simulator")
    assert keys(found) == keys(complete)


def test_no_compiler_and_no_headers(complete, monkeypatch):
    def find_compiler():
        raise CompilerNotFoundError("install g++")

    monkeypatch.setattr(host, "find_compiler", find_compiler)
    monkeypatch.setattr(_device_library, "python_headers", lambda: None)
    found = info.collect()
    assert (found["compiler"]["found"], found["compiler"]["why"]) == (None, "install g++")
    assert found["compiler"]["Python.h"] == "missing"
    assert keys(found) == keys(complete)
    assert "None" not in info.show(found) and "install g++" in info.show(found)


def test_a_build_without_kernels_for_the_simulator(complete, monkeypatch):
    monkeypatch.setattr(routing, "DEVICES", frozenset())
    found = info.collect()
    assert "METALCORE_ISA" in found["backends"]["simulator"]
    assert keys(found) == keys(complete)


def test_a_cache_that_others_can_write_to(complete, tmp_path, monkeypatch):
    monkeypatch.setenv("METALCORE_CACHE_DIR", str(tmp_path))
    tmp_path.chmod(0o777)
    found = info.collect()
    assert "can be written by others" in found["cache"]["not used"]
    assert keys(found) == keys(complete)
    assert json.loads(json.dumps(found)) == found


def test_it_makes_no_directories(tmp_path, monkeypatch):
    monkeypatch.setenv("METALCORE_CACHE_DIR", str(tmp_path / "cache"))
    info.collect()
    assert not any(tmp_path.iterdir())


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
