"""Programs that tests save with recordings, and what Python's replay of them computes."""

import math

import torch
import torch.nn.functional as F
from c_program import printed
from torch import nn

import metalcore
import metalcore.programs

# All patterns, also those by name, and no generated kernels.
PATTERNS = [pattern.name for pattern in metalcore.programs.PATTERNS]


class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(48, 96), nn.GELU(), nn.Linear(96, 40), nn.LayerNorm(40))

    def forward(self, x):
        return self.layers(x).softmax(-1)

    @staticmethod
    def examples():
        return (torch.randn(5, 48),)


class Residual(nn.Module):
    """Convolutions with batch norms and a sum, as in ResNet. The last one sees the whole image, in a pool's place."""

    def __init__(self):
        super().__init__()
        self.stem, self.stem_norm = nn.Conv2d(3, 16, 7, 2, 3, bias=False), nn.BatchNorm2d(16)
        self.conv1, self.norm1 = nn.Conv2d(16, 16, 3, 1, 1, bias=False), nn.BatchNorm2d(16)
        self.conv2, self.norm2 = nn.Conv2d(16, 16, 3, 1, 1, bias=False), nn.BatchNorm2d(16)
        self.whole, self.head = nn.Conv2d(16, 24, 12), nn.Linear(24, 10)
        for norm in (self.stem_norm, self.norm1, self.norm2):
            norm.running_mean.normal_(0, 0.2)
            norm.running_var.uniform_(0.5, 1.5)

    def forward(self, x):
        x = self.stem_norm(self.stem(x)).relu()
        y = self.norm1(self.conv1(x)).relu()
        x = (self.norm2(self.conv2(y)) + x).relu()
        return self.head(self.whole(x).relu().flatten(1))

    @staticmethod
    def examples():
        return (torch.randn(2, 3, 24, 24),)


class Block(nn.Module):
    """A block of a Llama: RMS norms, rotated queries and keys, grouped attention, a gated feed-forward layer."""

    WIDTH, HEADS, SHARED, SIZE = 64, 4, 2, 16

    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(self.WIDTH, 1e-5), nn.RMSNorm(self.WIDTH, 1e-5)
        self.q, self.o = (nn.Linear(self.WIDTH, self.WIDTH, bias=False) for _ in range(2))
        self.k, self.v = (nn.Linear(self.WIDTH, self.SHARED * self.SIZE, bias=False) for _ in range(2))
        self.gate, self.up = (nn.Linear(self.WIDTH, 128, bias=False) for _ in range(2))
        self.down = nn.Linear(128, self.WIDTH, bias=False)

    def forward(self, x, cosine, sine):
        batch, tokens, _ = x.shape
        y = self.norm1(x)
        q, k, v = (p(y).view(batch, tokens, -1, self.SIZE).transpose(1, 2) for p in (self.q, self.k, self.v))
        q, k = metalcore.rope(q, k, cosine, sine, rotary_dim=self.SIZE // 2)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.o(y.transpose(1, 2).reshape(batch, tokens, self.WIDTH))
        y = self.norm2(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))

    @staticmethod
    def examples():
        angles = torch.arange(9.0)[:, None] * torch.exp(torch.arange(8.0) * -math.log(10000) / 8)
        return torch.randn(1, 9, 64), angles.cos(), angles.sin()


class Pair(nn.Module):
    """It has two results."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x):
        return metalcore.silu(self.linear(x)), metalcore.silu(x)

    @staticmethod
    def examples():
        return (torch.randn(3, 8),)


class Pooled(nn.Module):
    """Generated kernels: pooling, also where it stands alone, and a chain of operations."""

    def __init__(self):
        super().__init__()
        self.conv, self.head = nn.Conv2d(3, 8, 3, padding=1), nn.Linear(8, 5)
        self.last = nn.Conv2d(8, 8, 3)

    def forward(self, x):
        x = F.max_pool2d(F.hardswish(self.conv(x)), 2)
        x = F.adaptive_avg_pool2d(self.last(x), 1)
        return self.head(x.flatten(1)).sigmoid() + 1

    @staticmethod
    def examples():
        return (torch.randn(2, 3, 8, 8),)


def compiled(kind, device, dtype=torch.float32, fusions=PATTERNS):
    """A program of a module, and arguments for it."""
    torch.manual_seed(0)
    module = kind().eval().to(device, dtype)
    arguments = tuple(x.to(device, dtype) for x in kind.examples())
    return metalcore.compile(module, arguments, fusions=fusions), arguments


def replayed(program, arguments):
    """The results of a replay, as a list of tensors on the CPU."""
    found = program.capture(*arguments, bind=True)(*arguments)
    return [tensor.cpu().clone() for tensor in (found if isinstance(found, tuple) else (found,))]


def write_bytes(path, tensor):
    path.write_bytes(tensor.cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return path


class Runs:
    """Runs of programs by the C program of programs.c.

    Args:
        folder: an empty folder for arrays.
    """

    def __init__(self, folder):
        self.folder, self.lines = folder, []

    def add(self, path, inputs=(), outputs=(), weights="-"):
        """Has the program run with tensors; the results get their bytes in files, whose paths it returns."""
        number = len(self.lines)
        given = [write_bytes(self.folder / f"in{number}_{i}", tensor) for i, tensor in enumerate(inputs)]
        made = [self.folder / f"out{number}_{i}" for i in range(len(outputs))]
        self.lines.append(" ".join(map(str, (path, weights, *given, *made))))
        return made

    def run(self, program, *options, environment=None):
        """[(status, allocations of the last run, error)] by line; and what it printed in front of that."""
        lines = printed(program, options, self.folder, self.lines, environment or {})
        reports = [line.split("\t") for line in lines if "\t" in line]
        assert len(reports) == len(self.lines)
        self.printed = [line for line in lines if "\t" not in line]
        return [(status, int(count), error) for status, count, error in reports]


def read_like(path, like):
    return torch.frombuffer(bytearray(path.read_bytes()), dtype=like.dtype).reshape(like.shape)
