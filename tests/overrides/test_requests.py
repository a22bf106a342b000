"""Who asks for a switch to be on: nesting, repetition, switching everything off, threads."""

import threading

import pytest

from metalcore._requests import Requests


@pytest.fixture
def requests():
    return Requests("abc", lambda: None)


def test_nested_requests_end_one_by_one(requests):
    with requests.request(["a"]):
        with requests.request(["a", "b"]):
            assert requests.active() == ("a", "b")
        assert requests.active() == ("a",)
    assert requests.active() == ()


def test_a_block_inside_a_plain_request_leaves_it_on(requests):
    requests.request(["a"])
    with requests.request(["a"]):
        pass
    assert requests.active() == ("a",)


def test_clear_ends_everything_and_later_blocks_are_not_undone_twice(requests):
    requests.request(["a"])
    requests.request(["a"])
    outer = requests.request(["b"])
    requests.clear()
    assert requests.active() == ()
    requests.request(["b"])
    with outer:
        pass
    assert requests.active() == ("b",)


def test_a_block_left_by_an_exception_ends(requests):
    with pytest.raises(KeyError), requests.request(["c"]):
        raise KeyError
    assert requests.active() == ()


def test_leaving_twice_withdraws_once(requests):
    requests.request(["a"])
    block = requests.request(["a"])
    for _ in range(2):
        with block:
            pass
    assert requests.active() == ("a",)


def test_choose(requests):
    assert requests.choose("f", (), ()) == ["a", "b", "c"]
    assert requests.choose("f", ("c", "a"), ()) == ["a", "c"]
    assert requests.choose("f", (), "b") == ["a", "c"]
    with pytest.raises(ValueError, match="f: 'd' is not one of a, b, c"):
        requests.choose("f", ("d",), ())
    with pytest.raises(ValueError, match="'dd'"):
        requests.choose("f", (), "dd")


def test_threads_that_come_and_go_leave_nothing_on(requests):
    def come_and_go():
        for _ in range(300):
            with requests.request(["a", "c"]):
                assert "a" in requests.active()

    threads = [threading.Thread(target=come_and_go) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert requests.active() == ()
