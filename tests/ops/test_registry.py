"""The registry: every public function has an entry, whose samples reach every kernel, and the docs show it. Type
checkers and readers can rely on annotations, and on names that mean one thing."""

import importlib
import inspect
import pkgutil
import types
from pathlib import Path

import pytest
import torch
from processes import python
from torch.overrides import TorchFunctionMode

import metalcore
from metalcore import nn
from metalcore._core.registry import OPS, Op, Sample, register
from metalcore.cli.ops import page

ROOT = Path(__file__).resolve().parents[2]


def computing():
    """The public functions that compute something. The other public names are imported when they are first used."""
    names = set(metalcore.__all__) - set(metalcore._LAZY) - metalcore._LAZY_MODULES
    functions = {name: getattr(metalcore, name) for name in names} | vars(metalcore.optim)
    for package in (metalcore.paged, metalcore.double):
        functions |= {name: value for name, value in vars(package).items() if inspect.isfunction(value)}
    results = {value for value in functions.values() if inspect.isclass(value) and issubclass(value, tuple)}
    return {value for name, value in functions.items() if callable(value) and not name.startswith("_")} - results


def test_every_public_function_has_an_entry():
    assert computing() == {op.function for op in OPS.values()}
    assert {getattr(metalcore, name) for name in metalcore.linalg.__all__} <= computing()


def test_names():
    for name, op in OPS.items():
        assert name == op.name and op.function.__name__.lower() == name
        samples = [sample.name for sample in op.samples()]
        assert samples and len(samples) == len(set(samples)), name
    with pytest.raises(ValueError, match="there is an op 'silu' already"):
        register(OPS["silu"])
    with pytest.raises(TypeError, match="an op without a namesake needs a reference"):
        Op("f", abs, lambda: (Sample("one", ((1,),)),))


def test_one_word_finds_a_family():
    """The name of the op's package is that of its folders, and of its module of rules."""
    families = {op.family for op in OPS.values()}
    for room in ("kernels", "csrc/ops", "benchmarks/families"):
        folders = {path.parent.name for path in (ROOT / room).glob("*/[!_]*.*")} - {"common", "__pycache__"}
        assert folders <= families and (folders == families or room == "benchmarks/families"), room
    assert {path.stem for path in (ROOT / "metalcore/distributed/rules").glob("[!_]*.py")} == families
    assert {path.parent.name for path in (ROOT / "tests").glob("*/test_*.py")} >= families


def test_operators_are_those_that_are_registered():
    registered = {
        name.removeprefix("metalcore::").split(".")[0]
        for name in torch._C._dispatch_get_all_op_names()
        if name.startswith("metalcore::") and not name.startswith("metalcore::_")
    }
    # Which of two packed forms with almost the same error quantize finds is no formula in float64: tests/quant has it.
    assert {name for op in OPS.values() for name in op.operators} | {"quantize"} == registered


def test_a_namesake_has_the_arguments_of_the_samples():
    """PyTorch's function takes the same arguments on the CPU, so that a user can replace one by the other."""
    for op in OPS.values():
        if op.namesake and inspect.isfunction(op.function):
            sample = op.smallest_sample()
            op.pytorch(*sample.arguments(*sample.make("cpu", torch.float32)), **sample.options)


class NothingFromTheHost(TorchFunctionMode):
    """Refuses tensors that are made of the host's numbers or lie in its memory."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        assert func not in (torch.tensor, torch.as_tensor), f"{func.__name__} copies from the host's memory"
        result = func(*args, **(kwargs or {}))
        assert not isinstance(result, torch.Tensor) or result.is_meta, f"{func} makes a tensor on the host"
        return result


@pytest.mark.parametrize("op", [op for op in OPS.values() if not op.waits], ids=lambda op: op.name)
def test_the_device_makes_the_arguments_of_samples(op):
    """A CUDA graph cannot capture a copy from the host's memory, and graphs of samples are captured."""
    for sample in op.samples():
        tensors = sample.make("meta", torch.float32)
        with NothingFromTheHost():
            sample.arguments(*tensors)


@pytest.mark.only_on("simulator")  # on a GPU tests/cuda_device runs the program
def test_every_kernel_is_launched():
    """A sample of an op or a section of the program launches it. The ops' own tests run them; the plans tell which."""
    program = ROOT / "tests" / "cuda_device" / "every_kernel.py"
    found = python(program, "--device", "meta")
    assert found.returncode == 0, found.stdout + found.stderr


def test_the_docs_show_it():
    assert (ROOT / "docs" / "ops.md").read_text() == page(), "run python -m metalcore ops > docs/ops.md"


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
