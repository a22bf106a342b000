"""The loss of language models by the fused linear cross entropy: the same numbers, and logits that can be read."""

import pytest
import torch
import transformers
from models import decoder, tokens

import metalcore
from metalcore.integrations import transformers as integration
from metalcore.overrides.libraries.loss import Logits

NAME = "fused_linear_cross_entropy"


def ran():
    return sum(row.ran for row in metalcore.report().rows if row.override == NAME)


def labels_of(ids):
    labels = ids.clone()
    labels[0, :5] = -100
    return labels


def encoder_decoder(device):
    config = transformers.T5Config(
        vocab_size=64, d_model=32, d_kv=8, d_ff=40, num_layers=1, num_heads=4, dropout_rate=0.0
    )
    config.decoder_start_token_id = 0
    return transformers.T5ForConditionalGeneration(config).to(device)


def masked(device):
    config = transformers.BertConfig(
        vocab_size=64,
        hidden_size=32,
        num_hidden_layers=1,
        num_attention_heads=4,
        intermediate_size=40,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    return transformers.BertForMaskedLM(config).to(device)


MODELS = {
    "Llama": lambda device: decoder("Llama", device),
    "Gemma2, whose logits have a softcap": lambda device: decoder("Gemma2", device),
    "Granite, whose logits are scaled": lambda device: decoder("Granite", device),
    "T5": encoder_decoder,
    "BERT, whose layer has a bias": masked,
}


@pytest.mark.parametrize("name", MODELS)
def test_losses_and_gradients(device, name):
    ids = tokens(device)
    found = []
    for patched in (False, True):
        torch.manual_seed(0)
        model = MODELS[name](device).train()
        with metalcore.enable_pytorch_overrides(NAME) if patched else torch.enable_grad():
            out = model(input_ids=ids, labels=labels_of(ids))
            assert not patched or ran() == 1
            assert isinstance(out.logits, Logits) == patched
            out.loss.backward()
        found.append([out.loss, out.logits, *(p.grad for p in model.parameters() if p.grad is not None)])
    assert found[1][1].shape == found[0][1].shape
    for ours, theirs in zip(*reversed(found)):
        torch.testing.assert_close(ours * 1, theirs, rtol=1e-4, atol=1e-5 * theirs.abs().max().item() + 1e-8)


@pytest.mark.parametrize("autocast", (False, True))
def test_bfloat16(device, autocast):
    """The loss is float32, as transformers', which converts logits of 16 bits before it."""
    model = decoder("Llama", device).to(torch.float32 if autocast else torch.bfloat16).train()
    ids, losses = tokens(device), []
    for names in ((), (NAME,)):
        with metalcore.enable_pytorch_overrides(*names) if names else torch.enable_grad():
            with torch.autocast(device, torch.bfloat16, enabled=autocast):
                out = model(ids, labels=ids)
            out.loss.backward()
        losses.append(out.loss)
    assert losses[1].dtype == losses[0].dtype == torch.float32
    torch.testing.assert_close(losses[1], losses[0], rtol=2e-2, atol=0)
    assert out.logits.dtype == torch.bfloat16


def test_tokens_in_the_batch_divide_the_sum(device):
    """The Trainer gives them where it accumulates gradients."""
    model, ids = decoder("Llama", device).train(), tokens(device)
    expected = model(ids, labels=ids, num_items_in_batch=torch.tensor(100)).loss
    with metalcore.enable_pytorch_overrides(NAME):
        found = model(ids, labels=ids, num_items_in_batch=torch.tensor(100)).loss
        assert ran() == 1
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=0)


def test_logits_are_computed_when_something_reads_them(device):
    model, ids = decoder("Llama", device).train(), tokens(device)
    expected = model(ids, labels=ids).logits
    with metalcore.enable_pytorch_overrides(NAME):
        logits = model(ids, labels=ids).logits
    assert type(logits) is Logits and logits.shape == expected.shape and logits.requires_grad
    assert logits.dtype == expected.dtype and logits.device == expected.device
    read = {
        "rows": lambda x: x[..., :-1, :],
        "one column": lambda x: x[..., 0],
        "argmax": lambda x: x.argmax(-1),
        "sum": lambda x: torch.logsumexp(x.view(-1, 64).float() / 2, -1),
        "other shape": lambda x: x.reshape(-1, 32),
        "loss with weights": lambda x: torch.nn.functional.cross_entropy(
            x.flatten(0, 1), ids.flatten(), torch.arange(64.0).to(device)
        ),
    }
    for name, function in read.items():
        torch.testing.assert_close(function(logits) * 1, function(expected) * 1, rtol=1e-4, atol=1e-5, msg=name)
    with torch.no_grad():
        assert not (logits * 1).requires_grad
    weight = model.lm_head.weight
    ours, theirs = (torch.autograd.grad(x.square().sum(), weight)[0] for x in (logits, expected))
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("optimizer", (torch.optim.AdamW, metalcore.optim.AdamW))
def test_logits_of_weights_that_have_changed(device, optimizer):
    model, ids = decoder("Llama", device).train(), tokens(device)
    optimizer = optimizer(model.parameters(), lr=1e-3)
    with metalcore.enable_pytorch_overrides(NAME):
        out = model(ids, labels=ids)
        out.loss.backward()
        optimizer.step()
    with pytest.raises(RuntimeError, match="the output layer's weight has changed since"):
        out.logits.argmax(-1)


def test_where_logits_are_needed(device):
    """Evaluation, a layer that is not a plain one, and calls without labels compute them as before."""
    model, ids = decoder("Llama", device), tokens(device)
    with metalcore.enable_pytorch_overrides(NAME):
        assert type(model.eval()(ids, labels=ids).logits) is torch.Tensor
        assert type(model.train()(ids).logits) is torch.Tensor
        with torch.no_grad():
            assert type(model(ids, labels=ids).logits) is torch.Tensor
        hook = model.lm_head.register_forward_hook(lambda module, args, output: output * 2)
        assert type(model(ids, labels=ids).logits) is torch.Tensor
        hook.remove()
        assert ran() == 0
        assert any("not a plain torch.nn.Linear" in reason for row in metalcore.report().rows for reason in row.left)
        assert type(model(ids, labels=ids).logits) is Logits
    assert "forward" not in vars(model.lm_head)
    assert type(model(ids, labels=ids).logits) is torch.Tensor


def test_a_class_that_is_met_when_a_model_is_made(device):
    """A whole model has neither a parameter of its own nor a parent."""

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.out = torch.nn.Linear(8, 16).to(device)

        def get_output_embeddings(self):
            return self.out

    with metalcore.enable_pytorch_overrides(NAME):

        class LaterModel(Model):
            def forward(self, x, labels=None):
                return torch.nn.functional.cross_entropy(self.out(x), labels)

        LaterModel()(torch.randn(3, 8).to(device), labels=torch.arange(3).to(device))
        assert ran() == 1


def test_a_subclass_with_a_forward_of_its_own(device):
    """It calls the forward of its base, which is replaced too: the report has one call."""

    class Derived(transformers.LlamaForCausalLM):
        def forward(self, *args, labels=None, **kwargs):
            return super().forward(*args, labels=labels, **kwargs)

    ids = tokens(device)
    with metalcore.enable_pytorch_overrides(NAME):
        model = Derived(decoder("Llama", device).config).to(device).train()
        model(ids, labels=ids)
        rows = [
            (row.what.rpartition(".")[2], row.ran, row.left) for row in metalcore.report().rows if row.override == NAME
        ]
        assert [row for row in rows if row[1] or row[2]] == [("Derived", 1, {})]
        model.requires_grad_(False)
        assert not model(ids, labels=ids).logits.requires_grad


def test_gradient_accumulation_and_checkpointing(device):
    ids, found = tokens(device), []
    for patched in (False, True):
        model = decoder("Llama", device).train()
        model.gradient_checkpointing_enable()
        with integration.patch(NAME) if patched else torch.enable_grad():
            for row in ids:
                model(row[None], labels=row[None]).loss.backward()
        found.append([p.grad for p in model.parameters()])
    for ours, theirs in zip(*reversed(found)):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5 * theirs.abs().max().item())
