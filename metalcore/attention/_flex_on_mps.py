"""PyTorch's flex_attention takes gradients on `mps`."""

import functools

from .._core.environment import after_import


def _allow_gradients():
    """Lets PyTorch's flex_attention take tensors on `mps` that need a gradient. It refuses them, since PyTorch has no
    kernel for the derivative there."""
    from torch.nn.attention import flex_attention

    checks = flex_attention._validate_device

    @functools.wraps(checks)
    def validate_device(query, key, value):
        if query.device.type != "mps":
            checks(query, key, value)

    flex_attention._validate_device = validate_device  # pyright: ignore[reportPrivateImportUsage]


after_import("torch.nn.attention.flex_attention", _allow_gradients)
