"""Several GPUs: an op runs on its tensors' GPU, whichever is current, and takes tensors of one GPU only."""

import pytest
import torch
from cases import CASES
from references import assert_same_error

import metalcore

two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="takes two GPUs")


@two_gpus
@pytest.mark.parametrize("name", CASES)
def test_the_other_gpu(name):
    made = CASES[name].make("cuda:1")
    torch.cuda.set_device(0)
    found = made.run()
    assert torch.cuda.current_device() == 0
    assert all(value.device == torch.device("cuda:1") for value in found)
    for value, wanted in zip(found, CASES[name].make("cuda:0").run()):
        torch.testing.assert_close(value.cpu(), wanted.cpu(), rtol=1e-4, atol=1e-4)


@two_gpus
def test_the_other_gpus_current_stream():
    x = torch.zeros(1000, device="cuda:1")
    stream = torch.cuda.Stream(device="cuda:1")
    torch.cuda.synchronize(1)
    metalcore.silu(x)
    with torch.cuda.stream(stream):
        torch.cuda._sleep(20_000_000)
        x.fill_(1)
        with torch.cuda.device(0):  # the current GPU has no effect
            y = metalcore.silu(x)
    stream.synchronize()
    torch.testing.assert_close(y.cpu(), torch.nn.functional.silu(torch.ones(1000)))


@two_gpus
def test_an_optimizer_of_parameters_on_both():
    params = [torch.nn.Parameter(torch.ones(5, device=device)) for device in ("cuda:0", "cuda:1", "cuda:0", "cpu")]
    for param in params:
        param.grad = torch.ones_like(param)
    optimizer = metalcore.optim.AdamW(params, lr=0.1, weight_decay=0.0)
    for _ in range(3):
        optimizer.step()
    for param in params:
        torch.testing.assert_close(param.detach().cpu(), torch.full((5,), 0.7))


OPERATORS = {
    "silu_backward": lambda a, b: torch.ops.metalcore.silu_backward(a, b),
    "softmax_backward": lambda a, b: torch.ops.metalcore.softmax_backward(a, b, -1, torch.float32),
    "rms_norm": lambda a, b: torch.ops.metalcore.rms_norm(a, 1, b[0], 1e-6, 0.0),
    "add_rms_norm": lambda a, b: torch.ops.metalcore.add_rms_norm(a, b, 1, None, 1e-6, 0.0),
    "adamw": lambda a, b: torch.ops.metalcore.adamw_(
        [a],
        [b],
        [a.clone()],
        [a.clone()],
        [],
        [torch.zeros(())],
        lr=0.1,
        beta1=0.9,
        beta2=0.99,
        weight_decay=0.0,
        eps=1e-8,
        maximize=False,
    ),
}


@pytest.mark.parametrize("other", ["cpu", pytest.param("cuda:1", marks=two_gpus)])
@pytest.mark.parametrize("name", OPERATORS)
def test_operators_refuse_tensors_of_two_devices(name, other):
    a, b = torch.ones(3, 4, device="cuda:0"), torch.ones(3, 4, device=other)
    with pytest.raises(RuntimeError, match=r"metalcore::\w+: \w+ must be on the device"):
        OPERATORS[name](a, b)


@pytest.mark.parametrize("other", ["cpu", pytest.param("cuda:1", marks=two_gpus)])
def test_functions_leave_tensors_of_two_devices_to_pytorch(other):
    x, weight = torch.ones(3, 4, device="cuda:0"), torch.ones(4, device=other)
    for call in (lambda module: module.rms_norm(x, (4,), weight), lambda module: module.rms_norm(weight, (4,), x[0])):
        assert_same_error(lambda: call(metalcore), lambda: call(torch.nn.functional))
