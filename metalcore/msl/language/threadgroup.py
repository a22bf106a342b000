"""Variables in threadgroup memory: `threadgroup T a[N], b;` in a function body."""

from dataclasses import dataclass

from ..errors import error_at
from .declarators import Declaration
from .rewrite import erase

# A site is the number of a variable: kernels number theirs from 0 up, other functions from the last site down.
_SITES = 64
_GONE = {"static", "constexpr", "inline", "extern", "register", "mutable", "thread_local"}


@dataclass
class ThreadgroupStatement:
    declaration: Declaration
    variables: list  # its declarators that declare variables in threadgroup memory
    site: int = 0  # the first variable's site

    @property
    def first(self):
        """The index of its first token."""
        return self.declaration.first

    @property
    def has_initializer(self):
        return any(variable.initializer for variable in self.variables)


def find_threadgroup_variables(program, spaces):
    """Finds the statements in functions that declare variables in threadgroup memory.

    Args:
        spaces: the result of find_address_spaces().
    """
    statements, shared = [], _SITES
    for declaration in program.walk():
        if declaration.kind != "function" or declaration.body is None:
            continue
        found, site = [], 0
        for statement, flags in spaces.statements:
            if declaration.body[0] < statement.first < declaration.body[1]:
                variables = [declarator for declarator, flag in zip(statement.declarators, flags) if flag]
                found.append(ThreadgroupStatement(statement, variables))
        if found:
            _refuse_copies(program, *declaration.body)
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


def _refuse_copies(program, first, last):
    """Refuses a lambda that captures by copy: it would copy threadgroup variables, which Metal's does not."""
    tokens = program.tokens
    for i in range(first, last):
        if tokens[i].text == "[" and tokens[i + 1].text == "=" and tokens[i + 2].text in ("]", ","):
            raise error_at(tokens[i], "a lambda beside threadgroup variables must capture by reference")


def place_threadgroup_variables(program, statements):
    """Makes each variable a reference to the memory of its site.

    The declaration becomes one of types, `typedef float msl_type_0[16];`, in which any declarator can stand unchanged.
    """
    tokens = program.tokens
    for statement in statements:
        declaration, texts = statement.declaration, []
        shared = {id(variable): statement.site + i for i, variable in enumerate(statement.variables)}
        for i in declaration.storage:
            if tokens[i].text in _GONE:
                tokens[i].text = ""
        common = [_taken(program, *part) for part in declaration.alignments]
        for i, declarator in enumerate(declaration.declarators):
            name, site = tokens[declarator.name].text, shared.get(id(declarator))
            type_ = f"msl_type_{statement.site if site is None else site}" + ("" if site is not None else f"_{i}")
            alignments = [*common, *(_taken(program, *part) for part in declarator.alignments)]
            initializer = _taken(program, *declarator.initializer) if declarator.initializer else ""
            tokens[declarator.name].text = type_
            if site is None:  # a pointer among variables
                texts.append(f"{type_} {name}{' ' + initializer if initializer else ''};")
            else:
                texts += _variable(name, type_, site, alignments, initializer.removeprefix("=").lstrip())
        last = declaration.declarators[-1].end
        tokens[declaration.first].text = "typedef " + tokens[declaration.first].text
        tokens[last].text += " " + " ".join(texts)


def _taken(program, first, last):
    text = program.text(first, last)
    erase(program.tokens, first, last)
    return text


def _variable(name, type_, site, alignments, value):
    memory = f"{type_}, {site}"
    if alignments:
        aligned = type_.replace("type", "aligned")
        # The strictest alignment holds. Compilers differ in which of several in one place they accept.
        members = " ".join(f"struct {text} {{ char byte; }} a{i};" for i, text in enumerate(alignments))
        yield f"struct {aligned} {{ {members} }};"
        memory += f", alignof({aligned})"
    yield f"auto& {name} = msl::threadgroup_variable<{memory}>();"
    if value:
        yield f"msl::initialize_threadgroup({name}, msl::initial<{type_}>{{{value}}});"
