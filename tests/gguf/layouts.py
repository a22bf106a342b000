"""Small random models of each layout, written by gguf-py as llama.cpp's convert_hf_to_gguf.py writes them, and the same
models of transformers with the dequantized weights."""

import functools
from typing import NamedTuple

import numpy as np
import pytest
import torch

from metalcore.quant import dequantize, quantize

gguf = pytest.importorskip("gguf")
transformers = pytest.importorskip("transformers")

HIDDEN, WIDTH, VOCABULARY = 256, 512, 288
SIZES = dict(
    vocab_size=VOCABULARY,
    hidden_size=HIDDEN,
    intermediate_size=WIDTH,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=512,
    rms_norm_eps=1e-5,
    tie_word_embeddings=False,
    bos_token_id=256,
    eos_token_id=257,
    pad_token_id=None,
)
MOE = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=256)
LLAMA3 = dict(
    rope_type="llama3",
    rope_theta=500000.0,
    factor=8.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=8192,
)
YARN = dict(rope_type="yarn", rope_theta=10000.0, factor=4.0, original_max_position_embeddings=64)
FACTORS = dict(short_factor=[1 + i / 40 for i in range(24)], long_factor=[2 + i / 10 for i in range(24)])
LONG = dict(rope_type="longrope", rope_theta=10000.0, original_max_position_embeddings=256, partial_rotary_factor=0.75)
GEMMA3_ROPE = dict(
    full_attention=dict(rope_type="linear", factor=8.0, rope_theta=1e6),
    sliding_attention=dict(rope_type="default", rope_theta=10000.0),
)


class Case(NamedTuple):
    """A model of transformers, its options, GGUF's name of its layout, and types of its weights, of which the last is
    that of embeddings and output."""

    config: str
    architecture: str
    options: dict
    types: tuple = ("Q4_K", "Q6_K")


CASES = {
    "llama": Case("Llama", "llama", dict(rope_parameters=LLAMA3), ("Q4_K", "Q5_K", "Q6_K")),
    "llama-tied": Case("Llama", "llama", dict(tie_word_embeddings=True, attention_bias=True), ("Q8_0",)),
    "llama-plain": Case("Llama", "llama", dict(num_key_value_heads=4), ("F32",)),
    "mistral": Case("Mistral", "llama", dict(sliding_window=None, head_dim=32), ("Q4_0", "Q6_K")),
    "mixtral": Case("Mixtral", "llama", dict(num_local_experts=4, num_experts_per_tok=2), ("Q4_K", "Q8_0", "Q6_K")),
    "qwen2": Case("Qwen2", "qwen2", dict(rope_parameters=YARN), ("Q5_0", "Q5_1", "Q4_1")),
    "qwen2moe": Case(
        "Qwen2Moe",
        "qwen2moe",
        {**MOE, "shared_expert_intermediate_size": 256, "norm_topk_prob": False},
        ("Q8_0", "Q5_K"),
    ),
    "qwen3": Case("Qwen3", "qwen3", dict(head_dim=128, tie_word_embeddings=True), ("Q2_K", "Q3_K", "Q6_K")),
    "qwen3moe": Case(
        "Qwen3Moe", "qwen3moe", {**MOE, "head_dim": 128, "norm_topk_prob": True}, ("Q4_0", "Q8_0", "Q5_0")
    ),
    "gemma2": Case(
        "Gemma2",
        "gemma2",
        dict(head_dim=128, query_pre_attn_scalar=128, sliding_window=8, tie_word_embeddings=True),
    ),
    "gemma3": Case(
        "Gemma3Text",
        "gemma3",
        dict(
            head_dim=128,
            query_pre_attn_scalar=128,
            sliding_window=8,
            tie_word_embeddings=True,
            num_hidden_layers=6,
            rope_parameters=GEMMA3_ROPE,
        ),
        ("Q4_0", "Q8_0"),
    ),
    "lfm2": Case(
        "Lfm2",
        "lfm2",
        dict(num_hidden_layers=3, layer_types=["conv", "full_attention", "conv"], tie_word_embeddings=True),
    ),
    "phi3": Case("Phi3", "phi3", dict(rope_parameters={**LONG, **FACTORS}, original_max_position_embeddings=256)),
    "gpt-oss": Case(
        "GptOss",
        "gpt-oss",
        dict(
            num_local_experts=4,
            num_experts_per_tok=2,
            intermediate_size=256,
            head_dim=64,
            sliding_window=8,
            rope_parameters={**YARN, "factor": 32.0, "truncate": True},
        ),
        ("Q8_0", "MXFP4", "Q8_0"),
    ),
}
DEEPSEEK = dict(
    kv_lora_rank=128,
    qk_nope_head_dim=64,
    qk_rope_head_dim=32,
    v_head_dim=64,
    n_routed_experts=8,
    num_experts_per_tok=2,
    n_shared_experts=2,
    moe_intermediate_size=256,
    first_k_dense_replace=1,
    num_hidden_layers=3,
    num_key_value_heads=4,
    rms_norm_eps=1e-6,
    routed_scaling_factor=1.5,
)
DEEPSEEK_YARN = {**YARN, "factor": 40.0, "mscale": 0.707, "mscale_all_dim": 0.707}
CASES["deepseek2-lite"] = Case(
    "DeepseekV2", "deepseek2", {**DEEPSEEK, "q_lora_rank": None, "rope_parameters": DEEPSEEK_YARN}, ("Q4_K", "Q6_K")
)
CASES["deepseek2"] = Case(
    "DeepseekV3",
    "deepseek2",
    {**DEEPSEEK, "q_lora_rank": 256, "n_group": 4, "topk_group": 2, "norm_topk_prob": True},
    ("Q4_0", "Q8_0"),
)
GEMMA4 = dict(
    num_hidden_layers=6,
    head_dim=64,
    global_head_dim=128,
    sliding_window=8,
    tie_word_embeddings=True,
    vocab_size_per_layer_input=VOCABULARY,
)
_TYPES = ["sliding_attention", "sliding_attention", "full_attention"]
CASES["gemma4"] = Case(  # as E2B: layers that share keys and values, with embeddings of their own
    "Gemma4Text",
    "gemma4",
    {
        **GEMMA4,
        "layer_types": [*_TYPES, _TYPES[0], *_TYPES[1:]],
        "num_kv_shared_layers": 3,
        "use_double_wide_mlp": True,
        "hidden_size_per_layer_input": 64,
    },
    ("Q4_0", "Q8_0"),
)
CASES["gemma4-dense"] = Case(  # as 31B: keys for values, and fewer heads, in layers without a window
    "Gemma4Text",
    "gemma4",
    {
        **GEMMA4,
        "layer_types": _TYPES * 2,
        "attention_k_eq_v": True,
        "num_global_key_value_heads": 1,
        "hidden_size_per_layer_input": 0,
        "final_logit_softcapping": 30.0,
    },
    ("Q5_0", "Q8_0"),
)


class Made(NamedTuple):
    path: str
    reference: torch.nn.Module  # float32, with the dequantized weights
    case: Case


def make(name, path, types=None):
    """Writes a model to a file."""
    case = CASES[name]
    case = case if types is None else case._replace(types=types)
    writer, model = filled(case, path)
    finish(writer)
    return Made(str(path), model, case)


def filled(case, path):
    """(a writer that has written nothing yet, the model)."""
    torch.manual_seed(0)
    config = getattr(transformers, f"{case.config}Config")(**{**SIZES, **case.options})
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    writer = gguf.GGUFWriter(str(path), case.architecture)
    writer.add_name("Mistral test" if case.config == "Mistral" else "test")
    _keys(writer, config, case.architecture)
    _vocabulary(writer)
    _Tensors(writer, model, case).write()
    return writer, model


def finish(writer):
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _keys(writer, config, architecture):
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_head_count(config.num_attention_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    if architecture == "gemma4":
        _gemma4_keys(writer, config)
        return
    writer.add_feed_forward_length(config.intermediate_size)  # that of lfm2 is adjusted to the same
    if architecture == "lfm2":
        writer.add_head_count_kv([0, config.num_key_value_heads, 0])
        writer.add_shortconv_l_cache(config.conv_L_cache)
    else:
        writer.add_head_count_kv(1 if architecture == "deepseek2" else config.num_key_value_heads)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    if architecture == "deepseek2":
        _deepseek_keys(writer, config)
    elif head_dim != config.hidden_size // config.num_attention_heads or architecture == "gpt-oss":
        writer.add_key_length(head_dim)
        writer.add_value_length(head_dim)
    rope = config.rope_parameters.get("full_attention", config.rope_parameters)
    writer.add_rope_freq_base(rope["rope_theta"])
    if architecture in ("llama", "phi3"):
        writer.add_rope_dimension_count(int(head_dim * rope.get("partial_rotary_factor", 1)))
    if rope["rope_type"] == "linear":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(rope["factor"])
    if rope["rope_type"] == "yarn":
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(rope["factor"])
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    if rope["rope_type"] == "longrope":
        context = rope["original_max_position_embeddings"]
        writer.add_rope_scaling_orig_ctx_len(context)
        scale = config.max_position_embeddings / context
        writer.add_rope_scaling_attn_factors((1 + np.log(scale) / np.log(context)) ** 0.5)
    if getattr(config, "sliding_window", None):
        writer.add_sliding_window(config.sliding_window)
    if architecture == "gemma2":
        writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
        writer.add_final_logit_softcapping(config.final_logit_softcapping)
    names = ("num_local_experts", "num_experts", "n_routed_experts")
    experts = next((count for name in names if (count := getattr(config, name, None))), None)
    if experts:
        writer.add_expert_count(experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
    if architecture in ("qwen2moe", "qwen3moe", "gpt-oss"):
        writer.add_expert_feed_forward_length(256)
    if architecture == "qwen2moe":
        writer.add_expert_shared_feed_forward_length(config.shared_expert_intermediate_size)


def _gemma4_keys(writer, config):
    slides = [kind == "sliding_attention" for kind in config.layer_types]
    shared = config.num_kv_shared_layers
    writer.add_shared_kv_layers(shared)
    writer.add_embedding_length_per_layer_input(config.hidden_size_per_layer_input)
    writer.add_sliding_window(config.sliding_window)
    writer.add_sliding_window_pattern(slides)
    writer.add_key_length(128)
    writer.add_value_length(128)
    writer.add_key_length_swa(64)
    writer.add_value_length_swa(64)
    writer.add_rope_dimension_count(128)
    writer.add_rope_dimension_count_swa(64)
    writer.add_rope_freq_base(config.rope_parameters["full_attention"]["rope_theta"])
    writer.add_rope_freq_base_swa(config.rope_parameters["sliding_attention"]["rope_theta"])
    widths, heads = config.intermediate_size, SIZES["num_key_value_heads"]
    if config.use_double_wide_mlp:
        widths = [WIDTH] * (len(slides) - shared) + [2 * WIDTH] * shared
    if config.attention_k_eq_v:
        heads = [2 if one else 1 for one in slides]
    writer.add_feed_forward_length(widths)
    writer.add_head_count_kv(heads)
    if config.final_logit_softcapping:
        writer.add_final_logit_softcapping(config.final_logit_softcapping)


def _deepseek_keys(writer, config):
    short, rotated, third = config.kv_lora_rank, config.qk_rope_head_dim, config.model_type == "deepseek_v3"
    writer.add_key_length(short + rotated)
    writer.add_value_length(short)
    writer.add_key_length_mla(config.qk_nope_head_dim + rotated)
    writer.add_value_length_mla(config.v_head_dim)
    writer.add_kv_lora_rank(short)
    if config.q_lora_rank:
        writer.add_q_lora_rank(config.q_lora_rank)
    writer.add_rope_dimension_count(rotated)
    writer.add_leading_dense_block_count(config.first_k_dense_replace)
    writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    writer.add_expert_shared_count(config.n_shared_experts)
    writer.add_expert_weights_scale(config.routed_scaling_factor)
    functions = gguf.ExpertGatingFuncType
    writer.add_expert_gating_func(functions.SIGMOID if third else functions.SOFTMAX)
    if third:
        writer.add_expert_group_count(config.n_group)
        writer.add_expert_group_used_count(config.topk_group)
        writer.add_expert_weights_norm(config.norm_topk_prob)
    if "mscale_all_dim" in config.rope_parameters:
        writer.add_rope_scaling_yarn_log_mul(0.1 * config.rope_parameters["mscale_all_dim"])


def _vocabulary(writer):
    """The bytes, two special tokens, and merges of some pairs."""
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    letters = list(bytes_to_unicode().values())
    pairs = [("t", "h"), ("th", "e"), ("i", "n"), ("Ġ", "the")]
    tokens = [*letters, "<s>", "</s>", *("".join(pair) for pair in pairs)]
    tokens += [f"<unused{number}>" for number in range(VOCABULARY - len(tokens))]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(tokens)
    kinds = [1] * 256 + [3, 3] + [1] * len(pairs)
    writer.add_token_types(kinds + [5] * (VOCABULARY - len(kinds)))
    writer.add_token_merges([" ".join(pair) for pair in pairs])
    writer.add_bos_token_id(256)
    writer.add_eos_token_id(257)
    writer.add_add_bos_token(False)


class _Tensors:
    def __init__(self, writer, model, case):
        self.writer, self.model, self.case = writer, model, case
        self.config = model.config
        number = next(number for number, name in gguf.MODEL_ARCH_NAMES.items() if name == case.architecture)
        self.names = gguf.get_tensor_name_map(number, self.config.num_hidden_layers)
        self.count = 0

    @torch.no_grad()
    def write(self):
        rope = self.config.rope_parameters
        if rope.get("rope_type") == "llama3":
            plain = self.config.rope_parameters["rope_theta"] ** -(torch.arange(0, 64, 2) / 64)
            self._add("rope_freqs.weight", plain / self.model.model.rotary_emb.inv_freq)
        if rope.get("rope_type") == "longrope":
            self._add("rope_factors_long.weight", torch.tensor(rope["long_factor"]))
            self._add("rope_factors_short.weight", torch.tensor(rope["short_factor"]))
        if self.case.architecture == "gemma4":
            self._add("rope_freqs.weight", torch.tensor([1.0] * 16 + [1e30] * 48))  # a quarter of 128
        buffers = ("e_score_correction_bias", "layer_scalar")
        stored = [item for item in self.model.named_buffers() if item[0].endswith(buffers)]
        for name, parameter in (*self.model.named_parameters(), *stored):
            self._fill(name, parameter)
            self._parameter(name, parameter)

    def _fill(self, name, parameter):
        if parameter.dim() == 1:
            shifted = self.case.architecture in ("gemma2", "gemma3")
            centre = 1.0 if name.endswith(("norm.weight", "layer_scalar")) and not shifted else 0.0
            parameter.normal_(std=0.2).add_(centre)
        else:
            length = parameter.shape[-2] if self._transposed(name) else parameter.shape[-1]
            # Small rows of tied embeddings, or else each token would be followed by itself.
            parameter.normal_(std=length**-0.5 / (8 if "embed" in name and self.config.tie_word_embeddings else 1))

    def _transposed(self, name):
        return self.case.config == "GptOss" and name.endswith(("gate_up_proj", "down_proj"))

    def _parameter(self, name, parameter):
        if ".experts." in name:
            self._experts(name, parameter)
            return
        module, leaf = name.rsplit(".", 1)
        if leaf == "e_score_correction_bias":
            module, leaf = f"{module}.e_score_correction", "bias"
        if module.endswith("kv_b_proj"):
            heads, size = self.config.num_attention_heads, self.config.qk_nope_head_dim
            both = parameter.unflatten(0, (heads, -1))
            for kind, part in (("k_b", both[:, :size].mT), ("v_b", both[:, size:])):
                self._add(f"{self.names.get_name(module.replace('kv_b', kind))}.{leaf}", part)
            return
        if leaf in ("sinks", "layer_scalar"):
            module, leaf = name, "weight"
        to = f"{self.names.get_name(module)}.{leaf}"
        rows = None
        if self.case.architecture == "llama" and ("q_proj" in name or "k_proj" in name):
            heads = self.config.num_attention_heads if "q_proj" in name else self.config.num_key_value_heads
            rows = torch.arange(len(parameter)).view(heads, 2, -1).mT.flatten()
        if self.case.architecture in ("gemma2", "gemma3") and name.endswith("norm.weight"):
            parameter.copy_((parameter + 1) - 1)  # what can be told from a sum with 1
            self._add(to, parameter + 1)
        elif name.endswith("conv.conv.weight"):
            self._add(to, parameter.squeeze(1))
        elif parameter.dim() == 1 or "mlp.gate.weight" in name or "shared_expert_gate" in name or "router" in name:
            self._add(to, parameter[0] if "shared_expert_gate" in name else parameter, rows)
        else:
            parameter.copy_(self._pack(to, parameter, rows, self._type(name)))

    def _type(self, name):
        if "embed" in name or "lm_head" in name:
            return self.case.types[-1]
        self.count += 1
        return self.case.types[self.count % max(1, len(self.case.types) - 1)]

    def _experts(self, name, parameter):
        prefix, part = name.split(".mlp.experts.")
        block = f"blk.{prefix.rsplit('.', 1)[1]}.ffn_"
        oss = self.case.config == "GptOss"
        if part.endswith("_bias"):
            parts = {"down": parameter} if "down" in part else {"gate": parameter[:, ::2], "up": parameter[:, 1::2]}
            for part, values in parts.items():
                self._add(f"{block}{part}_exps.bias", values)
            return
        weight = parameter.mT if oss else parameter
        parts = {"down": weight}
        if "down" not in part:
            halves = (weight[:, ::2], weight[:, 1::2]) if oss else weight.chunk(2, 1)
            parts = dict(zip(("gate", "up"), halves))
        for part, values in parts.items():
            values.copy_(self._pack(f"{block}{part}_exps.weight", values, None, self._type(name)))

    def _add(self, name, numbers, rows=None):
        numbers = numbers if rows is None else numbers[rows]
        self.writer.add_tensor(name, numbers.detach().float().contiguous().numpy())

    def _pack(self, name, numbers, rows, type):
        """Adds packed weights, and returns what they are as numbers."""
        packed = quantize(numbers, type)
        stored = packed if rows is None else packed[rows]
        raw = getattr(gguf.GGMLQuantizationType, type)
        self.writer.add_tensor(name, stored.contiguous().numpy(), raw_dtype=raw)
        return dequantize(packed, type)


@functools.lru_cache(maxsize=1)
def tokens():
    return torch.randint(256, (2, 24), generator=torch.Generator().manual_seed(1))


def sentencepiece():
    """A tokenizer as Llama 2's: bytes, some letters, and merges of some pairs."""
    special, letters = ["<unk>", "<s>", "</s>"], [f"<0x{byte:02X}>" for byte in range(256)]
    vocabulary = [*special, *letters, "▁", *"adehnt", "th", "the", "▁the", "at"]
    merges = [("t", "h"), ("th", "e"), ("▁", "the"), ("a", "t")]
    return transformers.LlamaTokenizer(vocab={token: i for i, token in enumerate(vocabulary)}, merges=merges)
