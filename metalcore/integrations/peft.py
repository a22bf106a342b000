"""peft's adapters on layers with packed weights.

    model = get_peft_model(model, LoraConfig(target_modules="all-linear"))

Packed layers are torch.nn.Linear and torch.nn.Embedding for peft, which makes its own adapters for them. This module
adds what peft cannot know: merges are undone exactly, saved modules get weights that are trained, and prompts find the
packed embedding. peft knows all that where metalcore packs a model of transformers; `packed_layers` chooses what
adapters are merged into.
"""

from ..quant._peft import packed_layers, packing_errors

__all__ = ["packed_layers", "packing_errors"]
