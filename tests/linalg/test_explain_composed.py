"""explain for functions that are made of other functions' operators."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import metalcore
from metalcore._explain_composed import COMPOSED

# (function, shapes, options)
CALLS = [
    ("svdvals", [(3, 20, 12)], {}),
    ("eigvalsh", [(3, 12, 12)], {}),
    ("matrix_rank", [(20, 12)], {}),
    ("matrix_rank", [(12, 12)], {"hermitian": True}),
    ("cond", [(20, 12)], {}),
    ("cond", [(12, 12)], {"p": "fro"}),
    ("pinv", [(3, 20, 12)], {}),
    ("pinv", [(12, 12)], {"hermitian": True}),
    ("trsm", [(12, 12), (12, 2)], {}),
    ("trsm", [(12, 12), (2, 12)], {"side": "R"}),
    ("larft", [(3, 20, 12), (3, 12)], {}),
    ("lstsq", [(3, 20, 12), (3, 20, 2)], {}),
    ("lstsq", [(12, 20), (12,)], {}),
    ("svd_lowrank", [(3, 40, 20)], {}),
    ("svd_lowrank", [(20, 40)], {"q": 4, "niter": 1}),
    ("pca_lowrank", [(20, 5)], {}),
]


class Calls(TorchDispatchMode):
    """Returns the operators of metalcore that run, with the shapes of their matrices."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.namespace == "metalcore":
            tensors = [value for value in args if isinstance(value, torch.Tensor)]
            self.seen.append((function.name().removeprefix("metalcore::"), [tuple(value.shape) for value in tensors]))
        return function(*args, **(kwargs or {}))


def described(calls):
    same = {"inv_ex": "inv"}
    return [(same.get(name, name), list(shapes)) for name, shapes, *_ in calls]


@pytest.mark.parametrize("name, shapes, options", CALLS)
def test_it_describes_the_operators_that_are_called(device, name, shapes, options):
    inputs = [torch.randn(shape, device=device) for shape in shapes]
    with Calls() as calls:
        getattr(metalcore, name)(*inputs, **options)
    assert described(calls.seen) == described(COMPOSED[name](shapes, options))
    assert metalcore.explain(name, *inputs, **options).kernels


def test_parts_follow_one_another():
    plan = metalcore.explain("lstsq", (100, 40), (100, 3))
    parts = metalcore.explain("qr", (100, 40)), metalcore.explain("solve_triangular", (40, 40), (40, 3))
    assert plan.kernels[:2] == ("scale_magnitudes", "scale_matrices")
    assert plan.steps[2:] == parts[0].steps + parts[1].steps and plan.why == "; ".join(part.why for part in parts)


def test_every_function_is_tried():
    assert {name for name, *_ in CALLS} == set(COMPOSED)


@pytest.mark.parametrize("name, shapes", [("lstsq", [(4,)]), ("trsm", [(3, 3)]), ("svd_lowrank", [(3,)])])
def test_shapes_that_do_not_fit(name, shapes):
    with pytest.raises((ValueError, RuntimeError), match="shape"):
        metalcore.explain(name, *shapes)
