"""Variables in the constant address space with an initial value, from which other constants are made.

MSL computes them when it compiles. CUDA must do so too, since it runs no code when it loads a program. A target's
MSL_CONSTANT declares them (MSL_MEMBER_CONSTANT declares static members).
"""

_STOPS = {"=", "{", ";", "(", ")", "*", "&"}


def declare_constants(program):
    tokens = program.tokens
    for declaration in program.walk():
        if declaration.kind == "variable" and declaration.name_at is not None:
            if tokens[declaration.name_at - 1].text != "::":  # a static member's class declares it
                name = "MSL_MEMBER_CONSTANT" if declaration.in_class else "MSL_CONSTANT"
                _declare(program, declaration.head, name)
        elif declaration.kind == "function" and declaration.body is not None:
            for i in range(declaration.body[0] + 1, declaration.body[1]):
                if tokens[i].text == "static" or tokens[i].text == "constant" and tokens[i + 1].text == "static":
                    _declare(program, i, "MSL_CONSTANT")


def _declare(program, first, name):
    """Writes `name` for `constant` where the declaration at `first` has an initial value and no pointer."""
    tokens, end = program.tokens, first
    while tokens[end].text not in _STOPS:
        end = program.partner[end] + 1 if tokens[end].text == "[" else end + 1
    words = [token.text for token in tokens[first:end]]
    if tokens[end].text in ("=", "{") and "constant" in words and not {"constexpr", "extern", "volatile"} & set(words):
        depth = 0  # of template arguments
        for token in tokens[first:end]:
            depth += {"<": 1, ">": -1, ">>": -2}.get(token.text, 0)
            if token.text == "const" and depth == 0:
                token.text = ""
        tokens[first + words.index("constant")].text = name
