"""A step of optim.AdamW on many parameters against torch.optim.AdamW's fused and foreach steps on the CPU."""

import torch
from _timing import Table, alternate, options, start

arguments = options(__doc__)
device = start(arguments)
import metalcore  # noqa: E402


def stepper(cls, where, dtype, count, side, **kwargs):
    parameters = [torch.nn.Parameter(torch.randn(side, side, device=where).to(dtype)) for _ in range(count)]
    for parameter in parameters:
        parameter.grad = torch.randn_like(parameter)
    return cls(parameters, **kwargs).step


table = Table("parameters", "dtype", "against")
for count, side in [(16, 32), (4, 128)] if arguments.quick else [(1000, 4), (64, 64), (8, 512), (4, 1024)]:
    for dtype in (torch.float32, torch.bfloat16):
        for against in ("fused", "foreach"):
            ours = stepper(metalcore.optim.AdamW, device, dtype, count, side)
            theirs = stepper(torch.optim.AdamW, "cpu", dtype, count, side, **{against: True})
            times = alternate(ours, theirs, arguments.rounds)
            table.row(f"{count} of {side}x{side}", str(dtype)[6:], against, times=times)
