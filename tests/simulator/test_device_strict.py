"""METALCORE_SIMULATOR_STRICT=1: the device refuses what PyTorch has no kernel for on a Mac, with a Mac's messages.

Tests of metalcore's own functions run in this mode (tests/conftest.py).
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torchgen
from torchgen.gen import get_grouped_native_functions, parse_native_yaml
from torchgen.model import DispatchKey

from metalcore.simulator import device

BEFORE_2_14 = tuple(map(int, torch.__version__.split(".")[:2])) < (2, 14)


@pytest.fixture
def strict():
    before = device.set_strict(True)
    yield
    device.set_strict(before)


def test_the_table_is_torchgens():
    folder = Path(torchgen.__path__[0], "packaged", "ATen", "native")
    parsed = parse_native_yaml(str(folder / "native_functions.yaml"), str(folder / "tags.yaml"))
    on_mps = parsed.backend_indices[DispatchKey.MPS]
    expected = set()
    for group in get_grouped_native_functions(parsed.native_functions):
        for function in getattr(group, "functions", lambda group=group: [group])():
            structured = function.structured or function.structured_delegate
            if on_mps.has_kernel(group if structured else function):
                expected.add(f"aten::{function.func.name}")
    assert device.mac_operators() == expected and len(expected) > 700


def square():
    return torch.rand(2, 4, 4, device="mps") + torch.eye(4, device="mps")


# what a Mac has no kernel for -> the operator that its message names
REFUSED = {
    "_linalg_eigh.eigenvalues": lambda: torch.linalg.eigh(square()),
    "_linalg_svd.U": lambda: torch.linalg.svdvals(square()),
    "geqrf": lambda: torch.geqrf(square()),
    "linalg_lstsq.out": lambda: torch.linalg.lstsq(square(), square()),
    "linalg_eig": lambda: torch.linalg.eig(square()),
    "linalg_ldl_factor_ex.out": lambda: torch.linalg.ldl_factor(square()),
    "take": lambda: square().take(torch.zeros(1, dtype=torch.int64, device="mps")),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_a_mac_has_no_kernel_for_is_refused(strict, name):
    with pytest.raises(
        NotImplementedError,
        match=rf"^The operator 'aten::{name}' is not currently implemented for the MPS device\. If ",
    ) as refused:
        REFUSED[name]()
    assert torch.version.git_version in str(refused.value) and "PYTORCH_ENABLE_MPS_FALLBACK=1" in str(refused.value)


def test_only_strict_mode_refuses(strict):
    assert device.set_strict(False) is True
    for call in REFUSED.values():
        call()
    assert device.set_strict(True) is False


def test_operators_of_other_libraries_are_refused_too(strict):
    library = torch.library.Library("metalcore_strict_tests", "DEF")
    library.define("cpu_only(Tensor x) -> Tensor")
    library.impl("cpu_only", lambda x: x + 1, "CPU")
    with pytest.raises(NotImplementedError, match="The operator 'metalcore_strict_tests::cpu_only' is not currently"):
        torch.ops.metalcore_strict_tests.cpu_only(torch.ones(2, device="mps"))


def test_what_a_mac_has_is_there(strict):
    x = square().requires_grad_()
    layer = torch.nn.Sequential(torch.nn.Conv1d(4, 4, 3, padding=1), torch.nn.LayerNorm(4), torch.nn.GELU()).to("mps")
    (layer(x).softmax(-1).sum() + torch.linalg.cholesky(x @ x.mT).sum() + torch.linalg.solve(x, x).sum()).backward()
    assert x.grad is not None and torch.sort(x, -1).indices.is_mps
    with pytest.raises(TypeError, match="MPS framework doesn't support float64"):
        x.double()


def run(code, **variables):
    environment = {**os.environ, "METALCORE_SIMULATOR_STRICT": "1", **variables}
    code = f"import torch, metalcore.simulator\nx = torch.eye(3, device='mps')\n{code}"
    return subprocess.run([sys.executable, "-W", "always", "-c", code], env=environment, capture_output=True, text=True)


def test_the_environment_switches_it_on():
    done = run("torch.linalg.eigh(x)")
    assert done.returncode == 1
    assert "NotImplementedError: The operator 'aten::_linalg_eigh.eigenvalues' is not currently impl" in done.stderr
    assert run("print(torch.linalg.eigh(x).eigenvalues.sum())", METALCORE_SIMULATOR_STRICT="0").returncode == 0


def test_pytorchs_variable_lets_the_cpu_compute():
    done = run("print(torch.linalg.eigh(x).eigenvalues)", PYTORCH_ENABLE_MPS_FALLBACK="1")
    assert done.stdout == "tensor([1., 1., 1.], device='mps:0')\n", done.stderr
    assert "'aten::_linalg_eigh.eigenvalues' is not currently supported on the MPS backend and will fall" in done.stderr


def test_the_operators_that_a_mac_always_leaves_to_the_cpu():
    done = run("print(torch.linalg.svd(x).S)")
    if BEFORE_2_14:
        assert done.stdout == "tensor([1., 1., 1.], device='mps:0')\n"
        assert "'aten::linalg_svd' is not currently supported on the MPS backend and will fall back" in done.stderr
    else:
        assert "The operator 'aten::_linalg_svd.U' is not currently implemented for the MPS device" in done.stderr


def test_it_needs_a_table(monkeypatch):
    monkeypatch.setattr(device.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(RuntimeError, match="comes without torchgen's table"):
        device.read_mac_table()
    monkeypatch.setitem(sys.modules, "yaml", None)
    with pytest.raises(RuntimeError, match="needs PyYAML"):
        device.read_mac_table()
