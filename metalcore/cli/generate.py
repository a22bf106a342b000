"""python -m metalcore generate: text of a language model, as it comes."""

from __future__ import annotations

import sys
import time
from pathlib import Path

from . import devices

_DTYPES = ("float32", "float16", "bfloat16")
_PENALTIES = ("repetition_penalty", "presence_penalty", "frequency_penalty")
_OPTIONS = ("temperature", "top_k", "top_p", "min_p", *_PENALTIES, "cache", "stop")


def add_parser(commands):
    parser = commands.add_parser(
        "generate",
        help="print the text of a language model: a GGUF file, or a folder of transformers'",
        description="Prints what a language model writes after a prompt, as it comes, and at the end, on stderr, how "
        "many tokens of the prompt it read a second, and how many new ones it wrote.",
        epilog='example: python -m metalcore generate model.gguf -p "The sea is" -n 64 --temperature 0.7',
    )
    parser.add_argument("model", help="a GGUF file, or a folder that transformers' save_pretrained wrote")
    parser.add_argument("-p", "--prompt", required=True, help="the text to go on with; @FILE reads it from a file")
    parser.add_argument("-n", "--tokens", type=int, default=128, help="the most tokens to write (128)")
    parser.add_argument("--chat", action="store_true", help="the prompt is a user's message: use the chat template")
    parser.add_argument("--temperature", type=float, default=0.0, help="0, the default, is the most probable token")
    parser.add_argument("--top-k", type=int, help="only the K most probable tokens")
    parser.add_argument("--top-p", type=float, help="only the most probable tokens that have this share together")
    parser.add_argument("--min-p", type=float, help="only tokens this many times as probable as the first")
    parser.add_argument("--repetition-penalty", type=float, default=1.0, help="of tokens that are there; 1 is none")
    parser.add_argument("--presence-penalty", type=float, default=0.0, help="of new tokens that are there")
    parser.add_argument("--frequency-penalty", type=float, default=0.0, help="of new tokens, each time they are there")
    parser.add_argument("--seed", type=int, help="of the random numbers")
    parser.add_argument("--stop", action="append", default=[], metavar="TEXT", help="end where this text is written")
    parser.add_argument("--ignore-eos", action="store_true", help="go on where the model ends its text")
    parser.add_argument("--cache", choices=("static", "paged", "dynamic"), default="static", help="of keys and values")
    parser.add_argument("--dtype", choices=_DTYPES, help="of activations (bfloat16)")
    devices.add_option(parser)
    parser.set_defaults(run=run)


def run(arguments):
    try:
        import transformers
    except ImportError:
        raise ValueError("generate needs the package transformers") from None
    import torch

    device = devices.use(arguments.device or devices.default())
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    model, tokenizer = load(arguments.model, device, getattr(torch, arguments.dtype or "bfloat16"))
    if tokenizer is None:
        raise ValueError(f"{arguments.model} has no tokenizer")
    tokens = _tokens(tokenizer, arguments)
    generator = None
    if arguments.seed is not None:
        if not -(2**63) <= arguments.seed < 2**64:
            raise ValueError(f"--seed {arguments.seed}: PyTorch's seeds are from -2^63 to 2^64 - 1")
        generator = torch.Generator(device).manual_seed(arguments.seed)
    options = {name: getattr(arguments, name) for name in _OPTIONS}
    if arguments.ignore_eos:
        options["eos_token_id"] = ()
    _write(model, tokenizer, tokens, generator=generator, max_new_tokens=arguments.tokens, **options)


def load(path, device, dtype):
    """Returns (model, tokenizer) of a file or folder."""
    if not Path(path).exists():
        raise ValueError(f"{path}: there is no such file or folder")
    if Path(path).is_file():
        from .. import gguf

        return gguf.load(path, device, dtype)
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from ..integrations import transformers as metalcore_transformers

    metalcore_transformers.register_quantization()
    model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype)
    return model.to(device).eval(), AutoTokenizer.from_pretrained(path)


def _tokens(tokenizer, arguments):
    text = arguments.prompt
    if text.startswith("@"):
        try:
            text = Path(text[1:]).read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise ValueError(f"{text[1:]} is no text in UTF-8: {error.reason} at byte {error.start}") from None
    if arguments.chat:
        if not tokenizer.chat_template:
            raise ValueError(f"{arguments.model} has no chat template")
        messages = [{"role": "user", "content": text}]
        text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        return tokenizer(text, add_special_tokens=False)["input_ids"]
    tokens = tokenizer(text)["input_ids"]
    if not tokens and tokenizer.bos_token_id is None:
        raise ValueError("the prompt is empty, and the model has no token that begins a text")
    return tokens or [tokenizer.bos_token_id]


def _write(model, tokenizer, tokens, **options):
    from ..generation import stream
    from ..generation._text import Text
    from ..integrations import transformers as metalcore_transformers

    text, count, first = Text(tokenizer), 0, 0.0
    with metalcore_transformers.patch():
        begin = time.perf_counter()
        for [token] in stream(model, [tokens], tokenizer=tokenizer, **options):
            if count == 0:
                first = time.perf_counter()
            count += 1
            sys.stdout.write(text.push(token))  # pyright: ignore[reportArgumentType]  (one row)
            sys.stdout.flush()
        end = time.perf_counter()
    print(text.rest(), flush=True)
    print(f"prompt: {len(tokens)} tokens, {len(tokens) / (first - begin):.1f} tokens/s", file=sys.stderr)
    if count > 1:
        print(f"decode: {count - 1} tokens, {(count - 1) / (end - first):.1f} tokens/s", file=sys.stderr)
