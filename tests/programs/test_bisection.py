"""bisect finds a seeded wrong pattern, and the place where it is wrong."""

import torch
import torch.nn.functional as F
from nets import Decoder
from torch import nn

from metalcore import programs
from metalcore.programs.compiling import optimize
from metalcore.programs.patterns.linear import Gated
from metalcore.programs.patterns.norms import RmsNorm
from metalcore.programs.tracing import trace


class WrongGate(Gated):
    """It forgets the activation where the gate has 24 columns."""

    def emit(self, match, emit):
        if match["gate"].meta["val"].shape[-1] == 24:
            return emit(torch.ops.aten.mul.Tensor, match["gate"], match["up"])
        return super().emit(match, emit)


class WrongNorm(RmsNorm):
    """Its epsilon is too large."""

    def emit(self, match, emit):
        match["eps"] = 0.1
        return super().emit(match, emit)


class Gates(nn.Module):
    def forward(self, x):
        for size in (8, 16, 24, 32):
            x = x + F.pad(F.silu(x[:, :size]) * x[:, -size:], (0, 32 - size))
        return x


def seeded(wrong):
    return [wrong if pattern.name == wrong.name else pattern for pattern in programs.PATTERNS]


def test_the_place_of_a_wrong_pattern(device):
    x = torch.randn(4, 32).to(device)
    found = programs.bisect(Gates(), (x,), patterns=seeded(WrongGate()))
    assert (found.pattern, found.application) == ("gated", 2) and found.error > 1e-3
    assert programs.bisect(Gates(), (x,)) is None


def test_a_pattern_between_others(device):
    torch.manual_seed(0)
    module, ids = Decoder(layers=1).to(device).eval(), torch.arange(3, 9)[None].to(device)
    found = programs.bisect(module, (ids,), patterns=seeded(WrongNorm()), tolerance=1e-4)
    assert (found.pattern, found.application) == ("rms_norm", 0)
    assert programs.bisect(module, (ids,), tolerance=1e-4) is None


def test_patterns_of_one_name_are_counted_together(device):
    class Layers(nn.Module):
        def __init__(self):
            super().__init__()
            self.gate, self.up, self.down = nn.Linear(8, 16), nn.Linear(8, 16), nn.Linear(16, 8)

        def forward(self, x):
            return self.down((F.silu(self.gate(x)) * self.up(x)).tanh()) + x

    module, x = Layers().to(device), torch.randn(1, 8).to(device)
    for most in (0, 1, 2):
        traced = trace(module, (x,))
        with torch.no_grad():
            fused, _ = optimize(
                traced.module, programs.PATTERNS, constants=True, by_name=True, limit={"joined_linear": most}
            )
        assert [rewritten.pattern for rewritten in fused].count("joined_linear") == most
