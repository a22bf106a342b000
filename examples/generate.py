"""A language model of 15 million parameters (random weights) becomes a GGUF file, which `metalcore generate` reads."""

import tempfile
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

import metalcore

if not torch.backends.mps.is_available():
    import metalcore.simulator

from metalcore.cli import main

# Since the weights are random, the words are, too: syllables of a consonant, a vowel and a last letter. Ġ is a space.
letters = sorted(pre_tokenizers.ByteLevel.alphabet())
consonants, vowels, last = "bdfgklmnprstvz", "aeiou", "lnrs"
merges = [("Ġ", consonant) for consonant in consonants]
merges += [(space + consonant, vowel) for space in ("", "Ġ") for consonant in consonants for vowel in vowels]
merges += [("".join(pair), letter) for pair in merges[len(consonants) :] for letter in last]
words = letters + ["".join(pair) for pair in merges]
tokenizer = Tokenizer(models.BPE(vocab={word: number for number, word in enumerate(words)}, merges=merges))
tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
tokenizer.decoder = decoders.ByteLevel()
tokenizer = PreTrainedTokenizerFast(tokenizer_object=tokenizer)

torch.manual_seed(0)
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
    )
    model.lm_head.weight.data[: len(letters) + len(consonants)] = 0  # letters alone are rare
count = sum(parameter.numel() for parameter in model.parameters())
print(f"A Llama with {count / 1e6:.1f} million parameters:", metalcore.quant.quantize_model(model, "q8_0"), end="\n\n")

with tempfile.TemporaryDirectory() as folder:
    path = Path(folder) / "model.gguf"
    metalcore.gguf.save_gguf(model, path, tokenizer)
    words = ["-p", "Once upon a time", "-n", "24", "--temperature", "0.8", "--top-p", "0.9", "--seed", "1"]
    print(f"metalcore generate {path.name} {' '.join(words)}\n\nOnce upon a time", end="", flush=True)
    main(["generate", str(path), *words, "--dtype", "float32"])
