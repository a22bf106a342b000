"""A Qwen2.5-shaped model (random weights) writes tokens by two programs: one for the prompt, one for a further token.

Both write to one static cache of keys and values, in place, where PyTorch's `index_copy_` says.

python examples/qwen_decode.py                          # on mps or cuda, or simulated where there is neither
python -m metalcore.simulator examples/qwen_decode.py   # on the simulated mps device
python examples/qwen_decode.py --shape 1.5B --dtype bfloat16 --prompt 128
"""

import argparse
import time

import torch
from common.device import DEVICE
from common.qwen import SHAPES, Step, config
from transformers import Qwen2ForCausalLM

import metalcore

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--shape", choices=SHAPES, default="tiny")
parser.add_argument("--prompt", type=int, default=8, help="tokens of the prompt")
parser.add_argument("--tokens", type=int, default=64, help="tokens to write")
parser.add_argument("--dtype", choices=["float32", "bfloat16", "float16"], default="float32")
arguments = parser.parse_args()
LENGTH = arguments.prompt + arguments.tokens


def write(prefill, decode, prompt):
    """Returns the tokens, and the seconds for the prompt and for all that follow."""
    begin = time.perf_counter()
    token = prefill(prompt, torch.zeros((), dtype=torch.int64, device=DEVICE))
    tokens = [token.item()]
    middle = time.perf_counter()
    for place in range(arguments.prompt, LENGTH - 1):
        token = decode(token, torch.tensor(place, device=DEVICE))
        tokens.append(token.item())
    return tokens, middle - begin, time.perf_counter() - middle


torch.manual_seed(0)
with torch.device(DEVICE):
    model = Qwen2ForCausalLM(config(arguments.shape, LENGTH)).to(getattr(torch, arguments.dtype)).eval()
    prompt = torch.randint(0, model.config.vocab_size, (1, arguments.prompt))

with torch.no_grad():
    step, place = Step(model, LENGTH), torch.zeros((), dtype=torch.int64, device=DEVICE)
    prefill, decode = (metalcore.compile(step, (tokens, place)) for tokens in (prompt, prompt[:, :1]))
    rows = {}
    for name, pair in {"PyTorch": (step, step), "programs": (prefill, decode)}.items():
        write(*pair, prompt)  # kernels are compiled when they first run
        rows[name] = write(*pair, prompt)
    generated = model.generate(prompt, max_new_tokens=arguments.tokens, do_sample=False)[0, arguments.prompt :].tolist()

print("The program for one token:\n")
print(decode.report())
print(f"\n{arguments.shape}, {arguments.dtype}, {arguments.tokens} tokens on {DEVICE}")
print(f"{'':10} {'prompt':>10} {'tokens/s':>10}   tokens")
for name, (tokens, first, rest) in rows.items():
    print(f"{name:10} {first * 1e3:7.1f} ms {(arguments.tokens - 1) / rest:10.1f}   {tokens[:8]} ...")
if arguments.dtype == "float32":
    assert rows["programs"][0] == rows["PyTorch"][0] == generated
    print("The tokens of the programs are those of model.generate.")
