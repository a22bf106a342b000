"""What a program checks, plans, keeps and reports."""

import copy
import itertools
import pickle
import random

import pytest
import torch
import torch.nn.functional as F
from agreement import agree, operators
from nets import ResNet, perturb
from torch import nn

import metalcore
from metalcore import programs


class Cache(nn.Module):
    """One step of a decoder with a static cache, which it writes to."""

    def __init__(self, size=8, most=6):
        super().__init__()
        self.project = nn.Linear(size, size)
        self.register_buffer("keys", torch.zeros(1, 1, most, size))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))

    def forward(self, x, place):
        k = self.project(x).view(1, 1, 1, -1)
        self.keys.index_copy_(2, place, k)
        self.count += 1
        seen = torch.arange(self.keys.shape[2], device=x.device) <= place
        return F.scaled_dot_product_attention(k, self.keys, self.keys, attn_mask=seen[None, None, None])


def test_static_values_are_written_to(device):
    torch.manual_seed(0)
    module = Cache().to(device)
    args = torch.randn(1, 8).to(device), torch.tensor([0]).to(device)
    program = metalcore.compile(module, args)
    kinds = {value.kind for value in program.report().plan.values}
    assert kinds == {"input", "parameter", "static", "temporary", "view", "output"}
    state = {name: t.clone() for name, t in module.state_dict().items()}
    results = []
    for call in (program, module):
        module.load_state_dict(state)
        steps = [call(torch.full((1, 8), 0.1 * i, device=device), torch.tensor([i]).to(device)) for i in range(4)]
        results.append([*steps, module.keys.clone(), module.count.clone()])
    agree(*results)
    assert results[0][-1] == 4


class Counting(nn.Module):
    """It keeps two numbers, which it sets, reads and adds to."""

    def __init__(self):
        super().__init__()
        self.register_buffer("first", torch.zeros((), dtype=torch.int64))
        self.register_buffer("second", torch.zeros((), dtype=torch.int64))
        self.register_buffer("rows", torch.zeros(4, 3))

    def forward(self, x, place):
        self.first.copy_(place)
        before = x + self.second
        self.second.copy_(place)
        self.rows[1:2] = x
        after = before * self.first + self.rows.sum(0)
        self.first.add_(1)
        self.second.add_(1).mul_(2)
        return after + self.first - self.second


def test_what_is_written_as_a_whole_is_written_once(device):
    """At the end, by one operation. What happens in between sees each new value."""
    module, x, place = Counting().to(device), torch.randn(1, 3).to(device), torch.tensor(2).to(device)
    program = metalcore.compile(module, (x, place))
    names = operators(program)
    assert names[-1] == "_foreach_copy_" and names.count("_foreach_copy_") == 1
    assert not {"add_", "mul_"} & set(names) and names.count("copy_") == 1  # that of one row
    assert {v.kind for v in program.report().plan.values if v.name in ("first", "second")} <= {"static"}
    state = {name: t.clone() for name, t in module.state_dict().items()}
    results = []
    for call in (program, module):
        module.load_state_dict(state)
        steps = [call(x * (i + 1), place + i) for i in range(3)]
        results.append([*steps, *(t.clone() for t in module.buffers())])
    agree(*results)
    assert module.first == 5 and module.second == 10


def test_a_written_value_that_is_returned_stays_where_it_is(device):
    class Returning(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("count", torch.zeros(()))

        def forward(self, x):
            self.count.add_(1)
            return x * self.count, self.count

    module, x = Returning().to(device), torch.randn(3).to(device)
    program = metalcore.compile(module, (x,))
    y, count = program(x)
    agree(x, y)
    assert count == 1 and module.count == 1


def test_equal_operations_on_both_sides_of_a_write_run_once(device):
    """Except for those that read what is written."""

    class Writing(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("rows", torch.zeros(4, 3))

        def forward(self, x):
            first = x.cumsum(0).sum() + self.rows.cumsum(0).sum()
            self.rows[1:2] = x[:1]
            return first + x.cumsum(0).sum() + self.rows.cumsum(0).sum()

    module, x = Writing().to(device), torch.randn(4, 3).to(device)
    program = metalcore.compile(module, (x,), fusions=[])
    assert operators(program).count("cumsum") == 3
    expected = module(x)
    module.rows.zero_()
    agree(expected, program(x))


class Tangled(nn.Module):
    """Values of many sizes that are used soon, late and often."""

    def forward(self, x):
        chosen = random.Random(0)
        values = [x]
        for _ in range(30):
            a, b = chosen.choice(values), chosen.choice(values)
            rows = min(len(a), len(b))
            values.append(torch.cumsum(torch.cat([a[:rows], b[-rows:]]) * 0.25, 0)[: 3 + 2 * len(values) % 17])
        return torch.cat(values[-3:]), values[4].sum(1)


def test_values_that_live_at_once_do_not_share_memory(device):
    x = torch.randn(16, 8).to(device)
    program = metalcore.compile(Tangled(), (x,), fusions=[])
    plan = program.report().plan
    placed = [v for v in plan.values if v.offset is not None]
    assert len(placed) > 20 and plan.arena_bytes < sum(v.nbytes for v in placed) / 2
    agree(Tangled()(x), program(x))
    for a, b in itertools.combinations(placed, 2):
        alive = a.first <= b.last and b.first <= a.last
        apart = a.offset + a.nbytes <= b.offset or b.offset + b.nbytes <= a.offset
        assert apart or not alive
    assert all(v.offset >= 0 and v.offset + v.nbytes <= plan.arena_bytes for v in placed)


def test_what_follows_a_pattern_is_planned_by_its_strides(device):
    """The operator in the place of a pattern may have other strides, and has other memory, of which views are taken."""

    class Attention(nn.Module):
        def forward(self, x):
            return F.scaled_dot_product_attention(x, x, x).transpose(1, 2).reshape(1, 16, 16).cumsum(1)

    x = torch.randn(1, 16, 2, 8).to(device).transpose(1, 2)
    program = metalcore.compile(Attention(), (x,), fusions=["attention"])
    planned = {value.name: value for value in program.report().plan.values}
    assert planned["transpose"].kind == "view" and planned["transpose"].strides == (256, 16, 8, 1)
    agree(Attention()(x), program(x))


def test_an_arena_is_reused(device):
    class Chain(nn.Module):
        def forward(self, x):
            for _ in range(6):
                x = torch.cumsum(x, 1).mm(x)
            return x

    x = torch.eye(32).to(device) * 0.1
    program = metalcore.compile(Chain(), (x,))
    one = 32 * 32 * 4
    assert program.report().plan.arena_bytes == 3 * one  # of eleven values
    assert program.report().plan.peak_bytes == 3 * one
    agree(Chain()(x), program(x))
    first = program(x)
    program(x + 1)
    agree(Chain()(x), first)  # results are not in the arena
    plain = metalcore.compile(Chain(), (x,), memory="allocator")
    assert plain.report().plan.arena_bytes == 0
    agree(first, plain(x))


class Late(nn.Module):
    """What `made` gives is read by a view at the end, after other values that could take its memory."""

    def __init__(self, made):
        super().__init__()
        self.made = made

    def forward(self, x):
        late, y = self.made(x)
        for _ in range(4):
            y = y.mm(x).mm(x)
        return y.mm(late)


@pytest.mark.parametrize(
    "made",
    [
        lambda x: (x.mm(x).clone().t(), x),
        lambda x: ((x.mm(x) * 1).chunk(1, 1)[0], x),
        lambda x: (F.dropout(x.mm(x), training=False).view(6, 6).t(), x),
        lambda x: (lambda y: (x.mm(x).t(), y))(x.mm(x).mm(x)),
        pytest.param(lambda x: (torch.special.ndtri(x.sigmoid()).t(), x), marks=pytest.mark.only_on("simulator")),
    ],
    ids=["clone", "times one", "dropout", "repeated", "CPU"],
)
def test_memory_is_kept_for_views_of_what_took_another_place(device, made):
    x = torch.randn(6, 6, generator=torch.Generator().manual_seed(0)).to(device)
    model = Late(made)
    agree(model(x.cpu()), metalcore.compile(model, (x,))(x).cpu(), 1e-4)


@pytest.mark.parametrize(
    "results",
    [
        lambda x, w: (x.t().clone(), x + 1),
        lambda x, w: (lambda y: (y, y.clone()))(x.sin()),
        lambda x, w: (lambda y: (y, (y * 1).view(2, 8)))(x.sin()),
        lambda x, w: (x.sin().view(2, 8), x.sin().view(2, 8)),
        lambda x, w: (x + 1, (w * 2).t()),
        lambda x, w: (x + 1, torch.arange(4, device=x.device)),
    ],
    ids=["copy of a view", "copy", "view of a copy", "repeated", "of parameters alone", "constant"],
)
def test_each_result_has_memory_of_its_own(device, results):
    """Somebody may write to a result: that changes no argument, no other result, and none of a later call."""

    class Results(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.rand(4, 4))

        def forward(self, x):
            return results(x, self.w)

    model = Results().to(device).requires_grad_(False)
    x = torch.randn(4, 4).to(device)
    torch._dynamo.reset()
    for call in (metalcore.compile(model, (x,)), torch.compile(model, backend="metalcore")):
        for _ in range(2):
            expected, found, before = model(x), call(x), x.clone()
            agree(expected, found)
            found[0].zero_()
            agree(expected[1], found[1])
            found[1].zero_()
            agree(before, x)


def test_shapes_that_are_changed_in_place(device):
    class Unsqueeze(nn.Module):
        def forward(self, x):
            y = x + 1
            same = y.squeeze()  # a tensor of its own, with y's memory
            same.unsqueeze_(0)
            return y * 2, same * 3

    class OfArgument(nn.Module):
        def forward(self, x):
            return x.t_() * 2

    x = torch.randn(7).to(device)
    agree(Unsqueeze()(x), metalcore.compile(Unsqueeze(), (x,))(x))
    with pytest.raises(programs.NotTraceable, match="changes the shape of an argument"):
        metalcore.compile(OfArgument(), (torch.randn(3, 4).to(device),))
    torch._dynamo.reset()
    call = torch.compile(lambda x: x.squeeze().unsqueeze_(0) * 2, backend="metalcore")
    agree((x * 2)[None], call(x))
    assert x.shape == (7,)


@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy, pickle.dumps])
def test_a_program_is_not_copied(device, duplicate):
    x = torch.randn(4).to(device)
    with pytest.raises(TypeError, match="save"):
        duplicate(metalcore.compile(nn.ReLU(), (x,)))


def test_writes_whose_variant_takes_other_types(device):
    """aten.pow.Scalar is a number to the power of a tensor, and aten.pow_.Scalar the other way round."""

    class Square(nn.Module):
        def forward(self, x):
            y = x + 1
            y **= 2
            return y.sum()

    x = torch.randn(4, 8).to(device)
    agree(Square()(x), metalcore.compile(Square(), (x,))(x))


@pytest.mark.only_on("simulator")  # it reads the table of the simulated device
def test_operators_without_a_kernel_run_on_the_cpu(device):
    class Lacking(nn.Module):
        def forward(self, x):
            values, vectors = torch.linalg.eigh((x + x.mT) * 0.5)
            return (vectors.abs() * values).sum(0) + torch.special.ndtri(x[0].sigmoid())

    x = torch.randn(4, 4).to(device)
    program = metalcore.compile(Lacking(), (x,))
    report = program.report()
    assert {s.operator for s in report.steps if s.place == "cpu"} >= {"linalg_eigh"}
    assert report.count("transfer") >= 3 and report.nbytes("transfer") > 0
    assert "transfers between CPU and device" in str(report)
    agree(Lacking()(x.cpu()), program(x).cpu(), 1e-4)


def test_what_does_nothing_is_left_out(device):
    class Nothing(nn.Module):
        def forward(self, x):
            y = F.dropout(x.to(torch.float32).contiguous().view(4, 8).expand(4, 8), 0.5, training=False)
            unused = y.exp()  # noqa: F841
            return (y * 1).sin().cumsum(1) @ y.sin().cumsum(1).mT, y.sum()

    x = torch.randn(4, 8).to(device)
    program = metalcore.compile(Nothing(), (x,))
    assert sorted(operators(program)) == ["mT", "matmul", "sin+cumsum", "sum"]
    agree(Nothing()(x), program(x))


def test_random_numbers_are_not_shared(device):
    class Two(nn.Module):
        def forward(self, x):
            return torch.rand_like(x) - torch.rand_like(x)

    x = torch.zeros(64).to(device)
    assert metalcore.compile(Two(), (x,))(x).abs().max() > 0.1


def test_constants_are_computed_once(device):
    class Table(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(8, 8))

        def forward(self, x):
            angles = torch.arange(8, device=x.device)[:, None] * torch.linspace(0, 1, 8, device=x.device)
            return x @ (self.weight.mT * angles.cos())

    torch.manual_seed(0)
    module, x = Table().to(device), torch.randn(3, 8).to(device)
    program = metalcore.compile(module, (x,))
    assert operators(program) == ["matmul"]
    agree(module(x), program(x))


def test_results_have_the_structure_of_the_modules(device):
    class Structured(nn.Module):
        def forward(self, x, *, scale):
            return {"sum": x["a"] + x["b"], "list": [x["a"] * scale, None, 3], "same": x["b"]}

    x = {"a": torch.randn(3).to(device), "b": torch.randn(3).to(device)}
    scale = torch.tensor(2.0).to(device)
    found = metalcore.compile(Structured(), (x,), {"scale": scale})(x, scale=scale)
    expected = Structured()(x, scale=scale)
    assert found.keys() == expected.keys() and found["list"][1:] == [None, 3]
    agree(expected, found)


def test_descriptions(device):
    module, x = perturb(ResNet()).to(device), torch.randn(1, 3, 16, 16).to(device)
    program = metalcore.compile(module, (x,))
    text, report = program.describe(), program.report()
    for part in ("operations:", "values:", "conv2d", "parameter", "arena at", "fused: conv_batch_norm"):
        assert part in text
    assert report.nbytes("torch") > 0 and report.plan.parameter_bytes > 0


def test_what_cannot_be_a_program(device):
    class Grows(nn.Module):
        def forward(self, x):
            return x + 1

    rows = torch.export.Dim("rows", min=2, max=9)
    exported = torch.export.export(Grows(), (torch.randn(4, 3).to(device),), dynamic_shapes=({0: rows},))
    with pytest.raises(programs.NotTraceable, match="dynamic shapes"):
        metalcore.compile(exported)
    norm = nn.Sequential(nn.ReLU(), nn.BatchNorm1d(3, momentum=None)).to(device)
    x = torch.randn(4, 3).to(device)
    with pytest.raises(
        programs.NotTraceable, match=r"1 is a BatchNorm1d in training with momentum=None.*call eval\(\)"
    ):
        metalcore.compile(norm, (x,))
    agree(norm.eval()(x), metalcore.compile(norm, (x,))(x))
