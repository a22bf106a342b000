"""How DTensor runs metalcore's operators on shards: a module for each family, a rule for each operator (_rule.py says
how to write one). The tests go through the registry and fail for an operator without a rule."""

from . import (  # noqa: F401
    activation,
    attention,
    conv,
    double,
    elementwise,
    embeddings,
    gemm,
    linalg,
    loss,
    normalization,
    optim,
    paged,
    quant,
    rotary,
    sampling,
    sequence,
)
from ._rule import RULES, register

__all__ = ["RULES", "register"]
