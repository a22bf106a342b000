"""Every function of linear algebra in place of PyTorch's: names, results' types, empty matrices, layouts, arguments
that do not fit, out=. tests/ops asks every op about wrong types, fake kernels, compilers and runs."""

import inspect
import warnings

import pytest
import torch
from references import assert_same_error
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._pytree import tree_leaves

import metalcore
from metalcore._core.accuracy import bound
from metalcore._core.registry import OPS

LINALG = {name: op for name, op in OPS.items() if op.family == "linalg"}
NAMESAKES = [name for name, op in LINALG.items() if op.namesake]
# lstsq has the default of GPUs, gels, also on the CPU, where PyTorch's is gelsy.
# PyTorch's lobpcg, which is written in Python, raises AssertionErrors.
ALIKE = [name for name in NAMESAKES if name not in ("lstsq", "lobpcg")]
# Their matrices are no batch of others, so that a test of single arguments or batches does not fit them.
WITHOUT_BATCHES = ("multi_dot", "tensorinv", "tensorsolve")
WITH_OUT = [name for name in NAMESAKES if "out" in inspect.signature(LINALG[name].function).parameters]
ERRORS = (RuntimeError, IndexError, ValueError)


class Call:
    """A function with a sample of its op, on a device."""

    def __init__(self, op, function, device, sample=None):
        self.function, self.device = function, device
        self.sample = sample or op.smallest_sample()

    def arguments(self, tensors=None, gradients=False):
        tensors = self.sample.make("cpu", torch.float32) if tensors is None else tensors
        return list(self.sample.arguments(*(x.to(self.device).requires_grad_(gradients) for x in tensors)))

    def __call__(self, *arguments, **more):
        torch.manual_seed(0)
        return self.function(*(arguments or self.arguments()), **self.sample.options, **more)


def pair(name, device, sample=None):
    """Our function on the device, and PyTorch's on the CPU."""
    op = LINALG[name]
    return Call(op, op.function, device, sample), Call(op, op.pytorch, "cpu", sample)


def is_tensor(x):
    return isinstance(x, torch.Tensor)


def flat(returned):
    return [x for x in tree_leaves(returned) if is_tensor(x)]


def like(returned, make):
    """New tensors in the places of the results."""
    return make(returned) if is_tensor(returned) else tuple(map(make, returned))


@pytest.mark.parametrize("name", ALIKE)
def test_names_and_types(device, name):
    ours, theirs = pair(name, device)
    assert ours.function is getattr(metalcore, name) is getattr(metalcore.linalg, name)
    # PyTorch's own functions do not take all the names that their documentation has.
    named = dict(zip(inspect.signature(ours.function).parameters, ours.arguments()))
    torch.manual_seed(0)
    result, expected = ours.function(**named, **ours.sample.options), theirs()
    assert type(result) is type(expected)
    assert [(x.dtype, x.shape) for x in flat(result)] == [(x.dtype, x.shape) for x in flat(expected)]


def emptied(shapes):
    """The shapes without a batch, and without each of their matrices' sizes."""
    yield [(0, *shape[1:]) for shape in shapes]
    yield [(2, 0, *shape[1:]) for shape in shapes]
    for size in sorted({size for shape in shapes for size in shape[1:]}):
        yield [(shape[0], *(0 if each == size else each for each in shape[1:])) for shape in shapes]


@pytest.mark.parametrize("name", ALIKE)
def test_empty(device, name):
    op = LINALG[name]
    for sample in {str(sample.options): sample for sample in op.samples()}.values():  # the largest of each kind
        ours, theirs = pair(name, device, sample)
        for shapes in emptied(sample.shapes):
            tensors = [torch.ones(shape) for shape in shapes]
            try:
                arguments = theirs.arguments(tensors)
                expected = theirs(*arguments)
            except ERRORS:
                with pytest.raises(ERRORS):
                    ours(*ours.arguments(tensors))
                continue
            for x, wanted in zip(flat(ours(*ours.arguments(tensors))), flat(expected), strict=True):
                torch.testing.assert_close(x.cpu(), wanted, msg=str(shapes))


LAYOUTS = {
    "transposed": lambda x: x.mT.contiguous().mT,
    "with gaps": lambda x: x.repeat_interleave(2, -2).repeat_interleave(3, -1)[..., 1::2, ::3],
    "with an offset": lambda x: torch.nn.functional.pad(x, (5, 3, 4, 2))[..., 4:-2, 5:-3],
    "batches last": lambda x: x.movedim(0, -1).contiguous().movedim(-1, 0),
    "one for the batch": lambda x: x[:1].expand(x.shape),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", [name for name in LINALG if name not in WITHOUT_BATCHES])
def test_layouts(device, name, layout):
    """Results are those of the packed arguments. A layout may choose another kernel, and both may be a bound off."""
    op = LINALG[name]
    for sample in op.samples():
        call = Call(op, op.function, device, sample)
        laid = [LAYOUTS[layout](x) if is_tensor(x) and x.ndim > 2 else x for x in call.arguments()]
        packed = [x.contiguous() if is_tensor(x) else x for x in laid]
        results = []
        for arguments in (laid, packed):
            torch.manual_seed(0)
            results.append(op.results(op.call(op.function, *arguments, **sample.options)))
        for x, expected in zip(*results, strict=True):
            tolerance = 2 * bound(sample, torch.float32) * expected.abs().amax().item() if expected.numel() else 0
            torch.testing.assert_close(x, expected, rtol=0, atol=tolerance, msg=sample.name)


def wrong(arguments):
    """The arguments with one tensor that does not fit: without its last dimensions, with a row or a column more, of
    another batch, of a dtype that no kernel takes."""
    for i, x in enumerate(arguments):
        if is_tensor(x):
            *batch, rows, columns = shape = x.shape
            shapes = [(), (columns,), (*batch, rows + 1, columns), (*batch, rows, columns + 1)]
            for each in (*shapes, (*(size + 2 for size in batch), rows, columns)):
                yield [*arguments[:i], torch.ones(each, dtype=x.dtype), *arguments[i + 1 :]]
            for dtype in (torch.int16, torch.bool):
                yield [*arguments[:i], torch.ones(shape, dtype=dtype), *arguments[i + 1 :]]


@pytest.mark.parametrize("name", [name for name in ALIKE if name not in WITHOUT_BATCHES])
def test_arguments_that_do_not_fit(device, name):
    """They are PyTorch's errors, or no errors where PyTorch has none."""
    ours, theirs = pair(name, device)
    errors = 0
    for arguments in wrong(theirs.arguments()):
        on_device = [x.to(device) if is_tensor(x) else x for x in arguments]
        asked = on_device if device == "cuda" else arguments  # errors of dtypes name the type of device
        try:
            theirs(*asked)
        except torch.linalg.LinAlgError:
            continue  # the shapes fit
        except ERRORS:
            assert_same_error(lambda: ours(*on_device), lambda: theirs(*asked))
            errors += 1
        else:
            ours(*on_device)
    assert errors


@pytest.mark.parametrize("name", WITH_OUT)
def test_results_come_into_out(device, name):
    ours, _ = pair(name, device)
    expected = ours()
    for make in (
        lambda x: x.new_empty(0),
        lambda x: x.new_empty((*x.shape, 2))[..., 0],
        lambda x: x.new_empty(x.shape[::-1]).permute(*reversed(range(x.ndim))),
    ):
        out = like(expected, make)
        strides = [x.stride() for x in flat(out) if x.numel()]
        result = ours(out=out)
        assert all(x is place for x, place in zip(flat(result), flat(out), strict=True))
        assert all(torch.equal(place, x) for place, x in zip(flat(out), flat(expected)))
        assert not strides or strides == [x.stride() for x in flat(out)]


@pytest.mark.filterwarnings("ignore:An output with one or more elements was resized")
@pytest.mark.parametrize("name", WITH_OUT)
def test_out_is_an_argument(device, name):
    ours, _ = pair(name, device)
    expected = ours()
    for i, result in enumerate(flat(expected)):
        for j, argument in enumerate(ours.arguments()):
            if is_tensor(argument) and argument.dtype == result.dtype:
                arguments = ours.arguments()
                out = [torch.empty_like(x) for x in flat(expected)]
                out[i] = arguments[j]
                ours(*arguments, out=out[0] if is_tensor(expected) else tuple(out))
                assert all(torch.equal(place, x) for place, x in zip(out, flat(expected)))


@pytest.mark.parametrize("dtype", [torch.float16, torch.int32, torch.complex64], ids=str)
@pytest.mark.parametrize("name", WITH_OUT)
def test_out_of_other_dtypes(device, name, dtype):
    """Results are cast where PyTorch casts them, and are errors where PyTorch has one."""
    ours, theirs = pair(name, device)
    out = [like(call(), lambda x: x.new_empty(0, dtype=dtype)) for call in (ours, theirs)]
    try:
        theirs(out=out[1])
    except RuntimeError:
        with pytest.raises(RuntimeError, match="Expected .* (dtype|castable)"):
            ours(out=out[0])
    else:
        assert all(torch.equal(x, y.to(dtype)) for x, y in zip(flat(ours(out=out[0])), flat(ours())))


@pytest.mark.parametrize("name", WITH_OUT)
def test_out_that_does_not_fit(device, name):
    ours, theirs = pair(name, device)
    new = lambda x: x.new_empty(0)  # noqa: E731
    single = is_tensor(theirs())

    def errors(call, other):
        return lambda: call(out=other(call()))

    for other in (lambda result: (new(flat(result)[0]),), lambda result: 3 if single else new(result[0])):
        with pytest.raises(TypeError, match="'out' must be|expected tuple of"):
            errors(ours, other)()
        with pytest.raises(TypeError):
            errors(theirs, other)()
    with pytest.raises(RuntimeError, match="Expected .* to be on|device"):
        ours(out=like(ours(), lambda x: x.new_empty(0, device="meta")))
    if LINALG[name].backward and name != "cond":  # PyTorch's has none either
        with pytest.raises(RuntimeError, match="don't support automatic differentiation"):
            ours(*ours.arguments(gradients=True), out=like(ours(), new))


def test_out_of_another_shape(device):
    """PyTorch warns where it resizes a tensor that has elements."""
    messages = []
    for call in pair("solve", device):
        expected = call()
        out = torch.empty(4, 5, device=call.device)
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            call(out=out)
        assert out.shape == expected.shape
        messages.append([str(warning.message).split(" (Triggered")[0] for warning in warned])
    assert messages[0] == messages[1] and "was resized" in messages[0][0]


BLOCK = 4096  # the number of infos that a threadgroup reads
info_any = torch.ops.metalcore.info_any


@pytest.mark.parametrize("count", [1, 2, 31, 33, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK + 5, BLOCK**2, BLOCK**2 + 1])
def test_a_single_failure_is_found_wherever_it_is(device, count):
    info = torch.zeros(count, dtype=torch.int32, device=device)
    assert info_any(info).shape == () and info_any(info).item() == 0
    for failed in {0, count // 2, count - 1, min(count - 1, BLOCK), min(count, BLOCK) - 1}:
        for code in (1, -3):
            info[failed] = code
            assert info_any(info).item() != 0
        info[failed] = 0
    assert info_any(info).item() == 0


def test_infos_of_any_shape(device):
    for shape in ((), (0,), (2, 0), (3, 5)):
        assert info_any(torch.zeros(shape, dtype=torch.int32, device=device)).item() == 0
    strided = torch.zeros(50, 60, dtype=torch.int32, device=device)
    strided[0, 0] = 1
    assert info_any(strided[1:, 1::2].mT).item() == 0
    strided[1, 1] = 1
    assert info_any(strided[1:, 1::2].mT).item() != 0
    with pytest.raises(RuntimeError, match="info_any: info must be int32, not float32"):
        info_any(torch.zeros(3, device=device))


@pytest.mark.parametrize("where", ["cpu", "device"])
def test_opcheck(device, where):
    info = torch.tensor([0, 2, 0], dtype=torch.int32, device=device if where == "device" else where)
    torch.library.opcheck(info_any.default, (info,))
    assert info_any(info).item() != 0 and info_any(0 * info).item() == 0


@pytest.mark.parametrize("batch", [1, 7, 5000])
@pytest.mark.parametrize("name", ["inv", "solve", "lu_factor", "cholesky"])
def test_the_last_of_many_matrices_raises_torchs_error(device, batch, name):
    A = 2 * torch.eye(3).repeat(batch, 1, 1)
    inputs = (A, torch.ones(batch, 3, 1)) if name == "solve" else (A,)
    getattr(metalcore, name)(*[tensor.to(device) for tensor in inputs])
    A[-1, 2, 2] = 0
    assert_same_error(
        lambda: getattr(metalcore, name)(*[tensor.to(device) for tensor in inputs]),
        lambda: getattr(torch.linalg, name)(*inputs),
    )


def test_the_error_has_its_place_in_graphs(device):
    A = torch.eye(3, device=device).repeat(2, 1, 1)
    graph = make_fx(lambda A: metalcore.inv(A))(A)
    assert torch.equal(graph(2 * A).cpu(), A.cpu() / 2)
    with pytest.raises(torch.linalg.LinAlgError):
        graph(0 * A)
    with FakeTensorMode() as mode:
        assert metalcore.inv(mode.from_tensor(A)).shape == A.shape
