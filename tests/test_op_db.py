"""PyTorch's own operator samples: all of them on the simulated device, forward and backward, bit by bit as on the CPU,
and some of them through the backend. `python tests/op_db.py compiled` takes all of these too.

tests/op_db.py lists the entries that differ, and why; a listed entry that agrees fails as well.
"""

import op_db
import pytest
from opinfo import find_op

pytestmark = pytest.mark.lenient  # the samples have operators that a Mac lacks, which the CPU runs
COMPILED = (
    *("addmm", "argmax", "cumsum", "einsum", "isclose", "linalg.eigh", "masked.std", "nn.functional.batch_norm"),
    *("nn.functional.conv2d", "nn.functional.cross_entropy", "nn.functional.gelu", "nn.functional.layer_norm"),
    *("nn.functional.rms_norm", "scatter_add", "softmax", "special.i0e", "var", "where"),
)


@pytest.mark.only_on("simulator")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("op", op_db.op_db, ids=op_db.entry_name)
def test_operator_equals_the_cpu(op):
    problem = op_db.compare_eager(op)
    if op_db.entry_name(op) in op_db.EXCEPTIONS:
        assert problem, "equal to the CPU by now: no longer an exception"
    else:
        assert not problem


def test_exceptions_are_few():
    entries = set(map(op_db.entry_name, op_db.op_db))
    assert len(entries - op_db.EXCEPTIONS.keys() - op_db.CLOSE.keys()) >= 660


@pytest.mark.parametrize("name", COMPILED)
def test_compiled_operator(device, name):
    assert op_db.compare_compiled(find_op(name), device) == ("agrees", "")
