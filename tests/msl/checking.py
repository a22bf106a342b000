"""Helpers that the tests of the check share."""

import os

import pytest

from metalcore.msl.check import check
from metalcore.msl.check.clang import find_clang
from metalcore.msl.errors import CompilerNotFoundError

try:
    find_clang()
    _missing = ""
except CompilerNotFoundError as error:
    _missing = str(error)

# Continuous integration has Clang, or these tests fail there.
needs_clang = pytest.mark.skipif(bool(_missing) and not os.environ.get("CI"), reason=_missing)

HEAD = "#include <metal_stdlib>\nusing namespace metal;\n"


def assert_found(body, rule, **options):
    """Checks a program, HEAD and `body`: every line that ends with //! has a finding of this rule, and no other has."""
    source = HEAD + body
    findings = check(source, filename="kernel.metal", **options)
    told = "\n".join(map(str, findings))
    expected = {i for i, line in enumerate(source.splitlines(), 1) if line.endswith("//!")}
    assert {finding.line for finding in findings} == expected, told
    assert {finding.rule for finding in findings} == {rule}, told
    for finding in findings:
        assert finding.file == "kernel.metal"
        assert str(finding).startswith(f"kernel.metal:{finding.line}:") and str(finding).endswith(f"[{rule}]")
        assert "__" not in finding.message, "Clang's words, not MSL's"


def assert_twins_are_clean(faults):
    """Checks the clean twins of {name: (rule, program, what stands in place of its line with //!)} as one program."""
    twins = []
    for i, (_, body, clean) in enumerate(faults.values()):
        lines = [clean if line.endswith("//!") else line for line in body.splitlines()]
        twins.append(f"namespace twin_{i} {{\n" + "\n".join(lines) + "\n}\n")
    findings = check(HEAD + "".join(twins))
    assert not findings, "\n".join(map(str, findings))
