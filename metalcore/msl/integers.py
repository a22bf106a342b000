"""Integer constants of a program, as far as attributes need them: `[[buffer(kIndex)]]`."""

import ast


def constant_value(program, tokens):
    """The value of an integer expression of literals, enumerators and named constants, or None."""
    words, i = [], 0
    while i < len(tokens):
        token = tokens[i]
        if token.kind == "id" and i + 1 < len(tokens) and tokens[i + 1].text == "::":
            i += 2  # the name alone tells
            continue
        if token.kind == "num":
            words.append(_python_number(token.text))
        elif token.kind == "id":
            value = _named_constants(program).get(token.text)
            if value is None:
                return None
            words.append(f"({value})")
        else:
            words.append({"/": "//", "&&": " and ", "||": " or "}.get(token.text, token.text))
        i += 1
    try:
        return int(eval(compile(ast.parse("".join(words), mode="eval"), "constant", "eval"), {"__builtins__": {}}))
    except (SyntaxError, ArithmeticError, TypeError, ValueError):
        return None


def _python_number(text):
    text = text.rstrip("uUlL").replace("'", "")
    return "0o" + text if text.startswith("0") and text.isdigit() else text


def _named_constants(program):
    """Enumerators, and variables that cannot change, with an integer for a value."""
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
