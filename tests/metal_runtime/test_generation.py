"""A step of generation neither commits nor waits, except for the token that the host reads."""

from running import PROGRAM, needs_runtime, run

pytestmark = needs_runtime

GENERATE = (
    PROGRAM
    + """
import sys
sys.path.insert(0, "tests/generation")
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
