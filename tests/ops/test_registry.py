"""The registry: every public function has its entry, and an entry says what is so."""

import importlib
import inspect
import pkgutil
import types

import pytest
import torch

import metalcore
from metalcore._core.registry import OPS, Op, Sample, register


def test_every_public_function_has_an_entry():
    names = {"linalg": metalcore.linalg, "optim": metalcore.optim, "": metalcore}
    public = {
        value
        for module in names.values()
        for name in module.__all__
        if isinstance(value := getattr(module, name), (types.FunctionType, type)) and _is_of_an_op(value)
    }
    assert public == {op.function for op in OPS.values()}


def _is_of_an_op(value):
    """Not one of those that compute nothing: switches, explain, compile_shader."""
    return value.__module__.split(".")[1] in ("activation", "linalg", "normalization", "optim")


def test_an_entry_has_the_name_of_its_function():
    for name, op in OPS.items():
        assert name == op.name == op.function.__name__.lower()
        assert op.function is getattr(metalcore, name, metalcore.optim.AdamW)


def test_entries_name_every_operator():
    defined = {
        name.removeprefix("metalcore::")
        for name in torch._C._dispatch_get_all_op_names()
        if name.startswith("metalcore::")
    }
    assert {operator for op in OPS.values() for operator in op.operators} == defined


@pytest.mark.parametrize("op", OPS.values(), ids=lambda op: op.name)
def test_samples(op):
    """Named, the same for the same seed, and of arguments that the function and its reference have."""
    samples = op.samples()
    assert samples and len({sample.name for sample in samples}) == len(samples)
    for sample in samples:
        tensors, others = sample.make("cpu", torch.float32), sample.make("cpu", torch.float32, seed=1)
        for tensor, again, other in zip(tensors, sample.make("cpu", torch.float32), others):
            assert tensor.dtype is torch.float32 and torch.equal(tensor, again)
            assert not tensor.numel() or not torch.equal(tensor, other)
        assert [tuple(tensor.shape) for tensor in tensors] == list(sample.shapes)
        assert all(tensor.device.type == "meta" for tensor in sample.make("meta", torch.float16))
        if not isinstance(op.function, type):
            inspect.signature(op.function).bind(*sample.arguments(*tensors), **sample.options)
        ours, theirs = (op.compute(sample, tensors, function) for function in (op.function, op.reference))
        assert [tensor.shape for tensor in ours] == [tensor.shape for tensor in theirs] and ours


def test_an_op_is_registered_once():
    with pytest.raises(ValueError, match="'silu'"):
        register(OPS["silu"])


def test_an_op_needs_a_reference():
    with pytest.raises(TypeError, match="mine: an op without a namesake needs a reference"):
        Op("mine", lambda x: x, lambda: (Sample("one", ((1,),)),))


def test_no_function_hides_a_module():
    """A name of a package is its module, or something else: not first the one and then the other."""
    for package in (metalcore, *_packages()):
        for module in pkgutil.iter_modules(package.__path__):
            value = getattr(package, module.name, None)
            assert value is None or isinstance(value, types.ModuleType), f"{package.__name__}.{module.name} is {value}"


def _packages():
    for found in pkgutil.walk_packages(metalcore.__path__, "metalcore."):
        if found.ispkg:
            yield importlib.import_module(found.name)
