"""metalcore.explain: which kernels a call would run, and why."""

from __future__ import annotations

import contextlib
import inspect
from typing import Any

import torch
from torch import Tensor

from ._core.registry import OPS, Op
from .recording import Dispatch, Plan, Recording, on_meta

__all__ = ["Explanation", "explain"]


class Explanation:
    """How a call would run.

    Attributes:
        op: the name of the op.
        variant: the variants that the plans of its operators chose: "simd", "block, simd", or "torch" for PyTorch's op.
        why: the reasons, in words.
        plans: all choices, also those of operators inside other operators.
        steps: the dispatches, in order.
        by_torch: the names of PyTorch's operators that run before, between and after the dispatches.
    """

    def __init__(self, op: str, recording: Recording):
        self.op = op
        self.recording = recording
        self.plans: tuple[Plan, ...] = recording.plans
        self.steps: tuple[Dispatch, ...] = recording.dispatches
        self.by_torch = tuple(name for _, name in recording.torch_steps)
        outer = [plan for plan in self.plans if not plan.inner]
        self.variant = ", ".join(dict.fromkeys(plan.variant for plan in outer)) or "torch"
        self.why = "; ".join(dict.fromkeys(plan.why for plan in outer)) or "it is left to PyTorch"

    @property
    def kernels(self) -> tuple[str, ...]:
        """The names of the kernels, each once, in the order in which they first run."""
        return tuple(dict.fromkeys(step.kernel for step in self.steps))

    def as_dict(self) -> dict[str, Any]:
        """Returns the explanation as lists, dicts, strings and numbers, for JSON."""
        names = ("kernel", "grid", "threadgroup", "threads")
        steps = [{name: getattr(step, name) for name in names} for step in self.steps]
        return {"op": self.op, "variant": self.variant, "why": self.why, "steps": steps, "by_torch": [*self.by_torch]}

    def __str__(self):
        return "\n".join([f"{self.op}: {self.variant} ({self.why})", *(f"  {line}" for line in self.recording.lines())])


def explain(op: str, *inputs: Any, dtype: torch.dtype | None = None, **options: Any) -> Explanation:
    """Returns how metalcore would run an op. The op's own code runs on tensors without memory, and no kernel runs.

    Args:
        op: the op's name, as in metalcore.<op>.
        inputs: a tensor or a shape for each tensor argument, in their order, or for each parameter of an optimizer.
            Arguments with a default may be omitted. The plan is for the first tensor's device, or for PyTorch's
            accelerator if there are only shapes.
        dtype: the dtype of the inputs. The default is the first tensor's, or float32 if there are only shapes.
            Tensors of integers keep theirs.
        options: the op's other arguments. `backward=True` gives the kernels of the derivative.

    Returns:
        An Explanation. `print` shows it, with one line for each kernel.

    Raises:
        ValueError: metalcore has no such op, or the op does not take these arguments.
        TypeError: an input is neither a tensor nor a shape, or the op does not have an argument.

    Example:
        >>> metalcore.explain("qr", torch.empty(8, 4, device="mps")).variant
        'simd'
    """
    if not isinstance(op, str):
        raise TypeError(f"explain(): op must be a name, not {type(op).__name__}")
    if op not in OPS:
        raise ValueError(f"explain knows no op {op!r}; it knows {', '.join(sorted(OPS))}")
    entry = OPS[op]
    shapes = [_shape(value) for value in inputs]
    backward = options.pop("backward", False)
    if backward and not entry.backward:
        raise TypeError(f"explain(): {op} has no argument 'backward': it has no derivative")
    tensors = [value for value in inputs if isinstance(value, Tensor)]
    if dtype is None:
        dtype = tensors[0].dtype if tensors else torch.float32
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"explain(): dtype must be a torch.dtype, not {dtype!r}")
    devices = [*(tensor.device.type for tensor in tensors[:1]), torch._C._get_accelerator().type, "mps"]
    device = next(device for device in devices if device in ("mps", "cuda"))
    if isinstance(entry.function, type):
        return Explanation(op, _recorded_step(entry, shapes, dtype, device, options))
    _check_options(entry, options)
    return Explanation(op, _recorded(entry, inputs, shapes, dtype, device, options, backward))


@contextlib.contextmanager
def _refusals(op):
    """Raises what an op says of its arguments as explain's own error."""
    try:
        yield
    except (RuntimeError, IndexError, TypeError, ValueError, OverflowError) as error:
        raise ValueError(f"explain(): {op} does not take these arguments: {error}") from error


def tensor_arguments(entry):
    parameters = inspect.signature(entry.function).parameters
    return [name for name, parameter in parameters.items() if "Tensor" in str(parameter.annotation) and name != "out"]


def _check_options(entry, options):
    _, *others = inspect.signature(entry.function).parameters
    names = [*others, *["backward"] * entry.backward]
    for name in options:
        if name not in names:
            raise TypeError(f"explain(): {entry.name} has no argument {name!r}; it has {', '.join(names)}")


def arguments_of(entry: Op, inputs, shapes, dtype, options, make) -> dict[str, Any]:
    """Returns the arguments of an op by name, without those in `options`, from which it takes the tensors' shapes.
    `make(shape, dtype)` makes tensors."""
    names = tensor_arguments(entry)
    if len(shapes) > len(names):
        raise ValueError(f"explain(): {entry.name} takes {len(names)} tensors, not {len(shapes)}")
    if not shapes:
        raise ValueError(f"explain(): {entry.name} needs the shape of {names[0]}")
    shape_of = dict(zip(names, shapes))
    for name in [name for name in names if name in options]:
        value = options.pop(name)
        if value is not None:
            shape_of[name] = _shape(value)
    with _refusals(entry.name):
        arguments = {name: make(shape, entry.integers.get(name, dtype)) for name, shape in shape_of.items()}
        # Integer tensors, such as packed weights, keep their dtype.
        for name, value in zip(names, inputs):
            if isinstance(value, Tensor) and not value.is_floating_point() and not value.is_complex():
                arguments[name] = torch.empty_like(value, device="meta")
    for name, parameter in inspect.signature(entry.function).parameters.items():
        if name not in arguments and name not in options and parameter.default is parameter.empty:
            arguments[name] = _usual_value(entry, name, shapes[0], dtype, make)
    return arguments


def _recorded(entry: Op, inputs, shapes, dtype, device, options, backward):
    arguments = arguments_of(entry, inputs, shapes, dtype, options, _tensor)
    if not backward:
        with _refusals(entry.name), on_meta(device) as recorder, torch.no_grad():
            entry.function(**arguments, **options)
        return recorder.recording
    for name in tensor_arguments(entry):
        if name in arguments:
            arguments[name].requires_grad_(arguments[name].is_floating_point())
    with _refusals(entry.name), on_meta(device), torch.enable_grad():
        results = entry.results(entry.function(**arguments, **options))
    outputs = [output for output in results if output.requires_grad]
    with on_meta(device) as recorder:
        torch.autograd.backward(outputs, [torch.empty_like(output) for output in outputs])
    return recorder.recording


def _tensor(shape, dtype):
    return torch.empty(shape, dtype=dtype, device="meta")


def _usual_value(entry, name, first, dtype, make):
    """Returns a value for an argument that has no default and was not given."""
    usual = {"dim": -1, "upper": False, "normalized_shape": first[-1:]}
    if name in usual:
        return usual[name]
    if name == "residual":
        return make(first, dtype)
    raise ValueError(f"explain(): {entry.name} needs the shape of {name}")


def _recorded_step(entry, shapes, dtype, device, options):
    with _refusals(entry.name), on_meta(device):
        parameters = [torch.nn.Parameter(torch.empty(shape, dtype=dtype, device="meta")) for shape in shapes]
        for parameter in parameters:
            parameter.grad = torch.empty_like(parameter)
        optimizer = entry.function(parameters, **options)
    with on_meta(device) as recorder:
        optimizer.step()
    return recorder.recording


def _shape(value):
    if isinstance(value, Tensor):
        return tuple(value.shape)
    if not isinstance(value, (tuple, list)) or not all(isinstance(size, int) for size in value):
        raise TypeError(f"explain(): an input must be a tensor or a shape, such as (8, 64), not {value!r}")
    if any(size < 0 for size in value):
        raise ValueError(f"explain(): a shape cannot have a negative size: {tuple(value)}")
    return tuple(value)
