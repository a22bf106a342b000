"""Some of PyTorch's sample inputs through the backend. `python tests/op_db.py compiled` takes all of them."""

import op_db
import pytest
from opinfo import find_op

SOME = (
    *("addmm", "argmax", "cumsum", "einsum", "isclose", "linalg.eigh", "masked.std", "nn.functional.batch_norm"),
    *("nn.functional.conv2d", "nn.functional.cross_entropy", "nn.functional.gelu", "nn.functional.layer_norm"),
    *("nn.functional.rms_norm", "scatter_add", "softmax", "special.i0e", "var", "where"),
)


@pytest.mark.lenient  # the samples have operators that a Mac lacks, which programs run on the CPU
@pytest.mark.parametrize("name", SOME)
def test_entry(device, name):
    assert op_db.compare_compiled(find_op(name), device) == ("agrees", "")
