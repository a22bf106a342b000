"""A build without a backend: PyTorch's own ops take every call."""

from processes import python

WITHOUT_BACKENDS = """
import importlib.machinery, importlib.util, sys, types
import torch
found = importlib.util.find_spec("metalcore")
path = found.submodule_search_locations[0] + "/_C.abi3.so"
loader = importlib.machinery.ExtensionFileLoader("metalcore._C", path)
extension = importlib.util.module_from_spec(importlib.util.spec_from_loader(loader.name, loader))
loader.exec_module(extension)
backendless = types.ModuleType("metalcore._C")
backendless.__dict__.update({name: value for name, value in vars(extension).items()
                             if not name.startswith(("simulator_", "cuda_"))})
sys.modules["metalcore._C"] = backendless
import metalcore
device = sys.argv[1]
if device == "mps" and not torch.backends.mps.is_available():
    import metalcore.simulator  # stands for the real mps device of a Mac
"""


def run(program, device="cpu"):
    done = python("-c", WITHOUT_BACKENDS + program, device, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_every_function_is_pytorchs(device):
    run(
        """
import torch.nn.functional as F
x = torch.randn(4, 8, device=device, requires_grad=True)
operators = []
class Seen(torch.utils._python_dispatch.TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        operators.append(func.namespace)
        return func(*args, **(kwargs or {}))
with Seen():
    for ours, theirs in [
        (metalcore.silu(x), F.silu(x)),
        (metalcore.gelu(x, "tanh"), F.gelu(x, approximate="tanh")),
        (metalcore.softmax(x, -1), torch.softmax(x, -1)),
        (metalcore.log_softmax(x, 0), torch.log_softmax(x, 0)),
        (metalcore.rms_norm(x, (8,)), F.rms_norm(x, (8,))),
        (metalcore.add_rms_norm(x, x)[0], F.rms_norm(x + x, (8,))),
        (metalcore.qr(x)[1], torch.linalg.qr(x)[1]),
    ]:
        assert torch.equal(ours, theirs)
        ours.sum().backward()
    weight = torch.nn.Parameter(torch.ones(3, device=device))
    optimizer = metalcore.optim.AdamW([weight])
    weight.grad = torch.ones_like(weight)
    optimizer.step()
    metalcore.enable_pytorch_overrides()
    F.silu(x)
assert "metalcore" not in operators, operators
""",
        device,
    )


def test_compile_shader_is_pytorchs():
    run("""
torch.mps.compile_shader = lambda source: ("PyTorch's", source)
whose, source = metalcore.compile_shader("kernel void f() {}")
assert whose == "PyTorch's" and "kernel void f() {}" in source
try:
    metalcore.compile_shader("kernel void f() {}", constants={0: 1})
except RuntimeError as error:
    assert "constants" in str(error)
else:
    raise AssertionError
""")


def test_info_and_explain_need_no_backend():
    out = run("""
from metalcore.cli import main
main(["info"])
print(metalcore.explain("qr", (3, 3)))
""")
    assert "not in this build" in out and "qr_simd" in out
