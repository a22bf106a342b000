"""torch.compile(…, backend="metalcore"): forward, training, changing sizes, and what is left to PyTorch."""

import copy

import pytest
import torch
import torch.nn.functional as F
from agreement import agree, of_ours
from nets import Decoder, ResNet
from torch import nn

import metalcore
from metalcore import programs

STRICT = {"fallback": False}


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def compiled(thing, dynamic=False, **options):
    return torch.compile(thing, backend="metalcore", dynamic=dynamic, options={**STRICT, **options})


def names(found):
    return {step.operator for c in found for program in c.programs for step in program.report().steps}


def test_the_package_names_the_backend():
    """In an installed package by an entry point, and in any process that imports metalcore.programs."""
    assert "metalcore" in torch._dynamo.list_backends()


def training(model, step, batches):
    """The losses and the parameters after some steps of AdamW."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for batch in batches:
        optimizer.zero_grad()
        loss = step(model, batch)
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return [*losses, *[p.detach() for p in model.parameters()], *model.buffers()]


def language_step(model, ids):
    return F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())


def image_step(model, x):
    return model(x).square().mean()


def test_training_of_a_decoder(device):
    generator = torch.Generator().manual_seed(0)
    batches = [torch.randint(3, 50, (2, 9), generator=generator).to(device) for _ in range(3)]
    torch.manual_seed(0)
    model = Decoder(layers=1).to(device)
    expected = training(copy.deepcopy(model), language_step, batches)
    with programs.observe() as found:
        result = training(model, compiled(language_step), batches)
    agree(expected, result, 1e-4)
    assert {"metalcore.rms_norm_backward", "metalcore.cross_entropy"} <= names(found)
    assert ("metalcore.attention_backward" in names(found)) == bool(of_ours(device, attentions=1))


def test_training_of_batch_norms(device):
    """Running statistics and counters change as in eager PyTorch."""
    batches = [torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(i)).to(device) for i in range(3)]
    torch.manual_seed(0)
    model = ResNet().to(device)
    for block in model.blocks:  # A batch norm subtracts this bias: its gradient has only rounding errors, which AdamW
        block.shortcut[0].bias.requires_grad_(False)  # would divide by their own size.
    expected = training(copy.deepcopy(model), image_step, batches)
    agree(expected, training(model, compiled(image_step, fusions=[]), batches), 2e-3)


def test_batch_norms_that_average_all_batches(device):
    """The average reads the count of batches on the host, where dynamo ends one graph and begins another."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8, momentum=None), nn.ReLU()).to(device)
    expected, call = copy.deepcopy(model), torch.compile(model, backend="metalcore", options={"fallback": False})
    for _ in range(4):
        x = torch.randn(2, 3, 9, 9).to(device)
        agree(expected(x), call(x))
    agree(list(expected.buffers()), list(model.buffers()))
    agree(expected.eval()(x), torch.compile(model.eval(), backend="metalcore")(x))


class Small(nn.Module):
    """A part of a decoder with a norm, a norm of a sum, attention and a gate."""

    def __init__(self):
        super().__init__()
        self.scales = nn.Parameter(torch.rand(2, 16) + 0.5)

    def forward(self, x):
        y = F.rms_norm(x, (16,), self.scales[0], 1e-6)
        x = x + F.scaled_dot_product_attention(y, y, y)
        y = F.rms_norm(x, (16,), self.scales[1], 1e-6)
        return (x @ (F.silu(y) * y.flip(-1)).mT).square().sum()


def test_training_with_fusions_off_one_by_one(device):
    x = torch.randn(2, 3, 5, 16, generator=torch.Generator().manual_seed(0)).to(device)
    torch.manual_seed(0)
    model = Small().to(device)

    def gradients(call):
        given = x.clone().requires_grad_()
        return torch.autograd.grad(call(given), [given, model.scales])

    expected = gradients(model)
    used = ["rms_norm", "add_norm", "attention", "gated"]
    for left_out in [None, *used]:
        torch._dynamo.reset()
        with programs.observe() as found:
            agree(expected, gradients(compiled(model, fusions=[n for n in used if n != left_out])), 1e-4)
        assert {r.pattern for r in found[0].fused} == set(used) - {left_out, "add_norm" * (left_out == "rms_norm")}


def test_graph_breaks(device):
    def function(x):
        y = F.silu(x) * x
        torch._dynamo.graph_break()
        return F.gelu(y) * x

    x = torch.randn(4, 16).to(device)
    with programs.observe() as found:
        agree(function(x), compiled(function)(x))
    assert len(found) == 2 and all("metalcore.gated" in names([c]) for c in found)


def test_each_size_has_its_program(device):
    def function(x):
        return torch.softmax(x @ x.mT / x.shape[-1] ** 0.5, -1) * x.shape[0]

    call = compiled(function, dynamic=True, cache_size=2)
    with programs.observe() as found:
        for rows in (3, 5, 3, 5):
            x = torch.randn(rows, 8).to(device)
            agree(function(x), call(x))
    assert len(found) == 2
    x = torch.randn(7, 8).to(device)
    with pytest.warns(UserWarning, match="cache_size"):
        agree(function(x), call(x))
    assert len(found) == 2


def test_sizes_that_run_eagerly(device):
    call = compiled(lambda x: x.relu() + x.shape[0], dynamic=True)
    eager = torch.compile(
        lambda x: x.relu() - x.shape[0], backend="metalcore", dynamic=True, options={"dynamic": "eager"}
    )
    with programs.observe() as found:
        x = torch.randn(3, 8).to(device)
        agree(x.relu() - 3, eager(x))
        assert not found
        agree(x.relu() + 3, call(x))
        assert found


def test_inputs_that_are_written_to(device):
    def function(x, cache, place):
        cache.index_copy_(0, place, x)
        x.mul_(2)
        return cache.sum(0) + x

    tensors = [torch.randn(2, 8), torch.randn(6, 8), torch.tensor([4, 1])]
    first, second = ([t.clone().to(device) for t in tensors] for _ in range(2))
    agree(function(*first), compiled(function)(*second))
    agree(first, second)


def test_writes_that_gradients_go_through(device):
    def function(x, y):
        x[..., ::2].mul_(0.5)
        z = x.sin()
        z.copy_(z.flip(0) * y)
        z **= 2
        return z.sum()

    def gradients(call):
        leaves = [torch.linspace(-1, 1, 12, device=device).view(3, 4).requires_grad_() for _ in range(2)]
        x, y = (leaf * 1 for leaf in leaves)
        return [*torch.autograd.grad(call(x, y), leaves), x]

    for dynamic in (False, True):
        torch._dynamo.reset()
        agree(gradients(function), gradients(compiled(function, dynamic=dynamic)))


def test_batch_norms_in_checkpoints(device):
    """Backward computes them again from buffers that forward has written to."""
    from torch.utils.checkpoint import checkpoint

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.ReLU()).to(device)
    other, x = copy.deepcopy(model), torch.randn(5, 4).to(device)
    call = compiled(lambda x: checkpoint(other, x, use_reentrant=False))
    for _ in range(2):
        inputs = [x.clone().requires_grad_() for _ in range(2)]
        results = [model(inputs[0]), call(inputs[1])]
        for result in results:
            result.square().sum().backward()
        agree([results[0], inputs[0].grad, *model.buffers()], [results[1], inputs[1].grad, *other.buffers()])


def test_memory_that_programs_keep(device):
    """memory="arena": results of earlier calls, and what backward needs, are not in it."""

    def function(x, weight):
        return F.normalize(torch.softmax(x @ weight @ weight, -1) @ weight, dim=-1)

    def gradients(call):
        leaves = [torch.randn(6, 6, generator=torch.Generator().manual_seed(i)).to(device) for i in range(3)]
        x, y, weight = (leaf.requires_grad_() for leaf in leaves)
        results = [call(x, weight), call(y, weight)]
        results[0].square().sum().backward()
        results[1].sin().sum().backward()
        return [*results, x.grad, y.grad, weight.grad]

    with programs.observe() as found:
        agree(gradients(function), gradients(compiled(function, memory="arena")), 1e-4)
    assert all(program.report().plan.arena_bytes for program in found[0].programs)


def test_gradients_are_off_where_the_program_says_so(device):
    def function(x, weight):
        with torch.no_grad():
            scale = F.silu(weight) * weight
        return (F.gelu(x) * (x * scale)).sum() + (weight.detach() * x).sum()

    def gradients(call):
        x, weight = (torch.full((4, 16), v, device=device, requires_grad=True) for v in (0.5, 2.0))
        call(x, weight).backward()
        return [x.grad, weight.grad if weight.grad is not None else torch.zeros_like(x)]

    agree(gradients(function), gradients(compiled(function)))


def test_checkpoints_and_autocast_are_left_to_autograd(device):
    from torch.utils.checkpoint import checkpoint

    def function(x):
        return checkpoint(lambda x: F.silu(x) * x, x, use_reentrant=False).sum()

    x = torch.randn(4, 16).to(device).requires_grad_()
    with programs.observe() as found:
        agree(function(x), compiled(function)(x))
        assert any("checkpoint" in note for note in found[0].notes) and not found[0].fused


def test_derivatives_that_only_overrides_have(device):
    """PyTorch has aten::_fused_rms_norm_backward neither on mps nor on the CPU, where lacking operators run."""
    from torch.utils.checkpoint import checkpoint

    x, weight = (torch.randn(shape).to(device).requires_grad_() for shape in ((3, 32), (32,)))

    def gradients(call):
        return torch.autograd.grad(call(x).sin().sum(), (x, weight))

    def norm(x):
        return F.rms_norm(x, (32,), weight)

    expected = gradients(norm)
    with metalcore.enable_pytorch_overrides("rms_norm"):
        agree(expected, gradients(compiled(norm, fusions=[])))
        agree(expected, gradients(compiled(lambda x: checkpoint(norm, x, use_reentrant=False))))


def test_dropout_draws_what_it_should(device):
    model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5)).to(device)
    y = compiled(model)(torch.ones(64, 8).to(device))
    assert 0.3 < (y == 0).float().mean() < 0.7
    agree(compiled(model.eval())(torch.ones(2, 8).to(device)), model(torch.ones(2, 8).to(device)))


@pytest.mark.parametrize(
    "options, message",
    [
        ({"fuse": []}, "no option 'fuse'; there are fusions"),
        ({"fusions": ["rms_norms"]}, "no fusion 'rms_norms'"),
        ({"fusions": "rms_norm"}, "a list of names"),
        ({"cache_size": 0}, "1 and more"),
        ({"dynamic": "no"}, "'specialize' or 'eager'"),
    ],
)
def test_options_that_are_refused(device, options, message):
    with pytest.raises(Exception, match=message):
        torch.compile(lambda x: x + 1, backend="metalcore", options=options)(torch.ones(2).to(device))


def test_what_fails_runs_by_pytorch_with_a_warning(device, monkeypatch):
    def fails(*args, **kwargs):
        raise NotImplementedError("a seeded failure")

    monkeypatch.setattr("metalcore.programs.backend.finish", fails)
    x = torch.randn(3).to(device)
    with pytest.warns(UserWarning, match="a seeded failure"):
        agree(x + 1, torch.compile(lambda x: x + 1, backend="metalcore")(x))
    with pytest.raises(Exception, match="a seeded failure"):
        compiled(lambda x: x - 1)(x)


def test_on_the_cpu():
    """There are no kernels, and programs are right."""
    model, ids = Decoder(layers=1).eval(), torch.arange(3, 12)[None]
    with torch.no_grad():
        agree(model(ids), compiled(model)(ids))
    agree(model(ids), metalcore.compile(model, (ids,))(ids))


@pytest.mark.parametrize("dynamic", [None, True])
def test_numbers_that_change_need_no_program_each(device, dynamic):
    def scaled(x, factor):
        return torch.softmax((x * factor + torch.full_like(x, 0.5)) * x.shape[0], -1)

    x = torch.randn(26, device=device, requires_grad=True)
    run = torch.compile(scaled, backend="metalcore", dynamic=dynamic, options=STRICT)
    with programs.observe() as found:
        for factor in (0.1, 0.2, 0.3, 0.4):
            results = [run(x, factor), scaled(x, factor)]
            gradients = [torch.autograd.grad(r, x, torch.arange(26.0, device=device))[0] for r in results]
            agree(results[1], results[0])
            agree(gradients[1], gradients[0])
    assert len(found) == (2 if dynamic else 3)  # with a fixed number, by dynamo's wish and by ours, and with a symbol


def test_numbers_that_must_be_fixed(device):
    """Dynamo traces once more, with a number that an operator needs as such."""

    def soft(x, beta):
        return F.softplus(x, beta=beta) + 1

    x = torch.randn(26, device=device)
    run = compiled(soft, dynamic=None)
    for beta in (0.5, 0.7, 0.9):
        agree(soft(x, beta), run(x, beta))


def test_a_graph_that_reads_numbers_from_the_device_runs_by_pytorch(device):
    def scaled(x):
        return x * x.sum().item() + 1

    x = torch.randn(26, device=device)
    with torch._dynamo.config.patch(capture_scalar_outputs=True), pytest.warns(UserWarning, match="reads a number"):
        agree(scaled(x), torch.compile(scaled, backend="metalcore")(x))


def test_constants_of_the_cpu_alone(device):
    def compare(x):
        five = torch.tensor(5, device=x.device, dtype=torch.uint8)
        return five < torch.neg(five)

    x = torch.randn(26, device=device)
    assert torch.equal(compiled(compare)(x), compare(x))


def test_sizes_as_symbols_do_not_get_into_programs(device):
    def function(x):
        x[:, 20:30] = x[:, 20:30] + 1
        x[:, 2:11] = x[:, 1:10] + 2
        return x.sum()

    run = compiled(function, dynamic=None)
    with torch._dynamo.config.patch(assume_static_by_default=False):
        for count in (64, 32):
            tensors = [torch.arange(float(count), device=device).reshape(1, count) for _ in range(2)]
            agree(function(tensors[1]), run(tensors[0]))
            agree(tensors[1], tensors[0])


def test_constants_of_modules_are_fixed_where_sizes_are_symbols(device):
    model = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8, eps=1e-3), nn.GELU(), nn.BatchNorm1d(8)).to(device).eval()
    run = compiled(model, dynamic=True)
    with programs.observe() as found:
        for rows in (3, 5):
            x = torch.randn(rows, 8, device=device)
            agree(model(x), run(x))
    assert len(found) == 2 and "metalcore.layer_norm" in names(found)


def test_graphs_with_vmap(device):
    def function(x, y):
        return torch.vmap(lambda a, b: torch.softmax(a * b, -1) + b)(x, y).relu()

    x, y = (torch.randn(3, 4, 5, device=device) for _ in range(2))
    with programs.observe() as found:
        agree(function(x, y), compiled(function)(x, y))
    assert found[0].programs and any("vmap" in note for note in found[0].notes)


def test_kernels_whose_strides_are_not_those_of_their_fake_tensors(device):
    """A batch norm of a tensor that is not contiguous, which a view follows."""
    norm = nn.BatchNorm1d(16).to(device).eval()

    def function(x):
        return norm(x.mT).mT.reshape(-1, 16).relu()

    x = torch.randn(4, 5, 16, device=device)
    agree(function(x), compiled(function)(x))


def test_what_is_written_to_data(device):
    def function(x):
        x.data.add_(1)
        return x * 2

    x, other = (torch.ones(3, device=device, requires_grad=True) for _ in range(2))
    agree(function(x), compiled(function)(other))
    assert torch.equal(x, other)


class Kept(nn.Module):
    """It counts in a buffer, and writes what needs a gradient to a part of another."""

    def __init__(self):
        super().__init__()
        self.register_buffer("n", torch.zeros(1))
        self.register_buffer("cache", torch.zeros(4, 3))

    def forward(self, x):
        self.n += 1
        self.cache[1:3] = x[:2]
        return self.cache * self.n + x.sum()


class KeptWhole(Kept):
    def forward(self, x):
        self.n += 1
        self.cache.add_(x)
        return x.sum() + self.n, x * 2, self.n


@pytest.mark.parametrize("module", [Kept, KeptWhole])
@pytest.mark.parametrize("needs_gradient", [True, False])
def test_results_beside_buffers_that_are_written_to(device, module, needs_gradient):
    torch.manual_seed(0)
    x = torch.randn(4, 3).to(device).requires_grad_(needs_gradient)
    found = []
    for wrap in (lambda module: module, compiled):
        own = module().to(device)
        result = wrap(own)(x)
        first = result[0] if isinstance(result, tuple) else result
        gradient = torch.autograd.grad(first.square().sum(), x) if needs_gradient else ()
        found.append((result, own.n, own.cache, *gradient))
    agree(*found)
