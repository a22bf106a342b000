"""Programs as files: compiled on one machine, and run on others.

program.save("model.mcore")             # with the weights inside
program = metalcore.load("model.mcore")
"""

from .container import ProgramFileError
from .manifest import describe
from .reading import load
from .recordings import prepare
from .writing import save

__all__ = ["ProgramFileError", "describe", "load", "prepare", "save"]
