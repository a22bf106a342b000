"""attn_implementation="metalcore": the numbers of eager attention, for training and for generation."""

import pytest
import torch
import transformers
from models import SIZES, decoder, tokens
from processes import python
from transformers import masking_utils

import metalcore
from metalcore.integrations import transformers as integration
from metalcore.integrations.flash_attn import flash_attn_func, flash_attn_varlen_func
from metalcore.nn.attention import varlen_attn

NAMES = ("Llama", "Mistral", "Gemma2", "Gemma3", "Qwen2", "GptOss")
integration.register_attention()


def both(name, device, **options):
    return [decoder(name, device, attn_implementation=kind, **options).eval() for kind in ("eager", "metalcore")]


def padded(device, left):
    mask = torch.ones(2, 16, dtype=torch.long)
    mask[1, : 4 if left else None] = 0
    if not left:
        mask[1] = 1
        mask[1, 11:] = 0
    return mask.to(device)


def positions(device):
    """Of two and of three sequences in a row of 16 tokens."""
    rows = [torch.cat([torch.arange(n) for n in lengths]) for lengths in ((7, 9), (4, 6, 6))]
    return torch.stack(rows).to(device)


@pytest.mark.parametrize("name", NAMES)
def test_logits_and_gradients(device, name):
    """Whole rows, padded ones, and packed ones."""
    ids = tokens(device)
    for case in ({}, {"attention_mask": padded(device, True)}, {"attention_mask": padded(device, False)}, None):
        found = []
        for model in both(name, device):
            options = {"position_ids": positions(device), "use_cache": False} if case is None else case
            logits = model(ids, **options).logits
            if case:
                logits = logits[case["attention_mask"].bool()]
            logits.square().mean().backward()
            found.append([logits, *(parameter.grad for parameter in model.parameters())])
        for ours, theirs in zip(found[1], found[0]):
            scale = theirs.abs().max().item()
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5 * scale + 1e-8)


@pytest.mark.parametrize("name", NAMES)
def test_generation(device, name):
    """With caches that grow and that have a size, from padded prompts, and with a prompt that comes in parts."""
    ids = tokens(device)
    models = both(name, device)
    for cache in ("dynamic", "static"):
        theirs, ours = (
            model.generate(
                ids,
                attention_mask=padded(device, True),
                max_new_tokens=8,
                do_sample=False,
                cache_implementation=cache,
                disable_compile=True,
            )
            for model in models
        )
        assert torch.equal(ours, theirs)
    found = []
    for model in models:
        cache = transformers.DynamicCache(config=model.config)
        with torch.no_grad():
            model(ids[:, :9], past_key_values=cache)
            found.append(model(ids[:, 9:], past_key_values=cache).logits)
    torch.testing.assert_close(found[1], found[0], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ("Llama", "Mistral", "Gemma2", "GptOss"))
def test_continuous_batching(device, name):
    """Requests come and go, and long prompts come in parts. The tokens are those of eager generation."""
    if not hasattr(transformers, "ContinuousBatchingConfig"):
        pytest.skip(f"transformers {transformers.__version__} has no ContinuousBatchingConfig")
    prompts = [row[:n].tolist() for row, n in zip(tokens("cpu", batch=4), (5, 1, 16, 9))]
    options = transformers.GenerationConfig(max_new_tokens=7, do_sample=False, eos_token_id=None, pad_token_id=0)
    batching = transformers.ContinuousBatchingConfig(num_blocks=24, page_size=8, max_batch_tokens=12)
    eager, model = both(name, device)
    before = metalcore.report()
    found = model.generate_batch(prompts, generation_config=options, continuous_batching_config=batching)
    assert [request.error for request in found.values()] == [None] * 4
    ran = {row.what: row.ran for row in metalcore.report().rows}
    earlier = {row.what: row.ran for row in before.rows}
    what = 'transformers\' attn_implementation="metalcore"'
    assert ran[what] > earlier.get(what, 0) and model.config._attn_implementation == "metalcore"
    for prompt, request in zip(prompts, (found[key] for key in sorted(found))):
        ids = torch.tensor([prompt], device=device)
        expected = eager.generate(ids, attention_mask=torch.ones_like(ids), generation_config=options)
        assert request.prompt_ids == prompt and request.generated_tokens == expected[0, len(prompt) :].tolist()


def test_lengths_from_a_data_collator(device):
    """DataCollatorWithFlattening gives the places where sequences begin."""
    rows = [{"input_ids": list(range(3, 3 + n)), "labels": list(range(3, 3 + n))} for n in (5, 9, 2)]
    collator = transformers.DataCollatorWithFlattening(return_flash_attn_kwargs=True)
    batch = collator(rows)
    batch = {k: v.to(device) if isinstance(v, torch.Tensor) else v for k, v in batch.items()}
    assert "cu_seq_lens_q" in batch
    theirs, ours = both("Llama", device)
    expected = torch.cat([theirs(torch.tensor([row["input_ids"]], device=device)).logits for row in rows], 1)
    torch.testing.assert_close(ours(**batch).logits, expected, rtol=1e-4, atol=1e-5)


def test_packed_rows_under_autocast(device):
    """Norms of queries and keys give float32, and values have 16 bits."""
    found = []
    for model in both("Qwen3", device):
        with torch.autocast(device, torch.bfloat16):
            found.append(model(tokens(device), position_ids=positions(device), use_cache=False).logits.float())
    torch.testing.assert_close(found[1], found[0], rtol=0.05, atol=0.05 * found[0].abs().max().item())


def test_a_position_bias(device):
    config = transformers.T5Config(
        vocab_size=64, d_model=32, d_kv=8, d_ff=40, num_layers=2, num_heads=4, decoder_start_token_id=0
    )
    found = []
    for kind in ("eager", "metalcore"):
        torch.manual_seed(0)
        model = transformers.T5ForConditionalGeneration._from_config(config, attn_implementation=kind).to(device).eval()
        out = model(tokens(device), attention_mask=padded(device, False), labels=tokens(device))
        out.loss.backward()
        found.append([out.logits, *(p.grad for p in model.parameters())])
    for ours, theirs in zip(found[1], found[0]):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5 * theirs.abs().max().item())


SPARSE = dict(
    n_routed_experts=4,
    num_experts_per_tok=2,
    n_group=1,
    topk_group=1,
    moe_intermediate_size=24,
    first_k_dense_replace=1,
    q_lora_rank=16,
    kv_lora_rank=16,
    qk_rope_head_dim=8,
    qk_nope_head_dim=8,
    v_head_dim=8,
    num_key_value_heads=4,
    index_topk=4,
    index_n_heads=2,
    index_head_dim=8,
)
INKLING = dict(
    num_key_value_heads=2,
    head_dim=8,
    swa_num_attention_heads=4,
    swa_num_key_value_heads=2,
    swa_head_dim=8,
    num_experts=4,
    num_experts_per_tok=2,
    moe_intermediate_size=24,
)


@pytest.mark.parametrize("name, options", [("DeepseekV32", SPARSE), ("Inkling2", INKLING)])
def test_keys_and_sinks_of_each_query(device, name, options):
    """Sparse attention gives the keys that each query sees, and Inkling a sink's logit for each query."""
    config_class = f"{name}TextConfig" if name == "Inkling2" else f"{name}Config"
    if not hasattr(transformers, config_class):
        pytest.skip(f"transformers {transformers.__version__} has no {name}")
    config = getattr(transformers, config_class)(**{**SIZES, **options})
    found = []
    for kind in ("eager", "metalcore"):
        torch.manual_seed(0)
        model = getattr(transformers, f"{name}ForCausalLM")._from_config(config, attn_implementation=kind)
        model = model.to(device).eval()
        logits = model(tokens(device)).logits
        logits.square().mean().backward()
        found.append([logits, *(p.grad for p in model.parameters() if p.grad is not None)])
    assert len(found[0]) == len(found[1])
    for ours, theirs in zip(found[1], found[0]):
        scale = theirs.abs().max().item()
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5 * scale + 1e-8)


@pytest.mark.parametrize("name", ("BigBirdPegasus", "PegasusX"))
def test_decoders_that_do_not_say_that_they_are_causal(device, name):
    """The mask that their layers expect does. BigBird-PEGASUS has eager attention only, PEGASUS-X also flash's."""
    config = getattr(transformers, f"{name}Config")(
        vocab_size=64,
        d_model=32,
        decoder_layers=2,
        decoder_ffn_dim=40,
        decoder_attention_heads=4,
        encoder_layers=1,
        encoder_ffn_dim=40,
        encoder_attention_heads=4,
    )
    ids, found = tokens(device), []
    for kind in ("eager", "metalcore"):
        torch.manual_seed(0)
        model = getattr(transformers, f"{name}ForConditionalGeneration")._from_config(config, attn_implementation=kind)
        with torch.no_grad():
            found.append(model.to(device).eval()(ids, decoder_input_ids=ids).logits)
    torch.testing.assert_close(found[1], found[0], rtol=1e-4, atol=1e-5)


def test_blocks_of_keys_are_refused(device):
    q = torch.randn(1, 2, 8, 8, device=device)
    attend = transformers.AttentionInterface()["metalcore"]
    with pytest.raises(ValueError, match="takes no block_indices"):
        attend(torch.nn.Module(), q, q, q, None, block_indices=torch.zeros(1, 2, 8, 1, device=device))


def test_masks_are_those_of_sdpa(device):
    """Written out, a mask is sdpa's. Bands that a kernel takes are not written out."""
    from metalcore.overrides.libraries.masks import Mask, mask

    padding = torch.tensor([[1] * 12, [0] * 3 + [1] * 9], dtype=torch.bool, device=device)
    sliding = masking_utils.sliding_window_causal_mask_function
    both_ways = masking_utils.sliding_window_bidirectional_mask_function
    sequences = torch.tensor([[0] * 7 + [1] * 5, [0] * 4 + [1] * 8], device=device)
    packed = masking_utils.and_masks(sliding(3), masking_utils.packed_sequence_mask_function(sequences))
    chunked = masking_utils.chunked_causal_mask_function(4, torch.zeros(2, dtype=torch.long, device=device))
    cases = [  # queries, keys, q_offset, kv_offset, function, whether it is a Mask
        (12, 12, 0, 0, sliding(3), True),
        (4, 12, 8, 0, masking_utils.causal_mask_function, True),
        (4, 12, 2, 0, sliding(3), True),
        (4, 8, 9, 4, sliding(6), False),
        (12, 12, 0, 0, both_ways(2), True),
        (12, 12, 0, 0, packed, True),
        (12, 12, 0, 0, chunked, False),
        (1, 12, 11, 0, sliding(3), False),
    ]
    if hasattr(masking_utils, "packed_sequence_compatibility_function"):  # after transformers 5.20
        remapped = masking_utils.packed_sequence_compatibility_function(
            sliding(3), positions(device)[:, :12], sequences
        )
        cases.append((12, 12, 0, 0, remapped, True))
    for queries, keys, q_offset, kv_offset, function, lazy in cases:
        for padded in (None, padding):
            arguments = dict(q_offset=q_offset, kv_offset=kv_offset, mask_function=function, attention_mask=padded)
            expected = masking_utils.sdpa_mask(2, queries, keys, **arguments, local_size=3, device=device)
            found = mask(2, queries, keys, **arguments, local_size=3, device=device)
            assert isinstance(found, Mask) == lazy
            assert found.shape == expected.shape and torch.equal(found & True, expected)
    assert mask(2, 12, 12, device=device) is None
    assert mask(2, 12, 12, attention_mask=torch.ones_like(padding), device=device) is None


def test_sdpa_on_mps_is_ours_while_patched(device):
    model = decoder("Mistral", device, attn_implementation="sdpa").eval()
    ids, mask = tokens(device), padded(device, False)
    expected = model(ids, attention_mask=mask).logits
    before = transformers.AttentionInterface._global_mapping["sdpa"]
    with integration.patch("scaled_dot_product_attention"):
        found = model(ids, attention_mask=mask).logits
        ran = {row.what: row.ran for row in metalcore.report().rows}["transformers' sdpa on mps"]
        assert ran == (2 if device == "mps" else 0)
    assert transformers.AttentionInterface._global_mapping["sdpa"] is before
    torch.testing.assert_close(found[mask.bool()], expected[mask.bool()], rtol=1e-4, atol=1e-5)


def test_sdpa_on_cuda_is_ours_with_bands(device, monkeypatch):
    """The rule of `cuda`, on any device: metalcore takes masks that are bands, in 16 bits, and nothing else. Those with
    padding need many queries."""
    from metalcore.overrides.libraries import sdpa

    monkeypatch.setitem(sdpa._TAKES, device, sdpa._takes_on_cuda)
    monkeypatch.setattr(sdpa._C, "gpu_family", lambda device: "hopper")
    model = decoder("Mistral", device, attn_implementation="sdpa", sliding_window=3).eval()
    plain = decoder("Mistral", device, attn_implementation="sdpa", sliding_window=None).eval()
    some = padded(device, False)
    for dtype, mask, trains, least, runs in (
        (torch.float32, None, True, 1, 0),
        (torch.bfloat16, None, True, 99, 2),
        (torch.bfloat16, some, True, tokens(device).shape[1] + 1, 0),
        (torch.bfloat16, some, True, tokens(device).shape[1], 2),
        (torch.bfloat16, some, False, tokens(device).shape[1], 2),
    ):
        monkeypatch.setattr(sdpa, "_LEAST_PADDED", least)
        model, plain = model.to(dtype), plain.to(dtype)
        expected = model(tokens(device), attention_mask=mask).logits
        with integration.patch("scaled_dot_product_attention"), torch.set_grad_enabled(trains):
            found = model(tokens(device), attention_mask=mask).logits
            plain(tokens(device))  # without a mask
            ran = {row.what: row.ran for row in metalcore.report().rows}[f"transformers' sdpa on {device}"]
        assert ran == runs
        seen = slice(None) if mask is None else mask.bool()
        torch.testing.assert_close(found[seen], expected[seen], rtol=0.05, atol=0.05)


def sequences(device):
    q, k, v = torch.randn(14, 4, 8), torch.randn(17, 2, 8), torch.randn(17, 2, 6)
    bounds = torch.tensor([0, 5, 5, 14], dtype=torch.int32), torch.tensor([0, 7, 9, 17], dtype=torch.int32)
    return [t.to(device).requires_grad_(t.is_floating_point()) for t in (q, k, v)], [b.to(device) for b in bounds]


@pytest.mark.parametrize("window", ((-1, -1), (-1, 0), (2, 0), (2, 1)))
def test_variable_lengths(device, window):
    tensors, bounds = sequences(device)
    lse_wanted = torch.nn.attention.varlen.AuxRequest(lse=True) if hasattr(torch.nn.attention, "varlen") else None
    out = varlen_attn(*tensors, *bounds, 9, 8, window_size=window, enable_gqa=True, return_aux=lse_wanted)
    out, lse = out if lse_wanted else (out, None)
    direction = torch.randn(out.shape, generator=torch.Generator().manual_seed(2)).to(device)
    grads = torch.autograd.grad((out * direction).sum(), tensors)
    alone, sums = [], []
    for i in range(3):
        rows, columns = (slice(b[i], b[i + 1]) for b in (bound.tolist() for bound in bounds))
        q, k, v = (t[part].transpose(0, 1) for t, part in zip(tensors, (rows, columns, columns)))
        found, total = metalcore.scaled_dot_product_attention(
            q, k, v, enable_gqa=True, window=window, lower_right=True, return_lse=True
        )
        alone.append(found.transpose(0, 1))
        sums.append(total)
    expected = torch.cat(alone)
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)
    if lse is not None:
        torch.testing.assert_close(lse, torch.cat(sums, 1), rtol=1e-5, atol=1e-5)
    theirs = torch.autograd.grad((expected * direction).sum(), tensors)
    for a, b in zip(grads, theirs):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
    flash = flash_attn_varlen_func(*tensors, *bounds, 9, 8, window_size=window)
    torch.testing.assert_close(flash, expected, rtol=1e-5, atol=1e-5)


def test_flash_attn_func(device):
    q, k, v = (torch.randn(2, n, h, 8).to(device) for n, h in ((5, 4), (7, 2), (7, 2)))
    found, lse, _ = flash_attn_func(q, k, v, causal=True, softcap=3.0, return_attn_probs=True)
    expected = metalcore.scaled_dot_product_attention(
        *(t.transpose(1, 2) for t in (q, k, v)), window=(-1, 0), lower_right=True, softcap=3.0, enable_gqa=True
    )
    torch.testing.assert_close(found, expected.transpose(1, 2))
    assert lse.shape == (2, 4, 5)


def test_errors_of_varlen_attn(device):
    (q, k, v), bounds = sequences(device)
    with pytest.raises(ValueError, match="enable_gqa=True"):
        varlen_attn(q, k, v, *bounds, 9, 8)
    with pytest.raises(RuntimeError, match="one dtype"):
        varlen_attn(q.half(), k, v, *bounds, 9, 8, enable_gqa=True)
    with pytest.raises(RuntimeError, match=r"integers of one shape \(sequences \+ 1,\)"):
        varlen_attn(q, k, v, bounds[0][:2], bounds[1], 9, 8, enable_gqa=True)


ENABLED = """
import metalcore, metalcore.simulator, torch
metalcore.enable_pytorch_overrides()
from transformers import LlamaConfig, LlamaForCausalLM
config = LlamaConfig(vocab_size=64, hidden_size=32, intermediate_size=88, num_hidden_layers=2, num_attention_heads=4)
model = LlamaForCausalLM._from_config(config, attn_implementation="metalcore").to("mps")
model(torch.arange(8, device="mps")[None])
print([row.ran for row in metalcore.report().rows if "attn_implementation" in row.what])
"""


@pytest.mark.only_on("simulator")
def test_overrides_make_the_name_known_and_count_it():
    done = python("-c", ENABLED, timeout=300)
    assert done.stdout == "[2]\n", done.stderr
