"""metalcore.report(), and the one warning of enable_pytorch_overrides, which says that nothing can be accelerated."""

import json
import warnings
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from processes import python

import metalcore

ROOT = Path(__file__).resolve().parents[2]


def rows():
    return {row.what: row for row in metalcore.report().rows}


def test_counts(device):
    x = torch.randn(4, 6, device=device, requires_grad=True)
    silu, backward = f"aten::silu on {device}", f"aten::silu_backward on {device}"
    with metalcore.enable_pytorch_overrides("silu", "qr"):
        for _ in range(3):
            F.silu(x).sum().backward()
        with metalcore.enable_pytorch_overrides("silu"):  # a nested switch does not reset the counts
            F.silu(x.detach().double() if device != "mps" else x.detach().to(torch.complex64))
        torch.linalg.qr(torch.randn(64, 3, 3, device=device))
        assert metalcore.report().active == ("silu", "qr") and metalcore.report().devices == (device,)
    F.silu(x)
    found = rows()  # the report stays
    assert (found[silu].ran, found[backward].ran) == (3, 3)
    assert list(found[silu].left.values()) == [1] and "which its kernels do not take" in next(iter(found[silu].left))
    assert found[f"aten::linalg_qr on {device}"].ran == 1
    with metalcore.enable_pytorch_overrides("silu"):  # a new switch resets the counts
        assert rows()[silu].ran == 0


def test_reasons(device):
    x = torch.randn(4, 8, device=device)
    half = x.to(torch.float16)
    with metalcore.enable_pytorch_overrides():
        F.rms_norm(half, (8,), torch.ones(8, device=device))
        torch.func.vmap(F.silu)(x)
        rows = metalcore.report().rows  # some are about modules that other tests have made
        left = {row.what.split()[0]: list(row.left) for row in rows if row.left and row.what.startswith("aten::")}
    expected = {"aten::rms_norm": ["tensors of several dtypes"]}
    if device == "cuda":  # these overrides are for mps
        expected = {
            "aten::_scaled_mm": ["PyTorch's operator computes on tensor cores"],
            "aten::_scaled_mm_v2": ["PyTorch's operator computes on tensor cores"],
            "aten::rms_norm": ["it ends in aten::_fused_rms_norm there"],
            "aten::scaled_dot_product_attention": ["PyTorch's kernels are faster there"],
            "aten::threshold_backward": ["PyTorch's kernel is as fast there, and costs the host less"],
        }
    assert left == expected


def test_optimizers(device):
    class Mine(torch.optim.AdamW):
        pass

    def parameters(device):
        return [torch.nn.Parameter(torch.ones(3, device=device))]

    with metalcore.enable_pytorch_overrides("adamw"):
        for make, given in (
            (torch.optim.AdamW, parameters(device) + parameters("cpu")),
            (Mine, parameters(device)),
            (torch.optim.AdamW, parameters("cpu")),
        ):
            for parameter in given:
                parameter.grad = torch.ones_like(parameter)
            make(given).step()
        row = rows()["torch.optim.AdamW"]
    assert row.ran == 1 and list(row.left.values()) == [1, 1, 1]
    assert any("Mine, a subclass" in reason for reason in row.left)


def test_table_and_data(device):
    assert "off" in str(metalcore.report())
    with metalcore.enable_pytorch_overrides():
        F.softmax(torch.randn(3, 4, device=device), -1)
        report = metalcore.report()
    (line,) = [line for line in str(report).splitlines() if line.startswith(f"aten::_softmax on {device}")]
    assert line.split()[-2:] == ["1", "0"]
    assert max(map(len, str(report).splitlines()[3:])) <= 110
    data = json.loads(json.dumps(report.as_dict()))
    assert data["devices"] == [device] and {"override", "what", "replaced", "ran", "left"} == data["rows"][0].keys()


def test_pytorchs_warning_of_an_override_is_not_shown(device, monkeypatch, capfd):
    """Some versions of PyTorch give it once in a process. Other warnings are shown."""
    original = torch.library.Library.impl

    def impl(self, *args, **kwargs):
        warnings.warn(
            "Warning only once for all operators,  other operators may also be overridden.\n  Overriding ...",
            stacklevel=2,
        )
        warnings.warn("something else", stacklevel=2)
        return original(self, *args, **kwargs)

    monkeypatch.setattr(torch.library.Library, "impl", impl)
    with pytest.warns() as found, metalcore.enable_pytorch_overrides("silu"):
        F.silu(torch.ones(3, device=device))
    assert {str(warning.message) for warning in found} == {"something else"}
    assert capfd.readouterr() == ("", "")


@pytest.mark.only_on("simulator")
def test_a_device_that_appears_later():
    program = """
import warnings
import metalcore, torch
torch.set_warn_always(True)  # PyTorch's warning of a replaced kernel would come each time
with warnings.catch_warnings(record=True) as found:
    warnings.simplefilter("always")
    with metalcore.enable_pytorch_overrides():
        pass
    request = metalcore.enable_pytorch_overrides()
print(*{str(warning.message) + " " + warning.filename for warning in found}, sep="|")
import metalcore.simulator
torch.nn.functional.silu(torch.ones(3, device="mps"))
print([(row.what, row.ran) for row in metalcore.report().rows if row.ran])
"""
    result = python("-c", program, cwd=ROOT, timeout=300)
    assert result.stderr == ""
    warning, ran = result.stdout.splitlines()
    assert warning.startswith("metalcore's overrides accelerate nothing here: PyTorch finds no mps")
    assert warning.endswith("<string>") and "|" not in warning
    assert ran == "[('aten::silu on mps', 1)]"
