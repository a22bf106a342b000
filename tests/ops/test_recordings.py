"""Recordings: an op runs what explain says; a recording can be compared and submitted again."""

import pytest
import torch

import metalcore
from metalcore._core.registry import OPS
from metalcore.recording import on_meta, record

SAMPLES = [(op, sample) for op in OPS.values() for sample in op.samples()]
IDS = [f"{op.name}: {sample.name}" for op, sample in SAMPLES]


def forward(op, sample, tensors):
    return op.call(op.function, *sample.arguments(*tensors), **sample.options)


def submitted(recording):
    return [dispatch[:4] for dispatch in recording.dispatches]


def choices(recording):
    """The plans, except those for PyTorch's op, which small calls take without asking the operator."""
    return [plan[:3] for plan in recording.plans if plan.variant != "torch"]


def plans_torch(recording):
    return any(plan.variant == "torch" for plan in recording.plans)


@pytest.mark.parametrize("op, sample", SAMPLES, ids=IDS)
def test_what_ran_is_what_explain_says(device, op, sample):
    tensors = sample.make(device, torch.float32)
    _, ran = record(forward, op, sample, tensors)
    tensors = sample.make("meta", torch.float32)
    with on_meta(device) as explained, torch.no_grad():
        forward(op, sample, tensors)
    assert submitted(ran) == submitted(explained.recording)
    steps = explained.recording.torch_steps
    if plans_torch(explained.recording) and not plans_torch(ran) and steps[-1][1] == "aten::contiguous":
        steps = steps[:-1]  # the operator, which was not asked, makes the result of PyTorch's op contiguous
    # Before that come PyTorch's operators for which the host waits, and the host may read a result after it.
    ran_steps = ran.torch_steps
    if op.waits and ran_steps[-1:] != steps[-1:] and ran_steps[-1][1] == "aten::_local_scalar_dense":
        ran_steps = ran_steps[:-1]
    assert ran_steps[len(ran_steps) - len(steps) if op.waits else 0 :] == steps
    assert choices(ran) == choices(explained.recording)


@pytest.mark.parametrize(
    "op, sample",
    [(op, sample) for op, sample in SAMPLES if op.backward and sample.backward],
    ids=lambda value: value.name,
)
def test_what_ran_backward_is_what_explain_says(device, op, sample):
    def backward(place):
        leaves = [tensor.requires_grad_() for tensor in sample.make(place, torch.float32)]
        outputs = [output for output in op.results(forward(op, sample, leaves)) if output.requires_grad]
        return lambda: torch.autograd.backward(outputs, [torch.ones_like(output) for output in outputs])

    with torch.autograd.set_multithreading_enabled(False):
        _, ran = record(backward(device))
    with on_meta(device):
        run = backward("meta")
    with on_meta(device) as explained:
        run()
    assert submitted(ran) == submitted(explained.recording)


def test_it_is_submitted_again_with_other_tensors(device):
    x, other = torch.randn(2, 6, 300, device=device)
    y, recording = record(metalcore.softmax, x, -1)
    torch.testing.assert_close(y, torch.softmax(x, -1))
    recording.submit([(x, other)])
    torch.testing.assert_close(y, torch.softmax(other, -1))
    z = torch.zeros_like(y)
    recording.submit([(x, x), (y, z)])
    torch.testing.assert_close(z, torch.softmax(x, -1))


def test_views_move_with_what_they_are_views_of(device):
    a, other = torch.randn(2, 3, 20, 12, device=device)
    (q, r), recording = record(metalcore.qr, a.mT)
    recording.submit([(a, other)])
    torch.testing.assert_close(q @ r, other.mT, rtol=1e-4, atol=1e-4)


def test_strided_gradients_are_kept(device):
    gradient = torch.randn(40, 30, device=device)
    parameter = torch.nn.Parameter(torch.zeros(30, 40, device=device))
    parameter.grad = gradient.mT
    norm, recording = record(metalcore.optim.clip_grad_norm_, [parameter], 1e9)
    torch.testing.assert_close(norm, gradient.norm())
    assert [buffer.nbytes for buffer in recording.buffers].count(4800) == 1


def test_what_does_not_match_is_refused(device):
    x = torch.randn(6, 300, device=device)
    _, recording = record(metalcore.softmax, x, -1)
    for wrong in (torch.randn(6, 301, device=device), x.half(), torch.randn(300, 6, device=device).mT):
        with pytest.raises(RuntimeError, match="must have the shape, strides, dtype and device"):
            recording.submit([(x, wrong)])
    with pytest.raises(RuntimeError, match="must begin at the same place within 16 bytes"):
        recording.submit([(x, torch.randn(1801, device=device)[1:].view(6, 300))])
    _, recording = record(metalcore.add_rms_norm, x, x)
    with pytest.raises(RuntimeError, match="tensors that shared memory must share it in the same way"):
        recording.submit([(x, x), (x, x.clone())])
    _, recording = record(metalcore.qr, torch.randn(2, 300, 200, device=device))
    with pytest.raises(RuntimeError, match=r"PyTorch did a part of it \(aten::copy_\)"):
        recording.submit()


def test_roles_and_equality(device):
    x = torch.randn(2, 40000, device=device)
    _, first = record(metalcore.rms_norm, x, (40000,))
    _, second = record(metalcore.rms_norm, x.clone(), (40000,))
    _, shorter = record(metalcore.rms_norm, x[:1], (40000,))
    assert first == second and first != shorter
    roles = [buffer.role for buffer in first.buffers]
    assert roles[0] == "input" and "output" in roles
    assert str(first).startswith(first.kernels[0] + ": ")


def test_an_error_leaves_nothing_being_recorded(device):
    with pytest.raises(ZeroDivisionError):
        record(lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError), on_meta(device):
        raise ZeroDivisionError
    assert not metalcore._core.routing.accelerated(torch.empty(3, device="meta"))
    with pytest.raises(ValueError, match="nothing is being recorded"):
        metalcore._C.end_recording()
    with pytest.raises(ValueError, match="no kernels for vulkan devices"):
        metalcore._C.begin_recording("vulkan")
