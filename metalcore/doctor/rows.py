"""The faults that doctor knows: one row for each public report, with what its thread says."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from . import probes, routes
from .machine import Machine
from .probes import Deviation
from .routes import Route, forms

__all__ = ["ROWS", "Row", "row_of"]

ATTENTION = "scaled_dot_product_attention"
METALCORES = "`metalcore.{}`; the CPU for what it does not take"
ON_CPU = "the CPU"


@dataclass(frozen=True, eq=False)
class Row:
    """A fault of PyTorch's MPS backend.

    Attributes:
        name: what doctor calls it.
        reports: the numbers of the reports in pytorch/pytorch, the first of which has the reproducer.
        what: what is wrong.
        reported_for: the versions of PyTorch, or where the thread names none, the month of the report.
        chips: those that the thread names, or "any".
        probe: tries it on a device. None where that takes more memory than many Macs have, or a GPU that faults: then
            `judged` decides by the version.
        judged: the first and the last release that has it; None as the last: no release is known that does not.
        instead: what computes under enable_pytorch_overrides("safe"), in words; "" if nothing can.
        overrides: the overrides that "safe" switches on.
        routes: what it puts into PyTorch's dispatcher beneath them.
        patch: changes something else of PyTorch's; it has a count for metalcore.report(), and returns what undoes it.
    """

    name: str
    reports: tuple[int, ...]
    what: str
    reported_for: str
    instead: str
    chips: str = "any"
    probe: Callable[[str], Deviation] | None = None
    judged: tuple[tuple[int, int], tuple[int, int] | None] | None = None
    overrides: tuple[str, ...] = ()
    routes: tuple[Route, ...] = ()
    patch: Callable[..., Callable[[], None]] | None = None

    def judge(self, machine: Machine) -> bool:
        """Returns whether PyTorch's version has the fault, of a row without a probe."""
        assert self.judged
        first, last = self.judged
        return not machine.simulated and first <= machine.release and (last is None or machine.release <= last)


def _attention(name, report, what, reported_for, probe, applies, **more):
    return Row(
        name,
        (report,),
        what,
        reported_for,
        METALCORES.format(ATTENTION),
        probe=probe,
        overrides=(ATTENTION,),
        routes=(Route((ATTENTION,), applies),),
        **more,
    )


ROWS = (
    Row(
        "svd-of-batches",
        (195937, 192802),
        "svd, svdvals and lstsq of a batch with 8,192 elements or more fail: Metal's compiler refuses the kernel",
        "2.14.0",
        "`metalcore.svd` and `metalcore.lstsq`; the CPU for what they do not take",
        probe=probes.batched_svd,
        overrides=("svd",),
        routes=(
            Route(("_linalg_svd", "_linalg_svd.U"), routes.in_batches),
            Route(("linalg_lstsq", "linalg_lstsq.out"), routes.in_batches, routes.least_squares),
        ),
    ),
    Row(
        "svd-vectors",
        (196112,),
        "svd of matrices of lower rank gives singular vectors that are not orthogonal",
        "2.14",
        METALCORES.format("svd"),
        probe=probes.orthogonal_singular_vectors,
        overrides=("svd",),
        routes=(Route(("_linalg_svd", "_linalg_svd.U"), routes.in_batches),),
    ),
    Row(
        "solve-gradients",
        (175192,),
        "the gradients of linalg.solve are wrong",
        "2.10.0, a nightly of 2.12",
        METALCORES.format("solve"),
        probe=probes.solve_gradients,
        overrides=("lu_solve", "solve"),
        routes=(
            Route(("_linalg_solve_ex", "_linalg_solve_ex.result"), routes.always),
            Route(("linalg_lu_solve", "linalg_lu_solve.out"), routes.always),
        ),
    ),
    Row(
        "long-sums",
        (193487, 177116, 195163),
        "mm, addmm and linear add memory behind their operands to sums of 32,767 terms or more, so that results depend "
        "on what the allocator held before: also the gradients of linear over as many tokens",
        "2.7 to 2.13; 2.14 for 32,767 and 32,768 terms",
        METALCORES.format("matmul"),
        chips="M1, M2",
        probe=probes.long_sums,
        routes=(
            Route(forms("mm"), routes.long_sum, routes.product),
            Route(forms("addmm"), routes.long_sum_and_more, routes.product_and_more),
            Route(("linear",), routes.long_linear, routes.linear),
            Route(("linear_backward",), routes.long_gradients, routes.linear_gradients),
        ),
    ),
    Row(
        "long-batched-sums",
        (195163,),
        "bmm, baddbmm, addbmm and what is made of them, such as einsum, do the same",
        "2.13, 2.14, nightlies of 2.15",
        METALCORES.format("matmul"),
        chips="M1, M2",
        probe=probes.batched_long_sums,
        routes=(
            Route(forms("bmm"), routes.long_sum, routes.product),
            Route(forms("baddbmm"), routes.long_sum_and_more, routes.product_and_more),
            Route(forms("addbmm"), routes.long_sum_and_more),
        ),
    ),
    Row(
        "linear-batches",
        (189495,),
        "linear with a bias mixes up the rows of more than 65,536 batches",
        "2.12.0, 2.13.0, a nightly of 2.14",
        METALCORES.format("linear"),
        chips="M5 Max",
        probe=probes.linear_of_many_batches,
        routes=(Route(("linear",), routes.with_batches_and_bias, routes.linear),),
    ),
    Row(
        "linear-bias",
        (188438, 192934),
        "linear with a bias is wrong for input of three dimensions on macOS 26",
        "2.13.0, a nightly of 2.14",
        METALCORES.format("linear"),
        chips="M1",
        probe=probes.linear_with_bias,
        routes=(Route(("linear",), routes.with_batches_and_bias, routes.linear),),
    ),
    Row(
        "linear-16-bits",
        (180776, 181936),
        "linear and its gradient in float16 and bfloat16 give other numbers from call to call, for input of three "
        "dimensions",
        "April 2026",
        METALCORES.format("linear"),
        chips="M5",
        probe=probes.linear_in_16_bits,
        routes=(
            Route(("linear",), routes.with_batches, routes.linear),
            Route(("linear_backward",), routes.with_batches, routes.linear_gradients),
        ),
    ),
    Row(
        "linear-to-one",
        (189565,),
        "the gradient of linear's input is zero behind the first 16 KB, if there is one output and the loss is a sum",
        "2.13.0",
        METALCORES.format("matmul"),
        probe=probes.linear_to_one_output,
        routes=(Route(("linear_backward",), routes.to_one_output, routes.linear_gradients),),
    ),
    _attention(
        "attention-causal",
        195910,
        "causal attention in float16 and bfloat16 sees keys of the future",
        "2.10.0 wrong, 2.14.0 right",
        probes.causal_attention_in_16_bits,
        routes.causal_in_16_bits,
    ),
    _attention(
        "attention-decode",
        174861,
        "attention of up to 8 queries to 1,024 keys or more reads memory that is not its own",
        "before 2.11",
        probes.attention_of_one_query,
        routes.few_queries,
    ),
    _attention(
        "attention-permuted",
        181133,
        "attention of permuted queries and keys, as models make them of (batch, length, heads, size), is wrong in "
        "batches",
        "before 2.12",
        probes.attention_of_permuted_tensors,
        routes.not_contiguous,
    ),
    _attention(
        "attention-masks",
        184180,
        "attention of up to 8 queries uses the first mask for all of a batch, where a mask is shared by the heads",
        "May 2026",
        probes.attention_with_masks_of_batches,
        routes.masks_of_batches,
    ),
    _attention(
        "attention-values",
        176767,
        "attention is wrong if values and queries differ in size",
        "before 2.12",
        probes.attention_with_values_of_another_size,
        routes.values_of_another_size,
    ),
    _attention(
        "attention-scores",
        179352,
        "attention with more than 2³² scores is wrong",
        "up to 2.12",
        None,
        routes.many_scores,
        judged=((2, 10), (2, 12)),
    ),
    Row(
        "layer-norm-frozen",
        (183825,),
        "the gradients of layer_norm's weight and bias are wrong, and differ from run to run, if the input needs none",
        "May 2026",
        METALCORES.format("layer_norm"),
        probe=probes.layer_norm_gradients,
        overrides=("layer_norm",),
        routes=(Route(("native_layer_norm_backward",), routes.frozen_input),),
    ),
    Row(
        "batch-norm-layout",
        (175189,),
        "the gradients of batch_norm of channels_last input are wrong, or raise an error",
        "February 2026",
        ON_CPU,
        probe=probes.batch_norm_gradients,
        routes=(Route(("native_batch_norm_backward",), routes.rearranged),),
    ),
    Row(
        "conv2d-slice",
        (192212,),
        "conv2d with a slice of a larger tensor as weight is wrong",
        "2.13.0 wrong, 2.14.0 right",
        METALCORES.format("conv2d"),
        probe=probes.convolution_with_a_slice,
        routes=(Route(("convolution",), routes.by_a_slice, routes.convolution),),
    ),
    Row(
        "lstm-dropout",
        (190056,),
        "the gradients of an LSTM of several layers with dropout are those without it",
        "a build of 2.14 before its release",
        ON_CPU,
        probe=probes.lstm_gradients,
        routes=(Route(("lstm.input",), routes.with_dropout),),
    ),
    Row(
        "checkpoint-dropout",
        (127676,),
        "activation checkpointing draws another dropout mask in backward, so that gradients are wrong: the state of "
        "the device's random numbers is not kept",
        "every release (the fix, #194478, is open)",
        "checkpointing keeps the state",
        probe=probes.checkpointed_dropout,
        patch=routes.checkpoints_keep_random_state,
    ),
    Row(
        "scalar-views",
        (187117, 193057),
        "arithmetic of a tensor and an element of a CPU tensor, as x * steps[4], takes the first element",
        "2.12.0, 2.13.0 (2.14.0 is right)",
        "PyTorch's op, with a copy of the element",
        probe=probes.scalar_views,
        routes=(
            Route(
                forms("add.Tensor", "sub.Tensor", "mul.Tensor", "div.Tensor"),
                routes.scalar_view,
                routes.copied_scalar,
            ),
        ),
    ),
    Row(
        "bool-views",
        (195074,),
        "scatter_add_, index_add_ and index_put_(accumulate=True) into a view of bools write to other elements",
        "August 2026",
        ON_CPU,
        probe=probes.bool_views,
        routes=(Route((*forms("scatter_add", "index_add"), "_index_put_impl_"), routes.bool_view),),
    ),
    Row(
        "sorted-columns",
        (183885,),
        "sort and argsort of more than 2²² columns along them are wrong",
        "May 2026",
        ON_CPU,
        probe=probes.sorted_columns,
        routes=(Route(("sort.stable", "sort.values_stable"), routes.many_columns),),
    ),
    Row(
        "unique-inverse",
        (195595,),
        "unique(return_inverse=True) confuses int64 numbers above 2²⁴",
        "September 2026",
        ON_CPU,
        probe=probes.unique_inverse,
        routes=(Route(("_unique2",), routes.of_int64),),
    ),
    Row(
        "bmm-2^32",
        (197636,),
        "bmm is wrong if an operand, or with strides the result, has more than 2³² elements",
        "2.4.1 to 2.14.0",
        ON_CPU,
        judged=((2, 10), None),
        routes=(Route(forms("bmm"), routes.big_operand),),
    ),
    Row(
        "embedding-2^31",
        (188756,),
        "index_select and embedding give rows of zeros if the table has more than 2³¹ elements",
        "2.13 (2.14.0 is right)",
        ON_CPU,
        judged=((2, 10), (2, 13)),
        routes=(Route(("index_select", "index_select.out"), routes.big_source),),
    ),
    Row(
        "cat-2^31",
        (189960,),
        "cat with a result of more than 2³¹ elements leaves some unwritten, and writes before its memory",
        "2.13.0 (the fix, #189965, is of July 2026)",
        ON_CPU,
        judged=((2, 10), (2, 13)),
        routes=(Route(("cat", "cat.out"), routes.big_sum),),
    ),
    Row(
        "argmax-2^32",
        (194082,),
        "argmax, argmin, any and all of more than 2³² elements are wrong",
        "2.13.0 (2.14.0 raises an error)",
        ON_CPU,
        judged=((2, 10), (2, 13)),
        routes=(
            Route(
                ("argmax", "argmax.out", "argmin", "argmin.out", "any", "any.all_out", "all", "all.all_out"),
                routes.biggest_source,
            ),
        ),
    ),
    Row(
        "command-buffers",
        (193571,),
        "work that the GPU gives up, such as a command buffer that took too long, raises no error, and results are "
        "what was in memory",
        "before 2.15",
        "",
        judged=((2, 10), (2, 14)),
    ),
)


def row_of(name: str) -> Row:
    """Returns the row of this name.

    Raises:
        ValueError: there is none.
    """
    for row in ROWS:
        if row.name == name:
            return row
    raise ValueError(f"doctor knows no fault {name!r}; it knows {', '.join(row.name for row in ROWS)}")
