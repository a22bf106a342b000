"""Variables of the environment that switch something on or off."""

import pytest

from metalcore._core.environment import switched_on
from metalcore.tuning import store


@pytest.mark.parametrize("default", [False, True])
@pytest.mark.parametrize(
    ("setting", "expected"),
    [
        *((text, True) for text in ("1", "on", "yes", "true", "True", "ON")),
        *((text, False) for text in ("0", "off", "no", "false", "False", "OFF")),
    ],
)
def test_settings(monkeypatch, setting, expected, default):
    monkeypatch.setenv("METALCORE_TUNING", setting)
    assert switched_on("METALCORE_TUNING", default) == expected == store.is_on()


def test_the_default(monkeypatch):
    monkeypatch.setenv("METALCORE_TUNING", "")
    assert store.is_on() and not switched_on("METALCORE_TUNING")
    monkeypatch.delenv("METALCORE_TUNING")
    assert store.is_on() and not switched_on("METALCORE_TUNING")


@pytest.mark.parametrize("setting", ["2", "enabled", " 1"])
def test_others_are_refused(monkeypatch, setting):
    monkeypatch.setenv("METALCORE_TUNING", setting)
    with pytest.raises(ValueError, match=f"METALCORE_TUNING must be 1, on, yes or true, or 0, .* got '{setting}'"):
        store.is_on()
