"""PyTorch ops written as Metal kernels, which also run on NVIDIA GPUs and, checked, on any Linux machine.

    import metalcore
    q, r = metalcore.qr(a)                           # as torch.linalg.qr, on `mps` and `cuda` tensors
    y = metalcore.rms_norm(x, x.shape[-1:], weight)  # differentiable; float32, float16 and bfloat16

Tensors on other devices, and whatever a kernel does not support, go to PyTorch's own op.
"""

import contextlib
import importlib
from typing import TYPE_CHECKING, Any

import torch  # noqa: F401  (loads the libraries that _C links against)

# All of them, not only what is asked for: they complete the operators torch.ops.metalcore.… and register the ops, whose
# registry has the order in which they are imported.
# isort: off
from ._system import __version__  # noqa: F401  (the module refuses what _C cannot run on)
from . import _C  # noqa: F401
from ._core.environment import after_import
from .tuning import store  # noqa: F401  (it says where measured tuning is)
from . import mac_kernels, recording
from . import (
    activation,
    normalization,
    attention,
    elementwise,
    embeddings,
    gemm,
    conv,  # after gemm
    double,
    loss,
    sampling,
    linalg,
    optim,
    paged,
    quant,
    rotary,
    sequence,
)
from .activation import *  # noqa: F403
from .attention import *  # noqa: F403
from .attention import _flex
from .conv import *  # noqa: F403
from .elementwise import *  # noqa: F403
from .embeddings import *  # noqa: F403
from .gemm import *  # noqa: F403
from .linalg import *  # noqa: F403
from .loss import *  # noqa: F403
from .normalization import *  # noqa: F403
from .quant import (
    affine_embedding,
    affine_linear,
    affine_linear_experts,
    dequantize,
    dequantize_4bit,
    dequantize_8bit,
    dequantize_affine,
    dequantize_scaled,
    linear_4bit,
    quantize,
    quantize_4bit,
    quantize_8bit,
    quantize_scaled,
    quantized_embedding,
    quantized_linear,
    quantized_linear_experts,
    scaled_embedding,
    scaled_linear,
    scaled_linear_experts,
    scaled_mm,
)
from .rotary import *  # noqa: F403
from .sampling import *  # noqa: F403
from .sequence import *  # noqa: F403
# isort: on

# What is not needed by every program is imported when it is first used.
_LAZY = {
    "active_overrides": "overrides",
    "capture": "replay",
    "compile": "programs",
    "compile_shader": "msl.runtime.library",
    "compile_train_step": "replay",
    "disable_pytorch_overrides": "overrides",
    "enable_pytorch_overrides": "overrides",
    "estimate": "estimates",
    "explain": "_explain",
    "generate": "generation",
    "load": "programs",
    "quantize_model": "quant",
    "report": "overrides",
}
_LAZY_MODULES = frozenset(
    {
        *(
            "distributed",
            "estimates",
            "generation",
            "gguf",
            "golden",
            "integrations",
            "msl",
            "nn",
            "overrides",
            "programs",
        ),
        *("replay", "simulator"),
    }
)

__all__ = [
    "active_overrides",
    "affine_embedding",
    "affine_linear",
    "affine_linear_experts",
    "attention",
    "capture",
    "compile",
    "compile_shader",
    "compile_train_step",
    "dequantize",
    "dequantize_4bit",
    "dequantize_8bit",
    "dequantize_affine",
    "dequantize_scaled",
    "disable_pytorch_overrides",
    "distributed",
    "double",
    "enable_pytorch_overrides",
    "estimate",
    "estimates",
    "explain",
    "generate",
    "generation",
    "gguf",
    "golden",
    "integrations",
    "linalg",
    "linear_4bit",
    "load",
    "mac_kernels",
    "msl",
    "nn",
    "optim",
    "overrides",
    "paged",
    "programs",
    "quant",
    "quantize",
    "quantize_4bit",
    "quantize_8bit",
    "quantize_model",
    "quantize_scaled",
    "quantized_embedding",
    "quantized_linear",
    "quantized_linear_experts",
    "recording",
    "replay",
    "report",
    "scaled_embedding",
    "scaled_linear",
    "scaled_linear_experts",
    "scaled_mm",
    "simulator",
]
__all__ += activation.__all__
__all__ += attention.__all__
__all__ += conv.__all__
__all__ += elementwise.__all__
__all__ += embeddings.__all__
__all__ += gemm.__all__
__all__ += linalg.__all__
__all__ += loss.__all__
__all__ += normalization.__all__
__all__ += rotary.__all__
__all__ += sampling.__all__
__all__ += sequence.__all__

if TYPE_CHECKING:  # what __getattr__ imports
    from . import (
        distributed,
        estimates,
        generation,
        gguf,
        golden,
        integrations,
        msl,
        nn,
        overrides,
        programs,
        replay,
        simulator,
    )
    from ._explain import explain
    from .estimates import estimate
    from .generation import generate
    from .msl.runtime.library import compile_shader
    from .overrides import active_overrides, disable_pytorch_overrides, enable_pytorch_overrides, report
    from .programs import compile, load
    from .quant import quantize_model
    from .replay import capture, compile_train_step


def __getattr__(name: str) -> Any:
    if name in _LAZY_MODULES:
        return importlib.import_module(f"{__name__}.{name}")
    if name in _LAZY:
        value = getattr(importlib.import_module(f"{__name__}.{_LAZY[name]}"), name)
        globals()[name] = value
        return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__():
    return sorted({*globals(), *__all__})


def _computed_flex_attention():
    from .programs.flex import flex_attention  # torch.compile traces through this statement

    return flex_attention


# A package above that of flex_attention makes its kernels.
_flex.compute_with(_computed_flex_attention)
# DTensor has to know how operators run on shards.
after_import("torch.distributed.tensor", lambda: importlib.import_module(f"{__name__}.distributed"))
# Inductor's graphs on `mps` call the kernels of flex_attention.
after_import(
    "torch._inductor.kernel.flex.flex_attention",
    lambda: importlib.import_module(f"{__name__}.programs.flex.inductor").lower(),
)
# Its operators on `mps` run our kernels.
after_import("bitsandbytes", lambda: importlib.import_module(f"{__name__}.integrations.bitsandbytes").register())
after_import("torchao", lambda: importlib.import_module(f"{__name__}.integrations.torchao").register())


def _read_checkpoints():
    with contextlib.suppress(ImportError):  # of transformers that is too old
        importlib.import_module(f"{__name__}.integrations.transformers").register_quantization()


# from_pretrained reads checkpoints on `mps` for which transformers has no kernels there.
after_import("transformers.modeling_utils", _read_checkpoints)
