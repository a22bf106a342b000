"""A program's constants: integers that attributes may name, variables in the constant address space, the host's values.

MSL computes initial values in the constant address space when it compiles. CUDA must do so too, since it runs no code
when it loads a program. A target's MSL_CONSTANT declares them (MSL_MEMBER_CONSTANT declares static members). Function
constants get their values from the host before the program is compiled.
"""

from ..errors import MSLError, error_at
from .arithmetic import ArithmeticFailure, evaluate
from .numbers import MAX_CONSTANT_INDEX, misfit, number_type
from .rewrite import erase


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
    if (type_.components > 1) != isinstance(value, (tuple, list)) or len(numbers) != type_.components:
        return f"is {text}: {value!r} is not {type_.components} number{'s' if type_.components > 1 else ''}"
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
