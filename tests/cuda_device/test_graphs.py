"""Ops inside torch.cuda.graph. A replay reads other numbers from the same tensors."""

import pytest
import torch
from cases import WITHOUT_HOST

import metalcore

# The low-rank ops are left out: every replay draws other random numbers for them, with other roundings.
CAPTURED = {name: case for name, case in WITHOUT_HOST.items() if "lowrank" not in name}


def captured(run):
    """A graph of run(), and the tensors that run() returns. PyTorch requires the first run on a side stream."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = run()
    return graph, results


def check_replays(made, run):
    graph, results = captured(run)
    for seed in (1, 2):
        made.refill(seed)
        for result in results:
            result.detach().fill_(float("nan"))
        graph.replay()
        for value, wanted in zip(results, run()):
            assert torch.equal(value, wanted)


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=str)
@pytest.mark.parametrize("name", CAPTURED)
def test_forward_and_backward(name, dtype):
    made = CAPTURED[name].make("cuda", dtype)
    check_replays(made, made.run if made.case.backward_without_host else made.forward)


@pytest.mark.parametrize(
    "options", [{}, {"amsgrad": True}, {"fused": True}, {"weight_decay": 0.1, "maximize": True}], ids=str
)
def test_adamw(options):
    """A step before the capture and ten replays are eleven steps, since the count is in device memory."""
    shapes = [(33, 7), (5,), (2049,), *[(1 + i % 5,) for i in range(105)]]
    expected = [torch.nn.Parameter(torch.randn(shape)) for shape in shapes]
    params = [torch.nn.Parameter(e.detach().cuda()) for e in expected]

    def set_grads(seed):
        generator = torch.Generator().manual_seed(seed)
        for param, e in zip(params, expected):
            e.grad = torch.randn(e.shape, generator=generator)
            param.grad = e.grad.cuda() if param.grad is None else param.grad.copy_(e.grad)

    optimizer = metalcore.optim.AdamW(params, lr=1e-2, capturable=True, **options)
    reference = torch.optim.AdamW(expected, lr=1e-2, **{**options, "fused": None})
    set_grads(0)
    graph, _ = captured(optimizer.step)
    reference.step()
    for seed in range(1, 11):
        set_grads(seed)
        graph.replay()
        reference.step()
    for param, e in zip(params, expected):
        # Each of the eleven steps has the size lr and eight roundings.
        torch.testing.assert_close(
            param.detach().cpu(), e.detach(), rtol=1e-6, atol=11 * 8 * torch.finfo(torch.float32).eps * 1e-2
        )
        assert optimizer.state[param]["step"].item() == 11


def test_adamw_reads_its_learning_rate_at_every_replay():
    p = torch.nn.Parameter(torch.zeros(5, device="cuda"))
    p.grad = torch.ones_like(p)
    lr = torch.tensor(0.0, device="cuda")
    optimizer = metalcore.optim.AdamW([p], lr=lr, weight_decay=0.0, eps=0.0, capturable=True)
    graph, _ = captured(optimizer.step)
    assert torch.equal(p.detach().cpu(), torch.zeros(5))
    lr.fill_(0.5)
    graph.replay()
    torch.testing.assert_close(p.detach().cpu(), torch.full((5,), -0.5))


def test_replays_round_at_random_as_steps_do():
    """The step is in device memory, so that each replay has the random numbers of its own step."""

    def parameters():
        p = torch.nn.Parameter(torch.ones(5000, device="cuda", dtype=torch.bfloat16))
        p.grad = torch.ones_like(p)
        options = {"stochastic_rounding": 3, "state_dtype": torch.bfloat16, "capturable": True}
        return p, metalcore.optim.AdamW([p], lr=1e-3, weight_decay=0.0, **options)

    p, optimizer = parameters()
    graph, _ = captured(optimizer.step)
    expected, plain = parameters()
    plain.step()
    for _ in range(4):
        graph.replay()
        before = expected.detach().clone()
        plain.step()
        assert torch.equal(p, expected) and not torch.equal(expected, before)
    assert len(p.detach().unique()) > 2


@pytest.mark.parametrize("optimizer", (metalcore.optim.SGD, metalcore.optim.Lion))
def test_other_optimizers(optimizer):
    """A learning rate in device memory is read at every replay, and so are gradients, which are clipped."""
    pair = [torch.nn.Parameter(torch.linspace(-1, 1, 3001, device="cuda")) for _ in range(2)]
    rates = [torch.tensor(0.1, device="cuda") for _ in pair]
    made = [optimizer([p], lr=lr) for p, lr in zip(pair, rates)]
    for p in pair:
        p.grad = torch.empty_like(p)

    def step(which):
        metalcore.optim.clip_grad_norm_(pair[which], 0.5)
        made[which].step()

    def set_values(seed):
        for p, lr in zip(pair, rates):
            p.grad.copy_(torch.randn(3001, generator=torch.Generator().manual_seed(seed)))
            lr.fill_(0.1 * seed)

    set_values(1)
    graph, _ = captured(lambda: step(0))
    step(1)
    for seed in (2, 3):
        set_values(seed)
        graph.replay()
        step(1)
        assert torch.equal(*pair)


def test_a_step_that_the_host_counts_refuses_to_be_captured():
    p = torch.nn.Parameter(torch.ones(8, 8, device="cuda"))
    p.grad = torch.eye(8, device="cuda")
    for optimizer in (metalcore.optim.AdamW([p]), metalcore.optim.SOAP([p])):
        optimizer.step()
        before = p.detach().clone()
        refused = pytest.raises(RuntimeError, match="capturable is False|counts on the host")
        with refused, torch.cuda.graph(torch.cuda.CUDAGraph()):
            optimizer.step()
        assert torch.equal(p, before)


def test_a_captured_model_trains():
    """A graph of forward, backward and step trains as the same steps without a graph do."""

    def steps(in_graph):
        torch.manual_seed(0)
        model = torch.nn.Sequential(
            torch.nn.Linear(16, 64),
            metalcore.nn.SiLU(),
            metalcore.nn.RMSNorm(64),
            torch.nn.Linear(64, 8),
            metalcore.nn.LogSoftmax(-1),
        ).cuda()
        optimizer = metalcore.optim.AdamW(model.parameters(), lr=1e-2, capturable=True)
        x, target = torch.randn(32, 16).cuda(), torch.randint(0, 8, (32,)).cuda()

        def step():
            optimizer.zero_grad()
            loss = torch.nn.functional.nll_loss(model(x), target)
            loss.backward()
            optimizer.step()
            return [loss]

        graph, [loss] = captured(step) if in_graph else (None, step())
        losses = []
        for _ in range(9):
            if in_graph:
                graph.replay()
            else:
                [loss] = step()
            losses.append(loss.item())
        return losses

    found, expected = steps(True), steps(False)
    assert found[-1] < found[0]
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=0)
