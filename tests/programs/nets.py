"""Small models for tests, written in the ways in which people write them."""

import math

import torch
import torch.nn.functional as F
import transformers
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


class Frozen(nn.Module):
    """A batch norm of fixed numbers written out, as in torchvision's backbones of detectors."""

    def __init__(self, channels):
        super().__init__()
        for name in ("weight", "bias", "mean", "var"):
            self.register_buffer(name, torch.rand(channels) + 0.5)

    def forward(self, x):
        weight, bias, mean, var = (t.reshape(1, -1, 1, 1) for t in (self.weight, self.bias, self.mean, self.var))
        scale = weight * (var + 1e-5).rsqrt()
        return x * scale + (bias - mean * scale)


class Pyramid(nn.Module):
    """Features of several sizes, to each of which the coarser ones are added, as detectors have them."""

    def __init__(self, channels=8):
        super().__init__()
        stem = nn.Sequential(nn.Conv2d(3, channels, 3, 2, 1, bias=False), Frozen(channels), nn.ReLU(inplace=True))
        self.stages = nn.ModuleList([stem, Block(channels, 2), Block(channels, 2)])
        self.inner = nn.ModuleList(nn.Conv2d(channels, channels, 1) for _ in self.stages)
        self.outer = nn.ModuleList(nn.Conv2d(channels, channels, 3, padding=1) for _ in self.stages)

    def forward(self, x):
        features = []
        for stage in self.stages:
            x = stage(x)
            features.append(x)
        found, above = {}, None
        for level in reversed(range(len(features))):
            here = self.inner[level](features[level])
            above = here if above is None else here + F.interpolate(above, size=here.shape[-2:], mode="nearest")
            found[str(level)] = self.outer[level](above)
        return {**found, "pool": F.max_pool2d(found["2"], 1, 2, 0)}


class ConvNeXt(nn.Module):
    """A depthwise convolution, a layer norm and two products over channels that lie last, a scale and a residual."""

    def __init__(self, channels=8):
        super().__init__()
        self.stem = nn.Conv2d(3, channels, 2, 2)
        self.depth = nn.Conv2d(channels, channels, 7, padding=3, groups=channels)
        self.norm = nn.LayerNorm(channels, eps=1e-6)
        self.up, self.down = nn.Linear(channels, 4 * channels), nn.Linear(4 * channels, channels)
        self.scale = nn.Parameter(torch.rand(channels, 1, 1))

    def forward(self, x):
        x = self.stem(x)
        y = self.down(F.gelu(self.up(self.norm(self.depth(x).permute(0, 2, 3, 1)))))
        return (x + self.scale * y.permute(0, 3, 1, 2)).mean((2, 3))


class EfficientNet(nn.Module):
    """An inverted bottleneck with SiLU, in which a sigmoid of the means scales the channels."""

    def __init__(self, channels=8):
        super().__init__()
        wide = 2 * channels
        self.expand = nn.Sequential(nn.Conv2d(3, wide, 1, bias=False), nn.BatchNorm2d(wide), nn.SiLU(inplace=True))
        self.depth = nn.Sequential(
            nn.Conv2d(wide, wide, 3, 2, 1, groups=wide, bias=False), nn.BatchNorm2d(wide), nn.SiLU(inplace=True)
        )
        self.squeeze, self.excite = nn.Conv2d(wide, 4, 1), nn.Conv2d(4, wide, 1)
        self.project = nn.Sequential(nn.Conv2d(wide, channels, 1, bias=False), nn.BatchNorm2d(channels))

    def forward(self, x):
        x = self.depth(self.expand(x))
        scale = torch.sigmoid(self.excite(F.silu(self.squeeze(F.adaptive_avg_pool2d(x, 1)))))
        return self.project(scale * x)


class Swin(nn.Module):
    """Attention within windows that are shifted, with a table of biases by relative positions."""

    def __init__(self, size=16, heads=2, window=4):
        super().__init__()
        self.heads, self.window = heads, window
        self.embed, self.norm = nn.Conv2d(3, size, 2, 2), nn.LayerNorm(size)
        self.qkv, self.out = nn.Linear(size, 3 * size), nn.Linear(size, size)
        self.table = nn.Parameter(torch.randn((2 * window - 1) ** 2, heads))
        places = torch.stack(torch.meshgrid(torch.arange(window), torch.arange(window), indexing="ij")).flatten(1)
        apart = places[:, :, None] - places[:, None] + window - 1
        self.register_buffer("index", apart[0] * (2 * window - 1) + apart[1])

    def forward(self, x):
        x = self.embed(x).permute(0, 2, 3, 1)
        batch, rows, columns, size = x.shape
        w, h = self.window, self.heads
        y = torch.roll(self.norm(x), (-w // 2, -w // 2), (1, 2))
        y = y.view(batch, rows // w, w, columns // w, w, size).transpose(2, 3).reshape(-1, w * w, size)
        q, k, v = self.qkv(y).view(-1, w * w, 3, h, size // h).permute(2, 0, 3, 1, 4).unbind(0)
        bias = self.table[self.index.flatten()].view(w * w, w * w, h).permute(2, 0, 1)
        scores = q * (size // h) ** -0.5 @ k.transpose(-2, -1) + bias[None]
        y = self.out((F.softmax(scores, -1) @ v).transpose(1, 2).reshape(-1, w * w, size))
        y = y.view(batch, rows // w, columns // w, w, w, size).transpose(2, 3).reshape(batch, rows, columns, size)
        return x + torch.roll(y, (w // 2, w // 2), (1, 2))


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


class Decoding(nn.Module):
    """A model of transformers with a static cache that it writes to: from tokens and the place of the first, logits."""

    def __init__(self, model, length):
        super().__init__()
        self.model, self.cache = model, transformers.StaticCache(config=model.config, max_cache_len=length)
        with torch.no_grad():  # every layer makes its tensors
            model(torch.zeros(1, 1, dtype=torch.int64, device=model.device), past_key_values=self.cache)
        self.cache.reset()
        for index, layer in enumerate(self.cache.layers):
            for name, value in vars(layer).items():
                for number, tensor in (value if isinstance(value, dict) else {0: value}).items():
                    if isinstance(tensor, torch.Tensor):
                        self.register_buffer(f"{name}_{index}_{number}", tensor, persistent=False)

    def forward(self, tokens, place):
        for layer in self.cache.layers:
            if hasattr(layer, "cumulative_length"):
                layer.cumulative_length.copy_(place)
        return self.model(tokens, past_key_values=self.cache).logits
