"""softmax and rms_norm, forward and backward, against PyTorch's CPU ops on as many threads."""

import torch
import torch.nn.functional as F
from _timing import Table, alternate, options, start

arguments = options(__doc__)
device = start(arguments)
import metalcore  # noqa: E402

elements = 1 << 16 if arguments.quick else 1 << 21
table = Table("op", "dtype", "shape")


def forward_backward(function, x):
    x = x.detach().requires_grad_()
    grad = torch.ones_like(x)
    return lambda: torch.autograd.grad(function(x), x, grad)


for columns in (128, 1024, 4096, 32768):
    shape = (elements // columns, columns)
    for dtype in (torch.float32, torch.bfloat16):
        host, weight = torch.randn(shape).to(dtype), torch.randn(columns).to(dtype)
        x, w = host.to(device), weight.to(device)
        cases = {
            "softmax": (lambda a, w: metalcore.softmax(a, -1), lambda a, w: F.softmax(a, -1)),
            "rms_norm": (lambda a, w: metalcore.rms_norm(a, (columns,), w), lambda a, w: F.rms_norm(a, (columns,), w)),
        }
        for name, (ours, theirs) in cases.items():
            times = alternate(lambda: ours(x, w), lambda: theirs(host, weight), arguments.rounds)
            table.row(name, str(dtype)[6:], f"{shape[0]}x{shape[1]}", times=times)
            times = alternate(forward_backward(lambda a: ours(a, w), x),
                              forward_backward(lambda a: theirs(a, weight), host), arguments.rounds)
            table.row(name + " +bwd", str(dtype)[6:], f"{shape[0]}x{shape[1]}", times=times)
