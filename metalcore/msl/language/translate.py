"""MSL to C++: one program text for every target. A target's prelude and entries make it a translation unit.

The host's translation unit is a shared object that exports msl_library() (host/kernel_abi.h); for CUDA see
cuda_source.py.
"""

from dataclasses import dataclass

from ..errors import TOO_DEEP, MSLError, with_line
from .address_spaces import find_address_spaces
from .anonymous_structs import define_in_templates, find_anonymous_structs
from .captured import name_captured_constants
from .conditionals import wrap_conditionals
from .constants import declare_constants, substitute_function_constants
from .cuda_source import cuda_source, describe
from .dialect import adapt_dialect, count_components, rename_like_ours
from .duplicates import drop_duplicates
from .kernels import find_kernels
from .overloads import Overloads
from .parse import ParsedProgram
from .preprocess import preprocess
from .rewrite import (
    erase,
    erase_address_spaces,
    erase_attributes,
    mark_float_literals,
    name_outermost_scope,
    refuse_unsupported,
    rewrite_swizzles,
)
from .rules import refuse_breaches, refuse_unknown_attributes
from .space_types import SpaceTypes
from .threadgroup import find_threadgroup_variables, place_threadgroup_variables
from .unaligned import find_unaligned_accesses

_FUSING = set("+-*/%&|^<>=!:.#")
_TENSORS = '#include "metal/tensor_ops.h"\n'
_CONVOLUTIONS = '#include "metal/tensor_convolution.h"\n'


@dataclass
class Translation:
    """A program in C++ without its target's prelude, and what it was made from."""

    program: str
    kernels: list
    addresses: dict  # host name -> a C++ expression for the kernel's address
    included: dict  # path -> content of each file the source includes
    guarded: str  # the program for CUDA, with accesses that need no alignment

    def source(self, names=None):
        """Returns the host's translation unit that has the kernels of these host names, by default all kernels."""
        kernels = [kernel for kernel in self.kernels if names is None or kernel.name in names]
        return '#include "host/prelude.h"\n' + self.program + _entries(kernels, self.addresses)

    def cuda_kernels(self):
        """Returns {host name: what cuda_source() needs to know of the kernel}, as plain data."""
        return describe(self.kernels, self.addresses)

    def cuda_source(self, requests):
        """Returns (CUDA C++, entry names) for [(host name, signature)]; see cuda_source.py."""
        return cuda_source(self.guarded, self.cuda_kernels(), requests)


def translate(source, *, include_dirs=(), filename="program_source", defines=(), constants=None):
    """Translates MSL to C++.

    Args:
        source: MSL text.
        include_dirs: where `#include` looks, in order.
        filename: the name of the source in errors.
        defines: macros as ``NAME value`` strings.
        constants: values of function constants, by index or by name.

    Returns:
        Translation.

    Raises:
        MSLError: the source is malformed, or uses what is not supported. The message has its line.
    """
    try:
        return _translate(source, include_dirs, filename, defines, constants)
    except MSLError as error:
        raise MSLError(with_line(str(error), source, filename)) from None
    except RecursionError:
        raise MSLError(f"{filename}:1: error: {TOO_DEEP}") from None


def _translate(source, include_dirs, filename, defines, constants):
    tokens, included, tensors = preprocess(source, include_dirs=include_dirs, filename=filename, defines=defines)
    program = ParsedProgram(tokens)
    refuse_unsupported(program)
    spaces = find_address_spaces(program)
    refuse_breaches(program)
    refuse_unknown_attributes(program)
    variables = find_threadgroup_variables(program, spaces)
    kernels = find_kernels(program, {variable.first for variable in variables if variable.has_initializer})
    for kernel in kernels:
        first, last = kernel.declaration.body or (0, 0)
        kernel.has_threadgroup_variables = any(first < variable.first < last for variable in variables)
    overloads, space_types = Overloads(program), SpaceTypes(program)
    substitute_function_constants(program, constants or {})
    erase_attributes(program)
    declare_constants(program)
    accesses = find_unaligned_accesses(program)
    _mark_kernels(program)
    originals = [token.text for token in tokens]
    erase_address_spaces(program, spaces.claimed)
    space_types.write()
    drop_duplicates(program, originals, ("class", "variable"), must_agree=True)
    overloads.merge()
    rename_like_ours(program, kernels)
    mark_float_literals(tokens)
    name_outermost_scope(program)
    structs = find_anonymous_structs(program)
    name_captured_constants(program)
    adapt_dialect(program)
    count_components(program)
    rewrite_swizzles(program)
    wrap_conditionals(program)
    place_threadgroup_variables(program, variables)
    define_in_templates(program, structs)
    overloads.write()
    addresses = {kernel.name: _address(program, kernel) for kernel in kernels}
    _erase_instantiations(program)
    prelude = _TENSORS if tensors else ""
    if tensors and any(token.text == "convolution2d_descriptor" for token in tokens):
        prelude += _CONVOLUTIONS
    text = prelude + _print(tokens)
    accesses.apply()
    return Translation(text, kernels, addresses, included, prelude + _print(tokens) if accesses.count else text)


def _mark_kernels(program):
    """Makes kernels functions that are inlined into their entries."""
    tokens = program.tokens
    for declaration in program.declarations:
        if declaration.kind == "function":
            words = [i for i in range(declaration.head, declaration.name_at) if tokens[i].text == "kernel"]
            if words or "kernel" in declaration.attributes:
                erase(tokens, words[0], words[0] + 1) if words else None
                tokens[declaration.name_at - 1].text += " MSL_KERNEL"


def _address(program, kernel):
    """Returns a C++ expression for the kernel's address, in the scope where it was named."""
    named_at = kernel.named_at
    # A plain kernel gets its full name, since metal_stdlib may have a type or a function of the same name.
    place = "::".join(("MSL_ROOT", *named_at.scope, "")) if named_at.kind == "function" else ""
    address = "&" + place + program.text(named_at.name_at, kernel.name_end)
    if named_at.parameters is not None:
        # Sometimes only the types of the parameters tell the template's arguments, or tell a kernel from a function of
        # namespace metal that has the same name.
        types = [program.type_text(first, last) for first, last in program.split_parameters(*named_at.parameters)]
        return f"static_cast<void (*)({', '.join(types)})>({address})"
    return address


def _erase_instantiations(program):
    for declaration in program.declarations:
        if declaration.kind == "instantiation":
            erase(program.tokens, declaration.first, declaration.last)


def _print(tokens):
    """Returns the text of tokens, each on its own line of the source."""
    out = []
    file, line, previous = None, 0, None
    for token in tokens:
        if not token.text:
            continue
        if token.file != file or not 0 <= token.line - line <= 6:
            file, line, previous = token.file, token.line, None
            out.append(f'\n#line {line} "{file}"\n')
        elif token.line != line:
            out.append("\n" * (token.line - line))
            line, previous = token.line, None
        if previous is None:
            out.append(token.space)
        else:
            out.append(token.space or _separator(previous, token.text))
        out.append(token.text)
        line += token.text.count("\n")
        previous = token.text
    return "".join(out) + "\n"


def _separator(before, after):
    a, b = before[-1], after[0]
    if (a.isalnum() or a == "_" or a == '"') and (b.isalnum() or b == "_" or b == '"'):
        return " "
    return " " if a in _FUSING and b in _FUSING else ""


def _entries(kernels, addresses):
    out, table = ['#line 1 "msl_entries"\n'], []
    for i, kernel in enumerate(kernels):
        # The scope is that of the kernel's instantiation, so that its template arguments keep their meaning.
        scope = kernel.named_at.scope
        naming = f"constexpr auto msl_function_{i} = {addresses[kernel.name]};"
        out.append(f"namespace {'::'.join(scope)} {{ {naming} }}\n" if scope else naming + "\n")
        names = ", ".join(f'"{argument.name}"' for argument in kernel.arguments)
        out.append(f"static constexpr const char* msl_names_{i}[] = {{{names or 'nullptr'}}};\n")
        arguments = ["::".join((*scope, f"msl_function_{i}")), f"msl_names_{i}"]
        arguments += [_descriptor(argument, scope) for argument in kernel.arguments]
        name = kernel.name.replace("\\", "\\\\").replace('"', '\\"')
        flag = "true" if kernel.synchronizes else "false"
        table.append(f'  msl::kernel<{flag}, {", ".join(arguments)}>("{name}", {kernel.max_total_threads}),\n')
    out.append("static constexpr msl_abi::Kernel msl_kernels[] = {\n" + "".join(table) + "  {}\n};\n")
    out.append(f"MSL_LIBRARY(msl_kernels, {len(kernels)})\n")
    return "".join(out)


def _descriptor(argument, scope):
    if argument.tensor:
        descriptor = f"msl::tensor_buffer<{argument.index}, {argument.tensor[0]}>"
    elif argument.kind == "buffer":
        descriptor = f"msl::buffer<{argument.index}>"
    elif argument.kind == "threadgroup":
        descriptor = f"msl::threadgroup_argument<{argument.index}>"
    else:
        return f"msl::{argument.kind}"
    return f"msl::given<{'::'.join((*scope, argument.condition))}, {descriptor}>" if argument.condition else descriptor
