"""Whole models: the results of a program are the module's."""

import pytest
import torch
import transformers
from agreement import agree, alike, of_ours, operators
from models import LINEAR
from nets import Decoder, Decoding, Encoder, MobileNet, ResNet, UNet, perturb

import metalcore
from metalcore.integrations import transformers as integration

IMAGE = (2, 3, 16, 16)


def image(device, shape=IMAGE):
    return torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(device)


def tokens(device, count=12):
    return torch.randint(3, 50, (1, count), generator=torch.Generator().manual_seed(0)).to(device)


@pytest.mark.parametrize(
    "make, fused",
    [
        (ResNet, {"conv_batch_norm"}),
        (MobileNet, {"conv_batch_norm"}),
        (UNet, {"conv_batch_norm", "kernels"}),
    ],
)
def test_vision(device, make, fused):
    torch.manual_seed(0)
    module = perturb(make()).to(device)
    program = metalcore.compile(module, (image(device),))
    assert {r.pattern for r in program.report().fused} == fused
    assert "batch_norm" not in operators(program)
    with torch.no_grad():
        alike(module(image(device)), program(image(device)))


@pytest.mark.parametrize("before", [True, False])
def test_encoders(device, before):
    torch.manual_seed(0)
    module, x = Encoder(before=before).to(device).eval(), image(device, (2, 6, 32))
    program = metalcore.compile(module, (x,))
    names = operators(program)
    assert names.count("metalcore.attention") == 2 and names.count("metalcore.add_layer_norm") >= 3
    with torch.no_grad():
        alike(module(x), program(x))


def test_a_decoder_with_fusions_off_one_by_one(device):
    torch.manual_seed(0)
    module, ids = Decoder(layers=1).to(device).eval(), tokens(device)
    exported = torch.export.export(module, (ids,))
    with torch.no_grad():
        expected = module(ids)
    names = ["layer_norm", "rms_norm", "add_norm", "rope", "attention", "gated", "kernels", "pointwise"]
    counts = []
    for left_out in [None, *names]:
        program = metalcore.compile(exported, fusions=[name for name in names if name != left_out])
        alike(expected, program(ids))
        counts.append(len(program.report().fused))
    assert counts[0] == 3 + 2 + 1 + 1 + 1  # norms, sums, rope, attention, gates
    plain = metalcore.compile(exported, fusions=[])
    alike(expected, plain(ids))
    assert not plain.report().count("metalcore")


WRITTEN = 64  # tokens
SIZES = dict(
    vocab_size=50,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=80,
)
GPT2 = dict(vocab_size=50, n_embd=32, n_layer=2, n_head=4, n_positions=80, bos_token_id=None, eos_token_id=None)


def language_model(name, device, **options):
    torch.manual_seed(0)
    sizes = GPT2 if name == "GPT2" else SIZES
    config = getattr(transformers, f"{name}Config")(**sizes, initializer_range=0.1, **options)
    make = getattr(transformers, "GPT2LMHeadModel" if name == "GPT2" else f"{name}ForCausalLM")
    model = make(config).to(device).eval()
    for parameter in model.parameters():
        if parameter.dim() == 1:
            torch.nn.init.normal_(parameter, mean=1.0, std=0.2)
    return model


@pytest.mark.parametrize(
    "name, options",
    [("Llama", {}), ("Qwen2", {}), ("Gemma", {"head_dim": 8}), ("GPT2", {})],
)
def test_language_models(device, name, options):
    """A program for the prompt and one for each further token, which share a cache, write what the module would."""
    model, ids = language_model(name, device, **options), tokens(device)
    step = Decoding(model, ids.shape[1] + WRITTEN)
    place = torch.zeros((), dtype=torch.int64, device=device)
    prefill, decode = (metalcore.compile(step, (given, place)) for given in (ids, ids[:, :1]))
    least = (5 if name == "GPT2" else 9) + of_ours(device, attentions=2)  # norms; ropes and gates, which GPT-2 has not
    assert all(program.report().count("metalcore") >= least for program in (prefill, decode))
    with torch.no_grad():
        alike(model(ids, use_cache=False).logits, logits := prefill(ids, place))
        for _ in range(WRITTEN):
            token = logits[:, -1:].argmax(-1)
            ids = torch.cat([ids, token], 1)
            logits = decode(token, place.new_tensor(ids.shape[1] - 1))
        # Each token is the most probable one after those before it.
        assert torch.equal(ids[:, -WRITTEN:], model(ids[:, :-1], use_cache=False).logits.argmax(-1)[:, -WRITTEN:])
    assert ids.unique().numel() > 3


def test_a_hybrid_model(device):
    """The step of a model with states, as a program and as one replay of it, writes what the module would."""
    model = language_model("OlmoHybrid", device, **LINEAR, pad_token_id=0, eos_token_id=1)
    ids = tokens(device)
    with integration.patch(), torch.no_grad():
        step, place = Decoding(model, 32), torch.zeros((), dtype=torch.int64, device=device)
        step(ids, place)  # a step reads states if there are some
        decode = metalcore.compile(step, (ids[:, :1], place))
        assert {"metalcore.gated_delta_rule", "metalcore.causal_conv1d_update"} <= {*operators(decode)}
        replay = decode.capture(ids[:, :1], place, segments=True)
        step.cache.reset()  # what the capture wrote
        alike(model(ids, use_cache=False).logits, logits := step(ids, place))
        for index in range(16):
            token = logits[:, -1:].argmax(-1)
            ids = torch.cat([ids, token], 1)
            logits = (replay if index % 2 else decode)(token, place.new_tensor(ids.shape[1] - 1))
        assert torch.equal(ids[:, -16:], model(ids[:, :-1], use_cache=False).logits.argmax(-1)[:, -16:])
    assert ids.unique().numel() > 3


@pytest.mark.parametrize("name, options", [("Llama", {}), ("Gemma", {"head_dim": 8}), ("GPT2", {})])
def test_language_models_in_bfloat16(device, name, options):
    model, ids = language_model(name, device, **options), tokens(device)
    program = metalcore.compile(model, (ids,), {"use_cache": False}, dtype=torch.bfloat16)
    with torch.no_grad():
        a, b = (call(ids, use_cache=False).logits.float().flatten().cpu() for call in (model, program))
    assert torch.corrcoef(torch.stack([a, b]))[0, 1] > 0.99


def test_bert(device):
    torch.manual_seed(0)
    config = transformers.BertConfig(vocab_size=50, hidden_size=32, num_hidden_layers=2, num_attention_heads=4)
    model = transformers.BertModel(config).to(device).eval()
    program = metalcore.compile(model, (tokens(device),))
    with torch.no_grad():
        expected, found = model(tokens(device)), program(tokens(device))
    assert type(found) is type(expected)
    agree(expected.last_hidden_state, found.last_hidden_state)
    assert operators(program).count("metalcore.attention") == of_ours(device, attentions=2)


def test_bfloat16(device):
    torch.manual_seed(0)
    module, ids = Decoder().to(device).eval(), tokens(device)
    program = metalcore.compile(module, (ids,), dtype=torch.bfloat16)
    with torch.no_grad():
        a, b = module(ids).flatten().cpu(), program(ids).float().flatten().cpu()
    assert torch.corrcoef(torch.stack([a, b]))[0, 1] > 0.99


@pytest.mark.parametrize("make, dtype", [(ResNet, torch.float16), (MobileNet, torch.bfloat16)])
def test_vision_in_16_bits(device, make, dtype):
    module = perturb(make()).to(device)
    program = metalcore.compile(module, (image(device),), dtype=dtype)
    with torch.no_grad():
        a, b = module(image(device)).flatten().cpu(), program(image(device).to(dtype)).float().flatten().cpu()
    assert torch.corrcoef(torch.stack([a, b]))[0, 1] > 0.99


def test_an_exported_program(device):
    module, x = perturb(ResNet()).to(device), image(device)
    program = metalcore.compile(torch.export.export(module, (x,)))
    agree(module(x), program(x))
    with pytest.raises(ValueError, match="convert the module before it is exported"):
        metalcore.compile(torch.export.export(module, (x,)), dtype=torch.float16)


def test_a_result_whose_strides_are_not_those_of_its_arguments(device):
    """Where a convolution's result is channels-last against its fake tensor's strides, gelu(out=) would write nothing
    into memory of these strides."""

    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.linear = torch.nn.Conv2d(32, 32, 3, padding=1, groups=32), torch.nn.Linear(32, 32)

        def forward(self, x):
            image = x.mT.unflatten(2, (8, 5))
            return self.linear(torch.nn.functional.gelu(self.conv(image).flatten(2).mT))

    module, x = Net().to(device), torch.randn(6, 40, 32, device=device)
    agree(module(x), metalcore.compile(module, (x,), fusions=[])(x))
