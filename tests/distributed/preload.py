"""What every rank needs: the server imports it once, and ranks are forked from it."""

import gc

import torch
import torch.distributed.fsdp
import torch.distributed.tensor.parallel
import transformers.models.llama.modeling_llama  # noqa: F401

import metalcore.distributed
import metalcore.simulator  # noqa: F401

torch.set_num_threads(1)
gc.freeze()  # each of the ranks would walk over these modules' objects
