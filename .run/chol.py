import sys, time, torch, metalcore
dev = "cuda"
torch.manual_seed(0)
torch.backends.cuda.matmul.allow_tf32 = False
EPS = 2**-23
START = time.time()
BUDGET = float(sys.argv[1]) if len(sys.argv) > 1 else 55

def spd(b, n):
    A = torch.randn(b, n, n, device=dev)
    return torch.baddbmm(torch.eye(n, device=dev), A, A.mT, alpha=1 / n)

def timed(f, *a):
    f(*a); torch.cuda.synchronize()
    t = time.perf_counter(); f(*a); torch.cuda.synchronize(); one = time.perf_counter() - t
    reps = max(1, min(30, int(0.03 / max(one, 1e-6))))
    best = []
    for _ in range(3):
        s, e = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize(); s.record()
        for _ in range(reps): f(*a)
        e.record(); torch.cuda.synchronize()
        best.append(s.elapsed_time(e) / reps)
    return min(best)

def row(b, n, upper=False):
    A = spd(b, n)
    ours = lambda A: metalcore.cholesky_ex(A, upper=upper)
    theirs = lambda A: torch.linalg.cholesky_ex(A, upper=upper)
    L = ours(A).L
    some = slice(0, max(1, 2**22 // (n * n)))
    Ls = L[some].double(); Ls = Ls.mT if upper else Ls
    As = A[some].double()
    err = ((Ls @ Ls.mT - As).norm(dim=(1, 2)) / As.norm(dim=(1, 2))).max().item() / (n * EPS)
    assert not Ls.triu(1).any()
    mine = timed(ours, A); his = timed(theirs, A)
    floor = b * n * n * 8 / 3e9 * (0.75 if n >= 16 else 1)
    print(f"{b:6d} x {n:5d} {'U' if upper else 'L'} {metalcore.explain('cholesky', A).variant:8s} ours {mine:9.4f} ms  torch {his:9.4f}  x{his / mine:7.2f}  floor {floor:7.4f}  err {err:.3f}{'  <<<<' if his < mine * 0.95 else ''}", flush=True)

print(torch.cuda.get_device_name(), torch.__version__)
for b, n in [(4096, 32), (1024, 128), (16384, 4), (16384, 8), (16384, 16), (16384, 32), (4096, 64), (4096, 48), (1024, 96), (256, 256), (1024, 256), (1, 256), (1, 512), (1, 1024), (1, 2048), (1, 4096), (16, 512), (64, 512), (16, 1024), (8, 2048)]:
    row(b, n)
for b, n in [(4096, 32), (1024, 128), (64, 512), (1, 2048)]:
    row(b, n, True)
A = torch.randn(4096, 512, device=dev); C = torch.randn(4096, 4096, device=dev)
for n, k in [(4096, 512), (2048, 128), (512, 512)]:
    A = torch.randn(n, k, device=dev)
    print("syrk", n, k, timed(lambda A: metalcore.linalg.syrk(A), A), "A @ A.mT", timed(lambda A: A @ A.mT, A))
for n in (4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048):
    for b in (1, 4, 16, 64, 256, 1024, 4096, 16384):
        if b * n * n > 2**28: continue
        if time.time() - START > BUDGET: sys.exit("out of time")
        row(b, n)
