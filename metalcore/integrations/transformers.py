"""metalcore's kernels in HuggingFace transformers.

    from metalcore.integrations import transformers as metalcore_transformers
    metalcore_transformers.patch()                # before or after the model is made
    trainer = Trainer(model, ...); trainer.train()
    metalcore_transformers.unpatch()

    with metalcore_transformers.patch(): ...      # or for a while

`patch()` enables the overrides (metalcore.overrides) that transformers' models and its Trainer come to, and no others:

- `silu`, `gelu`, `softmax`, `log_softmax`: which the activations in ACT2FN, the softmax of eager attention and the
  cross entropy of the loss end in. `gelu` also takes the activations that write the op out in Python (`gelu_new`,
  `gelu_fast`).
- `rms_norm`: also the forward of the classes that write an RMSNorm out: Llama's and its many copies, T5's, those with
  1 + weight (Gemma, Qwen3-Next), without a weight, and gated. A class is not chosen by its name but by trying it.
- `adamw`: which the Trainer's `optim="adamw_torch"` and `"adamw_torch_fused"` construct.

Nothing changes in a model's modules, parameters or checkpoints. Attention other than eager's softmax is not replaced.
"""

from __future__ import annotations

from collections.abc import Iterable
from importlib import import_module

from .. import overrides
from ..overrides._switches import Request

__all__ = ["active_patches", "patch", "unpatch"]

OVERRIDES = ("silu", "gelu", "softmax", "log_softmax", "rms_norm", "adamw")

_requests: list[Request] = []


def patch(*names: str, exclude: str | Iterable[str] = ()) -> Request:
    """Puts metalcore's kernels into transformers' models and Trainer.

    Args:
        names: which, of "silu", "gelu", "softmax", "log_softmax", "rms_norm", "adamw"; all of them if none is given.
        exclude: names to leave out.

    Returns:
        A context manager that takes back this call at the end of its `with` block; it need not be used as one.

    Raises:
        ValueError: for a name that is not a patch.
        ImportError: if transformers is not installed.
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
    """Takes back what patch() enabled; overrides that others enabled stay, and so does an optimizer that was made."""
    while _requests:
        with _requests.pop():
            pass


def active_patches() -> tuple[str, ...]:
    """The names of the patches that are on, by whatever enabled them."""
    return tuple(name for name in OVERRIDES if name in overrides.active_overrides())
