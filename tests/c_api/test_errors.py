"""What the C functions refuse: every check has an argument that fails it. Nothing is written then."""

import subprocess

import pytest
import torch
from c_cases import every_case
from c_program import LIBRARY, Output, compiled

pytestmark = pytest.mark.only_on("simulator")  # they need the kernels for CPUs

BIG = 2**31 - 1
F32 = torch.float32


def out(*shape, **options):
    return Output(*shape, dtype=F32, **options)


def pages(**changed):
    numbers = torch.tensor([0, 1, 3], dtype=torch.int32)
    values = {
        "pages": 4,
        "page_size": 2,
        "heads": 1,
        "head_size": 4,
        "heads_first": 0,
        "requests": 2,
        "indices": 3,
        "kv_indptr": numbers,
        "kv_indices": torch.tensor([2, 0, 1], dtype=torch.int32),
        "kv_last_page_len": torch.tensor([1, 2], dtype=torch.int32),
    }
    assert not changed.keys() - values.keys()
    return [*(values | changed).values()]


def decode(q_heads=2, window=-1, scale=1.0, softcap=0.0, q="q", lse=True, **changed):
    pool = torch.zeros(4, 2, 1, 4)
    q = torch.zeros(2, q_heads, 4) if q == "q" else q
    sums = out(2, q_heads) if lse else None
    return [
        "batch_decode_float",
        *pages(**changed),
        q,
        pool,
        pool,
        out(2, q_heads, 4),
        sums,
        q_heads,
        window,
        scale,
        softcap,
    ]


def prefill(qo_indptr=(0, 1, 2), tokens=2):
    pool, q = torch.zeros(4, 2, 1, 4), torch.zeros(2, 1, 4)
    indptr = torch.tensor(qo_indptr, dtype=torch.int32)
    return ["batch_prefill_float", *pages(), q, indptr, pool, pool, out(2, 1, 4), None, tokens, 1, 1, -1, 1.0, 0.0]


def int32(*numbers):
    return torch.tensor(numbers, dtype=torch.int32)


X = torch.ones(2, 4)
SMALL = torch.ones(4, 4)


def rope(q_heads=1, k_heads=1, head_size=4, pairs=2, table_rows=3, k=True):
    q, tables, positions = torch.ones(2, 1, 4), torch.ones(3, 2), torch.zeros(2, dtype=torch.int64)
    arguments = [q, q if k else None, tables, tables, positions, out(2, 1, 4), out(2, 1, 4)]
    return ["rope_float", *arguments, 2, q_heads, k_heads, head_size, pairs, table_rows, 0]


def sample(vocab=4, temperature=1.0, top_k=0, top_p=1.0):
    return ["sample_float", X, torch.zeros(2), Output(2, dtype=torch.int64), 2, vocab, temperature, top_k, top_p]


REFUSED = {
    "in is NULL": ["softmax_float", None, out(2, 4), 2, 4, 1.0],
    "out is NULL": ["softmax_float", X, None, 2, 4, 1.0],
    "batch must not be negative": ["softmax_float", X, out(2, 4), -1, 4, 1.0],
    "vocab must not be negative": ["softmax_float", X, out(2, 4), 2, -4, 1.0],
    "temperature must be positive and finite": ["softmax_float", X, out(2, 4), 2, 4, -1.0],
    "temperature must be positive and finite ": ["softmax_float", X, out(2, 4), 2, 4, "nan"],
    "out is not aligned to its elements": ["softmax_float", X, out(2, 4, offset=2), 2, 4, 1.0],
    "in has more bytes than memory can have": ["silu_and_mul_float", X, out(2, 4), BIG, BIG],
    "in does not fit into memory": ["softmax_float", X, out(2, 4), BIG, BIG // 2 + 1, 1.0],
    "width must not be negative": ["silu_and_mul_float", X, out(2, 2), 2, -2],
    "eps must be finite and not negative": ["rms_norm_float", X, None, out(2, 4), 2, 4, -1.0],
    "residual is NULL": ["add_rms_norm_float", X, None, None, out(2, 4), out(2, 4), 2, 4, 0.1],
    "sum is NULL": ["add_rms_norm_float", X, X, None, out(2, 4), None, 2, 4, 0.1],
    "head_size must be positive, not 0": rope(head_size=0),
    "pairs must be positive, not 0": rope(pairs=0),
    "pairs must be at most half of head_size": rope(pairs=3),
    "k is NULL": rope(k=False),
    "q_heads must not be negative": rope(q_heads=-1),
    "table_rows must not be negative": rope(table_rows=-1),
    "table_rows must not be negative ": ["embedding_float", SMALL, int32(0), out(1, 4), -4, 4, 1],
    "indices is NULL": ["embedding_float", SMALL, None, out(1, 4), 4, 4, 1],
    "lda must be at least the length of a row": ["gemm_float", X, SMALL, None, out(2, 4), 2, 4, 4, 0, 0, 3, 4],
    "ldb must be at least the length of a row": ["gemm_float", X, SMALL, None, out(2, 4), 2, 4, 4, 0, 1, 4, 3],
    "n must not be negative": ["gemm_float", X, SMALL, None, out(2, 4), 2, -4, 4, 0, 0, 4, 4],
    "a is NULL": ["gemm_float", None, SMALL, None, out(2, 4), 2, 4, 4, 0, 0, 4, 4],
    "b is NULL": ["grouped_gemm_float", X, None, int32(1, 2), out(2, 4), 2, 4, 4, 2, 0],
    "ends must ascend from 0 to at most 2": ["grouped_gemm_float", X, X, int32(2, 1), out(2, 2), 2, 2, 2, 2, 0],
    "count must not be negative": ["add_float", X, X, out(2, 4), -1],
    "count must not be negative ": ["cast_float_to_bfloat16", X, Output(8, dtype=torch.bfloat16), -1],
    "k must be from 0 to vocab, and at most 65536": ["topk_float", X, out(2, 5), out(2, 10), 2, 4, 5],
    "k must be from 1 to 16777216": ["top_k_mask_logits_float", X, out(2, 4), 2, 4, 0],
    "vocab must be positive, not 0": sample(vocab=0),
    "temperature must be finite and not negative": sample(temperature=-1.0),
    "top_k must not be negative": sample(top_k=-1),
    "top_p must be above 0 and at most 1": sample(top_p=0.0),
    "pages->page_size must be positive, not 0": decode(page_size=0),
    "pages->heads must be positive, not -1": decode(heads=-1),
    "pages->head_size must be positive, not 0": decode(head_size=0),
    "pages->head_size must be at most 256": decode(head_size=257),
    "pages->requests must not be negative": decode(requests=-1),
    "pages->pages must not be negative": decode(pages=-1),
    "pages->indices must not be negative": decode(indices=-1),
    "pages->indices times pages->page_size must be below 2^30": decode(indices=2**30),
    "pages->kv_indptr is NULL": decode(kv_indptr=None),
    "pages->kv_indices is NULL": decode(kv_indices=None),
    "pages->kv_last_page_len is NULL": decode(kv_last_page_len=None),
    "pages->kv_indptr must ascend from 0 to at most 3": decode(kv_indptr=int32(0, 2, 1)),
    "pages->kv_indptr must ascend from 0 to at most 3 ": decode(kv_indptr=int32(0, 2, 4)),
    "pages->kv_indices must be from 0 to 3": decode(kv_indices=int32(0, 1, 4)),
    "pages->kv_last_page_len must be from 0 to 2": decode(kv_last_page_len=int32(1, 3)),
    "q is NULL": decode(q=None),
    "q_heads must be a multiple of pages->heads": decode(heads=2, q_heads=3),
    "scale must be finite": decode(scale="inf"),
    "softcap must be finite and not negative": decode(softcap=-1.0),
    "qo_indptr must ascend from 0 to at most 2": prefill((0, 1, 3)),
    "tokens must not be negative": prefill(tokens=-2),
}


def test_refused(c_program, calls):
    for arguments in REFUSED.values():
        calls.add(*as_words(arguments))
    for text, (function, *_), (status, _, error, results) in zip(REFUSED, REFUSED.values(), calls.run(c_program)):
        assert status == "METALCORE_INVALID_ARGUMENT", (text, status, error)
        assert error == f"metalcore_{function}: {text.strip()}"
        for result in results:
            assert (result.view(torch.uint8) == 0x5A).all()


def as_words(arguments):
    """The arguments of Calls.add, in which numbers may be words ("nan")."""
    function, *rest = arguments
    return [function, *(_Text(argument) if isinstance(argument, str) else argument for argument in rest)]


class _Text(str):
    """A number as it stands in the file of calls."""

    __repr__ = str.__str__


PROGRAM = r"""
#include <assert.h>
#include <metalcore.h>
#include <pthread.h>
#include <string.h>

static float x[8] = {1, 2, 3, 4, 5, 6, 7, 8}, y[8];

static void* other(void* text) {
  assert(!strcmp(metalcore_last_error(), "")); /* the error is the other thread's */
  strcpy((char*)text, "done");
  return NULL;
}

int main(void) {
  metalcore_context *a = NULL, *b = (metalcore_context*)&a;
  pthread_t thread;
  char text[8] = "";
  void* memory = x;
  assert(!strcmp(metalcore_last_error(), ""));
  assert(metalcore_softmax_float(x, x + 4, 1, 8, 1.0f) == METALCORE_INVALID_ARGUMENT);
  assert(!strcmp(metalcore_last_error(), "metalcore_softmax_float: out overlaps in"));
  assert(metalcore_softmax_float(x, x, 1, 8, 1.0f) == METALCORE_INVALID_ARGUMENT);
  assert(metalcore_add_rms_norm_float(x, x, NULL, y, y + 1, 1, 4, 0.1f) == METALCORE_INVALID_ARGUMENT);
  assert(!strcmp(metalcore_last_error(), "metalcore_add_rms_norm_float: sum overlaps out"));
  assert(metalcore_softmax_float(x, x + 4, 1, 4, 1.0f) == METALCORE_OK); /* neighbours do not overlap */
  assert(metalcore_context_create(&b, METALCORE_METAL, 0, NULL) == METALCORE_NO_DEVICE && !b);
  assert(metalcore_context_create(&b, 77, 0, NULL) == METALCORE_INVALID_ARGUMENT);
  assert(metalcore_context_create(&b, METALCORE_CPU, 1, NULL) == METALCORE_INVALID_ARGUMENT);
  assert(metalcore_context_create(NULL, METALCORE_CPU, 0, NULL) == METALCORE_INVALID_ARGUMENT);
  assert(metalcore_context_create(&a, METALCORE_CPU, 0, NULL) == METALCORE_OK && a);
  assert(metalcore_context_use(a) == METALCORE_OK);
  assert(metalcore_softmax_float(x, y, 2, 4, 1.0f) == METALCORE_OK);
  assert(metalcore_context_destroy(a) == METALCORE_OK);
  assert(metalcore_softmax_float(x, y, 2, 4, 1.0f) == METALCORE_OK); /* in the thread's own context */
  assert(metalcore_context_destroy(NULL) == METALCORE_OK);
  assert(metalcore_memory_allocate(4, NULL) == METALCORE_INVALID_ARGUMENT);
  assert(!strcmp(metalcore_last_error(), "metalcore_memory_allocate: memory is NULL"));
  assert(metalcore_memory_allocate((size_t)1 << 60, &memory) == METALCORE_OUT_OF_MEMORY && !memory);
  assert(metalcore_memory_allocate(0, &memory) == METALCORE_OK && !memory);
  assert(metalcore_memory_allocate(4, &memory) == METALCORE_OK && (size_t)memory % 256 == 0);
  assert(metalcore_memory_free(memory) == METALCORE_OK && metalcore_memory_free(NULL) == METALCORE_OK);
  assert(!pthread_create(&thread, NULL, other, text) && !pthread_join(thread, NULL) && !strcmp(text, "done"));
  assert(!strcmp(metalcore_status_name(METALCORE_BUSY), "METALCORE_BUSY"));
  assert(!strcmp(metalcore_status_name(99), "an unknown status"));
  assert(!strcmp(metalcore_version(), VERSION));
  return 0;
}
"""


def test_contexts_and_errors(tmp_path):
    import metalcore

    if not (LIBRARY / "libmetalcore.so").exists():
        pytest.skip("libmetalcore is built for Linux")
    source = tmp_path / "program.c"
    source.write_text(PROGRAM)
    program = compiled(source, tmp_path / "program", f'-DVERSION="{metalcore.__version__}"')
    done = subprocess.run([str(program)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_every_pointer_is_checked(c_program, calls):
    """Each array of each function's first case in turn is NULL. Only a weight, lse and k may be."""
    functions = {}
    for function, arguments, _ in every_case(F32):
        functions.setdefault(function, arguments)
    expected = []
    for function, arguments in functions.items():
        for index, argument in enumerate(arguments):
            if not isinstance(argument, (int, float)):
                calls.add(function, *arguments[:index], None, *arguments[index + 1 :])
                expected.append((function, index))
    reports = calls.run(c_program)
    allowed = {
        (function, index) for (function, index), (status, *_) in zip(expected, reports) if status == "METALCORE_OK"
    }
    assert allowed == {
        ("rms_norm_float", 1),
        ("gemm_float", 2),
        ("add_rms_norm_float", 2),
        ("batch_prefill_float", 15),
        ("batch_decode_float", 14),
        ("paged_append_float", 9),
    }
    assert all(status in ("METALCORE_OK", "METALCORE_INVALID_ARGUMENT") for status, *_ in reports)


def test_sizes_of_zero(c_program, calls):
    """Each size of each function's first case in turn is 0. There may be nothing to do, and no call goes wrong."""
    functions = {}
    for function, arguments, _ in every_case(F32):
        functions.setdefault(function, arguments)
    for function, arguments in functions.items():
        for index, argument in enumerate(arguments):
            if type(argument) is int:
                calls.add(function, *arguments[:index], 0, *arguments[index + 1 :])
    for (status, _, error, _), line in zip(calls.run(c_program, METALCORE_CHECK="1"), calls.lines):
        assert status in ("METALCORE_OK", "METALCORE_INVALID_ARGUMENT"), (line, error)
