"""Type checkers and readers can rely on annotations, and on names that mean one thing."""

import importlib
import inspect
import pkgutil
import types
from pathlib import Path

import pytest

import metalcore
from metalcore import nn
from metalcore._core.registry import OPS

FUNCTIONS = [
    *(op.function for op in OPS.values() if inspect.isfunction(op.function)),
    *(value for name in sorted(metalcore._LAZY) if inspect.isfunction(value := getattr(metalcore, name))),
    *(getattr(nn, name).forward for name in nn.__all__),
]


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda function: function.__qualname__)
def test_annotations(function):
    signature = inspect.signature(function)
    without = [name for name, each in signature.parameters.items() if each.annotation is each.empty and name != "self"]
    assert not without and signature.return_annotation is not signature.empty


def test_the_package_says_that_it_is_typed():
    assert Path(metalcore.__file__).with_name("py.typed").exists()


@pytest.mark.only_on("simulator")  # it imports metalcore.simulator
def test_no_function_hides_a_module():
    """A name in a package means its module or something else, and that never changes."""
    packages = [importlib.import_module(found.name) for found in _found() if found.ispkg]
    for package in (metalcore, *packages):
        for module in pkgutil.iter_modules(package.__path__):
            value = getattr(package, module.name, None)
            assert value is None or isinstance(value, types.ModuleType), f"{package.__name__}.{module.name} is {value}"


def _found():
    return pkgutil.walk_packages(metalcore.__path__, "metalcore.")
