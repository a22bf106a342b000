"""A fault in a built-in kernel reaches Python as KernelError, whichever way calls the kernel."""

from pathlib import Path

import pytest
from processes import python

from metalcore import _C

ROOT = Path(__file__).resolve().parents[2]

# This kernel replaces a built-in one and writes past the end of its output.
BROKEN = """
#include <metal_stdlib>
kernel void silu_packed_float(device const float4* x [[buffer(0)]], device float4* y [[buffer(1)]],
                              uint i [[thread_position_in_grid]]) {
  y[i + 1] = x[i];
}
"""

CALLS = {
    "function": "metalcore.silu(x)",
    "operator": "torch.ops.metalcore.silu(x.detach())",
    "checkpoint": "torch.utils.checkpoint.checkpoint(metalcore.silu, x, use_reentrant=False)",
    "override": "with metalcore.enable_pytorch_overrides('silu'): torch.nn.functional.silu(x)",
}
PROGRAM = """
import sys, torch, metalcore, metalcore.simulator
from pathlib import Path
from metalcore.msl.runtime import host

folder = Path(sys.argv[1])
(folder / "checking").mkdir()
host.build(folder / "broken.metal", folder / "checking" / "broken.so", checking=True)
(folder / "index").write_text("broken silu_packed_float\\n")
metalcore._C.simulator_set_library_path(str(folder))
x = torch.ones(8, device="mps", requires_grad=True)
for call in sys.argv[2:]:
    with metalcore.simulator.checking():
        try:
            exec(call)
        except metalcore.simulator.KernelError as error:
            print(error.kind, error.line, error.thread.position_in_grid, error.file.endswith("broken.metal"), end=" ")
            print(str(error).split(",")[0])
    print((x * 2).sum().item())
"""


def test_faults_of_built_in_kernels(tmp_path):
    (tmp_path / "broken.metal").write_text(BROKEN)
    result = python("-c", PROGRAM, tmp_path, *CALLS.values(), cwd=ROOT, timeout=300)
    assert result.returncode == 0, result.stderr
    said = ["out-of-bounds write 5 (1, 0, 0) True kernel 'silu_packed_float' of broken.metal", "16.0"]
    lines = result.stdout.splitlines()
    assert {name: lines[2 * i : 2 * i + 2] for i, name in enumerate(CALLS)} == dict.fromkeys(CALLS, said)


def test_errors_name_a_built_in_kernel_and_its_source():
    folder = Path(_C.simulator_info()["library_path"]) / _C.simulator_info()["isa"]
    for path in sorted(folder.rglob("*.so"))[:3]:
        library = _C.simulator_load(str(path))
        name = _C.simulator_kernels(library)[0]["name"]
        source = path.relative_to(folder).with_suffix(".metal")
        with pytest.raises(
            ValueError, match=rf"^metalcore: kernel '{name}' of {source}: buffer '.*' at index .* is not bound"
        ):
            _C.simulator_dispatch(library, name, [], [], (1, 1, 1), (1, 1, 1))
