"""Rules that are checked before Clang reads the program: those of rules.py, and the check's own on literals and
threadgroup variables."""

import re
from itertools import chain

from ..errors import MSLError
from ..language.kernels import find_kernels
from ..language.rules import breaches, is_kernel
from .constructs import construct_breaches
from .finding import Finding
from .kernel_arguments import argument_breaches
from .standard import standard_breaches, version


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
        match = re.match(r"(.*?):(\d+): error: (.*)", str(error), re.DOTALL)
        findings.append(Finding(match[1], int(match[2]), 0, "kernel", match[3]))
    return findings
