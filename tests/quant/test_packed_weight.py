"""`weight` of packed layers: what code that expects torch.nn.Linear and torch.nn.Embedding asks of it."""

import copy
import io

import pytest
import torch
from torch.nn.functional import embedding, linear

import metalcore
from metalcore import dequantize, nn
from metalcore.quant import quantize
from metalcore.quant._layers import TiedLinear
from metalcore.quant._packed_weight import PackedWeight

pytest.importorskip("gguf")


@pytest.fixture
def layer(device):
    torch.manual_seed(0)
    return nn.QuantizedLinear.from_linear(torch.nn.Linear(256, 40), "Q4_K").to(device)


def numbers(layer):
    return dequantize(layer.packed, layer.type, dtype=layer.dtype)


def test_it_is_a_layer_for_code_that_looks_for_one(layer):
    weight = layer.weight
    assert isinstance(layer, torch.nn.Linear) and isinstance(weight, torch.Tensor)
    assert (weight.shape, weight.dtype, weight.device) == ((40, 256), torch.float32, layer.packed.device)
    assert (weight.numel(), weight.element_size(), weight.dim(), weight.requires_grad) == (10240, 4, 2, False)
    assert [name for name, _ in layer.named_parameters()] == ["bias"]
    assert "type=Q4_K" in repr(weight)
    rows = nn.QuantizedEmbedding.from_embedding(torch.nn.Embedding(9, 64), "Q8_0")
    assert isinstance(rows, torch.nn.Embedding) and rows.padding_idx is None
    dense = layer.to_linear()
    assert type(dense) is torch.nn.Linear and dense.bias is layer.bias and torch.equal(dense.weight, numbers(layer))
    assert torch.equal(rows.to_embedding().weight, numbers(rows))


INDICES = {
    "row": 3,
    "last": -1,
    "rows": slice(2, 9),
    "step": slice(None, None, 3),
    "block": (slice(2, 9), slice(4, 7)),
    "element": (3, 4),
    "list": [1, 2],
    "flags": [True, False] * 20,
    "tensor": torch.tensor([3, 1]),
    "pairs": ([1, 2], [3, 4]),
    "column": (slice(None), 3),
    "columns": (..., 4),
    "new": None,
    "all": ...,
}


@pytest.mark.parametrize("name", INDICES)
def test_rows(layer, name):
    index = INDICES[name]
    index = index.to(layer.packed.device) if isinstance(index, torch.Tensor) else index
    found = layer.weight[index]
    assert torch.equal(found, numbers(layer)[index])


def test_an_index_unpacks_its_rows_alone(layer, monkeypatch):
    seen = []
    unpack = PackedWeight.numbers
    monkeypatch.setattr(PackedWeight, "numbers", lambda self, index=...: seen.append(index) or unpack(self, index))
    assert layer.weight[3:5].shape == (2, 256)
    assert seen == [slice(3, 5)]


def test_operators_read_the_numbers(layer, device):
    weight, plain = layer.weight, numbers(layer)
    for ask in (
        *(lambda w: w.T, lambda w: w.t(), lambda w: w.view(-1), lambda w: w.to(torch.bfloat16), lambda w: w.half()),
        *(lambda w: w.to("cpu"), lambda w: w.detach().clone(), lambda w: w.data + 1, lambda w: torch.cat([w, w])),
        *(lambda w: w.norm(dim=1), lambda w: w[w > 0], lambda w: copy.deepcopy(w), lambda w: torch.zeros_like(w)),
        *(lambda w: torch.tensor(w.tolist()), lambda w: torch.from_numpy(w.cpu().numpy())),
    ):
        found = ask(weight)
        assert torch.equal(found, ask(plain)) and type(found) is torch.Tensor
    indices = torch.tensor([[3, 39], [0, 3]], device=device)
    assert torch.equal(embedding(indices, weight), plain[indices])


def test_products(layer, device):
    """One product is of 256 terms, and its gradient of 40: their order may differ."""
    plain, x = numbers(layer), torch.randn(12, 256, device=device)
    labels = torch.arange(12, device=device)
    bound = 256 * torch.finfo(torch.float32).eps
    for ask in (
        lambda x, w: linear(x, w, layer.bias),
        lambda x, w: x @ w.T,
        lambda x, w: metalcore.linear(x, w),
        lambda x, w: metalcore.fused_linear_cross_entropy(x, w, labels),
    ):
        found, expected = (x.clone().requires_grad_() for _ in range(2))
        results = ask(found, layer.weight), ask(expected, plain)
        for result in results:
            result.square().sum().backward()
        for ours, theirs in zip((results[0], found.grad), (results[1], expected.grad)):
            assert (ours - theirs).norm() <= 2 * bound * theirs.norm()


class Chunks(torch.autograd.Function):
    """The product, in blocks of rows of the weight, as losses in chunks compute it."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(weight)
        return torch.cat([x @ weight[begin : begin + 16].T for begin in range(0, len(weight), 16)], 1)

    @staticmethod
    def backward(ctx, gradient):
        (weight,) = ctx.saved_tensors
        return sum(gradient[:, begin : begin + 16] @ weight[begin : begin + 16] for begin in range(0, 40, 16)), None


@pytest.mark.parametrize("inference", [False, True])
def test_functions_save_it(layer, device, inference):
    """Also where the weight was read in inference mode before, whose tensors cannot be saved."""
    with torch.inference_mode(inference):
        assert layer.weight.shape == (40, 256)
    x = torch.randn(12, 256, device=device, requires_grad=True)
    found = Chunks.apply(x, layer.weight)
    found.sum().backward()
    bound = 256 * torch.finfo(torch.float32).eps
    for ours, theirs in ((found, x @ numbers(layer).T), (x.grad, numbers(layer).sum(0).expand(12, 256))):
        assert (ours - theirs).norm() <= bound * theirs.norm()


@pytest.mark.filterwarnings("ignore:Numbers were packed")
def test_what_is_written_is_packed(layer):
    before, packed = numbers(layer), layer.packed
    change = torch.randn(40, 256).to(before.device) / 50
    layer.weight.data += change
    expected = quantize(before + change, "Q4_K")
    assert torch.equal(layer.packed, expected) and layer.packed is not packed
    error = (numbers(layer) - before - change).norm()
    assert layer.packing_error.of_weight == pytest.approx((error / (before + change).norm()).item(), rel=1e-5)
    assert layer.packing_error.of_change == pytest.approx((error / change.norm()).item(), rel=1e-5)

    layer.weight.data = numbers(layer)  # which changes nothing
    assert torch.equal(layer.packed, expected) and layer.packing_error == (0, 0)
    layer.weight.data[3] = 1.0
    assert (layer.packed != expected).any(1).nonzero().flatten().tolist() == [3]
    # 1 is a multiple of a scale that float16 rounds.
    torch.testing.assert_close(
        layer.weight[3], torch.ones_like(before[3]), rtol=torch.finfo(torch.float16).eps / 2, atol=0
    )
    torch.nn.init.zeros_(layer.weight)
    assert not layer.weight.any()
    layer.weight.data.copy_(before)
    assert torch.equal(layer.packed, quantize(before, "Q4_K"))
    layer.weight.data = torch.cat([before, before[:2]])  # as resize_token_embeddings does
    assert layer.weight.shape == (42, 256)


def test_errors(layer):
    weight, plain = layer.weight, numbers(layer)
    for ask in (lambda: weight.requires_grad_(), lambda: torch.nn.Parameter(weight)):
        with pytest.raises(
            RuntimeError, match="a packed weight is not trained: train adapters on it, or put the layer's"
        ):
            ask()
    with pytest.raises(RuntimeError, match="not trained"):
        weight.requires_grad = True
    weight.requires_grad = False
    with pytest.raises(AttributeError, match=r"the weight of QuantizedLinear is packed: weight\.data = numbers packs"):
        layer.weight = torch.nn.Parameter(plain)
    with pytest.raises(ValueError, match=r"of Q4_K has shape \[40, 256\], and cannot hold numbers of shape \[40, 3\]"):
        weight.data = plain[:, :3]
    with pytest.raises(RuntimeError, match="the weight of QuantizedLinear is packed, and has no initial numbers"):
        layer.reset_parameters()
    plain.data = weight.data  # PyTorch asks nobody
    assert plain.isnan().all()


def test_a_tied_layer_does_not_change_the_embedding(device):
    rows = nn.QuantizedEmbedding.from_embedding(torch.nn.Embedding(9, 64), "Q8_0").to(device)
    tied, packed = TiedLinear(rows), rows.packed
    with pytest.raises(
        RuntimeError, match="the weight of this layer is the embedding's, which a change would change too"
    ):
        tied.weight.data += 1
    assert rows.packed is packed
    assert tied.weight.data_ptr() == rows.weight.data_ptr() != rows.weight.clone().data_ptr()
    assert type(tied.to_linear()) is torch.nn.Linear


def test_gradients_reach_what_scales_an_embedding(device):
    plain = torch.nn.Embedding(9, 64)
    plain.scalar_embed_scale = 8.0
    ours = nn.QuantizedEmbedding.from_embedding(plain, "Q8_0").to(device)
    indices = torch.tensor([3, 3, 1], device=device)
    dense = ours.to_embedding()
    assert torch.equal(dense(indices), ours(indices))
    dense(indices).sum().backward()
    assert dense.weight.grad.sum(1).tolist() == [0, 512, 0, 1024, 0, 0, 0, 0, 0]


def test_compiled_and_saved(layer, device):
    x = torch.randn(12, 256, device=device)
    compiled = torch.compile(lambda x: x.to(layer.weight.dtype) @ layer.weight.T, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(x), x @ numbers(layer).T, rtol=1e-4, atol=1e-5)
    file = io.BytesIO()
    torch.save([layer, layer.weight], file)
    file.seek(0)
    loaded, weight = torch.load(file, weights_only=False)
    assert torch.equal(loaded.packed, layer.packed) and torch.equal(weight, numbers(layer))
