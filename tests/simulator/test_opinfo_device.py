"""PyTorch's operators on the simulated device: all of op_db, forward and backward, bit by bit as on the CPU.

op_db_device.py lists the entries that differ, and why; a listed entry that agrees fails as well.
"""

import pytest
from op_db_device import CLOSE, EXCEPTIONS, compare, entry_name
from torch.testing._internal.common_methods_invocations import op_db


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("op", op_db, ids=entry_name)
def test_operator_equals_the_cpu(op):
    outcome = compare(op)
    if entry_name(op) in EXCEPTIONS:
        assert outcome is not None, "equal to the CPU by now: no longer an exception"
    else:
        assert outcome is None


def test_exceptions_are_few():
    entries = {entry_name(op) for op in op_db}
    assert len(entries - EXCEPTIONS.keys() - CLOSE.keys()) >= 660
