"""What is C++ and not MSL 3.1, or a keyword of MSL, as far as tokens tell. compile_shader takes some of it."""

import functools
import re

from ..language.rules import Breach, is_kernel
from ..language.tokens import CLOSING
from .clang import INCLUDE

_KEYWORDS = {"vertex": "vertex functions", "fragment": "fragment functions"}
_TYPES = {"wchar_t", "char8_t", "char16_t", "char32_t", "_Complex", "_Imaginary", "__float128", "__fp16", "_Float16"}
_BEFORE_LAMBDA = {"=", "(", ",", "return", "{", ";", "&&", "||", "?", ":", "+", "-", "}"}


def construct_breaches(program, variables, strict, *, lambdas):
    """Yields breaches in a program's tokens.

    Args:
        variables: its threadgroup variables, from find_threadgroup_variables().
        strict: find threadgroup variables in inner scopes and those initialized by zeros in braces, which the
            specification forbids. Apple's compiler takes both: MLX's sort and layer norm have them.
        lambdas: whether the program may have lambda expressions.
    """
    bodies = [d for d in program.walk() if d.kind == "function" and d.body is not None]
    in_attributes = set()
    for i in range(len(program.tokens)):
        end = program.attribute_end(i)
        if end is not None:
            in_attributes.update(range(i, end))
    yield from _tokens(program, in_attributes, bodies, lambdas)
    yield from _threadgroup_variables(program, variables, bodies, strict)
    yield from _calls_of_kernels(program, bodies)


def _tokens(program, in_attributes, bodies, lambdas):
    tokens = program.tokens
    for i, token in enumerate(tokens):
        if i in in_attributes:
            continue
        before = tokens[i - 1].text if i else ";"
        if token.text in _KEYWORDS and token.kind == "id":
            message = f"'{token.text}' is a keyword of MSL, for {_KEYWORDS[token.text]}, and cannot be a name"
            yield Breach(i, "keyword", message)
        elif token.text in _TYPES and token.kind == "id" and before not in (".", "->"):
            yield Breach(i, "language", f"'{token.text}' is no type of MSL")
        elif token.text == "extern" and tokens[i + 1].kind == "id" and any(d.body[0] < i < d.body[1] for d in bodies):
            if all(token.text != "constant" for token in tokens[i : program._to_semicolon(i, len(tokens))]):
                yield Breach(i, "constant-space", "an extern variable must be in constant")
        elif not lambdas and token.text == "[" and before in _BEFORE_LAMBDA and _is_lambda(program, i):
            yield Breach(i, "lambda", "lambda expressions are not supported in MSL before 3.2")
        elif token.text == "noexcept" and tokens[i + 1].text == "(" and before in _BEFORE_LAMBDA | {"!", "<"}:
            yield Breach(i, "language", "the noexcept operator is not part of MSL")


def _is_lambda(program, i):
    after = program.partner[i] + 1
    following = program.tokens[after].text if after < len(program.tokens) else ""
    return following in ("(", "{", "mutable", "->", "<")


def _threadgroup_variables(program, variables, bodies, strict):
    tokens = program.tokens
    for variable in variables:
        name = tokens[variable.variables[0].name].text
        if any(_initializes(program, part, strict) for part in variable.variables):
            message = f"threadgroup variable '{name}' cannot have an initializer"
            yield Breach(variable.first, "threadgroup-variable", message)
        function = next(d for d in bodies if d.body[0] < variable.first < d.body[1])
        if strict and is_kernel(program, function) and _is_nested(program, function.body[0] + 1, variable.first):
            message = f"threadgroup variable '{name}' must be declared in the outermost scope of its kernel"
            yield Breach(variable.first, "threadgroup-scope", message)


def _initializes(program, declarator, strict):
    if not declarator.initializer:
        return False
    words = {token.text for token in program.tokens[slice(*declarator.initializer)]}
    return strict or not words <= {"=", "{", "0", "}"} or "{" not in words


def _is_nested(program, i, at):
    while i < at:
        if program.tokens[i].text in CLOSING:
            if program.partner[i] > at:
                return True
            i = program.partner[i]
        i += 1
    return False


def _calls_of_kernels(program, bodies):
    """Finds functions that call kernels: only the host does. A kernel may be named as a function of metal_stdlib."""
    tokens = program.tokens
    kernels = {d.name for d in program.declarations if d.kind == "function" and is_kernel(program, d)}
    others = {d.name for d in program.walk() if d.kind == "function" and not is_kernel(program, d)}
    kernels -= others | _functions_of_headers()
    for function in bodies:
        for i in range(*function.body):
            if tokens[i].text in kernels and tokens[i + 1].text in ("(", "<"):
                if tokens[i - 1].kind == "op" and tokens[i - 1].text not in (".", "->"):
                    yield Breach(i, "kernel", f"'{tokens[i].text}' is a kernel, which no function can call")


@functools.lru_cache(maxsize=1)
def _functions_of_headers():
    return {name for path in INCLUDE.glob("*.h") for name in re.findall(r"(\w+)\(", path.read_text(encoding="utf-8"))}
