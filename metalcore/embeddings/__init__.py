"""Rows of tables by index."""

# The registry, and the tables that are made of it, have the order in which ops are imported.
# isort: off
from ._embedding import embedding
from ._embedding_bag import embedding_bag

__all__ = ["embedding", "embedding_bag"]
