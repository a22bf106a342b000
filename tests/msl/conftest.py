"""Programs that the tests of <metal_stdlib> run on the simulator also compile for CUDA."""

import pytest

from metalcore.msl.errors import CompilerNotFoundError
from metalcore.msl.nvidia import nvrtc
from metalcore.msl.runtime import library, signatures


@pytest.fixture(scope="module")
def compiles_for_cuda():
    """Every program of the module's tests goes through NVRTC too, where it is installed."""
    try:
        compiler = nvrtc.find()
    except CompilerNotFoundError:
        yield
        return

    class ShaderProgram(library.ShaderProgram):
        def __init__(self, *arguments):
            super().__init__(*arguments)
            requests = [(name, signatures.probable(self.arguments(name))) for name in self.names]
            text, _ = self.translation.cuda_source(requests)
            compiler.compile(text, 90, msl=self.source)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("metalcore.msl.runtime.library.ShaderProgram", ShaderProgram)
        yield
