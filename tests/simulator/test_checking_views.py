"""What a checked kernel may touch: the memory of the views it was given, as buffers or by addresses."""

import metalcore
import pytest
import torch
from checked_kernels import COPY, HEADER, select
from metalcore.simulator import KernelError, checking
from seeded_accesses import ACCESSES


@pytest.mark.parametrize(("shift", "inside"), [(-1, False), (0, True), (1, False)])
def test_bounds_are_those_of_the_view(shift, inside):
    """The elements around a view belong to its storage, but not to the kernel."""
    storage = torch.arange(64.0, device="mps")
    x, y = storage[16:32], storage[32:48]
    copy = metalcore.compile_shader(COPY).copy
    before = storage.cpu()
    with checking():
        if inside:
            copy(x, y, shift, threads=16, group_size=16)
            before[32:48] = before[16:32]
        else:
            with pytest.raises(KernelError, match=r"buffer 'x' \(index 0\), which has 64 bytes"):
                copy(x, y, shift, threads=16, group_size=16)
    assert torch.equal(storage.cpu(), before)


def test_views_that_overlap_share_their_memory():
    """In place, and with one view inside the other."""
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
    library = metalcore.compile_shader(HEADER + """
kernel void run(device float* out, device float* const device* tensors, constant int& shift,
                uint i [[thread_position_in_grid]]) {
  out[i] = tensors[0][i] + tensors[1][int(i) + shift];
}""")
    out, tensors = torch.zeros(4, device="mps"), [torch.full((4,), float(k), device="mps") for k in (1, 2)]
    with checking():
        if shift:
            place = r"byte offset 16 of pointer 1 of buffer 'tensors' \(index 1\), which has 16 bytes"
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
