"""Function constants: values that the host gives a program before it is compiled."""

from ..errors import MSLError, error_at
from .integers import constant_value
from .limits import MAX_CONSTANT_INDEX
from .numbers import misfit, number_type
from .rewrite import erase


def substitute_function_constants(program, constants):
    """Gives each `constant T name [[function_constant(i)]];` its value, and `is_function_constant_defined(name)` its
    answer. Code that reads a constant without a value reads zero.

    Args:
        constants: index or name -> bool, int, float, or a sequence of them for a vector.

    Raises:
        MSLError: a value is given for a constant that the program does not declare, or does not fit its type.
    """
    tokens, used, defined = program.tokens, set(), set()
    for declaration in program.walk():
        if declaration.kind != "variable" or "function_constant" not in declaration.attributes:
            continue
        place, name = tokens[declaration.first], declaration.name
        index = constant_value(program, declaration.attributes["function_constant"])
        if index is None:
            raise error_at(place, f"the index of function constant '{name}' is no integer constant")
        if not 0 <= index <= MAX_CONSTANT_INDEX:
            limit = f"{index}, which is not 0 to {MAX_CONSTANT_INDEX}"
            raise error_at(place, f"the index of function constant '{name}' is {limit}")
        words = _plain_words(program, declaration.head, declaration.last - 1)
        if {"*", "&", "=", "(", "{", "[", ","} & set(words):
            raise error_at(place, f"function constant '{name}' must be a number or a vector, without a value")
        keys = [key for key in (index, name) if key in constants]
        if len(keys) > 1:
            raise error_at(place, f"function constant '{name}' is given by its index and by its name")
        value = None
        if keys:
            value = constants[keys[0]]
            used.add(keys[0])
            defined.add(name)
            if problem := _problem(program, declaration, value):
                raise error_at(place, f"function constant '{name}' {problem}")
        _replace(program, declaration, value)
    if unused := [key for key in constants if key not in used]:
        raise MSLError(f"the program has no function constant {', '.join(repr(key) for key in unused)}")
    for i, token in enumerate(tokens):
        if token.text == "is_function_constant_defined" and tokens[i + 1].text == "(":
            close = program.partner[i + 1]
            name = tokens[close - 1].text
            start = i - 2 if tokens[i - 1].text == "::" else i
            erase(tokens, start, close + 1)
            token.text = "true" if name in defined else "false"


def _plain_words(program, first, last):
    """Returns the texts of tokens[first:last] without attributes."""
    words, i = [], first
    while i < last:
        end = program.attribute_end(i)
        if end is None:
            words.append(program.tokens[i].text)
        i = end or i + 1
    return words


def _problem(program, declaration, value):
    """Returns why a value does not fit a function constant; None where it fits, or where the program defines the
    type."""
    words = _plain_words(program, declaration.head, declaration.name_at)
    text = " ".join(word for word in words if word not in ("constant", "static", "const", "constexpr"))
    type_ = number_type(text)
    numbers = value if isinstance(value, (tuple, list)) else [value]
    if type_ is None:
        return None
    if (type_.count > 1) != isinstance(value, (tuple, list)) or len(numbers) != type_.count:
        return f"is {text}: {value!r} is not {type_.count} number{'s' if type_.count > 1 else ''}"
    problems = [problem for number in numbers if (problem := misfit(number, type_))]
    return f"is {text}: {problems[0]}" if problems else None


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
