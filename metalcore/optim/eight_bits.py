"""Optimizers whose states have 8 bits, as one multi-tensor kernel. Their state_dicts are those of bitsandbytes."""

from __future__ import annotations

import math

import torch

from .._core.operators import cpu_kernel, fake_kernel, ops
from .._core.registry import Op, Sample, register
from .._core.tensors import is_dtensor
from ..quant._blockwise import dynamic_code, pack_blocks, unpack_blocks
from ._multi_tensor import MultiTensor, check_devices, steps_of, updated

__all__ = ["AdamW8bit", "AdamWFp8", "Lion8bit", "SGD8bit"]

BLOCK = 256  # elements of a state that share a scale
_WRAPPED = "__bnb_optimizer_quant_state__"  # bitsandbytes keeps states there, which FSDP is not to gather


class _EightBits(MultiTensor, torch.optim.Optimizer):  # pyright: ignore[reportIncompatibleMethodOverride]
    """What the optimizers share. A parameter of fewer elements than `min_8bit_size` has states of 32 bits."""

    ALGORITHM = ""
    NAMES: tuple[str, ...] = ("1",)  # of the states
    OPTIONS = ("min_8bit_size", "_codes")
    COUNTS_ON_HOST = True

    def __init__(self, params, defaults, min_8bit_size):
        name = type(self).__name__
        if isinstance(min_8bit_size, bool) or not isinstance(min_8bit_size, int):
            raise TypeError(f"{name}: min_8bit_size must be an integer, not {type(min_8bit_size).__name__}")
        for key, value in defaults.items():
            if key == "betas":
                if len(value) != 2 or not all(0.0 <= beta < 1.0 for beta in value):
                    raise ValueError(f"{name}: betas must be two numbers in [0, 1), not {value}")
            elif not value >= 0.0:
                raise ValueError(f"{name}: {key} must not be negative, and is {value}")
        self.min_8bit_size = min_8bit_size
        self._codes = {}
        super().__init__(params, defaults)

    def _code(self, device, signed):
        if (device, signed) not in self._codes:
            self._codes[device, signed] = self._table(device, signed)
        return self._codes[device, signed]

    def _table(self, device, signed):
        return dynamic_code(device, signed)

    def _prepare(self, p):
        """Returns p's state, which is made in the first step, with its step counted."""
        if is_dtensor(p) or p.is_sparse or p.is_complex() or p.grad.is_sparse:
            raise RuntimeError(
                f"{type(self).__name__} takes dense real tensors as parameters and gradients, no DTensors"
            )
        state = self.state[p]
        if not state:
            state["step"] = 0
            packed = p.numel() >= self.min_8bit_size
            for name in self.NAMES:
                state[f"state{name}"] = torch.zeros_like(p, dtype=torch.uint8 if packed else torch.float32)
                if packed:
                    state[f"qmap{name}"] = self._code(p.device, name == "1")
                    state[f"absmax{name}"] = torch.zeros(-(p.numel() // -BLOCK), device=p.device)
        state["step"] += 1
        return state

    def _step_by_torch(self, group):
        for p in group["params"]:
            self._step_by_kernel(group, [p], [p.grad])

    def _step_by_kernel(self, group, params, grads):
        kinds = {}
        for p, grad in zip(params, grads):
            state = self._prepare(p)
            kinds.setdefault((state["step"], state["state1"].dtype), []).append((p, grad, state))
        for (step, dtype), entries in kinds.items():
            some, their_grads, states = map(list, zip(*entries))
            lists = [[state[f"state{name}"] for state in states] for name in self.NAMES]
            if dtype is not torch.uint8:
                self._step_in_32_bits(group, step, some, their_grads, lists)
            else:
                scales = [[state[f"absmax{name}"] for state in states] for name in self.NAMES]
                second = (lists[1], scales[1]) if len(lists) > 1 else ([], [])
                beta1, beta2 = self._betas(group)
                ops.update_8bit_(
                    some,
                    their_grads,
                    lists[0],
                    second[0],
                    scales[0],
                    second[1],
                    states[0]["qmap1"],
                    states[0].get("qmap2"),
                    self.ALGORITHM,
                    lr=float(group["lr"]),
                    beta1=beta1,
                    beta2=beta2,
                    eps=float(group.get("eps", 0.0)),
                    weight_decay=float(group["weight_decay"]),
                    grad_scale=1.0,
                    step=step,
                )
            updated(some, their_grads, None)

    def _betas(self, group):
        return tuple(map(float, group["betas"]))

    def _step_in_32_bits(self, group, step, params, grads, states):
        raise NotImplementedError

    def state_dict(self):
        """Returns the state as bitsandbytes has it."""
        saved = super().state_dict()
        wrapped = {}
        for key, state in saved["state"].items():
            inner = {name: value for name, value in state.items() if isinstance(value, torch.Tensor)}
            wrapped[key] = {**{name: value for name, value in state.items() if name not in inner}, _WRAPPED: inner}
        return {**saved, "state": wrapped}

    def load_state_dict(self, state_dict):
        """Loads the state of this optimizer, or of its namesake in bitsandbytes."""
        params = [p for group in self.param_groups for p in group["params"]]
        keys = [key for group in state_dict["param_groups"] for key in group["params"]]
        # Optimizer.load_state_dict would round float32 states to the parameters' dtype.
        super().load_state_dict({**state_dict, "state": {}})
        for key, p in zip(keys, params):
            state = dict(state_dict["state"].get(key, {}))
            state.update(state.pop(_WRAPPED, {}))
            self.state[p] = {
                name: value.to(p.device, copy=True) if isinstance(value, torch.Tensor) else value
                for name, value in state.items()
            }


class AdamW8bit(_EightBits):
    """AdamW whose moments have 8 bits: a quarter of float32's memory. A step updates all parameters of a group with a
    few dispatches of one kernel.

    Each block of 256 elements of a moment has a scale, and an element is an index of a table of 256 numbers, of which
    the smaller lie closer together (dynamic quantization). Its state_dict is that of bitsandbytes.optim.AdamW8bit, and
    each loads the other's. The kernel takes float32, float16 and bfloat16 parameters on `mps` and `cuda` devices;
    PyTorch's ops update others.

    Args:
        params: parameters, or groups of them.
        lr, betas, eps, weight_decay: as in torch.optim.AdamW. The learning rate is a number.
        min_8bit_size: parameters with fewer elements have moments in float32.

    Raises:
        ValueError: a value is out of range.
        RuntimeError: a parameter or gradient is sparse, complex or a DTensor.

    Source: Dettmers, Lewis, Shleifer and Zettlemoyer, "8-bit Optimizers via Block-wise Quantization", 2022.

    Example:
        >>> weight = torch.nn.Parameter(torch.ones(64, 64, device="mps"))
        >>> weight.grad = torch.ones_like(weight)
        >>> optimizer = metalcore.optim.AdamW8bit([weight], lr=0.5, weight_decay=0.0)
        >>> optimizer.step()
        >>> round(weight[0, 0].item(), 4), optimizer.state[weight]["state1"].dtype
        (0.5, torch.uint8)
    """

    ALGORITHM = "adam"
    NAMES = ("1", "2")

    def __init__(self, params, lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=1e-2, *, min_8bit_size=4096):
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}, min_8bit_size)

    def _step_in_32_bits(self, group, step, params, grads, states):
        beta1, beta2 = self._betas(group)
        ops.adamw_(
            params,
            grads,
            *states,
            [],
            [torch.tensor(float(step - 1), device="cpu") for _ in params],
            lr=float(group["lr"]),
            beta1=beta1,
            beta2=beta2,
            weight_decay=float(group["weight_decay"]),
            eps=float(group["eps"]),
            maximize=False,
        )


class AdamWFp8(AdamW8bit):
    """AdamW whose moments are numbers of float8_e4m3fn with a scale for each block of 256, as in torchao's AdamWFp8.

    It is AdamW8bit with another table: a state's byte is the place of its number among the sorted ones. A moment is
    rounded by at most a sixteenth of itself, if it is at least 2^-14 of its block's largest one.

    Args:
        params: parameters, or groups of them.
        lr, betas, eps, weight_decay: as in torch.optim.AdamW. The learning rate is a number.
        min_8bit_size: parameters with fewer elements have moments in float32.

    Raises:
        ValueError: a value is out of range.
        RuntimeError: a parameter or gradient is sparse, complex or a DTensor.

    Source: github.com/pytorch/ao, torchao/optim/subclass_fp8.py (what a state is).

    Example:
        >>> weight = torch.nn.Parameter(torch.ones(64, 64, device="mps"))
        >>> weight.grad = torch.ones_like(weight)
        >>> optimizer = metalcore.optim.AdamWFp8([weight], lr=0.5, weight_decay=0.0)
        >>> optimizer.step()
        >>> round(weight[0, 0].item(), 4), optimizer.state[weight]["absmax1"].shape
        (0.5, torch.Size([16]))
    """

    def _table(self, device, signed):
        positive = torch.arange(127, dtype=torch.uint8, device=device).view(torch.float8_e4m3fn).float() / 448
        # There are 254 numbers, of which one is 0 and one -0. The largest fills the table.
        return torch.cat([-positive.flip(0), positive, positive[-1:].expand(2)])


class Lion8bit(_EightBits):
    """Lion whose mean of gradients has 8 bits, as in AdamW8bit. Its state_dict is that of bitsandbytes.optim.Lion8bit.

    Args:
        params: parameters, or groups of them.
        lr, betas, weight_decay: as in metalcore.optim.Lion. The learning rate is a number.
        min_8bit_size: parameters with fewer elements have a mean in float32.

    Raises:
        ValueError: a value is out of range.
        RuntimeError: a parameter or gradient is sparse, complex or a DTensor.

    Example:
        >>> weight = torch.nn.Parameter(torch.ones(64, 64, device="mps"))
        >>> weight.grad = torch.ones_like(weight)
        >>> metalcore.optim.Lion8bit([weight], lr=0.5).step()
        >>> weight[0, :2].tolist()
        [0.5, 0.5]
    """

    ALGORITHM = "lion"

    def __init__(self, params, lr=1e-4, betas=(0.9, 0.99), weight_decay=0.0, *, min_8bit_size=4096):
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay}, min_8bit_size)

    def _step_in_32_bits(self, group, step, params, grads, states):
        beta1, beta2 = self._betas(group)
        options = {"beta1": beta1, "beta2": beta2, "weight_decay": float(group["weight_decay"]), "maximize": False}
        ops.lion_(params, grads, *states, lr=float(group["lr"]), **options)


class SGD8bit(_EightBits):
    """Gradient descent whose momentum has 8 bits, as in AdamW8bit, with the state_dict of bitsandbytes.optim.SGD8bit.

    Args:
        params: parameters, or groups of them.
        lr, momentum, weight_decay: as in torch.optim.SGD. The learning rate is a number.
        min_8bit_size: parameters with fewer elements have a momentum in float32.

    Raises:
        ValueError: a value is out of range, or the momentum is 0, which needs no state.
        RuntimeError: a parameter or gradient is sparse, complex or a DTensor.

    Example:
        >>> weight = torch.nn.Parameter(torch.ones(64, 64, device="mps"))
        >>> weight.grad = torch.ones_like(weight)
        >>> metalcore.optim.SGD8bit([weight], lr=0.5, momentum=0.9).step()
        >>> weight[0, :2].tolist()
        [0.5, 0.5]
    """

    ALGORITHM = "momentum"

    def __init__(self, params, lr=1e-3, momentum=0.9, weight_decay=0.0, *, min_8bit_size=4096):
        if not 0.0 < momentum < 1.0:
            raise ValueError(f"SGD8bit: momentum must be between 0 and 1, not {momentum}")
        # Options have bitsandbytes' names.
        defaults = {"lr": lr, "betas": (momentum, 0), "eps": 0.0, "weight_decay": weight_decay}
        super().__init__(params, defaults, min_8bit_size)

    def _step_in_32_bits(self, group, step, params, grads, states):
        beta, weight_decay, lr = float(group["betas"][0]), float(group["weight_decay"]), float(group["lr"])
        for p, grad, state in zip(params, grads, *states):  # the state has another dtype than 16-bit parameters
            grad = grad.float().add(p, alpha=weight_decay)
            state.copy_(grad if step == 1 else state * beta + grad)
            p.copy_(p.float().sub(state, alpha=lr))


@cpu_kernel("update_8bit_")
def _(
    params,
    grads,
    states1,
    states2,
    absmax1,
    absmax2,
    code1,
    code2,
    algorithm,
    *,
    lr,
    beta1,
    beta2,
    eps,
    weight_decay,
    grad_scale,
    step,
):
    for i, tensors in enumerate(zip(params, grads, states1, states2 or states1)):
        # Blocks are of elements that lie side by side in memory.
        order = sorted(range(tensors[0].dim()), key=lambda dim: -tensors[0].stride(dim))
        p, grad, state1, state2 = (tensor.permute(order) for tensor in tensors)
        p32, grad = p.float(), grad.float() * grad_scale
        m = unpack_blocks(state1, absmax1[i], "code", BLOCK, code1, p.shape)
        if algorithm == "adam":
            v = unpack_blocks(state2, absmax2[i], "code", BLOCK, code2, p.shape)
            m, v = m * beta1 + (1 - beta1) * grad, v * beta2 + (1 - beta2) * grad * grad
            denominator = v.sqrt() / math.sqrt(1 - beta2**step) + eps
            p32 = p32 * (1 - lr * weight_decay) - lr / (1 - beta1**step) * m / denominator
            _pack(v, state2, absmax2[i], code2)
        elif algorithm == "lion":
            p32 = p32 * (1 - lr * weight_decay) - lr * (beta1 * m + (1 - beta1) * grad).sign()
            m = m * beta2 + (1 - beta2) * grad
        else:
            grad = grad + weight_decay * p32
            m = grad if step == 1 else m * beta1 + grad
            p32 = p32 - lr * m
        p.copy_(p32)
        _pack(m, state1, absmax1[i], code1)


def _pack(numbers, state, absmax, code):
    packed, scales = pack_blocks(numbers, "code", BLOCK, code)
    state.copy_(packed.view(state.shape))
    absmax.copy_(scales)


@fake_kernel("update_8bit_")
def _(params, grads, states1, states2, absmax1, absmax2, code1, code2, algorithm, **options):
    lists = {"params": params, "grads": grads, "states1": states1, "states2": states2, "absmax1": absmax1}
    check_devices("update_8bit_", **lists, absmax2=absmax2)


def _register(optimizer, **options):
    shapes = ((70, 60), (5,), (4099,))
    register(
        Op(
            optimizer.__name__.lower(),
            optimizer,
            reference=optimizer,  # whose code for CPU tensors is PyTorch's ops
            call=steps_of(()),
            operators=("update_8bit_",),
            backward=False,
            waits=True,
            samples=lambda: (Sample("three parameters", (*shapes, *shapes), options, terms=3, roundings=3),),
        )
    )


_register(AdamW8bit, lr=0.5, weight_decay=0.1)
_register(AdamWFp8, lr=0.5, weight_decay=0.1)
_register(Lion8bit, lr=0.5, weight_decay=0.1)
# Of numbers with 16 bits many lie between two of the state's, and a rounding decides: lr makes that small in results.
_register(SGD8bit, lr=1e-3, weight_decay=0.1)
