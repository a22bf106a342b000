"""Optimizers: drop-in replacements of torch.optim's."""

from .adamw import AdamW

__all__ = ["AdamW"]
