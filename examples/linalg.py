"""Batches of matrices factored, decomposed and solved by metalcore's own Metal kernels, checked in float64."""

import torch

import metalcore

if not torch.backends.mps.is_available():
    import metalcore.simulator

EPS = torch.finfo(torch.float32).eps


def main():
    torch.manual_seed(0)
    print("Linear algebra on mps, float32. Errors are the batch's worst, in float64, as Frobenius norms: the residual")
    print("over |A| (for systems over |A| |x| + |b|), and |QtQ - I| where there is a Q, U or V.\n")
    print(f"{'':>11} {'matrices':>12}   {'residual':>8}   {'orthogonality':>13}   {'bound':>7}   variant")
    for name, shape, residual_of in CASES:
        a = torch.randn(shape, device="mps")
        residual, q = residual_of(a)
        orthogonality = 0 if q is None else norm(q.mT @ q - torch.eye(q.shape[-1], dtype=torch.float64)).max()
        bound = 10 * max(shape[-2:]) * EPS
        assert residual < bound and orthogonality < bound
        variant = metalcore.explain(name, a, *[(*shape[:-1], 1)] * (name == "solve")).variant
        print(
            f"{name:>11} {'x'.join(map(str, shape)):>12}   {residual:8.1e}   "
            f"{'' if q is None else f'{orthogonality:.1e}':>13}   {bound:7.1e}   {variant}"
        )

    a = (torch.randn(64, 6, 6, device="mps") + 6 * torch.eye(6, device="mps")).requires_grad_()
    metalcore.slogdet(a).logabsdet.sum().backward()
    torch.testing.assert_close(a.grad, metalcore.inv(a).mT, rtol=1e-4, atol=1e-4)
    print("\nThe gradient of log |det A| is the inverse's transpose, by both functions. How one of them runs:\n")
    print(metalcore.explain("svd", (4, 100, 60)))


def norm(a):
    return a.norm(dim=(-2, -1))


def qr(a):
    q, r = (t.cpu().double() for t in metalcore.qr(a))
    a = a.cpu().double()
    return (norm(a - q @ r) / norm(a)).max(), q


def svd(a):
    u, s, vh = (t.cpu().double() for t in metalcore.svd(a, full_matrices=False))
    a = a.cpu().double()
    return (norm(a - u * s[..., None, :] @ vh) / norm(a)).max(), u


def eigh(a):
    a = a + a.mT
    eigenvalues, eigenvectors = (t.cpu().double() for t in metalcore.eigh(a))
    a = a.cpu().double()
    return (norm(a @ eigenvectors - eigenvectors * eigenvalues[..., None, :]) / norm(a)).max(), eigenvectors


def cholesky(a):
    a = a @ a.mT / a.shape[-1] + torch.eye(a.shape[-1], device=a.device)
    factor, a = metalcore.cholesky(a).cpu().double(), a.cpu().double()
    return (norm(a - factor @ factor.mT) / norm(a)).max(), None


def solve(a):
    b = torch.randn(*a.shape[:-1], 1, device=a.device)
    a64, b64, x64 = (t.cpu().double() for t in (a, b, metalcore.solve(a, b)))
    return (norm(a64 @ x64 - b64) / (norm(a64) * norm(x64) + norm(b64))).max(), None


CASES = [
    ("qr", (256, 8, 8), qr),
    ("qr", (32, 48, 32), qr),
    ("qr", (4, 160, 120), qr),
    ("qr", (4000, 36), qr),
    ("svd", (256, 16, 16), svd),
    ("svd", (4, 100, 60), svd),
    ("eigh", (256, 16, 16), eigh),
    ("eigh", (2, 140, 140), eigh),
    ("cholesky", (64, 30, 30), cholesky),
    ("cholesky", (3, 200, 200), cholesky),
    ("solve", (1000, 3, 3), solve),
    ("solve", (16, 100, 100), solve),
]

if __name__ == "__main__":
    main()
