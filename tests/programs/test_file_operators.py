"""Operators that program files may have, and what the files may not give them."""

import pytest
import torch
from agreement import Calls, agree, change
from torch import nn
from torch.nn.utils.parametrizations import spectral_norm, weight_norm
from torch.torch_version import TorchVersion

import metalcore
from metalcore.programs import ProgramFileError


def spectrogram(x):
    return torch.stft(x, 8, window=torch.hann_window(8, device=x.device), return_complex=True).abs()


MODULES = {
    "broadcast_to": (lambda: Calls(lambda x: torch.broadcast_to(x[:, :1], x.shape) + x), (2, 8)),  # Falcon's keys
    "histc": (lambda: Calls(lambda x: torch.histc(x, bins=4, min=-1, max=1)), (2, 8)),  # rows of each expert
    "diff": (lambda: Calls(lambda x: x.diff(prepend=x[:, :1]).cumsum(-1)), (2, 8)),  # masks of packed sequences
    "weight_norm": (lambda: weight_norm(nn.Linear(8, 5)), (2, 8)),
    "weight_norm of the input": (lambda: weight_norm(nn.Conv1d(8, 5, 3), dim=2), (2, 8, 6)),
    "lstm": (lambda: nn.LSTM(8, 4, num_layers=2, bidirectional=True, batch_first=True), (2, 3, 8)),
    "projected lstm": (lambda: nn.LSTM(8, 4, proj_size=3, bias=False), (2, 3, 8)),
    "gru": (lambda: nn.GRU(8, 4, num_layers=2), (2, 3, 8)),
    "rnn": (lambda: nn.RNN(8, 4, nonlinearity="relu"), (2, 3, 8)),
    "lstm_cell": (lambda: nn.LSTMCell(8, 4), (2, 8)),
    "gru_cell": (lambda: nn.GRUCell(8, 4), (2, 8)),
    "spectral_norm": (lambda: spectral_norm(nn.Linear(8, 5)), (2, 8)),
    "adaptive_max_pool1d": (lambda: nn.AdaptiveMaxPool1d(3), (2, 4, 8)),
    "adaptive_max_pool3d": (lambda: nn.AdaptiveMaxPool3d(2), (1, 2, 4, 5, 6)),
    "rfft": (lambda: Calls(lambda x: torch.fft.irfft(torch.fft.rfft(x) * 2, n=9)), (2, 9)),
    "fft2": (lambda: Calls(lambda x: torch.fft.fftshift(torch.fft.fft2(x)).real), (2, 8)),  # as FNet mixes tokens
    "conj": (lambda: Calls(lambda x: (torch.fft.rfft(x) * torch.fft.rfft(x.flip(-1)).conj()).angle().sinc()), (2, 8)),
    "complex numbers": (lambda: Calls(lambda x: (x * (1 - 2j) + 0.5j).abs()), (2, 8)),
    "distances": (
        lambda: Calls(lambda x: torch.cdist(x, x[:2], p=1) + torch.pairwise_distance(x, x[:1])[:, None]),
        (3, 8),
    ),
    "products": (lambda: Calls(lambda x: torch.tensordot(x, torch.kron(x, x), ([1], [1])).trace()), (1, 1)),
    "norms": (lambda: Calls(lambda x: torch.linalg.norm(torch.linalg.cross(x, x.flip(0)), dim=-1).logit(0.1)), (4, 3)),
    "without nan": (lambda: Calls(lambda x: x.log().nansum(-1) + x.log().nanmean(-1)), (4, 3)),
    "stft": (lambda: Calls(spectrogram), (2, 32)),
    "norms of matrices": (lambda: Calls(lambda x: x.norm() + torch.linalg.matrix_norm(x) + x.norm(dim=(0, 1))), (4, 3)),
    "inverses": (lambda: Calls(lambda x: torch.linalg.inv(x @ x.T + 1) @ torch.linalg.solve(x @ x.T + 2, x)), (2, 2)),
    "determinants": (lambda: Calls(lambda x: torch.linalg.det(x) * x.inverse().det()), (3, 3)),
}


def _with_its_version(name):
    """PyTorch 2.11's traces of some LSTMs have hidden states with a dimension too many. Such a file is refused."""
    wrong = "lstm" in name and "cell" not in name and TorchVersion(torch.__version__) < (2, 13)
    return pytest.param(name, marks=pytest.mark.skipif(wrong, reason="this PyTorch traces LSTMs with wrong shapes"))


@pytest.mark.lenient  # a Mac has kernels for not all of them, and programs run the others on the CPU
@pytest.mark.parametrize("weights", ("inside", "apart"))
@pytest.mark.parametrize("name", map(_with_its_version, MODULES))
def test_a_loaded_program_computes_what_the_module_does(name, weights, device, tmp_path):
    torch.manual_seed(0)
    make, shape = MODULES[name]
    device = "cpu" if name == "projected lstm" else device  # PyTorch has no such layers on Macs' GPUs
    module, x = make().to(device).eval(), torch.randn(shape).to(device)
    metalcore.compile(module, (x,)).save(tmp_path / "module.mcore", weights=weights)
    with torch.no_grad():
        agree(module(x), metalcore.load(tmp_path / "module.mcore")(x))


def test_operators_of_other_libraries_are_refused_with_the_reason(tmp_path):
    with torch.library._scoped_library("program_files_test", "FRAGMENT") as library:
        library.define("twice(Tensor x) -> Tensor")
        library.impl("twice", lambda x: x * 2, "CompositeExplicitAutograd")
        program = metalcore.compile(Calls(lambda x: torch.ops.program_files_test.twice(x)), (torch.ones(3),))
        with pytest.raises(ValueError, match=r"twice\.default, which is neither PyTorch's nor metalcore's"):
            program.save(tmp_path / "twice.mcore")


@pytest.mark.parametrize(
    "kind, place, new",
    [
        (nn.LSTM, 2, [{"value": "x"}] * 4),  # other shapes
        (nn.LSTM, 2, []),
        (nn.LSTM, 4, 0),
        (nn.LSTM, 4, 1 << 60),
        (nn.LSTM, 7, True),
        (nn.GRU, 2, [{"value": "x"}] * 4),
        (nn.GRU, 3, False),
        (nn.GRU, 4, 3),
        (nn.RNN, 2, []),
    ],
)
def test_other_weights_of_recurrent_layers_are_refused(kind, place, new, tmp_path):
    """PyTorch reads beyond the weights' memory, or ends the process."""
    metalcore.compile(kind(8, 4), (torch.ones(3, 2, 8),)).save(tmp_path / "layer.mcore")
    set_entry, manifest = change(tmp_path / "layer.mcore")
    at = next(i for i, entry in enumerate(manifest["operations"]) if entry["operator"].endswith(".input"))
    name = manifest["inputs"][0]["name"]
    new = [{"value": name}] * 4 if new == [{"value": "x"}] * 4 else new
    with pytest.raises(ProgramFileError, match="does not take its arguments"):
        metalcore.load(set_entry(["operations", at, "arguments", place], new))


def test_another_norm_of_weights_is_refused(tmp_path):
    program = metalcore.compile(Calls(lambda v, g: torch._weight_norm(v, g, 0)), (torch.ones(4, 8), torch.ones(4, 1)))
    program.save(tmp_path / "norm.mcore")
    set_entry, manifest = change(tmp_path / "norm.mcore")
    changed = {**manifest["inputs"][1], "shape": [1, 1]}
    with pytest.raises(ProgramFileError, match="1 elements of torch.float32, not 4"):
        metalcore.load(set_entry(["inputs", 1], changed))
