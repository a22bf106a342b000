"""QR of batches of matrices by metalcore's own Metal kernels, checked against float64."""

import torch

import metalcore

if not torch.backends.mps.is_available():
    import metalcore.simulator  # noqa: F401  (makes torch.device("mps") work here)

EPS = torch.finfo(torch.float32).eps

print("QR on mps, float32; residuals computed in float64\n")
print(f"{'batch':>14}   {'|QtQ - I|':>9}   {'|A - QR|/|A|':>12}   {'bound':>7}   variant")
torch.manual_seed(0)
for shape in [(256, 8, 8), (32, 48, 32), (4, 160, 120), (4000, 36)]:
    a = torch.randn(shape, device="mps")
    q, r = metalcore.qr(a)

    a64, q64, r64 = (t.cpu().double() for t in (a, q, r))
    orthogonality = (q64.mT @ q64 - torch.eye(q64.shape[-1], dtype=torch.float64)).norm(dim=(-2, -1)).max()
    residual = ((a64 - q64 @ r64).norm(dim=(-2, -1)) / a64.norm(dim=(-2, -1))).max()
    bound = 10 * shape[-1] * EPS
    assert orthogonality < bound and residual < bound
    name = "x".join(map(str, shape))
    print(f"{name:>14}   {orthogonality:9.1e}   {residual:12.1e}   {bound:7.1e}   {metalcore.explain('qr', a).variant}")

print("\nHow the last one runs:")
print(metalcore.explain("qr", a))
