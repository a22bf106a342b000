"""A rank that is killed, and what comes after."""

import json

import pytest
import torch
from safetensors.torch import load_file


def test_the_others_fail_and_a_restart_does_what_is_missing(ranks, tmp_path):
    from ranks import Ranks

    killed = Ranks(2)
    with pytest.raises(AssertionError, match="rank 0 of example.svd:\nTraceback(.|\n)*rank 1 of .*:\nit has died"):
        killed.run(2, "example.svd", folder=str(tmp_path), fail_at=2)
    killed.stop()
    kept = {path: path.stat().st_mtime_ns for path in tmp_path.glob("results-of-2/*.safetensors")}
    assert len(kept) in (4, 5)  # rank 0 may have done its part of the batch
    ranks.run(2, "example.svd", folder=str(tmp_path))
    report = json.loads((tmp_path / "results-of-2" / "report.json").read_text())
    assert (report["batches done before"], report["batches"]) == (2, 4) and report["largest error"] < 1e-5
    again = {path: path.stat().st_mtime_ns for path in kept}
    assert {path for path in kept if path.name < "000002"} == {path for path in kept if again[path] == kept[path]}
    found = [load_file(path)["S"] for path in sorted(tmp_path.glob("results-of-2/*.safetensors"))]
    given = [load_file(path)["A"] for path in sorted(tmp_path.glob("input/*.safetensors"))]
    torch.testing.assert_close(torch.cat(found), torch.linalg.svdvals(torch.cat(given)), rtol=1e-5, atol=1e-5)
