"""The built-in kernels for NVIDIA GPUs: translated, for NVRTC to compile where they are used."""

from .families import families, with_includes
from .front_end import cuda, translator_files
from .places import KERNELS, ROOT


def cuda_programs(tasks, folder=KERNELS):
    """lib/cuda/<family>.cu, and what has to be known of the kernels beside it (.json)."""
    outputs = []
    for family, source in families(folder).items():
        program = tasks.add(
            f"lib/cuda/{family}.cu",
            [*with_includes(source, folder), *translator_files()],
            [],
            lambda output, source=source: cuda.build(source, output, include_dirs=[folder], root=ROOT),
        )
        outputs += [program, program.with_suffix(".json")]
    return outputs
