"""bitsandbytes' operators, modules and transformers' loading with them run metalcore's kernels, and its numbers are
metalcore's."""

import importlib.util
import itertools
import subprocess
import sys
import warnings

import pytest
import torch

import metalcore
from metalcore._core.routing import DEVICES
from metalcore.integrations import bitsandbytes as integration
from metalcore.quant._blockwise import TABLES, dynamic_code, pack_blocks, unpack_blocks

bnb = pytest.importorskip("bitsandbytes")
functional = importlib.import_module("bitsandbytes.functional")
# What bitsandbytes does on the CPU and on mps where no library has kernels; some functions come compiled by inductor.
default = importlib.import_module("bitsandbytes.backends.default.ops")
on_mps = importlib.import_module("bitsandbytes.backends.mps.ops")
if "mps" in DEVICES:
    integration._registered.clear()  # that import may have registered kernels again
    integration.register()

pytestmark = pytest.mark.only_on("simulator", "mps")
ops = torch.ops.bitsandbytes
CPU = torch.device("cpu")
BLOCK_SIZES = (32, 64, 128, 256, 512, 1024, 2048, 4096)


@pytest.mark.parametrize("type", ["nf4", "fp4"])
def test_4_bits(device, type):
    """The bytes and scales are those of bitsandbytes on the CPU, and so are the numbers that they stand for."""
    assert torch.equal(functional.get_4bit_type(type, device=CPU), torch.tensor(TABLES[type]))
    for block_size, dtype in itertools.product(BLOCK_SIZES, (torch.float32, torch.float16, torch.bfloat16)):
        x = torch.randn(67, 76).to(dtype)
        x[0, :64], x[1, 3] = 0.0, torch.nan
        packed, absmax = ops.quantize_4bit(x, block_size, type, torch.uint8)
        ours = ops.quantize_4bit(x.to(device), block_size, type, torch.uint8)
        assert torch.equal(ours[0].cpu(), packed) and torch.equal(ours[1].cpu().nan_to_num(-1), absmax.nan_to_num(-1))
        absmax = absmax.nan_to_num(0.5)
        code = functional.get_4bit_type(type, device=CPU)
        compute = default._dequantize_4bit_compute.__wrapped__
        numbers = compute(packed.view(-1), absmax, code, block_size, x.shape, dtype)
        found = ops.dequantize_4bit(ours[0], absmax.to(device), block_size, type, x.shape, dtype)
        assert torch.equal(found.cpu(), numbers)
    x = torch.randn(8, 64)
    stored = ops.quantize_4bit(x.to(device), 64, type, torch.bfloat16)[0]
    assert stored.dtype is torch.bfloat16 and torch.equal(stored.view(-1).view(torch.uint8), ops.quantize_4bit(
        x.to(device), 64, type, torch.uint8)[0].view(-1))  # fmt: skip


def test_8_bits(device):
    for signed in (True, False):
        code = functional.create_dynamic_map(signed)
        assert torch.equal(dynamic_code(CPU, signed), code)
        for block_size in (*BLOCK_SIZES, 300):
            x = torch.randn(5, 1003) if signed else torch.rand(5, 1003)
            packed, absmax = on_mps._quantize_blockwise_compute.__wrapped__(x.view(-1), code, block_size)
            ours = ops.quantize_blockwise(x.to(device), code.to(device), block_size)
            assert torch.equal(ours[0].cpu(), packed.view(x.shape)) and torch.equal(ours[1].cpu(), absmax)
            found = ops.dequantize_blockwise(*ours, code.to(device), block_size, torch.bfloat16)
            expected = ops.dequantize_blockwise(packed.view(x.shape), absmax, code, block_size, torch.bfloat16)
            assert torch.equal(found.cpu(), expected)


def test_states_of_double_quantization(device):
    x = torch.randn(96, 128)
    packed, state = functional.quantize_4bit(x.to(device), compress_statistics=True, quant_type="nf4")
    ours, mine = metalcore.quantize_4bit(x.to(device), "nf4", compress=True)
    assert torch.equal(packed, ours) and torch.equal(state.absmax, mine.scales)
    assert torch.equal(state.state2.absmax, mine.absmax) and torch.equal(state.offset, mine.offset)
    assert torch.equal(functional.dequantize_4bit(packed, state), metalcore.dequantize_4bit(ours, mine))


def test_products_of_int8(device):
    """Sums are exact integers, however long."""
    a, b = (torch.randint(-128, 128, (rows, 2500), dtype=torch.int8) for rows in (3, 5))
    a[0], b[0] = 127, 127
    expected = (a.double() @ b.double().T).to(torch.int32)
    assert torch.equal(ops.int8_linear_matmul(a.to(device), b.to(device)).cpu(), expected)
    out = torch.empty(3, 5, dtype=torch.int32, device=device)
    ops.int8_linear_matmul.out(a.to(device), b.to(device), out)
    assert torch.equal(out.cpu(), expected)
    x = torch.randn(6, 40).half()
    x[2, 7], x[3] = 20.0, 0.0
    for ours, theirs in zip(
        ops.int8_double_quant(x.to(device), 6.0)[:1] + ops.int8_double_quant(x.t().contiguous().to(device), 6.0)[1:2],
        (ops.int8_vectorwise_quant(x.clone(), 6.0)[0], x.masked_fill(x.abs() >= 6, 0).t()),
    ):
        if theirs.dtype is torch.int8:
            assert torch.equal(ours.cpu(), theirs)
        else:  # columns of the transposed are rows
            again = ours.cpu().float().t() * theirs.t().abs().amax(1, keepdim=True).float() / 127
            assert (again - theirs.t().float()).abs().max() <= theirs.abs().max() / 253


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_scales_of_16_bits(device, dtype):
    """A model that was converted has its scales' mean in its dtype."""
    packed, state = metalcore.quantize_4bit(torch.randn(8, 64, device=device), "nf4", compress=True)
    x, offset = torch.randn(2, 64, device=device).to(dtype), state.offset.to(dtype)
    more = {"absmax_8bit": state.scales, "absmax_code": state.scales_code}
    found, expected = (
        ops.gemm_4bit(x, packed, (8, 64), state.absmax, 64, "nf4", absmax_offset=each, **more)
        for each in (offset, offset.float())
    )
    assert torch.equal(found, expected)


@pytest.mark.parametrize("compress", [False, True])
def test_linear_layer(device, compress):
    """Linear4bit, forward and backward, equals products with the numbers of its weights."""
    weight = torch.randn(40, 128)
    layer = bnb.nn.Linear4bit(128, 40, compute_dtype=torch.float32, compress_statistics=compress, quant_type="nf4")
    layer.weight.data.copy_(weight)
    layer = layer.to(device)
    numbers = functional.dequantize_4bit(layer.weight.data, layer.weight.quant_state).cpu().double()
    for rows in (1, 3, 30):
        x = torch.randn(2, rows, 128, device=device, requires_grad=True)
        y = layer(x)
        y.sum().backward()
        wide = x.detach().cpu().double()
        expected = wide @ numbers.T + layer.bias.cpu().double()
        bound = (wide.abs() @ numbers.abs().T) * 128 * 2**-23 + 1e-6
        assert ((y.cpu() - expected).abs() <= bound).all()
        assert torch.allclose(x.grad.cpu().double(), numbers.sum(0).expand(2, rows, 128), rtol=1e-4, atol=1e-4)
    again = bnb.nn.Linear4bit(128, 40, compute_dtype=torch.float32)
    state = layer.state_dict()
    again.weight = bnb.nn.Params4bit.from_prequantized(
        state.pop("weight"), {k[len("weight."):]: v for k, v in state.items() if k.startswith("weight.")}, device=device
    )  # fmt: skip
    again.bias = layer.bias
    assert torch.equal(again(x), layer(x))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=64, intermediate_size=96, num_hidden_layers=1, num_attention_heads=4
    )
    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("model")
    transformers.LlamaForCausalLM(config).save_pretrained(path)
    return path


@pytest.mark.parametrize(
    "options",
    [{"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True}, {"load_in_8bit": True}],
    ids=["4 bits", "8 bits"],
)
def test_transformers_and_peft(device, folder, options, tmp_path):
    """A model is loaded as scripts for NVIDIA GPUs load it, trained with LoRA, saved and loaded."""
    transformers = pytest.importorskip("transformers")

    def load(path, **more):
        return transformers.AutoModelForCausalLM.from_pretrained(
            path, device_map={"": device}, dtype=torch.float16, **more
        )

    ids = torch.randint(0, 64, (2, 9), device=device)
    plain = load(folder)(ids).logits
    model = load(
        folder, quantization_config=transformers.BitsAndBytesConfig(bnb_4bit_compute_dtype=torch.float16, **options)
    )
    packed = model(ids).logits
    assert 0 < (packed - plain).abs().max() < 0.2 * plain.abs().max()
    model.save_pretrained(tmp_path)
    assert torch.equal(load(tmp_path)(ids).logits, packed)

    peft = pytest.importorskip("peft")
    model = peft.get_peft_model(
        peft.prepare_model_for_kbit_training(model), peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"])
    )
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.05)
    losses = []
    for _ in range(6):
        loss = model(ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0] - 0.2


PROGRAM = """
import importlib.util, torch
{imports}
assert metalcore.integrations.bitsandbytes._registered == {{"mps"}}
packed, absmax = torch.ops.bitsandbytes.quantize_4bit(torch.ones(64, device="mps"), 64, "nf4", torch.uint8)
assert packed.tolist() == 32 * [[255]]
registered = torch._C._dispatch_dump("bitsandbytes::quantize_4bit").split("MPS: ")[1].split(" :: ")[0]
assert "metalcore/integrations" in registered, registered
"""


@pytest.mark.only_on("simulator")
@pytest.mark.parametrize(
    "imports",
    [
        "import bitsandbytes\nimport metalcore.simulator",
        "import metalcore.simulator\nassert importlib.util.find_spec('bitsandbytes')\nimport bitsandbytes",
    ],
    ids=["bitsandbytes first", "metalcore first"],
)
def test_whichever_is_imported_first(imports):
    """Libraries look for bitsandbytes before they import it."""
    program = PROGRAM.format(imports=imports)
    found = subprocess.run(
        [sys.executable, "-W", "error::UserWarning:torch", "-c", program], capture_output=True, text=True
    )
    assert found.returncode == 0, found.stderr


def test_other_devices_are_refused():
    with pytest.raises(ValueError, match='device must be "mps" or "cuda", not \'cpu\''):
        integration.register("cpu")


def test_formulas():
    """metalcore's formulas for CPU tensors are bitsandbytes'."""
    x = torch.randn(1001)
    packed, absmax = pack_blocks(x, "fp4", 64)
    theirs = ops.quantize_4bit(x, 64, "fp4", torch.uint8)
    assert torch.equal(packed, theirs[0].view(-1)) and torch.equal(absmax, theirs[1])
    found = unpack_blocks(packed, absmax, "fp4", 64, None, x.shape)
    code = functional.get_4bit_type("fp4", device=CPU)
    compute = default._dequantize_4bit_compute.__wrapped__
    assert torch.equal(found, compute(theirs[0].view(-1), theirs[1], code, 64, x.shape, torch.float32))


@pytest.mark.parametrize("name", ["AdamW8bit", "Lion8bit", "SGD8bit"])
def test_optimizers(device, name):
    """bitsandbytes' optimizer on the device steps as metalcore's does, and each goes on with the other's state."""
    options = {"momentum": 0.9} if name == "SGD8bit" else {}
    pairs = []
    for library in (bnb.optim, metalcore.optim):
        torch.manual_seed(0)
        params = [torch.nn.Parameter(torch.randn(shape).to(device)) for shape in ((70, 60), (9,))]
        pairs.append((params, getattr(library, name)(params, lr=0.01, **options)))

    def step():
        grads = [torch.randn(p.shape) for p in pairs[0][0]]
        for params, optimizer in pairs:
            for p, grad in zip(params, grads):
                p.grad = grad.to(device)
            optimizer.step()
        for p, q in zip(pairs[0][0], pairs[1][0]):
            assert torch.allclose(p, q, rtol=1e-6, atol=1e-7)

    for _ in range(3):
        step()
    saved = [optimizer.state_dict() for _, optimizer in pairs]
    assert saved[0]["state"][0].keys() == saved[1]["state"][0].keys()
    assert saved[0]["state"][0]["step"] == 3
    wrapped = [each["state"][0]["__bnb_optimizer_quant_state__"] for each in saved]
    assert wrapped[0].keys() == wrapped[1].keys()
    assert all(torch.equal(wrapped[0][key], wrapped[1][key]) for key in wrapped[0])
    groups = [each["param_groups"] for each in saved]
    for (_, optimizer), state, own in zip(pairs, reversed(saved), groups):
        optimizer.load_state_dict({"state": state["state"], "param_groups": own})
    step()


def test_optimizers_without_kernels(device):
    """Others are updated by bitsandbytes' functions of PyTorch's ops."""
    for name in ("RMSprop8bit", "AdEMAMix8bit", "LAMB8bit", "RMSprop", "Lion32bit"):
        p = torch.nn.Parameter(torch.ones(70, 60, device=device))
        optimizer = getattr(bnb.optim, name)([p], lr=0.01)
        p.grad = torch.ones_like(p)
        optimizer.step()
        assert p.isfinite().all() and p.max() < 1


def test_paged_optimizers(device):
    """States are plain, also of sizes for which bitsandbytes asks CUDA for pages. A warning says so, once."""
    start, grad = torch.randn(2, 250, 401)  # more than 1e5 elements
    found = []
    for name in ("Adam8bit", "PagedAdam8bit"):
        parameter = torch.nn.Parameter(start.to(device))
        optimizer = getattr(bnb.optim, name)([parameter], lr=0.1)
        parameter.grad = grad.to(device)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            optimizer.step()
            optimizer.step()
        told = [str(one.message) for one in caught if "paged" in str(one.message)]
        assert told == (["PagedAdam8bit: the states of a paged optimizer are plain tensors on mps"] * (name[0] == "P"))
        found.append(parameter.detach())
    assert torch.equal(*found)
