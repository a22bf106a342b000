"""metalcore under torch.distributed: DTensor, DDP, FSDP2, tensor parallelism.

Importing it makes DTensor know how metalcore's operators run on shards (rules), and lets gloo and FSDP2 take `mps`
tensors (mps). `import metalcore` does so by itself where torch.distributed.tensor is imported, before or after.
Programs without it, such as DDP's on `mps`, import this module.
"""

from . import mps, rules

__all__ = ["rules"]

rules.register()
mps.register_collectives()
mps.complete()
mps.watch_accelerate()
