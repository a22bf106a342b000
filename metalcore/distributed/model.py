"""How long a step takes on many devices: the bytes that each op's ranks exchange, by a model of the network.

    python -m metalcore.distributed.model                      # a 1B and an 8B Llama, 1 to 4096 GPUs
    python -m metalcore.distributed.model --bandwidth 50e9 --tokens 4096

It is arithmetic, not a measurement. A step is the time of its products at a fraction of the peak, and of its bytes on
the slowest link, of which `overlap` is hidden behind the products. Rings: an all-reduce of n bytes among p ranks sends
2 n (p - 1) / p, an all-gather or a reduce-scatter n (p - 1) / p.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass

__all__ = ["Llama", "Network", "bytes_of", "step", "table"]


@dataclass(frozen=True)
class Llama:
    """Sizes of a model, and the tokens that a device has in a step: a group of devices, under tensor parallelism."""

    hidden: int
    intermediate: int
    layers: int
    vocabulary: int
    kv: int  # the size of all keys of a token
    tokens: int = 8192

    @property
    def parameters(self) -> int:
        layer = self.hidden * (2 * self.hidden + 2 * self.kv) + 3 * self.hidden * self.intermediate
        return self.layers * layer + 2 * self.vocabulary * self.hidden


@dataclass(frozen=True)
class Network:
    """Bytes and operations per second of a device."""

    inside: float = 450e9  # of a link to the other devices of a host
    between: float = 50e9  # of the device's share of the links between hosts
    host: int = 8  # devices
    flops: float = 400e12  # of matrix products, as reached
    overlap: float = 0.8


ONE_B = Llama(2048, 8192, 16, 128256, 512)
EIGHT_B = Llama(4096, 14336, 32, 128256, 1024)


def ring(data: float, ranks: int) -> float:
    """Returns the bytes that a rank sends for an all-gather or a reduce-scatter of so many."""
    return data * (ranks - 1) / ranks


def bytes_of(model: Llama, ranks: int, tensor: int = 1, itemsize: int = 2) -> dict[str, float]:
    """Returns the bytes that a device sends in a step, by op: FSDP2 over ranks / tensor, tensor parallelism over
    `tensor`."""
    data, parameters = ranks // tensor, model.parameters * itemsize / tensor
    stream = model.tokens * model.hidden * itemsize
    return {
        "batched linear algebra": 0.0,
        "norms, softmax, attention, rope, gated": 0.0,
        "FSDP2: parameters, forward and backward": 2 * ring(parameters, data),
        "FSDP2: gradients": ring(parameters, data),
        "DDP: gradients (in FSDP2's place)": 2 * ring(parameters, data),
        "tensor parallelism: streams": model.layers * 8 * ring(stream, tensor),
        "vocabulary-parallel loss: 4 numbers for each token": 2 * ring(4 * 4 * model.tokens, tensor),
        "vocabulary-parallel embedding": 2 * ring(stream, tensor),
        "the gradients' norm": 2 * ring(4, ranks),
        "Muon: matrices to their ranks and back": 2 * ring(parameters / data, data),
    }


# In a step of FSDP2 with AdamW.
_STEP = ("FSDP2: parameters, forward and backward", "FSDP2: gradients", "the gradients' norm")
_TENSOR = ("tensor parallelism: streams", "vocabulary-parallel loss: 4 numbers for each token",
           "vocabulary-parallel embedding")  # fmt: skip


def step(model: Llama, ranks: int, tensor: int = 1, network: Network | None = None) -> tuple[float, float, float]:
    """Returns the seconds of products and of exchange in a step, and the part of a single device's speed that
    remains."""
    network = network or Network()
    sent = bytes_of(model, ranks, tensor)
    products = 6 * model.parameters * model.tokens / tensor / network.flops
    link = network.inside if ranks <= network.host else network.between
    exchange = sum(sent[name] for name in _STEP) / link + sum(sent[name] for name in _TENSOR) / network.inside
    seen = max(exchange - network.overlap * products, exchange * (1 - network.overlap))
    return products, exchange, products / (products + seen)


def table(tokens: int = 8192, network: Network | None = None) -> list[str]:
    """Returns lines of Markdown."""
    lines = ["| model | GPUs | tensor parallel | products, s | exchange, s | efficiency |", "|---|---|---|---|---|---|"]
    for name, model, tensor in (("1B", ONE_B, 1), ("8B", EIGHT_B, 1), ("8B", EIGHT_B, 8)):
        sized = Llama(**{**vars(model), "tokens": tokens})
        for ranks in (1, 2, 8, 64, 512, 4096):
            if ranks >= tensor:
                products, exchange, kept = step(sized, ranks, tensor, network)
                lines.append(f"| {name} | {ranks} | {tensor} | {products:.3f} | {exchange:.3f} | {kept:.0%} |")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m metalcore.distributed.model", description=__doc__.splitlines()[0])  # pyright: ignore[reportOptionalMemberAccess]
    parser.add_argument("--tokens", type=int, default=8192, help="of a device in a step")
    parser.add_argument("--bandwidth", type=float, default=Network.between, help="bytes per second between hosts")
    arguments = parser.parse_args()
    print("\n".join(table(arguments.tokens, Network(between=arguments.bandwidth))))
    print("\n| bytes that a device sends in a step, 8B, 64 GPUs | tensor parallel 1 | 8 |\n|---|---|---|")
    sized = Llama(**{**vars(EIGHT_B), "tokens": arguments.tokens})
    alone, both = bytes_of(sized, 64), bytes_of(sized, 64, 8)
    for name, count in alone.items():
        print(f"| {name} | {count:.3g} | {both[name]:.3g} |")


if __name__ == "__main__":
    main()
