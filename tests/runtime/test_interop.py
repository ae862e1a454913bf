"""DLPack in and out, and every other way an array arrives from another library."""

from __future__ import annotations

import array as python_arrays
import ctypes
import gc
import pickle
import threading
import weakref
from typing import Any, ClassVar

import ml_dtypes
import numpy as np
import pytest

import ranvier as rv
from ranvier import dlpack
from ranvier.dtypes import DType
from ranvier.errors import DeviceMismatch, DTypeMismatch, InvalidInput
from ranvier.interop import to_array
from tests.runtime.small_models import linear

EVERY_TYPE = [d for d in DType if d is not DType.string]
WHOLE_BYTES = [d for d in EVERY_TYPE if d.bits >= 8]


def sample(dtype: DType) -> np.ndarray:
    """Six different elements where the type has them."""
    return (
        np.array([[1, 0, 1], [0, 1, 1]]).astype(dtype.numpy)
        if dtype.bits < 8
        else np.arange(1, 7).reshape(2, 3).astype(dtype.numpy)
    )


class Exporter:
    """A tensor of some other library: DLPack and nothing else."""

    def __init__(self, array: np.ndarray, device: tuple[int, int] = (1, 0)) -> None:
        self.array = array
        self.device = device
        self.asked: list[Any] = []

    def __dlpack__(self, *, stream: Any = None, max_version: Any = None) -> Any:
        self.asked.append(max_version)
        return rv.to_dlpack(self.array, max_version=max_version)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.device


class OldExporter(Exporter):
    """From before DLPack had versions."""

    def __dlpack__(self, stream: Any = None) -> Any:  # type: ignore[override]
        return rv.to_dlpack(self.array)


# -- every element type ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", EVERY_TYPE, ids=str)
def test_both_ways_share_memory(dtype: DType) -> None:
    given = sample(dtype)
    got = rv.from_dlpack(Exporter(given))
    assert got.dtype == given.dtype
    assert got.shape == given.shape
    assert np.shares_memory(got, given)
    np.testing.assert_array_equal(got.view(np.uint8), given.view(np.uint8))
    got[0, 0] = got[0, 1]
    assert given[0, 0] == given[0, 1]


@pytest.mark.parametrize("dtype", WHOLE_BYTES, ids=str)
def test_unversioned_capsules(dtype: DType) -> None:
    given = sample(dtype)
    for got in (rv.from_dlpack(OldExporter(given)), rv.from_dlpack(rv.to_dlpack(given))):
        assert got.dtype == given.dtype
        assert np.shares_memory(got, given)
        assert not got.flags.writeable  # nobody said that it may be written


@pytest.mark.parametrize("dtype", EVERY_TYPE, ids=str)
def test_strides_offsets_and_scalars(dtype: DType) -> None:
    given = sample(dtype)
    for view in (given.T, given[:, ::2], given[1:, 1:], given[::-1, ::-1], given[0, 0].reshape(()), given[:0]):
        got = rv.from_dlpack(Exporter(view))
        assert got.shape == view.shape
        assert got.tobytes() == view.tobytes()


@pytest.mark.parametrize("dtype", EVERY_TYPE, ids=str)
def test_read_only_stays_read_only(dtype: DType) -> None:
    given = sample(dtype)
    given.flags.writeable = False
    assert not rv.from_dlpack(Exporter(given)).flags.writeable
    if dtype.bits >= 8:
        with pytest.raises(InvalidInput, match="read-only array needs a versioned capsule"):
            rv.to_dlpack(given)


def test_numpy_reads_what_it_can_read() -> None:
    given = sample(DType.float32)
    np.testing.assert_array_equal(np.from_dlpack(Exporter(given)), given)
    with pytest.raises((RuntimeError, BufferError)):  # NumPy has no bfloat16: the capsule really says bfloat16
        np.from_dlpack(Exporter(sample(DType.bfloat16)))


def test_what_cannot_be_expressed() -> None:
    with pytest.raises(DTypeMismatch, match="needs a versioned capsule"):
        rv.to_dlpack(sample(DType.int4))
    with pytest.raises(DTypeMismatch, match="cannot express"):
        rv.to_dlpack(np.array(["a"], dtype=object))
    with pytest.raises(DTypeMismatch, match="cannot express"):
        rv.to_dlpack(np.zeros(2, ">f4"))


# -- capsules made by hand ------------------------------------------------------------------------------------------

DELETER = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
new_capsule = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)(
    ("PyCapsule_New", ctypes.pythonapi)
)


class Managed(ctypes.Structure):
    _fields_ = [("tensor", dlpack._Tensor), ("manager_ctx", ctypes.c_void_p), ("deleter", DELETER)]


class ManagedVersioned(ctypes.Structure):
    _fields_ = [
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("manager_ctx", ctypes.c_void_p),
        ("deleter", DELETER),
        ("flags", ctypes.c_uint64),
        ("tensor", dlpack._Tensor),
    ]


class Handmade:
    """A capsule as a C library would make it; counts the calls of its deleter."""

    alive: ClassVar[list[Handmade]] = []

    def __init__(
        self,
        memory: np.ndarray,
        shape: tuple[int, ...],
        kind: tuple[int, int, int],
        *,
        strides: tuple[int, ...] | None = None,
        offset: int = 0,
        device: tuple[int, int] = (1, 0),
        version: tuple[int, int] | None = None,
        flags: int = 0,
    ) -> None:
        self.deleted = 0
        self.memory = memory
        self.shape = (ctypes.c_int64 * max(1, len(shape)))(*shape)
        self.strides = (ctypes.c_int64 * len(strides))(*strides) if strides else None
        self.deleter = DELETER(self._delete)
        tensor = dlpack._Tensor(
            memory.ctypes.data,
            *device,
            len(shape),
            dlpack._DataType(*kind),
            ctypes.cast(self.shape, ctypes.POINTER(ctypes.c_int64)),
            ctypes.cast(self.strides, ctypes.POINTER(ctypes.c_int64)) if self.strides else None,
            offset,
        )
        if version is None:
            self.managed: Any = Managed(tensor, None, self.deleter)
            self.name = b"dltensor"
        else:
            self.managed = ManagedVersioned(*version, None, self.deleter, flags, tensor)
            self.name = b"dltensor_versioned"
        self.alive.append(self)  # a C library's memory is there until its deleter is called
        # no destructor: the tests take every capsule that must be freed
        self.capsule = new_capsule(ctypes.addressof(self.managed), self.name, None)

    def _delete(self, address: int) -> None:
        assert address == ctypes.addressof(self.managed)
        self.deleted += 1


BFLOAT16, FLOAT32, INT4 = (4, 16, 1), (2, 32, 1), (0, 4, 1)


@pytest.mark.parametrize("version", [None, (1, 0), (1, 9)])
@pytest.mark.parametrize("kind", [BFLOAT16, FLOAT32], ids=["bfloat16", "float32"])
def test_the_deleter_runs_once_and_last(version: Any, kind: tuple[int, int, int]) -> None:
    dtype = ml_dtypes.bfloat16 if kind == BFLOAT16 else np.float32
    memory = np.arange(6).astype(dtype)
    handmade = Handmade(memory, (2, 3), kind, version=version)
    got = rv.from_dlpack(handmade.capsule)
    assert (got.dtype, got.shape) == (np.dtype(dtype), (2, 3))
    assert np.shares_memory(got, memory)
    part = got[1:]
    del got
    gc.collect()
    assert handmade.deleted == 0  # a view keeps the memory
    np.testing.assert_array_equal(part[0], memory[3:])
    del part
    gc.collect()
    assert handmade.deleted == 1
    with pytest.raises(InvalidInput, match="taken already"):
        rv.from_dlpack(handmade.capsule)


def test_strides_and_byte_offset_of_a_capsule() -> None:
    memory = np.arange(12).astype(ml_dtypes.bfloat16)
    handmade = Handmade(memory, (3, 2), BFLOAT16, strides=(1, 3), offset=4)
    np.testing.assert_array_equal(rv.from_dlpack(handmade.capsule), memory[2:8].reshape(2, 3).T)


def test_the_struct_is_as_it_was_after_reading() -> None:
    handmade = Handmade(np.zeros(4, ml_dtypes.bfloat16), (4,), BFLOAT16)
    got = rv.from_dlpack(handmade.capsule)
    kind = handmade.managed.tensor.dtype
    assert (kind.code, kind.bits, kind.lanes) == BFLOAT16
    del got


@pytest.mark.parametrize("version", [None, (1, 0)])
def test_other_devices_are_refused_and_the_capsule_is_left(version: Any) -> None:
    handmade = Handmade(np.zeros(4, np.float32), (4,), FLOAT32, device=(2, 1), version=version)
    with pytest.raises(DeviceMismatch, match=r"DLPack device \(2, 1\)"):
        rv.from_dlpack(handmade.capsule)
    assert handmade.deleted == 0
    exporter = Exporter(np.zeros(4, np.float32), device=(2, 0))
    with pytest.raises(DeviceMismatch, match=r"\(2, 0\); move it to the CPU"):
        rv.from_dlpack(exporter)
    assert exporter.asked == []  # the device was not troubled


def test_pinned_host_memory_is_readable() -> None:
    got = rv.from_dlpack(Handmade(np.arange(4).astype(ml_dtypes.bfloat16), (4,), BFLOAT16, device=(3, 0)).capsule)
    assert got.tolist() == [0, 1, 2, 3]


def test_a_newer_major_version_is_refused() -> None:
    handmade = Handmade(np.zeros(4, np.float32), (4,), FLOAT32, version=(2, 0))
    with pytest.raises(InvalidInput, match=r"version 2\.0 is not readable"):
        rv.from_dlpack(handmade.capsule)


@pytest.mark.parametrize("kind", [(2, 32, 4), (3, 64, 1), (0, 128, 1), (2, 80, 1), (99, 8, 1)])
def test_element_types_without_a_name(kind: tuple[int, int, int]) -> None:
    with pytest.raises(DTypeMismatch, match=f"type code {kind[0]}, {kind[1]} bits, {kind[2]} lanes"):
        rv.from_dlpack(Handmade(np.zeros(64, np.uint8), (1,), kind).capsule)


@pytest.mark.parametrize(
    ("kind", "dtype", "values"),
    [
        (INT4, ml_dtypes.int4, [-8, 7, 0, -1, 3]),
        ((1, 4, 1), ml_dtypes.uint4, [15, 0, 7, 8, 1]),
        ((0, 2, 1), ml_dtypes.int2, [-2, 1, 0, -1, 1]),
        ((1, 2, 1), ml_dtypes.uint2, [3, 0, 1, 2, 3]),
        ((17, 4, 1), ml_dtypes.float4_e2m1fn, [0.5, -6.0, 0.0, 3.0, -0.5]),
    ],
)
def test_packed_elements_are_unpacked(kind: tuple[int, int, int], dtype: Any, values: list[float]) -> None:
    expected = np.array(values).astype(dtype)
    bits = kind[1]
    codes = expected.view(np.uint8) & ((1 << bits) - 1)
    packed = np.zeros((len(values) * bits + 7) // 8, np.uint8)
    for k, code in enumerate(codes):
        packed[k * bits // 8] |= code << (k * bits % 8)
    got = rv.from_dlpack(Handmade(packed, (5,), kind).capsule)
    assert got.dtype == expected.dtype
    np.testing.assert_array_equal(got, expected)


def test_packed_elements_in_lanes_and_with_strides() -> None:
    packed = np.array([0x21, 0x43], np.uint8)
    assert rv.from_dlpack(Handmade(packed, (2,), (1, 4, 2)).capsule).tolist() == [1, 2, 3, 4]
    with pytest.raises(InvalidInput, match="must be contiguous"):
        rv.from_dlpack(Handmade(packed, (2, 2), (1, 4, 1), strides=(1, 2)).capsule)
    with pytest.raises(DTypeMismatch, match="export them padded"):
        rv.from_dlpack(Handmade(packed, (2,), (15, 6, 1)).capsule)


def test_padded_elements_are_not_copied() -> None:
    memory = np.array([1, 2, 3], ml_dtypes.int4)
    got = rv.from_dlpack(Handmade(memory, (3,), INT4, version=(1, 1), flags=4).capsule)
    assert np.shares_memory(got, memory)
    assert got.tolist() == [1, 2, 3]


@pytest.mark.parametrize("thing", [None, 3, "text", [1.0], object()])
def test_what_is_no_capsule(thing: Any) -> None:
    with pytest.raises(InvalidInput, match="expected an object with __dlpack__"):
        rv.from_dlpack(thing)


# -- lifetimes ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [DType.float32, DType.bfloat16, DType.int4], ids=str)
def test_no_leak_over_ten_thousand_round_trips(dtype: DType) -> None:
    given = np.zeros(64, dtype.numpy)
    alive: list[weakref.ref[np.ndarray]] = []
    for k in range(10_000):
        fresh = given.copy()
        if k % 1000 == 0:
            alive.append(weakref.ref(fresh))
        got = rv.from_dlpack(Exporter(fresh))
        del got
        rv.to_dlpack(fresh, max_version=(1, 1))  # a capsule that nobody takes
    del fresh
    gc.collect()
    assert [ref for ref in alive if ref() is not None] == []


def test_the_source_lives_as_long_as_a_view() -> None:
    source = np.arange(4).astype(ml_dtypes.bfloat16)
    ref = weakref.ref(source)
    got = rv.from_dlpack(Exporter(source))
    del source
    gc.collect()
    assert ref() is not None
    assert got.tolist() == [0, 1, 2, 3]
    del got
    gc.collect()
    assert ref() is None


def test_round_trips_from_many_threads() -> None:
    source = np.arange(1000).astype(ml_dtypes.bfloat16)
    wrong: list[Any] = []

    def work() -> None:
        for _ in range(500):
            got = rv.from_dlpack(Exporter(source))
            if got[-1] != source[-1]:
                wrong.append(got)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


# -- inputs of a session --------------------------------------------------------------------------------------------


class ArrayInterface:
    def __init__(self, array: np.ndarray) -> None:
        self.array = array

    @property
    def __array_interface__(self) -> dict[str, Any]:
        return self.array.__array_interface__


class ArrayMethod:
    def __init__(self, array: np.ndarray) -> None:
        self.array = array

    def __array__(self, dtype: Any = None, copy: Any = None) -> np.ndarray:
        return np.array(self.array, dtype=dtype, copy=copy)


class RequiresGrad:
    """Refuses DLPack, as a tensor with a gradient does, but has ``__array__``."""

    def __init__(self, array: np.ndarray | None) -> None:
        self.array = array

    def __dlpack__(self, **_: Any) -> Any:
        raise BufferError("Can't export tensors that require gradient")

    def __dlpack_device__(self) -> tuple[int, int]:
        return (1, 0)

    def __array__(self, dtype: Any = None, copy: Any = None) -> np.ndarray:
        if self.array is None:
            raise RuntimeError("call detach() first")
        return self.array


VALUES = np.array([[1, 2, 3], [4, 5, 6]], np.float32)


@pytest.mark.parametrize(
    "wrap",
    [
        Exporter,
        OldExporter,
        ArrayInterface,
        ArrayMethod,
        RequiresGrad,
        memoryview,
        lambda a: memoryview(a).toreadonly(),
        lambda a: (ctypes.c_float * 3 * 2).from_buffer(a),
        rv.OrtValue.ortvalue_from_numpy,
    ],
)
def test_inputs_of_other_libraries_are_not_copied(wrap: Any) -> None:
    given = VALUES.copy()
    got = to_array(wrap(given))
    assert np.shares_memory(got, given)
    assert got.dtype == np.float32
    with rv.load(linear()) as session:
        expected = session.run({"x": VALUES})["y"]
        np.testing.assert_array_equal(session.run({"x": wrap(given)})["y"], expected)


def test_plain_python_values_take_the_type_of_the_input() -> None:
    with rv.load(linear()) as session:
        expected = session.run({"x": VALUES})["y"]
        np.testing.assert_array_equal(session.run({"x": VALUES.tolist()})["y"], expected)
        np.testing.assert_array_equal(session.run({"x": VALUES.astype(int).tolist()})["y"], expected)


def test_typed_buffers_keep_their_type() -> None:
    assert to_array(python_arrays.array("d", [1.0, 2.0])).dtype == np.float64
    assert to_array(bytearray(b"\1\2")).tolist() == [1, 2]
    assert to_array(np.float16(1.5)).dtype == np.float16
    assert to_array(b"text").tolist() == "text"


@pytest.mark.parametrize(
    ("value", "dtype", "problem"),
    [
        ([1.5], DType.int32, "holds float64"),
        (["1.5"], DType.float32, "holds <U3"),
        ([300], DType.uint8, "out of bounds"),
        ([9], DType.int4, r"values must be in \[-8, 7\]"),
        ([1j], DType.float64, "holds complex128"),
        ([[1], [1, 2]], DType.float32, "inhomogeneous"),
        ([None], DType.float32, "holds object"),
    ],
)
def test_python_values_that_do_not_fit(value: Any, dtype: DType, problem: str) -> None:
    with pytest.raises(DTypeMismatch, match=problem):
        to_array(value, dtype)


def test_small_integers_and_floats_from_python() -> None:
    assert to_array([-8, 7], DType.int4).tolist() == [-8, 7]
    assert to_array([0.5, 6.0], DType.float4_e2m1fn).tolist() == [0.5, 6.0]
    assert to_array([1, 2], DType.bfloat16).dtype == ml_dtypes.bfloat16
    assert to_array([], DType.int64).dtype == np.int64
    assert to_array([True], DType.float32).tolist() == [1.0]


def test_what_no_protocol_explains() -> None:
    with pytest.raises(InvalidInput, match="cannot make a tensor of object"):
        to_array(object())
    with pytest.raises(InvalidInput, match="RequiresGrad does not hand out its data: Can't export"):
        to_array(RequiresGrad(None))
    with rv.load(linear()) as session, pytest.raises(InvalidInput, match="input 'x': cannot make a tensor of object"):
        session.run({"x": object()})
    with rv.load(linear()) as session, pytest.raises(DeviceMismatch, match="move it to the CPU"):
        session.run({"x": Exporter(VALUES, device=(2, 0))})


def test_errors_survive_a_process_border() -> None:
    with pytest.raises(InvalidInput) as caught:
        rv.InferenceSession(linear().SerializeToString()).run(None, {"z": VALUES})
    assert isinstance(caught.value, rv.InvalidArgument)
    copy = pickle.loads(pickle.dumps(caught.value))
    assert type(copy) is InvalidInput
    assert str(copy) == str(caught.value)
