"""A plan is made for the GPU that holds the tensor."""

import torch

import metalcore
from metalcore import _C
from metalcore._core.registry import OPS
from metalcore.recording import on_meta


def variant(device_type):
    with on_meta(device_type) as recorder:
        metalcore.softmax(torch.empty(8, 4096, device="meta"), -1)
    return recorder.recording.plans[0].variant


def test_cuda_and_the_simulator_plan_by_their_own_numbers():
    assert "hopper" in _C.tuning_families()
    assert (variant("cuda"), variant("mps")) == ("block8", "thread")
    try:
        _C.use_tuning("simulator")
        assert variant("cuda") == "thread"
    finally:
        _C.use_tuning("")


def test_explain_takes_the_device_of_the_tensor():
    with torch._subclasses.FakeTensorMode():
        x = torch.empty(8, 4096, device="cuda")
    assert metalcore.explain("softmax", x).variant == "block8"


def test_operators_have_kernels_for_every_backend():
    for name in (name for op in OPS.values() for name in op.operators):
        for key in ("CUDA", "MPS"):
            assert torch._C._dispatch_has_computed_kernel_for_dispatch_key(f"metalcore::{name}", key), (name, key)
