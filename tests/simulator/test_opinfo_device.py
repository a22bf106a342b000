"""PyTorch's operators on the simulated device: all of op_db, forward and backward, bit by bit as on the CPU.

tests/op_db.py lists the entries that differ, and why; a listed entry that agrees fails as well.
"""

import op_db
import pytest


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
