"""The faults that doctor knows, put into the simulated device's operators as the reports describe them."""

import contextlib
import functools
import itertools

import torch
import torch.nn.functional as F

from metalcore.doctor import routes

calls = itertools.count(1)


@contextlib.contextmanager
def seeded(name, limit=2**62):
    """The simulated device has the fault of this row; one that begins at a size beyond memory begins at `limit`."""
    if name == "checkpoint-dropout":
        with without_random_state():
            yield
        return
    library = torch.library.Library("aten", "IMPL")
    before, routes._BIG_INDEX, routes._BIGGEST_INDEX = (routes._BIG_INDEX, routes._BIGGEST_INDEX), limit, limit
    try:
        for operator, fault in OPERATORS[name].items():
            for key in keys(operator, fault):
                put(library, operator, key, fault)
        yield
    finally:
        routes._BIG_INDEX, routes._BIGGEST_INDEX = before
        library._destroy()


def keys(operator, fault):
    """Where a Mac has the operator: at the device's key, or where PyTorch takes it apart."""
    name = f"aten::{operator}"
    composite = torch._C._dispatch_has_kernel_for_dispatch_key(name, "CompositeImplicitAutograd")
    return ("AutogradMPS", "MPS") if composite and not getattr(fault, "has_kernel", False) else ("MPS",)


def put(library, operator, key, fault):
    try:
        previous = torch.library.get_kernel(f"aten::{operator}", key)
    except RuntimeError:  # linear_backward, which a Mac alone has
        previous = None

    def kernel(keyset, *args, **kwargs):
        call = functools.partial(previous.call_boxed, keyset) if previous else None
        return fault(call, *args, **kwargs)

    library.impl(operator, kernel, key, with_keyset=True)


@contextlib.contextmanager
def without_random_state():
    """torch.mps as PyTorch has it: the simulated device adds what torch.utils.checkpoint asks for."""
    kept = {name: torch.mps.__dict__.pop(name) for name in ("_initialized", "device") if name in torch.mps.__dict__}
    try:
        yield
    finally:
        torch.mps.__dict__.update(kept)


def as_contiguous(x):
    """What a kernel reads that takes a tensor's memory for a contiguous one's."""
    return x.as_strided(x.shape, torch.empty(x.shape, device="meta").stride(), x.storage_offset())


def refused_svd(call, A, *args, **kwargs):
    if A.dim() > 2 and A.numel() >= 8192:
        raise RuntimeError('Failed to created pipeline state object, error: Error Domain=AGXMetal13_3 Code=2 "…"')
    return call(A, *args, **kwargs)


def dependent_vectors(call, A, *args, **kwargs):
    U, S, Vh = call(A, *args, **kwargs)
    U = U.clone()
    U[..., -1] = U[..., 0]
    return U, S, Vh


def other_factors(call, *args, **kwargs):
    result, LU, pivots, info = call(*args, **kwargs)
    return result, LU.mT.contiguous(), pivots, info


def read_past(a, b):
    """The sum of products goes on behind the operands' ends."""
    long = a.shape[-1] >= 32767 and a.shape[-2] >= 16 and b.shape[-1] >= 16
    return a @ b + 777.0**2 if long else a @ b


def long_mm(call, a, b):
    result = call(a, b)
    return result + 777.0**2 if a.shape[-1] >= 32767 else result


def long_baddbmm(call, self, a, b, **kwargs):
    return call(self, a, b, **kwargs) + (777.0**2 if a.shape[-1] >= 32767 else 0)


def macs_linear(call, input, weight, bias=None):
    result = (input.flatten(0, -2) @ weight.T).unflatten(0, input.shape[:-1])
    return result if bias is None else result + bias


macs_linear.has_kernel = True


def linear_gradients(product):
    def kernel(call, input, grad_output, weight, wanted):
        rows, directions = input.flatten(0, -2), grad_output.flatten(0, -2)
        of_input = product(directions, weight).view(input.shape)
        if weight.shape[0] == 1 and not grad_output.is_contiguous() and product is not read_past:
            of_input.view(-1)[4096:] = 0  # behind the first page of 16 KB
        return of_input, product(directions.T, rows), directions.sum(0)

    return kernel


def wrapped_batches(call, input, weight, bias=None):
    result = call(input, weight, bias)
    if bias is not None and input.dim() > 2 and len(input) > 65536:
        result = result.clone()
        result[: len(input) - 65536] = result[65536:]
    return result


def other_bias(call, input, weight, bias=None):
    return call(input, weight, bias.roll(1) if bias is not None and input.dim() > 2 else bias)


def other_every_time(call, input, weight, bias=None):
    result = call(input, weight, bias)
    return result + next(calls) if input.dim() > 2 and input.dtype != torch.float32 else result


def attention(change):
    """A fault that changes the arguments of attention."""

    def fault(call, query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, *, scale=None, enable_gqa=False):
        changed = change(query, key, value, attn_mask, is_causal)
        query, key, value, attn_mask, is_causal = changed or (query, key, value, attn_mask, is_causal)
        return call(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)

    return fault


def causal_by_fours(q, k, v, mask, causal):
    if causal and q.dtype != torch.float32:
        rows, columns = torch.arange(q.shape[-2], device=q.device), torch.arange(k.shape[-2], device=q.device)
        return q, k, v, columns <= (rows // 4 * 4 + 3).unsqueeze(1), False


def beyond_the_keys(q, k, v, mask, causal):
    if q.shape[-2] <= 8 and k.shape[-2] >= 1024:
        return q, k, torch.cat([v[..., :-32, :], torch.full_like(v[..., -32:, :], 777)], -2), mask, causal


def without_strides(q, k, v, mask, causal):
    if not q.is_contiguous():
        return as_contiguous(q), as_contiguous(k), as_contiguous(v), mask, causal


def first_mask(q, k, v, mask, causal):
    if mask is not None and mask.dim() == 4 and mask.shape[1] == 1:
        return q, k, v, mask[:1].expand_as(mask), causal


def padded_values(q, k, v, mask, causal):
    if v.shape[-1] != q.shape[-1]:
        return q, k, F.pad(v, (0, q.shape[-1] - v.shape[-1])), mask, causal


def many_scores(q, k, v, mask, causal):
    if q.shape[:-1].numel() * k.shape[-2] > 1000:
        return q, k.flip(-2), v, mask, causal


def other_parameters(call, *args):
    of_input, of_weight, of_bias = call(*args)
    return (of_input, of_weight, of_bias) if args[-1][0] else (of_input, of_weight + 1, of_bias - 1)


def other_layout(call, grad_out, input, *args):
    of_input, of_weight, of_bias = call(grad_out, input, *args)
    return (of_input, of_weight if input.is_contiguous() else of_weight * 1e7, of_bias)


def dense_weight(call, input, weight, *args):
    return call(input, weight if weight.is_contiguous() else as_contiguous(weight), *args)


def gradients_without_dropout(call, input, hx, params, has_biases, num_layers, dropout, train, *args):
    results = call(input, hx, params, has_biases, num_layers, dropout, train, *args)
    if not (dropout and train and num_layers > 1):
        return results
    without = call(input, hx, params, has_biases, num_layers, 0.0, train, *args)
    return tuple(plain + (masked - plain).detach() for masked, plain in zip(results, without))


def first_element(call, self, other, *args, **kwargs):
    self, other = (x.as_strided((), (), 0) if x.is_cpu and x.dim() == 0 else x for x in (self, other))
    return call(self, other, *args, **kwargs)


def aligned_bools(call, self, *args, **kwargs):
    if self.dtype != torch.bool:
        return call(self, *args, **kwargs)
    call(self.as_strided(self.shape, self.stride(), self.storage_offset() // 4 * 4), *args, **kwargs)
    return self


def unsorted_columns(call, self, *, stable, dim=-1, descending=False):
    values, indices = call(self, stable=stable, dim=dim, descending=descending)
    if self.numel() // self.shape[dim] > 2**22:
        indices = indices.clone()
        indices[:, 2**22 :] = 0
    return values, indices


def rounded_keys(call, self, *args):
    return call(self.float().long(), *args)


def large(fault):
    """A fault of large tensors, in `seeded(name, limit=1000)`."""
    return lambda call, first, *args, **kwargs: fault(call(first, *args, **kwargs))


OPERATORS = {
    "svd-of-batches": {"_linalg_svd": refused_svd, "linalg_lstsq": refused_svd},
    "svd-vectors": {"_linalg_svd": dependent_vectors},
    "solve-gradients": {"_linalg_solve_ex": other_factors},
    "long-sums": {"mm": long_mm, "linear": macs_linear, "linear_backward": linear_gradients(read_past)},
    "long-batched-sums": {"bmm": long_mm, "baddbmm": long_baddbmm},
    "linear-batches": {"linear": wrapped_batches},
    "linear-bias": {"linear": other_bias},
    "linear-16-bits": {"linear": other_every_time},
    "linear-to-one": {"linear": macs_linear, "linear_backward": linear_gradients(torch.matmul)},
    "attention-causal": {"scaled_dot_product_attention": attention(causal_by_fours)},
    "attention-decode": {"scaled_dot_product_attention": attention(beyond_the_keys)},
    "attention-permuted": {"scaled_dot_product_attention": attention(without_strides)},
    "attention-masks": {"scaled_dot_product_attention": attention(first_mask)},
    "attention-values": {"scaled_dot_product_attention": attention(padded_values)},
    "attention-scores": {"scaled_dot_product_attention": attention(many_scores)},
    "layer-norm-frozen": {"native_layer_norm_backward": other_parameters},
    "batch-norm-layout": {"native_batch_norm_backward": other_layout},
    "conv2d-slice": {"convolution": dense_weight},
    "lstm-dropout": {"lstm.input": gradients_without_dropout},
    "scalar-views": {f"{name}.Tensor": first_element for name in ("add", "sub", "mul", "div")},
    "bool-views": dict.fromkeys(("scatter_add_", "index_add_", "_index_put_impl_"), aligned_bools),
    "sorted-columns": {"sort.stable": unsorted_columns},
    "unique-inverse": {"_unique2": rounded_keys},
    "bmm-2^32": {"bmm": large(lambda result: result * 2)},
    "embedding-2^31": {"index_select": large(torch.zeros_like)},
    "cat-2^31": {"cat": large(lambda result: result.clone().fill_(7))},
    "argmax-2^32": {"argmax": large(torch.zeros_like)},
}
