"""The ops' own tests, and selftest, with csrc/backends/mps as it ships, against the Metal runtime."""

from running import PROGRAM, ROOT, needs_runtime, run

pytestmark = needs_runtime

FOLDERS = (
    *("activation", "attention", "embeddings", "integrations", "linalg", "loss", "nn", "normalization", "ops", "optim"),
    *("overrides", "paged", "quant", "replay", "rotary", "sampling", "sequence"),
)


FILES = sorted(
    str(path.relative_to(ROOT)) for folder in FOLDERS for path in (ROOT / "tests" / folder).glob("test_*.py")
)
PYTEST = ("-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "use_runtime")


def test_of_ops(extension):
    run(extension, *PYTEST, *FILES, METALCORE_TEST_EVERY="24")


def test_smoke_in_checking_mode(extension):
    run(extension, *PYTEST, "tests/smoke", METALCORE_CHECK="1", METALCORE_TEST_EVERY="8")


def test_selftest_runs_kernels_of_every_family(extension):
    run(
        extension,
        "-c",
        PROGRAM
        + """
import itertools, re, sys
sys.path.append("tests")
from cases import CASES, launching_all
from metalcore.__main__ import main
from metalcore.cli import selftest
from tools.register_gate import NVIDIA
every = selftest._checks
left_out = CASES.keys() - {f"{op.name}, {sample.name}" for op, sample in launching_all()}
few = re.compile("kernels of .*|.*, golden artifacts")  # test_metal_runtime.py makes all kernels
def in_turns(kind, device):  # each sample in one dtype, the next sample in the next: encoding hardly depends on it
    in_any = lambda check: re.sub(", (float32|float16|bfloat16)$", "", check[0])
    for turn, (name, checks) in enumerate(itertools.groupby(every(kind, device), in_any)):
        checks = [*checks]
        if name not in left_out and (turn % 8 == 0 or not few.fullmatch(name)):
            yield checks[turn % len(checks)]
selftest._checks = in_turns
assert main(["selftest", "--device", "simulator"]) == 0
signs = torch.randn(4, 256, device="mps").sign()
for type in ("Q4_K", "TQ1_0"):  # which of two packed forms is found no formula says, so selftest has none
    assert (metalcore.dequantize(metalcore.quantize(signs, type), type) - signs).abs().max() < 0.02
# Sizes from which on plans take other kernels, and which no sample has.
A = torch.randn(150, 150)
def measured(table, field, size):
    _C.use_measured("mps", _C.gpu_family("mps"), [(table, field, [size])])
for field in ("wide_columns", "polar_columns"):
    measured("jacobi", field, 129)
    assert (metalcore.svdvals(A.to("mps")).cpu() - torch.linalg.svdvals(A)).abs().max() < 1e-3
measured("tridiagonalize", "panels_above", 64)
assert (metalcore.eigvalsh(A.to("mps")).cpu() - torch.linalg.eigvalsh(A)).abs().max() < 1e-3
A = torch.complex(A, A.mT)
assert (metalcore.eigh(A.to("mps"))[0].cpu() - torch.linalg.eigvalsh(A)).abs().max() < 1e-3
# The same for heads that share keys, in 16 bits.
q, k = torch.randn(1, 8, 1, 128, dtype=torch.bfloat16), torch.randn(1, 1, 40, 128, dtype=torch.bfloat16)
found = metalcore.scaled_dot_product_attention(q.to("mps"), k.to("mps"), k.to("mps"), enable_gqa=True).cpu()
weights = torch.softmax(q.float() @ k.float().mT / 128**0.5, -1)
assert (found - weights @ k.float()).abs().max() < 0.05
encoders, dispatches, kernels = use_runtime.counts()
assert encoders[0] > 100 and dispatches[0] > encoders[0]
families = [set(line.split()[1:]) for line in open("build/metal_runtime/out/lib/index")]
kernels = {kernel for kernel in kernels if not kernel.startswith("flex_")}  # which are generated
assert set().union(*families) >= kernels
kernels.add("half_subnormals")  # the backend asks it on a queue of its own (test_metal_runtime.py)
others = "|".join(NVIDIA)  # no plan of an Apple family takes these
unused = [
    min(family)
    for family in families
    if not family & kernels and not all(re.fullmatch(others, one) for one in family)
]
assert not unused, f"families of which no kernel ran, by one of their kernels: {unused}"
""",
    )
