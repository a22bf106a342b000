"""Names of a program's outermost scope that our metal_stdlib has too, even if Apple's does not."""

import functools
import re
from pathlib import Path

_NAMESPACES = {"simd", "msl", "std"}  # of the headers, beside metal
_TRAITS = Path(__file__).parents[1] / "include" / "metal" / "type_traits.h"


@functools.lru_cache(maxsize=1)
def traits():
    """Returns the names of namespace metal's type traits."""
    text = _TRAITS.read_text(encoding="utf-8")
    imported = re.findall(r"^using std::(\w+);", text, re.MULTILINE)
    made = re.findall(r"\b(?:MSL_TRAIT|MSL_NUMBER_TRAIT|MSL_RELATION)\((is_\w+)", text)
    return {*imported, *made, *(name + "_v" for name in made)}


def rename_like_ours(program, kernels):
    """Renames what a program calls `decay`, `rank` or `simd`, everywhere in it.

    With `using namespace metal` a trait's name would be ambiguous, and a namespace's name cannot be declared again.
    """
    tokens = program.tokens
    own = {
        declaration.name
        for declaration in program.declarations
        if not declaration.scope and declaration.name_at is not None and declaration.kind in ("variable", "function")
        and "<" not in program.text(declaration.name_at + 1, declaration.name_at + 2)
    } & (traits() | _NAMESPACES)  # fmt: skip
    for i, token in enumerate(tokens):
        if token.text in own and token.kind == "id" and not _is_of_headers(tokens, i):
            token.text += "_of_program"
    for kernel in kernels:
        for argument in kernel.arguments:
            if argument.condition in own:
                argument.condition += "_of_program"


def _is_of_headers(tokens, i):
    if tokens[i].text in _NAMESPACES and tokens[i + 1].text == "::":
        return True
    return tokens[i - 1].text == "::" and tokens[i - 2].text in ("metal", "std")
