"""Shared by the tests of AdamW: metalcore's optimizer on the device beside torch's on the CPU, with equal gradients."""

import torch

import metalcore

EPS = torch.finfo(torch.float32).eps


class Pair:
    """Parameters twice: on the device under metalcore.optim.AdamW, and on the CPU under torch.optim.AdamW."""

    def __init__(self, values, device, ours=None, dtype=torch.float32, **options):
        self.generator = torch.Generator().manual_seed(7)
        self.params = [torch.nn.Parameter(v.to(device=device, dtype=dtype)) for v in values]
        self.expected = [torch.nn.Parameter(v.to(dtype).to(torch.float32)) for v in values]
        self.optimizer = metalcore.optim.AdamW(self.params, **(options | (ours or {})))
        self.reference = torch.optim.AdamW(self.expected, **options)

    def set_grads(self):
        """New gradients, the same for both: of the parameters' dtype, and that value in float32."""
        for p, e in zip(self.params, self.expected):
            grad = torch.randn(e.shape, generator=self.generator).to(p.dtype)
            p.grad = torch.empty_like(p).copy_(grad)
            e.grad = grad.to(torch.float32)

    def steps(self, count):
        for _ in range(count):
            self.set_grads()
            self.optimizer.step()
            self.reference.step()

    def assert_equal(self, steps=20, moments=True):
        for p, e in zip(self.params, self.expected):
            assert_steps_close(p, e, steps, lr=float(self.reference.param_groups[0]["lr"]))
            if moments:
                state, expected = self.optimizer.state[p], self.reference.state[e]
                assert state.keys() == expected.keys()
                assert float(state["step"]) == float(expected["step"])
                for name in expected.keys() - {"step"}:
                    # This is a sum of values of order one, and each step rounds.
                    torch.testing.assert_close(state[name].cpu(), expected[name], rtol=1e-6, atol=steps * EPS)


def assert_steps_close(actual, expected, steps, lr):
    """Equal to 1e-6, or near zero to the rounding errors of `steps` updates of size lr (8 operations each)."""
    torch.testing.assert_close(actual.detach().cpu(), expected.detach(), rtol=1e-6, atol=steps * 8 * EPS * lr)


def random_values(*shapes, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator) for shape in shapes]
