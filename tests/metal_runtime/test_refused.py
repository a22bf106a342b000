"""The device and its compiler: no default device, kernels that Metal refuses, programs that have what was asked for."""

import json
import shutil

import pytest
from build_runtime import build_with_fault
from running import PROGRAM, needs_runtime, run

pytestmark = needs_runtime

# Training with several ops. The reference are PyTorch's own.
TRAINING = (
    PROGRAM
    + """
import os, sys, warnings
import torch.nn.functional as F
warnings.simplefilter("ignore")

def train(enabled):
    torch.manual_seed(0)
    weights = [torch.nn.Parameter(torch.randn(16, 16) / 4) for _ in range(2)]
    scale = torch.nn.Parameter(torch.ones(16))
    made = [torch.nn.Parameter(p.detach().to("mps")) for p in (*weights, scale)]
    A = (torch.randn(4, 16, 16) / 16 + torch.eye(16)).to("mps")
    x = torch.randn(4, 16).to("mps")
    softmax, silu, norm, solve, optimizer = (
        (metalcore.softmax, metalcore.silu, metalcore.rms_norm, metalcore.solve, metalcore.optim.AdamW)
        if enabled == "functions" else
        (torch.softmax, F.silu, F.rms_norm, torch.linalg.solve, torch.optim.AdamW)
    )
    adamw = optimizer(made, lr=0.1)
    losses = []
    for _ in range(3):
        adamw.zero_grad()
        y = norm(silu(x @ made[0]), (16,), made[2], 1e-6)
        y = softmax(solve(A, (y @ made[1]).unsqueeze(-1)).squeeze(-1), -1)
        loss = -(y[:, 3] + 1e-3).log().sum()
        loss.backward()
        adamw.step()
        losses.append(loss.item())
    return losses

expected = train("nothing")
os.environ["METAL_RUNTIME_REFUSES"] = sys.argv[1]
"""
)


def refusing(extension, names, program, **environment):
    return json.loads(run(extension, "-c", TRAINING + program + "\nprint(json.dumps(found))", names, **environment))


@pytest.mark.parametrize("way", ["functions", "overrides"])
@pytest.mark.parametrize(
    "names, families",
    [
        ("silu,lu_", {"activation/activation", "linalg/lu_simd"}),
        (
            "softmax_backward,column_sums,adamw",
            {"activation/softmax_backward", "normalization/column_sums", "optim/adamw"},
        ),
    ],
    ids=["forward", "backward"],
)
def test_training_goes_on(extension, way, names, families, tmp_path):
    program = f"""
import contextlib, json
with metalcore.enable_pytorch_overrides() if {way!r} == "overrides" else contextlib.nullcontext():
    losses = train({way!r})
torch.testing.assert_close(torch.tensor(losses), torch.tensor(expected), rtol=1e-4, atol=1e-4)
dispatched = {{_C.mps_kernels()[kernel] for kernel in use_runtime.counts()[2]}}
found = [_C.mps_refused(), sorted(dispatched)]
"""
    refused, dispatched = refusing(extension, names, program, METALCORE_CACHE_DIR=str(tmp_path))
    assert refused.keys() == families
    assert all("Compiler encountered an internal error" in message for message in refused.values())
    assert not families & {*dispatched} and len(dispatched) >= 4  # one refused kernel does not cost the rest


def test_every_op_where_metal_refuses_every_kernel(extension):
    run(
        extension,
        "-c",
        PROGRAM
        + """
import warnings
warnings.simplefilter("ignore", RuntimeWarning)
from metalcore._core.accuracy import shares
from metalcore._core.registry import OPS
for op in OPS.values():
    sample = op.smallest_sample()
    try:
        found = shares(op, sample, "mps", torch.float32)
    except RuntimeError as error:
        assert op.error and op.error in str(error), (op.name, error)
        continue
    assert op.error is None, op.name
    assert max(found.values()) <= 1, (op.name, sample.name, found)
assert use_runtime.counts()[1] == [0, 0, 0] and len(_C.mps_refused()) > 15, _C.mps_refused().keys()
""",
        METAL_RUNTIME_REFUSES=",".join("abcdefghijklmnopqrstuvwxyz"),
    )


@pytest.fixture
def copied(extension, tmp_path):
    """A copy of the extension with a folder lib of its own."""
    copy = tmp_path / "_C.abi3.so"
    shutil.copy(extension, copy)
    shutil.copytree(extension.parent / "lib", tmp_path / "lib", symlinks=True)
    return copy


WARNED = (
    PROGRAM
    + """
import json, warnings
import torch.nn.functional as F
x = torch.randn(4, 16, device="mps")
def twice(call):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            call()
    return [str(warning.message) for warning in caught if warning.category is RuntimeWarning]
"""
)


def test_a_program_that_does_not_compile(copied, tmp_path):
    (tmp_path / "lib" / "metal" / "activation" / "activation.metal").write_text("#error this does not compile\n")
    run(
        copied,
        "-c",
        WARNED
        + """
(said,) = twice(lambda: torch.testing.assert_close(metalcore.silu(x), F.silu(x)))
assert "activation.metal" in said and "#error this does not compile" in said, said
assert use_runtime.counts()[1] == [0, 0, 0] and _C.mps_refused().keys() == {"activation/activation"}
metalcore.softmax(x, -1)
assert use_runtime.counts()[1] == [1, 0, 0] and _C.mps_refused().keys() == {"activation/activation"}
""",
    )
    # Where warnings are errors, the call that would have warned raises one.
    said = run(
        copied,
        "-c",
        WARNED
        + """
warnings.simplefilter("error", RuntimeWarning)
for call in (metalcore.silu, metalcore.silu):
    try:
        call(x)
        print("went on")
    except RuntimeWarning as warning:
        assert "this does not compile" in str(warning)
        print("raised")
""",
    )
    assert said == "raised\nwent on\n"


def test_a_binary_that_does_not_open(copied, tmp_path):
    (tmp_path / "lib" / "metal" / "activation" / "softmax.metallib").write_bytes(b"")
    run(
        copied,
        "-c",
        WARNED
        + """
(said,) = twice(lambda: torch.testing.assert_close(metalcore.softmax(x, -1), torch.softmax(x, -1)))
assert "softmax.metallib: not for this machine" in said and "source" in said, said
assert use_runtime.counts()[1] == [2, 0, 0] and not _C.mps_refused()
""",
    )


def test_a_pipeline_with_fewer_threads_than_a_plan_needs(extension):
    run(
        extension,
        "-c",
        WARNED
        + """
(said,) = twice(lambda: torch.testing.assert_close(metalcore.softmax(x, -1), torch.softmax(x, -1)))
assert "softmax.metal: kernel 'softmax_thread_float': a threadgroup of" in said, said
assert "its pipeline takes up to 16" in said, said
assert use_runtime.counts()[1] == [0, 0, 0]
""",
        METAL_RUNTIME_THREADS="16",
    )


def test_a_program_has_what_was_asked_for(extension):
    run(
        extension,
        "-c",
        PROGRAM
        + """
x = torch.randn(4, 16, device="mps")
for _ in range(2):
    metalcore.softmax(x, -1)
assert use_runtime.compiled() == (1, 1)
metalcore.softmax(x.half(), -1)
assert use_runtime.compiled() == (2, 2)
metalcore.softmax(torch.randn(2, 40000, device="mps"), -1)  # two kernels of one family
assert use_runtime.compiled() == (3, 4)
kernels = [name for name, family in _C.mps_kernels().items() if family == "activation/softmax"]
_C.mps_compile(*kernels)
assert use_runtime.compiled() == (4, len(kernels))
""",
    )


def test_kernels_are_compiled_on_several_threads(extension):
    run(
        extension,
        "-c",
        PROGRAM
        + """
from concurrent.futures import ThreadPoolExecutor
families = sorted(set(_C.mps_kernels().values()))[::8]  # all of them take as long in test_metal_runtime.py
names = [name for name, family in _C.mps_kernels().items() if family in families]
with ThreadPoolExecutor(4) as pool:
    made = list(pool.map(lambda name: _C.mps_compile(name), names * 2))
assert [list(each) for each in made] == [[name] for name in names * 2]
""",
    )


def test_explain_and_recordings_of_a_refused_call(extension):
    run(
        extension,
        "-c",
        WARNED
        + """
from metalcore.recording import record
y, recording = record(metalcore.silu, x)
torch.testing.assert_close(y, F.silu(x))
assert recording.dispatches == () and ("aten::silu" in name for _, name in recording.torch_steps)
""",
        METAL_RUNTIME_REFUSES="silu",
    )


def test_commands_list_what_metal_refuses(extension, tmp_path):
    commands = (
        PROGRAM
        + """
import contextlib, io, json
from metalcore._core.registry import OPS
from metalcore.__main__ import main
from metalcore.cli import selftest
for name in OPS.keys() - {"silu"}:
    del OPS[name]
every = selftest._families()
few = {name: every[name] for name in ("activation/activation", "activation/softmax")}
selftest._families = lambda: few  # a compilation of all of them takes a minute
def command(*arguments):
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        status = main([*arguments, "--json"])
    return status, json.loads(out.getvalue())
status, report = command("selftest", "--device", "simulator")
failed = {check["name"]: check["note"] for check in report["checks"] if check["status"] == "FAILED"}
_, found = command("info")
print(json.dumps([status, failed, found["refused by Metal"]]))
"""
    )
    environment = {"METALCORE_CACHE_DIR": str(tmp_path)}
    status, failed, listed = json.loads(run(extension, "-c", commands, METAL_RUNTIME_REFUSES="relu_b", **environment))
    assert failed.keys() == {"kernels of activation/activation", "no kernel is left to PyTorch's ops"}
    assert status == 1 and listed.keys() == {"activation/activation"}
    assert (
        "Compiler encountered an internal error"
        in failed["kernels of activation/activation"] + listed["activation/activation"]
    )
    # A later process knows; the next selftest forgets.
    later = PROGRAM + "from metalcore.cli import info; print(*info.collect()['refused by Metal'])"
    assert run(extension, "-c", later, **environment) == "activation/activation\n"
    assert json.loads(run(extension, "-c", commands, **environment)) == [0, {}, {}]
    assert run(extension, "-c", later, **environment) == "\n"


DEVICE = (
    PROGRAM
    + """
assert _C.mps_gpu_family() == ""
try:
    _C.mps_compile("silu_packed_float")
except RuntimeError as error:
    assert "no Metal device" in str(error)
use_runtime.add_device()
print(_C.mps_gpu_family())
try:
    _C.mps_compile("silu_packed_float")
except Exception as error:
    print(error)
metalcore.silu(torch.randn(4, device="mps"))
"""
)

# Faults of the backend: (file, old text, new text, what the program above prints).
SEEDED = {
    "the system's default device": (
        "device.mm",
        "id<MTLDevice> copy_device() {\n",
        "id<MTLDevice> copy_device() {\n  return MTLCreateSystemDefaultDevice();\n",
        "\nmetalcore: this machine has no Metal device\n",
    ),
    "an empty family that is kept": ("device.mm", "if (family.empty()) return none;", "", "\n"),
    "a pipeline made with the GIL": (
        "python.mm",
        "return python::parse_and_run<Compile>(arguments);",
        "return guarded([&] { Compile call; call.parse(arguments); call.run(); return call.result(); });",
        "apple7\nMetal API misuse: a program is compiled while the thread has Python's GIL\n",
    ),
}


def test_a_machine_without_a_default_device(extension):
    assert run(extension, "-c", DEVICE, METAL_RUNTIME_DEVICES="0") == "apple7\n"


ONLY_DEFAULT = (
    PROGRAM
    + """
print(_C.mps_gpu_family())
try:
    print(len(_C.mps_compile("silu_dense_float")))
except RuntimeError as error:
    print(error)
"""
)


def test_a_machine_whose_list_of_devices_is_empty(extension):
    """A virtual machine may have a default device all the same."""
    assert run(extension, "-c", ONLY_DEFAULT, METAL_RUNTIME_DEVICES="default") == "apple7\n1\n"
    assert run(extension, "-c", ONLY_DEFAULT, METAL_RUNTIME_DEVICES="0") == (
        "\nmetalcore: this machine has no Metal device\n"
    )
    fault = ("no default device", "device.mm", "first ? first : MTLCreateSystemDefaultDevice()", "first")
    assert run(build_with_fault(*fault), "-c", ONLY_DEFAULT, METAL_RUNTIME_DEVICES="default") == (
        "\nmetalcore: this machine has no Metal device\n"
    )


@pytest.mark.parametrize("fault", SEEDED)
def test_seeded_faults_are_found(extension, fault):
    file, old, new, says = SEEDED[fault]
    assert run(build_with_fault(fault, file, old, new), "-c", DEVICE, METAL_RUNTIME_DEVICES="0") == says
