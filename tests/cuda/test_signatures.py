"""Python asks for the attributes of the same signature that a dispatch compiles."""

from pathlib import Path

import metalcore

PROGRAM = f"""
sys.path.insert(0, {str(Path(metalcore.__file__).parent)!r})
from msl.runtime import signatures

compiler = Compiler()
for size in (1, 4, 16, 17, 255, 256, 257, 512, 513, 1024, 2049, 4096):
    buffers = [(4096, 8), bytes(size), None, [(8192, 8)] * ((size + 7) // 8)]
    expected = signatures.of_call(buffers, [16, 32])
    C.cuda_attributes(7, f"kernel{{size}}", expected, 0)
    C.cuda_dispatch(7, f"kernel{{size}}", 0, buffers, [16, 32], (1, 1, 1), (1, 1, 1))
print(len(compiler.calls))
"""


def test_one_compilation_serves_both(run):
    assert run(PROGRAM).split() == ["12"]
