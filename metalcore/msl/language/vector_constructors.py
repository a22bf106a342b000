"""Constructors of vectors with too few components, `float4(1, 2, 3)`, which Metal refuses.

`float4{1, 2, 3}` is right and leaves zeros. In C++ both call the same constructor, so `V(a, b)` becomes
`msl::complete<V>(a, b)`, which counts the components of its arguments.
"""

import re

from .tokens import matching_angle

_SCALARS = "bool|u?char|u?short|u?int|u?long|half|bfloat|float"
_NAME = re.compile(rf"(?:packed_)?(?:{_SCALARS})([34])")
_TEMPLATE = re.compile(r"(?:metal::)?(?:packed_)?vec<.*,([34])>")
_SCALAR = re.compile(_SCALARS)


def count_components(program):
    """Lets calls of vectors' constructors, and variables with such an initializer in functions, be counted."""
    tokens = program.tokens
    bodies = [d.body for d in program.walk() if d.kind == "function" and d.body]
    for i, token in enumerate(tokens):
        if token.kind != "id":
            continue
        name_end, width = _vector(program, i)
        if width is None:
            continue
        first = _qualified_start(tokens, i)
        if _has_too_few(program, name_end, width):
            tokens[first].text = "msl::complete<" + tokens[first].text
            tokens[name_end - 1].text += ">"
        elif tokens[name_end].kind == "id" and any(a < i < b for a, b in bodies):
            opening = name_end + 1
            if _has_too_few(program, opening, width):
                tokens[opening].text += f"msl::complete<{program.text(first, name_end)}>("
                tokens[program.partner[opening]].text += ")"


def _vector(program, i):
    """Returns (the index after the name of a type at i, its number of components); (i, None) for other names."""
    tokens = program.tokens
    if match := _NAME.fullmatch(tokens[i].text):
        return i + 1, int(match[1])
    if tokens[i].text in ("vec", "packed_vec") and tokens[i + 1].text == "<":
        close = matching_angle(tokens, i + 1)
        if close is not None and (match := _TEMPLATE.fullmatch("".join(t.text for t in tokens[i : close + 1]))):
            return close + 1, int(match[1])
    words = "".join(program.aliases().get(tokens[i].text, ()))
    match = _NAME.fullmatch(words.removeprefix("metal::")) or _TEMPLATE.fullmatch(words)
    return (i + 1, int(match[1])) if match else (i, None)


def _qualified_start(tokens, i):
    while tokens[i - 1].text == "::":
        i -= 2 if tokens[i - 2].kind == "id" else 1
    return i


def _has_too_few(program, opening, width):
    """Returns whether the parentheses at `opening` hold fewer expressions than components, and more than one."""
    tokens = program.tokens
    if opening >= len(tokens) or tokens[opening].text != "(":
        return False
    arguments = program.split_parameters(opening, program.partner[opening])
    are_types = any(last == first + 1 and _SCALAR.fullmatch(tokens[first].text) for first, last in arguments)
    braced = any(tokens[first].text == "{" for first, _ in arguments)
    return 1 < len(arguments) < width and not are_types and not braced
