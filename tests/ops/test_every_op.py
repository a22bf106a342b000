"""What holds for every op: the same bits on every run, calls from several threads, torch.compile, an error for tensors
that change before the backward pass, PyTorch's ops where a GPU refuses kernels. (tests/metal_runtime has kernels
refused.)"""

import threading

import pytest
import torch
from cases import CASES, FORMS, WITHOUT_HOST, Call, changed

from metalcore._core.refused import on_any_device

EACH_OP = {CASES[name].op.name: name for name in FORMS}.values()
# One dtype shows what a run leaves for the next one. Kernels of 16 bits have a case of each op.
RUNS = [(name, torch.float32) for name in CASES]
RUNS += [(name, torch.bfloat16) for name in EACH_OP]


@pytest.mark.parametrize("name, dtype", RUNS, ids=str)
def test_the_same_bits_on_every_run(device, name, dtype):
    """On a GPU the order of threadgroups differs between runs. The simulator's differs with several threads alone, of
    which test_threads has six: what is looked for there are numbers that a run leaves for the next one."""
    made = CASES[name].make(device, dtype)
    first = made.run()
    for _ in range(1 if hasattr(torch._C, "_metalcore_simulates_mps") else 6):
        for value, expected in zip(made.run(), first):
            assert torch.equal(value, expected)


# The first sample of each op with a derivative.
DERIVATIVES = {
    case.op.name: case
    for case in reversed(CASES.values())
    if case.op.backward and case.sample.backward and case.sample.elements
}


@pytest.mark.parametrize("name", DERIVATIVES)
def test_batched_gradients(device, name):
    """What torch.autograd.functional.jacobian asks for with vectorize=True. It knows fewer views than autograd."""
    made = DERIVATIVES[name].make(device)
    outputs = [output for output in made.forward() if output.requires_grad]
    batched = [torch.stack([direction, 2 * direction]) for direction in made.directions]
    found = torch.autograd.grad(outputs, made.leaves, batched, is_grads_batched=True)
    for pair, wanted in zip(found, made.gradients(made.forward(), made.directions)):
        for value, factor in zip(pair, (1, 2)):
            torch.testing.assert_close(value, factor * wanted, rtol=1e-4, atol=1e-4)


def test_threads(device):
    """Each thread runs every op, and each begins with another one. Threads share what an op has, with any options."""
    made = [CASES[name].make(device) for name in EACH_OP]
    expected = [one.run() for one in made]
    start, failures = threading.Barrier(6), []

    def work(first):
        try:
            start.wait()
            for i in range(len(made)):
                which = (first + i) % len(made)
                for value, wanted in zip(made[which].run(), expected[which]):
                    torch.testing.assert_close(value, wanted, rtol=1e-4, atol=1e-4)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(2 * i,)) for i in range(start.parties)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures, failures


@pytest.mark.parametrize("op", sorted({CASES[name].op.name for name in FORMS if name in WITHOUT_HOST}))
def test_compiled_as_one_graph(device, op):
    """One graph has all forms of the op, because most of the time goes into making a graph."""
    torch._dynamo.reset()  # it limits how often it compiles one function
    made = {name: CASES[name].make(device) for name in FORMS if name in WITHOUT_HOST and CASES[name].op.name == op}
    calls = [one.case.call for one in made.values()]
    compiled = torch.compile(
        lambda inputs: [call(*(tensor * 1 for tensor in each)) for call, each in zip(calls, inputs)],
        fullgraph=True,
        backend="aot_eager",
    )
    outputs = compiled([one.leaves for one in made.values()])
    # One backward pass: the graph's derivative has all forms too.
    differentiable = [output for each in outputs for output in each if output.requires_grad]
    directions = [direction.clone() for one in made.values() if one.case.backward for direction in one.directions]
    leaves = [leaf for one in made.values() if one.case.backward for leaf in one.leaves]
    gradients = iter(torch.autograd.grad(differentiable, leaves, directions) if leaves else ())
    for (name, one), results in zip(made.items(), outputs):
        found = [output.detach() for output in results]
        found += [next(gradients) for _ in one.leaves if one.case.backward]
        for value, wanted in zip(found, one.run(), strict=True):
            torch.testing.assert_close(
                value, wanted, rtol=1e-4, atol=1e-4, msg=lambda said, name=name: f"{name}: {said}"
            )


@pytest.mark.parametrize("name", [name for name in FORMS if CASES[name].backward and CASES[name].sample.elements])
def test_changed_tensors(device, name):
    def make():
        return Call(CASES[name].op, CASES[name].sample, device, torch.float32)

    expected, count = make().gradients(), len(make().tensors())
    for which in range(count):
        found = changed(make, which)
        for value, wanted in zip(found or (), expected):
            assert torch.equal(value, wanted), f"tensor {which}"


def test_a_device_without_the_op(device):
    """PyTorch's error for an op that a device lacks sends the call to the CPU, and the results come back."""
    seen = []

    def formula(x, others, scale, *, weight=None):
        seen.append(x.device.type)
        if x.device.type != "cpu":
            raise NotImplementedError("aten::no_such_op is not implemented for this device")
        return scale * x + others[0] + weight, len(others)

    x = torch.arange(4.0, device=device)
    result, count = on_any_device(formula, x, [x, x], 2.0, weight=x)
    assert seen == (["cpu"] if device == "cpu" else [device, "cpu"]) and count == 2
    torch.testing.assert_close(result, 4 * x)
    assert result.device == x.device
