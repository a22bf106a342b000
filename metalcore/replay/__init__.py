"""Capture and replay: what a function submits to the GPU is recorded once, and submitted again at almost no cost.

step = metalcore.capture(decode, tokens, cache)     # runs decode, and records it
logits = step(other_tokens, other_cache)            # runs what was recorded

train = metalcore.compile_train_step(model, loss_fn, optimizer, (x, y), max_norm=1.0)
loss = train(x, y)
"""

from ._capture import Capture, capture
from ._tape import CaptureError
from ._train import TrainStep, compile_train_step

__all__ = ["Capture", "CaptureError", "TrainStep", "capture", "compile_train_step"]
