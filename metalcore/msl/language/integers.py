"""The integer constants of a program, which attributes may name: `[[buffer(kIndex)]]`."""

from .arithmetic import ArithmeticFailure, evaluate


def constant_value(program, tokens, values=None):
    """Returns the value of an integer expression of literals, enumerators and named constants, or None.

    Args:
        values: further names with their values.
    """
    words = []
    for i, token in enumerate(tokens):
        if token.text == "::" or i + 1 < len(tokens) and tokens[i + 1].text == "::":
            continue  # the name alone tells
        words.append(token.text)
    try:
        return evaluate(words, {**_named_constants(program), **(values or {})}.get).value
    except ArithmeticFailure:
        return None


def _named_constants(program):
    """Returns the enumerators and the constant variables that have an integer value."""
    if program.integers is None:
        program.integers = {}
        for declaration in program.walk():
            tokens = program.tokens[declaration.first : declaration.last]
            if declaration.kind == "class" and any(token.text == "enum" for token in tokens[:3]):
                _enumerators(program, declaration)
            elif declaration.kind == "variable" and any(
                token.text in ("constant", "constexpr", "const") for token in tokens
            ):
                first = next((i for i, token in enumerate(tokens) if token.text == "="), None)
                if first is not None and first - 1 + declaration.first == declaration.name_at:
                    _define(program, declaration.name, constant_value(program, tokens[first + 1 : -1]))
    return program.integers


def _enumerators(program, declaration):
    following = 0
    for first, last in program.split_parameters(*declaration.body):
        if last - first > 2 and program.tokens[first + 1].text == "=":
            following = constant_value(program, program.tokens[first + 2 : last])
        _define(program, program.tokens[first].text, following)
        following = None if following is None else following + 1


def _define(program, name, value):
    if value is not None:
        program.integers[name] = value
