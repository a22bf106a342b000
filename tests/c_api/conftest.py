import subprocess
import sys
from pathlib import Path

import pytest
from c_program import HERE, LIBRARY, Calls, compiled


@pytest.fixture(scope="session")
def c_program(tmp_path_factory):
    """The program of calls.c, compiled as C99."""
    if not (LIBRARY / "libmetalcore.so").exists():
        pytest.skip("libmetalcore is built for Linux")
    return compiled(HERE / "calls.c", tmp_path_factory.mktemp("c_program") / "calls")


@pytest.fixture(scope="session")
def counter(tmp_path_factory):
    """A library that counts allocations where it is preloaded."""
    output = tmp_path_factory.mktemp("counter") / "count_allocations.so"
    source = HERE / "count_allocations.c"
    subprocess.run(["cc", "-shared", "-fPIC", "-O1", "-o", str(output), str(source)], check=True)
    return output


@pytest.fixture
def calls(tmp_path):
    return Calls(tmp_path)


@pytest.fixture(scope="session")
def fakes(tmp_path_factory):
    """The environment in which programs find a driver and an NVRTC that only take notes."""
    sys.path.append(str(HERE.parent / "cuda"))
    from fakes import Fakes

    build = Fakes(tmp_path_factory.mktemp("fakes")).build
    driver, nvrtc = build("fake_driver.c", "libcuda.so.1"), build("fake_nvrtc.c", "libnvrtc.so.12")
    return {"LD_LIBRARY_PATH": str(Path(driver).parent), "METALCORE_NVRTC": nvrtc}
