"""A switch is on while someone asks for it: nesting, repetition, switching everything off, threads."""

import threading

import pytest

from metalcore.overrides._switches import Switches


@pytest.fixture
def switches():
    return Switches("abc", lambda: None)


def test_nested_requests_end_one_by_one(switches):
    with switches.request(["a"]):
        with switches.request(["a", "b"]):
            assert switches.active() == ("a", "b")
        assert switches.active() == ("a",)
    assert switches.active() == ()


def test_a_block_inside_a_plain_request_leaves_it_on(switches):
    switches.request(["a"])
    with switches.request(["a"]):
        pass
    assert switches.active() == ("a",)


def test_clear_ends_everything_and_later_blocks_are_not_undone_twice(switches):
    switches.request(["a"])
    switches.request(["a"])
    outer = switches.request(["b"])
    switches.clear()
    assert switches.active() == ()
    switches.request(["b"])
    with outer:
        pass
    assert switches.active() == ("b",)


def test_a_block_left_by_an_exception_ends(switches):
    with pytest.raises(KeyError), switches.request(["c"]):
        raise KeyError
    assert switches.active() == ()


def test_leaving_twice_withdraws_once(switches):
    switches.request(["a"])
    block = switches.request(["a"])
    for _ in range(2):
        with block:
            pass
    assert switches.active() == ("a",)


def test_choose(switches):
    assert switches.choose("f", (), ()) == ["a", "b", "c"]
    assert switches.choose("f", ("c", "a"), ()) == ["a", "c"]
    assert switches.choose("f", (), "b") == ["a", "c"]
    with pytest.raises(ValueError, match="f: 'd' is not one of a, b, c"):
        switches.choose("f", ("d",), ())
    with pytest.raises(ValueError, match="'dd'"):
        switches.choose("f", (), "dd")


def test_threads_that_come_and_go_leave_nothing_on(switches):
    def come_and_go():
        for _ in range(300):
            with switches.request(["a", "c"]):
                assert "a" in switches.active()

    threads = [threading.Thread(target=come_and_go) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert switches.active() == ()
