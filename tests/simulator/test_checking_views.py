"""A checked kernel may touch the memory of the views that it was given, as buffers or by addresses."""

import pytest
import torch
from checked_kernels import COPY, HEADER, select
from seeded_accesses import ACCESSES

import metalcore
from metalcore.simulator import KernelError, checking


@pytest.mark.parametrize(("shift", "inside"), [(-1, False), (0, True), (1, False)])
def test_bounds_are_those_of_the_view(shift, inside):
    """The kernel may not touch the elements around a view, although they belong to the view's storage."""
    storage = torch.arange(64.0, device="mps")
    x, y = storage[16:32], storage[32:48]
    copy = metalcore.compile_shader(COPY).copy
    before = storage.cpu()
    with checking():
        if inside:
            copy(x, y, shift, threads=16, group_size=16)
            before[32:48] = before[16:32]
        else:
            with pytest.raises(KernelError, match=r"element -?\d+ of 16 of buffer 'x' \(index 0\)"):
                copy(x, y, shift, threads=16, group_size=16)
    assert torch.equal(storage.cpu(), before)


def test_views_that_overlap_share_their_memory():
    """Views are bound twice, and one inside the other."""
    x = torch.arange(32.0, device="mps")
    copy = metalcore.compile_shader(COPY).copy
    with checking():
        copy(x, x, 0, threads=32, group_size=32)
        copy(x, x[16:], 0, threads=16, group_size=16)
    assert torch.equal(x.cpu(), torch.arange(16.0).repeat(2))


def test_memory_outside_is_untouched_by_a_fault():
    x = torch.zeros(64, device="mps")
    case = next(case for case in ACCESSES if case.name == "write past the end")
    source, _ = select(HEADER + case.source, True)
    library = metalcore.compile_shader(source)
    with checking(), pytest.raises(KernelError):
        library.run(x[:32], 32, threads=64, group_size=32)
    assert not x.cpu()[32:].any()


@pytest.mark.parametrize("shift", [0, 1])
def test_lists_of_tensors_are_checked_as_buffers(shift):
    library = metalcore.compile_shader(
        HEADER
        + """
kernel void run(device float* out, device float* const device* tensors, constant int& shift,
                uint i [[thread_position_in_grid]]) {
  out[i] = tensors[0][i] + tensors[1][int(i) + shift];
}"""
    )
    out, tensors = torch.zeros(4, device="mps"), [torch.full((4,), float(k), device="mps") for k in (1, 2)]
    with checking():
        if shift:
            place = r"byte 16 of 16 of pointer 1 of buffer 'tensors' \(index 1\), right after its end"
            with pytest.raises(KernelError, match=place):
                library.run(out, tensors, shift, threads=4, group_size=4)
        else:
            library.run(out, tensors, shift, threads=4, group_size=4)
            assert out.tolist() == [3.0] * 4


def test_tables_of_pointers_of_built_in_kernels():
    """AdamW's kernel reaches its tensors through a table of addresses."""
    parameters = [torch.nn.Parameter(torch.rand(n, device="mps")) for n in (3, 100, 1)]
    expected = [p.detach().cpu().clone().requires_grad_() for p in parameters]
    for p, e in zip(parameters, expected):
        e.grad = torch.rand_like(e)
        p.grad = e.grad.to("mps")
    with checking():
        metalcore.optim.AdamW(parameters).step()
    torch.optim.AdamW(expected).step()
    for p, e in zip(parameters, expected):
        torch.testing.assert_close(p.detach().cpu(), e.detach(), rtol=1e-6, atol=0)


ADDRESSES = (
    HEADER
    + """
struct Arguments { uint count; device float* first; device const float* const device* rest; };
kernel void run(device float* out, device const Arguments& arguments, uint i [[thread_position_in_grid]]) {
  float sum = out[i];
  for (uint k = 0; k < arguments.count; ++k) sum += arguments.rest[k][i];
  arguments.first[i] = sum;
}"""
)


def arguments_of(count, first, rest):
    """A tensor that holds an argument buffer."""
    return torch.tensor([count, first.data_ptr(), rest.data_ptr()], dtype=torch.int64, device="mps")


def test_addresses_in_tensors_lead_to_live_tensors():
    """Addresses may lead to an argument, and to another table."""
    library = metalcore.compile_shader(ADDRESSES)
    out, tensors = torch.ones(4, device="mps"), [torch.full((4,), float(k), device="mps") for k in (1, 2)]
    rest = torch.tensor([tensor.data_ptr() for tensor in tensors], dtype=torch.int64, device="mps")
    with checking():
        library.run(out, arguments_of(2, out, rest), threads=4, group_size=4)
        assert out.tolist() == [4.0] * 4
        library.run(out, arguments_of(2, tensors[0], rest), threads=4, group_size=4)
    assert [t.tolist() for t in (out, *tensors)] == [[4.0] * 4, [7.0] * 4, [2.0] * 4]


def test_addresses_in_tensors_are_checked():
    """A faulty dispatch's writes there are undone."""
    library = metalcore.compile_shader(ADDRESSES)
    out, first, alone = torch.ones(4, device="mps"), torch.zeros(4, device="mps"), torch.zeros(4, device="mps")
    rest = torch.tensor([alone.data_ptr(), 1 << 40], dtype=torch.int64, device="mps")
    with checking():
        with pytest.raises(KernelError, match="at an address that is in no buffer and near none"):
            library.run(out, arguments_of(2, first, rest), threads=4, group_size=4)
        place = r"byte 16 of 16 of the memory at byte 8 of buffer 'arguments' \(index 1\), right after its end"
        with pytest.raises(KernelError, match=place):
            library.run(torch.ones(8, device="mps"), arguments_of(0, first, rest), threads=5, group_size=5)
    assert not first.any()


def test_numbers_that_look_like_addresses_stay_numbers():
    x = torch.zeros(4, dtype=torch.int64, device="mps")
    x += x.data_ptr() + torch.arange(4, device="mps")
    before = x.tolist()
    y = torch.zeros_like(x)
    library = metalcore.compile_shader("""
kernel void run(device const long* x, device long* y, uint i [[thread_position_in_grid]]) { y[i] = x[i] + 1; }""")
    with checking():
        library.run(x, y, threads=4, group_size=4)
    assert (x.tolist(), y.tolist()) == (before, [value + 1 for value in before])


def test_misaligned_accesses_can_be_allowed():
    case = next(case for case in ACCESSES if case.kind == "misaligned access")
    case.run(faulty=True, misaligned=True)
    with checking(misaligned=True), checking(), pytest.raises(KernelError, match="misaligned access"):
        case.run(faulty=True)
