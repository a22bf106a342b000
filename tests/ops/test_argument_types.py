"""Every public function with arguments of a wrong type: it raises what PyTorch's namesake raises, or a TypeError."""

import inspect

import pytest
import torch
from torch.utils._pytree import tree_map

import metalcore
from metalcore._core.registry import OPS

# Arguments that are not tried, because PyTorch's function has other names or kinds for them.
LEFT_OUT = {
    "conv2d": ["scale", "residual", "activation"],
    "cross_entropy": [
        "softcap",
        "z_loss",
        "inplace",
        "token_scaling",
        "return_z_loss",
        "return_token_accuracy",
        "return_predicted_tokens",
    ],
    "eigh": ["B", "broadening"],
    "gelu": ["approximate"],
    "linear": ["activation"],
    "lobpcg": ["niter", "tol"],  # -1 and 0 have no end
    "matrix_rank": ["tol"],
    "pinv": ["rcond"],
    "rms_norm": ["offset"],
    "scaled_dot_product_attention": ["window", "lower_right", "softcap", "sinks", "return_lse", "alibi_slopes"],
    "softmax": ["temperature"],
    "svd": ["broadening"],
}
# Options in place of the sample's. PyTorch's matrix_rank takes two numbers or two tensors as tolerances.
OPTIONS = {"matrix_rank": {"rtol": None}}


def call_of(op):
    """PyTorch's namesake, where there is one, and the arguments of the op's smallest sample."""
    sample = op.smallest_sample()
    parameters = inspect.signature(op.function).parameters.values()
    given = dict(zip((one.name for one in parameters), sample.arguments(*sample.make("cpu", torch.float32))))
    given |= {one.name: sample.options.get(one.name, one.default) for one in parameters if one.name not in given}
    arguments = {
        one.name: OPTIONS.get(op.name, {}).get(one.name, given[one.name])
        for one in parameters
        if one.name not in ("out", *LEFT_OUT.get(op.name, ()))
    }
    return op.pytorch, arguments


CALLS = {name: call_of(op) for name, op in OPS.items() if inspect.isfunction(op.function)}


def values():
    """Values of many types. They are made anew for each argument, since an op writes to the tensor that is `out`."""
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


ALSO = (TypeError, ValueError, RuntimeError)  # the errors of functions that PyTorch lacks


def outcome(function, signature, arguments):
    """The type of the error that the call raises, or None."""
    positional = []
    for name, parameter in signature.parameters.items():  # those behind one that is left out are keywords
        if name not in arguments or parameter.kind is not parameter.POSITIONAL_OR_KEYWORD or name == "hermitian":
            break
        positional.append(arguments[name])
    keywords = dict(list(arguments.items())[len(positional) :])
    try:
        function(*positional, **keywords)
    except Exception as error:
        return type(error)
    return None


@pytest.mark.filterwarnings("ignore:An output with one or more elements", "ignore:Casting complex")
@pytest.mark.parametrize("name", CALLS)
def test_wrong_types(device, name):
    namesake, arguments = CALLS[name]
    function = OPS[name].function
    signature = inspect.signature(function)
    found, expected = {}, {}
    for argument in [*arguments, *{"out"} & set(signature.parameters)]:
        for value in values():
            given = {**arguments, argument: value}
            # Parameters with gradients, which lists have, would lose these on the way.
            on_device = tree_map(
                lambda one: one.to(device) if isinstance(one, torch.Tensor) and one.grad is None else one, given
            )
            case = f"{argument}={value!r}"
            ours = outcome(function, signature, on_device)
            if namesake is None:
                found[case], expected[case] = ours is None or issubclass(ours, ALSO), True
                continue
            # PyTorch's overloads take None for few of their options, so options that are None are left out.
            given = {
                key: one
                for key, one in given.items()
                if one is not None
                or key == argument != "out"
                and arguments[key] is not None
                or isinstance(arguments.get(key), torch.Tensor)
            }
            # PyTorch's ops raise different types for wrong values on different devices.
            found[case], expected[case] = ours, outcome(namesake, signature, given)
            if TypeError not in (ours, expected[case]) and None not in (ours, expected[case]):
                found[case] = expected[case]
            if expected[case] is IndexError and ours is None:  # the host does not look at a device's indices
                found[case] = expected[case]
            if case == "pivot=False":  # PyTorch lacks it on the CPU
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
