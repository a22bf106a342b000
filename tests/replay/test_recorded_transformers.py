"""compile_train_step() of transformers' models: what is recorded is right for other padding and packing as well."""

import contextlib

import pytest
import torch
import transformers

import metalcore
from metalcore.integrations import transformers as metalcore_transformers

pytestmark = pytest.mark.only_on("simulator", "mps")

SIZES = dict(vocab_size=64, hidden_size=32, intermediate_size=40, num_hidden_layers=2, num_attention_heads=4)
DECODER = dict(num_key_value_heads=2, pad_token_id=0, max_position_embeddings=64)
NO_DROPOUT = dict(hidden_dropout_prob=0, attention_probs_dropout_prob=0)
MODELS = {  # class, options of its configuration
    "Llama": ("LlamaForCausalLM", {**SIZES, **DECODER}),
    "Qwen3": ("Qwen3ForCausalLM", {**SIZES, **DECODER, "head_dim": 8}),
    "Gemma3Text": ("Gemma3ForCausalLM", {**SIZES, **DECODER, "head_dim": 8, "sliding_window": 5}),
    "GPT2": (
        "GPT2LMHeadModel",
        dict(vocab_size=64, n_embd=32, n_layer=2, n_head=4, n_positions=64, bos_token_id=1, eos_token_id=1)
        | dict(attn_pdrop=0, embd_pdrop=0, resid_pdrop=0),
    ),
    "Bert": ("BertForMaskedLM", {**SIZES, **NO_DROPOUT}),
    "T5": (
        "T5ForConditionalGeneration",
        dict(vocab_size=64, d_model=32, d_kv=8, d_ff=40, num_layers=2, num_heads=4, dropout_rate=0)
        | dict(decoder_start_token_id=0),
    ),
}
LENGTH = 12


def model_of(name, implementation, device):
    torch.manual_seed(0)
    class_name, options = MODELS[name]
    config = getattr(transformers, f"{name}Config")(**options)
    return getattr(transformers, class_name)._from_config(config, attn_implementation=implementation).to(device).train()


def padded(device):
    """Batches of tokens, masks and labels. The recorded one, the third, has no padding; the others have."""
    generator = torch.Generator().manual_seed(1)
    for left, right in ((0, 2), (3, 0), (0, 0), (4, 1), (0, 5)):
        ids, mask = torch.randint(3, 64, (2, LENGTH), generator=generator), torch.ones(2, LENGTH, dtype=torch.long)
        mask[0, :left] = 0
        mask[1, LENGTH - right :] = 0
        yield tuple(tensor.to(device) for tensor in (ids, mask, ids.masked_fill(mask == 0, -100)))


def packed(device):
    """Batches of tokens, positions and labels. In the recorded one no position begins again."""
    generator = torch.Generator().manual_seed(1)
    for first in (5, 3, LENGTH, 7, 2):
        ids = torch.randint(3, 64, (2, LENGTH), generator=generator)
        positions = torch.arange(LENGTH).repeat(2, 1)
        positions[:, first:] -= first
        yield tuple(tensor.to(device) for tensor in (ids, positions, ids))


def train(name, implementation, device, batches, argument, captured):
    """The losses, and the model's parameters afterwards."""
    model = model_of(name, implementation, device)
    optimizer = metalcore.optim.SGD(model.parameters(), lr=0.1)

    def loss_of(ids, given, labels):
        return model(input_ids=ids, labels=labels, **({argument: given} if argument else {})).loss

    def eager(*batch):
        optimizer.zero_grad()
        loss = loss_of(*batch)
        loss.backward()
        optimizer.step()
        return loss

    step = metalcore.compile_train_step(lambda ids: ids, loss_of, optimizer, batches[0]) if captured else eager
    losses = [step(*batch).item() for batch in batches]
    assert not captured or step.replay
    return losses, model.state_dict()


def check(name, implementation, device, batches, argument):
    found, wanted = (train(name, implementation, device, batches, argument, captured) for captured in (True, False))
    torch.testing.assert_close(found, wanted, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("argument", ["attention_mask", None])
@pytest.mark.parametrize("patched", [False, True], ids=["", "patched"])
@pytest.mark.parametrize("implementation", ["sdpa", "eager", "metalcore"])
@pytest.mark.parametrize("name", MODELS)
def test_batches_with_other_padding(device, name, implementation, patched, argument):
    metalcore_transformers.register_attention()
    with metalcore_transformers.patch() if patched else contextlib.nullcontext():
        check(name, implementation, device, list(padded(device)), argument)


@pytest.mark.parametrize("implementation", ["sdpa", "eager", "metalcore"])
@pytest.mark.parametrize("name", ["Llama", "Gemma3Text"])
def test_batches_with_other_packing(device, name, implementation):
    metalcore_transformers.register_attention()
    check(name, implementation, device, list(packed(device)), "position_ids")


def test_transformers_traces_on_the_recording_thread_alone(device):
    from concurrent.futures import ThreadPoolExecutor

    from transformers.utils.import_utils import is_tracing

    found = []
    with ThreadPoolExecutor(1) as other:

        def function(x):
            found.append((is_tracing(), other.submit(is_tracing).result()))
            return metalcore.softmax(x, -1)

        metalcore.capture(function, torch.randn(2, 8, device=device), warmup=1)
    assert found == [(False, False), (True, False)]
    assert not is_tracing()
