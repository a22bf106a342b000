"""Rules on kernels and declarations that show before Clang reads the program: attributes, indices, names, literals."""

import re

from ..errors import MSLError
from ..integers import constant_value
from ..kernels import BUILTINS, find_kernels
from .finding import Finding

MAX_INDEX = 30
MAX_THREADS = 1024
_VECTOR = {"thread_position_in_grid", "thread_position_in_threadgroup", "threadgroup_position_in_grid",
           "threads_per_grid", "grid_size", "grid_origin", "threads_per_threadgroup", "threadgroups_per_grid",
           "dispatch_threads_per_threadgroup"}  # fmt: skip
_INTEGERS = re.compile(r"(metal::)?(uint|ushort)([23])?")
_SPACES = {"device", "constant", "thread", "threadgroup"}
_FORBIDDEN = {
    "goto": "goto is not part of MSL",
    "dynamic_cast": "dynamic_cast is not part of MSL",
    "typeid": "typeid is not part of MSL",
    "virtual": "virtual functions are not part of MSL",
    "thread_local": "thread_local is not part of MSL",
}


class _Declarations:
    def __init__(self, program, variables, strict):
        self.program = program
        self.tokens = program.tokens
        self.variables = variables
        self.strict = strict
        self.findings = []
        self.aliases = {}
        for declaration in program.walk():
            if declaration.kind == "alias":
                words = [token.text for token in self.tokens[declaration.first : declaration.last]]
                if words[0] == "using" and "=" in words:
                    self.aliases[declaration.name] = "".join(words[words.index("=") + 1 : -1])
                elif words[0] == "typedef":
                    self.aliases[declaration.name] = "".join(words[1:-2])

    def find(self, i, rule, message):
        token = self.tokens[i]
        self.findings.append(Finding(token.file, token.line, 0, rule, message))

    def check(self):
        for i, token in enumerate(self.tokens):
            if token.kind == "id" and token.text in _FORBIDDEN:
                self.find(i, "virtual" if token.text == "virtual" else "language", _FORBIDDEN[token.text])
            if self.strict and token.kind == "num":
                self.literal(i, token.text.lower())
        for declaration in self.program.walk():
            if declaration.kind == "variable":
                self.variable(declaration)
            elif declaration.kind == "function" and self.is_kernel(declaration):
                self.kernel(declaration)
            if "max_total_threads_per_threadgroup" in declaration.attributes:
                self.max_threads(declaration)
        self.threadgroup_variables()
        self.host_names()
        return self.findings

    def is_kernel(self, declaration):
        head = self.tokens[declaration.head : declaration.name_at]
        return "kernel" in declaration.attributes or any(token.text == "kernel" for token in head)

    def literal(self, i, text):
        is_float = "." in text or ("e" in text and not text.startswith("0x"))
        if is_float and not text.endswith(("f", "h")):
            self.find(i, "literal", f"the literal {self.tokens[i].text} has no type; write {self.tokens[i].text}f or h")

    def variable(self, declaration):
        words = {token.text for token in self.tokens[declaration.head : declaration.last]}
        if declaration.name_at is None or "constant" in words or words & {"friend", "extern", "asm", "__asm"}:
            return
        name = declaration.name
        if declaration.in_class:
            if "static" in words:
                self.find(declaration.name_at, "constant-space", f"static member '{name}' must be in constant")
        elif not words & {"enum", "struct", "class", "union"}:
            self.find(declaration.name_at, "constant-space", f"'{name}' is at program scope and must be in constant")

    def threadgroup_variables(self):
        for declaration in self.program.walk():
            if declaration.kind != "function" or declaration.body is None or self.is_kernel(declaration):
                continue
            for variable in self.variables:
                if declaration.body[0] < variable.first < declaration.body[1]:
                    name = self.tokens[variable.variables[0].name].text
                    message = f"threadgroup variable '{name}' is in '{declaration.name}', which is no kernel"
                    self.find(variable.first, "threadgroup-scope", message)

    def host_names(self):
        """Kernels that the host cannot tell apart. (find_kernels() keeps the first of a name.)"""
        seen = {}
        for declaration in self.program.declarations:
            argument = declaration.attributes.get("host_name")
            if argument:
                name = "".join(token.text for token in argument)
                if name in seen:
                    where = f"{self.tokens[seen[name]].file}:{self.tokens[seen[name]].line}"
                    self.find(declaration.first, "host-name", f"the host name {name} is taken by {where}")
                seen.setdefault(name, declaration.first)

    def max_threads(self, declaration):
        argument = declaration.attributes["max_total_threads_per_threadgroup"]
        parameters = {token.text for first, last in declaration.templates for token in self.tokens[first:last]}
        value = constant_value(self.program, argument)
        attribute = "max_total_threads_per_threadgroup"
        if value is None and not any(token.text in parameters for token in argument):
            self.find(declaration.first, "max-threads", f"the argument of {attribute} is no integer constant")
        elif value is not None and not 0 < value <= MAX_THREADS:
            self.find(declaration.first, "max-threads", f"{attribute} is {value}, and must be 1 to {MAX_THREADS}")

    # Arguments of kernels -------------------------------------------------------------------------------------------

    def kernel(self, declaration):
        taken, widths = {}, {}
        for first, last in self.program.split_parameters(*declaration.parameters):
            attributes = self.program.read_attributes(first, last)
            words = {token.text for token in self.tokens[first:last]}
            name_at = self.program.declarator_name(first, last)
            name = self.tokens[name_at].text if name_at is not None else ""
            where = f"argument '{name}' of kernel '{declaration.name}'"
            if words & {"*", "&"} and "thread" in words:
                self.find(first, "address-space", f"{where} is in thread")
            elif words & {"*", "&"} and not words & _SPACES:
                self.find(first, "address-space", f"{where} has no address space")
            for kind in ("buffer", "threadgroup"):
                if kind in attributes:
                    index = constant_value(self.program, attributes[kind])
                    self.index(first, where, kind, index, "function_constant" in attributes, taken)
            for attribute in attributes:
                if attribute in BUILTINS:
                    self.builtin(first, last, name_at, where, attribute, widths)
        if len(set(widths.values())) > 1:
            different = ", ".join(f"{attribute} has {width}" for attribute, width in widths.items())
            message = f"positions in kernel '{declaration.name}' differ in their number of components: {different}"
            self.find(declaration.name_at, "attribute-type", message)

    def index(self, i, where, kind, index, conditional, taken):
        if index is None:
            return
        if not 0 <= index <= MAX_INDEX:
            self.find(i, "argument-index", f"{where} has {kind} index {index}, and {MAX_INDEX} is the last")
        other = taken.get((kind, index))
        # Arguments that depend on function constants may share an index.
        if other and not (conditional and other[1]):
            self.find(i, "argument-index", f"{where} has {kind} index {index}, as {other[0]} has")
        taken.setdefault((kind, index), (where, conditional))

    def builtin(self, first, last, name_at, where, attribute, widths):
        type_, i = "", first
        while i < last:
            end = self.program.attribute_end(i)
            if end is None and i != name_at and self.tokens[i].text not in ("const", "constexpr", "thread"):
                type_ += self.tokens[i].text
            i = end or i + 1
        while type_ in self.aliases:
            type_ = self.aliases[type_]
        match = _INTEGERS.fullmatch(type_)
        if match is None or (match[3] and attribute not in _VECTOR):
            wanted = "uint, ushort, or a vector of 2 or 3 of them" if attribute in _VECTOR else "uint or ushort"
            if type_ not in ("unsigned", "unsignedint", "unsignedshort", "uint32_t", "uint16_t"):
                self.find(first, "attribute-type", f"{where} is {attribute} and must be {wanted}, not {type_}")
        elif attribute in _VECTOR and attribute != "grid_origin":
            widths[attribute] = int(match[3] or 1)


def declaration_findings(program, variables, *, strict):
    """Findings in a program as parsed, before clang_text() has changed it.

    Args:
        variables: its threadgroup variables, from find_threadgroup_variables().
        strict: also rules that are this project's own.
    """
    findings = _Declarations(program, variables, strict).check()
    try:
        find_kernels(program)
    except MSLError as error:
        match = re.match(r"(.*?):(\d+): error: (.*)", str(error), re.DOTALL)
        findings.append(Finding(match[1], int(match[2]), 0, "kernel", match[3]))
    return findings
