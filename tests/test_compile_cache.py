"""The directory of compiled programs: where it is, and that damage in it costs one compilation and no more."""

import time

import jax
import numpy as np
import pytest

from qjax.compile_cache import faults, use_compile_cache


@pytest.fixture
def cache_afterwards(compile_cache):
    yield
    use_compile_cache(compile_cache)


def compile_something(number):
    """A program that no cache has seen: `number` and the time are constants of it."""
    now = np.float32(time.time() % 1e5)
    jax.jit(lambda x: x * number + now)(np.arange(5, dtype=np.float32))


@pytest.mark.usefixtures("cache_afterwards")
def test_the_compile_cache_is_where_the_engine_says(tmp_path):
    """Private, and the one of the last engine that was started, also when another was in use before."""
    use_compile_cache(tmp_path / "one")
    compile_something(11)
    assert (tmp_path / "one").stat().st_mode & 0o777 == 0o700
    assert any((tmp_path / "one").iterdir())
    use_compile_cache(tmp_path / "two")
    compile_something(12)
    assert any((tmp_path / "two").iterdir())


@pytest.mark.usefixtures("cache_afterwards")
def test_no_compile_cache_keeps_nothing(compile_cache):
    before = set(compile_cache.iterdir())
    use_compile_cache(None)
    compile_something(13)
    assert set(compile_cache.iterdir()) == before
    use_compile_cache(compile_cache)
    compile_something(14)
    assert set(compile_cache.iterdir()) > before  # control


def entries(directory):
    return {path.name: path.read_bytes() for path in directory.iterdir()}


def again(directory, function):
    """As the next process would: nothing compiled is left in memory."""
    jax.clear_caches()
    use_compile_cache(directory)
    return jax.jit(function)(np.arange(5, dtype=np.float32))


@pytest.mark.usefixtures("cache_afterwards")
@pytest.mark.parametrize("damage", [lambda b: b"", lambda b: b[: len(b) // 2], lambda b: b[:50] + bytes([b[50] ^ 1]) + b[51:], lambda b: b"no"])
def test_a_damaged_entry_is_made_anew_once(tmp_path, damage):
    """JAX warns of it, which is an error in these tests, and would keep it."""
    now = np.float32(time.time() % 1e5)

    def program(x):
        return x * 3 + now

    want = again(tmp_path, program)
    whole = entries(tmp_path)
    for name, content in whole.items():
        (tmp_path / name).write_bytes(damage(content))
    np.testing.assert_array_equal(again(tmp_path, program), want)
    assert faults() == f"{len(whole)} damaged made anew"
    mended = entries(tmp_path)
    assert mended.keys() == whole.keys()
    assert all(mended[name] != damage(content) for name, content in whole.items())
    np.testing.assert_array_equal(again(tmp_path, program), want)
    assert faults() == ""
    assert entries(tmp_path) == mended  # read this time, and not written again


@pytest.mark.usefixtures("cache_afterwards")
def test_a_full_disk_leaves_no_entry(tmp_path):
    """A limit on a file's size stands in for the disk's: the file is there by the time that writing to it fails."""
    resource = pytest.importorskip("resource")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    use_compile_cache(tmp_path)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, limits[1]))
    try:
        compile_something(15)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert faults().endswith(" not kept: File too large")
    assert entries(tmp_path) == {}
    compile_something(16)
    assert entries(tmp_path) != {}  # control


@pytest.mark.usefixtures("cache_afterwards")
def test_a_directory_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=f"^compile_cache must be a directory that can be made, not {tmp_path / 'file'}: File exists$"):
        use_compile_cache(tmp_path / "file")
