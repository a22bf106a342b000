"""quantization_config=MetalcoreConfig(…) of transformers' from_pretrained."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from transformers.quantizers.auto import (
    AUTO_QUANTIZATION_CONFIG_MAPPING,
    register_quantization_config,
    register_quantizer,
)
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from ..quant import type_of
from ..quant._mixtures import MIXTURES
from ..quant._model import Report, plan, replace_modules

__all__ = ["MetalcoreConfig", "MetalcoreQuantizer", "note"]

_METHOD = "metalcore"


class MetalcoreConfig(QuantizationConfigMixin):
    """Weights packed in GGML's types by metalcore.

        model = AutoModelForCausalLM.from_pretrained(name, quantization_config=MetalcoreConfig("q4_k_m"))

    Args:
        mixture: as for metalcore.quant.quantize_model.
        skip: regular expressions of modules that stay as they are.
        types: GGML's types by regular expressions, which come before the mixture.
        packed: the types of each module that is packed already. save_pretrained writes them.

    Raises:
        ValueError: there is no such mixture or type.
    """

    def __init__(
        self,
        mixture: str = "q4_k_m",
        skip: Sequence[str] = (),
        types: Mapping[str, Any] | None = None,
        packed: Mapping[str, Sequence[str]] | None = None,
        **kwargs: Any,
    ):
        kwargs.pop("quant_method", None)
        if kwargs:
            raise TypeError(f"MetalcoreConfig: unknown options {', '.join(kwargs)}")
        if mixture.lower() not in MIXTURES:
            raise ValueError(f"MetalcoreConfig: there is no mixture {mixture!r}; there are {', '.join(MIXTURES)}")
        self.quant_method = _METHOD  # pyright: ignore[reportAttributeAccessIssue]
        self.mixture = mixture.lower()
        self.skip = list(skip)
        self.types = {pattern: type_of(type).name for pattern, type in (types or {}).items()}
        self.packed = {name: list(of) for name, of in (packed or {}).items()}


class MetalcoreQuantizer(HfQuantizer):
    """Packs a model's weights when they are there, or makes modules for a checkpoint that has them packed."""

    requires_calibration = False
    quantization_config: MetalcoreConfig  # pyright: ignore[reportIncompatibleVariableOverride]

    def _process_model_before_weight_loading(self, model, **kwargs):
        if self.pre_quantized:
            packed: Any = {
                name: tuple(type_of(type) for type in types) for name, types in self.quantization_config.packed.items()
            }
            replace_modules(model, packed, pack=False)
        return model

    def _process_model_after_weight_loading(self, model, **kwargs):
        if not self.pre_quantized:
            config = self.quantization_config
            report = replace_modules(model, plan(model, config.mixture, config.skip, config.types), pack=True)
            config.packed = report.types
            self.pre_quantized = True
        return model

    def is_serializable(self) -> Any:
        return True

    @property
    def is_trainable(self) -> Any:
        return True


def note(model: Any, mixture: str, report: Report) -> None:
    """Tells a model of transformers that its weights are packed, so that save_pretrained writes it down."""
    register()
    config = MetalcoreConfig(mixture, packed=report.types)
    model.config.quantization_config = config
    model.hf_quantizer = MetalcoreQuantizer(config, pre_quantized=True)
    model.is_quantized, model.quantization_method = True, _METHOD


def register() -> None:
    """Makes transformers know the method."""
    if _METHOD not in AUTO_QUANTIZATION_CONFIG_MAPPING:
        register_quantization_config(_METHOD)(MetalcoreConfig)
        register_quantizer(_METHOD)(MetalcoreQuantizer)


register()
