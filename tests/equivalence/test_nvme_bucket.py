"""Engines that share a bucket, on moto's S3 server on loopback: what one writes the other is served, whatever becomes of the objects."""

import os
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator

import numpy as np
import pytest

from storage import bucket
from tests.equivalence.nvme import started
from tests.equivalence.nvme_damage import assert_cold, warnings
from tests.equivalence.test_nvme_faults import ANCHORS, ASKED, HEAD, PAGES
from tests.equivalence.test_resident import answer
from tests.models import prompt
from tests.storage.test_bucket import SERVER


@pytest.fixture(scope="module")
def process() -> Iterator[subprocess.Popen]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AWS_ACCESS_KEY_ID", "anybody")
        patch.setenv("AWS_SECRET_ACCESS_KEY", "anything")
        patch.setenv("TENSORSTORE_CURL_LOW_SPEED_TIME_SECONDS", "1")  # where nothing has asked a server in this process before
        command = [sys.executable, "-c", SERVER]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        yield process
        process.kill()
        process.wait()
        process.stdin.close()
        process.stdout.close()


@pytest.fixture(scope="module")
def endpoint(process) -> str:
    found = f"http://127.0.0.1:{int(process.stdout.readline())}"
    urllib.request.urlopen(urllib.request.Request(f"{found}/bucket", method="PUT")).close()
    return found


@pytest.fixture
def opened(tiny_engine, endpoint, request):
    """Starts an engine on a path of the test's own in the bucket."""
    name = request.node.name.replace("[", "-").replace("]", "").replace(" ", "-")
    return lambda **config: started(tiny_engine, f"s3://bucket/{name}", disk_endpoint=endpoint, **config)


def objects(caches):
    return caches.nvme.storage._place.kv


def write_heads(engine, opened) -> None:
    with opened() as caches:
        answer(engine, HEAD, user=HEAD.size)
        caches.nvme.drain()
        assert caches.nvme.stats()["failed"] == 0


def test_two_engines(tiny_engine, opened, caplog):
    """A writes; B starts while A runs, and hits with A's bits. B writes what A has not; conversations stay at home."""
    with opened() as one:
        answer(tiny_engine, HEAD, user=HEAD.size)
        one.nvme.drain()
        first, pool = tiny_engine.caches, tiny_engine.pool
        with opened() as other:
            record = assert_cold(tiny_engine, ASKED)
            assert (record.source, record.start, record.failed) == ("disk", 256, [])
            longer = np.concatenate([HEAD, prompt(100, seed=3)])
            assert assert_cold(tiny_engine, longer, user=longer.size).source != "cold"
            other.nvme.drain()
            assert other.nvme.stats()["written"] >= 2
            assert other.nvme.stats()["spilled"] == 0
        tiny_engine.caches, tiny_engine.pool = first, pool
    with opened() as one:
        record = assert_cold(tiny_engine, np.concatenate([longer[:390], prompt(20, seed=9)]))
        assert (record.source, record.start) == ("disk", 384)
        assert (one.resident.resident.source, warnings(caplog)) == (None, [])


def test_a_start_leaves_what_another_is_writing(tiny_engine, opened):
    """Pages come before the anchor that stands on them: B starts in between, and A's anchor finds them."""
    with opened() as one:
        first, pool = tiny_engine.caches, tiny_engine.pool
        one.nvme.storage.put("p-of-somebody", {"x": np.zeros(3)})
        with opened() as other:
            assert other.nvme.storage.find("p-of-somebody")
            assert other.nvme.stats()["storage_dropped"] == 0
        tiny_engine.caches, tiny_engine.pool = first, pool
        assert one.nvme.storage.get([("p-of-somebody", {"x": np.empty(3)})]) == 1


@pytest.mark.parametrize("damage", ["flipped", "cut", "gone"])
@pytest.mark.parametrize("what", ["page", "anchor"])
def test_a_damaged_object(tiny_engine, opened, caplog, what, damage):
    """It is gone for all, with the anchors over it; the next shorter one serves."""
    write_heads(tiny_engine, opened)
    key, path = (PAGES[3], f"{PAGES[3]}/K/0.0.0.0") if what == "page" else (ANCHORS[4], f"{ANCHORS[4]}/section.gdn.conv/0.0.0")
    with opened(disk_min_tokens=10**6) as caches:
        kv = objects(caches)
        data = kv.read(path).result().value
        assert data
        kv.write(path, {"flipped": data[:-1] + bytes([data[-1] ^ 1]), "cut": data[:-1], "gone": None}[damage]).result()
        record = assert_cold(tiny_engine, ASKED)
        assert (record.source, record.start) == ("disk", 128 if what == "page" else 192)
        assert record.failed == [f"nvme: {key} is damaged or gone"]
        assert len(warnings(caplog)) == 1
        assert not [name for name in kv.list().result() if name.startswith(key.encode())]
    with opened(disk_min_tokens=10**6):
        assert assert_cold(tiny_engine, ASKED).failed == []
    assert len(warnings(caplog)) == 1


@pytest.mark.parametrize("how", ["silent", "gone"])
def test_a_server_that_goes_away(tiny_engine, endpoint, process, opened, caplog, monkeypatch, how):
    """It says nothing more, or is not there: the request goes on cold, in one line, and those after it do not ask. Last, for it ends the server."""
    monkeypatch.setattr(bucket, "RETRIES", {"max_retries": 1, "initial_delay": "10ms", "max_delay": "10ms"})
    write_heads(tiny_engine, opened)
    with opened(disk_min_tokens=10**6) as caches:
        asked, get = [], caches.nvme.storage.get
        monkeypatch.setattr(caches.nvme.storage, "get", lambda chain: asked.append(1) or get(chain))
        if how == "gone":
            process.kill()
            process.wait()
        else:
            os.kill(process.pid, signal.SIGSTOP)
        record = assert_cold(tiny_engine, ASKED)
        assert (record.source, record.why) == ("cold", "damaged")
        assert record.failed == [f"nvme: {ANCHORS[4]} cannot be read now"]
        (line,) = warnings(caplog)
        assert line.startswith(f"{ANCHORS[4]} cannot be read now; nothing is looked for here for ")
        before = len(asked)
        for _ in range(3):
            caches.clear()
            record = assert_cold(tiny_engine, ASKED)
            assert (record.source, record.failed) == ("cold", [])
        assert len(asked) == before
        assert len(warnings(caplog)) == 1
        assert caches.nvme.stats()["anchors"] == 4
        if how == "silent":
            os.kill(process.pid, signal.SIGCONT)
            caches.clear()
            caches.nvme._resumes = 0.0
            record = assert_cold(tiny_engine, ASKED)
            assert (record.source, record.start) == ("disk", 256)
