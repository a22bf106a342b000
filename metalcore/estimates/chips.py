"""Apple's chips as the model knows them: figures that others published, each with its source.

Clocks and bytes a cycle of M1 and M2 are philipturner/metal-benchmarks', memory's bandwidth is Apple's specification
(applegpuinfo, gpu-forge), caches of later chips are gpu-forge's and chipsandcheese.com's. Sources disagree about M4's
clock: 1.38 (applegpuinfo) or 1.8 GHz (gpu-forge). By estimates with 1.38 GHz, 12 held-out measurements of kernels that
its cores bound take 1.2 to 1.4 times as long as they did.
"""

from __future__ import annotations

import re
from typing import NamedTuple

# (half-registers of 16 bits, threads): a kernel of at most so many half-registers may have so many threads a
# threadgroup. From Mesa's driver for Apple's GPUs, src/asahi/compiler/agx_performance.c.
OCCUPANCY = (
    (104, 1024), (112, 896), (128, 832), (136, 768), (144, 704), (160, 640), (184, 576), (208, 512), (232, 448),
    (256, 384),
)  # fmt: skip


class Chip(NamedTuple):
    """A chip's GPU.

    Attributes:
        name: as users write it, such as "m1-pro".
        generation: 1 to 5.
        cores: of the GPU.
        clock: in GHz.
        bandwidth: of memory, in GB/s.
        cache: the last level's, in MB.
        l2: the GPU's own, in KB.

    Example:
        >>> metalcore.estimate(metalcore.relu, torch.ones(64, device="mps"), gpu="m3-max-30").chip.cores
        30
    """

    name: str
    generation: int
    cores: int
    clock: float
    bandwidth: float
    cache: float
    l2: float

    @property
    def family(self) -> str:
        """The family of GPUs that tuning rows are named for."""
        return {1: "apple7", 2: "apple8", 3: "apple9", 4: "apple9", 5: "apple10"}[self.generation]


CHIPS = {
    chip.name: chip
    for chip in (
        Chip("m1", 1, 8, 1.278, 68.3, 8, 768),
        Chip("m1-pro", 1, 16, 1.296, 204.8, 24, 256),
        Chip("m1-max", 1, 32, 1.296, 409.6, 48, 512),
        Chip("m1-ultra", 1, 64, 1.296, 819.2, 96, 1024),
        Chip("m2", 2, 10, 1.398, 102.4, 8, 1536),
        Chip("m2-pro", 2, 19, 1.398, 204.8, 24, 3072),
        Chip("m2-max", 2, 38, 1.398, 409.6, 48, 6144),
        Chip("m2-ultra", 2, 76, 1.398, 819.2, 96, 12288),
        Chip("m3", 3, 10, 1.38, 102.4, 8, 1536),
        Chip("m3-pro", 3, 18, 1.38, 153.6, 12, 3072),
        Chip("m3-max", 3, 40, 1.38, 409.6, 48, 6144),
        Chip("m3-ultra", 3, 80, 1.38, 819.2, 96, 12288),
        Chip("m4", 4, 10, 1.8, 120.0, 8, 1536),
        Chip("m4-pro", 4, 20, 1.8, 273.0, 24, 3072),
        Chip("m4-max", 4, 40, 1.8, 546.0, 48, 6144),
        Chip("m5", 5, 10, 1.578, 153.6, 8, 1536),
        Chip("m5-pro", 5, 20, 1.578, 307.0, 24, 3072),
        Chip("m5-max", 5, 40, 1.578, 614.0, 48, 6144),
    )
}


def find(name: str, cores: int = 0) -> Chip:
    """Returns the chip of a name such as "m1", "M2 Ultra" or "m3-max-30", where the last number is that of cores.

    Raises:
        ValueError: there is no such chip.
    """
    words = re.sub(r"[\s_]+", "-", name.strip().lower())
    match = re.fullmatch(r"(m\d(?:-(?:pro|max|ultra))?)(?:-(\d+))?", words)
    if not match or match[1] not in CHIPS:
        known = ", ".join(CHIPS)
        raise ValueError(f"gpu is {name!r}, and must be one of {known}, or one of these with -CORES behind it")
    count = cores or int(match[2] or 0)
    chip = CHIPS[match[1]]
    if count < 0 or count > 128:
        raise ValueError(f"gpu {name!r} has {count} cores; chips have up to 128")
    return chip._replace(cores=count) if count else chip
