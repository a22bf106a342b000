"""A language model of 15 million parameters (random weights, packed as in GGUF files) streams text."""

import itertools
import time

import torch
from tokenizers import Tokenizer, decoders, models
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

import metalcore

if not torch.backends.mps.is_available():
    import metalcore.simulator

from metalcore.generation import stream
from metalcore.integrations import transformers as metalcore_transformers

NEW = 48

# Since the weights are random, the words are, too: syllables, with spaces between some of them.
syllables = ["".join(letters) for letters in itertools.product("bdfgklmnprstvz", "aeiou", ["", "l", "n", "r", "s"])]
words = [space + syllable for space in (" ", "") for syllable in syllables]
tokenizer = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token=words[0]))
tokenizer.decoder = decoders.Fuse()
tokenizer = PreTrainedTokenizerFast(tokenizer_object=tokenizer)

torch.manual_seed(0)
begin = time.perf_counter()
with torch.device("mps"):
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(words),
            hidden_size=512,
            intermediate_size=1024,
            num_hidden_layers=6,
            num_attention_heads=8,
            num_key_value_heads=4,
            initializer_range=0.1,
            bos_token_id=None,
            eos_token_id=None,
        )
    ).eval()
count = sum(parameter.numel() for parameter in model.parameters())
report = metalcore.quant.quantize_model(model, "q8_0")
print(f"A Llama with {count / 1e6:.1f} million parameters, packed in {time.perf_counter() - begin:.1f} s.")
print(report)
print()

generator = torch.Generator("mps").manual_seed(2)
with metalcore_transformers.patch():
    begin = time.perf_counter()
    for [token] in stream(model, [[0, 100, 200]], max_new_tokens=NEW, temperature=0.8, top_p=0.95, generator=generator):
        print(tokenizer.decode([token]), end="", flush=True)
print(f"\n\n{NEW / (time.perf_counter() - begin):.0f} tokens/s on mps")
