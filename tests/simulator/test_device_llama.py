"""A HuggingFace Llama with random weights trains on the simulated device as it does on the CPU."""

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

VOCABULARY = 128


def make_model(attention, device, dtype=torch.float32):
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        attn_implementation=attention,
    )
    return LlamaForCausalLM(config).to(device, dtype).train()


def train(model, optimizer, steps=3):
    """The losses, the first step's gradients and the last parameters, on the CPU."""
    device = model.device
    torch.manual_seed(1)
    tokens = torch.randint(0, VOCABULARY, (2, 16)).to(device)
    mask = torch.ones(2, 16, dtype=torch.long)
    mask[1, 12:] = 0
    losses, gradients = [], None
    for _ in range(steps):
        loss = model(input_ids=tokens, attention_mask=mask.to(device), labels=tokens).loss
        loss.backward()
        gradients = gradients or [parameter.grad.cpu() for parameter in model.parameters()]
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return torch.tensor(losses), gradients, [parameter.detach().cpu() for parameter in model.parameters()]


def adamw(model):
    return torch.optim.AdamW(model.parameters(), lr=1e-3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_eager_attention_trains_bit_by_bit_as_on_the_cpu(dtype):
    results = []
    for device in ("cpu", "mps"):
        model = make_model("eager", device, dtype)
        results.append(train(model, adamw(model)))
    (losses, gradients, parameters), (our_losses, our_gradients, our_parameters) = results
    assert torch.equal(our_losses, losses) and losses[-1] < losses[0]
    for ours, theirs in zip(our_gradients + our_parameters, gradients + parameters, strict=True):
        assert torch.equal(ours, theirs)


def test_sdpa_attention_trains_as_on_the_cpu():
    results = []
    for device in ("cpu", "mps"):
        model = make_model("sdpa", device)
        results.append(train(model, torch.optim.SGD(model.parameters(), lr=0.1)))
    (losses, _, parameters), (our_losses, _, our_parameters) = results
    torch.testing.assert_close(our_losses, losses, rtol=1e-5, atol=0)
    for ours, theirs in zip(our_parameters, parameters, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


def test_generation_equals_the_cpus():
    tokens = torch.tensor([[3, 1, 4, 1, 5]])
    generated = []
    for device in ("cpu", "mps"):
        model = make_model("eager", device).eval()
        prompt = tokens.to(device)
        with torch.no_grad():
            generated.append(
                model.generate(
                    prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=8, do_sample=False, pad_token_id=0
                ).cpu()
            )
    assert torch.equal(*generated)


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_training_with_metalcores_kernels_equals_the_cpu(attention):
    import metalcore
    from metalcore.integrations import transformers as metalcore_transformers

    model = make_model(attention, "cpu")
    losses, gradients, parameters = train(model, adamw(model))
    with metalcore_transformers.patch(), metalcore.enable_pytorch_overrides():
        model = make_model(attention, "mps")
        optimizer = adamw(model)
        assert type(optimizer) is torch.optim.AdamW
        our_losses, our_gradients, our_parameters = train(model, optimizer)
    torch.testing.assert_close(our_losses, losses, rtol=1e-5, atol=0)
    for ours, theirs in zip(our_gradients, gradients, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5 * theirs.abs().max().item())
    # AdamW divides a gradient by its own size, so a gradient that is mostly rounding may move a parameter by lr.
    for ours, theirs in zip(our_parameters, parameters, strict=True):
        assert (ours - theirs).norm() <= 1e-5 * theirs.norm()
