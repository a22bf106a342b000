"""Replays on Metal: what a run costs, counted, and where a command buffer ends."""

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


def test_a_run_allocates_packs_and_looks_up_nothing(extension):
    run(
        extension,
        "-c",
        MODEL
        + """
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
    run(
        extension,
        "-c",
        MODEL
        + """
captured = metalcore.capture(function, x)
expected = function(other)
use_runtime.set_slowness(1e5)
found = captured(other)
assert use_runtime.commits() >= 3
torch.testing.assert_close(found, expected, rtol=0, atol=0)
""",
    )


def test_a_concurrent_encoder_gets_barriers(extension):
    run(
        extension,
        "-c",
        MODEL
        + """
captured = metalcore.capture(function, x)
use_runtime.set_concurrent(True)
assert torch.equal(captured(other), function(other))
""",
    )


def test_memory_of_a_replay_in_flight_is_kept(extension):
    run(
        extension,
        "-c",
        MODEL
        + """
captured = metalcore.capture(function, x)
result = captured(other)
del captured
torch.empty(10**6, device="mps")
assert torch.equal(result, function(other))
""",
    )
