"""How many registers a kernel takes. NVRTC stands for Apple's compiler, which runs on Macs alone."""

from __future__ import annotations

import json

from ..msl import cache
from ..msl.errors import CompilerNotFoundError, MSLError
from ..msl.nvidia import nvrtc
from ..msl.runtime import resources


def registers_of(translation, kernel: str) -> int | None:
    """Returns how many registers of 32 bits a thread of a kernel has where nothing bounds them, or None where NVRTC is
    not there or does not take the kernel. The cache of programs keeps the number."""

    def make(path):
        try:
            (registers, *_) = resources.of(translation, described, bounds)[kernel]
        except MSLError:
            registers = None
        path.write_text(json.dumps(registers), encoding="utf-8")

    try:
        compiler = nvrtc.find()
    except CompilerNotFoundError:
        return None
    described, bounds = {kernel: translation.cuda_kernels()[kernel]}, {kernel: None}
    text, _ = resources.source(translation, described, bounds)
    key = cache.digest(text, *resources.FLAGS, cache.translator_digest(), str(compiler.version))
    return json.loads(cache.content(f"{key}.registers.json", make))
