"""The backend shares PyTorch's streams: nothing runs before a commit, encoders come and go, streams can be several."""

import pytest
from build_runtime import build_with_fault
from running import PROGRAM, needs_runtime, run

pytestmark = needs_runtime

EACH_OP = (
    PROGRAM
    + """
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from metalcore._core.accuracy import shares
from metalcore._core.registry import OPS

def forward(op, stream, samples=None):  # the gradient would be computed on autograd's thread, and stream
    use_runtime.set_stream(stream)
    for sample in samples or op.samples():
        assert shares(replace(op, backward=False), sample, "mps", torch.float32)["forward"] <= 1, (op.name, sample.name)
"""
)


def test_dispatches_wait_for_a_commit(extension):
    run(
        extension,
        "-c",
        PROGRAM
        + """
import ctypes
x = torch.randn(1000, device="mps")
y = metalcore.silu(x)
ctypes.memset(y.data_ptr(), 0, y.nbytes)
assert use_runtime.counts()[1] == [1, 0, 0]
del x  # its memory is kept
z = metalcore.silu(y)
assert not ctypes.string_at(y.data_ptr(), y.nbytes).strip(bytes(1))
torch.mps.synchronize()
assert ctypes.string_at(y.data_ptr(), y.nbytes).strip(bytes(1))
torch.testing.assert_close(z, torch.nn.functional.silu(y))
""",
    )


def test_ops_share_an_encoder_until_pytorch_ends_it(extension):
    run(
        extension,
        "-c",
        PROGRAM
        + """
x = torch.randn(1000, device="mps")
y = metalcore.softmax(metalcore.silu(x), -1)
assert use_runtime.counts()[:2] == ([1, 0, 0], [2, 0, 0])
y = metalcore.silu(y * 2)
assert use_runtime.counts()[:2] == ([2, 0, 0], [3, 0, 0])
torch.mps.synchronize()
metalcore.silu(x)
assert use_runtime.counts()[:2] == ([3, 0, 0], [4, 0, 0])
""",
    )


def test_long_work_is_committed_in_parts(extension):
    run(
        extension,
        "-c",
        PROGRAM
        + """
import ctypes
a = torch.randn(150, 140, device="mps")
s = metalcore.svdvals(a)
torch.mps.synchronize()
dispatches = use_runtime.counts()[1][0]
assert use_runtime.commits() == 0
use_runtime.set_slowness(3000)
again = metalcore.svdvals(a)
assert use_runtime.counts()[1][0] == 2 * dispatches and 10 < use_runtime.commits() <= dispatches
ctypes.memset(again.data_ptr(), 0, again.nbytes)
assert use_runtime.commits() > 0 and not ctypes.string_at(again.data_ptr(), again.nbytes).strip(bytes(1))
torch.testing.assert_close(again, s, rtol=0, atol=0)  # after PyTorch has waited

before = use_runtime.commits()
x = torch.randn(1000, device="mps")
for _ in range(200):
    x = metalcore.silu(x)
assert 5 <= use_runtime.commits() - before < 100
""",
    )


def test_long_dispatches_are_split(extension):
    run(
        extension,
        "-c",
        EACH_OP
        + """
def dispatches(name):
    before = use_runtime.counts()[1][0]
    forward(OPS[name], stream=0)
    return use_runtime.counts()[1][0] - before

names = ("silu", "qr", "svd", "eigh", "cholesky", "lu_factor", "solve", "solve_triangular")
whole = [dispatches(name) for name in names]
assert use_runtime.commits() == 0
use_runtime.set_slowness(1e7)
split = [dispatches(name) for name in names]
assert all(more > few for few, more in zip(whole, split)), list(zip(names, whole, split))
assert use_runtime.commits() > 100

def blocked(batch):
    a = torch.randn(batch, 150, 140)
    symmetric = a.mT @ a + torch.eye(140)
    values = metalcore.svdvals(a.to("mps"))
    torch.testing.assert_close(values.cpu(), torch.linalg.svdvals(a), rtol=1e-4, atol=1e-4)
    values, vectors = metalcore.eigh(symmetric.to("mps"))
    torch.testing.assert_close((vectors * values[..., None, :] @ vectors.mT).cpu(), symmetric, rtol=1e-3, atol=1e-2)

blocked(3)
a = torch.randn(2, 40, 300)
torch.testing.assert_close(metalcore.syrk(a.to("mps")).cpu(), a @ a.mT, rtol=1e-4, atol=1e-4)
""",
    )


def test_a_concurrent_encoder_gets_barriers(extension):
    run(
        extension,
        "-c",
        EACH_OP
        + """
use_runtime.set_concurrent(True)
for name in ("softmax", "rms_norm", "qr", "svd", "cholesky", "solve"):
    forward(OPS[name], stream=0)
""",
    )


def test_addresses_are_refused_in_a_capture(extension):
    run(
        extension,
        "-c",
        PROGRAM
        + """
parameter = torch.nn.Parameter(torch.ones(100, device="mps"))
parameter.grad = parameter.detach().clone()
optimizer = metalcore.optim.AdamW([parameter])
optimizer.step()
torch.mps.synchronize()
use_runtime.set_captured(True)
y = metalcore.silu(parameter.detach())
try:
    optimizer.step()
except Exception as error:
    assert "addresses of tensors, which a graph capture of PyTorch's cannot replay" in str(error), error
else:
    raise AssertionError("not refused")
use_runtime.set_captured(False)
torch.testing.assert_close(y, torch.nn.functional.silu(parameter.detach()))
optimizer.step()
""",
    )


def test_work_goes_to_the_current_stream(extension):
    run(
        extension,
        "-c",
        EACH_OP
        + """
for op in OPS.values():  # shapes choose kernels, and options may choose operators
    forward(op, stream=2, samples={frozenset(sample.options): sample for sample in op.samples()}.values())
encoders, dispatches, _ = use_runtime.counts()
assert encoders[:2] == dispatches[:2] == [0, 0] and dispatches[2] > len(OPS)
""",
    )


def test_threads_encode_side_by_side(extension):
    run(
        extension,
        "-c",
        EACH_OP
        + """
ops = [OPS[name] for name in ("silu", "softmax", "rms_norm", "qr")]
with ThreadPoolExecutor(6) as pool:
    list(pool.map(lambda i: forward(ops[i % 4], stream=i % 3), range(48)))
assert min(use_runtime.counts()[1]) >= 16
""",
    )


def test_memory_of_another_stream_freed_in_flight(extension):
    run(
        extension,
        "-c",
        PROGRAM
        + """
def use(wait):
    use_runtime.set_stream(1)
    x = torch.ones(1000, device="mps")
    torch.mps.synchronize()
    use_runtime.set_stream(0)
    y = metalcore.silu(x)
    if wait:
        torch.mps.synchronize()
    del x
    return y.cpu()

use(wait=True)
try:
    use(wait=False)
except Exception as error:
    assert "memory of stream 1 is freed while a command in flight on stream 0 uses it" in str(error), error
else:
    raise AssertionError("not found")
""",
    )


# Faults of the backend itself: (file, old text, new text, the expected error).
SEEDED = {
    "an encoder kept from one op to the next": (
        "backend.mm",
        "return stream_->commandEncoder();",
        "static const id<MTLComputeCommandEncoder> kept = stream_->commandEncoder(); return kept;",
        "an encoder is used after PyTorch ended it",
    ),
    "an encoder used off the queue": (
        "backend.mm",
        "dispatch_sync_f(torch::mps::get_dispatch_queue(), &work, run);",
        "run(&work);",
        "commandEncoder() is called outside of the stream's queue",
    ),
    "the first op's stream for every op": (
        "backend.mm",
        "at::mps::MPSStream* const stream = at::mps::getCurrentMPSStream();",
        "static at::mps::MPSStream* const stream = at::mps::getCurrentMPSStream();",
        "commandEncoder() is called outside of the stream's queue",
    ),
    "the first op's queue for every op": (
        "backend.mm",
        "dispatch_sync_f(torch::mps::get_dispatch_queue(), &work, run);",
        "static const dispatch_queue_t queue = torch::mps::get_dispatch_queue(); dispatch_sync_f(queue, &work, run);",
        "work for stream 0 where stream 1 is the current one",
    ),
    "the stream asked for on the queue": (
        "backend.mm",
        "stream_->commandEncoder()",
        "at::mps::getCurrentMPSStream()->commandEncoder()",
        "getCurrentMPSStream() is called on a stream's queue",
    ),
    "no autorelease pool": ("backend.mm", "@autoreleasepool {", "{", "autoreleased outside of a pool"),
    "no autorelease pool for compilers": (
        "pipelines.mm",
        "in_pool(body);",
        "body();",
        "autoreleased outside of a pool",
    ),
    "buffers that are not resident": (
        "encoder.mm",
        "[encoder_ useResources:reached.data() count:count usage:MTLResourceUsageRead | MTLResourceUsageWrite];",
        "reached = {};",
        "without useResource",
    ),
    "a buffer that kernels reach left out": (
        "encoder.mm",
        "count:count usage:",
        "count:count - 1 usage:",
        "without useResource",
    ),
    "pipelines made on the queue": (
        "backend.mm",
        "const std::vector<const Pipeline*> pipelines = made_pipelines(recording, first, stream->device());",
        (
            "std::vector<const Pipeline*> pipelines; std::exception_ptr failure;"
            "auto make = [&] { try { pipelines = made_pipelines(recording, first, stream->device()); } "
            "catch (...) { failure = std::current_exception(); } };"
            "dispatch_sync_f(torch::mps::get_dispatch_queue(), &make, "
            "[](void* call) { (*static_cast<decltype(make)*>(call))(); });"
            "if (failure) std::rethrow_exception(failure);"
        ),
        "a program is compiled in a block on a stream's queue",
    ),
    "offsets of storages left out": ("encoder.mm", "offset:view.offset atIndex", "offset:0 atIndex", "wrong result"),
    "offsets of 32 bits": (
        "encoder.mm",
        "offset:view.offset atIndex",
        "offset:static_cast<uint32_t>(view.offset) atIndex",
        "wrong result",
    ),
    "a command buffer that is not committed": (
        "backend.mm",
        "stream_->synchronize(at::mps::SyncType::COMMIT);",
        "",
        "seconds long, and macOS ends long ones",
    ),
    "a command buffer that begins anew with each op": (
        "backend.mm",
        "CommandBuffer& work_;",
        "CommandBuffer work_;",
        "seconds long, and macOS ends long ones",
    ),
    "an encoder kept across a commit": (
        "encoder.mm",
        """      encoder.reset();
      commands.commit();
      fetch_encoder();
""",
        "      commands.commit();\n",
        "an encoder is used after PyTorch ended it",
    ),
    "a wait": ("backend.mm", "SyncType::COMMIT", "SyncType::NONE", "asked for more than a commit"),
    "no barriers on a concurrent encoder": (
        "encoder.mm",
        "if (concurrent_) [encoder_ memoryBarrierWithScope:MTLBarrierScopeBuffers];",
        "",
        "no barrier separates it from PyTorch's dispatches",
    ),
    "no barrier behind a recording": (
        "encoder.mm",
        "~MetalEncoder() { wait_for_dispatches_before(); }",
        "~MetalEncoder() {}",
        "no barrier separates PyTorch's next dispatches",
    ),
    "no barriers within a recording": (
        "encoder.mm",
        """    wait_for_dispatches_before();
    [encoder_ setComputePipelineState""",
        """    if (&dispatch == &recording_.dispatches().front()) wait_for_dispatches_before();
    [encoder_ setComputePipelineState""",
        "not positive-definite",
    ),
    "an argument that PyTorch's op before left": (
        "encoder.mm",
        "case gpu::Argument::kBuffer: bind_buffer",
        "case gpu::Argument::kBuffer: if (argument.index != 1) bind_buffer",
        "at index 1 is not bound",
    ),
    "parameters cut short": (
        "encoder.mm",
        "length:argument.count atIndex:argument.index];\n        break;",
        "length:argument.count - 4 atIndex:argument.index];\n        break;",
        "bytes, and its type",
    ),
    "a relaxed math mode": (
        "compile_options.mm",
        "kMTLMathModeSafe = 0",
        "kMTLMathModeSafe = 1",
        "another math mode than MTLMathModeSafe",
    ),
    "fast functions": (
        "compile_options.mm",
        "[newer setMathFloatingPointFunctions:kMTLMathFloatingPointFunctionsPrecise];",
        "",
        "compiled with the fast floating-point functions",
    ),
    "the old switch on a new macOS": (
        "compile_options.mm",
        "if ([options respondsToSelector:@selector(setMathMode:)]) {",
        "if (![options respondsToSelector:@selector(setMathMode:)]) {",
        "fastMathEnabled is set, which macOS 15 deprecates",
    ),
}


OPS = (
    PROGRAM
    + """
def ops():
    large = torch.empty(2**32 + 4000, dtype=torch.uint8, device="mps")  # of which the system gives what is touched
    x = large[2**32:].view(torch.float32)
    x.copy_(torch.randn(1000))
    torch.testing.assert_close(metalcore.silu(x), torch.nn.functional.silu(x), msg="wrong result")
    metalcore.softmax(x, -1) + 1
    parameter = torch.nn.Parameter(x)
    parameter.grad = x.clone()
    metalcore.optim.AdamW([parameter]).step()
    use_runtime.set_stream(1)
    metalcore.silu(torch.ones(4, device="mps"))
    torch.mps.synchronize()
    use_runtime.set_stream(0)
    use_runtime.set_slowness(3000)
    a = torch.eye(160, device="mps")
    torch.testing.assert_close(metalcore.eigvalsh(a), torch.ones(160, device="mps"), msg="wrong result")
    for _ in range(20):
        x = metalcore.silu(x)
    use_runtime.set_slowness(1)
    torch.mps.synchronize()
    use_runtime.set_concurrent(True)
    torch.testing.assert_close(metalcore.cholesky(a), a, msg="wrong result")

try:
    ops()
except Exception as error:
    print(error)
"""
)


@pytest.mark.parametrize("fault", SEEDED)
def test_seeded_faults_are_found(extension, fault):
    file, old, new, says = SEEDED[fault]
    assert says in run(build_with_fault(fault, file, old, new), "-c", OPS)


def test_nothing_is_found_where_no_fault_is_seeded(extension):
    assert run(extension, "-c", OPS) == ""
