"""qr of batches and of single matrices against torch.linalg.qr (LAPACK) on as many threads, and the variant taken."""

import torch
from _timing import Table, alternate, options, start

arguments = options(__doc__)
device = start(arguments)
import metalcore  # noqa: E402

SHAPES = [(1024, 8, 8), (256, 16, 16), (64, 32, 32), (16, 128, 64), (8, 128, 128), (4000, 36), (512, 512)]
QUICK = [(64, 8, 8), (8, 32, 32), (2, 128, 64)]
table = Table("shape", "variant", theirs="torch.linalg CPU")
for shape in QUICK if arguments.quick else SHAPES:
    host = torch.randn(shape)
    a = host.to(device)
    times = alternate(lambda: metalcore.qr(a), lambda: torch.linalg.qr(host), min(arguments.rounds, 7))
    table.row("x".join(map(str, shape)), metalcore.explain("qr", a).variant, times=times)
