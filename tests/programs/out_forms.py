"""Which out= forms of PyTorch's operators write their result and nothing else, over op_db's samples.

    python tests/programs/out_forms.py [--device cpu] [--only TEXT] [--write]

Each operator that a sample calls, in its gradient too, is called a second time into a place between guard words, which
is as large as the result and full of ones. --write puts the operators that were always right into
metalcore/_core/out_forms.py, whose operators alone get memory that others share.
"""

import argparse
import itertools
import sys
import textwrap
import time
import warnings
from collections import Counter
from pathlib import Path

import torch
from torch.testing._internal.common_methods_invocations import op_db
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

GUARD = 256  # bytes on each side, which is the arena's alignment as well
DTYPES = (
    *(torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64),
    *(torch.int64, torch.int32, torch.uint8, torch.bool),
)
SAMPLES = {torch.float32: 60}  # and 4 of others
LIST = Path(__file__).parents[2] / "metalcore/_core/out_forms.py"


class Guarded(TorchDispatchMode):
    """Calls the out= forms of the operators that run.

    Attributes:
        right, wrong: how often a form did what it should, and what it did, by its name.
    """

    def __init__(self):
        super().__init__()
        self.right: Counter = Counter()
        self.wrong: dict[str, str] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        from metalcore._core.torch_operators import find_out_variant, full_name

        kwargs = kwargs or {}
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        is_random = torch.Tag.nondeterministic_seeded in func.tags
        state = torch.get_rng_state() if is_random else None
        result = func(*args, **kwargs)
        results = list(result) if isinstance(result, (tuple, list)) else [result]
        if not all(isinstance(r, torch.Tensor) and r.layout is torch.strided and r.is_contiguous() for r in results):
            return result
        if not results or any(t.untyped_storage()._cdata == r.untyped_storage()._cdata for t in given for r in results):
            return result
        found = find_out_variant(func, results[0].device)
        if found is None or full_name(found[0]) in self.wrong:
            return result
        form, names = found
        after = torch.get_rng_state()
        if state is not None:
            torch.set_rng_state(state)
        wrong = check(lambda outs: form(*args, **kwargs, **dict(zip(names, outs))), results)
        torch.set_rng_state(after)
        if wrong:
            self.wrong[full_name(form)] = wrong
        else:
            self.right[full_name(form)] += 1
        return result


def check(call, results):
    """Says what a form that is called with places for results does wrong, or returns an empty text."""
    arenas, places = [], []
    for result in results:
        nbytes = result.numel() * result.element_size()
        arena = torch.full((nbytes + 2 * GUARD,), 0xFF, dtype=torch.uint8, device=result.device)
        place = arena[GUARD : GUARD + nbytes].view(result.dtype).view(result.shape)
        if result.dtype is torch.bool:
            place.fill_(True)
        arenas.append(arena)
        places.append(place)
    before = [(p.shape, p.stride(), p.data_ptr()) for p in places]
    try:
        call(places)
    except Exception as error:
        return f"{type(error).__name__}: {error}".splitlines()[0]
    if before != [(p.shape, p.stride(), p.data_ptr()) for p in places]:
        return "it changes the place's shape"
    for arena, place, result in zip(arenas, places, results):
        if not (arena[:GUARD] == 0xFF).all() or not (arena[len(arena) - GUARD :] == 0xFF).all():
            return "it writes beside its place"
        try:
            torch.testing.assert_close(place, result, equal_nan=True)
        except AssertionError:
            return "it writes another result"
    return ""


def run(op, watch, device):
    """Calls an entry of op_db with its samples."""
    for dtype in DTYPES:
        if dtype not in op.dtypes:
            continue
        differentiable = dtype.is_floating_point and op.supports_autograd
        samples = op.sample_inputs(device, dtype, requires_grad=differentiable)
        try:
            for sample in itertools.islice(samples, SAMPLES.get(dtype, 4)):
                with watch:
                    result = _attempt(lambda: op.op(sample.input, *sample.args, **sample.kwargs))
                    made = [r for r in tree_leaves(result) if isinstance(r, torch.Tensor) and r.requires_grad]
                    if made:
                        _attempt(lambda: torch.autograd.backward([r.abs().sum() for r in made]))
        except Exception:  # an entry makes no samples of the dtype on this device
            continue


def _attempt(function):
    try:
        return function()
    except Exception as error:
        return error


def find(names=None, device="cpu"):
    """Returns the watch after all entries of op_db, or after those with some names."""
    watch = Guarded()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for op in op_db:
            if names is None or op.name in names:
                torch.manual_seed(0)
                run(op, watch, device)
    return watch


def write(names):
    before = LIST.read_text().partition("frozenset(\n")[0]
    listed = textwrap.fill(" ".join(sorted(names)), 116, initial_indent="    ", subsequent_indent="    ")
    LIST.write_text(f'{before}frozenset(\n    """\n{listed}\n    """.split()\n)\n')


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--only", default="")
    parser.add_argument("--write", action="store_true")
    arguments = parser.parse_args()
    if arguments.device == "mps":
        import metalcore.simulator  # noqa: F401
    from metalcore._core.out_forms import SEEN

    torch.set_num_threads(1)
    start = time.time()
    watch = find({op.name for op in op_db if arguments.only in op.name}, arguments.device)
    for name, why in sorted(watch.wrong.items()):
        print(f"{name}: {why}")
    seen = {
        name.removeprefix("aten::") for name in watch.right if name not in watch.wrong and name.startswith("aten::")
    }
    wrong = {name.removeprefix("aten::") for name in watch.wrong}
    print(f"{time.time() - start:.0f} s: {len(seen)} are right, {len(wrong)} wrong")
    print("listed, and wrong:", *sorted(SEEN & wrong))
    print("not listed, and right:", *sorted(seen - SEEN))
    if arguments.write:
        write((seen | SEEN) - wrong)
    return 1 if SEEN & wrong else 0


if __name__ == "__main__":
    sys.exit(main())
