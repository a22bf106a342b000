import pytest


@pytest.fixture(scope="session")
def made(tmp_path_factory):
    """Layouts' files and reference models by name, each made once."""
    import layouts

    folder, known = tmp_path_factory.mktemp("gguf"), {}

    def make(name):
        if name not in known:
            known[name] = layouts.make(name, folder / f"{name}.gguf")
        return known[name]

    return make
