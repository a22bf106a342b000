"""What targets ask of programs, the padding of channels, profiles, and programs that are captured."""

import dataclasses
import json
from xml.etree import ElementTree

import pytest
import torch
import torch.nn.functional as F
from agreement import agree, operators
from torch import nn

import metalcore
from metalcore.programs import TargetError
from metalcore.programs.targets import APPLE, EXAMPLE_NPU, NVIDIA, Target, target_of

# The same rules in float32, which the CPU computes as exactly with padding as without.
WIDE = dataclasses.replace(EXAMPLE_NPU, name="wide", dtypes=(torch.float32, torch.int32, torch.bool))


class Net(nn.Module):
    """Convolutions, depthwise ones, a residual, pools, and linear layers, with a batch norm that is folded."""

    def __init__(self):
        super().__init__()
        self.first, self.bn = nn.Conv2d(3, 6, 3, padding=1, bias=False), nn.BatchNorm2d(6)
        self.depth, self.point = nn.Conv2d(6, 6, 3, padding=1, groups=6), nn.Conv2d(6, 6, 1)
        self.squeeze, self.head = nn.Conv2d(6, 6, 1), nn.Linear(6, 5)
        self.bn.running_mean.normal_()

    def forward(self, x):
        x = F.relu(self.bn(self.first(x)))
        x = F.hardswish(self.point(self.depth(x))) + x
        x = x * torch.sigmoid(self.squeeze(F.adaptive_avg_pool2d(x, 1)))
        return self.head(F.max_pool2d(x, 2).mean((2, 3)))


def violations(module, *args, **options):
    with pytest.raises(TargetError) as caught:
        metalcore.compile(module, args, **options)
    return caught.value.violations


def test_channels_are_padded(device, tmp_path):
    module, x = Net().eval().to(device), torch.randn(2, 3, 4, 4).to(device)
    program = metalcore.compile(module, (x,), target=WIDE)
    agree(module(x), program(x))
    names = operators(program)
    # One at the input, and one before the last linear layer: the mean over pixels is none of a channel's own.
    assert names.count("constant_pad_nd") == 2 and names.count("slice") == 2
    assert {tuple(v.shape)[:1] for v in program.report().plan.values if v.name.startswith("first_weight")} == {(16,)}
    program.save(tmp_path / "npu.mcore", weights="apart")
    loaded = metalcore.load(tmp_path / "npu.mcore")
    assert torch.equal(loaded(x), program(x)) and loaded.source.target == "wide"


def test_values_that_the_padding_would_reach_are_cut(device):
    class Whole(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Conv2d(4, 5, 1), nn.Conv2d(5, 3, 1)

        def forward(self, x):
            y = torch.sigmoid(self.a(x))
            return (
                y.sum(1),
                self.b(y),
                self.b(y / y.amax(1, keepdim=True)),
                self.b(y + torch.ones(5, 1, 1, device=x.device)),
            )

    module, x = Whole().to(device), torch.randn(2, 4, 3, 3).to(device)
    agree(module(x), metalcore.compile(module, (x,), target=WIDE)(x))


def test_sixteen_bits_are_asked_for(device):
    module, x = nn.Linear(32, 32).to(device), torch.randn(2, 32).to(device)
    found = violations(module, x, target=EXAMPLE_NPU)
    assert {violation.found for violation in found} == {"float32"}
    assert all("dtype=torch.float16" in violation.remedy for violation in found)
    program = metalcore.compile(module, (x,), dtype=torch.float16, target=EXAMPLE_NPU)
    agree(module(x).half(), program(x.half()), 1e-2)


@pytest.mark.parametrize(
    "module, shape, rule, remedy",
    (
        (nn.Conv2d(8, 8, 1, groups=2), (1, 8, 2, 2), "channels fill multiples", "each group"),
        (nn.Flatten(0, 1), (1,) * 6, "at most 5 dimensions", "Reshape"),
        (nn.Upsample(scale_factor=20000), (1, 16, 1, 1), "at most 268435456 bytes", "Split"),
    ),
)
def test_what_cannot_be_padded_is_refused(module, shape, rule, remedy):
    found = violations(
        module, torch.ones(shape, device="cpu" if 6 > len(shape) > 3 and "Up" in str(module) else None), target=WIDE
    )
    assert any(rule in violation.rule and remedy in violation.remedy for violation in found)
    assert all(violation.operation and violation.value and violation.found for violation in found)


def test_other_products_are_refused(device):
    class Product(nn.Module):
        def forward(self, x, y):
            return x @ y

    x, y = torch.randn(3, 16).to(device), torch.randn(16, 7).to(device)
    (_, result) = violations(Product(), x, y, target=WIDE)
    assert result.value == "its result" and "7 channels" in result.found and "Pad them to 16" in result.remedy


def test_whole_numbers_and_the_cpu_are_refused(device):
    class Find(nn.Module):
        def forward(self, x, index):
            return x[index]

    found = violations(Find(), torch.randn(3).to(device), torch.tensor([0, 2]).to(device), target=WIDE)
    assert any(violation.found == "int64" and "int32" in violation.remedy for violation in found)


def test_dynamic_shapes_are_refused():
    sizes = ({0: torch.export.Dim("batch")},)
    exported = torch.export.export(nn.ReLU(), (torch.ones(4, 16),), dynamic_shapes=sizes)
    (violation,) = violations(exported, target=EXAMPLE_NPU)
    assert "known in advance" in violation.rule and "Dim" in violation.remedy


def test_targets_of_devices(device):
    assert target_of(torch.device("cuda:0")) is NVIDIA and target_of(torch.device("mps")) is APPLE
    module, x = nn.ReLU(), torch.randn(3).to(device)
    program = metalcore.compile(module, (x,))
    assert program.source.target == target_of(x.device).name
    agree(module(x), metalcore.compile(module, (x,), target=target_of(x.device))(x))
    own = Target("own", device, (torch.float16,))
    assert "float32" in str(violations(module, x, target=own)[0])


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
