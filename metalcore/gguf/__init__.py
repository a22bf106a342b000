"""GGUF files: read, loaded as models whose weights stay packed, and written."""

from ._load import Loaded, load
from ._reader import GGUFError, GGUFFile, TensorInfo
from ._save import save_gguf

__all__ = ["GGUFError", "GGUFFile", "Loaded", "TensorInfo", "load", "save_gguf"]
