"""How metalcore bench measures, on a device whose clock the tests set, and how it evaluates the samples."""

import pytest

pytestmark = pytest.mark.usefixtures("as_before")


def test_inputs_take_turns():
    from benchmarks.harness.measure import in_turns, input_sets

    assert [input_sets(bytes_, 50) for bytes_ in (0, 1, 40, 100, 200, 201)] == [1, 64, 5, 2, 1, 1]
    assert input_sets(100, 0) == 1  # a device without a known cache
    made = []
    calls = [lambda name=name: made.append(name) or made[-1] for name in "abc"]
    in_turns(calls, 5)()
    assert "".join(made) == "abcab"


def test_results_are_kept_for_a_turn():
    """A call's output must not reuse the memory of the output before it, which is still in the cache."""
    import weakref

    from benchmarks.harness.measure import in_turns

    class Result:
        pass

    alive, seen = weakref.WeakSet(), []

    def call():
        seen.append(len(alive))
        result = Result()
        alive.add(result)
        return result

    in_turns([call, call], 5)()
    assert seen == [0, 1, 2, 2, 2]


class Clock:
    """A device on which every call takes 1 ms and which can capture."""

    lead_in, graphs = True, True

    def __init__(self):
        self.now, self.captures = 0.0, 0

    def call(self):
        self.now += 1e-3

    def synchronize(self):
        pass

    def seconds(self, batch):
        begin = self.now
        batch()
        return self.now - begin

    def capture(self, batch):
        self.captures += 1
        return batch


def runner(device, **settings):
    from benchmarks.harness.run import Run

    return Run(
        **{
            "device": device,
            "rounds": 5,
            "quick": False,
            "eager": False,
            "sample_seconds": 4e-3,
            "case_seconds": 1.0,
            **settings,
        }
    )


@pytest.mark.parametrize("graph", (False, True))
def test_samples_are_long_enough(graph):
    from benchmarks.harness.measure import Side

    device = Clock()
    side = Side([device.call, device.call, device.call], runner(device), graph)
    assert side.calls == 6  # the least multiple of 3 that takes 4 ms
    assert side.sample() == pytest.approx(1e-3)
    assert device.captures == (2 if graph else 0)


def test_slow_calls_take_fewer_sets():
    from benchmarks.harness.measure import Side

    device, made = Clock(), []

    def call(name):
        made.append(name)
        device.now += 0.12

    side = Side([lambda name=name: call(name) for name in "abcd"], runner(device), False)
    assert side.sets == side.calls == 2 and set(made) == {"a", "b"}


def test_sides_alternate():
    from benchmarks.harness.measure import Side, alternate

    device, order = Clock(), []

    def side(name, milliseconds):
        def call():
            order.append(name)
            device.now += milliseconds * 1e-3

        return Side([call], runner(device, sample_seconds=0), False)

    sides = [side("a", 30), side("b", 60)]  # both are too long for a lead-in before the measured batch
    order.clear()
    ours, theirs = alternate(sides, runner(device))
    assert "".join(order) == "abbaabbaab"
    assert ours == pytest.approx([0.03] * 5) and theirs == pytest.approx([0.06] * 5)
    assert len(alternate(sides, runner(device, case_seconds=0.28))[0]) == 3  # as many as fit, and at least three
    assert len(alternate(sides, runner(device, case_seconds=0.4))[0]) == 4


def test_quartiles():
    from benchmarks.harness.summary import quartiles, speedup

    assert quartiles([5.0]) == {"q1": 5.0, "median": 5.0, "q3": 5.0}
    assert quartiles([4, 1, 3, 2, 5]) == {"q1": 2, "median": 3, "q3": 4}
    assert quartiles([1, 2, 3, 4]) == {"q1": 1.75, "median": 2.5, "q3": 3.25}
    assert speedup([1, 2, 4], [10, 10, 10]) == {"q1": 3.75, "median": 5, "q3": 7.5}


def test_rates_and_limits():
    from benchmarks.harness.case import Comparison
    from benchmarks.harness.summary import limit, rates

    ceilings = {"copy": 100.0, "matmul_float32": 1000.0}
    assert limit(200, 1000, ceilings) == (2.0, "memory")
    assert limit(200, 3000, ceilings) == (3.0, "arithmetic")
    assert limit(0, 0, ceilings) == (None, None)
    case = Comparison(name="x", inputs=None, ours=None, theirs=None, bytes=200, flops=1000)
    assert rates(case, 4.0, False, ceilings) == {
        "bytes": 200,
        "flops": 1000,
        "limit": 2.0,
        "bound": "memory",
        "bytes_per_second": 50.0,
        "flops_per_second": 250.0,
        "share": 0.5,
    }
    assert "share" not in rates(case, 4.0, True, ceilings)  # the inputs come from the cache


def test_targets():
    from benchmarks.harness.summary import check

    result = {"ours": {"median": 2.0}, "speedup": {"median": 1.5}, "share": 0.8}
    assert check(result, "speedup", 1.5)["met"] and not check(result, "speedup", 1.6)["met"]
    assert check(result, "share", 0.8)["met"] and not check(result, "share", 0.81)["met"]
    assert check(result, "seconds", 2.0)["met"] and not check(result, "seconds", 1.9)["met"]
    assert check(result, "excess", 1.0) == {"quantity": "excess", "bound": 1.0, "found": None, "met": False}
    with pytest.raises(ValueError, match="'time' is not a target"):
        check(result, "time", 1)


def test_qr_counts():
    """LAPACK's operation counts (Working Note 41) for sgeqrf and sorgqr, to the leading order."""
    from benchmarks.families.linalg.decompositions import matrices, qr_flops, qr_numbers

    n = 300
    square, tall, wide, small = matrices("qr", "5x300x300 600x300 300x600 5x6x4", numbers=qr_numbers, flops=qr_flops)
    assert square.flops == 5 * round(8 / 3 * n**3)
    assert tall.flops == round(4 * 2 * n * n**2 - 4 / 3 * n**3)
    assert wide.flops == round(2 * n**2 * 2 * n - 2 / 3 * n**3 + 4 / 3 * n**3)
    assert small.bytes == 5 * 4 * (6 * 4 + 6 * 4 + 4 * 4)


def test_a_line_of_sizes():
    from benchmarks.families.linalg.decompositions import sizes

    assert list(sizes("4096x4096 8x3x2,5=2 64x32=1/1.5")) == [
        ((4096, 4096), 0, None),
        ((8, 3, 2), 5, 2.0),
        ((64, 32), 0, 1 / 1.5),
    ]
