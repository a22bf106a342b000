"""Every public function with arguments of a wrong type: it raises what PyTorch's namesake raises, or a TypeError."""

import inspect

import pytest
import torch
import torch.nn.functional as F

import metalcore

L = torch.linalg
torch.manual_seed(0)
A, TALL, B = torch.randn(2, 4, 4), torch.randn(2, 5, 3), torch.randn(2, 4, 2)
PD = A @ A.mT + 4 * torch.eye(4)
LU, PIVOTS = L.lu_factor(A)
REFLECTORS, TAU = torch.geqrf(TALL)

# PyTorch's namesake, where there is one, and a call's arguments.
CALLS = {
    "add_rms_norm": (None, dict(x=A, residual=A, weight=A[0, 0], eps=1e-5)),
    "cholesky": (L.cholesky, dict(A=PD, upper=False)),
    "cholesky_ex": (L.cholesky_ex, dict(A=PD, upper=False, check_errors=False)),
    "cholesky_solve": (torch.cholesky_solve, dict(B=B, L=L.cholesky(PD), upper=False)),
    "cond": (L.cond, dict(A=A, p=None)),
    "det": (L.det, dict(A=A)),
    "eigh": (L.eigh, dict(A=PD, UPLO="L")),
    "eigvalsh": (L.eigvalsh, dict(A=PD, UPLO="L")),
    "geqrf": (torch.geqrf, dict(input=TALL)),
    "gelu": (F.gelu, dict(x=A)),
    "householder_product": (L.householder_product, dict(A=REFLECTORS, tau=TAU)),
    "inv": (L.inv, dict(A=A)),
    "inv_ex": (L.inv_ex, dict(A=A, check_errors=False)),
    "larfb": (None, dict(V=TALL, T=PD[:, :3, :3], C=TALL, left=True, transpose=False)),
    "larft": (None, dict(V=TALL, tau=TAU)),
    "log_softmax": (torch.log_softmax, dict(x=A, dim=-1, dtype=None)),
    "lstsq": (L.lstsq, dict(A=TALL, B=TALL, rcond=None, driver=None)),
    "lu": (L.lu, dict(A=A, pivot=True)),
    "lu_factor": (L.lu_factor, dict(A=A, pivot=True)),
    "lu_factor_ex": (L.lu_factor_ex, dict(A=A, pivot=True, check_errors=False)),
    "lu_solve": (L.lu_solve, dict(LU=LU, pivots=PIVOTS, B=B, left=True, adjoint=False)),
    "matrix_rank": (L.matrix_rank, dict(A=TALL, hermitian=False, atol=None, rtol=None)),
    "ormqr": (torch.ormqr, dict(input=REFLECTORS, tau=TAU, other=TALL, left=True, transpose=False)),
    "pca_lowrank": (torch.pca_lowrank, dict(A=TALL, q=2, center=True, niter=1)),
    "pinv": (L.pinv, dict(A=TALL, hermitian=False, atol=None, rtol=None)),
    "qr": (L.qr, dict(A=TALL, mode="reduced")),
    "rms_norm": (F.rms_norm, dict(x=A, normalized_shape=(4,), weight=A[0, 0], eps=None)),
    "silu": (F.silu, dict(x=A)),
    "slogdet": (L.slogdet, dict(A=A)),
    "softmax": (torch.softmax, dict(x=A, dim=-1, dtype=None)),
    "solve": (L.solve, dict(A=A, B=B, left=True)),
    "solve_ex": (L.solve_ex, dict(A=A, B=B, left=True, check_errors=False)),
    "solve_triangular": (L.solve_triangular, dict(A=A, B=B, upper=True, left=True, unitriangular=False)),
    "svd": (L.svd, dict(A=TALL, full_matrices=True, driver=None)),
    "svd_lowrank": (torch.svd_lowrank, dict(A=TALL, q=2, niter=1, M=None)),
    "svdvals": (L.svdvals, dict(A=TALL, driver=None)),
    "syrk": (None, dict(A=A, C=PD, alpha=1.0, beta=1.0, transpose=False, triangle="full")),
    "trsm": (None, dict(A=A, B=B, side="L", uplo="L", transa="N", diag="N", alpha=1.0)),
}


def values():
    """Anew for each argument, since a tensor is written to as `out`."""
    return [
        None,
        0,
        1,
        -1,
        1.5,
        1j,
        "x",
        [1],
        [],
        (1,),
        True,
        False,
        object(),
        torch.float32,
        torch.tensor(1),
        torch.tensor(True),
        torch.arange(3),
        torch.ones(0),
    ]


ALSO = (TypeError, ValueError, RuntimeError)  # of functions that are ours alone


def outcome(function, signature, arguments):
    """The type of the error, or None."""
    positional = [
        arguments[name]
        for name, parameter in signature.parameters.items()
        if name in arguments and parameter.kind is parameter.POSITIONAL_OR_KEYWORD and name != "hermitian"
    ]
    keywords = {
        name: value
        for name, value in arguments.items()
        if name == "hermitian" or signature.parameters[name].kind is inspect.Parameter.KEYWORD_ONLY
    }
    try:
        function(*positional, **keywords)
    except Exception as error:
        return type(error)
    return None


def test_every_function_is_tried():
    functions = {*metalcore.linalg.__all__, "add_rms_norm", "gelu", "log_softmax", "rms_norm", "silu", "softmax"}
    assert set(CALLS) == functions


@pytest.mark.filterwarnings("ignore:An output with one or more elements", "ignore:Casting complex")
@pytest.mark.parametrize("name", CALLS)
def test_wrong_types(device, name):
    namesake, arguments = CALLS[name]
    function = getattr(metalcore, name)
    signature = inspect.signature(function)
    found, expected = {}, {}
    for argument in [*arguments, *{"out"} & set(signature.parameters)]:
        for value in values():
            given = {**arguments, argument: value}
            on_device = {key: one.to(device) if isinstance(one, torch.Tensor) else one for key, one in given.items()}
            case = f"{argument}={value!r}"
            ours = outcome(function, signature, on_device)
            if namesake is None:
                found[case], expected[case] = ours is None or issubclass(ours, ALSO), True
                continue
            # torch's overloads take None for few of their options.
            given = {
                key: one
                for key, one in given.items()
                if one is not None
                or key == argument != "out"
                and arguments[key] is not None
                or isinstance(arguments.get(key), torch.Tensor)
            }
            # Among its errors of values, PyTorch's ops differ between devices.
            found[case], expected[case] = ours, outcome(namesake, signature, given)
            if TypeError not in (ours, expected[case]) and None not in (ours, expected[case]):
                found[case] = expected[case]
            if case == "pivot=False":  # which PyTorch has not on the CPU
                found[case] = expected[case]
    assert found == expected


@pytest.mark.parametrize(
    "call, argument",
    [
        (lambda A: metalcore.syrk([1]), "A"),
        (lambda A: metalcore.syrk(A, 1), "C"),
        (lambda A: metalcore.syrk(A, transpose=None), "transpose"),
        (lambda A: metalcore.trsm(A, None), "B"),
        (lambda A: metalcore.larft(A, 1), "tau"),
        (lambda A: metalcore.larfb(A, A, A, 1), "left"),
    ],
)
def test_the_error_names_the_argument(device, call, argument):
    with pytest.raises(TypeError, match=rf"\w+: {argument} must be a (tensor|bool), not \w+"):
        call(torch.randn(3, 3, device=device))


@pytest.mark.parametrize("name", ["lstsq", "cholesky_solve", "solve", "solve_triangular"])
def test_none_in_place_of_a_matrix(device, name):
    A = torch.randn(3, 3, device=device)
    options = {"upper": True} if name == "solve_triangular" else {}
    for pair in ((A, None), (None, A), (None, None)):
        with pytest.raises(TypeError, match="must be Tensor, not NoneType|invalid combination"):
            getattr(metalcore, name)(*pair, **options)
