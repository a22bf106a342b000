"""Rules that are checked on tokens, before Clang reads the program: those of rules.py, and the check's own."""

import functools
import re
from itertools import chain

from ..errors import MSLError
from ..language.kernels import find_kernels
from ..language.rules import Breach, breaches, is_kernel
from ..language.tokens import CLOSING
from .clang import INCLUDE, Finding, version
from .kernel_arguments import argument_breaches

_STAGES = {"vertex": "vertex functions", "fragment": "fragment functions"}
_TYPES = {"wchar_t", "char8_t", "char16_t", "char32_t", "_Complex", "_Imaginary", "__float128", "__fp16", "_Float16"}
_BEFORE_LAMBDA = {"=", "(", ",", "return", "{", ";", "&&", "||", "?", ":", "+", "-", "}"}
# Functions of the standard library that are new have MSL_SINCE_3_2 in include/.
_NEW_WORDS = {"coherent": 320, "int4b_format": 400, "uint4b_format": 400}
_NEW_WORDS |= dict.fromkeys(
    (
        *("int2b_format", "uint2b_format", "metal_fp4_e2m1_format", "metal_fp8_e4m3_format", "metal_fp8_e5m2_format"),
        *("metal_fp8_ue8m0_format", "tensor_blockwise", "tensor_plane_scales"),
    ),
    410,
)
# The macOS that has a word's version of MSL; 26 has 4.0, as the finding of <metal_tensor> tells.
_NEW_SYSTEMS = {"int4b_format": "26.4", "uint4b_format": "26.4"}
_NEW_SYSTEMS |= {word: "27" for word, since in _NEW_WORDS.items() if since == 410}
_NEW_ATTRIBUTES = {"required_threads_per_threadgroup": 400}


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
        if token.text in _STAGES and token.kind == "id":
            message = f"'{token.text}' is a keyword of MSL, for {_STAGES[token.text]}, and cannot be a name"
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


def standard_breaches(program, standard):
    """Yields breaches in a program's tokens that a newer version of MSL would accept."""
    attribute = 0
    for i, token in enumerate(program.tokens):
        attribute = max(attribute, program.attribute_end(i) or 0)
        since = (_NEW_ATTRIBUTES if i < attribute else _NEW_WORDS).get(token.text, 0)
        if since > version(standard):
            newer = f"{since // 100}.{since // 10 % 10}"
            if token.text in _NEW_SYSTEMS:
                newer += f", and on a Mac in macOS {_NEW_SYSTEMS[token.text]}"
            yield Breach(i, "version", f"'{token.text}' is new in MSL {newer}, and the program is read as {standard}")


class _Declarations:
    def __init__(self, program, variables, strict, std):
        self.program = program
        self.tokens = program.tokens
        self.variables = variables
        self.strict = strict
        self.std = std
        self.findings = []

    def find(self, i, rule, message):
        token = self.tokens[i]
        self.findings.append(Finding(token.file, token.line, 0, rule, message))

    def check(self):
        found = (
            breaches(self.program, strict=True),
            argument_breaches(self.program),
            construct_breaches(self.program, self.variables, self.strict, lambdas=version(self.std) >= 320),
            standard_breaches(self.program, self.std),
        )
        for breach in chain(*found):
            self.find(*breach)
        for i, token in enumerate(self.tokens):
            if token.kind == "num":
                self.literal(i, token.text.lower())
        self.threadgroup_variables()
        return self.findings

    def literal(self, i, text):
        is_float = "." in text or ("e" in text and not text.startswith("0x"))
        if is_float and text.endswith("l"):
            self.find(i, "double", f"the literal {self.tokens[i].text} is a 'long double', which Metal does not have")
        elif self.strict and is_float and not text.endswith(("f", "h")):
            self.find(i, "literal", f"the literal {self.tokens[i].text} has no type; write {self.tokens[i].text}f or h")

    def threadgroup_variables(self):
        for declaration in self.program.walk():
            if declaration.kind != "function" or declaration.body is None or is_kernel(self.program, declaration):
                continue
            for variable in self.variables:
                if declaration.body[0] < variable.first < declaration.body[1]:
                    name = self.tokens[variable.variables[0].name].text
                    message = f"threadgroup variable '{name}' is in '{declaration.name}', which is no kernel"
                    self.find(variable.first, "threadgroup-scope", message)


def declaration_findings(program, variables, *, strict, std):
    """Returns findings in a parsed program that clang_text() has not changed.

    Args:
        variables: its threadgroup variables, from find_threadgroup_variables().
        strict: apply this project's own rules too.
        std: the version of MSL, of standard.STANDARDS.
    """
    findings = _Declarations(program, variables, strict, std).check()
    try:
        find_kernels(program)
    except MSLError as error:
        if match := re.match(r"(.*?):(\d+): error: (.*)", str(error), re.DOTALL):
            findings.append(Finding(match[1], int(match[2]), 0, "kernel", match[3]))
        else:  # an error without a place is none of the program's
            raise
    return findings
