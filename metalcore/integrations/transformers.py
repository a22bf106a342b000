"""metalcore's kernels in HuggingFace transformers.

    from metalcore.integrations import transformers as metalcore_transformers
    metalcore_transformers.patch()                # before or after the model is made
    trainer = Trainer(model, ...); trainer.train()
    metalcore_transformers.unpatch()

    with metalcore_transformers.patch(): ...      # or for a while

    metalcore_transformers.register_attention()   # attention alone, also for inference
    model = AutoModelForCausalLM.from_pretrained(..., attn_implementation="metalcore")

    config = metalcore_transformers.MetalcoreConfig("q4_k_m")     # weights packed as GGUF files have them
    model = AutoModelForCausalLM.from_pretrained(..., quantization_config=config)

    model = AutoModelForCausalLM.from_pretrained("mlx-community/…", device_map="mps")  # or GPTQ's, AWQ's, …

`patch()` enables the overrides (metalcore.overrides) that transformers' models and its Trainer use, and no others.
docs/transformers.md lists them with what they reach. Nothing changes in a model's modules, parameters or checkpoints.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from importlib import import_module
from typing import TYPE_CHECKING, Any

from .. import overrides
from .._core.environment import after_import, require_transformers
from .._core.registry import OPS
from ..attention import flex_attention
from ..overrides._switches import Request

if TYPE_CHECKING:
    from ..quant._checkpoints import MlxConfig
    from ..quant._transformers import MetalcoreConfig

__all__ = [
    "MetalcoreConfig",
    "MlxConfig",
    "active_patches",
    "note_layers",
    "patch",
    "register_attention",
    "register_quantization",
    "unpatch",
]

OVERRIDES = tuple(name for name in overrides.NAMES if OPS[name].family != "linalg")

_requests: list[Request] = []


def patch(*names: str, exclude: str | Iterable[str] = ()) -> Request:
    """Puts metalcore's kernels into transformers' models and Trainer.

    Args:
        names: of the overrides. No name means all that are on by default (see `enable_pytorch_overrides`).
        exclude: names to leave out.

    Returns:
        A context manager that undoes this call at the end of its `with` block. Its use is optional.

    Raises:
        ValueError: a name is not one of these.
        ImportError: transformers is not installed, or older than 5.4.

    Example:
        >>> from metalcore.integrations import transformers
        >>> with transformers.patch(exclude="rope"):
        ...     "rms_norm" in transformers.active_patches()
        True
    """
    register_attention()
    register_quantization()
    exclude = (exclude,) if isinstance(exclude, str) else tuple(exclude)
    for name in (*names, *exclude):
        if name not in OVERRIDES:
            raise ValueError(f"patch: {name!r} is not one of {', '.join(OVERRIDES)}")
    request = overrides.request([name for name in names or OVERRIDES if name not in exclude], by_name=bool(names))
    _requests.append(request)
    return request


def unpatch() -> None:
    """Undoes all calls of patch(). Overrides that others enabled stay on, and existing optimizers stay as they are.

    Example:
        >>> from metalcore.integrations import transformers
        >>> request = transformers.patch("rope")
        >>> transformers.unpatch()
        >>> transformers.active_patches()
        ()
    """
    while _requests:
        with _requests.pop():
            pass


def active_patches() -> tuple[str, ...]:
    """Returns the names of the patches that are on, also those that other calls enabled.

    Example:
        >>> from metalcore.integrations import transformers
        >>> with transformers.patch("rope", "swiglu"):
        ...     transformers.active_patches()
        ('swiglu', 'rope')
    """
    return tuple(name for name in OVERRIDES if name in overrides.active_overrides())


def register_attention() -> None:
    """Makes attn_implementation="metalcore" known to transformers, for training and for generation with dynamic and
    static caches. It has sliding windows, softcap, sinks, and packed sequences, whose position_ids begin again or which
    come with cu_seq_lens. On `mps`, attn_implementation="flex_attention" runs by metalcore.flex_attention from then on.

    Raises:
        ImportError: transformers is not installed, or older than 5.4.

    Example:
        >>> from metalcore.integrations.transformers import register_attention
        >>> from transformers import AttentionInterface
        >>> register_attention()
        >>> "metalcore" in AttentionInterface()
        True
    """
    require_transformers("metalcore's attention")
    from ..overrides.libraries import attention

    attention.register()
    after_import("transformers.integrations.flex_attention", _run_flex_attention)


def _run_flex_attention():
    """Computes attn_implementation="flex_attention" by metalcore.flex_attention, on `mps`, where PyTorch's compiled
    function has no gradient."""
    module = import_module("transformers.integrations.flex_attention")
    by_transformers: Any = module.compile_friendly_flex_attention
    if hasattr(by_transformers, "__wrapped__"):
        return

    @functools.wraps(by_transformers)
    def compile_friendly_flex_attention(query, key, value, training=False, **kwargs):
        if query.device.type == "mps":
            return flex_attention(query, key, value, **kwargs)
        return by_transformers(query, key, value, training=training, **kwargs)

    vars(module)["compile_friendly_flex_attention"] = compile_friendly_flex_attention


def register_quantization() -> None:
    """Makes transformers know what MetalcoreConfig writes into a model's config.json, so that from_pretrained loads
    models whose weights metalcore has packed; and those of MLX (affine and mxfp4), GPTQ, AWQ and compressed-tensors
    (packed integers). The last three are transformers' own where there is no `mps` device and their library is
    installed. Where metalcore and transformers are both imported, whichever comes first, this has been done.

    Raises:
        ImportError: transformers is not installed, or older than 5.4.

    Example:
        >>> from metalcore.integrations.transformers import register_quantization
        >>> from transformers.quantizers.auto import AUTO_QUANTIZER_MAPPING
        >>> register_quantization()
        >>> "metalcore" in AUTO_QUANTIZER_MAPPING
        True
    """
    require_transformers("MetalcoreConfig")
    from ..quant import _transformers

    _transformers.register()


def note_layers(model: Any) -> None:
    """Tells a model of transformers which of its layers are packed, so that save_pretrained writes them as they are,
    and from_pretrained makes them again. Models that metalcore loaded or quantized know it.

    Args:
        model: of transformers, some of whose layers are metalcore.nn's AffineLinear, ScaledLinear, Linear4bit,
            Linear8bitLt, QuantizedLinear, or embeddings or experts of these kinds.

    Raises:
        ImportError: transformers is not installed, or older than 5.4.
        ValueError: no layer is packed.

    Example:
        >>> from metalcore.integrations.transformers import note_layers
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> sizes = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 2}
        >>> model = LlamaForCausalLM(LlamaConfig(**sizes, num_hidden_layers=1))
        >>> model.lm_head = metalcore.nn.Linear4bit.from_linear(model.lm_head)
        >>> note_layers(model)
        >>> model.config.quantization_config.layers
        {'lm_head': {'format': 'nf4', 'block_size': 64}}
    """
    require_transformers("note_layers")
    from ..quant import _transformers

    _transformers.note_layers(model)


def __getattr__(name: str) -> Any:
    if name in ("MetalcoreConfig", "MlxConfig"):  # their base is a class of transformers
        from ..quant import _checkpoints, _transformers

        globals().update(MetalcoreConfig=_transformers.MetalcoreConfig, MlxConfig=_checkpoints.MlxConfig)
        return globals()[name]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
