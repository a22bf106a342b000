"""Losses run on shards of rows where rows do not depend on each other, so without a mean over them.

Shards of the vocabulary, and means, are functions of their own (metalcore/distributed/vocabulary.py), which
metalcore.cross_entropy and fused_linear_cross_entropy call for DTensors.
"""

from __future__ import annotations

from ._rule import Partial, Replicate, Shard, refused, rule

_SUM, _NONE, _MEAN = 2, 0, 1


@rule("cross_entropy")
def cross_entropy(call):
    if call.x.ndim > 1 and call.reduction != _MEAN:
        loss = Shard(0) if call.reduction == _NONE else Partial()
        yield (loss, Shard(0), Replicate()), {"x": Shard(0), "target": Shard(0)}


@rule("cross_entropy_backward")
def cross_entropy_backward(call):
    if call.x.ndim > 1:
        inputs = {"x": Shard(0), "target": Shard(0), "saved": Shard(0)}
        if call.reduction == _NONE:
            inputs["grad"] = Shard(0)
        yield Shard(0), inputs


@rule("fused_linear_cross_entropy")
def fused_linear_cross_entropy(call):
    if call.reduction != _MEAN:
        loss = Shard(0) if call.reduction == _NONE else Partial()
        reduces = call.reduction != _NONE
        yield (
            (
                loss,
                Shard(0) if reduces and call.hidden_wanted else Replicate(),
                Partial() if reduces and call.weight_wanted else Replicate(),
                Partial() if reduces and call.bias_wanted else Replicate(),
                Shard(0) if call.squares_wanted else Replicate(),
                Shard(0) if call.predictions_wanted else Replicate(),
            ),
            {"hidden": Shard(0), "target": Shard(0), "token_weight": Shard(0)},
        )


@rule("fused_linear_cross_entropy_backward")
def fused_linear_cross_entropy_backward(call):
    inputs = {"hidden": Shard(0), "target": Shard(0)}
    if call.grad.ndim:
        inputs["grad"] = Shard(0)
    yield (
        (
            Shard(0) if call.hidden_wanted else Replicate(),
            Partial() if call.weight_wanted else Replicate(),
            Partial() if call.bias_wanted else Replicate(),
        ),
        inputs,
    )


@rule("divergence")
def divergence(call):
    yield Shard(0), {"input": Shard(0), "target": Shard(0)}


@rule("divergence_backward")
def divergence_backward(call):
    inputs = {"input": Shard(0), "target": Shard(0), "saved": Shard(0)}
    if call.grad.ndim and call.grad.shape[0] > 1:
        inputs["grad"] = Shard(0)
    yield Shard(0), inputs


@rule("fused_linear_divergence")
def fused_linear_divergence(call):
    inputs = {"hidden": Shard(0), "teacher_hidden": Shard(0)}
    if call.scales.ndim and call.scales.shape[0] > 1:
        inputs["scales"] = Shard(0)
    yield (
        (
            Partial(),
            Shard(0) if call.hidden_wanted else Replicate(),
            Partial() if call.weight_wanted else Replicate(),
        ),
        inputs,
    )


refused(
    "cross_entropy_ahead", because="the override of torch's function alone calls it, with tensors that are no DTensors"
)
refused(
    "cross_entropy_",
    "cross_entropy_finish_",
    "divergence_",
    "scale_",
    because="it writes an argument and returns another tensor, and DTensor takes what such an operator returns for "
    "the argument",
)
