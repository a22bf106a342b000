"""Programs of files that libmetalcore runs on a GPU: the bits of Python's replay there."""

import sys
from pathlib import Path

import pytest
import torch

sys.path.append(str(Path(__file__).resolve().parents[1] / "c_api"))
from c_program import HERE
from c_program import compiled as linked
from saved_programs import PATTERNS, Block, Mlp, Pair, Pooled, Residual, Runs, compiled, read_like, replayed

from metalcore.msl.nvidia import nvrtc


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_bits_of_pythons_replay(dtype, tmp_path):
    program = linked(HERE / "programs.c", tmp_path / "programs")
    runs, expected = Runs(tmp_path), []
    for kind in (Mlp, Residual, Block, Pair, Pooled):
        fusions = [*PATTERNS, "single"] if kind is Pooled else PATTERNS
        made, arguments = compiled(kind, "cuda", dtype, fusions)
        made.save(tmp_path / f"{kind.__name__}.mcore", recordings=True)
        results = replayed(made, arguments)
        expected.append((results, runs.add(tmp_path / f"{kind.__name__}.mcore", arguments, results)))
    environment = {"METALCORE_NVRTC": str(nvrtc.find().path)}
    reports = runs.run(program, "--device", "1", "--repeat", "3", environment=environment)
    for (results, paths), (status, _, error) in zip(expected, reports, strict=True):
        assert status == "METALCORE_OK", error
        for path, like in zip(paths, results, strict=True):
            assert torch.equal(read_like(path, like).view(torch.uint8), like.view(torch.uint8))
