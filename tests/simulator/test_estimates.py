"""Estimates of times on Apple's GPUs: what the model says of simple dispatches, and the command."""

import json
import xml.dom.minidom

import pytest
import torch

import metalcore
from metalcore.cli import main
from metalcore.estimates import CountedLibrary, chips, counting, estimate, figures, model
from metalcore.estimates.figures import LEAST_ROWS, MOST, fitted

DEVICE = "mps"


@pytest.fixture(scope="module")
def doubled():
    """relu of 64 MB, which only memory bounds."""
    x = torch.zeros(1 << 24, device=DEVICE)
    return {gpu: estimate(metalcore.relu, x, gpu=gpu) for gpu in ("m1", "m1-max", "m5")}


def test_chips_are_named_with_cores():
    assert chips.find("M3 Max").name == "m3-max"
    assert chips.find("m3-max-30").cores == 30
    assert [chips.find(name).family for name in ("m1", "m2-pro", "m3", "m4-max", "m5")] == [
        *("apple7", "apple8", "apple9", "apple9", "apple10")
    ]
    for name in ("m6", "m1-mega", "m1-0x", "m1-999", ""):
        with pytest.raises(ValueError, match="gpu"):
            chips.find(name)


# Threads that hold so many float4s have few registers or more than Apple's GPUs have.
HOLDERS = """
#include <metal_stdlib>
using namespace metal;
kernel void few(device float* y, uint i [[thread_position_in_grid]]) { y[i] *= 2.0f; }
kernel void many(device float4* y, uint i [[thread_position_in_grid]]) {
  float4 kept[28], sum = 0.0f;
  for (uint k = 0; k < 28; ++k) kept[k] = y[i + 4096 * k];
  threadgroup_barrier(mem_flags::mem_device);
  for (uint k = 0; k < 28; ++k) sum = sum * kept[27 - k] + kept[k];
  y[i] = sum;
}
"""


def test_registers_bound_the_threads_of_a_core():
    program = CountedLibrary(HOLDERS)
    with counting(registers=True) as counts:
        program.few(torch.zeros(128, device=DEVICE), group_size=64)
        program.many(torch.zeros(4096 * 28, 4, device=DEVICE), threads=128, group_size=64)
    few, many = counts
    assert few.registers < 52 and model.resident(few) == 1024 // 64
    assert many.registers > 4 * 28 and model.resident(many) == 384 // 64
    for registers, threads in ((52, 1024), (53, 896), (56, 896), (92, 576), (93, 512), (128, 384), (129, 384)):
        assert model.resident(few._replace(registers=registers)) == threads // 64
    assert model.resident(few._replace(registers=None)) == 1024 // 64


def test_what_is_fitted_lies_in_its_range():
    parameters, errors = fitted()
    for name, value in parameters._asdict().items():
        low, high, source = model.RANGES[name]
        assert low <= value <= high and source
    assert all(entry["median"] <= entry["ninth"] for entry in errors.values())


def test_memory_bounds_a_kernel_that_streams(doubled):
    parameters, errors = fitted()
    for gpu, found in doubled.items():
        [step] = found.steps
        assert step.kind == step.times.bound == "memory"
        bytes = 2 * 4 * (1 << 24)
        assert step.times.memory == pytest.approx(bytes / (parameters.memory * chips.CHIPS[gpu].bandwidth * 1e9), 1e-3)
        assert found.seconds == pytest.approx(step.times.memory, 0.1)
        assert found.high / found.seconds == pytest.approx(1 + errors["memory"]["ninth"])
    assert 5 < doubled["m1"].seconds / doubled["m1-max"].seconds < 7


def test_a_kind_that_is_not_known_gets_no_figure(doubled, monkeypatch):
    counted = doubled["m1"].steps[0].counted
    parameters, _ = fitted()
    for entry in ({"rows": LEAST_ROWS, "median": 0.5, "ninth": MOST + 0.1}, {"rows": 1, "median": 0, "ninth": 0}, None):
        changed = {"memory": entry} if entry else {}
        monkeypatch.setattr(figures, "fitted", lambda changed=changed: (parameters, changed))
        found = metalcore.estimates.Estimate(chips.find("m1"), [counted])
        assert found.seconds is found.low is found.high is None
        assert "no estimate" in str(found) and "memory" in found.why


def test_matrices_on_m5_get_no_figure():
    x = torch.zeros(256, 256, device=DEVICE, dtype=torch.float16)
    found = {gpu: estimate(metalcore.matmul, x, x, gpu=gpu) for gpu in ("m2", "m5")}
    assert found["m2"].seconds and not found["m2"].why
    assert found["m5"].seconds is None and "M5" in found["m5"].why


def test_the_parts_of_lines_are_of_the_whole(doubled):
    assert sum(doubled["m1"].lines.values()) == pytest.approx(1)
    xml.dom.minidom.parseString(doubled["m1"].svg())


def test_pytorchs_operators_are_named():
    x = torch.ones(64, device=DEVICE)
    found = estimate(lambda: metalcore.relu(torch.sort(x).values), gpu="m1")
    assert found.by_torch == ("aten::sort",) and "PyTorch's aten::sort" in str(found)


def test_more_cores_take_arithmetic_less_time():
    found = {gpu: estimate(metalcore.qr, torch.randn(64, 16, 16, device=DEVICE), gpu=gpu) for gpu in ("m1", "m1-7")}
    few, many = (found[gpu].steps[0].times.arithmetic for gpu in ("m1-7", "m1"))
    assert few > many


def test_the_command_takes_ops_and_files(tmp_path, capsys):
    assert main(["estimate", "cholesky", "4x16x16", "--gpu", "m2-pro", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["gpu"]["name"] == "m2-pro" and found["steps"][0]["kernel"].startswith("cholesky")
    kernel, picture = tmp_path / "add.metal", tmp_path / "add.svg"
    kernel.write_text(
        "kernel void add(device float* y, constant int& n, uint i [[thread_position_in_grid]]) {\n"
        "  if (int(i) < n) y[i] += 1.0f;\n}\n"
    )
    arguments = [*("--kernel", "add", "--grid", "1024", "--group", "64"), *("--argument", "float32:1024")]
    command = ["estimate", str(kernel), *arguments, "--argument", "1024", "--svg", str(picture)]
    assert main(command) == 0
    text = capsys.readouterr().out
    assert "estimated" in text and "add.metal:2" in text and "add" in picture.read_text()
    for wrong, message in (
        (["estimate", "no_op", "4"], "there is no op"),
        (["estimate", str(kernel), "--kernel", "sub", *arguments[2:]], "has add"),
        (["estimate", str(kernel), "--kernel", "add", "--grid", "x"], "--grid"),
        (["estimate", "relu", "4", "--gpu", "m9"], "gpu"),
    ):
        assert main(wrong) == 2
        assert message in capsys.readouterr().err


def test_programs_of_compile_shader_are_counted_and_leave_their_results():
    program = metalcore.compile_shader(
        "kernel void twice(device float* x, uint i [[thread_position_in_grid]]) { x[i] *= 2; }"
    )
    x = torch.ones(64, device=DEVICE)
    found = estimate(program.twice, x)
    assert [step.counted.kernel for step in found.steps] == ["twice"]
    assert found.steps[0].counted.memory["device", "store"].bytes == 256 and found.steps[0].counted.ran
    assert x.tolist() == [2.0] * 64
    program.twice(x)
    assert x.tolist() == [4.0] * 64


def test_what_was_captured_is_planned_for_the_chip():
    """The simulated device's own kernels, which a replay would repeat, are none of a GPU's."""
    x, weight = torch.randn(64, 256, device=DEVICE), torch.ones(256, device=DEVICE)

    def norm(x):
        return metalcore.rms_norm(x, (256,), weight)

    def kernels(function, *arguments):
        return [step.counted.kernel for step in estimate(function, *arguments).steps]

    replay = metalcore.capture(norm, x)
    assert kernels(replay, x) == kernels(norm, x) != list(replay.kernels)
    assert torch.equal(replay(x), norm(x))
    program = metalcore.compile(torch.nn.RMSNorm(256, device=DEVICE), (x,))
    assert kernels(program, x) == kernels(norm, x)


def test_train_steps_are_planned_for_the_chip_and_go_on():
    model = metalcore.nn.RMSNorm(64, device=DEVICE)
    optimizer = metalcore.optim.AdamW(model.parameters())
    x = torch.randn(8, 64, device=DEVICE)
    step = metalcore.compile_train_step(model, lambda y: metalcore.silu(y).sum(), optimizer, x, segments=True)
    losses = [step(x), step(x), step(x)]
    own = set(step.replay.recording.kernels)
    found = estimate(step, x)
    assert {each.counted.kernel for each in found.steps} - own
    assert any(name.startswith("aten::sum") for name in found.by_torch)
    losses += [step(x), step(x), step(x)]
    assert losses == sorted(losses, reverse=True)
    assert step.replay is not None


def test_the_backend_bounds_command_buffers_by_the_same_numbers():
    from benchmarks.apple import header

    assert header.HEADER.read_text(encoding="utf-8") == header.text()
    x = torch.zeros(1 << 22, device=DEVICE)
    _, recording = metalcore.recording.record(metalcore.relu, x)
    [step] = estimate(metalcore.relu, x, gpu=header.SLOWEST).steps
    assert recording.dispatches[0].seconds == pytest.approx(step.high, 0.1)


def test_plans_are_for_as_many_cores_as_the_chip_has():
    q, k = torch.zeros(1, 8, 1, 64, device=DEVICE), torch.zeros(1, 8, 2048, 64, device=DEVICE)

    def groups(gpu):
        found = estimate(metalcore.scaled_dot_product_attention, q, k, k, gpu=gpu)
        return [step.counted.groups for step in found.steps]

    assert groups("m1-ultra")[0] > groups("m1")[0] == groups("m1-8")[0]


def test_tuning_by_estimates_prints_a_table(capsys):
    assert main(["tune", "--gpu", "m2", "--only", "optim.strips"]) == 0
    text = capsys.readouterr().out
    assert "Tuning of m2, 10 cores, by estimate (family apple8)" in text
    assert "| field | before | estimated | less time |" in text and "| optim.strips | " in text
    assert main(["tune", "--gpu", "m7"]) == 2


def test_what_tune_shared_is_compared_with_estimates(tmp_path, capsys, monkeypatch):
    from benchmarks.apple import shared
    from metalcore.cli.tune import share_text
    from metalcore.tuning import store, workloads

    call = next(call for call in workloads.all_workloads(workloads.SIMULATED) if call.op == "softmax")
    text = tmp_path / "issue.md"
    text.write_text(share_text(store.GPU("mps", "M2 Pro"), [], "2026-01-01", times=[(call, 1.25)]))
    assert [(found.text(), seconds) for found, seconds in shared.calls(text.read_text())] == [(call.text(), 1.25)]
    monkeypatch.setattr("sys.argv", ["shared", str(text), "--gpu", "m2-pro"])
    shared.main()
    printed = capsys.readouterr().out
    assert "1.25 s measured, estimated" in printed and "outside of the interval" in printed
    assert f"M2 Pro\t19\tmetalcore\t{call.text()}\t1250\tms\tissue.md" in printed
    with pytest.raises(ValueError, match="tune times no call 'relu 7x7'"):
        [*shared.calls("| relu 7x7 | 1.0 |")]
