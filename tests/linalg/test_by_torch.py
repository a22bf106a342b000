"""PyTorch lacks MPS kernels of some operators. metalcore calls none of them on a Mac, whatever the input is."""

import pytest
import torch
from cases import CASES, FORMS
from references import assert_same_error
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import metalcore
from metalcore._core.registry import OPS
from metalcore.linalg import _pytorch

pytestmark = pytest.mark.only_on("simulator", "mps")

LACKING = {"_linalg_svd", "_linalg_eigh", "linalg_eig", "_linalg_eigvals", "geqrf", "ormqr", "linalg_lstsq"}
if "linalg_lu_solve" in _pytorch._ONLY_ON_THE_CPU:  # PyTorch 2.13 has a kernel
    LACKING.add("linalg_lu_solve")


REAL_ALONE = {"_linalg_solve_ex", "linalg_lu_factor_ex", "linalg_inv_ex"}


class AsOnAMac(TorchDispatchMode):
    """Raises PyTorch's error for an operator without an MPS kernel, or without one of complex numbers."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        if func.namespace == "aten" and name in LACKING | REAL_ALONE:
            values = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor) and x.is_mps]
            if any(name in LACKING or x.is_complex() for x in values):
                raise NotImplementedError(f"The operator '{func}' is not currently implemented for the MPS device.")
        return func(*args, **kwargs or {})


def test_the_mode_refuses_what_a_mac_refuses(device):
    with AsOnAMac(), pytest.raises(NotImplementedError, match="_linalg_eigh"):
        torch.linalg.eigh(torch.eye(3, device=device))


@pytest.mark.parametrize("name", [name for name in FORMS if hasattr(metalcore.linalg, CASES[name].op.name)])
def test_kernels_and_derivatives_need_none_of_them(device, name):
    with AsOnAMac():
        CASES[name].make(device).run()


@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64])
def test_the_override_of_eig_has_a_derivative(device, dtype):
    A = torch.randn(2, 5, 5, dtype=dtype)

    def gradient(A):
        A = A.requires_grad_()
        L, V = torch.linalg.eig(A)
        loss = L.real.sin().sum() + (V.abs().square() * L.real.unsqueeze(-2)).sum() + torch.linalg.eigvals(A).imag.sum()
        return torch.autograd.grad(loss, A)[0]

    with AsOnAMac(), metalcore.enable_pytorch_overrides("eig"):
        found = gradient(A.to(device))
    torch.testing.assert_close(found.cpu(), gradient(A), rtol=1e-2, atol=1e-2)


# Each takes a batch of square matrices.
FUNCTIONS = {
    "svd": lambda m, A: m.svd(A),
    "svdvals": lambda m, A: m.svdvals(A),
    "eigh": lambda m, A: m.eigh(A),
    "eigvalsh": lambda m, A: m.eigvalsh(A),
    "pinv": lambda m, A: m.pinv(A),
    "pinv, hermitian": lambda m, A: m.pinv(A, hermitian=True),
    "matrix_rank": lambda m, A: m.matrix_rank(A),
    "cond": lambda m, A: m.cond(A),
    "lstsq": lambda m, A: m.lstsq(A, A).solution,
    "lu_solve": lambda m, A: m.lu_solve(*m.lu_factor(A), A),
}


def parts(result):
    return [result] if isinstance(result, torch.Tensor) else list(result)


def compare(found, expected, device):
    for ours, theirs in zip(parts(found), parts(expected)):
        assert ours.device.type == device
        torch.testing.assert_close(ours.cpu(), theirs, rtol=1e-4, atol=1e-4)


def products(factors):
    """What does not depend on the phase of an eigenvector, or of a pair of singular vectors."""
    U, S, Vh = (factors[1], factors[0], factors[1].mH) if len(factors) == 2 else factors
    return S, U * S.unsqueeze(-2) @ Vh, U.mH @ U, Vh @ Vh.mH


@pytest.mark.parametrize("name", FUNCTIONS)
def test_complex_numbers(device, name):
    A = torch.randn(2, 4, 4, dtype=torch.complex64) + 4 * torch.eye(4)
    with AsOnAMac():
        found = FUNCTIONS[name](metalcore.linalg, A.to(device))
    expected = FUNCTIONS[name](torch.linalg, A)  # PyTorch's pinv of complex numbers is wrong inside of a mode
    compare(*(map(products, (found, expected)) if name in ("svd", "eigh") else (found, expected)), device)


@pytest.mark.parametrize(
    "name", [name for name in FUNCTIONS if name != "lstsq"]
)  # PyTorch has no rule for a batch of it
def test_transforms_of_functions(device, name):
    function = FUNCTIONS[name]
    A = torch.randn(3, 4, 4) + 4 * torch.eye(4)
    with AsOnAMac():
        found = torch.func.vmap(lambda A: function(metalcore.linalg, A))(A.to(device))
    compare(found, torch.func.vmap(lambda A: function(torch.linalg, A))(A), device)


def test_forward_mode(device):
    A, direction = torch.randn(2, 4, 4), torch.randn(2, 4, 4)
    with AsOnAMac():
        found = torch.func.jvp(metalcore.svdvals, (A.to(device),), (direction.to(device),))
    compare(found, torch.func.jvp(torch.linalg.svdvals, (A,), (direction,)), device)


def test_reflectors_of_complex_matrices(device):
    A, C = torch.randn(5, 3, dtype=torch.complex64), torch.randn(5, 2, dtype=torch.complex64)
    a, tau = torch.geqrf(A)
    with AsOnAMac():
        compare(metalcore.geqrf(A.to(device)), (a, tau), device)
        compare(metalcore.ormqr(a.to(device), tau.to(device), C.to(device)), torch.ormqr(a, tau, C), device)


def test_out(device):
    A = torch.randn(2, 4, 4, dtype=torch.complex64)
    out = tuple(torch.empty(0, dtype=dtype, device=device) for dtype in (A.dtype, torch.float32, A.dtype))
    with AsOnAMac():
        result = metalcore.svd(A.to(device), out=out)
    assert isinstance(result, torch.return_types.linalg_svd) and all(x is y for x, y in zip(result, out))
    compare(products(out), products(torch.linalg.svd(A)), device)


@pytest.mark.parametrize("name", ["svd", "eigh", "lstsq"])
def test_errors_are_pytorchs(device, name):
    A = torch.ones(3, 3, dtype=torch.int64)
    with AsOnAMac():
        assert_same_error(lambda: FUNCTIONS[name](metalcore, A.to(device)), lambda: FUNCTIONS[name](torch.linalg, A))


def test_tensors_of_two_devices_stay_an_error(device):
    with pytest.raises((RuntimeError, NotImplementedError)):
        metalcore.lstsq(torch.eye(3, device=device), torch.eye(3))


def test_each_function_of_pytorch_is_known():
    functions = {OPS[name].pytorch for name in metalcore.linalg.__all__} - {None}
    assert functions == set(_pytorch._NEEDED)


def test_a_singular_matrix_has_a_second_derivative(device):
    A = torch.randn(2, 4, 4)
    A[1, :, 0] = 0
    with AsOnAMac():
        B = A.to(device).requires_grad_()
        (gradient,) = torch.autograd.grad(metalcore.det(B).sum(), B, create_graph=True)
        (found,) = torch.autograd.grad(gradient.square().sum(), B)
    B = A.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(torch.linalg.det(B).sum(), B, create_graph=True)
    (expected,) = torch.autograd.grad(gradient.square().sum(), B)
    torch.testing.assert_close(found.cpu(), expected, rtol=1e-3, atol=1e-3)
