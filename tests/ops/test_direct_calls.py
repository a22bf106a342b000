"""Direct calls of operators, as a loaded program or a compiled graph makes them, with input that they do not take."""

import pytest
import torch
from processes import python

import metalcore
from metalcore._core.registry import OPS

ops = torch.ops.metalcore

# Operators that others call inside of a derivative of their own.
INNER = {
    "embedding_bag_samples",  # results are integers
    "info_any",
    "logarithm_triangular",
    "matrix_exp_scaled",
    "qr_pivoted",
    "square_root_triangular",
    "sylvester_triangular",
}
# PyTorch warns where backward comes through the results of operators without a derivative.
DIFFERENTIABLE = {
    operator
    for op in OPS.values()
    if op.backward
    for operator in op.operators
    if not operator.endswith("_") and operator not in INNER and (operator not in OPS or OPS[operator].backward)
}


@pytest.mark.parametrize(
    "call",
    [
        lambda a, b: ops.silu_backward(a, b),
        lambda a, b: ops.gelu_backward(a, b, "none"),
        lambda a, b: ops.softmax_backward(a, b, -1, torch.float32),
        lambda a, b: ops.add_rms_norm(a, b, 1, None, 1e-6, 0.0),
        lambda a, b: ops.rms_norm(a, 1, b[0], 1e-6, 0.0),
        lambda a, b: ops.rms_norm_backward(a, b, None, 1, None, 1e-6, 0.0, False),
    ],
)
def test_a_meta_tensor_among_others_is_refused(device, call):
    x, meta = torch.ones(3, 4, device=device), torch.ones(3, 4, device="meta")
    for arguments in [(x, meta), (meta, x)]:
        with pytest.raises(RuntimeError, match="metalcore::.*one device, not on (meta and|.* and meta)"):
            call(*arguments)


@pytest.mark.parametrize("where", ["device", "cpu", "meta"])
@pytest.mark.parametrize("dims", [0, -1, 3])
def test_rms_norm_refuses_the_same_dims_everywhere(device, where, dims):
    x = torch.ones(3, 4, device=device if where == "device" else where)
    message = f"cannot normalize the last {dims} of 2 dimensions"
    with pytest.raises(RuntimeError, match="metalcore::rms_norm: " + message):
        ops.rms_norm(x, dims, None, 1e-6, 0.0)
    with pytest.raises(RuntimeError, match=message):
        ops.add_rms_norm(x, x, dims, None, 1e-6, 0.0)
    with pytest.raises(RuntimeError, match="metalcore::rms_norm_backward: " + message):
        ops.rms_norm_backward(x, x, None, dims, None, 1e-6, 0.0, False)


@pytest.mark.parametrize("where", ["device", "cpu", "meta"])
def test_rms_norm_refuses_a_weight_of_another_length_everywhere(device, where):
    x = torch.ones(3, 4, device=device if where == "device" else where)
    with pytest.raises(RuntimeError, match="weight must have 4 elements, not 12"):
        ops.rms_norm(x, 1, x, 1e-6, 0.0)


@pytest.mark.parametrize("dtype", [torch.int64, torch.float64, torch.bool, torch.complex64])
@pytest.mark.parametrize("rows", [0, 3])
def test_softmax_backward_refuses_other_dtypes(device, dtype, rows):
    y = torch.ones(rows, 4, device=device)
    with pytest.raises(RuntimeError, match="metalcore::softmax_backward: input_dtype .* does not go with"):
        ops.softmax_backward(y, y, -1, dtype)


def test_gelu_errors_name_the_operator(device):
    x = torch.ones(3, device=device)
    with pytest.raises(RuntimeError, match="^metalcore::gelu_backward: grad must be float32, not float16"):
        ops.gelu_backward(x.half(), x, "tanh")
    with pytest.raises(RuntimeError, match="^metalcore::gelu: x must be float32, .* not int64"):
        ops.gelu(x.long(), "tanh")


class _NoGradient(torch.autograd.Function):
    """Its result depends on x, and its gradient is None."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):  # pyright: ignore[reportIncompatibleMethodOverride]
        return None


# The function of an operator returns its first outputs. The others are for its derivative.
WITH_SAVED_OUTPUTS = {
    "layer_norm": (lambda x: metalcore.layer_norm(x, (4,)), lambda x: ops.layer_norm(x, 1, None, None, 1e-5), 1),
    "add_layer_norm": (
        lambda x: metalcore.add_layer_norm(x, x),
        lambda x: ops.add_layer_norm(x, x, 1, None, None, 1e-5),
        2,
    ),
    "group_norm": (lambda x: metalcore.group_norm(x, 2), lambda x: ops.group_norm(x, 2, None, None, 1e-5), 1),
    "det": (metalcore.det, ops.det, 1),
    "slogdet": (metalcore.slogdet, ops.slogdet, 2),
}


@pytest.mark.only_on("simulator", "mps", "cuda")  # on the CPU the functions are PyTorch's
@pytest.mark.parametrize("name", WITH_SAVED_OUTPUTS)
def test_outputs_for_the_derivative_have_none(device, name):
    function, operator, results = WITH_SAVED_OUTPUTS[name]
    x = torch.rand(4, 4, device=device).add_(2 * torch.eye(4, device=device)).requires_grad_()
    found, outputs = function(x), operator(x)
    found = (found,) if results == 1 else found
    assert not any(output.requires_grad for output in outputs[results:])
    for ours, output in zip(found, outputs):
        if output.requires_grad:
            assert ours.grad_fn.name() == output.grad_fn.name() == f"metalcore_{name}Backward"
    by_function, by_operator = (
        torch.autograd.grad(sum(y.square().sum() for y in results), x) for results in (found, outputs[:results])
    )
    assert torch.equal(*by_function, *by_operator)


@pytest.mark.only_on("simulator", "mps", "cuda")
@pytest.mark.parametrize("name", WITH_SAVED_OUTPUTS)
def test_a_gradient_that_is_none(device, name):
    for call in WITH_SAVED_OUTPUTS[name][:2]:
        x = torch.eye(4, device=device).requires_grad_()
        found = call(x)
        _NoGradient.apply(found if isinstance(found, torch.Tensor) else found[0]).sum().backward()
        assert x.grad is None or not x.grad.any()


def test_importing_metalcore_completes_every_operator():
    """`import metalcore` alone registers the kernels for CPU and meta tensors, and the derivatives."""
    program = f"""
import torch, metalcore
for name in torch._C._dispatch_get_all_op_names():
    if name.startswith("metalcore::") and not name.startswith("metalcore::_"):
        for key in ("CPU", "Meta"):
            assert torch._C._dispatch_has_computed_kernel_for_dispatch_key(name, key), (name, key)
        if name.removeprefix("metalcore::") in {DIFFERENTIABLE}:
            assert torch._C._dispatch_has_kernel_for_dispatch_key(name, "Autograd"), name
"""
    done = python("-c", program, timeout=300)
    assert done.returncode == 0, done.stderr
