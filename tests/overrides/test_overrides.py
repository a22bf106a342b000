"""enable_pytorch_overrides: PyTorch's own functions run metalcore's kernels and give the same numbers."""

import pytest
import torch
import torch.nn.functional as F
from cases import operators
from torch.nn.functional import silu as silu_imported_before  # an override of the Python name would miss it
from torch.utils.checkpoint import checkpoint

import metalcore
from metalcore._core.registry import OPS

FUNCTIONS = {
    "silu": (F.silu, "silu"),
    "silu imported before": (silu_imported_before, "silu"),
    "nn.SiLU": (torch.nn.SiLU(), "silu"),
    "relu": (F.relu, "relu"),
    "gelu": (F.gelu, "gelu"),
    "nn.GELU tanh": (torch.nn.GELU(approximate="tanh"), "gelu"),
    "F.softmax": (lambda x: F.softmax(x, -1), "softmax"),
    "Tensor.softmax": (lambda x: x.softmax(0), "softmax"),
    "torch.softmax of a dtype": (lambda x: torch.softmax(x, 1, dtype=torch.float32), "softmax"),
    "nn.Softmax": (torch.nn.Softmax(dim=1), "softmax"),
    "log_softmax": (lambda x: F.log_softmax(x, -1), "log_softmax"),
    "rms_norm": (lambda x: F.rms_norm(x, (x.shape[-1],)), "rms_norm"),
    "rms_norm of two dimensions": (lambda x: F.rms_norm(x, tuple(x.shape), eps=1e-3), "rms_norm"),
    "nn.RMSNorm": (torch.nn.RMSNorm(24, elementwise_affine=False, eps=1e-5), "rms_norm"),
}


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16, torch.float16), ids=str)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_function_and_gradient(device, name, dtype):
    function, operator = FUNCTIONS[name]
    x = torch.randn(6, 24, device=device).to(dtype).requires_grad_()
    grad = torch.randn_like(function(x))

    def both():
        x.grad = None
        y = function(x)
        y.backward(grad)
        return y.detach(), x.grad.clone()

    expected = both()
    with metalcore.enable_pytorch_overrides():
        found = both()
        ran = operators(both)
    assert operator in ran
    by_torch = device == "cuda" and operator == "relu"  # whose derivative stays PyTorch's there
    assert (f"{operator}_backward" in ran) is not by_torch
    # Both round every result, and also the output from which softmax's derivative starts.
    eps = torch.finfo(dtype).eps
    for a, b in zip(found, expected):
        torch.testing.assert_close(a, b, rtol=4 * eps, atol=4 * eps * b.abs().max().item())
    assert operators(both) == set()
    for a, b in zip(both(), expected):
        assert torch.equal(a, b), "disabling does not restore the same bits"


def test_rms_norm_module_trains(device):
    module = torch.nn.RMSNorm(32, device=device)
    x = torch.randn(5, 32, device=device)
    module(x).square().sum().backward()
    expected, module.weight.grad = module.weight.grad, None
    with metalcore.enable_pytorch_overrides("rms_norm"):
        assert {"rms_norm", "rms_norm_backward"} <= operators(lambda: module(x).square().sum().backward())
    torch.testing.assert_close(module.weight.grad, expected)


@pytest.mark.parametrize("mode", ("reduced", "complete", "r"))
def test_qr(device, mode):
    a = torch.randn(3, 12, 7, device=device)
    with metalcore.enable_pytorch_overrides("qr"):
        q, r = torch.linalg.qr(a, mode=mode)
        assert "qr" in operators(lambda: torch.linalg.qr(a, mode=mode))
    expected_q, expected_r = torch.linalg.qr(a.cpu().double(), mode=mode)
    assert (q.shape, r.shape) == (expected_q.shape, expected_r.shape)
    bound = 10 * 12 * torch.finfo(torch.float32).eps
    r64 = r.cpu().double()
    if mode == "r":
        assert ((r64.mT @ r64 - expected_r.mT @ expected_r).norm() / expected_r.norm() ** 2) <= bound
    else:
        assert (a.cpu().double() - q.cpu().double() @ r64).norm() / a.cpu().double().norm() <= bound


def test_qr_gradient(device):
    a = torch.randn(4, 9, 5, device=device, requires_grad=True)

    def gradient(a):
        q, r = torch.linalg.qr(a)
        # This function does not depend on the signs, which a factorization is free to choose.
        return torch.autograd.grad((q.square() * r.abs().sum(-1).unsqueeze(-2)).sum(), a)[0]

    expected = gradient(a.cpu())  # PyTorch 2.11 has no qr on mps
    with metalcore.enable_pytorch_overrides("qr"):
        found = gradient(a)
    torch.testing.assert_close(found.cpu(), expected, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(
    "x",
    (
        lambda device: torch.randn(4, 8, dtype=torch.float64),
        lambda device: torch.randn(4, 8),
    ),
    ids=("float64 on the CPU", "float32 on the CPU"),
)
def test_cpu_tensors_stay_with_pytorch(device, x):
    x = x(device)
    with metalcore.enable_pytorch_overrides():
        ran = operators(lambda: [F.silu(x), F.softmax(x, -1), F.rms_norm(x, (8,)), torch.linalg.qr(x)])
    assert ran == set()


def test_what_a_kernel_does_not_take_goes_to_pytorch(device):
    x = torch.randn(4, 8, device=device)
    half = x.to(torch.float16)
    cases = [
        lambda: F.rms_norm(half, (8,), torch.ones(8, device=device)),  # two dtypes
        lambda: F.silu(x.clone(), inplace=True),
        lambda: torch.ops.aten.gelu.out(x, out=torch.empty_like(x)),
        lambda: F.silu(x.to(torch.complex64)),
    ]
    for case in cases:
        try:
            expected = case()
        except Exception as error:
            with metalcore.enable_pytorch_overrides(), pytest.raises(type(error)):
                case()
        else:
            with metalcore.enable_pytorch_overrides():
                torch.testing.assert_close(case(), expected)


def test_errors_are_pytorchs(device):
    x = torch.randn(4, 8, device=device)
    cases = (
        lambda: F.softmax(x, 5),
        lambda: F.gelu(x, approximate="x"),
        lambda: torch.linalg.qr(x, mode="x"),
        lambda: torch.linalg.qr(x[0]),
        lambda: F.rms_norm(x, (7,)),
    )
    for case in cases:
        with pytest.raises(Exception) as expected:  # noqa: PT011 (PyTorch may raise any error)
            case()
        with metalcore.enable_pytorch_overrides(), pytest.raises(type(expected.value)):
            case()


def test_errors_of_the_kernel_that_was_replaced(device, capfd):
    """They pass through a kernel in C++ with their types and messages, and nothing is printed."""
    x = torch.randn(4, 8, device=device)
    cases = (
        (lambda: torch.log_softmax(x, -4), "log_softmax"),
        (lambda: torch.ops.aten._softmax_backward_data(x, x, 2, x.dtype), "softmax"),
        (lambda: torch.ops.aten.gelu_backward(x, x, approximate="x"), "gelu"),
    )
    for case, name in cases:
        with pytest.raises((IndexError, RuntimeError)) as expected:
            case()
        with metalcore.enable_pytorch_overrides(name):
            with pytest.raises(expected.type) as found:
                case()
            (row,) = [row for row in metalcore.report().rows if row.replaced and row.left]
        assert found.type is expected.type and str(found.value) == str(expected.value)
        assert row.ran == 0 and row.left == {"shapes or options that its kernels do not take": 1}
    assert capfd.readouterr().err == ""


def test_a_version_of_pytorch_without_the_operators_kernel(device, monkeypatch):
    if device != "mps":
        pytest.skip("PyTorch has the operator on NVIDIA GPUs")
    get_kernel = torch.library.get_kernel

    def missing(name, key):  # as in PyTorch 2.11, which knows a fallback of the device only where it is called
        if name == "aten::_scaled_mm_v2":
            raise RuntimeError(f"no kernel for {key} for {name}")
        return get_kernel(name, key)

    monkeypatch.setattr(torch.library, "get_kernel", missing)
    x = torch.randn(16, 32, device=device).to(torch.float8_e4m3fn)
    one = torch.ones((), device=device)

    def product(dtype):
        return torch.ops.aten._scaled_mm_v2(x, x.t(), [one], [0], [0], [one], [0], [0], None, dtype)

    with metalcore.enable_pytorch_overrides("scaled_mm"):
        assert torch.equal(product(torch.float32), x.float() @ x.float().t())
        with pytest.raises(NotImplementedError, match="_scaled_mm_v2"):
            product(torch.float64)


@pytest.mark.parametrize("shape", ((0,), (0, 4), (3, 0), ()), ids=str)
def test_empty_and_0d_tensors(device, shape):
    x = torch.randn(shape, device=device)
    cases = [F.silu, F.gelu, lambda x: F.softmax(x, -1)]
    if len(shape) == 2:
        cases += [lambda x: F.rms_norm(x, shape[-1:]), torch.linalg.qr]
    for case in cases:
        expected = case(x.cpu())  # PyTorch 2.11 has no qr on mps
        with metalcore.enable_pytorch_overrides():
            torch.testing.assert_close(case(x), expected, check_device=False)


def test_no_grad_and_inference_mode(device):
    module = torch.nn.RMSNorm(16, device=device)
    with metalcore.enable_pytorch_overrides():
        for mode in (torch.no_grad, torch.inference_mode):
            with mode():
                x = torch.randn(3, 16, device=device)
                assert {"rms_norm", "silu", "softmax"} <= operators(lambda: F.softmax(F.silu(module(x)), -1))


def test_autocast_keeps_its_dtypes(device):
    x = torch.randn(3, 16, device=device, requires_grad=True)
    linear, norm = torch.nn.Linear(16, 16, device=device), torch.nn.RMSNorm(16, device=device)

    def forward():
        with torch.autocast(device, dtype=torch.bfloat16):
            y = linear(x)
            return [y, F.silu(y), F.softmax(y, -1), norm(y)]

    expected = forward()
    with metalcore.enable_pytorch_overrides():
        found = forward()
        sum(y.float().sum() for y in found).backward()
    assert [y.dtype for y in found] == [y.dtype for y in expected]
    torch.testing.assert_close(found, expected)


def test_checkpointing(device):
    x = torch.randn(4, 16, device=device, requires_grad=True)
    block = torch.nn.Sequential(torch.nn.RMSNorm(16, device=device), torch.nn.SiLU(), torch.nn.Softmax(-1))
    (expected,) = torch.autograd.grad(block(x).square().sum(), x)
    with metalcore.enable_pytorch_overrides():
        for reentrant in (False, True):
            y = checkpoint(block, x, use_reentrant=reentrant)
            x.grad = None
            y.square().sum().backward()
            torch.testing.assert_close(x.grad, expected)


def test_double_backward(device):
    x = torch.randn(4, 16, device=device, requires_grad=True)

    def second_derivative():
        y = F.softmax(F.gelu(F.silu(F.rms_norm(x, (16,)))), -1)
        (first,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
        return torch.autograd.grad(first.square().sum(), x)[0]

    expected = second_derivative()
    with metalcore.enable_pytorch_overrides():
        found = second_derivative()
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


TARGETS = torch.tensor([1, 5, -100, 0])
LOSSES = {
    reduction: (lambda x, r=reduction: F.cross_entropy(x, TARGETS.to(x.device), reduction=r), "cross_entropy")
    for reduction in ("none", "sum", "mean")
}


@pytest.mark.parametrize("name", [*FUNCTIONS, *LOSSES])
def test_batches_of_gradients(device, name):
    """torch.autograd.grad(is_grads_batched=True) and vmap of a gradient have rules for PyTorch's operators."""
    function, override = {**FUNCTIONS, **LOSSES}[name]
    with metalcore.enable_pytorch_overrides(override):
        x = torch.randn(4, 24, device=device, requires_grad=True)
        y = function(x)
        grad = torch.randn_like(y)
        batch = torch.stack([grad, 2 * grad])
        (one,) = torch.autograd.grad(y, x, grad, retain_graph=True)
        (found,) = torch.autograd.grad(y, x, batch, retain_graph=True, is_grads_batched=True)
        mapped = torch.func.vmap(lambda grad: torch.autograd.grad(y, x, grad, retain_graph=True)[0])(batch)
    for result in (found, mapped):
        torch.testing.assert_close(result, torch.stack([one, 2 * one]))


def test_functorch(device):
    module = torch.nn.RMSNorm(16, device=device)
    x = torch.randn(5, 16, device=device)

    def loss(row):
        return F.silu(module(row)).square().sum()

    per_row = torch.func.vmap(torch.func.grad(loss))
    expected = per_row(x)
    with metalcore.enable_pytorch_overrides():
        torch.testing.assert_close(per_row(x), expected)


def test_compiled_functions_follow_the_switch(device):
    @torch.compile(backend="aot_eager")
    def compiled(x):
        return F.softmax(F.silu(F.rms_norm(x, (16,))), -1)

    x = torch.randn(4, 16, device=device, requires_grad=True)
    expected = compiled(x)
    expected.square().sum().backward()
    expected_grad, x.grad = x.grad, None
    with metalcore.enable_pytorch_overrides():
        found = compiled(x)  # it was compiled before the overrides were enabled
        assert {"silu", "softmax"} <= operators(lambda: compiled(x))
        found.square().sum().backward()
        torch.testing.assert_close((found, x.grad), (expected, expected_grad))
        torch._dynamo.reset()
        torch.testing.assert_close(compiled(x), expected)  # it is compiled while they are enabled
    assert operators(lambda: compiled(x)) == set()
    assert torch.equal(compiled(x), expected)


def test_exported_programs_hold_pytorchs_operators(device):
    module = torch.nn.Sequential(torch.nn.RMSNorm(16, device=device), torch.nn.SiLU())
    with metalcore.enable_pytorch_overrides():
        program = torch.export.export(module, (torch.randn(2, 16, device=device),))
    assert not any("metalcore" in str(node.target) for node in program.graph.nodes)


def test_selection():
    assert metalcore.active_overrides() == ()
    with metalcore.enable_pytorch_overrides("gelu", "silu"):
        assert metalcore.active_overrides() == ("silu", "gelu")
        with metalcore.enable_pytorch_overrides(exclude=("qr", "adamw")):
            assert metalcore.active_overrides() == tuple(
                name for name in metalcore.overrides.NAMES if name not in ("qr", "adamw")
            )
        assert metalcore.active_overrides() == ("silu", "gelu")
    assert metalcore.active_overrides() == ()
    with pytest.raises(ValueError, match="'sillu' is not one of .*silu, gelu"):
        metalcore.enable_pytorch_overrides("sillu")
    assert metalcore.active_overrides() == ()


def test_enabling_again_changes_nothing(device):
    x = torch.randn(7, device=device)
    for _ in range(3):
        metalcore.enable_pytorch_overrides()
    assert metalcore.active_overrides() == metalcore.overrides.NAMES
    assert operators(lambda: F.silu(x)) == {"silu"}
    for _ in range(2):
        metalcore.disable_pytorch_overrides()
        assert metalcore.active_overrides() == ()
        assert operators(lambda: F.silu(x)) == set()


def test_the_dispatch_tables_are_what_they_were(device):
    replaced = [op.override for op in OPS.values() if isinstance(op.override, tuple)]

    def tables():
        return {
            override.operator: torch._C._dispatch_dump_table(f"aten::{override.operator}")
            for overrides in replaced
            for override in overrides
        }

    torch.optim.AdamW([torch.zeros(1)])  # the first one puts hooks around the step
    before, step = tables(), torch.optim.AdamW.step
    with metalcore.enable_pytorch_overrides():
        assert tables() != before
        assert torch.optim.AdamW.step is not step
    assert tables() == before
    assert torch.optim.AdamW.step is step


def test_backward_on_another_thread_sees_the_switch(device):
    x = torch.randn(100, device=device, requires_grad=True)
    with metalcore.enable_pytorch_overrides("silu"):
        y = F.silu(x).sum()
        assert "silu_backward" in operators(y.backward)
