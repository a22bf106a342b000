"""Golden artifacts: what one device records another agrees with, and faults are found."""

import dataclasses
import functools
import json

import pytest
import torch

import metalcore
from metalcore import golden
from metalcore._core.registry import OPS
from metalcore.cli import main
from metalcore.golden import values

FEW = ("softmax", "rms_norm", "qr", "adamw")


@pytest.fixture(scope="module")
def recorded(device, tmp_path_factory):
    """Float32 artifacts of a few ops."""
    folder = tmp_path_factory.mktemp("golden")
    list(golden.record([OPS[name] for name in FEW], device, folder, dtypes=("float32",)))
    return folder


@pytest.fixture
def simulated(device):
    if device != "mps" or not hasattr(torch._C, "_metalcore_simulates_mps"):
        pytest.skip("the command line is tried on the simulated device")


def replaced(monkeypatch, name, change):
    op = OPS[name]
    function = functools.wraps(op.function)(lambda *args, **options: change(op.function, *args, **options))
    monkeypatch.setitem(OPS, name, dataclasses.replace(op, function=function))


def test_philox_gives_its_known_numbers():
    """A test vector of the Random123 library."""
    found = values.philox((0, 0), torch.tensor([0]))
    assert [int(word) for word in found] == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]


def test_numbers_are_normal_and_exact():
    x = values.normal((300, 301), 5)
    assert abs(float(x.mean())) < 0.02 and abs(float(x.std()) - 1.155) < 0.01 and float(x.abs().max()) <= 4
    assert bool((x * 2**15 == (x * 2**15).round()).all())
    assert not bool((x == values.normal((300, 301), 6)).all())
    # Whatever machine makes them.
    assert values.digest([x]) == "21d64f51895876b46dddb02e583d409fb91149ba3ac3746eefaade30c7bb8e93"


def test_prepared_inputs_are_on_a_grid():
    sample = OPS["qr"].samples()[0]
    (a,) = values.inputs(sample, torch.float32, 0)
    scale = 2.0**-14 * 2.0 ** float(torch.frexp(a.abs().max()).exponent)
    assert bool((a / scale == (a / scale).round()).all())


def test_every_op_has_cases():
    names = [case.name for op in OPS.values() for case in golden.cases(op)]
    assert len(names) == len(set(names))
    for op in OPS.values():
        assert {case.kind for case in golden.cases(op)} >= {"unit", "production"}


def test_a_device_agrees_with_itself(device, recorded):
    found = list(golden.compare(recorded, device))
    assert len(found) == len(list(recorded.iterdir()))
    assert not [row for row in found if not row.right]


def test_the_artifacts_of_the_wheel(device):
    """They were recorded on an NVIDIA GPU. Those of unit size are selftest's, whose own test has them."""
    if device == "cpu":
        pytest.skip("the CPU runs no kernels")
    with golden.unpacked(golden.REFERENCE) as folder:
        assert "NVIDIA" in json.loads(next(folder.glob("*/meta.json")).read_text())["device"]
        wrong = [row for row in golden.compare(folder, device, lambda case: case.kind != "unit") if not row.right]
    assert not wrong


FAULTS = {
    "a wrong scale": lambda softmax, x, dim, **options: softmax(x, dim, **options) * (1 + 2**-14),
    "one element off": lambda softmax, x, dim, **options: (
        softmax(x, dim, **options) + torch.arange(x.numel(), device=x.device).view(x.shape).eq(x.numel() // 2) * 2**-12
    ),
    "shifted rows": lambda softmax, x, dim, **options: softmax(x, dim, **options).roll(1, 0),
    "another shape": lambda softmax, x, dim, **options: softmax(x, dim, **options)[..., :-1],
    "an exception": lambda softmax, x, dim, **options: softmax(x, dim, **options).view(7, 11),
    "no masked numbers": lambda softmax, x, dim, **options: softmax(x, dim, **options).nan_to_num(),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_found(device, recorded, monkeypatch, fault):
    replaced(monkeypatch, "softmax", FAULTS[fault])
    wrong = {row.name for row in golden.compare(recorded, device) if not row.right}
    assert wrong and all(name.startswith("softmax") for name in wrong)


def test_the_worst_element_is_named(device, recorded, monkeypatch):
    def off(silu, x, dim, **options):
        y = silu(x, dim, **options)
        return y + torch.nn.functional.one_hot(torch.tensor(7), y.numel()).view(y.shape).to(y) * 0.5

    replaced(monkeypatch, "softmax", off)
    rows = {row.name: row for row in golden.compare(recorded, device)}
    assert rows["softmax_unit_columns_float32"].where == "forward 0, elements (0, 0) to (0, 999)"
    monkeypatch.undo()
    replaced(monkeypatch, "qr", lambda qr, A, mode: [x + x.eq(x[0, 1, 2]) for x in qr(A, mode)])
    row = next(row for row in golden.compare(recorded, device) if row.name == "qr_edge_large_float32")
    assert row.where == "forward 0, elements (0, 1, 2) to (0, 1, 8)"


def test_commands(simulated, recorded, tmp_path, capsys, monkeypatch):
    out = tmp_path / "made"
    assert main(["golden", "record", "silu", "--dtype", "bfloat16", "--device", "simulator", "-o", str(out)]) == 0
    assert main(["golden", "pack", str(out), str(tmp_path / "one")]) == 0
    assert main(["golden", "unpack", str(tmp_path / "one"), str(tmp_path / "again")]) == 0
    assert sorted(path.name for path in out.rglob("*")) == sorted(path.name for path in (tmp_path / "again").rglob("*"))
    capsys.readouterr()
    assert main(["golden", "compare", str(tmp_path / "one"), "--device", "simulator", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["comparisons"] and all(row["right"] for row in found["comparisons"])
    assert set(found["without artifacts"]) == OPS.keys() - {"silu"}
    picture = tmp_path / "errors.png"
    assert main(["golden", "compare", str(out), "--device", "simulator", "--picture", str(picture)]) in (0, 2)
    replaced(monkeypatch, "silu", lambda silu, x: silu(x) * 1.1)
    assert main(["golden", "compare", str(out), "--device", "simulator"]) == 1
    assert "DIFFERS silu_unit_rows_bfloat16" in capsys.readouterr().out
    for arguments in (
        ["record", "nothing", "-o", "x"],
        ["record", "--case", "x", "-o", "y"],
        ["compare", str(tmp_path)],
    ):
        assert main(["golden", *arguments, *(["--device", "simulator"])]) == 2


def test_op_command(simulated, capsys, monkeypatch):
    def run(*words):
        status = main(["op", *words, "--device", "simulator"])
        return status, capsys.readouterr()

    status, said = run(
        "softmax", "--batch_size", "2", "--vocab_size", "321", "--temperature", "0.7", "--dtype", "bfloat16"
    )
    assert status == 0 and "softmax_production_bfloat16 (2x321)" in said.out
    assert run("silu", "--case", "edge")[0] == 0
    assert run("--list")[0] == 0
    for words, message in (
        (["nothing"], "there is no op 'nothing'"),
        (["softmax", "--height", "3"], "softmax has no option --height"),
        (["softmax", "--batch_size", "x"], "expected a whole number"),
        (["softmax", "--batch_size", "0"], "expected more than 0"),
        (["softmax", "--batch_size"], "expected --NAME VALUE"),
        (["softmax", "--case", "unit", "--batch_size", "3"], "is an option of --case production"),
        (["silu", "--dtype", "int8"], "silu takes"),
        ([], "expected an op"),
    ):
        status, said = run(*words)
        assert status == 2 and message in said.err
    replaced(monkeypatch, "silu", lambda silu, x: metalcore.silu(x) * 1.1)
    assert run("silu")[0] == 1
