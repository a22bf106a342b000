"""torch.mps, torch.accelerator and torch.backends.mps on the simulated device."""

import gc

import pytest
import torch


def test_it_is_the_accelerator():
    assert torch.mps.is_available() and torch.mps.device_count() == 1
    assert torch.backends.mps.is_available() and torch.backends.mps.is_built()
    assert torch.backends.mps.is_macos_or_newer(14, 0) and not torch.backends.mps.is_macos_or_newer(99, 0)
    assert "simulated" in torch.backends.mps.get_name() and torch.backends.mps.get_core_count() >= 1
    assert torch.accelerator.is_available() and torch.accelerator.current_accelerator() == torch.device("mps")
    assert torch.accelerator.device_count() == 1 and torch.accelerator.current_device_index() == 0
    assert torch.get_device_module("mps") is torch.mps


RANDOM = {
    "randn": lambda d: torch.randn(5, device=d),
    "rand": lambda d: torch.rand(5, device=d),
    "randint": lambda d: torch.randint(0, 9, (5,), device=d),
    "randperm": lambda d: torch.randperm(9, device=d),
    "normal_": lambda d: torch.empty(5, device=d).normal_(),
    "exponential_": lambda d: torch.empty(5, device=d).exponential_(),
    "bernoulli": lambda d: torch.bernoulli(torch.full((9,), 0.5, device=d)),
    "multinomial": lambda d: torch.multinomial(torch.ones(6, device=d), 3),
    "dropout": lambda d: torch.nn.functional.dropout(torch.ones(50, device=d)),
}


@pytest.mark.parametrize("draw", RANDOM.values(), ids=RANDOM)
def test_a_seed_gives_the_numbers_it_gives_on_the_cpu(draw):
    torch.manual_seed(5)
    first, second = draw("mps"), draw("mps")
    torch.manual_seed(5)
    assert torch.equal(first, draw("mps"))
    assert torch.equal(second, draw("mps"))
    torch.manual_seed(5)
    assert torch.equal(first.cpu(), draw("cpu"))


def test_generators():
    torch.mps.manual_seed(1)
    state = torch.mps.get_rng_state()
    x = torch.randn(3, device="mps")
    torch.mps.set_rng_state(state)
    assert torch.equal(x, torch.randn(3, device="mps"))
    g, h = torch.Generator("mps").manual_seed(3), torch.Generator("mps").manual_seed(3)
    assert g.initial_seed() == 3 and g.device.type == "mps"
    assert torch.equal(torch.randn(4, generator=g, device="mps"), torch.randn(4, generator=h, device="mps"))
    h.set_state(g.get_state())
    assert torch.equal(torch.randn(4, generator=g, device="mps"), torch.randn(4, generator=h, device="mps"))
    with pytest.raises(RuntimeError, match="Expected a 'mps' device type for generator but found 'cpu'"):
        torch.randn(2, generator=torch.Generator("cpu"), device="mps")
    with pytest.raises(RuntimeError, match="no offset"):
        g.get_offset()


def test_the_cpus_random_numbers_are_left_alone():
    torch.manual_seed(0)
    expected = torch.randn(3)
    torch.manual_seed(0)
    torch.randn(7, device="mps")
    assert torch.equal(torch.randn(3), expected)
    with torch.random.fork_rng(device_type="mps"):
        torch.randn(2, device="mps")


def test_events_and_streams():
    start, end = torch.mps.Event(enable_timing=True), torch.mps.Event(enable_timing=True)
    start.record()
    torch.ones(9, device="mps").sum()
    end.record()
    end.synchronize()
    end.wait()
    assert end.query() and start.elapsed_time(end) >= 0
    with pytest.raises(RuntimeError, match="must be recorded"):
        start.elapsed_time(torch.mps.Event(enable_timing=True))
    first, second = torch.Event("mps", enable_timing=True), torch.Event("mps", enable_timing=True)
    first.record()
    second.record()
    second.synchronize()
    assert first.elapsed_time(second) >= 0
    torch.Stream("mps").synchronize()
    torch.mps.synchronize()
    torch.accelerator.synchronize()
    with torch.mps.profiler.profile():
        torch.ones(2, device="mps")


def test_memory_is_accounted():
    gc.collect()
    before = torch.mps.current_allocated_memory()
    torch.accelerator.reset_peak_memory_stats()
    x = torch.empty(1 << 20, device="mps")
    y = x + 1
    assert torch.mps.current_allocated_memory() - before == 8 << 20
    del x, y
    gc.collect()
    assert torch.mps.current_allocated_memory() == before
    assert torch.accelerator.max_memory_allocated() - before >= 8 << 20
    assert torch.mps.recommended_max_memory() > 8 << 20
    torch.mps.empty_cache()


def test_memory_can_be_limited():
    torch.mps.set_per_process_memory_fraction(1.0)
    try:
        with pytest.raises(RuntimeError, match="MPS backend out of memory"):
            torch.empty(2 * torch.mps.recommended_max_memory(), dtype=torch.uint8, device="mps")
    finally:
        torch.mps.set_per_process_memory_fraction(0.0)


def test_memory_of_the_host_is_shared():
    x = torch.zeros(4, device="mps")
    alias = torch.mps._host_alias_storage(x.untyped_storage())
    torch.empty(0).set_(alias).fill_(3)
    assert torch.equal(x.cpu(), torch.full((4,), 3.0))


def test_pinned_memory():
    x = torch.ones(3)
    pinned = x.pin_memory()
    assert not x.is_pinned() and pinned.is_pinned() and torch.equal(pinned, x)
    assert pinned.to("mps", non_blocking=True).sum() == 3


def test_default_device():
    torch.set_default_device("mps")
    try:
        assert torch.ones(2).is_mps and torch.nn.Linear(2, 2).weight.is_mps
    finally:
        torch.set_default_device(None)
    with torch.device("mps"):
        assert torch.zeros(1).is_mps
    with torch.device("meta"):
        module = torch.nn.Linear(2, 2)
    assert module.to_empty(device="mps").weight.is_mps


def test_metal_files_and_captures_are_refused():
    with pytest.raises(RuntimeError, match="compile_shader"):
        torch.mps.load_metallib(b"MTLB")
    assert not torch.mps.profiler.is_metal_capture_enabled()
    with pytest.raises(RuntimeError, match="capture"), torch.mps.profiler.metal_capture("trace"):
        pass


def test_compile_shader():
    library = torch.mps.compile_shader("""
        kernel void scale(device float* x, constant float& factor, uint i [[thread_position_in_grid]]) {
          x[i] *= factor;
        }""")
    x = torch.arange(5.0, device="mps")
    library.scale(x, 3.0)
    assert x.tolist() == [0, 3, 6, 9, 12]
