"""llama.cpp, by llama-cpp-python: logits of a file's model on the CPU, and how it rounds what it multiplies."""

import ctypes
import functools

import torch

from metalcore.nn import QuantizedExperts, QuantizedLinear

try:
    import llama_cpp
except (ImportError, OSError, RuntimeError):  # the package without its library raises the latter
    llama_cpp = None

# What llama.cpp multiplies weights with on the CPU: x, rounded to one of these types, block by block.


def _rounded(x, type):
    """x as llama.cpp's kernel for weights of a type rounds it."""
    block = 256 if type.block == 256 else 32
    groups = x.float().unflatten(-1, (-1, block))
    largest = groups.abs().amax(-1, keepdim=True)
    inverse = torch.where(largest > 0, 127 / largest, 0.0)
    steps = (groups * inverse).round()
    scale = torch.where(largest > 0, 1 / inverse, 0.0) if block == 256 else (largest / 127).half().float()
    return (steps * scale).flatten(-2).to(x.dtype)


def round_as_llama(model):
    """Has a model of float32 round the rows that it multiplies packed weights with, as llama.cpp does."""
    for module in model.modules():
        if isinstance(module, QuantizedLinear):
            module.register_forward_pre_hook(lambda module, given: (_rounded(given[0], module.type), *given[1:]))
        if isinstance(module, QuantizedExperts):
            types = dict(zip(module.parts, module.types))
            module._part = lambda part, x, experts, module=module, types=types: QuantizedExperts._part(
                module, part, _rounded(x, types[part]), experts
            )


class Llama:
    """A model in llama.cpp with a cache in float32, as a context manager."""

    def __init__(self, path, context=128):
        _silent()
        loading = llama_cpp.llama_model_default_params()
        loading.use_extra_bufts = False  # layouts for AVX-512, with which ggml 0.25.3 crashes on models this small
        self.model = llama_cpp.llama_model_load_from_file(path.encode(), loading)
        assert self.model, f"llama.cpp does not open {path}"
        options = llama_cpp.llama_context_default_params()
        options.n_ctx, options.n_batch, options.n_threads, options.n_threads_batch = context, context, 1, 1
        options.type_k = options.type_v = llama_cpp.GGML_TYPE_F32
        options.flash_attn_type = 0  # its kernel rounds to float16
        self.context = llama_cpp.llama_init_from_model(self.model, options)
        assert self.context, f"llama.cpp makes no context of {path}"
        self.rows = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self.model))
        self.position = 0

    def __enter__(self):
        return self

    def __exit__(self, *error):
        llama_cpp.llama_free(self.context)
        llama_cpp.llama_model_free(self.model)

    def logits(self, tokens):
        """(tokens, vocabulary), after the tokens that were given before."""
        batch = llama_cpp.llama_batch_init(len(tokens), 0, 1)
        batch.n_tokens = len(tokens)
        for i, token in enumerate(tokens):
            batch.token[i], batch.pos[i], batch.logits[i] = token, self.position + i, True
            batch.n_seq_id[i], batch.seq_id[i][0] = 1, 0
        assert llama_cpp.llama_decode(self.context, batch) == 0
        llama_cpp.llama_batch_free(batch)
        self.position += len(tokens)
        found = llama_cpp.llama_get_logits(self.context)
        return torch.tensor(found[: len(tokens) * self.rows]).view(len(tokens), self.rows)

    def greedy(self, tokens, count):
        """The most likely tokens that follow, one after the other."""
        found = []
        for _ in range(count):
            found.append(int(self.logits(tokens)[-1].argmax()))
            tokens = found[-1:]
        return found

    def tokens(self, text):
        return _tokens(self.model, text)


def vocabulary_tokens(path, texts):
    """Tokens of texts by a file's vocabulary, which is all that is loaded."""
    _silent()
    loading = llama_cpp.llama_model_default_params()
    loading.vocab_only = True
    model = llama_cpp.llama_model_load_from_file(path.encode(), loading)
    assert model, f"llama.cpp does not open {path}"
    tokens = [_tokens(model, text) for text in texts]
    llama_cpp.llama_model_free(model)
    return tokens


def _tokens(model, text):
    vocabulary, data = llama_cpp.llama_model_get_vocab(model), text.encode()
    found = (ctypes.c_int32 * (len(data) + 2))()
    count = llama_cpp.llama_tokenize(vocabulary, data, len(data), found, len(found), True, True)
    return list(found[:count])


def dequantized(path, to):
    """Writes a file with the same weights as ggml dequantizes them, and returns its path."""
    options = llama_cpp.llama_model_quantize_default_params()
    options.ftype, options.allow_requantize, options.nthread = llama_cpp.LLAMA_FTYPE_ALL_F32, True, 1
    _silent()
    assert llama_cpp.llama_model_quantize(path.encode(), str(to).encode(), options) == 0
    return str(to)


@functools.cache
def _silent():
    """Ends llama.cpp's log; what is returned must stay alive."""
    llama_cpp.llama_backend_init()
    log = llama_cpp.llama_log_callback(lambda level, text, data: None)
    llama_cpp.llama_log_set(log, ctypes.c_void_p(0))
    return log
