"""The kernels of a program, their arguments, and whether their threads synchronize."""

import ast
import re
from dataclasses import dataclass, field

from ..errors import error_at
from .constants import constant_value
from .numbers import MAX_INDEX

# [[attribute]] -> the value that a thread finds there, named as in host/entry.h.
BUILTINS = {
    "thread_position_in_grid": "position_in_grid",
    "thread_position_in_threadgroup": "position_in_threadgroup",
    "thread_index_in_threadgroup": "index_in_threadgroup",
    "threadgroup_position_in_grid": "threadgroup_position",
    "threads_per_grid": "threads_per_grid",
    "grid_size": "threads_per_grid",
    "grid_origin": "grid_origin",
    "threads_per_threadgroup": "threads_per_threadgroup",
    "dispatch_threads_per_threadgroup": "dispatch_threads_per_threadgroup",
    "threadgroups_per_grid": "threadgroups_per_grid",
    "thread_index_in_simdgroup": "index_in_simdgroup",
    "simdgroup_index_in_threadgroup": "simdgroup_index",
    "simdgroups_per_threadgroup": "simdgroups",
    "dispatch_simdgroups_per_threadgroup": "dispatch_simdgroups",
    "threads_per_simdgroup": "threads_per_simdgroup",
    "thread_execution_width": "threads_per_simdgroup",
    "thread_index_in_quadgroup": "index_in_quadgroup",
    "quadgroup_index_in_threadgroup": "quadgroup_index",
    "quadgroups_per_threadgroup": "quadgroups",
    "dispatch_quadgroups_per_threadgroup": "dispatch_quadgroups",
}
_REFUSED_ATTRIBUTES = {
    "texture": "a texture argument",
    "sampler": "a sampler argument",
    "stage_in": "[[stage_in]]",
    "payload": "a ray or mesh payload",
    "imageblock_data": "an imageblock",
    "intersection_function_table": "an intersection function table",
}
_REFUSED_STAGES = ("vertex", "fragment", "mesh", "object", "intersection", "visible", "stitchable")
# Functions in which the threads of a threadgroup wait for one another, and types whose operations do.
_SYNCHRONIZING_CALLS = (
    "simd_",
    "quad_",
    "simdgroup_",
    "threadgroup_barrier",
    "__metal_simd_",
    "__metal_quad_",
    "__metal_simdgroup_async_copy",
    "__metal_wait_simdgroup_events",
)
_SIMD_TYPE = re.compile(r"simd_[a-z]+[1-4](x[2-4])?")  # of <simd/simd.h>
_SYNCHRONIZING_TYPES = {"convolution2d", "matmul2d", "simdgroup_matrix"} | {
    f"simdgroup_{T}8x8" for T in ("float", "half", "bfloat")
}


@dataclass
class Argument:
    """A kernel's parameter."""

    name: str
    kind: str  # buffer, threadgroup, or one of BUILTINS' values
    index: int = 0
    condition: str = ""  # the function constant that it depends on
    type: str = ""  # what a buffer's reference refers to, as written; "" for pointers
    is_writable: bool = False  # whether the kernel may write to the buffer
    # For a tensor: the index at which its extents and strides are bound, its elements' type as written, and its number
    # of dimensions, which is 0 where the program does not write it here.
    tensor: tuple = ()


@dataclass
class KernelDeclaration:
    name: str  # host name
    named_at: object  # the declaration or explicit instantiation that names it
    name_end: int  # index after its name and template arguments in that declaration
    declaration: object
    arguments: list
    mentions: set = field(default_factory=set)  # names in its template arguments
    max_total_threads: int = 0
    synchronizes: bool = False
    has_threadgroup_variables: bool = False


def find_kernels(program, waits=()):
    """Finds every kernel that the host can name: plain kernels, and instantiations with a host name.

    Args:
        waits: indices of tokens at which translated code will wait for the other threads.

    Raises:
        MSLError: a kernel, or one of its arguments, is of a kind that is not supported.
    """
    templates, kernels, seen = {}, [], {}
    for declaration in program.declarations:
        if declaration.kind == "function" and _is_kernel(program, declaration):
            head = program.tokens[declaration.head : declaration.name_at]
            if all(token.text != "void" for token in head):
                raise error_at(program.tokens[declaration.name_at], f"kernel '{declaration.name}' must return void")
            if declaration.is_template and not _is_specialization(program, declaration):
                templates.setdefault(declaration.name, []).append(declaration)
            elif declaration.body is not None:
                kernels.append(_plain_kernel(program, declaration))
    kernels += [
        _instantiated_kernel(program, declaration, templates)
        for declaration in program.declarations
        if declaration.kind == "instantiation" and "host_name" in declaration.attributes
    ]
    unique = []
    for kernel in kernels:
        if kernel.name not in seen:
            seen[kernel.name] = kernel
            unique.append(kernel)
    names = Reachability(program, waits)
    for kernel in unique:
        kernel.synchronizes = names.synchronizes(kernel)
    return unique


def _is_kernel(program, declaration):
    tokens = program.tokens
    for i in range(declaration.head, declaration.parameters[0]):
        if tokens[i].text in ("vertex", "fragment") and program.tokens[i - 1].text not in ("::", "<", ","):
            raise error_at(
                tokens[i], f"'{tokens[i].text}' functions are not supported: metalcore runs compute kernels only"
            )
    for stage in _REFUSED_STAGES:
        if stage in declaration.attributes:
            raise error_at(
                tokens[declaration.head],
                f"[[{stage}]] functions are not supported: metalcore runs compute kernels only",
            )
    return "kernel" in declaration.attributes or any(
        tokens[i].text == "kernel" for i in range(declaration.head, declaration.name_at)
    )


def _is_specialization(program, declaration):
    return all(last == first + 1 for first, last in declaration.templates)


def _plain_kernel(program, declaration):
    name = _host_name(declaration) or declaration.qualified_name
    return KernelDeclaration(
        name,
        declaration,
        declaration.parameters[0],
        declaration,
        _arguments(program, declaration),
        _identifiers(program, declaration.name_at, declaration.parameters[0]),
        _max_total_threads(program, declaration),
    )


def _instantiated_kernel(program, instantiation, templates):
    tokens = program.tokens
    if instantiation.name not in templates:
        raise error_at(
            tokens[instantiation.first],
            f"explicit instantiation of '{instantiation.name}', which is no kernel template",
        )
    candidates = templates[instantiation.name]
    if len(candidates) > 1 and instantiation.parameters is not None:
        count = len(program.split_parameters(*instantiation.parameters))
        candidates = [c for c in candidates if len(program.split_parameters(*c.parameters)) == count] or candidates
    declaration = next((c for c in candidates if c.body is not None), candidates[0])
    return KernelDeclaration(
        _host_name(instantiation),
        instantiation,
        instantiation.name_end,
        declaration,
        _arguments(program, declaration),
        _identifiers(program, instantiation.name_at, instantiation.name_end),
        _max_total_threads(program, instantiation)
        or _max_total_threads(program, declaration, _template_values(program, instantiation, declaration)),
    )


def _host_name(declaration):
    strings = declaration.attributes.get("host_name", ())
    return "".join(ast.literal_eval(token.text) for token in strings if token.kind == "str")


def _max_total_threads(program, declaration, values=None):
    argument = declaration.attributes.get("max_total_threads_per_threadgroup")
    if not argument:
        return 0
    value = constant_value(program, argument, values)
    if value is None and values is None:
        return 0  # rules.py refuses it, except in a template
    if value is None:
        raise error_at(
            argument[0],
            f"the argument of max_total_threads_per_threadgroup of '{declaration.name}' is no integer constant",
        )
    return value


def _template_values(program, instantiation, declaration):
    """Returns {template parameter: value} of an instantiation, for the parameters that have integer values."""
    tokens = program.tokens
    opening = next((i for i in range(instantiation.name_at, instantiation.name_end) if tokens[i].text == "<"), None)
    if opening is None or not declaration.templates:
        return {}
    parameters = program.split_parameters(*declaration.templates[-1])
    given = program.split_parameters(opening, instantiation.name_end - 1)
    values = {}
    for i, (first, last) in enumerate(parameters):
        equals = next((at for at in range(first, last) if tokens[at].text == "="), last)
        start, end = given[i] if i < len(given) else (equals + 1, last)
        value = constant_value(program, tokens[start:end], values) if start < end else None
        if value is not None:
            values[tokens[equals - 1].text] = value
    return values


def _identifiers(program, first, last):
    return {token.text for token in program.tokens[first:last] if token.kind == "id"}


def _synchronizes_itself(program, first, last, waits):
    """Returns whether tokens[first:last] call a barrier or an operation of a simdgroup, or hold an index of `waits`."""
    tokens = program.tokens
    for i in range(first, last):
        name = tokens[i].text
        if (
            name in _SYNCHRONIZING_TYPES
            or i in waits
            or (
                name.startswith(_SYNCHRONIZING_CALLS)
                and tokens[i + 1].text in ("(", "<")
                and not _SIMD_TYPE.fullmatch(name)
            )
        ):
            return True
    return False


def _arguments(program, declaration):
    arguments, implicit, tensors, used = [], [], [], {"buffer": set(), "threadgroup": set()}
    for first, last in program.split_parameters(*declaration.parameters):
        if program.text(first, last) == "void":
            continue
        argument, explicit = _argument(program, declaration, first, last)
        arguments.append(argument)
        if argument.tensor:
            tensors.append(argument)
        elif argument.kind == "buffer":
            argument.type, argument.is_writable = _access(program, first, last)
        if argument.kind in used:
            used[argument.kind].add(argument.index) if explicit else implicit.append(argument)
    # Arguments without an index take the lowest free ones in order, as Apple's compiler assigns them.
    for argument in implicit:
        argument.index = next(i for i in range(len(arguments) + 64) if i not in used[argument.kind])
        used[argument.kind].add(argument.index)
    # The extents and strides of tensors take the highest free ones.
    for argument in tensors:
        free = [i for i in range(MAX_INDEX + 1) if i not in used["buffer"]]
        if not free:
            raise error_at(
                program.tokens[declaration.name_at],
                f"kernel '{declaration.name}' has more buffers and tensors than metalcore binds: each tensor takes two "
                f"of {MAX_INDEX + 1} indices",
            )
        argument.tensor = (free[-1], *argument.tensor[1:])
        used["buffer"].add(free[-1])
    return arguments


def _argument(program, declaration, first, last):
    tokens = program.tokens
    attributes = program.read_attributes(first, last)
    name_at = program.declarator_name(first, last)
    name = tokens[name_at].text if name_at is not None else ""
    condition = " ".join(token.text for token in attributes.get("function_constant", ()))
    for refused, description in _REFUSED_ATTRIBUTES.items():
        if refused in attributes:
            raise error_at(
                tokens[first], f"{description} is not supported (argument '{name}' of kernel '{declaration.name}')"
            )
    tensor, is_writable = _tensor(program, first, last if name_at is None else name_at)
    if tensor and condition:
        raise error_at(tokens[first], f"tensor '{name}' cannot depend on a function constant")
    for kind in ("buffer", "threadgroup"):
        if kind in attributes:
            index = constant_value(program, attributes[kind])
            if index is None:
                raise error_at(tokens[first], f"the index of argument '{name}' is no integer constant")
            return Argument(name, kind, index, condition, "", is_writable, tensor), True
    for attribute, kind in BUILTINS.items():
        if attribute in attributes:
            return Argument(name, kind), True
    words = set(program.words_of_pointers(first, last))
    unknown = [attribute for attribute in attributes if attribute not in ("function_constant", "maybe_unused")]
    if unknown:
        raise error_at(
            tokens[first], f"[[{unknown[0]}]] is not supported (argument '{name}' of kernel '{declaration.name}')"
        )
    if tensor:
        return Argument(name, "buffer", 0, condition, "", is_writable, tensor), False
    if words & {"threadgroup"}:
        return Argument(name, "threadgroup", 0, condition), False
    if words & {"device", "constant", "*", "&"}:
        return Argument(name, "buffer", 0, condition), False
    raise error_at(
        tokens[first],
        f"argument '{name}' of kernel '{declaration.name}' has no attribute that tells what it is bound to",
    )


_TENSOR = re.compile(r"(?:const )?(?:metal :: )?tensor < (.*) >")
_RANK = re.compile(r"(?:metal :: )?(?:dextents < [\w :]+ , (\d+) >|extents < [\w :]+ ((?:, [^,<>]+ )+)>)")


def _spelled(words):
    """Returns the words of a type, whose lists of arguments end one by one."""
    return " ".join(words).replace(">>", "> >")


def _tensor(program, first, last):
    """Returns (the Argument.tensor of a parameter, without its index; whether the kernel may write to it)."""
    words = []
    for token in program.tokens[first:last]:
        meaning = program.aliases().get(token.text, ())
        words += meaning if _TENSOR.fullmatch(_spelled(meaning)) else [token.text]
    match = _TENSOR.fullmatch(_spelled(words))
    if match is None:
        return (), False
    element, _, rest = match[1].partition(" , ")
    words = element.split()
    name = " ".join(word for word in words if word not in ("device", "constant", "const", "metal", "::"))
    extents = _RANK.match(rest)
    rank = 0 if extents is None else int(extents[1]) if extents[1] else extents[2].count(",")
    return (0, name, rank), not {"const", "constant"} & {*words}


def _access(program, first, last):
    """Returns the Argument.type and is_writable of a parameter."""
    name_at = program.declarator_name(first, last)
    words = program.words_of_pointers(first, last if name_at is None else name_at)
    ends = [i for i, word in enumerate(words) if word in ("*", "&")]
    if not ends:
        return "", True  # a type that hides the pointer
    pointee = words[ends[-2] + 1 if len(ends) > 1 else 0 : ends[-1]]
    reference = words[ends[-1]] == "&" and len(ends) == 1 and "(" not in pointee
    plain = [word for word in pointee if word not in ("device", "constant", "const", "volatile", "coherent")]
    return " ".join(plain) if reference else "", "constant" not in pointee and "const" not in pointee


class Reachability:
    """Which code may synchronize, by names alone. The answer errs to yes, so that no barrier is missed."""

    def __init__(self, program, waits):
        self._waits = waits
        self._mentions = {}  # name -> identifiers in all declarations of that name
        self._operators = set()  # identifiers in operators, which are called without being named
        self._synchronizing = set()
        self._add(program, program.declarations)
        self._close()

    def _add(self, program, declarations):
        for declaration in declarations:
            if declaration.kind == "class":
                # Code that names a class may run its constructors, operators and initializers, and none of its named
                # methods.
                self._mention(program, declaration.name, declaration.first, declaration.body[0])
                for member in declaration.members:
                    if (
                        member.kind != "function"
                        or member.name == declaration.name
                        or member.name.startswith("operator")
                    ):
                        self._mention(program, declaration.name, member.first, member.last)
                self._add(program, [m for m in declaration.members if not m.name.startswith("operator")])
            elif declaration.kind != "instantiation":
                if declaration.name.startswith("operator"):
                    self._operators |= _identifiers(program, declaration.first, declaration.last)
                self._mention(program, declaration.name, declaration.first, declaration.last)

    def _mention(self, program, name, first, last):
        self._mentions.setdefault(name, set()).update(_identifiers(program, first, last))
        if _synchronizes_itself(program, first, last, self._waits):
            self._synchronizing.add(name)

    def _close(self):
        callers = {}
        for name, mentioned in self._mentions.items():
            for other in mentioned:
                callers.setdefault(other, set()).add(name)
        pending = list(self._synchronizing)
        while pending:
            for caller in callers.get(pending.pop(), ()):
                if caller not in self._synchronizing:
                    self._synchronizing.add(caller)
                    pending.append(caller)

    def synchronizes(self, kernel):
        names = kernel.mentions | self._operators | {kernel.declaration.name}
        return bool(names & self._synchronizing)
