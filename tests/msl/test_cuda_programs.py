"""Programs for CUDA devices, tested without one: built-in kernels compile, the cache keeps the results, and
compile_shader calls the backend as it should."""

import functools
import struct
import threading
from pathlib import Path

import pytest
import torch

import metalcore
from metalcore.msl import cache
from metalcore.msl.errors import MSLError
from metalcore.msl.nvidia import cuda, nvjitlink, nvrtc
from metalcore.msl.runtime import signatures
from metalcore.msl.runtime.library import ShaderLibrary, ShaderProgram
from metalcore.msl.runtime.targets import CudaTarget
from tools import register_gate

pytestmark = pytest.mark.only_on("simulator", "cuda")  # Linux, where NVRTC is
KERNELS = Path(__file__).parents[2] / "kernels"
FAMILIES = sorted(path.relative_to(KERNELS).with_suffix("").as_posix() for path in KERNELS.rglob("*.metal"))
FILL = "kernel void fill(device float* x, constant float& value, uint i [[thread_position_in_grid]]) { x[i] = value; }"


@pytest.fixture(autouse=True)
def directory(tmp_path, monkeypatch):
    monkeypatch.setenv("METALCORE_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def compilations(monkeypatch):
    """The compute capabilities that NVRTC was asked for."""
    made, compile = [], nvrtc.NVRTC.compile_with_ptx

    def counted(self, text, capability, **options):
        made.append(capability)
        return compile(self, text, capability, **options)

    monkeypatch.setattr(nvrtc.NVRTC, "compile_with_ptx", counted)
    return made


# The built-in kernels


@functools.cache
def family(name):
    path = KERNELS / f"{name}.metal"
    return ShaderProgram(path.read_text(encoding="utf-8"), [str(path.parent), str(KERNELS)], {})


@pytest.mark.parametrize(
    ("name", "capability"),
    [(name, capability) for name in FAMILIES for capability in register_gate.other_capabilities(name)],
)
def test_kernels_compile_for_other_architectures(name, capability):
    """test_register_gate.py compiles all of them for 9.0, and has the same record."""
    if capability not in nvrtc.find().architectures():
        pytest.skip(f"{nvrtc.find()} knows no compute capability {capability}")
    if name in register_gate.EVERYWHERE or register_gate.recorded().get(name) != register_gate.digest(name):
        register_gate.compile_for(name, capability)


@pytest.mark.parametrize(
    ("kernel", "capability", "instruction"),
    [
        ("gemm_unit_nn_bfloat", 90, b"wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16"),
        ("gemm_unit_tt_few_half", 90, b"wgmma.mma_async.sync.aligned.m64n16k16.f32.f16"),
        ("gemm_unit_nn_few_bfloat", 80, b"mma.sync.aligned.m16n8k16.row.col.f32.bf16"),
        ("attention_forward_unit_128_half", 90, b"wgmma.mma_async.sync.aligned.m64n128k16.f32.f16"),
    ],
)
def test_products_of_tensors_run_on_tensor_cores(kernel, capability, instruction):
    program = family("gemm/units" if kernel.startswith("gemm") else "attention/forward_units")
    text, _ = program.translation.cuda_source([(kernel, signatures.probable(program.arguments(kernel)))])
    cubin, ptx = nvrtc.find().compile_with_ptx(text, capability, flags=(*nvrtc.FLAGS, *cuda._BUILTIN_FLAGS))
    assert instruction in ptx and b"metalcore_pipeline_kibILi" in cubin


def test_the_package_has_them_all():
    built = cuda.builtin_programs()
    assert sorted(built) == FAMILIES
    for name in FAMILIES[::8]:  # which are translated once more
        assert list(built[name][1]) == family(name).names
    for name in FAMILIES:
        assert str(KERNELS.parent) not in (cuda._LIBRARY / f"{name}.cu").read_text(encoding="utf-8")


def test_a_built_in_kernel_is_compiled_once(compilations, directory):
    request = (cuda.BUILTIN, family("activation/activation").names[0], "b0,b1,i2:16")
    ((cubin, entry, source),) = cuda.compile_kernels(90, [request])
    assert entry.encode() in cubin and source == "activation/activation.metal"
    assert cuda.compile_kernels(90, [request]) == [(cubin, entry, source)]
    cuda.compile_kernels(80, [request])
    cuda.compile_kernels(90, [(*request[:2], "b0,b1,i2:32")])
    assert compilations == [90, 80, 90]
    assert len(list(directory.glob("*.cubin"))) == 3


def test_one_that_is_not_there():
    with pytest.raises(RuntimeError, match="there is no built-in kernel 'nothing'"):
        cuda.compile_kernels(90, [(cuda.BUILTIN, "nothing", "")])


# The cache


def program(source=FILL):
    return ShaderProgram(source, [], {})


def compiled_for(source, capability=90):
    target = CudaTarget(program(source), torch.device("cuda", 0))
    return cuda.compile_kernels(capability, [(target._number, target._program.names[0], "b0,i1:16")])[0][0]


def test_programs_of_the_same_content_are_one():
    first, second, other = (CudaTarget(program(text), torch.device("cuda", 0)) for text in (FILL, FILL, FILL + "//"))
    assert first._number == second._number != other._number


def test_what_is_kept_needs_neither_translator_nor_nvrtc(monkeypatch):
    cubin = compiled_for(FILL)
    monkeypatch.setattr("metalcore.msl.language.translate.translate", None)
    monkeypatch.setattr(nvrtc.NVRTC, "_open", None)
    assert compiled_for(FILL) == cubin


@pytest.mark.parametrize(
    "damage", [lambda data: data[: len(data) // 2], lambda data: b"", lambda data: b"x" + data[1:]]
)
def test_damaged_entries_are_made_again(directory, compilations, damage):
    cubin = compiled_for(FILL)
    (path,) = directory.glob("*.cubin")
    path.write_bytes(damage(path.read_bytes()))
    assert compiled_for(FILL) == cubin and cache.is_intact(path)
    assert len(compilations) == 2


def test_promised_alignment_compiles_anew_without_tests_of_addresses():
    source = """kernel void wide(device const uchar* a, device uint* b, uint i [[thread_position_in_grid]]) {
      b[i] = *(device const uint*)(a + 4 * i);
    }"""
    found = []
    for aligned in (False, True):
        target = CudaTarget(ShaderProgram(source, [], {}, aligned), torch.device("cuda", 0))
        found.append((target._number, cuda.compile_kernels(90, [(target._number, "wide", "b0,b1")])[0][0]))
    assert found[0][0] != found[1][0] and len(found[0][1]) > len(found[1][1])


def test_promised_alignment_moves_structs_of_bytes_whole():
    source = """struct alignas(1) Moved { uchar bytes[16]; };
    kernel void move(device const uchar* a, device uchar* b, uint i [[thread_position_in_grid]]) {
      threadgroup uchar c[512];
      *(threadgroup Moved*)(c + 16 * i) = *(device const Moved*)(a + 16 * i);
      b[i] = c[511 - i];
    }"""
    program = ShaderProgram(source, [], {}, True)
    text, _ = program.translation.cuda_source([("move", signatures.probable(program.arguments("move")))])
    loads = []
    for flags in ((), ("-DMSL_ALIGNED=1",)):
        _, ptx = nvrtc.find().compile_with_ptx(text, 90, flags=(*nvrtc.FLAGS, *flags), msl=source)
        loads.append(ptx.count(b"ld.global"))
    assert loads[0] > 1 and loads[1] == 1


def test_another_nvrtc_or_other_flags_compile_anew(monkeypatch, compilations):
    compiled_for(FILL)
    monkeypatch.setenv("METALCORE_NVRTC_FLAGS", "-lineinfo")
    assert b"program_source" in compiled_for(FILL)
    monkeypatch.delenv("METALCORE_NVRTC_FLAGS")
    monkeypatch.setattr(nvrtc.find(), "version", (13, 9))
    compiled_for(FILL)
    assert len(compilations) == 3


PRODUCTS = """#include <metal_stdlib>
kernel void product(device half* x, device float& y) {
  metal::simdgroup_half8x8 a;
  metal::simdgroup_float8x8 sum(0.0f);
  metal::simdgroup_load(a, x, 8);
  metal::simdgroup_multiply_accumulate(sum, a, a, sum);
  metal::simdgroup_store(sum, &y, 8);
}"""


class Linker:
    """An nvJitLink that only takes notes, or that cannot make anything of it."""

    def __init__(self, cubin):
        self.cubin, self.given = cubin, []

    def assemble(self, ptx, capability, flags):
        self.given.append((ptx, capability))
        return self.cubin


def test_joined_products_are_assembled_by_nvjitlink(monkeypatch, compilations):
    linker = Linker(b"linked")
    monkeypatch.setattr(nvjitlink, "find", lambda: linker)
    assert compiled_for(PRODUCTS) == b"linked" and compilations == [90]
    ((ptx, capability),) = linker.given
    assert capability == 90 and b"mma.sync" in ptx and b"// msl.product" not in ptx
    assert compiled_for(FILL)[:4] == b"\x7fELF" and len(linker.given) == 1


@pytest.mark.parametrize("linker", [None, Linker(None), nvjitlink.NvJitLink("/nowhere/libnvJitLink.so")])
def test_products_stay_apart_without_nvjitlink(monkeypatch, compilations, linker):
    monkeypatch.setattr(nvjitlink, "find", lambda: linker)
    assert compiled_for(PRODUCTS)[:4] == b"\x7fELF" and compilations == [90]


def test_the_driver_gets_joined_products_for_a_gpu_that_nvrtc_does_not_know(monkeypatch):
    monkeypatch.setattr(nvrtc.find(), "target", lambda capability: "compute_90")
    ptx = compiled_for(PRODUCTS, 200)
    assert b"mma.sync" in ptx and b"// msl.product" not in ptx


def test_nvjitlink_lies_beside_nvrtc(monkeypatch, tmp_path):
    compiler = nvrtc.NVRTC(tmp_path / "libnvrtc.so.13")
    (tmp_path / "libnvrtc-builtins.so.13.0").touch()  # its name tells the version
    monkeypatch.setattr(nvrtc, "folders", lambda homes: [])
    assert nvjitlink._find.__wrapped__(compiler) is None
    (tmp_path / "libnvJitLink.so.13").touch()
    assert nvjitlink._find.__wrapped__(compiler).path == tmp_path / "libnvJitLink.so.13"


def test_threads_that_start_together_compile_once(compilations):
    threads = [threading.Thread(target=compiled_for, args=(FILL,)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(compilations) == 1


def test_an_error_in_one_of_several_kernels():
    number = CudaTarget(program(FILL), torch.device("cuda", 0))._number
    with pytest.raises(MSLError, match="nothing is bound to argument 'value'"):
        cuda.compile_kernels(90, [(number, "fill", "b0,i1:16"), (number, "fill", "b0")])


# compile_shader, with a backend that only records its calls


class Backend:
    def __init__(self):
        self.calls = []
        self.signatures = []

    def dispatch(self, *call):
        self.calls.append(call)

    def attributes(self, number, kernel, signature, device):
        self.signatures.append(signature)
        cuda.compile_kernels(90, [(number, kernel, signature)])
        return {"max_threads": 768, "static_threadgroup_memory": 96, "registers": 1, "local_bytes": 0}


@pytest.fixture
def backend(monkeypatch):
    found = Backend()
    monkeypatch.setattr(metalcore._C, "cuda_dispatch", found.dispatch, raising=False)
    monkeypatch.setattr(metalcore._C, "cuda_attributes", found.attributes, raising=False)
    monkeypatch.setattr(metalcore._C, "cuda_info", lambda: {"devices": [{"arch": 90}]}, raising=False)
    monkeypatch.setattr("metalcore.msl.runtime.library.target", CudaTarget)
    return found


def shader(source):
    return ShaderLibrary(program(source))


def test_small_programs_are_compiled_at_once_and_for_the_signature_of_their_calls(backend, compilations, device):
    library = shader(FILL)
    assert compilations == [90]
    x = torch.zeros(5, device=device)
    library.fill(x[1:], 2.5, group_size=4)
    assert backend.signatures == ["b0,i1:16"] and compilations == [90]
    ((_, *call),) = backend.calls
    assert call == ["fill", 0, [(x[1:].data_ptr(), 16), struct.pack("<f", 2.5)], [], (4, 1, 1), (4, 1, 1)]


def test_large_programs_are_looked_through(backend, compilations):
    many = "".join(f"kernel void k{i}(device float* x) {{ x[0] = {i}; }}\n" for i in range(9))
    shader(many)
    assert len(compilations) == 1
    with pytest.raises(MSLError, match="program_source:10:.*undefined"):
        shader(many + "kernel void broken(device float* x) { x[0] = nothing; }")


def test_errors_show_the_users_line(backend):
    with pytest.raises(MSLError, match='program_source:2:10: error: identifier "y" is undefined\n  x'):
        shader("kernel void f(device float* x) {\n  x[0] = y;\n}")


def test_bytes_that_are_too_few(backend, device):
    library = shader("struct P { float4 a, b; };\nkernel void k(device float* x, constant P& p) { x[0] = p.b.x; }")
    with pytest.raises(MSLError, match="kernel 'k', bound as b0,i1:16: .*fewer bytes are bound than"):
        library.k(torch.zeros(3, device=device), 1.0)


def test_the_kernel_says_how_many_threads_it_takes(backend, device):
    fill, x = shader(FILL).fill, torch.zeros(4, device=device)
    assert (fill.max_threads_per_threadgroup, fill.static_thread_group_memory_length) == (768, 96)
    fill(x, 1.0)
    assert backend.calls[0][-1] == (768, 1, 1)
    with pytest.raises(ValueError, match="Threadgroup size exceeds 768 limit"):
        fill(x, 1.0, group_size=769)
    fill(x[:0], 1.0)
    assert len(backend.calls) == 1


def test_values_that_the_kernel_may_write_to_lie_in_memory(backend, device):
    library = shader("""
        kernel void k(device float* x, device const int* read, device int* written, device float** table,
                      device float* const device* read_table) {}""")
    tensors = [torch.zeros(3, device=device) for _ in range(2)]
    library.k(tensors[0], 1, [2, 3], tensors, tensors)
    buffers = backend.calls[0][3]
    assert buffers[1] == struct.pack("<q", 1) and buffers[4] == [(t.data_ptr(), 12) for t in tensors]
    assert [size for _, size in buffers[2:4]] == [16, 16]
    assert backend.signatures == ["b0,b2,b3,i1:16,i4:16"]


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda k, x: k(x, threads=1, threadgroup_memory=16), "buffer 'y' at index 1 is not bound"),
        (lambda k, x: k(x, 1, threads=1), r"'shared' at index 0 has no length set \(see threadgroup_memory"),
    ],
)
def test_arguments_that_are_not_bound(backend, device, call, message):
    library = shader("kernel void k(device float* x, constant int& y, threadgroup float* shared) {}")
    with pytest.raises(ValueError, match=f"metalcore: kernel 'k': .*{message}"):
        call(library.k, torch.zeros(3, device=device))
    library.k(torch.zeros(3, device=device), 1, threadgroup_memory=32)
    assert backend.signatures[-1] == "b0,t0,i1:16" and backend.calls[0][4] == [32]


def test_tensors_of_two_devices(backend, device):
    with pytest.raises(RuntimeError, match=f"must be on one device, not on {device}:0 and meta"):
        shader(FILL).fill(torch.zeros(3, device=device), torch.zeros(3, device="meta"))


def test_signatures():
    buffers = [(4096, 8), None, b"", b"x" * 16, b"x" * 17, b"x" * 256, b"x" * 257, [(1, 2)] * 65]
    assert signatures.of_call(buffers, [16, 32]) == "b0,t0,t1,i2:16,i3:16,i4:32,i5:256,i6:512,i7:1024"
