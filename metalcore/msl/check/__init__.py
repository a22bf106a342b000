"""A check of Metal programs as strict as Apple's compiler: metalcore.msl.check.check().

C++ accepts programs that MSL does not, so the simulator may run a program that a Mac does not compile. Here Clang reads
the program as C++ for OpenCL, whose address spaces are those of MSL, and as C++14 with vectors of its own, both with
declarations of metal_stdlib (include/), and once more in the order in which it is written (raw.py). Rules that Clang
does not know are checked on the tokens (declarations.py, kernel_arguments.py) and on its
syntax tree (tree.py).
"""

import re

from ..errors import TOO_DEEP, MSLError
from ..language.address_spaces import find_address_spaces
from ..language.parse import ParsedProgram
from ..language.preprocess import preprocess
from ..language.rewrite import refuse_unsupported
from ..language.rules import refuse_unknown_attributes
from ..language.threadgroup import find_threadgroup_variables
from .clang import Finding, run_clang, version
from .declarations import declaration_findings
from .kernel_arguments import lines_of_unknown_values
from .raw import raw_text
from .text import clang_text
from .tree import tree_findings

__all__ = ["Finding", "check"]

# Apple's compiler does not report breaches of these: it compiles recursion (MLX has such a function) although the
# specification forbids it, pointers to functions that inlining resolves (PyTorch has them), and too much threadgroup
# memory, which fails only when a pipeline is made.
_STRICT_TREE_RULES = ("recursion", "threadgroup-memory", "function-pointer", "threadgroup-constructor")


def check(source, *, filename="program_source", include_dirs=(), defines=(), strict=True, std="metal3.1"):
    """Finds what is wrong with an MSL program.

    Args:
        source: MSL text.
        filename: its name in findings; `#include "…"` is looked for beside it.
        include_dirs: where `#include` looks, in order.
        defines: macros as ``NAME value`` strings.
        strict: report also what Apple's compiler accepts: literals without a type, implicit conversion from float to
            half, recursion, pointers to functions, more than 32 KiB of threadgroup variables, and what it warns about
            as newer than C++14.
        std: the version of MSL: "metal3.1", as which metalcore compiles on a Mac, "metal3.2", "metal4.0" or "metal4.1".

    Returns:
        list of Finding, sorted by place; empty where nothing is wrong.

    Raises:
        CompilerNotFoundError: there is no Clang 15 or newer.
        ValueError: `std` is none of these versions.

    Example:
        >>> metalcore.msl.check.check("kernel void one(device float* x [[buffer(0)]]) { x[0] = 1.0f; }")
        []
    """
    defines = [f"__METAL_VERSION__ {version(std)}", *defines]
    try:
        tokens, _, tensors = preprocess(source, include_dirs=include_dirs, filename=filename, defines=defines)
        program = ParsedProgram(tokens)
        refuse_unsupported(program)
        refuse_unknown_attributes(program)
        variables = find_threadgroup_variables(program, find_address_spaces(program))
    except MSLError as error:
        return [_refused(str(error), filename)]
    except RecursionError:
        return [Finding(filename, 1, 0, "language", TOO_DEEP)]
    findings = declaration_findings(program, variables, strict=strict, std=std)
    if tensors and version(std) < 400:
        findings.append(Finding(*tensors, 0, "version", "tensors are new in MSL 4.0, and on a Mac in macOS 26"))
    unknown = lines_of_unknown_values(program)  # where an initializer may be no constant
    headers = '#include "tensor.h"\n' if tensors else ""
    raw = raw_text(program, headers)
    text, lenient = clang_text(program, variables, headers)
    errors, tree, more = run_clang(text, raw, strict=strict, std=std)
    errors = [
        error for error in errors if error.rule != "constant-initializer" or (error.file, error.line) not in unknown
    ]
    if not errors:  # the tree of a program with errors has holes
        errors = tree_findings(tree, lenient)
    places = {(error.file, error.line) for error in errors}
    errors += [error for error in more if (error.file, error.line) not in places]
    if not strict:
        errors = [finding for finding in errors if finding.rule not in _STRICT_TREE_RULES]
    told = {(finding.file, finding.line, finding.rule) for finding in findings}
    return sorted({*findings, *(error for error in errors if (error.file, error.line, error.rule) not in told)})


def _refused(message, filename):
    match = re.match(r"(.*?):(\d+): error: (.*)", message, re.DOTALL)
    if match is None:
        return Finding(filename, 1, 0, "language", message)
    rule = "double" if "'double'" in match[3] else "language"
    return Finding(match[1], int(match[2]), 0, rule, match[3])
