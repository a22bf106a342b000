"""No test leaves an override on."""

import pytest

import metalcore


@pytest.fixture(autouse=True)
def off():
    yield
    metalcore.disable_pytorch_overrides()
