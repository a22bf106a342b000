"""Operators, losses and optimizers on DTensors, against the same on one device."""

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode

import metalcore


def _mesh():
    return init_device_mesh("mps", (dist.get_world_size(),))


def _placement(place):
    return Replicate() if place is None else Shard(place)


def _both(call, tensors, placements):
    """Results and gradients on one device and on shards: their largest difference, and the results' placement."""
    mesh = _mesh()
    ours = [tensor.clone().requires_grad_() for tensor in tensors]
    shards = [
        distribute_tensor(tensor, mesh, [_placement(place)]).requires_grad_()
        for tensor, place in zip(tensors, placements)
    ]
    found, sharded = call(*ours), call(*shards)
    placements = str(sharded.placements)
    sharded = sharded.redistribute(mesh, [Replicate()])
    (found * found).sum().backward()
    (sharded * sharded).sum().backward()
    pairs = [(found, sharded), *((a.grad, b.grad) for a, b in zip(ours, shards))]
    return max(float((a - b.full_tensor()).detach().abs().max()) for a, b in pairs), placements


def cross_entropy(place, reduction, **options):
    target = torch.tensor([1, 10, -100, 5, 0, 7], device="mps")
    weight = torch.rand(11, device="mps")
    call = lambda x: metalcore.cross_entropy(x, target, weight, reduction=reduction, **options)  # noqa: E731
    return _both(call, [torch.randn(6, 11, device="mps")], [place])


def fused_linear_cross_entropy(places, reduction):
    target = torch.randint(0, 11, (2, 6), device="mps")

    def call(hidden, weight, bias):
        return metalcore.fused_linear_cross_entropy(hidden, weight, target, bias, reduction=reduction, chunk=5)

    return _both(call, [torch.randn(s, device="mps") for s in ((2, 6, 8), (11, 8), (11,))], places)


def embedding(place):
    indices = torch.randint(0, 11, (4, 5), device="mps")
    mesh = _mesh()

    def call(weight):
        chosen = indices
        if hasattr(weight, "placements"):
            chosen = distribute_tensor(indices.clone(), mesh, [Replicate()])
        return metalcore.embedding(chosen, weight, 3)

    return _both(call, [torch.randn(11, 6, device="mps")], [place])


def attention(place):
    call = lambda q, k, v: metalcore.scaled_dot_product_attention(q, k, v, is_causal=True)  # noqa: E731
    return _both(call, [torch.randn(2, 4, 8, 16, device="mps") for _ in range(3)], [place] * 3)


def flex_attention(place):
    """The score and the mask depend on the batch item and the head."""
    from torch.nn.attention.flex_attention import create_block_mask

    lengths, slopes = torch.tensor([20, 40, 9], device="mps"), torch.rand(4, device="mps")
    seen = lambda b, h, q, k: (k < lengths[b]) & (q + 9 * h >= k)  # noqa: E731
    mask = create_block_mask(seen, 3, 4, 40, 40, device="mps", BLOCK_SIZE=16)

    def call(q, k, v):
        return metalcore.flex_attention(
            q, k, v, lambda s, b, h, i, j: s - slopes[h] * (i - j) * b, mask, enable_gqa=True
        )

    shapes = (3, 4, 40, 16), (3, 2, 40, 16), (3, 2, 40, 16)  # ranks have different numbers of batch items
    return _both(call, [torch.randn(shape, device="mps") for shape in shapes], [place] * 3)


def norm(place):
    call = lambda x, w: metalcore.rms_norm(x, (16,), w)  # noqa: E731
    return _both(call, [torch.randn(4, 6, 16, device="mps"), torch.randn(16, device="mps")], [place, None])


def convolution(place, weight):
    call = lambda x, w, b: metalcore.conv2d(x, w, b, padding=1)  # noqa: E731
    tensors = [torch.randn(shape, device="mps") / 4 for shape in ((3, 4, 6, 7), (5, 4, 3, 3), (5,))]
    return _both(call, tensors, [place, weight, None])


def jsd(place):
    teacher = [torch.randn(shape, device="mps") for shape in ((6, 8), (11, 8))]

    def call(hidden, weight):
        others = teacher
        if hasattr(weight, "placements"):
            others = [distribute_tensor(tensor.clone(), _mesh(), [Replicate()]) for tensor in teacher]
        return metalcore.fused_linear_jsd(hidden, weight, *others)

    return _both(call, [torch.randn(shape, device="mps") for shape in ((6, 8), (11, 8))], [place, None])


def bags(place):
    indices = torch.randint(0, 11, (4, 5), device="mps")

    def call(weight):
        chosen = indices
        if hasattr(weight, "placements"):
            chosen = distribute_tensor(indices.clone(), _mesh(), [Replicate()])
        return metalcore.embedding_bag(chosen, weight, mode="sum")

    return _both(call, [torch.randn(11, 6, device="mps")], [place])


def renormalized(place):
    """The largest difference of probabilities in shards from those on one device."""
    probs = torch.rand(5, 11, device="mps")
    shards = distribute_tensor(probs, _mesh(), [_placement(place)])
    calls = (
        lambda x: metalcore.top_k_renorm_probs(x, 3),
        lambda x: metalcore.top_p_renorm_probs(x, 0.5),
        lambda x: metalcore.top_k_mask_logits(x, 3).exp(),
    )
    return max(float((call(probs) - call(shards).full_tensor()).abs().max()) for call in calls), None


def linear_algebra():
    """Which functions communicate, or have other bits than on one device, for batches in shards."""
    mesh, found = _mesh(), []
    A = torch.randn(6, 12, 12, device="mps") + 4 * torch.eye(12, device="mps")
    S = A @ A.mT
    for name, matrices in (
        *((name, A) for name in ("qr", "svd", "svdvals", "lu", "det", "slogdet", "pinv", "polar", "geqrf")),
        *((name, S) for name in ("eigh", "eigvalsh", "inv_ex", "cholesky_ex", "matrix_rank")),
    ):
        function = getattr(metalcore, name)
        shards = distribute_tensor(matrices, mesh, [Shard(0)])
        with CommDebugMode() as communication:
            sharded = function(shards)
        whole = function(matrices)
        single = isinstance(whole, torch.Tensor)
        for ours, theirs in zip([whole] if single else whole, [sharded] if single else sharded):
            if not torch.equal(ours, theirs.full_tensor()) or communication.get_total_counts():
                found.append(name)
    return found


def refused():
    """Every rank raises where one of them has a singular matrix, or a number that packed weights cannot hold."""
    A = torch.eye(5, device="mps").repeat(4, 1, 1)
    A[3] = 0
    weight = torch.randn(4, 256, device="mps")
    weight[3, 7] = torch.inf
    messages = []
    for call, tensor in ((metalcore.inv, A), (lambda weight: metalcore.quantize(weight, "Q4_K"), weight)):
        try:
            call(distribute_tensor(tensor, _mesh(), [Shard(0)]))
        except (torch.linalg.LinAlgError, ValueError) as error:
            messages.append(str(error))
    return messages


def optimizer(name, place, **options):
    """The largest difference of parameters after three steps, and of the gradients' norms."""
    mesh, shapes = _mesh(), [(12, 12), (7, 9), (24, 12), (12, 12)] + ([] if name == "Muon" else [(5,)])
    values = [torch.randn(shape, device="mps") for shape in shapes]
    places = [[Shard(min(place, len(shape) - 1))] for shape in shapes]
    ours = [torch.nn.Parameter(value.clone()) for value in values]
    shards = [torch.nn.Parameter(distribute_tensor(value, mesh, p)) for value, p in zip(values, places)]
    made = [getattr(metalcore.optim, name)(params, lr=1e-2, **options) for params in (ours, shards)]
    for _ in range(3):
        for p, q, placed in zip(ours, shards, places):
            p.grad = torch.randn_like(p)
            q.grad = distribute_tensor(p.grad, mesh, placed)
        norms = [metalcore.optim.clip_grad_norm_(params, 1e6) for params in (ours, shards)]
        for each in made:
            each.step()
    differences = [float((p - q.full_tensor()).detach().abs().max()) for p, q in zip(ours, shards)]
    return max(*differences, float((norms[0] / norms[1] - 1).abs()))


def messages():
    """Point-to-point messages of mps tensors, both sides receiving first."""
    rank, x, y = dist.get_rank(), torch.full((3,), 1.0 + dist.get_rank(), device="mps"), torch.zeros(3, device="mps")
    operations = [dist.P2POp(dist.irecv, y, 1 - rank), dist.P2POp(dist.isend, x, 1 - rank)]
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    gathered = [torch.empty_like(x) for _ in range(2)]
    dist.all_gather(gathered, x)
    halves = torch.zeros(3, device="mps")
    dist.reduce_scatter_tensor(halves, torch.cat(gathered))
    exchanged = torch.zeros(2, device="mps")
    dist.all_to_all_single(exchanged, torch.arange(2.0, device="mps") + 10 * rank)
    return y.tolist(), [each.tolist() for each in gathered], halves.tolist(), exchanged.tolist()
