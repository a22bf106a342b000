"""For programs that call libmetalcore's functions where the driver and NVRTC only take notes, without PyTorch.

`python fake_c.py <fake libcuda.so.1> <libmetalcore.so>` runs the program on stdin with this module's names. A path may
be "none". METALCORE_NVRTC has the path of the fake NVRTC.
"""

import ctypes
import os
import sys

import fake_gpu

C = nvrtc = None


def load(driver_path, library):
    """Loads the fakes, whose sonames then replace the real libraries, and libmetalcore."""
    global C, nvrtc
    if driver_path != "none":
        fake_gpu.driver = ctypes.CDLL(driver_path)
        fake_gpu.driver.fake_launch.restype = ctypes.POINTER(fake_gpu.LaunchRecord)
        fake_gpu.driver.fake_fill.restype = ctypes.POINTER(FillRecord)
    if os.path.exists(os.environ["METALCORE_NVRTC"]):
        nvrtc = ctypes.CDLL(os.environ["METALCORE_NVRTC"])
        nvrtc.fake_program.restype = nvrtc.fake_options.restype = ctypes.c_char_p
    C = ctypes.CDLL(library)
    C.metalcore_last_error.restype = C.metalcore_status_name.restype = ctypes.c_char_p


class FillRecord(ctypes.Structure):
    _fields_ = [
        ("memory", ctypes.c_void_p),
        ("value", ctypes.c_uint),
        ("width", ctypes.c_uint),
        ("count", ctypes.c_size_t),
        ("stream", ctypes.c_void_p),
    ]


def status(function, *arguments):
    """(name of the status, text of the error if there is one). Integers beyond 32 bits are pointers."""
    converted = []
    for argument in arguments:
        if isinstance(argument, float):
            argument = ctypes.c_float(argument)
        elif isinstance(argument, int) and argument >= 1 << 32:
            argument = ctypes.c_void_p(argument)
        converted.append(argument)
    code = getattr(C, f"metalcore_{function}")(*converted)
    return C.metalcore_status_name(code).decode(), C.metalcore_last_error().decode() if code else ""


def call(function, *arguments):
    """Calls a function, which must succeed, and returns the launches that it made."""
    before = fake_gpu.driver.fake_launch_count()
    assert status(function, *arguments) == ("METALCORE_OK", "")
    return fake_gpu.launches()[before:]


def context(index=0, stream=0):
    """A new CUDA context, which becomes the thread's."""
    made = ctypes.c_void_p()
    said = status("context_create", ctypes.byref(made), 1, index, ctypes.c_void_p(stream))
    assert said == ("METALCORE_OK", ""), said
    assert status("context_use", made)[0] == "METALCORE_OK"
    return made


def fills():
    return [fake_gpu.driver.fake_fill(i).contents for i in range(fake_gpu.driver.fake_fill_count())]


if __name__ == "__main__":
    load(*sys.argv[1:])
    driver = fake_gpu.driver
    exec(compile(sys.stdin.read(), "<test>", "exec"), globals())
