"""Files of the layouts with something else in them."""

import copy
import functools

import layouts
import numpy as np


def changed(tmp_path, change, name="llama-plain"):
    """The path of a layout's file whose tensors and keys went through change(writer)."""
    path = str(tmp_path / "x.gguf")
    writer = layouts.gguf.GGUFWriter(path, layouts.CASES[name].architecture)
    keys, tensors = _content(name)
    writer.kv_data, writer.tensors = [copy.deepcopy(keys)], [_copied(tensors)]
    change(writer)
    layouts.finish(writer)
    return path


@functools.cache
def _content(name):
    """The keys and tensors of a layout's file, which is made once."""
    writer, _ = layouts.filled(layouts.CASES[name], "unwritten")
    return writer.kv_data[0], writer.tensors[0]


def _copied(values):
    """Without the numbers: a writer forgets them when they are written."""
    return {key: copy.copy(value) for key, value in values.items()}


def set_key(key, value):
    """Gives a key another value, of the type that it had, or else of one that goes with the value."""
    types = layouts.gguf.GGUFValueType

    def change(writer):
        before = writer.kv_data[0].pop(key, None)
        if isinstance(value, list):
            writer.add_array(key, value)
        elif type(value) is int:
            writer.add_key_value(key, value, types.UINT32 if value >= 0 else types.INT32)
        elif before is None or type(value) is not type(before.value):
            writer.add_key_value(key, value, types.get_type(value))
        else:
            writer.add_key_value(key, value, before.type)

    return change


def drop_key(key):
    return lambda writer: writer.kv_data[0].pop(key)


def drop(name):
    return lambda writer: writer.tensors[0].pop(name)


def add(name, numbers=(1, 1, 1, 1)):
    """Adds a tensor of float32, in the place of one of this name."""

    def change(writer):
        writer.tensors[0].pop(name, None)
        writer.add_tensor(name, np.asarray(numbers, np.float32))

    return change


def reshape(name, shape):
    def change(writer):
        writer.tensors[0][name].shape = shape

    return change
