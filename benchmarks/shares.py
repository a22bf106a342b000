"""What diffusion and vision models spend their work on, and how much of that metalcore's overrides take.

    pip install diffusers && python -m benchmarks.shares

Models of full size run on tensors without memory. Each operator is counted with the bytes of its tensors in float16,
and its operations. The time is what a chip of 400 GB/s and 14 TFLOP/s needs for the larger of the two: a rough figure,
which tells large parts from small ones.
"""

from collections import defaultdict
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

BYTES, FLOPS = 400e9, 14e12  # a second
OURS = {"native_group_norm", "native_layer_norm", "silu", "gelu", "relu", "attention", "geglu"}
FREE = set(
    "view transpose t slice unsqueeze permute expand split detach select _unsafe_view empty new_empty unbind chunk "
    "squeeze alias arange lift_fresh as_strided scalar_tensor".split()
)


def models():
    """Yields (name, model, a call of it)."""
    from diffusers import AutoencoderKL, SD3Transformer2DModel, UNet2DConditionModel
    from transformers import ResNetConfig, ResNetForImageClassification

    unet = UNet2DConditionModel(sample_size=64, cross_attention_dim=768)
    step = torch.zeros((), dtype=torch.long)
    yield "UNet (Stable Diffusion 1.5)", unet, lambda: unet(torch.empty(2, 4, 64, 64), step, torch.empty(2, 77, 768))
    four = {"down_block_types": ("DownEncoderBlock2D",) * 4, "up_block_types": ("UpDecoderBlock2D",) * 4}
    vae = AutoencoderKL(block_out_channels=(128, 256, 512, 512), layers_per_block=2, **four)
    yield "VAE's decoder, 512×512", vae, lambda: vae.decode(torch.empty(1, 4, 64, 64))
    sizes = {"num_layers": 24, "num_attention_heads": 24, "joint_attention_dim": 4096, "caption_projection_dim": 1536}
    sizes |= {"in_channels": 16, "out_channels": 16, "pooled_projection_dim": 2048, "pos_embed_max_size": 192}
    sd3 = SD3Transformer2DModel(sample_size=128, **sizes)
    inputs = torch.empty(2, 16, 128, 128), torch.empty(2, 154, 4096), torch.empty(2, 2048), torch.zeros(2)
    yield "SD3 medium, 1024×1024", sd3, lambda: sd3(*inputs)
    resnet = ResNetForImageClassification(ResNetConfig())
    yield "ResNet-50, 8 images", resnet, lambda: resnet(torch.empty(8, 3, 224, 224))


class Counted(TorchDispatchMode):
    """rows: by operator, how often it ran, its bytes and its operations."""

    def __init__(self):
        super().__init__()
        self.rows = defaultdict(lambda: [0, 0, 0])

    def add(self, name, tensors, flops=0):
        row = self.rows[name]
        row[0], row[1], row[2] = row[0] + 1, row[1] + sum(2 * x.numel() for x in tensors), row[2] + flops

    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        found, packet = function(*arguments, **(options or {})), function.overloadpacket
        if packet.__name__ not in FREE:
            tensors = [x for x in tree_leaves((arguments, options, found)) if isinstance(x, torch.Tensor)]
            flops = (
                flop_registry[packet](*arguments, **(options or {}), out_val=found) if packet in flop_registry else 0
            )
            self.add(packet.__name__, tensors, flops)
        return found


@contextmanager
def overridden(counted):
    """Makes attention and gates one op each, as overrides do."""
    from diffusers.models.activations import GEGLU

    attention, gate = F.scaled_dot_product_attention, GEGLU.forward

    def attend(q, k, v, *arguments, **options):
        out = q.new_empty(*q.shape[:-1], v.shape[-1])
        counted.add("attention", (q, k, v, out), 2 * q[..., 0].numel() * k.shape[-2] * (q.shape[-1] + v.shape[-1]))
        return out

    def glu(self, x):
        both = self.proj(x)
        out = both.new_empty(*both.shape[:-1], both.shape[-1] // 2)
        counted.add("geglu", (both, out))
        return out

    F.scaled_dot_product_attention, GEGLU.forward = attend, glu
    try:
        yield
    finally:
        F.scaled_dot_product_attention, GEGLU.forward = attention, gate


def main():
    torch.set_default_device("meta")
    for name, model, call in models():
        model.eval()
        counted = Counted()
        with torch.no_grad(), overridden(counted), counted:
            call()
        rows = {op: (*row, max(row[1] / BYTES, row[2] / FLOPS)) for op, row in counted.rows.items()}
        totals = [sum(row[i] for row in rows.values()) for i in range(4)]
        ours = [sum(row[i] for op, row in rows.items() if op in OURS) for i in range(4)]
        print(f"\n{name}: {totals[0]} operators, {totals[1] / 1e9:.2f} GB, {totals[2] / 1e12:.2f} TFLOP")
        print(f"{'':36} calls  bytes  time")
        for op, row in [("metalcore's", ours), *sorted(rows.items(), key=lambda item: -item[1][3])[:12]]:
            shares = "".join(f"{100 * row[i] / totals[i]:6.1f}%" for i in (0, 1, 3))
            print(f"{op + ' *' * (op in OURS):34}{shares}")


if __name__ == "__main__":
    main()
