"""Built-in kernels that the build has left out (METALCORE_ISA=first-use): the simulator compiles them when needed."""

from pathlib import Path

from .. import cache
from ..language.inline_headers import inline_headers
from . import host

_PACKAGE = Path(__file__).parents[2]
_INSTALLED = _PACKAGE / "kernels"  # of a wheel
_KERNELS = _INSTALLED if _INSTALLED.exists() else _PACKAGE.parent / "kernels"


def shared_object(family, checking, flushing):
    """Returns the path of the simulator's library of a family, such as "linalg/qr_simd". It is compiled where the cache
    has none of this source, translator and compiler.

    Args:
        family: of kernels, the path of its source below kernels/ without the suffix.
        checking: compile the variant that reports every access.
        flushing: compile what does not count on float16's subnormal numbers.
    """
    defines = ("METALCORE_HALF_SUBNORMALS 0",) if flushing else ()
    source = _KERNELS / f"{family}.metal"
    text = inline_headers(source.read_text(encoding="utf-8"), source.name, [source.parent, _KERNELS])
    compiler = " ".join([repr(host.find_compiler()), *host.arguments(checking=checking), host.cpu_identity()])

    def make(path):
        host.build(source, path, checking=checking, include_dirs=[_KERNELS], defines=defines)

    return cache.entry(cache.digest(text, *defines, cache.translator_digest(), compiler) + ".so", make)
