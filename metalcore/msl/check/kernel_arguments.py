"""Rules of Apple's compiler for kernels' arguments and function constants that compile_shader does without."""

from ..language.constants import constant_value
from ..language.kernels import BUILTINS
from ..language.rules import Breach, is_kernel

_MAX_FUNCTION_CONSTANT = 65535
# Two names of one value, which a kernel may have one of.
_SAME = ({"thread_execution_width", "threads_per_simdgroup"}, {"threads_per_grid", "grid_size"})
_SPACES = {"device", "constant", "threadgroup"}


def argument_breaches(program):
    """Yields breaches in the arguments of a program's kernels and in its function constants."""
    constants = {}
    for declaration in program.walk():
        if declaration.kind == "function" and is_kernel(program, declaration):
            yield from _kernel(program, declaration)
        elif declaration.kind == "variable" and "function_constant" in declaration.attributes:
            yield from _function_constant(program, declaration, constants)


def _kernel(program, kernel):
    tokens, taken = program.tokens, {}
    for first, last in program.split_parameters(*kernel.parameters):
        attributes = program.read_attributes(first, last)
        name_at = program.declarator_name(first, last)
        where = f"argument '{tokens[name_at].text if name_at is not None else ''}' of kernel '{kernel.name}'"
        builtins = [attribute for attribute in attributes if attribute in BUILTINS]
        words = _type_words(program, first, last)
        if "=" in words:
            yield Breach(first, "kernel", f"{where} has a default, which arguments of kernels cannot have")
        if len(builtins) > 1 or builtins and {"buffer", "threadgroup"} & attributes.keys():
            both = " and ".join(f"'{attribute}'" for attribute in attributes)
            yield Breach(first, "attribute-type", f"{where} has the attributes {both}, and can have one")
        for attribute in builtins:
            if attribute in taken:
                message = f"input declarations with attribute '{attribute}' twice: {where} and {taken[attribute]}"
                yield Breach(first, "attribute-type", message)
            other = next(
                (name for same in _SAME if attribute in same for name in same & taken.keys() - {attribute}), None
            )
            if other:
                message = f"kernel cannot have input declarations with '{other}' and '{attribute}' attributes"
                yield Breach(first, "attribute-type", message)
            taken[attribute] = where
            if {"*", "&", "["} & set(words):
                yield Breach(first, "attribute-type", f"{where} is {attribute} and cannot be a pointer or a reference")
        if not builtins:
            yield from _memory(program, kernel, first, where, attributes, words)


def _memory(program, kernel, first, where, attributes, words):
    """Judges an argument that is no position: it is a pointer or a reference to memory."""
    parameters = {token.text for a, b in kernel.templates for token in program.tokens[a:b]}
    of_template = [word for word in words if word in parameters]
    if "&&" in words:
        yield Breach(first, "kernel", f"{where} is an rvalue reference")
    elif "buffer" in attributes and not ({"*", "&", "[", "tensor"} & set(words) or of_template):
        message = (
            f"{where} is a buffer passed by value; it must be a pointer or a reference, as 'constant {words[-1]}&'"
        )
        yield Breach(first, "kernel", message)
    elif "[" in words and not _SPACES & set(words):
        yield Breach(first, "address-space", f"{where} is an array without an address space")
    if "buffer" in attributes and "threadgroup" in words and not {"device", "constant"} & set(words):
        yield Breach(first, "attribute-type", f"'buffer' attribute on {where}, which is in threadgroup")
    if "threadgroup" in attributes and {"*", "&"} & set(words) and "threadgroup" not in words:
        yield Breach(first, "attribute-type", f"'threadgroup' attribute on {where}, which is not in threadgroup")
    levels, space = 0, False
    for word in words:
        space = space or word in _SPACES
        if word in ("*", "&"):
            if levels and not space:
                yield Breach(first, "address-space", f"{where} is a pointer to a pointer without an address space")
            levels, space = levels + 1, False


def _type_words(program, first, last):
    """Returns the words of a parameter without its attributes and its name, aliases of pointers resolved."""
    words, i, name_at = [], first, program.declarator_name(first, last)
    while i < last:
        end = program.attribute_end(i)
        if end is None and i != name_at:
            words += program.words_of_pointers(i, i + 1)
        i = end or i + 1
    return words


def lines_of_unknown_values(program):
    """Returns the places {(file, line)} of variables whose values Clang does not know: they follow from function
    constants, or from strings, which clang_text() makes calls."""
    names, places = set(), set()
    for declaration in program.walk():
        tokens = program.tokens[declaration.first : declaration.last]
        given = "function_constant" in declaration.attributes or any(token.kind == "str" for token in tokens)
        # Parentheses may make a variable look like a function.
        if (
            declaration.kind in ("variable", "function")
            and declaration.body is None
            and (given or any(token.text in names for token in tokens))
        ):
            names.add(declaration.name)
            places.update((token.file, token.line) for token in tokens)
    return places


def _is_array(program, i):
    """Returns whether bounds stand at i, or after attributes there."""
    while (end := program.attribute_end(i)) is not None:
        i = end
    return program.tokens[i].text == "["


def _function_constant(program, declaration, constants):
    where = f"function constant '{declaration.name}'"
    tail = {token.text for token in program.tokens[declaration.name_at + 1 : declaration.last]}
    words = {token.text for token in program.tokens[declaration.head : declaration.name_at]}
    classes = {d.name for d in program.walk() if d.kind == "class"}
    if tail & {"=", "{"}:
        yield Breach(declaration.name_at, "function-constant", f"{where} cannot have an initializer")
    if words & classes or words & {"*", "&"} or _is_array(program, declaration.name_at + 1):
        yield Breach(declaration.name_at, "function-constant", f"{where} must be of a scalar or a vector type")
    argument = declaration.attributes["function_constant"]
    index = constant_value(program, argument)
    if not argument:
        yield Breach(declaration.name_at, "function-constant", f"{where} has no index")
    if index is None:
        return
    if not 0 <= index <= _MAX_FUNCTION_CONSTANT:
        message = f"{where} has index {index}, which is not 0 to {_MAX_FUNCTION_CONSTANT}"
        yield Breach(declaration.name_at, "function-constant", message)
    elif index in constants:
        yield Breach(declaration.name_at, "function-constant", f"{where} has index {index}, as {constants[index]} has")
    constants.setdefault(index, f"'{declaration.name}'")
