"""metalcore's kernels in HuggingFace transformers.

    from metalcore.integrations import transformers as metalcore_transformers
    metalcore_transformers.patch()                # before or after the model is made
    trainer = Trainer(model, ...); trainer.train()
    metalcore_transformers.unpatch()

    with metalcore_transformers.patch(): ...      # or for a while

What it puts in place, by name:

- `silu`, `gelu`, `softmax`, `log_softmax`: the override of the same name (metalcore.overrides), which the activations
  in ACT2FN, the softmax of eager attention and the cross entropy of the loss end in. `gelu` also takes the two
  activations that write the tanh form out in Python (`gelu_new`, `gelu_fast`).
- `rms_norm`: the forward of every RMSNorm class that computes what Llama's does. transformers copies that class into
  each model of the family under another name, and models with another formula (Gemma's 1 + weight) use similar names,
  so a class is not chosen by its name but by trying its forward on a few numbers. Classes of models imported later, and
  of remote code, are found when a model of theirs is made.
- `adamw`: the override of the same name, which the Trainer's `optim="adamw_torch"` and `"adamw_torch_fused"` construct.

Input that a kernel does not take goes to the class's own forward. Nothing changes in a model's modules, parameters or
checkpoints. Attention other than eager's softmax is not replaced.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import types

import torch

from .. import overrides
from .._requests import Request, Requests
from .._routing import accelerated
from ..activation import gelu
from ..normalization import _fits, _rms_norm

__all__ = ["patch", "unpatch", "active_patches"]

OVERRIDES = ("silu", "gelu", "softmax", "log_softmax", "adamw")

_originals: dict = {}  # class -> (name, its own forward)
_overrides: dict = {}  # name -> the request for the override of that name


def patch(*names: str, exclude=()) -> Request:
    """Puts metalcore's kernels into transformers' models and Trainer.

    Args:
        names: which, of "silu", "gelu", "softmax", "log_softmax", "adamw", "rms_norm"; all of them if none is given.
        exclude: names to leave out.

    Returns:
        A context manager that takes back this call at the end of its `with` block; it need not be used as one.

    Raises:
        ValueError: for a name that is not a patch.
        ImportError: if transformers is not installed.
    """
    import transformers  # noqa: F401

    return _requests.request(_requests.choose("patch", names, exclude))


def unpatch() -> None:
    """Gives everything back to transformers and PyTorch; an optimizer that was made stays what it is."""
    _requests.clear()


def active_patches() -> tuple[str, ...]:
    """The names of the patches that are on."""
    return _requests.active()


def _apply():
    active = _requests.active()
    for name in OVERRIDES:
        if name in active and name not in _overrides:
            _overrides[name] = overrides.enable_pytorch_overrides(name)
        elif name not in active and name in _overrides:
            with _overrides.pop(name):
                pass
    for cls, (name, forward) in list(_originals.items()):
        if name not in active:
            cls.forward = forward
            del _originals[cls]
    if "gelu" in active:
        from transformers import activations

        for cls in (activations.NewGELUActivation, activations.FastGELUActivation):
            _replace_forward("gelu", cls, _gelu_forward)
    if "rms_norm" in active:
        for module in list(sys.modules.values()):
            if getattr(module, "__name__", "").startswith(("transformers.models.", "transformers_modules.")):
                _patch_rms_norms(module)
    _watch_new_models("rms_norm" in active)


def _replace_forward(name, cls, make):
    if cls not in _originals:
        _originals[cls] = (name, cls.forward)
        cls.forward = functools.wraps(cls.forward)(make(cls.forward))


def _gelu_forward(original):
    def forward(self, input):
        return gelu(input, approximate="tanh") if accelerated(input) else original(self, input)
    return forward


def _rms_norm_forward(original):
    def forward(self, hidden_states):
        x, weight = hidden_states, self.weight
        if accelerated(x, weight) and x.dtype == weight.dtype and _fits(x, tuple(weight.shape), weight):
            return _rms_norm(x, weight.dim(), weight, self.variance_epsilon)  # of x's dtype under autocast too
        return original(self, hidden_states)
    return forward


def _patch_rms_norms(module):
    for cls in list(vars(module).values()):
        if isinstance(cls, type) and issubclass(cls, torch.nn.Module) and "RMSNorm" in cls.__name__:
            if cls not in _originals and "forward" in vars(cls) and _computes_llama_rms_norm(cls.forward):
                _replace_forward("rms_norm", cls, _rms_norm_forward)


def _computes_llama_rms_norm(forward):
    """Whether forward(self, x), given weight and variance_epsilon, is weight * x / sqrt(mean(x²) + variance_epsilon)
    with everything up to the weight in float32."""
    eps = 0.25
    for dtype in (torch.float32, torch.bfloat16):
        weight = torch.tensor([1.5, -0.75, 2.0, 0.125], dtype=dtype)
        x = torch.tensor([[0.3, -1.7, 2.9, 0.01], [40.0, 0.5, -0.2, 3.0]], dtype=dtype)
        normalized = x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + eps)
        expected = (weight * normalized.to(dtype), (weight * normalized).to(dtype))
        with contextlib.suppress(Exception):  # a forward that wants anything else is another formula
            found = forward(types.SimpleNamespace(weight=weight, variance_epsilon=eps), x)
            if any(torch.equal(found, value) for value in expected):
                continue
        return False
    return True


def _watch_new_models(on):
    from transformers import PreTrainedModel

    init = PreTrainedModel.__init__
    if on and not hasattr(init, "metalcore_original"):
        @functools.wraps(init)
        def watched(self, *args, **kwargs):
            # Before the model makes its layers; by now its module is imported.
            if (module := sys.modules.get(type(self).__module__)) is not None:
                _patch_rms_norms(module)
            return init(self, *args, **kwargs)

        watched.metalcore_original = init
        PreTrainedModel.__init__ = watched
    elif not on and hasattr(init, "metalcore_original"):
        PreTrainedModel.__init__ = init.metalcore_original


_requests = Requests((*OVERRIDES, "rms_norm"), _apply)
