"""Optimizers that replace those of torch.optim, and clipping of gradients."""

# The registry, and the tables that are made of it, have the order in which ops are imported.
# isort: off
from .adamw import AdamW
from .sgd import SGD
from .lion import Lion
from .eight_bits import AdamW8bit, AdamWFp8, Lion8bit, SGD8bit
from .muon import Muon
from .soap import SOAP
from .clip import clip_grad_norm_, clip_grad_value_

__all__ = [
    "SGD",
    "SOAP",
    "AdamW",
    "AdamW8bit",
    "AdamWFp8",
    "Lion",
    "Lion8bit",
    "Muon",
    "SGD8bit",
    "clip_grad_norm_",
    "clip_grad_value_",
]
