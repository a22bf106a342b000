"""Replays on Metal: what a run costs, counted, where a command buffer ends, and a step of generation, which neither
commits nor waits, except for the token that the host reads."""

from running import PROGRAM, needs_runtime, run

pytestmark = needs_runtime

MODEL = (
    PROGRAM
    + """
from torch.utils._python_dispatch import TorchDispatchMode

weight = torch.rand(300, device="mps")
x, other = torch.randn(2, 4, 300, device="mps")

def function(x):
    y = metalcore.silu(metalcore.rms_norm(x, (300,), weight))
    return metalcore.softmax(metalcore.add_rms_norm(x, metalcore.silu(y))[0], -1)

def dispatches():
    return use_runtime.counts()[1][0]

class Operators(TorchDispatchMode):
    names = []
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))
"""
)


def run_model(extension, program):
    """Runs a program that has the function, two inputs and the counters of MODEL."""
    run(extension, "-c", MODEL + program)


def test_a_run_allocates_packs_and_looks_up_nothing(extension):
    run_model(
        extension,
        """
captured = metalcore.capture(function, x)
before, ran = use_runtime.made(), dispatches()
with Operators() as operators:
    for _ in range(3):
        captured(*captured.inputs)
assert use_runtime.made() == before and not operators.names, (use_runtime.made(), before, operators.names)
assert dispatches() == ran + 3 * len(captured.kernels) == ran + 15

captured(other)  # one copy of PyTorch's
assert use_runtime.made() == before
assert torch.equal(captured(other), function(other))

bound = metalcore.capture(function, x, bind=True)
before = use_runtime.made()
with Operators() as operators:
    result = bound(other)
assert use_runtime.made() == before and operators.names == ["metalcore._bind_replay.default"], operators.names
assert torch.equal(result, function(other))
assert use_runtime.made()[0] > before[0] and use_runtime.made()[1] == before[1] + 5  # as the function itself does
""",
    )


def test_a_long_replay_is_committed_in_parts(extension):
    run_model(
        extension,
        """
captured = metalcore.capture(function, x)
expected = function(other)
use_runtime.set_slowness(1e5)
found = captured(other)
assert use_runtime.commits() >= 3
torch.testing.assert_close(found, expected, rtol=0, atol=0)
""",
    )


def test_a_concurrent_encoder_gets_barriers(extension):
    run_model(
        extension,
        """
captured = metalcore.capture(function, x)
use_runtime.set_concurrent(True)
assert torch.equal(captured(other), function(other))
""",
    )


def test_memory_of_a_replay_in_flight_is_kept(extension):
    run_model(
        extension,
        """
captured = metalcore.capture(function, x)
result = captured(other)
del captured
torch.empty(10**6, device="mps")
assert torch.equal(result, function(other))
""",
    )


GENERATE = (
    PROGRAM
    + """
import sys
sys.path[:0] = ["tests/generation", "tests"]
from small_models import prompts, small_model
from torch.utils._python_dispatch import TorchDispatchMode
from metalcore.generation import stream
from metalcore.integrations import transformers as metalcore_transformers
from metalcore.simulator import device

class Waits(TorchDispatchMode):
    "Operators that need a number on the host, or memory there."
    ALWAYS = ("_local_scalar_dense", "nonzero", "masked_select", "equal", "is_nonzero", "unique", "item")
    found = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        tensors = [x for x in (*args, *(kwargs or {}).values(), result) if isinstance(x, torch.Tensor)]
        crosses = len({x.device.type for x in tensors if x.dim()}) > 1
        mask = any(isinstance(index, torch.Tensor) and index.dtype is torch.bool
                   for x in args if isinstance(x, (tuple, list)) for index in x)
        if func._schema.name.split("::")[1] in self.ALWAYS or crosses or mask:
            self.found.append(str(func))
        return result

def count(family, cache):
    model, per_step = small_model(family, "mps"), []
    torch._C._metalcore_simulates_mps = False  # checks that the simulated device affords read pages' numbers
    tokens = stream(model, prompts("mps"), max_new_tokens=8, cache=cache)
    next(tokens)
    while True:
        Waits.found, before = [], (use_runtime.commits(), use_runtime.counts()[1][0])
        with Waits():
            if next(tokens, None) is None:
                return per_step
        per_step.append(Waits.found)
        assert use_runtime.commits() == before[0]
        assert use_runtime.counts()[1][0] > before[1]
"""
)


def test_a_token_costs_one_wait(extension):
    run(
        extension,
        "-c",
        GENERATE
        + """
device.set_strict(True)  # what PyTorch has no kernel for on a Mac would wait for the CPU
with metalcore_transformers.patch():
    for family, cache in (("llama", "static"), ("llama", "paged"), ("gemma2", "static")):
        steps = count(family, cache)
        assert len(steps) == 7 and all(len(waits) == 1 for waits in steps), steps

from transformers.models.llama import modeling_llama
forward = modeling_llama.LlamaMLP.forward
modeling_llama.LlamaMLP.forward = lambda self, x: forward(self, x) * (1 if x.sum().item() < 1e9 else 2)
assert all(len(waits) == 3 for waits in count("llama", "static"))
""",
    )
