"""Variables in threadgroup memory: `threadgroup T a[N], b;` in a function body."""

from dataclasses import dataclass

from .errors import error_at
from .tokens import CLOSING, matching_angle

# Sites are numbered per kernel, from 0 in kernels and from the last one down in other functions.
_SITES = 64
_QUALIFIERS = {"threadgroup", "const", "volatile", "static", "constexpr", "inline", "coherent"}
_BUILTIN_WORDS = {"unsigned", "signed", "int", "char", "short", "long", "float", "half", "bool", "bfloat"}


@dataclass
class ThreadgroupStatement:
    first: int  # index of the statement's first token
    last: int  # index of its semicolon
    type: tuple  # (first, last) of the type's tokens
    variables: (
        list  # (index of the name, [(opening, closing) of each extent], (first, last) of the initializer or None)
    )
    site: int  # of the first variable

    @property
    def has_initializer(self):
        return any(initializer for _, _, initializer in self.variables)


def find_threadgroup_variables(program):
    """The statements that declare variables in threadgroup memory, in functions and their nested blocks."""
    statements, shared = [], _SITES
    for declaration in program.walk():
        if declaration.kind != "function" or declaration.body is None:
            continue
        found, site = [], 0
        i = declaration.body[0] + 1
        while i < declaration.body[1]:
            if program.tokens[i].text == "threadgroup":
                statement = _statement(program, i, declaration.body[0])
                if statement is not None:
                    found.append(statement)
                    i = statement.last
            i += 1
        in_kernel = "kernel" in declaration.attributes or any(
            program.tokens[i].text == "kernel" for i in range(declaration.head, declaration.name_at)
        )
        for statement in found:
            if in_kernel:
                statement.site = site
                site += len(statement.variables)
            else:
                shared -= len(statement.variables)
                statement.site = shared
            if site > shared:
                raise error_at(program.tokens[statement.first], f"more than {_SITES} threadgroup variables")
        statements += found
    return statements


def _statement(program, i, floor):
    """The declaration around the `threadgroup` at i, or None where it is part of a pointer, a cast or an expression."""
    tokens, first = program.tokens, i
    while (
        first - 1 > floor
        and tokens[first - 1].kind == "id"
        and tokens[first - 1].text not in ("return", "else", "do", "case")
    ):
        first -= 1
    before = tokens[first - 1].text
    if before == ")" and tokens[program.partner[first - 1] - 1].text in ("alignas", "__attribute__"):
        first = program.partner[first - 1] - 1
        before = tokens[first - 1].text
    if before not in (";", "{", "}", ":", "else", "do", "]", ")"):
        return None
    j = i
    type_first = None
    while tokens[j].kind == "id" and tokens[j].text in _QUALIFIERS:
        j += 1
    if (
        first < i
        and tokens[first].text not in _QUALIFIERS
        and first != i
        and tokens[first].text not in ("alignas", "__attribute__")
    ):
        type_first, type_last = first, i  # `float threadgroup x[4];`
    else:
        type_first = j
        j = _type_end(program, j)
        type_last = j
        while tokens[j].text in _QUALIFIERS:
            j += 1
    variables = []
    while True:
        if tokens[j].kind != "id":
            return None  # a pointer, a reference or a cast
        name, extents = j, []
        j += 1
        while program.attribute_end(j) is not None:
            j = program.attribute_end(j)
        while tokens[j].text == "[":
            extents.append((j, program.partner[j]))
            j = program.partner[j] + 1
        initializer = None
        if tokens[j].text in ("=", "{"):
            start = j = j + (tokens[j].text == "=")
            while tokens[j].text not in (",", ";"):
                j = program.partner[j] + 1 if tokens[j].text in CLOSING else j + 1
            initializer = (start, j)
        variables.append((name, extents, initializer))
        if tokens[j].text == ";":
            return ThreadgroupStatement(first, j, (type_first, type_last), variables, 0)
        if tokens[j].text != ",":
            return None
        j += 1


def _type_end(program, j):
    tokens = program.tokens
    if tokens[j].text in _BUILTIN_WORDS:
        while tokens[j].text in _BUILTIN_WORDS:
            j += 1
        return j
    if tokens[j].text in ("typename", "struct"):
        j += 1
    if tokens[j].text == "decltype":
        return program.partner[j + 1] + 1
    while True:
        if tokens[j].text == "::":
            j += 1
        if tokens[j].text == "template":
            j += 1
        if tokens[j].kind != "id":
            return j
        j += 1
        if tokens[j].text == "<":
            close = matching_angle(tokens, j)
            j = j if close is None else close + 1
        if tokens[j].text != "::":
            return j


def place_threadgroup_variables(program, statements):
    """Each variable becomes a reference to the memory of its site."""
    tokens = program.tokens
    for statement in statements:
        type_text = program.text(*statement.type)
        texts = []
        for offset, (name, extents, initializer) in enumerate(statement.variables):
            dimensions = "".join(f"[({program.text(first + 1, last)})]" for first, last in extents)
            type_, name = type_text + dimensions, tokens[name].text
            texts.append(f"auto& {name} = msl::threadgroup_variable<{type_}, {statement.site + offset}>();")
            if initializer:
                value = program.text(*initializer)
                texts.append(f"msl::initialize_threadgroup({name}, msl::initial<{type_}>{{{value}}});")
        for i in range(statement.first, statement.last + 1):
            tokens[i].text = ""
        tokens[statement.first].text = " ".join(texts)
