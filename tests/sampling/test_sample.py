"""sample draws from the filtered distribution, which `distribution` computes by a sort."""

import pytest
import torch
from references import DTYPES, check_operator, tensor
from rows import tuned

import metalcore
from metalcore.sampling._sample import distribution

each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)

OPTIONS = {
    "all": {},
    "hot": {"temperature": 2.0},
    "cold": {"temperature": 0.5},
    "top_k": {"top_k": 5},
    "top_p": {"top_p": 0.7},
    "min_p": {"min_p": 0.2},
    "every": {"temperature": 1.5, "top_k": 12, "top_p": 0.9, "min_p": 0.05},
}


def exact(x, temperature=1.0, top_k=None, top_p=None, min_p=None):
    return distribution(x.double().cpu(), temperature, top_k or 0, top_p or 1.0, min_p or 0.0)


def fits(counts, probabilities):
    """Whether chi-square is below five standard deviations of what the distribution gives. A class without probability
    was never drawn."""
    drawn = counts.sum()
    likely = probabilities * drawn >= 5
    assert not counts[probabilities == 0].any()
    observed = torch.cat((counts[likely], counts[~likely].sum()[None])).double()
    expected = torch.cat((probabilities[likely], probabilities[~likely].sum()[None])) * drawn
    observed, expected = observed[expected > 0], expected[expected > 0]
    free = len(observed) - 1
    return ((observed - expected) ** 2 / expected).sum() <= free + 5 * (2 * free) ** 0.5 + 1e-9


@each_dtype
@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("family", ["baseline", "simulator"])
def test_distribution(device, dtype, name, family):
    for length in (3, 40):
        logits = tensor(length, dtype=dtype, scale=2)
        rows = 1000 if family == "baseline" else 4000
        with tuned(family):
            drawn = metalcore.sample(logits.to(device).expand(rows, length), **OPTIONS[name])
        assert drawn.shape == (rows,) and drawn.dtype == torch.int64
        assert fits(drawn.cpu().bincount(minlength=length), exact(logits, **OPTIONS[name]))


@each_dtype
def test_what_is_kept(device, dtype):
    """Each point of a fine grid through the distribution: no class that is left out, and all others as often as they
    are probable."""
    logits = torch.randn(200).mul(3).to(dtype)
    logits[150:] = logits[:50]  # there are equal ones
    points = (torch.arange(2000) + 0.5) / 2000
    x = logits.to(device).expand(2000, 200)
    for options in (
        (1.0, 1, 1.0, 0.0),
        (1.0, 17, 1.0, 0.0),
        (2.0, 0, 0.5, 0.0),
        (2.0, 150, 0.95, 0.0),
        (3.0, 0, 1.0, 0.1),
    ):
        drawn = torch.ops.metalcore.sample(x, points.to(device), *options).cpu()
        counts = drawn.bincount(minlength=200)
        wanted = distribution(logits.double(), *options) * 2000
        assert (counts - wanted).abs().max() <= 1.01


@each_dtype
@pytest.mark.parametrize("length", [256, 257, 700])
def test_top_p_of_long_rows(device, dtype, length):
    """A few of the largest have the mass of a peaked row, and not of a flat one. Some classes have no probability."""
    points = (torch.arange(2000) + 0.5) / 2000
    for spread, top_p, min_p in ((3.0, 0.9, 0.0), (3.0, 0.9, 0.2), (0.1, 0.9, 0.0)):
        logits = torch.randn(length).mul(spread).to(dtype)
        logits[20:40], logits[5] = -torch.inf, torch.nan
        x = logits.to(device).expand(2000, length)
        drawn = torch.ops.metalcore.sample(x, points.to(device), 1.0, 0, top_p, min_p).cpu()
        wanted = distribution(logits.double().nan_to_num(nan=-torch.inf), 1.0, 0, top_p, min_p) * 2000
        assert (drawn.bincount(minlength=length) - wanted).abs().max() <= 1.01


@each_dtype
@pytest.mark.parametrize("place", ["cpu", "device"])
def test_options_of_each_row(device, dtype, place):
    """Each point of a grid through each row's distribution, and the same numbers for all rows as tensors."""
    place = "cpu" if place == "cpu" else device
    logits = torch.randn(200).mul(3).to(dtype)
    points = (torch.arange(500) + 0.5) / 500
    options = torch.tensor([[1.0, 17, 1.0, 0.0], [2.0, 0, 0.5, 0.0], [3.0, 150, 0.95, 0.1], [0.0, 5, 1.0, 0.0]])
    each = options.repeat_interleave(500, 0)
    x, uniform = logits.to(place).expand(2000, 200), points.repeat(4).to(place)
    drawn = torch.ops.metalcore.sample(x, uniform, 1.0, 0, 1.0, 0.0, each.to(place)).cpu().view(4, 500)
    for row, own in zip(drawn, options):
        wanted = distribution(logits.double(), *own.tolist()[:1], int(own[1]), *own.tolist()[2:]) * 500
        assert (row.bincount(minlength=200) - wanted).abs().max() <= 1.01
        same = torch.ops.metalcore.sample(x[:500], uniform[:500], float(own[0]), int(own[1]), *own.tolist()[2:])
        assert torch.equal(same.cpu(), row)


def test_tensors_of_options(device):
    """They broadcast, and go beside numbers; some rows are greedy."""
    x = tensor(3, 4, 50, device=device)
    first = x.argmax(-1)
    assert torch.equal(metalcore.sample(x, torch.zeros(4, device=device)), first)
    assert torch.equal(metalcore.sample(x, top_k=torch.ones(3, 1, dtype=torch.int64, device=device)), first)
    assert torch.equal(metalcore.sample(x, 0.5, top_p=torch.full((3, 4), 1e-6, device=device)), first)
    assert torch.equal(metalcore.sample(x, min_p=torch.ones((), device=device), top_k=7), first)
    greedy = torch.tensor([0.0, 1.0, 1.0, 1.0], device=device)
    assert torch.equal(metalcore.sample(x, greedy, generator=torch.Generator(device).manual_seed(1))[:, 0], first[:, 0])
    counts = torch.arange(1, 5, device=device)
    drawn = torch.stack([metalcore.sample(x, 9.0, top_k=counts) for _ in range(40)])
    rank = x.argsort(-1, descending=True).argsort(-1)
    assert (rank.gather(-1, drawn.movedim(0, -1)) < counts.view(4, 1)).all()

    def draw(x, heat, counts):
        return metalcore.sample(x, heat, top_k=counts)

    compiled = torch.compile(draw, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(x, greedy * 0, counts), first)


@each_dtype
@pytest.mark.parametrize("length, parts", [(2047, 1), (2048, 2), (9001, 8)])
def test_rows_that_threadgroups_share(device, dtype, length, parts):
    """Each point of a grid, where a part has no class with a probability, and logits that are infinite."""
    logits = torch.randn(length).mul(4).to(dtype)
    logits[900:-50], logits[7] = -torch.inf, torch.nan
    points = (torch.arange(400) + 0.5) / 400
    with tuned("baseline"):
        plan = str(metalcore.explain("sample", logits[None].to(device)))
        assert (f"{parts} threadgroups share one" in plan) == (parts > 1)
        x = logits.to(device).expand(20, length)
        drawn = [torch.ops.metalcore.sample(x, each.to(device), 1.0, 0, 1.0, 0.0) for each in points.split(20)]
        wanted = distribution(logits.double().nan_to_num(nan=-torch.inf)) * 400
        assert (torch.cat(drawn).cpu().bincount(minlength=length) - wanted).abs().max() <= 1.01
        assert (metalcore.sample(x, 0.0).cpu() == wanted.argmax()).all()
        logits[20], logits[-2] = torch.inf, torch.inf
        x = logits.to(device).expand(20, length)
        assert metalcore.sample(x).unique().tolist() == [20, length - 2]
        assert metalcore.sample(x, 0.0).unique().tolist() == [20]
        assert not metalcore.sample(torch.full_like(x, -torch.inf)).any()


@pytest.mark.parametrize("family", ["baseline", "simulator"])
def test_long_rows(device, family):
    with tuned(family):
        x = tensor(2, 9001, device=device)
        x[0, 8000], x[1, 1] = 50.0, 50.0
        for options in ({}, {"top_k": 3}, {"top_p": 0.1}, {"temperature": 0.0}, {"top_k": 9000, "top_p": 0.999}):
            assert metalcore.sample(x, **options).tolist() == [8000, 1]


@each_dtype
def test_greedy(device, dtype):
    logits = torch.tensor([[1.0, 3.0, 3.0, -1.0], [-2.0, -2.0, -3.0, -4.0], [0.0, -0.0, 0.0, 0.0]]).to(dtype)
    assert metalcore.sample(logits.to(device), temperature=0.0).tolist() == [1, 0, 0]
    assert metalcore.sample(logits.to(device), temperature=0).tolist() == [1, 0, 0]
    assert metalcore.sample(logits.to(device), temperature=0, top_k=2**70).tolist() == [1, 0, 0]


@pytest.mark.parametrize("family", ["baseline", "simulator"])
def test_special_values(device, family):
    inf, nan = float("inf"), float("nan")
    rows = torch.tensor([[-inf, 0, -inf], [nan, -inf, 3.0], [inf, 5.0, 1.0], [-inf, -inf, -inf], [nan, nan, nan]])
    with tuned(family):
        for options in ({}, {"top_k": 2}, {"top_p": 0.5}, {"min_p": 0.5}, {"temperature": 0.0}):
            for _ in range(4):
                assert metalcore.sample(rows.to(device), **options).tolist() == [1, 2, 0, 0, 0]


def test_generator(device):
    logits = tensor(50, 100, device=device)

    def draw(seed):
        return metalcore.sample(logits, generator=torch.Generator(device).manual_seed(seed))

    assert torch.equal(draw(1), draw(1)) and not torch.equal(draw(1), draw(2))
    torch.manual_seed(3)
    first = metalcore.sample(logits)
    assert not torch.equal(first, metalcore.sample(logits))
    torch.manual_seed(3)
    assert torch.equal(first, metalcore.sample(logits))


def test_shapes(device):
    assert metalcore.sample(tensor(7, device=device)).shape == ()
    assert metalcore.sample(tensor(2, 3, 7, device=device)).shape == (2, 3)
    assert metalcore.sample(tensor(0, 7, device=device)).shape == (0,)
    wide = tensor(4, 30, device=device)[:, 3:10]
    assert torch.equal(metalcore.sample(wide, temperature=0.0), wide.argmax(-1))
    assert torch.equal(metalcore.sample(wide.t(), temperature=0.0), wide.t().argmax(-1))


def test_on_the_cpu():
    x = torch.randn(40).double()
    drawn = metalcore.sample(x.expand(4000, 40), temperature=1.5, top_k=9, top_p=0.9)
    assert fits(drawn.bincount(minlength=40), exact(x, 1.5, 9, 0.9))


def test_rows_of_minus_infinity_on_the_cpu():
    """As on a device, the first class is drawn."""
    for number in (float("-inf"), float("nan")):
        assert not metalcore.sample(torch.full((50, 5), number)).any()


@pytest.mark.parametrize("place", ["cpu", "device"])
def test_opcheck(device, place):
    place = "cpu" if place == "cpu" else device
    check_operator(
        torch.ops.metalcore.sample, tensor(3, 5, device=place), torch.rand(3, device=place), 1.0, 3, 0.9, 0.1
    )
    options = torch.tensor([[1.0, 3, 0.9, 0.1]] * 3, device=place)
    given = tensor(3, 5, device=place), torch.rand(3, device=place), 1.0, 0, 1.0, 0.0, options
    check_operator(torch.ops.metalcore.sample, *given)


@pytest.mark.parametrize(
    "options", [{"temperature": -1.0}, {"top_k": 0}, {"top_p": 0.0}, {"top_p": 1.5}, {"min_p": -0.1}, {"top_k": 2.0}]
)
def test_options_out_of_range(device, options):
    with pytest.raises(ValueError, match=f"sample: {next(iter(options))} must be "):
        metalcore.sample(tensor(3, 5, device=device), **options)


@pytest.mark.parametrize(
    "options, error, match",
    [
        ({"temperature": torch.tensor([1.0, -1.0, 1.0])}, ValueError, "temperature must be a number from 0 on, not"),
        ({"top_k": torch.tensor([1, 0, 1])}, ValueError, "top_k must be a positive int, not"),
        ({"top_p": torch.tensor([0.0])}, ValueError, r"top_p must be in \(0, 1\], not"),
        ({"min_p": torch.tensor(1.5)}, ValueError, r"min_p must be in \[0, 1\], not"),
        ({"top_k": torch.ones(3)}, TypeError, "top_k must not be of torch.float32"),
        ({"top_p": torch.ones(3, dtype=torch.int32)}, TypeError, "top_p must not be of torch.int32"),
        ({"min_p": torch.ones(2)}, RuntimeError, r"min_p of the shape \(2,\) does not broadcast to \(3,\)"),
    ],
)
def test_tensors_out_of_range(device, options, error, match):
    with pytest.raises(error, match=match):
        metalcore.sample(tensor(3, 5), **options)


def test_bad_input(device):
    with pytest.raises(RuntimeError, match="with at least one class"):
        metalcore.sample(tensor(3, 0, device=device))
    with pytest.raises(TypeError, match="sample: logits must be a tensor, not list"):
        metalcore.sample([1.0])
    with pytest.raises(TypeError, match="sample: generator must be a torch.Generator, not int"):
        metalcore.sample(tensor(3, 5, device=device), generator=1)
