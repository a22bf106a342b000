"""Builds without the simulator's kernels: with METALCORE_ISA= PyTorch's ops run in their place, and a warning says so;
with METALCORE_ISA=first-use a family is compiled when one of its kernels is first needed."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import metalcore

PACKAGE = Path(metalcore.__file__).parent
PROGRAM = """
import warnings
import torch
import metalcore
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    import metalcore.simulator
assert [w for w in caught if "METALCORE_ISA" in str(w.message) and w.filename == __file__], caught

x = torch.randn(4, 8, device="mps", requires_grad=True)
for ours, theirs in [
    (metalcore.silu(x), torch.nn.functional.silu(x)),
    (metalcore.softmax(x, -1), torch.softmax(x, -1)),
    (metalcore.rms_norm(x, (8,)), torch.nn.functional.rms_norm(x, (8,))),
    (metalcore.add_rms_norm(x, x)[0], torch.nn.functional.rms_norm(x + x, (8,))),
    (metalcore.qr(x)[1], torch.linalg.qr(x)[1]),
    (metalcore.svdvals(x), torch.linalg.svdvals(x)),
    (metalcore.syrk(x), x @ x.T),
    (metalcore.trsm(torch.eye(4, device="mps"), x), x),
]:
    assert torch.equal(ours, theirs)
    ours.sum().backward()
weight = torch.nn.Parameter(torch.ones(3, device="mps"))
weight.grad = torch.ones_like(weight)
metalcore.optim.AdamW([weight]).step()
assert (weight < 1).all()
with metalcore.enable_pytorch_overrides():
    torch.nn.functional.silu(x)

try:
    torch.ops.metalcore.silu(x)
except RuntimeError as error:
    assert "built without kernels for the simulator" in str(error) and "METALCORE_ISA" in str(error), error
else:
    raise AssertionError

library = metalcore.compile_shader("kernel void f(device float* y, uint i [[thread_position_in_grid]]) { y[i] = 5; }")
y = torch.zeros(3, device="mps")
library.f(y)
assert y.tolist() == [5, 5, 5]
"""


ON_FIRST_USE = """
import os
from pathlib import Path
import torch
import metalcore
import metalcore.simulator

libraries = lambda: sorted(Path(os.environ["METALCORE_CACHE_DIR"]).glob("*.so"))
x = torch.randn(4, 8, device="mps")
assert not libraries()
for count in (1, 1):  # the second call finds the library open
    torch.testing.assert_close(metalcore.add(x, x), 2 * x)
    assert len(libraries()) == count, libraries()
with metalcore.simulator.checking():
    torch.testing.assert_close(metalcore.add(x, x), 2 * x)
assert len(libraries()) == 2, libraries()
"""


def run(folder, program, **environment):
    """Runs a program with a package in `folder` that has all of metalcore except lib/."""
    package = folder / "metalcore"
    package.mkdir()
    for path in PACKAGE.iterdir():
        if path.name not in ("lib", "__pycache__"):
            (package / path.name).symlink_to(path)
    if environment:
        (package / "lib").mkdir()
        (package / "lib" / "index").symlink_to(PACKAGE / "lib" / "index")
        (package / "lib" / "on-first-use").touch()
        (folder / "kernels").symlink_to(PACKAGE.parent / "kernels")
    (folder / "program.py").write_text(program)
    done = subprocess.run(
        [sys.executable, folder / "program.py"],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, **environment, "PYTHONPATH": str(folder)},
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.only_on("simulator")
def test_pytorchs_ops_run_in_their_place(tmp_path):
    run(tmp_path, PROGRAM)


@pytest.mark.only_on("simulator")
def test_kernels_are_compiled_on_first_use(tmp_path):
    run(tmp_path, ON_FIRST_USE, METALCORE_CACHE_DIR=str(tmp_path / "cache"))
