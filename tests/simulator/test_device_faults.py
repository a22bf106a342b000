"""A fault in a built-in kernel reaches Python as KernelError, whichever way calls the kernel."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

# This kernel replaces a built-in one and writes past the end of its output.
BROKEN = """
#include <metal_stdlib>
kernel void silu_packed_float(device const float4* x [[buffer(0)]], device float4* y [[buffer(1)]],
                              uint i [[thread_position_in_grid]]) {
  y[i + 1] = x[i];
}
"""

PROGRAM = """
import sys, torch, metalcore, metalcore.simulator
from pathlib import Path
from metalcore.msl import host

folder = Path(sys.argv[1])
(folder / "checking").mkdir()
host.build(folder / "broken.metal", folder / "checking" / "broken.so", checking=True)
metalcore._C.simulator_set_library_path(str(folder))
x = torch.ones(8, device="mps", requires_grad=True)
with metalcore.simulator.checking():
    try:
        {call}
    except metalcore.simulator.KernelError as error:
        print(error.kind, error.kernel, error.line, error.thread.position_in_grid, error.file.endswith("broken.metal"))
print((x * 2).sum().item())
"""


@pytest.mark.parametrize(
    "call",
    [
        "metalcore.silu(x)",
        "torch.ops.metalcore.silu(x.detach())",
        "torch.utils.checkpoint.checkpoint(metalcore.silu, x, use_reentrant=False)",
        "with metalcore.enable_pytorch_overrides('silu'): torch.nn.functional.silu(x)",
    ],
    ids=["function", "operator", "checkpoint", "override"],
)
def test_faults_of_built_in_kernels(call, tmp_path):
    (tmp_path / "broken.metal").write_text(BROKEN)
    program = PROGRAM.format(call=call.replace(": torch", ":\n            torch"))
    result = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path)], cwd=ROOT, text=True, capture_output=True, timeout=300
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout == "out-of-bounds write silu_packed_float 5 (1, 0, 0) True\n16.0\n"
