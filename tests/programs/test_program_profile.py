"""Profiles of programs, and programs that are captured."""

import json
from xml.etree import ElementTree

import pytest
import torch
from checks import agree
from torch import nn

import metalcore


class Kernels(nn.Module):
    """Nothing but metalcore's kernels."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(8)

    def forward(self, x, factor=2, *, more):
        return {"softmax": torch.softmax(self.norm(x), -1), "more": metalcore.silu(more)}


class Mixed(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.register_buffer("count", torch.zeros(1))

    def forward(self, x):
        self.count.add_(1)
        return torch.softmax(self.linear(x), -1) + self.count


def test_profile(device, tmp_path):
    module, x = Mixed().to(device), torch.randn(4, 8).to(device)
    program = metalcore.compile(module, (x,), fusions=["kernels"])
    profile = program.profile(x, repeats=2)
    assert module.count.item() == 0
    assert [timing.step for timing in profile.timings] == list(program.report().steps)
    assert all(timing.seconds > 0 for timing in profile.timings) and profile.total > 0
    if device != "cpu":
        kernels = {timing.step.operator: timing.kernels for timing in profile.timings}
        assert kernels["metalcore.softmax"] and not kernels["linear"]
    table = str(profile)
    assert "linear" in table and "GB/s" in table and f"a run on {x.device}" in table
    found = json.loads(profile.to_json())
    assert len(found["operations"]) == len(profile.timings) and found["total"] == profile.total
    events = json.loads(profile.trace())["traceEvents"]
    assert events[1]["ts"] == pytest.approx(events[0]["dur"])
    for name in ("a.svg", "a.json", "a.trace.json"):
        profile.save(tmp_path / name)
    picture = ElementTree.parse(tmp_path / "a.svg").getroot()
    assert len(picture.findall("{http://www.w3.org/2000/svg}g")) == len(profile.timings)
    with pytest.raises(ValueError, match="must end in"):
        profile.save(tmp_path / "a.png")
    with pytest.raises(ValueError, match="repeats"):
        program.profile(x, repeats=0)
    program.profile(repeats=1)  # random arguments


def test_arguments_by_name(device):
    module = Kernels().to(device)
    x, more = torch.randn(2, 8).to(device), torch.randn(5).to(device)
    program = metalcore.compile(module, (x,), {"more": more})
    assert list(program.inputs) == ["x", "factor", "more"] or len(program.inputs) in (2, 3)
    args, kwargs = program.arguments({"more": more}, seed=3)
    assert kwargs["more"] is more and torch.equal(args[0], program.arguments(seed=3)[0][0])
    agree(module(*args, **kwargs), program(*args, **kwargs))
    with pytest.raises(ValueError, match="no input nothing"):
        program.arguments({"nothing": x})


@pytest.mark.only_on("simulator", "mps", "cuda")
def test_a_program_is_captured(device):
    module = Kernels().to(device)
    x, more = torch.randn(2, 8).to(device), torch.randn(5).to(device)
    program = metalcore.compile(module, (x,), {"more": more})
    captured = program.capture(x, more=more)
    x, more = torch.randn_like(x), torch.randn_like(more)
    agree(module(x, more=more), captured(x, more))
    if device == "mps":
        assert captured.segments == 1 and not captured.torch_operators and len(captured.kernels) >= 3


@pytest.mark.only_on("simulator", "mps")
def test_a_program_of_other_operators_needs_segments(device):
    module, x = nn.Sequential(nn.Linear(8, 8), nn.Softmax(-1)).to(device), torch.randn(4, 8).to(device)
    program = metalcore.compile(module, (x,))
    with pytest.raises(metalcore.replay.CaptureError, match="addmm|linear"):
        program.capture(x)
    captured = metalcore.capture(program, x, segments=True)
    x = torch.randn_like(x)
    agree(module(x), captured(x))
