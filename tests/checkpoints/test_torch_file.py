"""PyTorch files without PyTorch: what they say is read, what they would run is refused."""

import collections
import pickle
import zipfile

import jax.numpy as jnp
import numpy as np
import pytest

from specjax.checkpoints.torch_file import read_torch

FILES = {
    "eagle1/pytorch_model.bin": ("fc.weight", (64, 128), "F32"),
    "eagle3/pytorch_model.bin": ("d2t", (96,), "I64"),
    "medusa1/medusa_lm_head.pt": ("4.1.weight", (160, 64), "F32"),
}


class Global(collections.namedtuple("Global", "module name")):
    """What a pickle writes for a class or a function."""


class Call(collections.namedtuple("Call", "function arguments")):
    """What a pickle writes for a call."""


class Reference(collections.namedtuple("Reference", "pid")):
    """What a pickle writes for a persistent id."""


def op(value) -> bytes:
    """Pickle code for a value, of those above, dictionaries, tuples and constants."""
    if isinstance(value, Global):
        return b"c%s\n%s\n" % (value.module.encode(), value.name.encode())
    if isinstance(value, Call):
        return op(value.function) + op(value.arguments) + b"R"
    if isinstance(value, Reference):
        return op(value.pid) + b"Q"
    if isinstance(value, tuple):
        return b"(" + b"".join(map(op, value)) + b"t"
    if isinstance(value, dict):
        return b"}(" + b"".join(op(k) + op(v) for k, v in value.items()) + b"u"
    return pickle.dumps(value, 2)[2:-1]


def storage(kind="FloatStorage", key="0", count=6):
    kind = kind if isinstance(kind, Global) else Global("torch", kind)
    return Reference(("storage", kind, key, "cpu", count))


def tensor(held=None, offset=0, shape=(2, 3), strides=(3, 1), *more):
    hooks = Call(Global("collections", "OrderedDict"), ())
    arguments = (held or storage(), offset, shape, strides, False, hooks, *more)
    version = "_rebuild_tensor_v3" if more else "_rebuild_tensor_v2"
    return Call(Global("torch._utils", version), arguments)


DATA = np.arange(6, dtype=np.float32)


def write(path, value, data=DATA, compression=zipfile.ZIP_STORED, **members):
    """A file as `torch.save` writes it; `value` may be pickle code."""
    code = value if isinstance(value, bytes) else b"\x80\x02" + op(value) + b"."
    with zipfile.ZipFile(path, "w", compression) as archive:
        archive.writestr("model/data.pkl", code)
        archive.writestr("model/data/0", np.asarray(data).tobytes())
        for name, content in members.items():
            archive.writestr(f"model/{name}", content)
    return path


@pytest.fixture
def file(tmp_path):
    return tmp_path / "pytorch_model.bin"


@pytest.mark.parametrize("name", FILES)
def test_published_form(shared, name):
    path = shared / "parity" / name
    tensors = read_torch(path)
    known, shape, kind = FILES[name]
    assert (tensors[known].shape, tensors[known].kind) == (shape, kind)
    for key, held in tensors.items():
        array = held.read()
        assert (held.name, held.file) == (key, path)
        assert array.shape == held.shape
        assert np.isfinite(array).all()
        assert np.any(array != array.flat[0])
    if "d2t" in tensors:
        chosen = np.flatnonzero(tensors["t2d"].read())
        assert tensors["t2d"].kind == "BOOL"
        np.testing.assert_array_equal(chosen, np.arange(96) + tensors["d2t"].read())


def test_layouts(file):
    """Views, transposes and parts of a storage, with what modules and parameters wrap around."""
    ordered = op(Call(Global("collections", "OrderedDict"), ()))
    parameter = Call(Global("torch._utils", "_rebuild_parameter"), (tensor(), True, None))
    entries = {
        "plain": tensor(),
        "parameter": parameter,
        "turned": tensor(None, 0, (3, 2), (1, 3)),
        "column": tensor(None, 1, (2,), (3,)),
        "part": tensor(None, 4, (2,), (1,)),
        "repeated": tensor(None, 2, (2, 2), (0, 1)),
        "one": tensor(None, 5, (), ()),
        "empty": tensor(None, 6, (0, 3), (3, 1)),
        "size": tensor(None, 0, Call(Global("torch", "Size"), ((6,),)), (1,)),
    }
    items = b"".join(op(k) + op(v) for k, v in entries.items())
    # A module's state has an attribute, which a pickle sets by BUILD.
    code = b"\x80\x02" + ordered + b"(" + items + b"u" + op({"_metadata": {"": {}}}) + b"b."
    found = {k: v.read() for k, v in read_torch(write(file, code, byteorder="little")).items()}
    whole = DATA.reshape(2, 3)
    expected = {
        "plain": whole,
        "parameter": whole,
        "turned": whole.T,
        "column": whole[:, 1],
        "part": DATA[4:],
        "repeated": np.array([[2, 3], [2, 3]]),
        "one": np.float32(5),
        "empty": np.zeros((0, 3)),
        "size": DATA,
    }
    assert list(found) == list(expected)
    for name, array in expected.items():
        np.testing.assert_array_equal(found[name], array)
        assert found[name].dtype == np.float32


@pytest.mark.parametrize(
    ("kind", "dtype", "word"),
    [
        ("DoubleStorage", np.float64, "F64"),
        ("HalfStorage", np.float16, "F16"),
        ("BFloat16Storage", jnp.bfloat16, "BF16"),
        ("LongStorage", np.int64, "I64"),
        ("IntStorage", np.int32, "I32"),
        ("ByteStorage", np.uint8, "U8"),
        ("BoolStorage", np.bool_, "BOOL"),
    ],
)
def test_types(file, kind, dtype, word):
    data = np.array([0, 1, 1, 0, 1, 0]).astype(dtype)
    held = read_torch(write(file, {"a": tensor(storage(kind))}, data))["a"]
    assert held.kind == word
    np.testing.assert_array_equal(held.read(), data.reshape(2, 3))
    assert held.read().dtype == dtype


def test_a_type_beside_untyped_bytes(file):
    data = DATA.astype(jnp.bfloat16)
    held = storage(Global("torch.storage", "UntypedStorage"), count=12)
    code = {"a": tensor(held, 0, (2, 3), (3, 1), Global("torch", "bfloat16"))}
    found = read_torch(write(file, code, data))["a"]
    assert found.kind == "BF16"
    np.testing.assert_array_equal(found.read(), data.reshape(2, 3))


def test_bytes_are_read_when_they_are_wanted(file):
    held = read_torch(write(file, {"a": tensor()}))["a"]
    write(file, {"a": tensor()}, DATA + 1)
    np.testing.assert_array_equal(held.read(), DATA.reshape(2, 3) + 1)
    file.write_bytes(b"PK")
    with pytest.raises(ValueError, match=r"pytorch_model\.bin: ends at byte"):
        held.read()


def test_dictionaries_of_tensors_are_flattened(file):
    code = {"model": {"a": tensor(), "b.c": tensor()}, "d": tensor()}
    assert list(read_torch(write(file, code))) == ["model.a", "model.b.c", "d"]


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"epoch": 3, "model": {"a": tensor()}}, "type int under the name 'epoch'"),
        ({"model": {"a": tensor(), "b": "text"}}, "type str under the name 'model.b'"),
        ({"model": {"a": {"b": tensor()}}}, "type dict under the name 'model.a'"),
        ({"a": {"b": tensor()}, "a.b": tensor()}, "two tensors by the name 'a.b'"),
        ({1: tensor()}, "a key that is something of type int"),
        (tensor(), "holds a tensor; wanted a dictionary"),
    ],
)
def test_something_else_than_tensors(file, value, message):
    with pytest.raises(ValueError, match=message) as caught:
        read_torch(write(file, value))
    assert str(file) in str(caught.value)


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("os", "system"),
        ("posix", "system"),
        ("builtins", "eval"),
        ("__builtin__", "eval"),
        ("builtins", "getattr"),
        ("torch.serialization", "load"),
        ("torch", "ComplexFloatStorage"),
        ("torch._utils", "_rebuild_tensor_v2.__globals__"),
        ("collections", "OrderedDict.fromkeys"),
    ],
)
def test_code_is_refused(file, tmp_path, module, name):
    trace = tmp_path / "ran"
    for value in (
        Call(Global(module, name), (f"touch {trace}",)),
        {"a": tensor(), "b": Call(Global(module, name), (f"open({str(trace)!r}, 'w')",))},
    ):
        with pytest.raises(ValueError, match="which is refused") as caught:
            read_torch(write(file, value))
        assert str(file) in str(caught.value)
        assert f"{module}.{name}" in str(caught.value)
    assert not trace.exists()


def test_protocol_four_and_reduced_objects_are_refused(file, tmp_path):
    class Evil:
        def __reduce__(self):
            return eval, (f"open({str(tmp_path / 'ran')!r}, 'w')",)

    for protocol in (0, 2, 4, 5):
        code = pickle.dumps({"a": Evil()}, protocol)
        with pytest.raises(ValueError, match=r"eval, which is refused"):
            read_torch(write(file, code))
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    "known",
    [
        Global("torch._utils", "_rebuild_tensor_v2"),
        Global("torch._utils", "_rebuild_parameter"),
        Global("torch", "FloatStorage"),
        Global("torch", "bfloat16"),
        Global("torch", "Size"),
        Global("collections", "OrderedDict"),
        storage(),
        tensor(),
    ],
)
def test_what_is_known_cannot_be_changed(file, known):
    """BUILD would set attributes; the second form does so by `setattr`."""
    for state in ({"kind": "F64", "typed": True}, (None, {"kind": "F64", "__call__": 1})):
        code = b"\x80\x02" + op(known) + op(state) + b"b."
        with pytest.raises(ValueError, match=r"pytorch_model\.bin: its pickle cannot be read"):
            read_torch(write(file, code))


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"a": tensor(storage(count=7))}, "has 24 bytes; wanted 7 elements"),
        ({"a": tensor(storage(key="1"))}, "has no storage '1'"),
        ({"a": tensor(storage(key="../data.pkl"))}, "has no storage"),
        ({"a": tensor(None, 1)}, "elements up to 7 of 6"),
        ({"a": tensor(None, 0, (2, 3), (4, 1))}, "elements up to 7 of 6"),
        ({"a": tensor(storage(count=3))}, "elements up to 6 of 3"),
        ({"a": tensor(None, -1)}, "without a proper layout"),
        ({"a": tensor(None, 0, (2, 3), (-3, 1))}, "without a proper layout"),
        ({"a": tensor(None, 0, (6,), (1, 1))}, "without a proper layout"),
        ({"a": tensor(None, 0, (True, 3), (3, 1))}, "without a proper layout"),
        ({"a": tensor("text")}, "without a proper layout"),
        ({"a": tensor(storage(), 0, (6,), (1,), "float32")}, "tensor without a type"),
        ({"a": Reference(("module", 1))}, "refers to something unknown"),
        ({"a": Reference(("storage", "float", "0", "cpu", 6))}, "refers to something unknown"),
        (b"\x80\x02}q\x00(X\x05\x00", "its pickle cannot be read"),
        (b"", "its pickle cannot be read"),
        (b"\x80\x02K\x01K\x02R.", "its pickle cannot be read"),
        (b"\x80\xff.", "its pickle cannot be read"),
        (b"\x80\x02}r\xff\xff\xff\x7f.", "object 2147483647 is remembered"),  # room for 2^32
        (b"}p2147483647\n.", "object 2147483647 is remembered"),
    ],
)
def test_damaged_contents(file, value, message):
    with pytest.raises(ValueError, match=message) as caught:
        read_torch(write(file, value))
    assert str(file) in str(caught.value)


def test_other_files(file, tmp_path):
    with pytest.raises(FileNotFoundError, match="there is no such file"):
        read_torch(tmp_path / "nothing.bin")
    for content, message in (
        (pickle.dumps(0x1950A86A20F9469CFC6C, 2), r"before version 1\.6"),
        (b"version https://git-lfs", "neither a zip file nor a pickle"),
        (b"", "neither a zip file nor a pickle"),
    ):
        file.write_bytes(content)
        with pytest.raises(ValueError, match=message):
            read_torch(file)
    with pytest.raises(ValueError, match="compressed or encrypted"):
        read_torch(write(file, {"a": tensor()}, compression=zipfile.ZIP_DEFLATED))
    with pytest.raises(ValueError, match="has the byte order b'big'"):
        read_torch(write(file, {"a": tensor()}, byteorder="big"))
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("weights.txt", "1")
    with pytest.raises(ValueError, match=r"0 members \*/data\.pkl"):
        read_torch(file)


def test_every_truncation_is_noticed(shared, file):
    whole = write(file, {"a": tensor()}).read_bytes()
    for length in range(len(whole)):
        file.write_bytes(whole[:length])
        with pytest.raises(ValueError, match=r"pytorch_model\.bin: "):
            read_torch(file)
    published = (shared / "parity" / "medusa1" / "medusa_lm_head.pt").read_bytes()
    for length in (100, len(published) // 2, len(published) - 30):
        file.write_bytes(published[:length])
        with pytest.raises(ValueError, match="no whole zip file"):
            read_torch(file)


def test_damaged_bytes_raise_nothing_but_value_errors(file):
    whole = bytearray(write(file, {"a": tensor(), "b": {"c": tensor()}}).read_bytes())
    for place in range(len(whole)):
        for flip in (0x01, 0x80, 0xFF):
            damaged = bytearray(whole)
            damaged[place] ^= flip
            file.write_bytes(damaged)
            message = None
            try:
                for held in read_torch(file).values():
                    held.read()
            except ValueError as error:
                message = str(error)
            assert message is None or str(file) in message
