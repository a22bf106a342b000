"""Small models for tests, written in the ways in which people write them."""

import math

import torch
import torch.nn.functional as F
from torch import nn


def perturb(model):
    """Batch norms and biases that are not trivial; the model in eval mode."""
    generator = torch.Generator().manual_seed(0)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.weight.data.uniform_(0.5, 1.5, generator=generator)
            module.bias.data.normal_(0, 0.1, generator=generator)
            module.running_mean.normal_(0, 0.2, generator=generator)
            module.running_var.uniform_(0.5, 1.5, generator=generator)
    return model.eval()


class Block(nn.Module):
    """conv, bn, relu, conv, bn, +, relu, with an activation in place, as in ResNet."""

    def __init__(self, channels, stride=1):
        super().__init__()
        self.conv1 = nn.Conv2d(channels, channels, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(channels)
        self.relu = nn.ReLU(inplace=True)
        self.shortcut = nn.Sequential(nn.Conv2d(channels, channels, 1, stride), nn.BatchNorm2d(channels))

    def forward(self, x):
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        out += self.shortcut(x)
        return self.relu(out)


class ResNet(nn.Module):
    def __init__(self, channels=8, classes=20):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, channels, 7, 2, 3, bias=False), nn.BatchNorm2d(channels), nn.ReLU(True))
        self.blocks = nn.Sequential(Block(channels), Block(channels, 2))
        self.head = nn.Linear(channels, classes)

    def forward(self, x):
        x = F.max_pool2d(self.stem(x), 3, 2, 1)
        return self.head(F.adaptive_avg_pool2d(self.blocks(x), 1).flatten(1))


class MobileNet(nn.Module):
    """Depthwise convolutions, hardswish and squeeze-and-excitation, as in MobileNetV3."""

    def __init__(self, channels=8, classes=20):
        super().__init__()
        self.expand = nn.Sequential(nn.Conv2d(3, channels, 1, bias=False), nn.BatchNorm2d(channels), nn.Hardswish())
        self.depth = nn.Conv2d(channels, channels, 3, 1, 1, groups=channels, bias=False)
        self.bn = nn.BatchNorm2d(channels)
        self.squeeze, self.excite = nn.Conv2d(channels, 4, 1), nn.Conv2d(4, channels, 1)
        self.head = nn.Sequential(nn.Linear(channels, classes), nn.Dropout(0.2, inplace=True))

    def forward(self, x):
        x = F.hardswish(self.bn(self.depth(self.expand(x))), inplace=True)
        scale = self.excite(F.relu(self.squeeze(F.adaptive_avg_pool2d(x, 1)))).clamp(-3, 3).add(3).div(6)
        return self.head((x * scale).mean((2, 3)))


class UNet(nn.Module):
    def __init__(self, channels=8):
        super().__init__()
        self.down = nn.Sequential(nn.Conv2d(3, channels, 3, padding=1), nn.GroupNorm(2, channels), nn.SiLU())
        self.middle = nn.Sequential(nn.Conv2d(channels, channels, 3, padding=1), nn.BatchNorm2d(channels), nn.GELU())
        self.up = nn.Conv2d(2 * channels, 3, 3, padding=1)

    def forward(self, x):
        high = self.down(x)
        low = self.middle(F.avg_pool2d(high, 2))
        return self.up(torch.cat([high, F.interpolate(low, scale_factor=2, mode="nearest")], 1))


class Encoder(nn.Module):
    """Layers with written-out attention, as in BERT (after the sum) or a vision transformer (before it)."""

    def __init__(self, size=32, heads=4, layers=2, before=False, classes=20):
        super().__init__()
        self.heads, self.before = heads, before
        self.layers = nn.ModuleList(
            nn.ModuleDict(
                dict(
                    qkv=nn.Linear(size, 3 * size),
                    out=nn.Linear(size, size),
                    up=nn.Linear(size, 2 * size),
                    down=nn.Linear(2 * size, size),
                    norm1=nn.LayerNorm(size),
                    norm2=nn.LayerNorm(size),
                )
            )
            for _ in range(layers)
        )
        self.head = nn.Linear(size, classes)

    def attend(self, layer, x):
        batch, tokens, size = x.shape
        qkv = layer["qkv"](x).view(batch, tokens, 3, self.heads, size // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        weights = torch.softmax(q @ k.transpose(-1, -2) / math.sqrt(size // self.heads), dim=-1)
        return layer["out"]((weights @ v).transpose(1, 2).reshape(batch, tokens, size))

    def forward(self, x):
        for layer in self.layers:
            if self.before:
                x = x + self.attend(layer, layer["norm1"](x))
                x = x + layer["down"](F.gelu(layer["up"](layer["norm2"](x))))
            else:
                x = layer["norm1"](x + self.attend(layer, x))
                x = layer["norm2"](x + layer["down"](F.gelu(layer["up"](x), approximate="tanh")))
        return self.head(x)


class Decoder(nn.Module):
    """A language model in the style of Llama, and not of transformers: F.rms_norm, tables as buffers, fused gates."""

    def __init__(self, size=32, heads=4, layers=2, vocabulary=50, tokens=16):
        super().__init__()
        self.heads = heads
        self.embed = nn.Embedding(vocabulary, size)
        self.layers = nn.ModuleList(
            nn.ModuleDict(
                dict(
                    q=nn.Linear(size, size, bias=False),
                    k=nn.Linear(size, size, bias=False),
                    v=nn.Linear(size, size, bias=False),
                    o=nn.Linear(size, size, bias=False),
                    gate_up=nn.Linear(size, 4 * size, bias=False),
                    down=nn.Linear(2 * size, size, bias=False),
                )
            )
            for _ in range(layers)
        )
        self.norms = nn.ParameterList(torch.rand(size) + 0.5 for _ in range(2 * layers + 1))
        angles = torch.arange(tokens)[:, None] * 100.0 ** -torch.linspace(0, 1, size // heads // 2)
        self.register_buffer("cos", torch.cat([angles.cos()] * 2, -1))
        self.register_buffer("sin", torch.cat([angles.sin()] * 2, -1))

    def norm(self, x, index):
        return x * torch.rsqrt((x * x).mean(-1, keepdim=True) + 1e-5) * self.norms[index]

    def rotate(self, x):
        half = x.shape[-1] // 2
        tokens = x.shape[-2]
        turned = torch.cat((-x[..., half:], x[..., :half]), dim=-1)
        return x * self.cos[:tokens] + turned * self.sin[:tokens]

    def forward(self, ids):
        x = self.embed(ids)
        batch, tokens, _ = x.shape
        for index, layer in enumerate(self.layers):
            h = self.norm(x, 2 * index)
            q, k, v = (layer[n](h).view(batch, tokens, self.heads, -1).transpose(1, 2) for n in "qkv")
            h = F.scaled_dot_product_attention(self.rotate(q), self.rotate(k), v, is_causal=True)
            x = x + layer["o"](h.transpose(1, 2).flatten(2))
            gate, up = layer["gate_up"](self.norm(x, 2 * index + 1)).chunk(2, -1)
            x = x + layer["down"](F.silu(gate) * up)
        return F.linear(self.norm(x, -1), self.embed.weight)
