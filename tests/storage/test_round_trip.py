"""What is put comes back with its bits, whatever its dtype, size and place in memory."""

import re
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

import storage
from storage import host
from tests.bits import assert_bits_equal
from tests.storage.content import content, key, random_bits, reads

DTYPES = ["uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64", "float16", "float32", "float64", "complex64", "bfloat16"]
DTYPES += ["float8_e4m3fn", "float8_e5m2", "int4", "uint4"]
SHAPES = [(), (1,), (0,), (4, 0, 3), (7,), (3, 5, 7), (4096,), (2, 4096), (2, 3, 1031)]


@pytest.mark.parametrize("dtype", [*DTYPES, "bool"])
def test_every_dtype_comes_back_in_every_shape(opened, dtype):
    """Also NaNs with a payload and a sign, which random bits hold."""
    rng = np.random.default_rng(3)
    bits = [random_bits(rng, shape, np.uint8 if dtype == "bool" else dtype) for shape in SHAPES]
    arrays = {f"a{i}": (a % 2 == 1) if dtype == "bool" else a for i, a in enumerate(bits)}
    with opened() as store:
        store.put("k", arrays)
    with opened() as store:
        found = store.entries()["k"].empty()
        assert store.get([("k", found)]) == 1
        assert_bits_equal(found, arrays)
        assert {name: leaf.dtype for name, leaf in store.entries()["k"].leaves.items()} == dict.fromkeys(arrays, dtype)
        assert store.stats()["got_nbytes"] == sum(a.nbytes for a in arrays.values()) == store.entries()["k"].nbytes


def test_an_array_of_zeros_is_data(opened, root):
    """It has a file, and zeros are not what a missing file reads as."""
    store = opened()
    store.put("k", {"zeros": np.zeros(5000, np.float32)})
    found = {"zeros": np.ones(5000, np.float32)}
    assert store.get([("k", found)]) == 1
    assert not found["zeros"].any()
    (file,) = (root / store.fingerprint.digest / "k" / "zeros").iterdir()
    assert file.stat().st_size == 20000
    file.unlink()
    assert store.get([("k", found)]) == 0


def test_a_file_is_the_bytes_of_its_array(opened, root):
    store, array = opened(), content(1)["K"]
    store.put("k", {"K": array})
    (file,) = (root / store.fingerprint.digest / "k" / "K").iterdir()
    assert (file.name, file.read_bytes()) == ("0.0.0", array.tobytes())


def test_entries_are_read_into_slices_of_a_larger_buffer(opened):
    """Chunks of rows side by side, as a pool of pages has them; nothing beside them is written to."""
    rng, store = np.random.default_rng(4), opened()
    chunks = [random_bits(rng, (3, 16, 2, 5), ml_dtypes.bfloat16) for _ in range(4)]
    for i, chunk in enumerate(chunks):
        store.put(key(i), {"K": chunk})
    buffer = host((3, 80, 2, 5), ml_dtypes.bfloat16)
    buffer.view(np.uint16)[:] = 7
    assert store.get([(key(i), {"K": buffer[:, 8 + 16 * i : 24 + 16 * i]}) for i in range(4)]) == 4
    assert_bits_equal(buffer[:, 8:72], np.concatenate(chunks, axis=1))
    assert (buffer[:, :8].view(np.uint16) == 7).all()
    assert (buffer[:, 72:].view(np.uint16) == 7).all()


def test_slices_are_stored_as_what_they_show(opened):
    store, array = opened(), np.arange(6 * 8 * 10, dtype=np.int32).reshape(6, 8, 10)
    arrays = {"rows": array[:, 2:5], "columns": array[..., ::2], "backwards": array[::-1, 0, 0], "turned": array.T}
    store.put("k", arrays)
    found = store.entries()["k"].empty()
    assert store.get([("k", found)]) == 1
    assert_bits_equal(found, {name: np.ascontiguousarray(a) for name, a in arrays.items()})


def test_some_arrays_of_an_entry_can_be_read_alone(opened):
    store = opened()
    store.put(key(1), content(1))
    ids = np.empty(7, np.int32)
    assert store.get([(key(1), {"ids": ids})]) == 1
    assert_bits_equal(ids, content(1)["ids"])


def test_fields_come_back_as_json_gives_them(opened):
    fields = {"tokens": 1024, "parent": None, "share": 0.1, "views": ["K", "V"], "text": 'é "'}
    with opened() as store:
        assert store.put("k", content(1), **fields).fields == fields
    with opened() as store:
        assert store.entries()["k"].fields == fields


def test_a_key_that_is_there_keeps_its_content(opened):
    store = opened()
    first = store.put(key(1), content(1), n=1)
    assert store.put(key(1), content(2), n=2) is first
    assert reads(store, 1)
    assert store.stats()["put"] == 1


def test_get_says_how_many_from_the_first(opened):
    store = opened()
    for i in (0, 1, 3):
        store.put(key(i), content(i))
    entries = {i: {name: np.empty_like(a) for name, a in content(i).items()} for i in range(4)}
    assert store.get([(key(i), entries[i]) for i in (0, 1, 2, 3)]) == 2
    assert store.get([(key(2), entries[2])]) == 0
    assert store.get([]) == 0
    assert_bits_equal(entries[1], content(1))
    assert (store.stats()["got"], store.stats()["damaged"]) == (3, {})  # one that is not there is no damage, and 3 was read


def test_host_memory_begins_a_page(opened):
    for shape, dtype in [((3, 5), "bfloat16"), ((), "int64"), ((0, 4), "float32"), ((70000,), "uint8")]:
        array = host(shape, dtype)
        assert (array.shape, array.dtype, array.flags.writeable) == (shape, np.dtype(dtype), True)
        assert array.ctypes.data % 4096 == 0 or not array.size
        assert not array.view(np.uint8).any() if array.ndim else array == 0


@pytest.mark.parametrize("name", ["", ".", "..", "meta", "a/b", ".hidden", "a b", "x" * 129])
def test_names_that_cannot_be_directories_are_refused(opened, name):
    store = opened()
    with pytest.raises(ValueError, match="array's name"):
        store.put("k", {name: np.zeros(3)})
    with pytest.raises(ValueError, match="expected a key"):
        store.put("x" * 129 if name in ("meta", "x" * 129) else name, {"a": np.zeros(3)})
    assert store.stats()["entries"] == 0


@pytest.mark.parametrize(
    "array", [np.zeros(3, ">f4"), np.array([None]), np.array(["abc"]), np.zeros(2, "V3"), np.zeros(2, "i4,i4"), np.zeros(2, complex)]
)
def test_arrays_whose_bits_are_not_all_are_refused(opened, array):
    with pytest.raises(ValueError, match=r"a: expected elements of 1, 2, 4, 8 bytes"):
        opened().put("k", {"a": array})


def test_a_destination_that_cannot_be_written_to_is_the_callers_fault(opened):
    store = opened()
    store.put(key(1), content(1))
    with pytest.raises(ValueError, match="found ids to be read-only"):
        store.get([(key(1), {"ids": content(1)["ids"]})])
    assert reads(store, 1)


def test_storage_imports_nothing_of_qjax():
    sources = list(Path(storage.__file__).parent.rglob("*.py"))
    assert len(sources) > 5
    for source in sources:
        assert not re.search(r"^\s*(from|import) +(qjax|jax|flax|tests)\b", source.read_text(), re.MULTILINE), source
