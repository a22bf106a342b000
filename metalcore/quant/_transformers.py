"""quantization_config=MetalcoreConfig(…) of transformers' from_pretrained."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from transformers.core_model_loading import ConversionOps
from transformers.quantizers.auto import (
    AUTO_QUANTIZATION_CONFIG_MAPPING,
    register_quantization_config,
    register_quantizer,
)
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from . import (
    _checkpoints,
    _peft,  # noqa: F401  peft's adapters know packed layers from then on
)
from ._affine_layers import PackedBuffers
from ._experts import QuantizedExperts
from ._layers import PackedModule, QuantizedEmbedding
from ._mixtures import MIXTURES
from ._plan import Plan, embedding_of, packed_weight, patterns, plan, replace_modules
from ._saved_layers import describe_layers, put_layers, require_written, state_dict_of
from ._stored import make_layers
from ._stored_mixtures import make_mixtures
from ._types import type_of

__all__ = ["MetalcoreConfig", "MetalcoreQuantizer", "note", "note_layers"]

_METHOD = "metalcore"


class MetalcoreConfig(QuantizationConfigMixin):
    """The configuration of transformers for weights that metalcore packs in GGML's types.

        model = AutoModelForCausalLM.from_pretrained(name, quantization_config=MetalcoreConfig("q4_k_m"))

    Args:
        mixture: as for metalcore.quant.quantize_model, or None where `packed` says all.
        skip: regular expressions of modules that stay as they are.
        types: GGML's types by regular expressions, which come before the mixture.
        packed: the types of each module that is packed already. save_pretrained writes them.
        layers: the formats of modules that are packed in other ways than GGML's, which save_pretrained writes, too.

    Raises:
        ValueError: there is no such mixture or type, or there is nothing that says the types.

    Example:
        >>> from metalcore.integrations.transformers import MetalcoreConfig
        >>> MetalcoreConfig("q4_k_m", skip=["lm_head"]).mixture
        'q4_k_m'
    """

    def __init__(
        self,
        mixture: str | None = "q4_k_m",
        skip: Sequence[str] = (),
        types: Mapping[str, Any] | None = None,
        packed: Mapping[str, Sequence[str]] | None = None,
        layers: Mapping[str, Mapping[str, Any]] | None = None,
        **kwargs: Any,
    ):
        kwargs.pop("quant_method", None)
        if kwargs:
            raise TypeError(f"MetalcoreConfig: unknown options {', '.join(kwargs)}")
        if mixture is None and not packed and not layers:
            raise ValueError("MetalcoreConfig: it needs a mixture, or the types of packed modules")
        if mixture is not None and (not isinstance(mixture, str) or mixture.lower() not in MIXTURES):
            raise ValueError(f"MetalcoreConfig: there is no mixture {mixture!r}; there are {', '.join(MIXTURES)}")
        self.quant_method = _METHOD  # pyright: ignore[reportAttributeAccessIssue]
        self.mixture = mixture and mixture.lower()
        patterns("MetalcoreConfig", skip, types)
        self.skip = [skip] if isinstance(skip, str) else list(skip)
        self.types = {pattern: type_of(type).name for pattern, type in (types or {}).items()}
        self.packed = {name: list(of) for name, of in (packed or {}).items()}
        self.layers = {name: dict(of) for name, of in (layers or {}).items()}


class MetalcoreQuantizer(HfQuantizer):
    """Packs each of a model's weights when it has been read, or makes modules for a checkpoint that has them packed.

    While weights are read the modules are transformers' own, with packed bytes in the place of numbers. What the
    checkpoint lacks is numbers, which are packed in the end.
    """

    requires_calibration = False
    quantization_config: MetalcoreConfig  # pyright: ignore[reportIncompatibleVariableOverride]
    _plan: Plan

    def _process_model_before_weight_loading(self, model, device_map=None, checkpoint_files=None, **kwargs):
        config = self.quantization_config
        if self.pre_quantized:
            packed: Any = {name: tuple(type_of(type) for type in types) for name, types in config.packed.items()}
            replace_modules(model, packed, pack=False)
            if config.layers:
                put_layers(model, config.layers, checkpoint_files)
            return model
        if config.mixture is None:
            raise ValueError("MetalcoreConfig: these weights are not packed, and there is no mixture for them")
        if isinstance(device_map, dict) and (len(set(device_map.values())) > 1 or "disk" in device_map.values()):
            raise ValueError(
                "MetalcoreConfig packs weights on one device. Load and save the model there, and then load the packed "
                f"model with this device_map: {device_map}"
            )
        self._plan = plan(model, config.mixture, config.skip, config.types)
        self._dtype = getattr(getattr(embedding_of(model, "input"), "weight", None), "dtype", model.dtype)
        return model

    def types_of(self, parameter: str) -> Any:
        """Returns the types of the weight that a parameter is, or None if it stays as it is."""
        module, _, leaf = parameter.rpartition(".")
        types = self._plan.get(module) if leaf in _WEIGHTS else None
        return types if isinstance(types, tuple) else None

    def param_needs_quantization(self, model, param_name, **kwargs):
        return not self.pre_quantized and self.types_of(param_name) is not None

    def get_quantize_ops(self):
        return _Pack(self)

    def _process_model_after_weight_loading(self, model, **kwargs):
        if not self.pre_quantized:
            self.quantization_config.packed = replace_modules(model, self._plan, pack=True, dtype=self._dtype).types
            self.pre_quantized = True
        make_layers(model)
        make_mixtures(model)
        return model

    def is_serializable(self) -> Any:
        return True

    def get_state_dict_and_metadata(self, model) -> Any:
        """Writes down what is packed now: layers may have got numbers meanwhile, as by a merge of adapters."""
        require_written(model)
        config = self.quantization_config
        modules = dict(model.named_modules(remove_duplicate=False))
        config.packed = {
            name: [module.type.name] if isinstance(module := modules.get(name), PackedModule) else types
            for name, types in config.packed.items()
            if "weight" not in getattr(modules.get(name), "_parameters", ())
        }
        config.layers = describe_layers(model)
        head, embedding = (embedding_of(model, kind) for kind in ("output", "input"))
        if isinstance(embedding, (QuantizedEmbedding, PackedBuffers)) and "weight" in getattr(head, "_parameters", ()):
            model.config.tie_word_embeddings = False
        return state_dict_of(model), {}

    @property
    def is_trainable(self) -> Any:
        return True


_WEIGHTS = ("weight", "gate_up_proj", "down_proj")


class _Pack(ConversionOps):
    """Packs the numbers of a weight that has been read."""

    def __init__(self, quantizer: MetalcoreQuantizer):
        self.quantizer = quantizer

    def convert(self, input_dict, model=None, **kwargs):  # pyright: ignore[reportIncompatibleMethodOverride]
        weights = {}
        for name in list(input_dict):
            numbers, types = input_dict.pop(name), self.quantizer.types_of(name)
            numbers = numbers[0] if isinstance(numbers, list) else numbers
            if types is not None:
                module, _, leaf = name.rpartition(".")
                numbers = packed_weight(model.get_submodule(module), leaf, numbers, types)  # pyright: ignore[reportOptionalMemberAccess]
            weights[name] = numbers
        return weights


def note(model: Any, packed: Mapping[str, Sequence[str]], mixture: str | None = None) -> None:
    """Tells a model of transformers that its modules are packed, with which types, so that save_pretrained writes it
    down."""
    register()
    before = getattr(model.config, "quantization_config", None)
    if isinstance(before, MetalcoreConfig):  # some modules were packed earlier
        packed = before.packed | dict(packed)
    config = MetalcoreConfig(mixture, packed=packed, layers=describe_layers(model))
    model.config.quantization_config = config
    model.hf_quantizer = MetalcoreQuantizer(config, pre_quantized=True)
    model.is_quantized, model.quantization_method = True, _METHOD


def note_layers(model: Any) -> None:
    """Does the same for all layers that are packed, whatever made them.

    Raises:
        ValueError: no layer is packed.
    """
    types = {
        name: [module.type.name] if isinstance(module, PackedModule) else [type.name for type in module.types]
        for name, module in model.named_modules()
        if isinstance(module, PackedModule) or type(module) is QuantizedExperts
    }
    if not types and not describe_layers(model):
        raise ValueError("note_layers: no layer of the model is packed")
    note(model, types)


def register() -> None:
    """Makes transformers know the method."""
    if _METHOD not in AUTO_QUANTIZATION_CONFIG_MAPPING:
        register_quantization_config(_METHOD)(MetalcoreConfig)
        register_quantizer(_METHOD)(MetalcoreQuantizer)
    _checkpoints.register(note_layers)


register()
