"""Packed checkpoints of other libraries, through transformers' from_pretrained: GPTQ's, AWQ's, MLX's and
compressed-tensors'.

The headers of the files say which modules are packed, and how. Those get the files' tensors as they are, and once all
of them are read each becomes one of metalcore's layers.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from transformers import modeling_utils
from transformers.quantizers.auto import (
    AUTO_QUANTIZATION_CONFIG_MAPPING,
    AUTO_QUANTIZER_MAPPING,
    register_quantization_config,
    register_quantizer,
)
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from .._core.routing import DEVICES
from . import _float_checkpoints
from ._repack import (
    AffineWeight,
    from_awq,
    from_compressed,
    from_gptq,
    from_mlx,
    mxfp4_blocks,
    scaled_from_compressed,
    scaled_from_mlx,
)
from ._saved_layers import require_written
from ._scaled_weight import ScaledWeight
from ._stored import Stored, make_layers, place_of, put_stored, read_headers
from ._stored_mixtures import PARTS, Part, as_matrices, make_mixtures, part_of_experts, put_experts, put_router

__all__ = ["MlxConfig", "register"]


class MlxConfig(QuantizationConfigMixin):
    """The configuration of MLX's checkpoints, as their config.json has it. The files' headers say the rest.

    Args:
        mode: "affine", "mxfp4", "mxfp8" or "nvfp4".
        bits, group_size: of most modules.
        kwargs: what else config.json has, such as the bits of single modules.

    Raises:
        ValueError: the mode is another.

    Example:
        >>> from metalcore.integrations.transformers import MlxConfig
        >>> MlxConfig(bits=4, group_size=64).mode
        'affine'
    """

    def __init__(self, bits: int = 4, group_size: int = 64, mode: str = "affine", **kwargs: Any):
        if mode not in ("affine", "mxfp4", "mxfp8", "nvfp4"):
            raise ValueError(f'MlxConfig: mode must be "affine", "mxfp4", "mxfp8" or "nvfp4", not {mode!r}')
        self.quant_method = "mlx"  # pyright: ignore[reportAttributeAccessIssue]
        self.bits, self.group_size, self.mode = bits, group_size, mode
        self.of_modules = {name: value for name, value in kwargs.items() if name not in ("quant_method", "of_modules")}


class CompressedConfig(QuantizationConfigMixin):
    """The configuration of compressed-tensors' formats "pack-quantized", "float-quantized", "nvfp4-pack-quantized" and
    "mxfp4-pack-quantized", for which their package is not needed. What layers are given is not quantized, as models of
    the last three ask for: it keeps its digits.

    Raises:
        ValueError: inputs of layers with packed integers are to be quantized, too, or the groups describe no weights.
    """

    def __init__(
        self, config_groups: Mapping[str, Any], format: str = "pack-quantized", ignore: Any = (), **kwargs: Any
    ):
        self.quant_method = "compressed-tensors"  # pyright: ignore[reportAttributeAccessIssue]
        if not isinstance(ignore, (list, tuple, type(None))):
            raise ValueError(f"compressed-tensors: ignore must be a list of names, not {ignore!r}")
        self.format, self.config_groups, self.ignore = format, config_groups, list(ignore or ())
        weights = _weights_of_groups(config_groups)
        for name, group in config_groups.items():
            if format == "pack-quantized" and (group.get("input_activations") or group.get("output_activations")):
                raise ValueError(f"compressed-tensors: {name} quantizes what layers are given, and metalcore does not")
        sizes = {of.get("group_size") or -1 for of in weights}
        self.group_size = sizes.pop() if len(sizes) == 1 else 0  # 0: as many as there are
        # Files say by these tensors what would be a default without them.
        told = [
            ("weight_zero_point", [of.get("symmetric") is False for of in weights]),
            ("weight_g_idx", [of.get("actorder") == "group" for of in weights]),
        ]
        self.needed = [leaf for leaf, groups in told if groups and all(groups)]
        blocks = {tuple(of.get("block_structure") or (1, max(of.get("group_size") or 0, 0))) for of in weights}
        self.block = blocks.pop() if len(blocks) == 1 else ()


def _weights_of_groups(config_groups):
    """Returns what each group says of weights: sizes are integers, and blocks have two."""
    groups = config_groups.values() if isinstance(config_groups, Mapping) else [config_groups]
    weights = [(group.get("weights") or {}) if isinstance(group, Mapping) else group for group in groups]
    for of in weights:
        sizes = of.get("block_structure") or (1, 1) if isinstance(of, Mapping) else None
        if (
            not isinstance(sizes, (list, tuple))
            or [type(size) for size in sizes] != [int, int]
            or not isinstance(of.get("group_size"), (int, type(None)))
        ):
            raise ValueError(f"compressed-tensors: config_groups describes no weights: {of!r}")
    return weights


@dataclasses.dataclass
class _Format:
    """How a library's files name a module's tensors.

    Attributes:
        first: the tensor that every packed module has.
        others: those that it has besides; `optional` it may have.
        convert: takes the tensors by name, the length of the weight's rows, and the configuration, and returns an
            AffineWeight, a ScaledWeight, or bytes of GGML's MXFP4.
    """

    first: str
    others: tuple[str, ...]
    convert: Callable[[Mapping[str, Tensor], int, Any], AffineWeight | ScaledWeight | Tensor]
    optional: tuple[str, ...] = ()


def _convert_gptq(tensors, length, config):
    if config.format not in ("gptq", "gptq_v2"):
        raise ValueError(f'GPTQ\'s format must be "gptq" or "gptq_v2", not {config.format!r}')
    if config.desc_act and config.group_size != -1 and "g_idx" not in tensors:
        raise ValueError("the file has its qweight, and no g_idx, which desc_act asks for")
    return from_gptq(
        tensors["qweight"],
        tensors["qzeros"],
        tensors["scales"],
        tensors.get("g_idx"),
        length,
        config.group_size,
        config.format == "gptq",
    )


def _convert_awq(tensors, length, config):
    if config.format != "gemm":
        raise ValueError(f'AWQ\'s version must be "gemm", not {str(config.format)!r}')
    return from_awq(tensors["qweight"], tensors["qzeros"], tensors["scales"], length, config.group_size)


def _convert_compressed(tensors, length, config):
    if missing := [leaf for leaf in config.needed if leaf not in tensors]:
        raise ValueError(f"the file has its weight_packed, and no {' and no '.join(missing)}")
    return from_compressed(
        tensors["weight_packed"],
        tensors["weight_scale"],
        tensors.get("weight_zero_point"),
        tensors.get("weight_g_idx"),
        length,
        config.group_size,
    )


def _convert_scaled(tensors, length, config):
    weight = tensors["weight_packed" if "weight_packed" in tensors else "weight"]
    if config.format == "nvfp4-pack-quantized" and "weight_global_scale" not in tensors:
        raise ValueError("the file has its weight_packed, and no weight_global_scale")
    divisor = tensors.get("weight_global_scale")
    return scaled_from_compressed(weight, tensors["weight_scale"], divisor, length, config.block)


def _convert_mlx(tensors, length, config):
    for leaf in ("weight", "scales"):
        if tensors[leaf].dim() != 2:
            raise ValueError(f"{leaf} {list(tensors[leaf].shape)} must have 2 dimensions")
    if tensors["scales"].dtype != torch.uint8:
        if "biases" not in tensors:
            raise ValueError("the file has its scales, and no biases")
        return from_mlx(tensors["weight"], tensors["scales"], tensors["biases"], length)
    if tensors["scales"].shape[-1] * 16 == length or tensors["weight"].shape[-1] * 4 == length:
        return scaled_from_mlx(tensors["weight"], tensors["scales"], length)
    blocks = mxfp4_blocks(tensors["weight"], tensors["scales"])
    if blocks.shape[1] // 17 * 32 != length:
        raise ValueError(f"weight {list(tensors['weight'].shape)} has no rows of {length} numbers of MXFP4")
    return blocks


_GPTQ = _Format("qweight", ("qzeros", "scales"), _convert_gptq, ("g_idx",))
_AWQ = _Format("qweight", ("qzeros", "scales"), _convert_awq)
_SCALED = _Format("weight_packed", ("weight_scale",), _convert_scaled, ("weight_global_scale",))
_COMPRESSED = {  # by the names of the formats
    "pack-quantized": _Format(
        "weight_packed",
        ("weight_scale",),
        _convert_compressed,
        ("weight_zero_point", "weight_g_idx", "weight_shape"),
    ),
    "float-quantized": _Format("weight_scale", ("weight",), _convert_scaled),
    "nvfp4-pack-quantized": _SCALED,
    "mxfp4-pack-quantized": _SCALED,
}
_MLX = _Format("scales", ("weight",), _convert_mlx, ("biases",))
_MLX_LEAVES = ("scales", "weight", "biases")


def _require_scale(name, found):
    """Raises a ValueError where numbers of 8 bits have no scale: a layer would take them as they are."""
    if found["weight"].dtype in (torch.float8_e4m3fn, torch.float8_e5m2) and "weight_scale" not in found:
        raise ValueError(f"{name}: the file has its weight in {found['weight'].dtype}, and no weight_scale")


class _Files(HfQuantizer):
    """Loads what a library has packed."""

    requires_calibration = True
    format: _Format
    note_layers: Callable[[Any], None]  # tells a model which of its layers are packed

    def _process_model_before_weight_loading(self, model, checkpoint_files=None, **kwargs):
        tensors = read_headers(checkpoint_files)
        modules = dict(model.named_modules(remove_duplicate=False))
        config, places, experts = self.quantization_config, {}, {}
        form = _COMPRESSED[config.format] if isinstance(config, CompressedConfig) else self.format
        for key in tensors:
            name, _, leaf = key.rpartition(".")
            if leaf == form.others[0] == "weight" and form is not _MLX:
                _require_scale(name, tensors.leaves(name))
            if leaf != form.first or form.others[0] not in tensors.leaves(name):
                packed = form is not _MLX or isinstance(
                    modules.get(place_of(name, model, modules)), (torch.nn.Linear, torch.nn.Embedding)
                )
                if leaf == form.first and packed:
                    raise ValueError(f"{name}: the file has its {leaf}, and no {form.others[0]}")
                if form.first == "qweight" and leaf == "scales" and "qweight" not in tensors.leaves(name):
                    raise ValueError(
                        f"{name}: the file has its scales, and no qweight; of activations none are applied"
                    )
                continue
            place = place_of(name, model, modules)
            module = modules.get(place)
            if module is None and form is _MLX and (of := part_of_experts(name)):
                experts[of] = None
                continue
            if not isinstance(module, (torch.nn.Linear, torch.nn.Embedding)):
                own = {leaf: tensors.leaves(name)[leaf] for leaf in _MLX_LEAVES if leaf in tensors.leaves(name)}
                if form is _MLX and put_router(model, name, module, own, lambda t, n: _convert_mlx(t, n, config)):
                    continue
                kind = "no module of this model" if module is None else f"a {type(module).__name__}"
                raise ValueError(
                    f"{name}: its weight is packed, and it is {kind}; metalcore loads linear layers and embeddings"
                )
            places[place] = name
        for name in experts:
            convert = functools.partial(as_matrices, lambda t, n: _convert_mlx(t, n, config))
            part = Part((form.first, *form.others), form.optional, convert)
            put_experts(model, name, modules, tensors, {f"{each}_proj": part for each in PARTS})
        stored = {}
        for place, name in places.items():
            found = tensors.leaves(name)
            missing = [leaf for leaf in form.others if leaf not in found]
            if missing:
                raise ValueError(f"{name}: the file has its {form.first}, and no {' and no '.join(missing)}")
            own = {leaf: found[leaf] for leaf in (form.first, *form.others, *form.optional) if leaf in found}
            convert = functools.partial(
                lambda convert, config, own, length: convert(own, length, config), form.convert, config
            )
            stored[place] = Stored(name, modules[place], own, convert)
        put_stored(model, stored)
        return model

    def _process_model_after_weight_loading(self, model, **kwargs):
        make_layers(model)
        make_mixtures(model)
        return model

    def is_serializable(self) -> Any:
        return True

    def get_state_dict_and_metadata(self, model):
        """Writes metalcore's layers, with a configuration that says so."""
        require_written(model)
        type(self).note_layers(model)
        return model.hf_quantizer.get_state_dict_and_metadata(model)

    @property
    def is_trainable(self) -> Any:
        return True


class _Mlx(_Files):
    """Loads MLX's checkpoints."""

    format = _MLX


def _is_ours(package):
    """Returns whether metalcore loads a library's checkpoints: where there is an `mps` device, or where the library is
    not installed."""
    return "mps" in DEVICES or importlib.util.find_spec(package) is None


def _instead_of(theirs, form):
    """Returns a class that makes metalcore's quantizer of packed checkpoints, or transformers' own."""

    class Files(_Files):
        format = form

        def __new__(cls, config, pre_quantized=True, **kwargs):
            ours = _is_ours("gptqmodel") if form else isinstance(config, CompressedConfig)
            if pre_quantized and ours:
                return super().__new__(cls)
            return theirs(config, pre_quantized=pre_quantized, **kwargs)

    Files.__name__ = Files.__qualname__ = theirs.__name__
    return Files


def _config_instead_of(theirs):
    """Returns a class whose from_dict makes metalcore's configuration of packed integers, or transformers' own."""

    class Config(theirs):
        @classmethod
        def from_dict(cls, config_dict, *args, **kwargs):
            ours = str(config_dict.get("format")) in _COMPRESSED and _is_ours("compressed_tensors")
            return (CompressedConfig if ours else theirs).from_dict(config_dict, *args, **kwargs)

    Config.__name__ = Config.__qualname__ = theirs.__name__
    return Config


def register(note_layers: Callable[[Any], None]) -> None:
    """Makes transformers load these checkpoints by metalcore. `note_layers` tells a model which of its layers are
    packed, before they are saved."""
    if "mlx" in AUTO_QUANTIZATION_CONFIG_MAPPING:
        return
    _Files.note_layers = staticmethod(note_layers)
    register_quantization_config("mlx")(MlxConfig)
    register_quantizer("mlx")(_Mlx)
    configs = AUTO_QUANTIZATION_CONFIG_MAPPING
    configs["compressed-tensors"] = _config_instead_of(configs["compressed-tensors"])
    for method, form in (("gptq", _GPTQ), ("awq", _AWQ), ("compressed-tensors", None)):
        AUTO_QUANTIZER_MAPPING[method] = _instead_of(AUTO_QUANTIZER_MAPPING[method], form)
    _float_checkpoints.register()
    of_transformers = modeling_utils.get_hf_quantizer  # pyright: ignore[reportPrivateImportUsage]

    @functools.wraps(of_transformers)
    def get_hf_quantizer(config, *args, **kwargs):
        _name_mlx(config)
        return of_transformers(config, *args, **kwargs)

    modeling_utils.get_hf_quantizer = get_hf_quantizer  # pyright: ignore[reportPrivateImportUsage]


def _name_mlx(config):
    """Tells transformers whose configuration it is: MLX writes no method."""
    found = getattr(config, "quantization_config", None) or getattr(config, "quantization", None)
    if isinstance(found, dict) and "quant_method" not in found and {"bits", "group_size"} <= found.keys():
        config.quantization_config = {**found, "quant_method": "mlx"}
