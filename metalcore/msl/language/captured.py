"""Constants that lambdas capture.

A parameter `auto i` may be a constant by its type, as integral_constant is. Clang takes `i.value` as a constant in a
lambda inside, too, which captures i. Other compilers do not, since i is a member of the closure then. So such a lambda
gets an object of its own of each type that holds nothing, and a reference to what it captures of all others.
"""

from .tokens import CLOSING

__all__ = ["name_captured_constants"]


def name_captured_constants(program):
    """Names the parameters that nested lambdas capture once more, in these lambdas."""
    lambdas = list(_lambdas(program))
    for outer, body in lambdas:
        for name in _auto_parameters(program, outer):
            for inner, inside in lambdas:
                if body < inner and inside < program.partner[body] and _captures(program, inner, inside, name):
                    program.tokens[inside].text += (
                        f"auto& msl_outer_{name} = {name}; "
                        f"std::conditional_t<__is_empty(decltype({name})), const decltype({name}), "
                        f"decltype(({name}))> {name} = msl_outer_{name};"
                    )


def _lambdas(program):
    """Yields the indices of a lambda's capture and of its body, for lambdas that have parameters."""
    tokens = program.tokens
    for i, token in enumerate(tokens):
        if token.text != "[" or i and (tokens[i - 1].kind in ("id", "num") or tokens[i - 1].text in (")", "]", "[")):
            continue
        parameters = program.partner[i] + 1
        if parameters < len(tokens) and tokens[parameters].text == "(":
            body = program.partner[parameters] + 1
            while body < len(tokens) and tokens[body].text not in ("{", ";", *CLOSING.values()):
                body += 1
            if body < len(tokens) and tokens[body].text == "{":
                yield i, body


def _parameters(program, capture):
    """Returns the tokens of each parameter of a lambda."""
    opening = program.partner[capture] + 1
    return [program.tokens[first:last] for first, last in program.split_parameters(opening, program.partner[opening])]


def _auto_parameters(program, capture):
    """Returns the names of the parameters that are objects of any type."""
    found = [[token.text for token in tokens if token.text != "const"] for tokens in _parameters(program, capture)]
    return [words[1] for words in found if len(words) == 2 and words[0] == "auto"]


def _captures(program, capture, body, name):
    """Returns whether a lambda captures what it names by reference."""
    named = any(token.text == name for token in program.tokens[body : program.partner[body]])
    own = any(tokens and tokens[-1].text == name for tokens in _parameters(program, capture))
    return named and not own and program.tokens[capture + 1].text == "&"
