"""peft's adapters on layers with packed weights.

from metalcore.integrations.peft import packed_layers
model = get_peft_model(model, packed_layers(LoraConfig(target_modules=["q_proj", "v_proj"])))
"""

from __future__ import annotations

import warnings
from importlib import import_module
from typing import Any

from ..nn import QuantizedLinear

__all__ = ["packed_layers"]


def packed_layers(config: Any) -> Any:
    """Lets a LoraConfig adapt metalcore.nn.QuantizedLinear, and returns it. Adapters can be saved and loaded, and not
    merged into packed weights.

    Raises:
        ImportError: peft is not installed.
    """
    lora = import_module("peft.tuners.lora")

    class PackedLinear(lora.Linear):
        def __init__(self, *args, **kwargs):
            with warnings.catch_warnings():  # peft does not know the layer, and finds its sizes by their names
                warnings.filterwarnings("ignore", "Unsupported layer type")
                super().__init__(*args, **kwargs)

    config._register_custom_module({QuantizedLinear: PackedLinear})
    return config
