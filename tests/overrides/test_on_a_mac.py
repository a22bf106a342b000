"""Which overrides are on by default on a Mac, where nobody has measured any: those for which PyTorch has no Metal
kernel of its own. The rule depends on the kind of device, on PyTorch's release, and on what `tune` measured."""

import json

import pytest
import torch
import torch.nn.functional as F

import metalcore
from metalcore import mac_kernels
from metalcore._core.registry import OPS, Override
from metalcore.overrides import _gains

pytestmark = pytest.mark.only_on("simulator")
RELEASES = mac_kernels.RELEASES
NAMES = metalcore.overrides.NAMES
# The names of which no part is on, by the first release of which that is so.
OFF_SINCE = {
    "silu": (2, 12),
    "embedding_bag": (2, 10),
    "group_norm": (2, 13),
    "solve_triangular": (2, 10),
    "cholesky": (2, 10),
    "lu_factor": (2, 10),
    "lu_solve": (2, 14),
    "solve": (2, 10),
    "inv": (2, 10),
    "det": (2, 10),
    "slogdet": (2, 10),
    "eigh": (2, 14),
    "svd": (2, 15),
    "lstsq": (2, 15),
    "embedding": (2, 13),
}
# Operators of overrides that stay on, with the last release in which they do (None: in all).
ON_UNTIL = {
    "relu": {"relu": (2, 11), "relu_": (2, 11), "threshold_backward": None},
    "silu": {"silu": (2, 11), "silu_": (2, 11), "silu_backward": (2, 11)},
    "gelu": {"gelu": (2, 12), "gelu_": (2, 12), "gelu_backward": (2, 12)},
    "softmax": {"_softmax": (2, 14), "_softmax_backward_data": None},
    "log_softmax": {"_log_softmax": (2, 14), "_log_softmax_backward_data": None},
    "layer_norm": {"native_layer_norm": (2, 9), "native_layer_norm_backward": None},
    "group_norm": {"native_group_norm": (2, 12), "native_group_norm_backward": (2, 12)},
    "rms_norm": {"_fused_rms_norm": (2, 9), "_fused_rms_norm_backward": None, "rms_norm": None},
    "cross_entropy": {"cross_entropy_loss": None},
    "kl_div": {"kl_div": None},
    "embedding": {"embedding": (2, 9), "embedding_dense_backward": (2, 12)},
    "scaled_dot_product_attention": {"scaled_dot_product_attention": None},
    "qr": {"linalg_qr": None},  # by a fault of PyTorch's since it has one
    "eigh": {"_linalg_eigh": (2, 13)},
    "eig": {"linalg_eig": None, "_linalg_eigvals": None},
    "svd": {"_linalg_svd": (2, 14)},  # by a fault of 2.14's
    "lstsq": {"linalg_lstsq": (2, 14)},
    "lu_solve": {"linalg_lu_solve": (2, 13)},
    "cholesky": {"linalg_cholesky_ex": (2, 9)},
}


def off(name, release, kind="mps", measured=None):
    return _gains.by_default(name, {"mps": kind}, release, {"mps": measured or {}})


@pytest.mark.parametrize("release", RELEASES)
def test_names(release):
    found = {name for name in NAMES if off(name, release)}
    assert found == {name for name, first in OFF_SINCE.items() if release >= first}
    assert {off(name, release) for name in found} == {_gains.NOT_MEASURED}


@pytest.mark.parametrize("name", ON_UNTIL)
def test_operators(name):
    override = OPS[name].override
    assert {one.operator for one in override} == ON_UNTIL[name].keys()
    for release in RELEASES:
        for one in override:
            last = ON_UNTIL[name][one.operator]
            on = _gains.why_off(name, one, "mps", release, {}) is None
            assert on == (last is None or release <= last), (one.operator, release)


@pytest.mark.parametrize("kind", ["cuda", "simulator"])
@pytest.mark.parametrize("release", RELEASES)
def test_other_devices_keep_theirs(kind, release):
    for name in NAMES:
        assert off(name, release, kind) is None
        for one in OPS[name].override or () if isinstance(OPS[name].override, tuple) else ():
            assert _gains.why_off(name, one, kind, release, {}) is None
            assert not _gains.left_calls(name, one, kind, {})


def test_what_was_measured_decides():
    assert off("silu", (2, 15), measured={"silu": (1.1, 1.2)}) is None
    assert off("softmax", (2, 10), measured={"softmax": (0.5, 0.9)}) == _gains.SLOWER
    forward, backward = OPS["softmax"].override
    figures = {"softmax": (0.5, 1.5)}
    assert _gains.why_off("softmax", forward, "mps", (2, 10), figures) == _gains.SLOWER
    assert _gains.why_off("softmax", backward, "mps", (2, 15), figures) is None
    (attention, _) = OPS["scaled_dot_product_attention"].override
    assert off("scaled_dot_product_attention", (2, 15), measured={"scaled_dot_product_attention": (0.5, 1.5)}) is None
    for gains, leaves in (({}, True), ({"scaled_dot_product_attention": (0.9, 3.0)}, True)):
        assert _gains.left_calls("scaled_dot_product_attention", attention, "mps", gains) is leaves
    assert not _gains.left_calls(
        "scaled_dot_product_attention", attention, "mps", {"scaled_dot_product_attention": (1.2, 3.0)}
    )
    assert off("adamw", (2, 15)) is None
    assert off("adamw", (2, 15), measured={"adamw": (0.8, None)}) == _gains.SLOWER


def test_every_operator_is_known_or_has_no_kernel():
    """By the table of the PyTorch that is installed: what has a Metal kernel has an MPS kernel, and what has none there
    has none here either."""
    from metalcore.simulator import device

    # One that works in place counts as the other, as for since().
    release = mac_kernels.this_release()
    table = {name.split(".")[0].removesuffix("_") for name in device.mac_operators()}
    composite = {"scaled_dot_product_attention", "embedding"}
    for name in mac_kernels.KERNELS:
        if mac_kernels.has_own(name, release) and name.isidentifier() and name not in composite:
            assert f"aten::{name}" in table, name
    for op in OPS.values():
        for one in op.override if isinstance(op.override, tuple) else ():
            if f"aten::{one.operator.removesuffix('_')}" not in table and one.operator not in composite:
                assert not mac_kernels.has_own(one.operator, release), one.operator


ATTENTION = [
    # queries, keys, size, value size, causal, keeps scores; the first release with a kernel
    ((1, 100, 64, 64, False, False), (2, 10)),
    ((8, 100, 128, 128, False, False), (2, 10)),
    ((8, 100, 128, 128, True, False), (2, 13)),
    ((8, 100, 256, 256, False, False), (2, 13)),
    ((8, 4, 64, 64, False, False), None),
    ((9, 100, 64, 64, True, False), (2, 13)),
    ((512, 512, 128, 128, True, False), (2, 13)),
    ((512, 512, 80, 80, False, False), (2, 13)),
    ((512, 512, 192, 192, False, False), None),
    ((512, 512, 128, 64, False, False), None),
    ((512, 512, 128, 128, True, True), None),  # a gradient, a mask, dropout
    ((512, 0, 128, 128, False, False), None),
]


@pytest.mark.parametrize(("call", "first"), ATTENTION)
def test_attention_kernels(call, first):
    for release in RELEASES:
        assert mac_kernels.attention_kernel(release, *call) == (first is not None and release >= first)


@pytest.fixture
def mac(device, monkeypatch):
    """The simulated device counts as a Mac's, with a release of PyTorch and measured gains: `mac(release, gains)`."""
    if device != "mps" or not getattr(torch._C, "_metalcore_simulates_mps", False):
        pytest.skip("needs the simulated device")
    monkeypatch.setattr(_gains, "kind_of", lambda device: device)
    monkeypatch.setattr(metalcore.overrides, "kind_of", lambda device: device)

    def pretend(release, gains=None):
        for module in (metalcore.overrides, metalcore.overrides._dispatcher):
            monkeypatch.setattr(module, "this_release", lambda: release)
        monkeypatch.setattr(_gains, "measured_gains", lambda devices: {"mps": gains or {}})
        monkeypatch.setattr(metalcore.overrides, "measured_gains", lambda devices: {"mps": gains or {}})

    return pretend


def ran():
    return {row.what.split()[0].removeprefix("aten::"): row.ran for row in metalcore.report().rows if row.replaced}


def left(what):
    return {row.what.split()[0].removeprefix("aten::"): row.left for row in metalcore.report().rows}[what]


@pytest.mark.parametrize("release", RELEASES)
def test_enabling_on_a_mac(mac, release):
    mac(release)
    with metalcore.enable_pytorch_overrides():
        active = metalcore.active_overrides()
        assert set(NAMES) - set(active) == {name for name, first in OFF_SINCE.items() if release >= first}
        x = torch.randn(4, 16, device="mps", requires_grad=True)
        F.softmax(x, -1).sum().backward()
        found = ran()
        assert found.get("_softmax", 0) == (release < (2, 15)) and found["_softmax_backward_data"] == 1
        if release >= (2, 12):
            assert left("silu") == {_gains.NOT_MEASURED: 0}


def test_a_name_always_wins(mac):
    mac((2, 15))
    x = torch.randn(4, 16, device="mps")
    with metalcore.enable_pytorch_overrides("silu", "softmax"):
        F.silu(x), F.softmax(x, -1)
        assert ran()["silu"] == ran()["_softmax"] == 1
    with metalcore.enable_pytorch_overrides():
        assert "silu" not in metalcore.active_overrides()
        with metalcore.enable_pytorch_overrides("softmax", "rms_norm"):
            F.softmax(x, -1), F.rms_norm(x, (16,), torch.ones(16, device="mps"))
            assert ran()["_softmax"] == 1 and ran()["rms_norm"] == 1
        F.softmax(x, -1)
        assert "_softmax" not in {row.what.split()[0] for row in metalcore.report().rows if row.ran > 1}


def test_a_measured_gain_turns_it_on(mac):
    mac((2, 15), {"silu": (1.3, 1.1), "scaled_dot_product_attention": (1.2, 1.4)})
    x = torch.randn(4, 16, device="mps")
    q = torch.randn(1, 2, 32, 64, device="mps")
    with metalcore.enable_pytorch_overrides():
        F.silu(x)
        F.scaled_dot_product_attention(q, q, q)
        assert ran()["silu"] == ran()["scaled_dot_product_attention"] == 1


def test_attention_keeps_gradients_and_masks(mac):
    mac((2, 15))
    q = torch.randn(1, 2, 32, 64, device="mps")
    mask = torch.ones(32, 32, dtype=torch.bool, device="mps")
    with metalcore.enable_pytorch_overrides():
        expected = F.scaled_dot_product_attention(q, q, q, is_causal=True)
        F.scaled_dot_product_attention(q, q, q)
        assert left("scaled_dot_product_attention") == {_gains.NOT_MEASURED: 2}
        F.scaled_dot_product_attention(q, q, q, mask)
        wanted = q.clone().requires_grad_()
        F.scaled_dot_product_attention(wanted, q, q, is_causal=True).sum().backward()
        with torch.no_grad():
            F.scaled_dot_product_attention(wanted, q, q, is_causal=True)
        assert ran()["scaled_dot_product_attention"] == 2
        assert left("scaled_dot_product_attention") == {_gains.NOT_MEASURED: 3}
    torch.testing.assert_close(expected, F.scaled_dot_product_attention(q, q, q, is_causal=True))


def test_norms_keep_training(mac):
    mac((2, 15))
    x, w = torch.randn(4, 16, device="mps"), torch.ones(16, device="mps")
    with metalcore.enable_pytorch_overrides():
        F.rms_norm(x, (16,), w)
        assert left("rms_norm") == {_gains.NOT_MEASURED: 1} and ran()["rms_norm"] == 0
        wide, of_w = x.clone().requires_grad_(), w.clone().requires_grad_()
        F.rms_norm(wide, (16,), of_w).square().sum().backward()
        assert ran()["rms_norm"] == 1 and "_fused_rms_norm" not in ran()
    x, w = x.cpu().requires_grad_(), w.cpu().requires_grad_()
    F.rms_norm(x, (16,), w).square().sum().backward()
    torch.testing.assert_close(wide.grad.cpu(), x.grad, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(of_w.grad.cpu(), w.grad, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("make", [torch.optim.AdamW, torch.optim.SGD])
def test_fused_steps_stay_pytorchs(mac, make):
    """Those alone, and not where the override was asked for by its name."""

    def stepped(**groups):
        parameters = {name: torch.ones(3, device="mps", requires_grad=True) for name in groups}
        optimizer = make([{"params": [parameters[name]], "fused": fused} for name, fused in groups.items()], lr=0.1)
        for parameter in parameters.values():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        assert all((parameter < 0.95).all() for parameter in parameters.values())

    name, what = make.__name__.lower(), f"torch.optim.{make.__name__}"
    mac((2, 15), {name: (1.2, None)})  # tune times steps that are not fused
    with metalcore.enable_pytorch_overrides():
        stepped(a=True, b=True)
        assert left(what) == {_gains.NOT_MEASURED: 1} and not ran()[what]
        stepped(a=True, b=False)
        stepped(a=None)
        assert ran()[what] == 3 and left(what) == {_gains.NOT_MEASURED: 1}  # each group counts
        with metalcore.enable_pytorch_overrides(name):
            stepped(a=True)
            assert ran()[what] == 4
        stepped(a=True)
        assert ran()[what] == 4 and left(what) == {_gains.NOT_MEASURED: 2}
    mac((2, 9))
    with metalcore.enable_pytorch_overrides():
        stepped(a=True)
        assert ran()[what] == 1


def test_what_pytorch_has_is_data():
    for name, kernel in mac_kernels.KERNELS.items():
        assert kernel.evidence and mac_kernels.since(name) == kernel.since
        for first, fixed, text in kernel.faulty:
            assert "pytorch#" in text and mac_kernels.fault(name, first) == text
            assert fixed is None or mac_kernels.fault(name, fixed) is None
    assert mac_kernels.since("no such operator") is None and mac_kernels.fault("silu", (2, 15)) is None
    json.dumps(mac_kernels.lacking((2, 15)))


@pytest.mark.parametrize(
    ("release", "has"),
    [
        ((2, 13), set()),
        ((2, 14), {"geqrf", "_linalg_eigh", "linalg_lu_solve"}),
        ((2, 15), {"geqrf", "_linalg_eigh", "linalg_lu_solve", "_linalg_svd"}),
    ],
)
def test_what_tune_may_choose(release, has):
    asked = {"geqrf", "_linalg_eigh", "linalg_lu_solve", "_linalg_svd", "linalg_qr", "ormqr", "linalg_eig"}
    assert asked - set(mac_kernels.lacking(release)) == has


def test_the_override_is_an_entry_of_the_registry():
    assert all(isinstance(one, Override) for one in OPS["rms_norm"].override)
