"""Function constants: values the host gives a program before it is compiled."""

from .errors import MSLError, error_at
from .integers import constant_value
from .rewrite import erase


def substitute_function_constants(program, constants):
    """Gives each `constant T name [[function_constant(i)]];` its value, and `is_function_constant_defined(name)` its
    answer. A constant without a value is zero, as far as code that asks for it anyway can tell.

    Args:
        constants: index or name -> bool, int, float, or a sequence of them for a vector.

    Raises:
        MSLError: a value is given for a constant that the program does not declare.
    """
    tokens, left, defined = program.tokens, dict(constants), set()
    for declaration in program.walk():
        if declaration.kind != "variable" or "function_constant" not in declaration.attributes:
            continue
        index = constant_value(program, declaration.attributes["function_constant"])
        if index is None:
            raise error_at(
                tokens[declaration.first], f"the index of function constant '{declaration.name}' is no integer constant"
            )
        value = None
        for key in (index, declaration.name):
            if key in left:
                value = left.pop(key)
                defined.add(declaration.name)
        _replace(program, declaration, value)
    if left:
        raise MSLError(f"the program has no function constant {', '.join(repr(key) for key in left)}")
    for i, token in enumerate(tokens):
        if token.text == "is_function_constant_defined" and tokens[i + 1].text == "(":
            close = program.partner[i + 1]
            name = tokens[close - 1].text
            start = i - 2 if tokens[i - 1].text == "::" else i
            erase(tokens, start, close + 1)
            token.text = "true" if name in defined else "false"


def _replace(program, declaration, value):
    tokens = program.tokens
    last = declaration.last - 1
    erase(tokens, declaration.name_at + 1, last)
    for i in range(declaration.head, declaration.name_at):
        if tokens[i].text in ("constant", "static", "const", "constexpr"):
            tokens[i].text = ""
    tokens[declaration.head].text = "static constexpr " + tokens[declaration.head].text
    tokens[last].text = f" = {_literal(value)};"


def _literal(value):
    if value is None:
        return "{}"
    if isinstance(value, (tuple, list)):
        return "{" + ", ".join(_literal(element) for element in value) + "}"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int):
        return f"{value}" if -(2**63) < value < 2**63 else f"{value}u"
    value = float(value)
    if value != value:
        return "NAN"
    if value in (float("inf"), float("-inf")):
        return ("-" if value < 0 else "") + "INFINITY"
    return f"{value!r}f" if "." in repr(value) or "e" in repr(value) else f"{value!r}.0f"
