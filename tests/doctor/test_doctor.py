"""python -m metalcore doctor and enable_pytorch_overrides("safe"): each known fault, seeded into the simulated device,
is found and named, and "safe" goes around it."""

import json
import re
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from seeds import OPERATORS, seeded

import metalcore
from metalcore import doctor
from metalcore.cli import main
from metalcore.doctor import results

pytestmark = [pytest.mark.only_on("simulator"), pytest.mark.lenient]
ROOT = Path(__file__).resolve().parents[2]
MAC = doctor.Machine("2.12.0", "Apple M1, 8 cores", "macOS 26.5", False)
PROBED = [row.name for row in doctor.ROWS if row.probe]
JUDGED = [row.name for row in doctor.ROWS if not row.probe]


@pytest.fixture(autouse=True)
def own_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("METALCORE_CACHE_DIR", str(tmp_path))


@pytest.fixture
def on_a_mac(monkeypatch):
    """Rows without a probe are judged for a Mac's PyTorch."""
    monkeypatch.setattr(doctor, "this_machine", lambda: MAC)


def keep(machine, *faults):
    """The cache says that the machine has these faults and no others."""
    status = lambda row: "WRONG" if row.name in faults else "right"  # noqa: E731
    doctor.save(machine, [doctor.Outcome(row.name, status(row)) for row in doctor.ROWS])


def doctor_says(capsys, *arguments):
    code = main(["doctor", "--device", "simulator", *arguments])
    return code, capsys.readouterr().out


def test_every_row_is_tried_here():
    assert set(OPERATORS) | {"checkpoint-dropout", "command-buffers"} == {row.name for row in doctor.ROWS}
    assert set(JUDGED) == {*LARGE, "command-buffers"}
    for row in doctor.ROWS:
        assert (row.probe is None) != (row.judged is None) and row.reports
        assert bool(row.instead) == bool(row.routes or row.patch)


def test_the_device_without_seeds_has_no_fault(capsys):
    code, said = doctor_says(capsys)
    assert code == 0, said
    for row in doctor.ROWS:
        assert re.search(rf"^{'right' if row.probe else 'not affected'} +{re.escape(row.name)} ", said, re.M)
    assert f"none of {len(doctor.ROWS)} known faults shows" in said
    machine = doctor.this_machine()
    assert set(doctor.load(machine)) == {row.name for row in doctor.ROWS}
    assert doctor.faults(machine) == ()  # from the cache


@pytest.mark.parametrize("name", PROBED)
def test_a_seeded_fault_is_found_and_gone_around(name, capsys):
    row, machine = doctor.row_of(name), doctor.this_machine()
    keep(machine)
    with seeded(name):
        code, said = doctor_says(capsys, name, "--in-process")
        assert code == 1
        assert re.search(rf"^(WRONG|FAILS) +{name} +pytorch#{row.reports[0]}\b", said, re.M)
        assert f"1 of 1 known faults show: {name}" in said and row.reported_for in said
        with metalcore.enable_pytorch_overrides("safe"):
            assert set(metalcore.active_overrides()) == {*row.overrides, "safe"}
            outcome = doctor.judge(row, machine)
            assert outcome.status == "right", outcome
            counted = [one for one in metalcore.report().rows if one.override in metalcore.active_overrides()]
            assert any(one.ran or one.left for one in counted if one.replaced)
        assert metalcore.active_overrides() == ()
        assert doctor.judge(row, machine).is_fault
    assert doctor.judge(row, machine).status == "right"


def on(device, *shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(device)


def attends(device):
    q, k, v = (on(device, 1, 2, 32, 16, seed=seed) for seed in range(3))
    return F.scaled_dot_product_attention(q, k, v)


# What a fault of large tensors touches, where it begins at 1,000 elements.
LARGE = {
    "attention-scores": attends,
    "bmm-2^32": lambda device: torch.bmm(on(device, 2, 16, 40), on(device, 2, 40, 16)),
    "embedding-2^31": lambda device: F.embedding(torch.tensor([3, 199], device=device), on(device, 200, 8)),
    "cat-2^31": lambda device: torch.cat([on(device, 600), on(device, 600, seed=1)]),
    "argmax-2^32": lambda device: on(device, 40, 40).argmax(1),
}


@pytest.mark.parametrize("name", LARGE)
def test_a_fault_of_large_tensors_is_judged_by_the_version(name, capsys, on_a_mac):
    keep(MAC)
    code, said = doctor_says(capsys, name, "--in-process")
    assert code == 1 and re.search(rf"^AFFECTED +{re.escape(name)} .*by the version", said, re.M)
    expected = LARGE[name]("cpu")
    with seeded(name, limit=1000):
        with metalcore.enable_pytorch_overrides("safe"):
            torch.testing.assert_close(LARGE[name]("mps").cpu(), expected)
        assert not torch.allclose(LARGE[name]("mps").cpu(), expected)


@pytest.mark.parametrize(
    ("name", "release", "affected"),
    [
        ("attention-scores", "2.12.1", True),
        ("attention-scores", "2.13.0", False),
        ("bmm-2^32", "2.16.0.dev20261101", True),
        ("command-buffers", "2.14.0", True),
        ("command-buffers", "2.15.0", False),
    ],
)
def test_versions(name, release, affected):
    row = doctor.row_of(name)
    assert doctor.judge(row, MAC._replace(torch=release)).is_fault == affected
    assert not doctor.judge(row, MAC._replace(torch=release, simulated=True)).is_fault


def test_a_fault_that_nothing_can_go_around_is_in_the_report(on_a_mac):
    keep(MAC, "command-buffers")
    with metalcore.enable_pytorch_overrides("safe"):
        assert "not replaced, since nothing can stand in its place" in str(metalcore.report())


def test_crashes_and_hangs_are_results():
    names = ("scalar-views", "unique-inverse", "bool-views", "attention-masks")
    rows = [doctor.row_of(name) for name in names]
    found = list(doctor.judge_apart(rows, doctor.this_machine(), seconds=8, modules=["broken_probes"]))
    assert [outcome.status for outcome in found] == ["CRASHES", "right", "HANGS", "right"]
    assert found[0].note == "SIGABRT: failed assertion 'Axis = 4'" and found[2].note == "longer than 8 s"
    assert [outcome.is_fault for outcome in found] == [True, False, True, False]


def test_safe_runs_the_probes_where_nobody_has(monkeypatch):
    tried = []

    def judge_apart(rows, machine):
        tried.append([row.name for row in rows])
        return [doctor.Outcome(row.name, "right") for row in rows]

    monkeypatch.setattr(results, "judge_apart", judge_apart)
    doctor.save(doctor.this_machine(), [doctor.Outcome("svd-vectors", "WRONG")])
    with pytest.warns(UserWarning, match=f'"safe" tries {len(doctor.ROWS) - 1} known faults, once for PyTorch'):
        metalcore.enable_pytorch_overrides("safe")
    with metalcore.enable_pytorch_overrides("safe"):
        assert metalcore.active_overrides() == ("svd", "safe")
    assert tried == [[row.name for row in doctor.ROWS if row.name != "svd-vectors"]]


def test_another_pytorch_has_results_of_its_own():
    machine = doctor.this_machine()
    keep(machine, "svd-vectors")
    assert doctor.load(machine._replace(torch="2.99.0")) == {}
    assert doctor.load(machine)["svd-vectors"].is_fault


def test_safe_is_asked_for_by_name():
    keep(doctor.this_machine(), "scalar-views")
    with metalcore.enable_pytorch_overrides():
        assert "safe" not in metalcore.active_overrides()
    with metalcore.enable_pytorch_overrides("safe", "silu"):
        assert metalcore.active_overrides() == ("silu", "safe")
        metalcore.disable_pytorch_overrides()
        assert metalcore.active_overrides() == ()
    with metalcore.enable_pytorch_overrides("safe", exclude="safe"):
        assert metalcore.active_overrides() == ()


def test_overrides_come_and_go_above_the_routes():
    """An override holds the kernel that lay beneath it, which must outlive it."""
    machine = doctor.this_machine()
    keep(machine, "attention-causal")
    row = doctor.row_of("attention-causal")
    with seeded("attention-causal"):
        with metalcore.enable_pytorch_overrides("scaled_dot_product_attention"):
            with metalcore.enable_pytorch_overrides("safe", exclude="scaled_dot_product_attention"):
                assert doctor.judge(row, machine).status == "right"
                metalcore.enable_pytorch_overrides("silu", "softmax")
                assert doctor.judge(row, machine).status == "right"
            assert doctor.judge(row, machine).status == "right"  # by the override
        metalcore.disable_pytorch_overrides()
        with metalcore.enable_pytorch_overrides("safe", exclude="scaled_dot_product_attention"):
            assert doctor.judge(row, machine).status == "right"  # on the CPU
            assert "on the CPU, since this machine has the fault attention-causal" in str(metalcore.report())
        assert doctor.judge(row, machine).is_fault


def test_forms_that_write_are_routed_too():
    keep(doctor.this_machine(), "long-batched-sums")
    a, b = (torch.randint(-1, 2, shape).float() for shape in ((1, 16, 32_767), (1, 32_767, 16)))
    expected = a @ b
    with seeded("long-batched-sums"), metalcore.enable_pytorch_overrides("safe"):
        left, right, out = a.to("mps"), b.to("mps"), torch.empty(1, 16, 16, device="mps")
        assert torch.bmm(left, right, out=out) is out
        torch.testing.assert_close(out.cpu(), expected, rtol=0, atol=0)
        empty = torch.empty(0, device="mps")
        assert torch.bmm(left, right, out=empty) is empty and torch.equal(empty, out)
        assert out.baddbmm_(left, right, beta=0, alpha=2) is out
        torch.testing.assert_close(out.cpu(), 2 * expected, rtol=0, atol=0)
        with torch.inference_mode():
            torch.testing.assert_close(torch.einsum("bij,bjk->bik", left, right).cpu(), expected, rtol=0, atol=0)
        nan = torch.full_like(out, float("nan"))
        torch.testing.assert_close(torch.baddbmm(nan, left, right, beta=0).cpu(), expected, rtol=0, atol=0)
        left.requires_grad_()
        torch.bmm(left, right).sum().backward()
        torch.testing.assert_close(left.grad.cpu(), b.sum(2).unsqueeze(1).expand_as(a), rtol=0, atol=0)


def test_the_page_has_the_table(capsys):
    assert main(["doctor", "--list"]) == 0
    assert capsys.readouterr().out.strip() in (ROOT / "docs" / "doctor.md").read_text()


def test_json(capsys):
    assert main(["doctor", "--list", "--json"]) == 0
    assert [row["row"] for row in json.loads(capsys.readouterr().out)["rows"]] == [row.name for row in doctor.ROWS]
    with seeded("scalar-views"):
        code, said = doctor_says(capsys, "scalar-views", "bool-views", "--in-process", "--json")
    found = json.loads(said)
    assert code == 1 and [row["fault"] for row in found["rows"]] == [True, False]
    assert found["machine"]["torch"] == torch.__version__


def test_what_is_not_known(capsys):
    assert main(["doctor", "no-such-fault"]) == 2
    assert "doctor knows no fault 'no-such-fault'; it knows svd-of-batches, " in capsys.readouterr().err


def test_the_words_of_a_fault():
    """A reader needs the report, the versions, and what "safe" does."""
    said = results.line(doctor.Outcome("bmm-2^32", "AFFECTED", note="by the version: nothing ran"))
    assert "pytorch#197636" in said and "2.4.1 to 2.14.0" in said and 'under "safe": the CPU' in said
    assert "update PyTorch" in results.line(doctor.Outcome("command-buffers", "AFFECTED"))
