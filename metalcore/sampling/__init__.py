"""Random choice of a model's next token, and the largest numbers of rows."""

from ._renorm import top_k_mask_logits, top_k_renorm_probs, top_p_renorm_probs
from ._sample import sample
from ._topk import topk

__all__ = ["sample", "top_k_mask_logits", "top_k_renorm_probs", "top_p_renorm_probs", "topk"]
