"""Object stores, on moto's S3 server on loopback: the same entries, the same checks, and any number of processes at once."""

import contextlib
import json
import subprocess
import sys
import urllib.request
from collections.abc import Iterator

import numpy as np
import pytest
import tensorstore as ts

from storage import Storage, StorageError
from tests.bits import assert_bits_equal
from tests.storage.children import run
from tests.storage.content import FINGERPRINT, content, empty, key, reads

SERVER = """
import sys
from moto.server import ThreadedMotoServer
server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
server.start()
print(server.get_host_and_port()[1], flush=True)
sys.stdin.read()
server.stop()
"""


@contextlib.contextmanager
def s3_server() -> Iterator[dict]:
    """What a storage needs to know of a server of one bucket, "bucket", which ends with the context."""
    process = subprocess.Popen([sys.executable, "-c", SERVER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    try:
        endpoint = f"http://127.0.0.1:{int(process.stdout.readline())}"
        urllib.request.urlopen(urllib.request.Request(f"{endpoint}/bucket", method="PUT")).close()
        yield {"endpoint": endpoint, "aws_region": "us-east-1", "aws_credentials": {"type": "environment"}}
    finally:
        process.stdin.close()
        process.wait()
        process.stdout.close()


@pytest.fixture(scope="module", autouse=True)
def credentials() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AWS_ACCESS_KEY_ID", "anybody")
        patch.setenv("AWS_SECRET_ACCESS_KEY", "anything")
        yield


@pytest.fixture(scope="module")
def server(credentials) -> Iterator[dict]:
    with s3_server() as options:
        yield options


@pytest.fixture
def url(request) -> str:
    """A path of the test's own."""
    return f"s3://bucket/{request.node.name.replace('[', '/').replace(']', '').replace(' ', '-')}"


@pytest.fixture
def opened(url, server):
    return lambda fingerprint=FINGERPRINT, **arguments: Storage.open(url, fingerprint, options=server, **arguments)


def objects(store: Storage) -> ts.KvStore:
    """The objects themselves, to damage them."""
    return store._place.kv


def test_entries_are_there_at_the_next_start(opened):
    with opened() as store:
        written = [store.put(key(i), content(i), number=i) for i in range(3)]
        assert all(reads(store, i) for i in range(3))
    with opened() as store:
        assert list(store.entries()) == [key(i) for i in range(3)]
        assert all(reads(store, i) for i in range(3))
        assert [entry.fields for entry in store.entries().values()] == [{"number": i} for i in range(3)]
        assert [entry.leaves for entry in store.entries().values()] == [entry.leaves for entry in written]
        assert (store.stats()["free"], store.stats()["swept"], store.stats()["got"]) == (None, [], 3)


def test_every_width_and_no_element_and_a_slice(opened):
    rng = np.random.default_rng(6)
    arrays = {dtype: rng.integers(0, 100, (5, 9)).astype(dtype) for dtype in ("uint8", "uint16", "float32", "int64", "bfloat16", "bool")}
    arrays |= {"none": np.zeros((0, 3), np.float32), "one": np.array(7, np.int16), "zeros": np.zeros(5000, np.uint8)}
    with opened() as store:
        store.put("k", arrays)
        found = store.entries()["k"].empty()
        assert store.get([("k", found)]) == 1
        assert_bits_equal(found, arrays)
        buffer = np.zeros((5, 20), np.int64)
        assert store.get([("k", {"int64": buffer[:, 3:12]})]) == 1
        assert_bits_equal(buffer[:, 3:12], arrays["int64"])


def test_two_that_share_a_bucket_see_each_others_entries(opened):
    """Neither locks it. What one adds the other finds when it asks; what one drops is not there for the other either."""
    with opened() as one, opened() as other:
        one.put(key(1), content(1), by="one")
        assert other.entries() == {}
        assert reads(other, 1)
        assert list(other.entries()) == [key(1)]
        other.put(key(2), content(2), by="other")
        assert one.find(key(2)).fields == {"by": "other"}
        assert one.get([(key(i), empty()) for i in (1, 2, 3)]) == 2
        assert other.put(key(1), content(1), by="other").fields == {"by": "one"}  # not written again
        assert other.stats()["put"] == 1
        one.drop(key(1))
        assert not reads(other, 1)
        assert [reads(store, 2) for store in (one, other)] == [True, True]
        other.put(key(1), content(1))
        assert [reads(store, 1) for store in (one, other)] == [True, True]


def test_another_process_sees_them_too(opened, url, server):
    with opened() as store:
        store.put(key(1), content(1))
        script = """
import json, sys
from storage import Storage
from tests.storage.content import *
with Storage.open(sys.argv[1], FINGERPRINT, options=json.loads(sys.argv[2])) as store:
    print(reads(store, 1), reads(store, 2))
    store.put(key(2), content(2))
"""
        assert run(script, url, json.dumps(server)) == "True False\n"
        assert reads(store, 2)


def test_fingerprints_do_not_see_and_do_not_sweep_each_other(opened):
    with opened() as one, opened(FINGERPRINT | {"weights": "5e1e"}) as other:
        one.put(key(1), content(1))
        other.put(key(2), content(2))
        assert [reads(one, i) for i in (1, 2)] == [True, False]
        assert [reads(other, i) for i in (1, 2)] == [False, True]
        assert other.stats()["swept"] == []
    with opened() as one:
        assert reads(one, 1)


def change(data: bytes, at: int) -> bytes:
    return data[:at] + bytes([data[at] ^ 16]) + data[at + 1 :]


FAULTS = {
    "flipped": (lambda data: change(data, 3), "sum"),
    "cut": (lambda data: data[:-1], "size"),
    "extended": (lambda data: data + b"x", "size"),
    "empty": (lambda data: b"", "size"),
    "missing": (lambda data: None, "missing"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_damaged_leaf(opened, caplog, fault):
    damage, kind = FAULTS[fault]
    with opened() as store:
        for i in range(3):
            store.put(key(i), content(i))
        kv, at = objects(store), f"{key(1)}/S/0.0"
        kv.write(at, damage(kv.read(at).result().value)).result()
        assert store.get([(key(i), empty()) for i in range(3)]) == 1
        assert [reads(store, i) for i in range(3)] == [True, False, True]
        assert (store.stats()["damaged"], len(caplog.records)) == ({kind: 1}, 1)
        assert not [name for name in kv.list().result() if name.startswith(key(1).encode())]
        store.put(key(1), content(1))
        assert reads(store, 1)


@pytest.mark.parametrize("fault", ["flipped", "cut", "empty", "another key's"])
def test_a_damaged_meta(opened, fault):
    with opened() as store:
        for i in range(2):
            store.put(key(i), content(i))
        kv = objects(store)
        meta = kv.read(f"{key(0)}/meta").result().value
        kv.write(f"{key(1)}/meta", meta if fault == "another key's" else FAULTS[fault][0](meta)).result()
    with opened() as store:
        assert list(store.entries()) == [key(0)]
        assert [reads(store, i) for i in range(2)] == [True, False]
        assert store.stats()["damaged"] == {"meta": 1}
        store.put(key(1), content(1))
        assert reads(store, 1)


def test_a_damaged_meta_that_another_one_wrote(opened):
    """Found when it is asked for: by a read, and by a put, which writes it anew."""
    with opened() as one, opened() as other:
        for i in range(2):
            one.put(key(i), content(i))
            objects(one).write(f"{key(i)}/meta", b"short").result()
        assert not reads(other, 0)
        other.put(key(1), content(1))
        assert reads(other, 1)
        assert other.stats()["damaged"] == {"meta": 2}


def test_an_unfinished_entry_is_not_seen_and_is_left_alone(opened):
    """Another process may be writing it."""
    with opened() as store:
        store.put(key(1), content(1))
        objects(store).write(f"{key(2)}/S/0.0", b"half").result()
    with opened() as store:
        assert list(store.entries()) == [key(1)]
        assert not reads(store, 2)
        assert objects(store).read(f"{key(2)}/S/0.0").result().value == b"half"
        store.put(key(2), content(2))
        assert reads(store, 2)


def test_a_server_that_goes_away_costs_hits_and_no_entry(url, caplog):
    """What cannot be reached is a miss with a reason, and is not called damaged in itself."""
    with s3_server() as options:
        store = Storage.open(url, FINGERPRINT, options=options)
        store.put(key(1), content(1))
        assert reads(store, 1)
    assert not reads(store, 1)
    assert not reads(store, 2)
    assert list(store.entries()) == [key(1)]
    assert store.stats()["damaged"] == {"unreadable": 2}
    assert "and is removed" not in caplog.text
    with pytest.raises(StorageError, match=f"{key(3)} cannot be written: "):
        store.put(key(3), content(3))
    assert list(store.entries()) == [key(1)]
    store.close()
    with pytest.raises(StorageError, match=r"s3://bucket/\S+ cannot be opened: "):
        Storage.open(url, FINGERPRINT, options=options)


def test_what_is_no_bucket_is_refused(server):
    with pytest.raises(StorageError, match="NoSuchBucket"):
        Storage.open("s3://another-bucket/path", FINGERPRINT, options=server)
    with pytest.raises(StorageError, match="Invalid S3 bucket name"):
        Storage.open("s3://x", FINGERPRINT, options=server)


def test_read_only_writes_nothing(opened):
    with opened() as store:
        store.put(key(1), content(1))
        before = objects(store).list().result()
    with opened(read_only=True) as store:
        assert reads(store, 1)
        with pytest.raises(StorageError, match="opened read-only"):
            store.put(key(2), content(2))
    with opened(FINGERPRINT | {"weights": "5e1e"}, read_only=True) as store:
        assert objects(store).list().result() == []
    with opened() as store:
        assert objects(store).list().result() == before


def test_google_urls_are_opened_by_the_same_code():
    """No server of it runs here: that its driver is asked is what can be seen."""
    with pytest.raises(StorageError, match=r"gs://x cannot be opened: .*Invalid GCS bucket name"):
        Storage.open("gs://x", FINGERPRINT)
