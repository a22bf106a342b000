"""generate draws the tokens that transformers' own generate draws, with each kind of cache, and stops where it must."""

import contextlib

import pytest
import torch
from small_models import HYBRIDS, MODELS, VOCABULARY, prompts, small_model
from transformers import DeepseekV2Config, DeepseekV2ForCausalLM, RwkvConfig, RwkvForCausalLM

import metalcore
from metalcore.generation import stream
from metalcore.generation._caches import NAME, attending
from metalcore.integrations import transformers as integration
from metalcore.paged import PagedKVCache

NEW = 16


def by_transformers(model, tokens, mask=None, new=NEW):
    mask = torch.ones_like(tokens) if mask is None else mask
    with torch.no_grad():
        found = model.generate(tokens, attention_mask=mask, max_new_tokens=new, do_sample=False, pad_token_id=0)
    return found[:, tokens.shape[1] :].tolist()


@pytest.fixture(scope="module")
def llama(device):
    return small_model("llama", device)


@pytest.mark.parametrize("family", MODELS)
def test_greedy_tokens_are_those_of_transformers(family, device):
    model, tokens = small_model(family, device), prompts(device)
    mask = torch.ones_like(tokens)
    mask[0, :4] = 0
    expected = by_transformers(model, tokens, mask)
    assert len(set(expected[0])) > 4
    for cache in ("static", "paged", "dynamic"):
        assert metalcore.generate(model, tokens, mask, max_new_tokens=NEW, cache=cache).tolist() == expected, cache


@pytest.mark.parametrize("patched", [False, True], ids=["plain", "patched"])
@pytest.mark.parametrize("family", HYBRIDS)
def test_models_that_are_not_only_attention(family, patched, device):
    model, tokens = small_model(family, device), prompts(device)
    mask = torch.ones_like(tokens)
    mask[0, :4] = 0
    expected = by_transformers(model, tokens, mask)
    assert len(set(expected[0])) > 4
    with contextlib.ExitStack() as stack:
        if patched:
            stack.enter_context(integration.patch())
        for cache in ("static", "dynamic") + ("paged",) * (family != "mamba"):
            assert metalcore.generate(model, tokens, mask, max_new_tokens=NEW, cache=cache).tolist() == expected, cache
    if family == "qwen3_next":  # pages are for the layers that have keys
        pool = PagedKVCache(16, 4, heads=2, head_size=16, layers=1, device=device)
        assert metalcore.generate(model, tokens, mask, max_new_tokens=NEW, cache=pool).tolist() == expected


@pytest.mark.parametrize("cache", ["static", "paged"])
def test_padding_is_anywhere(llama, device, cache):
    rows = [prompts("cpu", 3)[row, :length].tolist() for row, length in enumerate((9, 5, 1))]
    expected = [by_transformers(llama, torch.tensor([row], device=device))[0] for row in rows]
    assert metalcore.generate(llama, rows, max_new_tokens=NEW, cache=cache).tolist() == expected
    tokens, mask = torch.zeros(3, 11, dtype=torch.int64), torch.zeros(3, 11)
    for row, begin in enumerate((0, 2, 10)):
        tokens[row, begin : begin + len(rows[row])] = torch.tensor(rows[row])
        mask[row, begin : begin + len(rows[row])] = 1
    found = metalcore.generate(llama, tokens.to(device), mask.to(device), max_new_tokens=NEW, cache=cache)
    assert found.tolist() == expected


def test_one_prompt_needs_no_rows(llama, device):
    tokens = prompts(device)[0]
    expected = by_transformers(llama, tokens[None])
    assert metalcore.generate(llama, tokens, max_new_tokens=NEW).tolist() == expected
    assert metalcore.generate(llama, tokens.tolist(), max_new_tokens=NEW).tolist() == expected


def test_windows_of_any_length(device):
    tokens = prompts(device)
    for window in (2, NEW + 8, 100):
        model = small_model("mistral", device, sliding_window=window)
        expected = by_transformers(model, tokens)
        for cache in ("static", "paged"):
            assert metalcore.generate(model, tokens, max_new_tokens=NEW, cache=cache).tolist() == expected


def test_many_pages(llama, device):
    expected = by_transformers(llama, prompts(device), new=40)
    assert metalcore.generate(llama, prompts(device), max_new_tokens=40, cache="paged").tolist() == expected


@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_a_pool_gets_its_pages_back(llama, device, layout):
    pool = PagedKVCache(16, 4, heads=2, head_size=16, layers=2, device=device, kv_layout=layout)
    other = pool.allocate()
    pool.reserve([other], [5])
    found = metalcore.generate(llama, prompts(device), max_new_tokens=NEW, cache=pool)
    assert found.tolist() == by_transformers(llama, prompts(device))
    assert pool.free_pages == 14
    with pytest.raises(RuntimeError, match="16 pages are needed, and 14 are free"):
        metalcore.generate(llama, prompts(device), max_new_tokens=20, cache=pool)
    assert pool.free_pages == 14
    with pytest.raises(ValueError, match="1 layers"):
        metalcore.generate(llama, prompts(device), cache=PagedKVCache(9, 4, 2, 16, device=device))


def test_rows_end_where_a_token_ends_them(llama, device):
    whole = metalcore.generate(llama, prompts(device), max_new_tokens=NEW).tolist()
    end = whole[0][4]
    ends = [(row.index(end) + 1 if end in row else NEW) for row in whole]
    steps = []
    found = metalcore.generate(
        llama, prompts(device), max_new_tokens=NEW, eos_token_id=end, pad_token_id=96, callback=steps.append
    )
    most = max(ends)
    assert ends[0] <= 5 and ends[0] != ends[1] and len(steps) == most
    assert found.tolist() == [row[:n] + [96] * (most - n) for row, n in zip(whole, ends)]
    assert steps == [[row[i] if i < n else None for row, n in zip(whole, ends)] for i in range(most)]
    llama.generation_config.eos_token_id = [end]
    try:
        assert metalcore.generate(llama, prompts(device)[0], max_new_tokens=NEW).tolist() == [whole[0][: ends[0]]]
        assert metalcore.generate(llama, prompts(device)[:1], max_new_tokens=NEW, eos_token_id=()).shape == (1, NEW)
    finally:
        llama.generation_config.eos_token_id = None


class Letters:
    """A tokenizer whose tokens are two letters each."""

    def decode(self, tokens):
        return "".join(chr(97 + token % 26) + chr(97 + token // 26) for token in tokens)


def test_stops_are_sequences_and_strings(llama, device):
    [whole] = metalcore.generate(llama, prompts(device)[0], max_new_tokens=NEW).tolist()

    def stopped(stop, **options):
        return metalcore.generate(llama, prompts(device)[0], max_new_tokens=NEW, stop=stop, **options).tolist()[0]

    assert stopped([whole[3:6]]) == whole[:6]
    assert stopped([[whole[2], whole[4]], (whole[9],)]) == whole[: whole.index(whole[9]) + 1]
    text = Letters().decode(whole)
    across = text[9:13]  # the end of one token, a whole one and the beginning of another
    tokens = -(-(text.index(across) + 4) // 2)
    assert stopped(across, tokenizer=Letters()) == whole[:tokens]
    assert stopped(["nowhere", across], tokenizer=Letters()) == whole[:tokens]
    with pytest.raises(ValueError, match="need a tokenizer"):
        stopped("a")
    with pytest.raises(ValueError, match="must not be empty"):
        stopped([[]])


def test_stream_gives_the_tokens_as_they_come(llama, device):
    whole = metalcore.generate(llama, prompts(device), max_new_tokens=NEW)
    assert list(stream(llama, prompts(device), max_new_tokens=NEW)) == whole.T.tolist()
    some = stream(
        llama, prompts(device), max_new_tokens=NEW, cache=(pool := PagedKVCache(16, 8, 2, 16, layers=2, device=device))
    )
    assert next(some) == whole.T.tolist()[0] and pool.free_pages < 16
    implementation = llama.config._attn_implementation
    assert implementation != "metalcore_generation"
    with torch.no_grad():
        llama(prompts(device))  # between two tokens
    assert next(some) == whole.T.tolist()[1]
    some.close()
    assert pool.free_pages == 16
    with pytest.raises(TypeError, match="a model of transformers, not Linear"):
        metalcore.generate(torch.nn.Linear(3, 3), torch.zeros(1, 3, dtype=torch.long))
    with pytest.raises(TypeError, match="unknown options beams"):
        stream(llama, prompts(device), beams=3)


def test_logprobs_are_the_models(llama, device):
    found, logprobs = metalcore.generate(llama, prompts(device), max_new_tokens=NEW, return_logprobs=True)
    with torch.no_grad():
        logits = llama(torch.cat([prompts(device), found], 1)).logits[:, 8:-1]
    expected = logits.log_softmax(-1).gather(2, found[..., None])[..., 0]
    torch.testing.assert_close(logprobs, expected, rtol=1e-4, atol=1e-4)


def test_sampling_follows_its_generator(llama, device):
    def drawn(seed, **options):
        generator = torch.Generator(device).manual_seed(seed)
        return metalcore.generate(llama, prompts(device), max_new_tokens=NEW, generator=generator, **options).tolist()

    assert drawn(1, temperature=1.0) == drawn(1, temperature=1.0) != drawn(2, temperature=1.0)
    greedy = drawn(1)
    for one in ({"top_k": 1}, {"top_p": 1e-6}, {"min_p": 1.0}):
        assert drawn(3, temperature=1.0, **one) == greedy
    with pytest.raises(ValueError, match="temperature"):
        drawn(1, temperature=-1.0)
    assert llama.config._attn_implementation != "metalcore_generation"  # also after an error


def test_pages_for_heads_of_one_shape(llama, device):
    for layout in ("NHD", "HND"):
        pool = PagedKVCache(16, 4, heads=1, head_size=16, layers=2, device=device, kv_layout=layout)
        with pytest.raises(
            ValueError, match="the pages have 1 heads of 16, and layer 0 of the model has 2 heads of 16"
        ):
            metalcore.generate(llama, prompts(device), max_new_tokens=NEW, cache=pool)
        assert pool.free_pages == 16
    config = DeepseekV2Config(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        kv_lora_rank=16,
        q_lora_rank=None,
        qk_nope_head_dim=8,
        qk_rope_head_dim=8,
        v_head_dim=8,
        first_k_dense_replace=1,
    )
    model = DeepseekV2ForCausalLM(config).eval().to(device)
    with pytest.raises(ValueError, match="is for keys and values of one size, and the model has 16 and 8"):
        metalcore.generate(model, prompts(device), max_new_tokens=NEW, cache="paged")
    assert metalcore.generate(model, prompts(device), max_new_tokens=NEW).tolist() == by_transformers(
        model, prompts(device)
    )


def test_threads_share_a_model(llama):
    """The implementation of attention is in the model's configuration: whoever ends last gives it back."""
    before = llama.config._attn_implementation
    first, second = attending(llama, None), attending(llama, None)
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert llama.config._attn_implementation == NAME
    second.__exit__(None, None, None)
    assert llama.config._attn_implementation == before


@pytest.mark.parametrize("cache", ["static", "dynamic"])
def test_a_model_that_torch_compile_wraps(llama, device, cache):
    tokens = prompts(device)
    wrapped = torch.compile(llama, backend="eager")
    expected = metalcore.generate(llama, tokens, max_new_tokens=4, eos_token_id=())
    assert torch.equal(metalcore.generate(wrapped, tokens, max_new_tokens=4, eos_token_id=(), cache=cache), expected)


def test_what_it_refuses(llama, device):
    tokens = prompts(device)
    for wrong, message in (
        ({"max_new_tokens": 0}, "max_new_tokens must be"),
        ({"attention_mask": torch.ones(2, 3)}, "attention_mask is"),
        ({"attention_mask": torch.zeros(2, 9)}, "no token that is not padding"),
        ({"cache": "large"}, "cache must be"),
    ):
        with pytest.raises(ValueError, match=message):
            metalcore.generate(llama, tokens, **wrong)
    for wrong in (tokens.float(), tokens[None]):
        with pytest.raises(ValueError, match="tokens must be integers"):
            metalcore.generate(llama, wrong)
    for empty in ([], [[]], [[1, 2], []], tokens[:, :0], tokens[0, :0], torch.tensor([])):
        with pytest.raises(ValueError, match="generate: the prompt (of a row )?is empty"):
            metalcore.generate(llama, empty)
    for wrong in ("abc", 3, [[1.5]], [["a"]]):
        with pytest.raises(ValueError, match="tokens must be integers or rows of them, not"):
            metalcore.generate(llama, wrong)
    with pytest.raises(TypeError, match="generate: attention_mask must be a tensor, not list"):
        metalcore.generate(llama, tokens, [[1] * 9] * 2)
    for token in (-1, VOCABULARY, 2**70):
        with pytest.raises(ValueError, match=f"the tokens 0 to {VOCABULARY - 1}, and not {token}"):
            metalcore.generate(llama, [[1, token]])
    for wrong in ("x", 1.5, [[1]]):
        with pytest.raises(ValueError, match="eos_token_id must be an integer or several, not"):
            metalcore.generate(llama, tokens, eos_token_id=wrong)
    for wrong in (3, [3], None, [[1.5]]):
        with pytest.raises(ValueError, match="stop must be strings or sequences of tokens, not"):
            metalcore.generate(llama, tokens, stop=wrong)
    with pytest.raises(ValueError, match="LlamaModel has no output layer"):
        metalcore.generate(llama.model, tokens)
    mamba = small_model("mamba")
    with pytest.raises(ValueError, match="has states alone, and nothing for pages"):
        metalcore.generate(mamba, tokens.cpu(), cache="paged")
    rwkv = RwkvForCausalLM(RwkvConfig(vocab_size=VOCABULARY, hidden_size=16, num_hidden_layers=2))
    with pytest.raises(ValueError, match="RwkvForCausalLM keeps no keys, values or states in a Cache"):
        metalcore.generate(rwkv, tokens.cpu())
