"""Functions traced to graphs of aten's operations, and their generated kernels."""

import torch
from torch.fx.experimental.proxy_tensor import make_fx

from metalcore.programs import pointwise


def graph_of(function, *tensors):
    """The graph of a function of CPU tensors."""
    return make_fx(function, tracing_mode="fake")(*[tensor.cpu() for tensor in tensors])


def built(function, *tensors, **options):
    return pointwise.build(graph_of(function, *tensors), tensors, **options)


def results(function, *tensors, **options):
    """What the generated kernels and PyTorch on the CPU give: pairs of tensors."""
    made = built(function, *tensors, **options)(*tensors)
    expected = function(*[tensor.cpu() for tensor in tensors])
    return list(zip(made, expected if isinstance(expected, tuple) else (expected,), strict=True))


def placed(tensor, device):
    """A copy on the device with the same strides."""
    base = tensor.as_strided((tensor.untyped_storage().nbytes() // tensor.element_size(),), (1,), 0)
    return base.to(device).as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


def steps(a, *references):
    """The largest distance from the nearest of some references, in units of the last place of that one."""
    nearest = distances(a, *references)
    return nearest.max().item() if nearest.numel() else 0.0


def distances(a, *references):
    """Each element's distance from the nearest of some references, in units of the last place of that one."""
    found = [_steps(a.cpu(), reference.cpu()) for reference in references]
    return torch.stack(found).nan_to_num(nan=torch.inf).amin(0)


def _steps(a, b):
    information = torch.finfo(a.dtype)
    unit = b.double().abs().clamp_min(information.tiny / information.eps) * information.eps
    distance = (a.double() - b.double()).abs() / unit
    return distance.masked_fill((a == b.to(a.dtype)) | (a.isnan() & b.isnan()), 0)
