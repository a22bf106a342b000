"""PyTorch's flex_attention takes gradients and gives the largest scores on `mps`."""

import functools

from .._core.environment import after_import


def _extend():
    """Lets PyTorch's flex_attention take tensors on `mps` that need a gradient, and give the largest scores there. It
    refuses both, since PyTorch's kernel for `mps` has neither."""
    from torch.nn.attention import flex_attention

    checks, options_of = flex_attention._validate_device, flex_attention._apply_kernel_options

    @functools.wraps(checks)
    def validate_device(query, key, value):
        if query.device.type != "mps":
            checks(query, key, value)

    @functools.wraps(options_of)
    def kernel_options(query, key, value, return_lse, options, return_aux=None):
        if query.device.type != "mps" or return_aux is None or not return_aux.max_scores:
            return options_of(query, key, value, return_lse, options, return_aux)
        lse_alone = flex_attention.AuxRequest(lse=return_aux.lse)
        return {**options_of(query, key, value, return_lse, options, lse_alone), "OUTPUT_MAX": True}

    flex_attention._validate_device = validate_device  # pyright: ignore[reportPrivateImportUsage]
    flex_attention._apply_kernel_options = kernel_options  # pyright: ignore[reportPrivateImportUsage]


after_import("torch.nn.attention.flex_attention", _extend)
