"""Places in an arena: values that live at the same time never share memory, and others do."""

import random

from metalcore._core.arena import ALIGNMENT, peak, place


def test_values_that_meet_are_apart():
    rng = random.Random(0)
    for count in (0, 1, 7, 60):
        lives = [(first, first + rng.randrange(9), rng.randrange(1, 3000)) for first in rng.choices(range(40), k=count)]
        offsets, size = place(lives)
        assert peak(lives) <= size <= sum(nbytes + ALIGNMENT for *_, nbytes in lives)
        for i in range(count):
            assert offsets[i] % ALIGNMENT == 0 and offsets[i] + lives[i][2] <= size
            for j in range(i):
                apart = offsets[i] + lives[i][2] <= offsets[j] or offsets[j] + lives[j][2] <= offsets[i]
                assert apart or lives[i][1] < lives[j][0] or lives[j][1] < lives[i][0]


def test_a_chain_takes_two_places():
    assert place([(i, i + 1, 512) for i in range(50)])[1] == peak([(i, i + 1, 512) for i in range(50)]) == 1024
