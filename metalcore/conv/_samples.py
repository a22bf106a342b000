"""Samples of conv2d: each kernel, with what it reads of one kind at a time or of another."""

from __future__ import annotations

from .._core.registry import Sample

__all__ = ["production", "samples"]


def _channels_last(x, weight, *others):
    """From tensors whose dimensions lie in memory as those of channels_last ones do."""
    return x.permute(0, 3, 1, 2), weight.permute(0, 3, 1, 2), *others


def _channels_inside(x, weight, *others):
    """Returns a channels_last x, and a weight whose outputs lie next to each other."""
    return x.permute(0, 3, 1, 2), weight.permute(3, 2, 0, 1), *others


def samples() -> tuple[Sample, ...]:
    return (
        Sample("tiles", ((2, 5, 9, 8), (70, 5, 3, 3), (70,)), {"padding": 1}, terms=144),
        Sample("groups", ((1, 12, 7, 9), (16, 6, 3, 2)), {"groups": 2, "stride": 2, "dilation": 2}, terms=36),
        Sample("same", ((6, 8, 7), (8, 6, 4, 3), (8,)), {"padding": "same"}, terms=72),
        Sample("channels last", ((2, 6, 7, 16), (24, 3, 3, 16), (24,)), {"padding": (0, 2)}, _channels_last, terms=144),
        Sample("outputs last", ((1, 6, 7, 8), (2, 2, 8, 16)), {"stride": (2, 1)}, _channels_inside, terms=72),
        Sample("depthwise", ((2, 5, 8, 9), (5, 1, 3, 3), (5,)), {"groups": 5, "padding": 1}, terms=90),
        Sample(
            "depthwise, channels last",
            ((1, 7, 9, 8), (3, 3, 1, 8)),
            {"groups": 8, "stride": 2},
            _channels_inside,
            terms=12,
        ),
        Sample("few outputs", ((1, 6, 7, 8), (3, 6, 2, 3)), terms=36),
        Sample("silu", ((1, 8, 7, 8), (8, 8, 1, 1)), {"activation": "silu"}, terms=56, roundings=2),
        Sample("no images", ((0, 3, 5, 5), (4, 3, 2, 2))),
    )


def production(images: int = 1, channels: int = 64, size: int = 28, outputs: int = 64) -> Sample:
    shapes = ((images, channels, size, size), (outputs, channels, 3, 3), (outputs,))
    return Sample("", shapes, {"padding": 1}, terms=9 * channels * max(1, size))
