"""silu and gelu, forward and backward, against PyTorch's CPU op on the same memory size and as many threads."""

import torch
import torch.nn.functional as F
from _timing import Table, alternate, options, start

arguments = options(__doc__)
device = start(arguments)
import metalcore  # noqa: E402

ops, aten = torch.ops.metalcore, torch.ops.aten
CASES = {
    "silu": (metalcore.silu, F.silu),
    "gelu": (metalcore.gelu, F.gelu),
    "gelu tanh": (lambda x: metalcore.gelu(x, approximate="tanh"), lambda x: F.gelu(x, approximate="tanh")),
    "silu backward": (lambda x: ops.silu_backward(x, x), lambda x: aten.silu_backward(x, x)),
    "gelu backward": (lambda x: ops.gelu_backward(x, x, "none"), lambda x: aten.gelu_backward(x, x)),
}
size = 1 << 16 if arguments.quick else 1 << 22
table = Table("op", "dtype", "elements")
for name, (ours, theirs) in CASES.items():
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        host = torch.randn(size).to(dtype)
        x = host.to(device)
        times = alternate(lambda: ours(x), lambda: theirs(host), arguments.rounds)
        table.row(name, str(dtype)[6:], size, times=times)
