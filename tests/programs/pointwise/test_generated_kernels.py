"""Layouts, dtypes, outputs in given memory, recordings and errors of generated kernels."""

import pytest
import torch
import torch.nn.functional as F
from torch.fx import Graph
from traced import built, graph_of, placed, results, steps

import metalcore
from metalcore.msl.nvidia import nvrtc
from metalcore.msl.runtime import signatures
from metalcore.programs import pointwise
from metalcore.programs.pointwise.layout import layout
from metalcore.recording import on_meta, record

aten = torch.ops.aten


def chain(x, a, b, r):
    return F.gelu(x * a + b) + r


def check_equal(pairs):
    for made, expected in pairs:
        assert (made.dtype, made.shape, made.stride()) == (expected.dtype, expected.shape, expected.stride())
        assert torch.equal(made.cpu(), expected)


def test_layouts(device):
    """One graph on tensors with other strides, for each of which there is a kernel: whole vectors, rows that are no
    multiples of a vector, an address that is none, gaps, and orders of dimensions that differ."""
    torch.manual_seed(0)
    shape = (3, 5, 8)
    whole, row, column = torch.randn(shape), torch.randn(8), torch.randn(5, 1)
    shifted = torch.randn(3 * 5 * 8 + 1)[1:].view(shape)
    gaps, turned = torch.randn(3, 5, 16)[..., ::2], torch.randn(8, 5, 3).permute(2, 1, 0)
    run = built(lambda x, y, z: (x * y + z, x > z), whole, whole.clone(), whole.clone())
    for y, z in [(whole, whole), (shifted, whole), (gaps, turned), (row.expand(shape), column.expand(shape))]:
        made = run(*[placed(tensor, device) for tensor in (whole, y, z)])
        assert torch.equal(made[0].cpu(), whole * y + z) and torch.equal(made[1].cpu(), whole > z)


def test_broadcasting_and_outputs_of_several_shapes(device):
    torch.manual_seed(0)
    row, column, scalar = (
        torch.randn(9, device=device),
        torch.randn(7, 1, device=device),
        torch.tensor(2.0, device=device),
    )
    check_equal(results(lambda r, c, s: (r + c, r * s, c - s, s * s, (r + c).expand(2, 7, 9)), row, column, scalar))


def test_strides_of_results_are_pytorchs(device):
    torch.manual_seed(0)
    image = placed(torch.randn(2, 4, 3, 3).to(memory_format=torch.channels_last), device)
    check_equal(results(lambda x, w: (x * w, x + 1), image, torch.randn(4, 1, 1, device=device)))


def test_many_dimensions(device):
    torch.manual_seed(0)
    x = torch.randn(2, 3, 2, 3, 2, 4)
    y = torch.randn(4, 2, 3, 2, 3, 2).permute(5, 2, 1, 4, 3, 0)
    check_equal(results(lambda x, y: x - y, placed(x, device), placed(y, device)))


def test_no_elements_and_one_element(device):
    check_equal(results(lambda x: x.exp() + 1, torch.empty(0, 3, device=device)))
    check_equal(results(lambda x, y: x * y, torch.tensor(3, device=device), torch.tensor([2], device=device)))


def test_tails(device):
    """The elements behind the last whole vector, of 8 and of 16 a thread."""
    torch.manual_seed(0)
    x = torch.randn(1003).to(torch.bfloat16).to(device)
    check_equal(results(lambda x: (x + x, x > 0), x))
    mask = torch.rand(1003) > 0.5
    check_equal(results(lambda m: ~m, mask.to(device)))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_results_of_16_bits_are_rounded_where_pytorch_rounds(device, dtype):
    torch.manual_seed(0)
    tensors = [torch.randn(size).to(dtype).to(device) for size in ((64, 24), (24,), (24,), (64, 24))]
    made, expected = results(lambda x, a, b, r: ((x * a + b) * 1.1 - r) / a, *tensors)[0]
    assert torch.equal(made.cpu(), expected)
    made, expected = results(chain, *tensors)[0]
    assert (made.cpu() != expected).float().mean() < 0.01 and steps(made, expected) <= 4
    exact = chain(*[tensor.cpu().double() for tensor in tensors])
    assert steps(built(chain, *tensors, keep_float32=True)(*tensors)[0], exact) <= 0.501


def test_dtypes_are_promoted_as_pytorch_does(device):
    torch.manual_seed(0)
    x, h = torch.randn(40, device=device), torch.randn(40, device=device).half()
    i, u = torch.arange(-20, 20, device=device), torch.arange(40, dtype=torch.uint8, device=device)
    m = x > 0
    scalar = torch.tensor(0.5, device=device)

    def function(x, h, i, u, m, scalar):
        return (
            x + i,
            h * 2.5,
            i / 3,
            u * i,
            m + i,
            m * u,
            h + scalar,
            i * 0.5,
            h > i,
            i > 2.5,
            m & m,
            x * m,
        )

    check_equal(results(function, x, h, i, u, m, scalar))


def test_into_given_memory(device):
    x, y = torch.randn(64, device=device), torch.randn(64, device=device)
    run = built(lambda x, y: x * 2 + y, x, y)
    expected = x.cpu() * 2 + y.cpu()
    output = torch.empty_like(x)
    run.into([output], x, y)
    assert torch.equal(output.cpu(), expected)
    run.into([x], x, y)
    assert torch.equal(x.cpu(), expected)
    memory = torch.zeros(65, device=device)
    with pytest.raises(RuntimeError, match="output 0 overlaps an input"):
        run.into([memory[1:]], memory[:64], y)
    with pytest.raises(RuntimeError, match=r"output 0 must be float32 \[64\], not float32 \[65\]"):
        run.into([memory], x, y)


def test_other_tensors_are_refused(device):
    x = torch.randn(8, device=device)
    run = built(lambda x: x + 1, x)
    with pytest.raises(
        RuntimeError, match=r"input 0 must be float32 \[8\], as the kernel was made for, not float32 \[4\]"
    ):
        run(x[:4])
    with pytest.raises(TypeError, match="1 tensors are needed, 2 were given"):
        run(x, x)


def refused(function, *tensors):
    with pytest.raises(pointwise.Unsupported) as caught:
        built(function, *tensors)
    return str(caught.value)


def test_what_the_generator_does_not_take_is_named():
    x = torch.randn(4, 4)
    assert "aten.mm.default" in refused(lambda x: (x + 1) @ x, x)
    assert "aten.add.Tensor" in refused(lambda x: x + x, x.double()) and "float64" in refused(
        lambda x: x + x, x.double()
    )
    assert "no formula of it for int64" in refused(lambda x: aten.frac(x), torch.arange(4))
    graph = graph_of(lambda x: ((x + 1) @ x).relu(), x)
    reasons = {node.name: pointwise.supports(node) for node in graph.graph.nodes if node.op == "call_function"}
    assert [name for name, reason in reasons.items() if reason is None] == ["add", "relu"]
    assert "depend on no input" in refused(lambda x: x + torch.ones(4, 4).sum(), x)
    many = [torch.randn(4) for _ in range(31)]
    assert "a kernel has 31 buffers" in refused(lambda *all: sum(all), *many)


def test_outputs_are_split_where_a_kernel_has_too_many(device):
    x = torch.arange(6.0, device=device)
    run = built(lambda x: tuple(x + k for k in range(40)), x)
    assert len(run.parts) == 2
    assert all(torch.equal(made.cpu(), torch.arange(6.0) + k) for k, made in enumerate(run(x)))


def test_a_graph_without_inputs(device):
    graph = Graph()
    graph.output(graph.call_function(aten.full.default, ([2, 3], 1.5), {"device": torch.device(device)}))
    assert pointwise.build(graph, [])()[0].tolist() == [[1.5] * 3] * 2


def test_recordings(device):
    """A recording has the kernel, can be submitted with other tensors, and can be made without memory."""
    x, y = torch.randn(128, device=device), torch.randn(128, device=device)
    run = built(lambda x, y: x * y + x, x, y)
    (made,), recording = record(run, x, y)
    assert [plan.op for plan in recording.plans] == ["pointwise"] and recording.torch_steps == ()
    assert len(recording.kernels) == 1 and recording.kernels[0].startswith("pointwise_")
    other = torch.randn(128, device=device)
    recording.submit([(x, other)])
    assert torch.equal(made.cpu(), other.cpu() * y.cpu() + other.cpu())
    with on_meta(torch.device(device).type) as recorder:
        run(torch.empty(128, device="meta"), torch.empty(128, device="meta"))
    assert recorder.recording.kernels == recording.kernels


@pytest.mark.only_on("simulator")
def test_checking_mode(device):
    torch.manual_seed(0)
    x = torch.randn(101)
    with metalcore.simulator.checking():
        check_equal(results(lambda x: (x * 2 + x, x > 0), x.to(device)))


def test_kernels_compile_for_cuda():
    """A product and a sum stay two operations, and elements move as whole vectors."""
    tensors = [torch.randn(size).bfloat16() for size in ((64, 24), (24,), (24,), (64, 24))]
    (source,) = built(chain, *tensors).sources(*tensors)
    compile_for_cuda(source)


def test_kernels_that_read_other_elements_compile_for_cuda():
    x, i = torch.randn(4, 6, 8), torch.tensor([2, 0])

    def function(x, i):
        pooled = F.avg_pool2d(F.pad(x, (1, 1)), 3, 2)
        return torch.cat([pooled, x[i, :2, :4].flip(2).exp()], 0), x.cumsum(2), x.index_copy(0, i, x[:2])

    for source in built(function, x, i).sources(x, i):
        compile_for_cuda(source)


def compile_for_cuda(source):
    from metalcore.msl.runtime.library import ShaderProgram

    program = ShaderProgram(source, [], {})
    (name,) = program.names
    text, _ = program.translation.cuda_source([(name, signatures.probable(program.arguments(name)))])
    assert nvrtc.find().compile(text, 90, flags=(*nvrtc.FLAGS, "--fmad=false"), msl=source)[:4] == b"\x7fELF"


def test_layouts_are_collapsed_and_vectors_chosen():
    def found(shape, *tensors):
        made = layout(shape, tensors)
        return made.sizes, made.vector

    dense = (48, 8, 1), 4, 0
    assert found((6, 6, 8), dense, dense) == ((288,), 4)
    assert found((6, 6, 8), dense, ((48, 8, 1), 4, 4)) == ((288,), 1)  # not aligned
    assert found((6, 6, 8), dense, ((0, 0, 1), 4, 0)) == ((8, 36), 4)
    assert found((6, 6, 8), dense, ((0, 1, 0), 4, 0)) == ((8, 6, 6), 4)
    assert found((6, 6), ((6, 1), 2, 0), ((0, 1), 2, 0)) == ((6, 6), 1)  # rows are no multiples of a vector
    assert found((4, 4), ((4, 1), 1, 0)) == ((16,), 16)
    assert layout((1 << 16, 1 << 15), [((1 << 15, 1), 1, 0)]).wide
