"""What a call costs besides its arithmetic: ops on 16 elements, against PyTorch's op on a CPU tensor of that size."""

import torch
import torch.nn.functional as F
from _timing import Table, alternate, options, start

arguments = options(__doc__)
device = start(arguments)
import metalcore  # noqa: E402

host, weight = torch.randn(1, 16), torch.randn(16)
x, w = host.to(device), weight.to(device)
CASES = {
    "silu": (lambda: metalcore.silu(x), lambda: F.silu(host)),
    "gelu": (lambda: metalcore.gelu(x), lambda: F.gelu(host)),
    "softmax": (lambda: metalcore.softmax(x, -1), lambda: F.softmax(host, -1)),
    "rms_norm": (lambda: metalcore.rms_norm(x, (16,), w), lambda: F.rms_norm(host, (16,), weight)),
    "ops.silu (no routing)": (lambda: torch.ops.metalcore.silu(x), lambda: torch.ops.aten.silu(host)),
}
table = Table("call", unit="us")
with torch.no_grad():
    for name, (ours, theirs) in CASES.items():
        table.row(name, times=alternate(ours, theirs, arguments.rounds, calls=200 if arguments.quick else 2000))
    with metalcore.enable_pytorch_overrides("silu"):
        times = alternate(lambda: F.silu(x), lambda: F.silu(host), arguments.rounds, calls=200)
    table.row("F.silu, overridden", times=times)
