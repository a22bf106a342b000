"""Models of Qwen2.5's shapes with random weights, and the step that writes one token."""

import torch
from transformers import Qwen2Config, StaticCache

SHAPES = {
    "tiny": dict(hidden_size=64, intermediate_size=160, num_hidden_layers=2, vocab_size=512),
    "0.5B": dict(hidden_size=896, intermediate_size=4864, num_hidden_layers=24, vocab_size=151936),
    "1.5B": dict(hidden_size=1536, intermediate_size=8960, num_hidden_layers=28, vocab_size=151936),
}
HEADS = {"tiny": (4, 2), "0.5B": (14, 2), "1.5B": (12, 2)}


def config(shape, length):
    """Returns a configuration for `length` tokens."""
    heads, groups = HEADS[shape]
    return Qwen2Config(
        **SHAPES[shape],
        num_attention_heads=heads,
        num_key_value_heads=groups,
        max_position_embeddings=max(length, 32),
        initializer_range=0.1,  # so that the next token depends on what came before
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=None,
    )


class Step(torch.nn.Module):
    """Takes tokens and the place of the first of them, and gives the most probable next token."""

    def __init__(self, model, length):
        super().__init__()
        config = model.config
        heads, size = config.num_key_value_heads, config.hidden_size // config.num_attention_heads
        self.model, self.cache = model, StaticCache(config=config, max_cache_len=length)
        self.cache.early_initialization(1, heads, size, model.dtype, model.device)
        for index, layer in enumerate(self.cache.layers):  # as buffers, which a program keeps and writes to
            self.register_buffer(f"keys_{index}", layer.keys, persistent=False)
            self.register_buffer(f"values_{index}", layer.values, persistent=False)
            self.register_buffer(f"length_{index}", layer.cumulative_length, persistent=False)

    def forward(self, tokens, place):
        for layer in self.cache.layers:
            layer.cumulative_length.copy_(place)
        return self.model(tokens, past_key_values=self.cache, logits_to_keep=1).logits.argmax(-1)
