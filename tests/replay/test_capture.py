"""capture(): what is recorded once does the same again, for other inputs, and nothing else is taken."""

import copy
import pickle
import threading

import pytest
import torch
from torch.nn.functional import silu

import metalcore
from metalcore.replay import CaptureError

pytestmark = pytest.mark.only_on("simulator", "mps")


def block(weight):
    def function(x):
        y = metalcore.silu(metalcore.rms_norm(x, x.shape[-1:], weight))
        z = metalcore.add_rms_norm(x, metalcore.silu(metalcore.silu(y)))
        return metalcore.softmax(y, -1), {"sum": z[0], "number": 3}

    return function


def same(found, expected):
    for a, b in zip(torch.utils._pytree.tree_leaves(found), torch.utils._pytree.tree_leaves(expected), strict=True):
        assert torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b


@pytest.mark.parametrize("options", [{}, {"bind": True}, {"clone_outputs": True}, {"warmup": 0}], ids=str)
def test_it_does_what_the_function_does(device, options):
    weight = torch.rand(300, device=device)
    function = block(weight)
    captured = metalcore.capture(function, torch.randn(4, 300, device=device), **options)
    for _ in range(3):
        x = torch.randn(4, 300, device=device)
        same(captured(x), function(x))
    weight.mul_(2)
    same(captured(x), function(x))
    assert captured.segments == 1 and len(captured.kernels) == 6 and not captured.torch_operators


def test_it_is_captured_and_called_in_any_mode(device):
    x, other = torch.randn(2, 4, 300, device=device)
    with torch.inference_mode():
        captured = metalcore.capture(lambda x: metalcore.silu(x), torch.ones(4, 300, device=device))
        assert torch.equal(captured(x), metalcore.silu(x))
    assert torch.equal(captured(other), metalcore.silu(other))
    with torch.inference_mode():
        assert torch.equal(captured(x), metalcore.silu(x))


def test_an_error_in_the_function_leaves_nothing_being_recorded(device):
    x = torch.randn(4, 300, device=device)
    for warmup in (0, 1):
        with pytest.raises(ZeroDivisionError):
            metalcore.capture(lambda x: metalcore.silu(x) * (1 // 0), x, warmup=warmup)
    with pytest.raises(ValueError, match="nothing is being recorded"):
        metalcore._C.end_recording()


def test_the_next_replay_overwrites_results(device):
    x, other = torch.randn(2, 4, 300, device=device)
    captured = metalcore.capture(lambda x: metalcore.silu(x), x)
    first = captured(x)
    assert captured(other) is first and torch.equal(first, metalcore.silu(other))
    clones = metalcore.capture(lambda x: metalcore.silu(x), x, clone_outputs=True)
    first = clones(x)
    clones(other)
    assert torch.equal(first, metalcore.silu(x))


def test_its_own_inputs_are_not_copied(device):
    captured = metalcore.capture(lambda x: metalcore.silu(x), torch.zeros(5, 7, device=device).mT)
    captured.inputs[0].fill_(2)
    assert torch.equal(
        captured(*captured.inputs), torch.full((7, 5), 2.0, device=device).mul(torch.sigmoid(torch.tensor(2.0)))
    )


def test_intermediate_results_share_memory(device):
    def chain(x):
        for _ in range(20):
            x = metalcore.silu(x)
        return x

    x = torch.randn(1024, device=device)
    captured = metalcore.capture(chain, x)
    assert captured.own_bytes == 19 * 4096 and captured.arena_bytes == captured.peak_bytes == 2 * 4096
    assert torch.equal(captured(x), chain(x))


def test_scratch_memory_is_the_captures(device):
    a = torch.randn(3, 70, 50, device=device)
    captured = metalcore.capture(lambda a: metalcore.svdvals(a), a)
    other = torch.randn(3, 70, 50, device=device)
    for _ in range(2):
        torch.empty(2**16, device=device).fill_(float("nan"))  # where freed memory would be
        assert torch.equal(captured(other), metalcore.svdvals(other))


def test_gradients_stay_where_they_are(device):
    weight = torch.nn.Parameter(torch.rand(300, device=device))

    def function(x):
        x = x.detach().requires_grad_()
        y = metalcore.rms_norm(x, (300,), weight)
        x_gradient, weight.grad = torch.autograd.grad(y, (x, weight), direction)
        return x_gradient

    direction = torch.randn(4, 300, device=device)
    captured = metalcore.capture(function, torch.randn(4, 300, device=device))
    kept = weight.grad
    x = torch.randn(4, 300, device=device)
    found = captured(x).clone()
    found_weight = kept.clone()
    assert torch.equal(function(x), found) and torch.equal(weight.grad, found_weight)


def test_writes_into_bound_inputs(device):
    def function(x, y):
        torch.ops.metalcore.grad_clip_value_([y], 0.5)
        return metalcore.silu(x)

    x, y = torch.randn(2, 1000, device=device)
    with pytest.raises(CaptureError, match="it writes into input 1"):
        metalcore.capture(function, x, y.clone())
    captured = metalcore.capture(function, x, y.clone(), bind=True)
    given = y.clone()
    captured(x, given)
    assert torch.equal(given, y.clamp(-0.5, 0.5))


def test_a_write_of_what_was_there_is_a_write(device):
    """An example of zeros stays as it is, and a later call's tensor would not."""

    def function(x):
        return metalcore.silu(x.zero_())

    with pytest.raises(CaptureError, match="it writes into input 0"):
        metalcore.capture(function, torch.zeros(1000, device=device), segments=True)


def test_threads_take_turns(device):
    captured = metalcore.capture(
        lambda x: metalcore.softmax(x, -1), torch.randn(64, 256, device=device), clone_outputs=True
    )
    inputs = torch.randn(4, 64, 256, device=device)
    expected, wrong = metalcore.softmax(inputs, -1), []

    def call(i):
        wrong.extend(i for _ in range(100) if not torch.equal(captured(inputs[i]), expected[i]))

    threads = [threading.Thread(target=call, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy, pickle.dumps])
def test_a_capture_is_not_copied(device, duplicate):
    """A copy would write to the memory of the first, and return tensors of its own."""
    captured = metalcore.capture(lambda x: metalcore.silu(x), torch.randn(8, device=device))
    with pytest.raises(TypeError, match="capture again"):
        duplicate(captured)


def test_pytorchs_operators_are_refused_with_their_names(device):
    x = torch.randn(4, 300, device=device)

    def function(x):
        return metalcore.silu(torch.tanh(x).view(-1)[5:] + 1)

    with pytest.raises(CaptureError, match=r"cannot be recorded on mps: aten::tanh, aten::add\. segments=True"):
        metalcore.capture(function, x)
    with pytest.raises(CaptureError, match="aten::rand"):
        metalcore.capture(lambda x: metalcore.sample(x), x)
    with pytest.raises(CaptureError, match="bind=True needs"):
        metalcore.capture(function, x, bind=True, segments=True)


@pytest.mark.parametrize(
    "read, named",
    [
        (lambda y: y.sum().item(), r"aten::_local_scalar_dense: \.item\(\)"),
        (lambda y: y.cpu(), r"aten::_to_copy copies them to the CPU \(\.cpu\(\)"),
        (lambda y: y.cpu() * 2, "aten::_to_copy copies them to the CPU, where aten::mul runs"),
        (lambda y: torch.empty(4, 3).copy_(y), "aten::copy_ copies them to the CPU"),
        (lambda y: bool((y > 0).any()), r"bool\(tensor\)"),
        (lambda y: y.nonzero(), "aten::nonzero: .*shapes that depend on data"),
        (lambda y: y.tolist(), "tolist"),
    ],
    ids=["item", "cpu", "cpu mul", "copy", "bool", "nonzero", "tolist"],
)
def test_values_that_the_host_reads_are_refused(device, read, named):
    with pytest.raises(CaptureError, match=f"the host waits for values on the device.*{named}"):
        metalcore.capture(lambda x: read(metalcore.silu(x)), torch.randn(4, 3, device=device), segments=True)


def test_an_op_that_waits_is_refused(device):
    with pytest.raises(CaptureError, match="the host waits|PyTorch does a part"):
        metalcore.capture(lambda a: metalcore.cholesky(a), torch.eye(5, device=device))


def test_steps_that_the_host_counts_are_refused(device):
    p = torch.nn.Parameter(torch.ones(5, device=device))
    p.grad = torch.ones_like(p)
    with pytest.raises(CaptureError, match="adamw_ counts its steps on the host; capturable=True"):
        metalcore.capture(metalcore.optim.AdamW([p]).step)
    with pytest.raises(CaptureError, match="sgd_ begins its momentum"):
        metalcore.capture(metalcore.optim.SGD([p], momentum=0.9).step, warmup=0, segments=True)


def test_inputs_are_checked_before_anything_runs(device):
    x = torch.randn(4, 300, device=device)
    captured = metalcore.capture(lambda x: metalcore.silu(x), x)
    before = captured(x).clone()
    for wrong, error, says in (
        ((), TypeError, "1 inputs were captured, and 0 are given"),
        ((3,), TypeError, "input 0 must be a tensor, not int"),
        ((x[:3],), ValueError, r"input 0 has the shape \(3, 300\); \(4, 300\) was captured"),
        ((x.half(),), ValueError, "input 0 has the dtype torch.float16; torch.float32 was captured"),
        ((x.cpu(),), ValueError, "input 0 has the device cpu"),
    ):
        with pytest.raises(error, match=says):
            captured(*wrong)
    assert torch.equal(captured(x.mT.contiguous().mT), before)


def test_bound_inputs_are_checked_before_anything_runs(device):
    x, y = torch.randn(2, 4, 300, device=device)
    captured = metalcore.capture(lambda x, y: metalcore.swiglu(x, y), x.clone(), y.clone(), bind=True)
    result = captured(x, y)
    assert torch.equal(result, silu(x) * y) or torch.allclose(result, silu(x) * y, atol=1e-6)
    for wrong, says in (
        ((x.mT.contiguous().mT, y), "input 0 has the strides"),
        ((torch.randn(1201, device=device)[1:].view(4, 300), y), "input 0 has the place within 16 bytes 4; 0 was"),
        ((x, x), "inputs 0 and 1 share memory"),
        ((result, y), "input 0 is memory that the replay itself writes"),
    ):
        with pytest.raises(ValueError, match=says):
            captured(*wrong)


def test_examples_that_cannot_be_captured(device):
    x = torch.randn(4, 300, device=device)
    for examples, error, says in (
        ((3,), TypeError, "example 0 must be a tensor, not int"),
        ((x.cpu(),), ValueError, "example 0 is on the CPU"),
        ((x[:1].expand(4, 300),), ValueError, "elements of example 0 share memory"),
        ((x.as_strided((4, 300), (1, 1)),), ValueError, "elements of example 0 share memory"),
    ):
        with pytest.raises(error, match=says):
            metalcore.capture(lambda x: metalcore.silu(x), *examples)
    with pytest.raises(ValueError, match="warmup must be a number of runs, not -1"):
        metalcore.capture(lambda x: metalcore.silu(x), x, warmup=-1)


def test_a_replay_within_a_capture_is_recorded(device):
    x = torch.randn(4, 300, device=device)
    inner = metalcore.capture(lambda x: metalcore.silu(metalcore.silu(x)), x, bind=True)
    outer = metalcore.capture(lambda x: metalcore.softmax(inner(x), -1), x)
    assert len(outer.kernels) == 3
    other = torch.randn(4, 300, device=device)
    assert torch.equal(outer(other), metalcore.softmax(metalcore.silu(metalcore.silu(other)), -1))


def test_pytorchs_operators_between_recorded_parts(device):
    bias, mean = torch.randn(300, device=device), torch.zeros(300, device=device)

    def function(x):
        y = metalcore.silu(x) + bias
        mean.mul_(0.9).add_(y.mean(0))
        z = metalcore.softmax(y.view(300, 4).t(), -1)
        return torch.cat([z, metalcore.silu(z)]), y.max(1)

    captured = metalcore.capture(function, torch.randn(4, 300, device=device), segments=True)
    start = mean.clone()
    for x in torch.randn(2, 4, 300, device=device):
        mean.copy_(start)
        found = torch.utils._pytree.tree_map(torch.clone, captured(x)), mean.clone()
        mean.copy_(start)
        same(found, (function(x), mean))
    assert captured.segments == 2 and "aten::cat" in captured.torch_operators
    assert "aten::add_: PyTorch's" in str(captured)


def test_random_numbers_between_recorded_parts_are_new(device):
    x = torch.ones(300, device=device)
    captured = metalcore.capture(lambda x: torch.bernoulli(metalcore.silu(x)), x, segments=True)
    first = captured(x).clone()
    assert not torch.equal(first, captured(x))


def test_tensors_that_get_another_shape_in_place_later(device):
    weight = torch.randn(4, 4, device=device)

    def function(x):
        y = x.exp()
        z, kept = torch.mm(y, weight), torch.tril(y)
        y.t_()
        kept.t_()
        return metalcore.softmax(y, -1), z, kept

    captured = metalcore.capture(function, torch.randn(4, 4, device=device), segments=True)
    x = torch.randn(4, 4, device=device)
    same(captured(x), function(x))


def test_an_operator_whose_out_overload_has_no_kernel_on_the_device(device):
    captured = metalcore.capture(lambda x: metalcore.silu(x.var(1)), torch.randn(4, 300, device=device), segments=True)
    x = torch.randn(4, 300, device=device)
    same(captured(x), metalcore.silu(x.var(1)))


def test_negated_views(device):
    negated = torch.view_as_complex(torch.randn(4, 32, 2, device=device)).conj().imag
    same(metalcore.capture(metalcore.silu, negated.clone())(negated), metalcore.silu(negated))
    bound = metalcore.capture(
        metalcore.silu, torch.view_as_complex(torch.randn(4, 32, 2, device=device)).imag, bind=True
    )
    with pytest.raises(ValueError, match="input 0 is a negated or conjugated view"):
        bound(negated)
