"""Programs that the tests of <metal_stdlib> run on the simulator also compile for CUDA, and as a whole."""

import contextlib

import pytest

from metalcore.msl.errors import CompilerNotFoundError
from metalcore.msl.nvidia import nvrtc
from metalcore.msl.runtime import library, signatures


@pytest.fixture(scope="module")
def compiles_for_cuda():
    """Every program of the module's tests goes through NVRTC too, where it is installed. All kernels of a program are
    compiled at once, since the tests run all."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("metalcore.msl.runtime.targets.COMPILED_AT_ONCE", 1000)
        with contextlib.suppress(CompilerNotFoundError):
            patch.setattr("metalcore.msl.runtime.library.ShaderProgram", _for_cuda_too(nvrtc.find()))
        yield


def _for_cuda_too(compiler):
    class ShaderProgram(library.ShaderProgram):
        def __init__(self, *arguments):
            super().__init__(*arguments)
            requests = [(name, signatures.probable(self.arguments(name))) for name in self.names]
            text, _ = self.translation.cuda_source(requests)
            compiler.compile(text, 90, msl=self.source)

    return ShaderProgram
