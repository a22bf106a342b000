"""Checkpoints of transformers' own quantizers "fp8" (DeepSeek's and Qwen's) and "mxfp4" (gpt-oss) on `mps`, where
transformers makes 16-bit numbers of them.

Modules of "fp8" stay transformers' own, and compute by metalcore's kernels. gpt-oss's experts become metalcore's.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.core_model_loading import ConversionOps
from transformers.integrations import finegrained_fp8
from transformers.quantizers.auto import AUTO_QUANTIZER_MAPPING

from .._core.routing import DEVICES
from ._experts import QuantizedExperts, clamped_swiglu
from ._repack import expert_blocks
from ._scaled import scaled_linear
from ._scaled_experts import scaled_linear_experts
from ._scaled_weight import ScaledWeight, require_scaled
from ._stored import read_headers

__all__ = ["register"]

_EIGHT_BITS = (torch.float8_e4m3fn, torch.float8_e5m2)
_THEIRS = ("cuda", "xpu")  # types of devices for which transformers has kernels


def _ours():
    """Returns whether transformers has no kernels for this machine, and metalcore has."""
    return "mps" in DEVICES and not torch.cuda.is_available()


def _weight(weight: Tensor, scale: Tensor, block: Any) -> ScaledWeight:
    """Returns a weight of transformers' modules.

    Raises:
        RuntimeError: it has blocks that kernels do not take.
    """
    if weight.dtype == torch.int8:  # two numbers of E2M1
        made = ScaledWeight(weight.view(torch.uint8), scale.view(torch.uint8), "mxfp4")
    else:
        rows, scale = weight.shape[-2], scale.float()  # which is exact for powers of 2
        sides = tuple(block or (0, 0))
        if block is None:
            scale = scale.reshape(*weight.shape[:-2], -1, 1)
            if scale.shape[-2] > 1:  # gate and up are one weight
                scale, sides = scale.repeat_interleave(rows // scale.shape[-2], -2), (1, 0)
        format = "e5m2" if weight.dtype == torch.float8_e5m2 else "e4m3"
        made = ScaledWeight(weight.view(torch.uint8), scale, format, sides)
    require_scaled(made.packed, made.scales, None, made.format, made.block, weight.dim())
    return made


def _linear(theirs):
    def fp8_linear(input, weight, weight_scale_inv, block_size=None, bias=None, *args, **kwargs):
        if input.device.type in _THEIRS:
            return theirs(input, weight, weight_scale_inv, block_size, bias, *args, **kwargs)
        return scaled_linear(input, _weight(weight, weight_scale_inv, block_size), bias)

    return fp8_linear


def _experts(theirs):
    def forward(self, hidden_states, top_k_index, top_k_weights):
        if hidden_states.device.type in _THEIRS:
            return theirs(self, hidden_states, top_k_index, top_k_weights)
        first = "gate_up_proj" if self.has_gate else "up_proj"
        up, down = (
            _weight(getattr(self, name), getattr(self, f"{name}_scale_inv"), self.block_size)
            for name in (first, "down_proj")
        )
        middle = scaled_linear_experts(hidden_states, up, top_k_index)
        middle = self._apply_gate(middle) if self.has_gate else self.act_fn(middle)
        result = scaled_linear_experts(middle, down, top_k_index) * top_k_weights[..., None].to(hidden_states.dtype)
        if getattr(self, "_is_expert_parallel", False):  # what other processes' experts make
            result = result.masked_fill((top_k_index >= self.num_experts)[..., None], 0.0)
        return result.sum(1).to(hidden_states.dtype)

    return forward


class _Deserialize(ConversionOps):
    """Takes the blocks and scales of gpt-oss's experts."""

    def __init__(self, quantizer: Any):
        self.quantizer = quantizer

    def convert(self, input_dict, model=None, full_layer_name="", missing_keys=None, **kwargs):  # pyright: ignore
        name, _, leaf = full_layer_name.rpartition(".")
        found = {key.rpartition("_")[2]: tensor for key, tensor in input_dict.items()}
        blocks, scales = (each[0] if isinstance(each := found[key], list) else each for key in ("blocks", "scales"))
        packed = torch.nn.Parameter(expert_blocks(blocks, scales), requires_grad=False)
        module: Any = model.get_submodule(name)  # pyright: ignore[reportOptionalMemberAccess]
        if packed.shape[:2] != (module.num_experts, getattr(module, f"{leaf}_bias").shape[1]):
            raise ValueError(f"{full_layer_name}: blocks {list(blocks.shape)} are not those of the model")
        module._parameters[leaf] = packed
        if missing_keys is not None:
            missing_keys.discard(full_layer_name)
        module._is_hf_initialized = True
        return {}


def _require_scales(tensors):
    """Raises a ValueError where numbers of 8 bits have no scale, for which transformers would take ones."""
    for key in tensors:
        name, _, leaf = key.rpartition(".")
        found = tensors.leaves(name)
        if leaf == "weight" and found[leaf].dtype in _EIGHT_BITS and not any("scale" in other for other in found):
            raise ValueError(f"{name}: the file has its weight in {found[leaf].dtype}, and no scale")


def _on_mps(theirs):
    """Returns a quantizer of transformers' that works where metalcore has kernels."""

    class Quantizer(theirs):
        def validate_environment(self, *args, **kwargs):
            if not _ours() or self.quantization_config.dequantize:
                super().validate_environment(*args, **kwargs)

        def _process_model_before_weight_loading(self, model, **kwargs):
            files = kwargs.get("checkpoint_files")
            if _ours() and files and all(str(file).endswith(".safetensors") for file in files):
                _require_scales(read_headers(files))
            return super()._process_model_before_weight_loading(model, **kwargs)

    Quantizer.__name__ = Quantizer.__qualname__ = theirs.__name__
    return Quantizer


def _gpt_oss(theirs):
    """Returns a quantizer of transformers' that makes metalcore's experts where metalcore has kernels."""

    class Quantizer(_on_mps(theirs)):
        @property
        def _makes_experts(self):
            return _ours() and self.pre_quantized and not self.quantization_config.dequantize

        def _process_model_before_weight_loading(self, model, **kwargs):
            if not self._makes_experts:
                return super()._process_model_before_weight_loading(model, **kwargs)

        def get_load_operations(self):
            operations = super().get_load_operations()
            return operations | {"deserialize": _Deserialize} if self._makes_experts else operations

        def _process_model_after_weight_loading(self, model, **kwargs):
            for name, module in list(model.named_modules()):
                up = getattr(module, "gate_up_proj", None)
                if isinstance(up, Tensor) and up.dtype == torch.uint8 and self._makes_experts:
                    model.set_submodule(name, _gpt_oss_experts(name, module).train(module.training))
            return super()._process_model_after_weight_loading(model, **kwargs)

        def is_serializable(self):
            return not self._makes_experts and super().is_serializable()

        @property
        def is_trainable(self):
            return self._makes_experts or super().is_trainable

    Quantizer.__name__ = Quantizer.__qualname__ = theirs.__name__
    return Quantizer


def _gpt_oss_experts(name, module):
    if (module.alpha, module.limit) != (1.702, 7.0):
        raise ValueError(f"{name}: its gates have {module.alpha} and {module.limit}, and metalcore's 1.702 and 7.0")
    bias = module.gate_up_proj_bias
    experts = QuantizedExperts(
        *(module.num_experts, module.hidden_size, module.intermediate_size, "MXFP4", True, clamped_swiglu, "meta"),
        dtype=bias.dtype,
    )
    for place, part in enumerate(("gate", "up")):  # in turns
        setattr(experts, part, module.gate_up_proj.detach()[:, place::2].contiguous())
        setattr(experts, f"{part}_bias", torch.nn.Parameter(bias.detach()[:, place::2].contiguous()))
    experts.down, experts.down_bias = module.down_proj.detach(), module.down_proj_bias
    return experts


def register() -> None:
    """Makes transformers' quantizers work on `mps`."""
    fp8 = finegrained_fp8
    if hasattr(fp8, "fp8_linear") and hasattr(fp8, "FP8ExpertsInterface"):
        fp8.fp8_linear = _linear(fp8.fp8_linear)
        mapping = fp8.FP8ExpertsInterface._global_mapping
        mapping.update({name: _experts(mapping[name]) for name in ("batched_mm", "grouped_mm") if name in mapping})
        for method in {"fp8", "mxfp8"} & AUTO_QUANTIZER_MAPPING.keys():
            AUTO_QUANTIZER_MAPPING[method] = _on_mps(AUTO_QUANTIZER_MAPPING[method])
    if hasattr(AUTO_QUANTIZER_MAPPING["mxfp4"], "get_load_operations"):
        AUTO_QUANTIZER_MAPPING["mxfp4"] = _gpt_oss(AUTO_QUANTIZER_MAPPING["mxfp4"])
