"""Replays on NVIDIA GPUs: capture() and compile_train_step() as CUDA graphs, launches that are repeated with other
tensors, and steps of generation, of which one is ahead of the host."""

import copy
import gc
import sys
from pathlib import Path

import pytest
import torch

import metalcore
from metalcore.generation import _run, stream
from metalcore.integrations import transformers as metalcore_transformers
from metalcore.quant import quantize_model
from metalcore.replay import CaptureError
from metalcore.replay._graph import captured

sys.path.append(str(Path(__file__).resolve().parents[1] / "generation"))
from small_models import prompts, small_model


def model_of():
    torch.manual_seed(0)
    layers = torch.nn.Linear(16, 32), metalcore.nn.SiLU(), metalcore.nn.RMSNorm(32), torch.nn.Linear(32, 8)
    return torch.nn.Sequential(*layers, metalcore.nn.LogSoftmax(-1)).cuda()


def others_in_freed_memory():
    gc.collect()
    return [torch.full((1 << k,), torch.nan, device="cuda") for k in range(4, 20) for _ in range(4)]


@pytest.mark.parametrize("options", [{}, {"clone_outputs": True}, {"warmup": 0}], ids=str)
def test_pytorchs_operators_are_part_of_the_graph(options):
    weight = torch.rand(300, device="cuda")

    def function(x):
        y = metalcore.rms_norm(torch.tanh(x) + weight, (300,), weight)
        return metalcore.softmax(y, -1), {"sum": y.sum(-1)}

    captured = metalcore.capture(function, torch.randn(4, 300, device="cuda"), **options)
    for _ in range(3):
        x = torch.randn(4, 300, device="cuda")
        found, expected = captured(x), function(x)
        assert torch.equal(found[0], expected[0]) and torch.equal(found[1]["sum"], expected[1]["sum"])
        weight.mul_(1.5)
    assert captured.kernels and not captured.torch_operators


def test_what_the_function_reaches_lives_on():
    """Parameters of a model that is gone, and a tensor that another one has replaced since."""
    table = {"model": model_of(), "row": torch.rand(8, device="cuda")}
    same, row = copy.deepcopy(table["model"]), table["row"].clone()
    capture = metalcore.capture(lambda x: table["model"](x) + table["row"], torch.randn(4, 16, device="cuda"))
    table.clear()
    x = torch.randn(4, 16, device="cuda")
    others = others_in_freed_memory()
    torch.testing.assert_close(capture(x), same(x) + row)
    del others


@pytest.mark.parametrize("drop", ["program", "model"])
def test_a_captured_program_needs_nobody_else(drop):
    model, x = model_of(), torch.randn(4, 16, device="cuda")
    expected = model(x).detach()
    program = metalcore.compile(model, (x,))
    capture = program.capture(x)
    if drop == "program":
        del program
    else:
        del model
    others = others_in_freed_memory()
    torch.testing.assert_close(capture(x), expected)
    del others


def test_random_numbers_are_new_at_each_replay():
    captured = metalcore.capture(lambda x: torch.bernoulli(metalcore.silu(x)), torch.ones(3000, device="cuda"))
    x = torch.full((3000,), 0.7, device="cuda")
    first = captured(x).clone()
    assert not torch.equal(first, captured(x))


@pytest.mark.parametrize("read", [torch.Tensor.item, torch.Tensor.cpu, bool], ids=["item", "cpu", "bool"])
def test_values_that_the_host_reads_are_refused(read):
    with pytest.raises(CaptureError, match="the host waits for values on the device"):
        metalcore.capture(lambda x: read(metalcore.silu(x).sum()), torch.randn(4, 3, device="cuda"))
    assert torch.ones(3, device="cuda").sum().item() == 3  # the stream still works


def test_after_a_capture_that_fails_random_numbers_are_drawn():
    with pytest.raises(RuntimeError), captured():
        torch.rand(5, device="cuda").sum().item()
    assert torch.rand(1000, device="cuda").unique().numel() > 900


def test_bound_inputs_are_launched_without_a_graph():
    def function(x):
        return metalcore.softmax(metalcore.silu(metalcore.silu(x)), -1)

    captured = metalcore.capture(function, torch.randn(4, 300, device="cuda"), bind=True)
    for _ in range(3):
        x = torch.randn(4, 300, device="cuda")
        assert torch.equal(captured(x), function(x))
    with torch.cuda.stream(torch.cuda.Stream()):
        found = captured(x)
    torch.cuda.synchronize()
    assert torch.equal(found, function(x))
    with pytest.raises(CaptureError, match="aten::tanh"):
        metalcore.capture(torch.tanh, x, bind=True)


@pytest.mark.parametrize("name", ("AdamW", "SGD", "Lion"))
def test_twenty_steps_are_those_of_an_ordinary_loop(name):
    options = {"AdamW": {"capturable": True}, "SGD": {"momentum": 0.9}, "Lion": {}}[name]

    def train(recorded):
        model = model_of()
        optimizer = getattr(metalcore.optim, name)(model.parameters(), lr=1e-2, **options)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20)
        generator = torch.Generator().manual_seed(1)
        losses = []
        for i in range(20):
            x = torch.randn(12, 16, generator=generator).cuda()
            y = torch.randint(0, 8, (12,), generator=generator).cuda()
            if i == 0:
                step = metalcore.compile_train_step(
                    model, torch.nn.functional.nll_loss, optimizer, (x, y), max_norm=0.5
                )
            if recorded:
                loss = step(x, y)
            else:
                optimizer.zero_grad()
                loss = torch.nn.functional.nll_loss(model(x), y)
                loss.backward()
                metalcore.optim.clip_grad_norm_(model.parameters(), 0.5)
                optimizer.step()
            losses.append(loss.item())
            scheduler.step()
        return losses, [p.detach().clone() for p in model.parameters()]

    found, again, expected = train(True), train(True), train(False)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(found, again, rtol=0, atol=0)
    assert found[0][-1] < found[0][0]


NEW = 48


@pytest.mark.parametrize("cache", ["static", "paged"])
@pytest.mark.parametrize("family", ["llama", "gemma2", "mistral", "gpt2"])
@pytest.mark.parametrize("patched", [False, True])
def test_a_graph_draws_what_steps_draw(family, cache, patched, monkeypatch):
    model, tokens = small_model(family, "cuda"), prompts("cuda")
    mask = torch.ones_like(tokens)
    mask[0, :4] = 0
    captures = []
    original = _run.Run._capture

    def capture(run):
        original(run)
        captures.append(run.graph)

    monkeypatch.setattr(_run.Run, "_capture", capture)
    with metalcore_transformers.patch() if patched else torch.no_grad():
        found = metalcore.generate(model, tokens, mask, max_new_tokens=NEW, cache=cache)
        assert len(captures) == 1 and captures[0] is not None
        monkeypatch.setattr(_run, "_CAPTURED", 10**6)
        assert torch.equal(found, metalcore.generate(model, tokens, mask, max_new_tokens=NEW, cache=cache))


def test_graphs_follow_a_generator():
    model = small_model("llama", "cuda")

    def drawn(seed):
        generator = torch.Generator("cuda").manual_seed(seed)
        options = {"max_new_tokens": NEW, "temperature": 1.0, "generator": generator}
        return metalcore.generate(model, prompts("cuda"), **options).tolist()

    first = drawn(1)
    assert drawn(1) == first != drawn(2) and len(set(first[0])) > 4


def test_packed_models_and_streams():
    model = small_model("llama", "cuda", hidden_size=256, intermediate_size=512)
    quantize_model(model, "q4_k_m")
    whole = metalcore.generate(model, prompts("cuda"), max_new_tokens=NEW).T.tolist()
    assert list(stream(model, prompts("cuda"), max_new_tokens=NEW)) == whole
    end = whole[20][0]
    stopped = list(stream(model, prompts("cuda")[:1], max_new_tokens=NEW, eos_token_id=end))
    assert [row[0] for row in stopped] == [row[0] for row in whole][: [row[0] for row in whole].index(end) + 1]


def test_a_model_that_waits_runs_without_a_graph(monkeypatch):
    from transformers.models.llama import modeling_llama

    model = small_model("llama", "cuda")
    expected = metalcore.generate(model, prompts("cuda"), max_new_tokens=NEW)
    forward = modeling_llama.LlamaMLP.forward
    monkeypatch.setattr(
        modeling_llama.LlamaMLP, "forward", lambda self, x: forward(self, x) if x.sum().item() < 1e9 else x
    )
    with pytest.warns(UserWarning, match="a step cannot be a CUDA graph"):
        found = metalcore.generate(model, prompts("cuda"), max_new_tokens=NEW)
    assert torch.equal(found, expected)
