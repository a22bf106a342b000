"""What C++ has and MSL does not, as far as tokens and declarations tell. compile_shader and the check refuse it with
the same words, those of this file.

So are unknown attributes refused: compilers ignore attributes that they do not know, and one may change the result.
"""

import re
from typing import NamedTuple

from ..errors import error_at
from .constants import constant_value
from .kernels import BUILTINS
from .numbers import MAX_INDEX, MAX_THREADS
from .syntax import ATTRIBUTE_WORDS
from .tokens import CLOSING

# Keyword of C++ -> (the rule that it breaks, the message).
_WORDS = {
    "__int128": ("language", "integers of 128 bits are not supported in Metal"),
    "goto": ("language", "goto is not part of MSL"),
    "dynamic_cast": ("language", "dynamic_cast is not part of MSL"),
    "typeid": ("language", "typeid is not part of MSL"),
    "thread_local": ("language", "thread_local is not part of MSL"),
    "virtual": ("virtual", "virtual functions are not part of MSL"),
    "new": ("allocation", "new is not part of MSL"),
    "delete": ("allocation", "delete is not part of MSL"),
    "throw": ("exceptions", "exceptions are not part of MSL"),
    "try": ("exceptions", "exceptions are not part of MSL"),
    "catch": ("exceptions", "exceptions are not part of MSL"),
}
_ASSEMBLY = {"asm", "__asm", "__asm__"}
_VECTOR = {"thread_position_in_grid", "thread_position_in_threadgroup", "threadgroup_position_in_grid",
           "threads_per_grid", "grid_size", "grid_origin", "threads_per_threadgroup", "threadgroups_per_grid",
           "dispatch_threads_per_threadgroup"}  # fmt: skip
_NUMBERS = re.compile(r"(?:metal::)?(u?char|u?short|u?int|u?long|float|half|bfloat|bool|size_t)([234])?")
_POSITIONS = ("uint", "ushort")
_SPACES = {"device", "constant", "thread", "threadgroup"}


class Breach(NamedTuple):
    """A place in a program that breaks a rule."""

    at: int  # index of the token that is named
    rule: str
    message: str


def breaches(program, *, strict=False):
    """Yields every Breach of a parsed program, in no order.

    Args:
        strict: find also what does no harm here: constants that are not in `constant` (at program scope and `static`
            in functions), positions with different numbers of components.
    """
    yield from _words(program, strict)
    yield from _host_names(program)
    for declaration in program.walk():
        if declaration.kind == "variable":
            yield from _variable(program, declaration, strict)
        elif declaration.kind == "function" and is_kernel(program, declaration):
            yield from _arguments(program, declaration, strict)
        if "max_total_threads_per_threadgroup" in declaration.attributes:
            yield from _max_threads(program, declaration)


def refuse_breaches(program):
    """Raises an MSLError for the first Breach of a program."""
    first = min(breaches(program), default=None)
    if first is not None:
        raise error_at(program.tokens[first.at], first.message)


def is_kernel(program, declaration):
    head = program.tokens[declaration.head : declaration.name_at]
    return "kernel" in declaration.attributes or any(token.text == "kernel" for token in head)


def _words(program, strict):
    tokens = program.tokens
    bodies = [d.body for d in program.walk() if d.kind == "function" and d.body is not None]
    for i, token in enumerate(tokens):
        if token.kind != "id":
            continue
        before = tokens[i - 1].text if i else ";"
        if token.text in _WORDS and not (token.text == "delete" and before == "="):
            yield Breach(i, *_WORDS[token.text])
        elif token.text == "long" and before == "long":
            yield Breach(i, "language", "'long long' is not supported in Metal")
        elif token.text == "static" and _is_changing_local(tokens, i, strict) and any(a < i < b for a, b in bodies):
            yield Breach(i, "constant-space", "a static variable of a function must be in constant")
        # After a declaration `asm` only gives its symbol's name.
        elif token.text in _ASSEMBLY and (before in (";", "{", "}") or any(a < i < b for a, b in bodies)):
            yield Breach(i, "language", "assembly is not part of MSL")


def _is_changing_local(tokens, i, strict):
    """Returns whether the `static` at i declares a variable that can change, or if strict any that is not in
    `constant`."""
    words = {token.text for token in tokens[max(i - 2, 0) : i] if token.kind == "id"}
    for token in tokens[i + 1 :]:
        if token.text in ("=", ";", "(", "{", "["):
            allowed = {"constant", "threadgroup"} if strict else {"constant", "const", "constexpr", "threadgroup"}
            return token.text != "(" and not words & allowed
        words.add(token.text)
    return False


def _host_names(program):
    """Finds kernels that the host cannot name, or cannot tell apart."""
    seen = {}
    for declaration in program.declarations:
        argument = declaration.attributes.get("host_name")
        plain = (
            declaration.kind == "function"
            and declaration.body is not None
            and not declaration.is_template
            and is_kernel(program, declaration)
        )
        if not plain and argument is None:
            continue
        if argument is not None and not any(token.kind == "str" and len(token.text) > 2 for token in argument):
            yield Breach(declaration.first, "host-name", "the argument of host_name must be a string that is not empty")
            continue
        name = f'"{declaration.qualified_name}"' if argument is None else "".join(token.text for token in argument)
        if name == '"main"':
            yield Breach(declaration.first, "language", "no kernel may be called main")
        if name in seen:
            token = program.tokens[seen[name]]
            yield Breach(declaration.first, "host-name", f"the host name {name} is taken by {token.file}:{token.line}")
        seen.setdefault(name, declaration.first)


def _variable(program, declaration, strict):
    """Finds variables that all threads share and that are not in `constant`."""
    words = {token.text for token in program.tokens[declaration.head : declaration.last]}
    if declaration.name_at is None or "constant" in words or words & {"friend", "template", *_ASSEMBLY}:
        return
    if words & {"const", "constexpr"} and not strict:
        return
    if declaration.in_class and "static" in words:
        message = f"static member '{declaration.name}' must be in constant"
        yield Breach(declaration.name_at, "constant-space", message)
    elif not declaration.in_class and not words & {"enum", "struct", "class", "union"}:
        message = f"'{declaration.name}' is at program scope and must be in constant"
        yield Breach(declaration.name_at, "constant-space", message)


def _arguments(program, kernel, strict):
    taken, widths, buffers = {}, {}, 0
    for first, last in program.split_parameters(*kernel.parameters):
        attributes = program.read_attributes(first, last)
        words = {token.text for token in program.tokens[first:last]}
        name_at = program.declarator_name(first, last)
        name = program.tokens[name_at].text if name_at is not None else ""
        where = f"argument '{name}' of kernel '{kernel.name}'"
        if words & {"*", "&"} and "thread" in words:
            yield Breach(first, "address-space", f"{where} is in thread")
        elif words & {"*", "&"} and not words & _SPACES:
            yield Breach(first, "address-space", f"{where} has no address space")
        buffers += bool("threadgroup" not in words and words & {"device", "constant"})
        yield from _index(program, first, where, attributes, taken)
        for attribute in attributes:
            if attribute in BUILTINS:
                match = _NUMBERS.fullmatch(_type(program, first, last, name_at))
                if match is None:  # the compiler will report it
                    continue
                largest = 3 if attribute in _VECTOR else 1
                if match[1] not in _POSITIONS or int(match[2] or 1) > largest:
                    wanted = "uint, ushort, or a vector of 2 or 3 of them" if largest == 3 else "uint or ushort"
                    message = f"{where} is {attribute} and must be {wanted}, not {match[0]}"
                    yield Breach(first, "attribute-type", message)
                elif attribute in _VECTOR and attribute != "grid_origin":
                    widths[attribute] = int(match[2] or 1)
    if strict and len(set(widths.values())) > 1:
        different = ", ".join(f"{attribute} has {width}" for attribute, width in widths.items())
        message = f"positions in kernel '{kernel.name}' differ in their number of components: {different}"
        yield Breach(kernel.name_at, "attribute-type", message)
    if buffers > MAX_INDEX + 1:
        message = f"kernel '{kernel.name}' has {buffers} buffers, and {MAX_INDEX + 1} is the limit"
        yield Breach(kernel.name_at, "argument-index", message)


def _type(program, first, last, name_at):
    """Returns the type of a parameter that is bound to a position, as written, without words that do not change it."""
    type_, i = "", first
    while i < last:
        end = program.attribute_end(i)
        if end is None and i != name_at and program.tokens[i].text not in ("const", "constexpr", "thread"):
            type_ += program.tokens[i].text
        i = end or i + 1
    return "".join(program.aliases().get(type_, [type_]))


def _index(program, at, where, attributes, taken):
    conditional = "function_constant" in attributes
    for kind in ("buffer", "threadgroup"):
        index = constant_value(program, attributes[kind]) if kind in attributes else None
        if index is None:
            continue
        if not 0 <= index <= MAX_INDEX:
            yield Breach(at, "argument-index", f"{where} has {kind} index {index}, which is not 0 to {MAX_INDEX}")
        other = taken.get((kind, index))
        # Arguments that depend on function constants may have the same index.
        if other and not (conditional and other[1]):
            yield Breach(at, "argument-index", f"{where} has {kind} index {index}, as {other[0]} has")
        taken.setdefault((kind, index), (where, conditional))


def _max_threads(program, declaration):
    name = "max_total_threads_per_threadgroup"
    argument = declaration.attributes[name]
    parameters = {token.text for first, last in declaration.templates for token in program.tokens[first:last]}
    value = constant_value(program, argument)
    if value is None and not any(token.text in parameters for token in argument):
        yield Breach(declaration.first, "max-threads", f"the argument of {name} is no integer constant")
    elif value is not None and not 0 < value <= MAX_THREADS:
        yield Breach(declaration.first, "max-threads", f"{name} is {value}, and must be 1 to {MAX_THREADS}")


# [[…]] that other modules read, and those that change nothing.
_READ = {*BUILTINS, "kernel", "host_name", "max_total_threads_per_threadgroup", "buffer", "threadgroup", "id",
         "function_constant"}  # fmt: skip
_NO_EFFECT = {
    "maybe_unused", "nodiscard", "noreturn", "deprecated", "fallthrough", "likely", "unlikely", "carries_dependency",
    "no_unique_address", "assume", "always_inline", "noinline", "flatten", "unroll", "unused", "used", "const", "pure",
    "cold", "hot", "user", "required_threads_per_threadgroup", "max_total_threadgroups_per_mesh_grid", "nonnull",
    "returns_nonnull", "warn_unused_result", "noescape", "nomerge", "convergent", "noduplicate", "overloadable",
}  # fmt: skip
# [[…]] of stages and arguments that are not supported. kernels.py refuses them by name where they matter.
_OTHER_STAGES = {
    "texture", "sampler", "stage_in", "payload", "imageblock_data", "intersection_function_table", "position",
    "attribute", "color", "render_target_array_index", "viewport_array_index", "point_size", "clip_distance", "flat",
    "center_perspective", "center_no_perspective", "centroid_perspective", "centroid_no_perspective", "vertex",
    "sample_perspective", "sample_no_perspective", "depth", "stencil", "sample_mask", "front_facing", "point_coord",
    "primitive_id", "sample_id", "vertex_id", "instance_id", "base_vertex", "base_instance", "amplification_id",
    "amplification_count", "barycentric_coord", "invariant", "early_fragment_tests", "raster_order_group", "fragment",
    "mesh", "object", "intersection", "visible", "stitchable", "patch", "position_in_patch", "patch_id", "imageblock",
    "thread_index_in_tile", "index", "ray_data", "origin", "direction", "distance", "accept_intersection",
}  # fmt: skip
# __attribute__((…)) that the compilers know or that change nothing.
_OF_COMPILERS = _NO_EFFECT | {
    "aligned", "packed", "may_alias", "vector_size", "ext_vector_type", "visibility", "malloc", "gnu_inline",
    "artificial", "optnone", "opencl_unroll_hint", "annotate", "availability", "enum_extensibility", "flag_enum",
    "swift_name", "format", "minsize", "nothrow",
}  # fmt: skip


def refuse_unknown_attributes(program):
    """Raises an MSLError at the first attribute that is not known."""
    tokens = program.tokens
    for i, token in enumerate(tokens):
        end = program.attribute_end(i)
        if end is not None:
            _refuse(program, i + 2, end - 2, _READ | _NO_EFFECT | _OTHER_STAGES)
        elif token.text in ATTRIBUTE_WORDS and tokens[i + 1].text == "(":
            _refuse(program, i + 3, program.partner[i + 1] - 1, _OF_COMPILERS)


def _refuse(program, i, end, known):
    tokens = program.tokens
    while i < end:
        if tokens[i].text in CLOSING:
            i = program.partner[i]
        elif tokens[i].kind == "id" and tokens[i + 1].text not in ("::", ":"):
            name = tokens[i].text
            if name not in known and name.strip("_") not in known:
                raise error_at(tokens[i], f"the attribute '{name}' is not supported")
        i += 1
