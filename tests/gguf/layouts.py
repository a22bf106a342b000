"""Small random models of each layout, written by gguf-py as llama.cpp's convert_hf_to_gguf.py writes them, and the same
models of transformers with the dequantized weights."""

import functools
import re
from typing import NamedTuple

import pytest
import torch
from layout_cases import CASES, HIDDEN, SIZES, VOCABULARY, Case
from layout_keys import add_keys

from metalcore.quant import dequantize, quantize

gguf = pytest.importorskip("gguf")
transformers = pytest.importorskip("transformers")

SHIFTED = ("gemma2", "gemma3", "qwen3next")  # files have the weights of norms and 1


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
    add_keys(writer, config, case.architecture)
    _vocabulary(writer)
    _Tensors(writer, model, case).write()
    return writer, model


def finish(writer):
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


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
        rope = getattr(self.config, "rope_parameters", None) or {}
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
            shifted = self.case.architecture in SHIFTED and not name.endswith("linear_attn.norm.weight")
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
        if self.case.architecture.startswith("nemotron_h"):
            name = name.replace("model.", "backbone.", 1)
        states = (".mamba.", ".mixer.", ".linear_attn.", "input_linear")
        if any(part in name for part in states) and ".gate." not in name:
            self._of_states(name, parameter)
            return
        module, leaf = name.rsplit(".", 1)
        module = module.replace("block_sparse_moe.router", "block_sparse_moe.router.layer")
        if leaf == "weight" and module.endswith("pre_ff_layernorm") and self.case.architecture == "falcon-h1":
            self._add(self.names.get_name(name), parameter)
            return
        if not getattr(self.config, "num_local_experts", True):
            module = module.replace("shared_mlp.output_linear", "mlp.down_proj")
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
        if self.case.architecture in ("llama", "granitehybrid") and ("q_proj" in name or "k_proj" in name):
            heads = self.config.num_attention_heads if "q_proj" in name else self.config.num_key_value_heads
            rows = torch.arange(len(parameter)).view(heads, 2, -1).mT.flatten()
        if self.case.architecture in SHIFTED and name.endswith("norm.weight"):
            parameter.copy_((parameter + 1) - 1)  # what can be told from a sum with 1
            self._add(to, parameter + 1)
        elif name.endswith("conv.conv.weight"):
            self._add(to, parameter.squeeze(1))
        elif parameter.dim() == 1 or ".gate.weight" in name or "shared_expert_gate" in name or "router" in name:
            self._add(to, parameter[0] if "shared_expert_gate" in name else parameter, rows)
        else:
            parameter.copy_(self._pack(to, parameter, rows, self._type(name)))

    def _of_states(self, name, parameter):
        module, leaf = name.rsplit(".", 1)
        if leaf in ("A_log", "D"):
            parameter.copy_(parameter.exp().neg().neg().log())  # what can be told from an exponential
            numbers = -parameter.exp() if leaf == "A_log" else parameter
            flat = self.case.architecture in ("mamba", "qwen3next")
            self._add(self.names.get_name(name), numbers if flat else numbers[:, None])
        elif leaf == "dt_bias":
            self._add(f"{self.names.get_name(module + '.dt_proj')}.bias", parameter)
        elif name.endswith("conv1d.weight"):
            self._add(f"{self.names.get_name(module)}.weight", parameter.squeeze(1))
        elif name.endswith((".mamba.norm.weight", ".mixer.norm.weight")):
            self._add(f"{self.names.get_name(module)}.weight", parameter.view(2, -1))
        elif "input_linear" in name:
            end = "_shexp" if self.config.num_local_experts else ""
            block = f"blk.{name.split('.')[2]}.ffn_"
            type = self._type(name)
            for part, half in zip(("gate", "up"), parameter.chunk(2)):
                half.copy_(self._pack(f"{block}{part}{end}.weight", half, None, type))
        elif name.endswith("in_proj_qkvz.weight"):
            self._queries_keys_values_gates(name, parameter)
        elif parameter.dim() == 1:
            self._add(f"{self.names.get_name(module)}.{leaf}", parameter)
        else:
            types = {True: self._type(name), False: "F32"}
            type = types[parameter.shape[-1] % 256 == 0]
            parameter.copy_(self._pack(f"{self.names.get_name(module)}.weight", parameter, None, type))

    def _queries_keys_values_gates(self, name, parameter):
        heads = parameter.view(2, 64 + 64 + 128 + 128, HIDDEN)  # of keys
        queries, keys, values, gates = heads.split([64, 64, 128, 128], 1)
        block, type = f"blk.{name.split('.')[2]}.attn_", self._type(name)
        for part, views in (("qkv", (queries, keys, values)), ("gate", (gates,))):
            stored = torch.cat([view.flatten(0, 1) for view in views])
            numbers = self._pack(f"{block}{part}.weight", stored, None, type)
            for view, rows in zip(views, numbers.split([view.shape[0] * view.shape[1] for view in views])):
                view.copy_(rows.view_as(view))

    def _type(self, name):
        if "embed" in name or "lm_head" in name:
            return self.case.types[-1]
        self.count += 1
        return self.case.types[self.count % max(1, len(self.case.types) - 1)]

    def _experts(self, name, parameter):
        prefix, part = re.split(r"\.(?:mlp|block_sparse_moe|mixer)\.experts\.", name)
        block = f"blk.{prefix.rsplit('.', 1)[1]}.ffn_"
        oss = self.case.config == "GptOss"
        if part.endswith("_bias"):
            parts = {"down": parameter} if "down" in part else {"gate": parameter[:, ::2], "up": parameter[:, 1::2]}
            for part, values in parts.items():
                self._add(f"{block}{part}_exps.bias", values)
            return
        weight = parameter.mT if oss else parameter
        parts = {"down" if "down" in part else "up": weight}
        if part == "gate_up_proj":
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
