"""Generation on an NVIDIA GPU: steps replayed as a CUDA graph, one ahead of the host."""

import sys
from pathlib import Path

import pytest
import torch

import metalcore
from metalcore.generation import _run, stream
from metalcore.integrations import transformers as metalcore_transformers
from metalcore.quant import quantize_model

sys.path.append(str(Path(__file__).resolve().parents[1] / "generation"))
from small_models import prompts, small_model

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
