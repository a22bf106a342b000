"""metalcore's kernels in HuggingFace transformers.

    from metalcore.integrations import transformers as metalcore_transformers
    metalcore_transformers.patch()                # before or after the model is made
    trainer = Trainer(model, ...); trainer.train()
    metalcore_transformers.unpatch()

    with metalcore_transformers.patch(): ...      # or for a while

`patch()` enables the overrides (metalcore.overrides) that transformers' models and its Trainer use, and no others:

- `silu`, `gelu`, `relu`, `softmax`, `log_softmax`: the activations in ACT2FN and the softmax of eager attention call
  these. `gelu` also takes the activations that compute it in Python (`gelu_new`,
  `gelu_fast`).
- `rms_norm`: it also takes the forward of classes that compute an RMSNorm in Python: Llama's and its many copies, T5's,
  those with 1 + weight (Gemma, Qwen3-Next), without a weight, and gated. A trial of a class decides, and not its name.
- `cross_entropy`, `kl_div`, `embedding`, `embedding_bag`: the models' losses, distillation, and tables of tokens.
- `adamw`: the Trainer's `optim="adamw_torch"` and `"adamw_torch_fused"` construct it.

Nothing changes in a model's modules, parameters or checkpoints. Attention other than eager's softmax is not replaced.
"""

from __future__ import annotations

from collections.abc import Iterable
from importlib import import_module

from .. import overrides
from .._core.registry import OPS
from ..overrides._switches import Request

__all__ = ["active_patches", "patch", "unpatch"]

OVERRIDES = tuple(name for name, op in OPS.items() if op.override and ".linalg." not in op.function.__module__)

_requests: list[Request] = []


def patch(*names: str, exclude: str | Iterable[str] = ()) -> Request:
    """Puts metalcore's kernels into transformers' models and Trainer.

    Args:
        names: of the overrides above. No name means all of them.
        exclude: names to leave out.

    Returns:
        A context manager that undoes this call at the end of its `with` block. Its use is optional.

    Raises:
        ValueError: a name is not one of these.
        ImportError: transformers is not installed.
    """
    import_module("transformers")  # by its name, since a type checker would read thousands of files

    exclude = (exclude,) if isinstance(exclude, str) else tuple(exclude)
    for name in (*names, *exclude):
        if name not in OVERRIDES:
            raise ValueError(f"patch: {name!r} is not one of {', '.join(OVERRIDES)}")
    request = overrides.request([name for name in names or OVERRIDES if name not in exclude])
    _requests.append(request)
    return request


def unpatch() -> None:
    """Undoes all calls of patch(). Overrides that others enabled stay on, and existing optimizers stay as they are."""
    while _requests:
        with _requests.pop():
            pass


def active_patches() -> tuple[str, ...]:
    """The names of the patches that are on, also those that other calls enabled."""
    return tuple(name for name in OVERRIDES if name in overrides.active_overrides())
