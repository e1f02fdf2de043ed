"""The engine's thread: what waits, what is refused, how it ends."""

import contextlib
import itertools
import threading

import httpx2
import pytest

from qjax.config import DiskConfig
from qjax.serving.worker import FAILED
from tests.equivalence.nvme import Slow
from tests.serving.inside import embedded, inside
from tests.serving.live import until

CHAT = "/v1/chat/completions"
HELLO = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 4}
LONG = {"messages": [{"role": "user", "content": "Tell me a story."}], "max_tokens": 3000, "stream": True, "temperature": 3.0, "seed": 5}


def without_end(make):
    """An engine whose model never says that it has done."""

    def made():
        engine = make()
        engine.model.tokenizer.stop_ids = ()
        return engine

    return made


def metric(there, name: str) -> float:
    """One value of /metrics; 0 where it was never counted."""
    found = dict(line.rsplit(" ", 1) for line in there.http.get("/metrics").text.splitlines() if not line.startswith("#"))
    return float(found.get(name, 0))


def test_while_it_loads_everything_is_unavailable(compile_cache):
    go = threading.Event()

    def make():
        go.wait()
        return embedded(compile_cache)

    with inside(make, ready=False, model_name="named") as there:
        for method, path, body in (
            ("post", "/v1/cache/clear", None),
            ("get", "/health", None),
            ("get", "/ready", None),
            ("get", "/v1/models", None),
            ("post", CHAT, HELLO),
        ):
            response = there.http.request(method, path, json=body)
            assert response.status_code == 503
            assert int(response.headers["retry-after"]) > 0
            assert "being loaded" in response.json()["error"]["message"]
        assert there.http.get("/metrics").status_code == 200
        go.set()
        until(lambda: there.http.get("/ready").status_code == 200, "engine")
        assert there.http.post(CHAT, json=HELLO).status_code == 200


def test_a_model_that_cannot_be_loaded_ends_the_server():
    def make():
        raise ValueError("no such model")

    with inside(make, ready=False) as there:
        until(lambda: there.service.worker.state == FAILED, "end")
        assert str(there.service.worker.error) == "no such model"


def test_who_waits_for_an_engine_that_fails_waits_no_longer(compile_cache, monkeypatch):
    """Else a thread that asks for the caches' counters would keep the process from ending."""
    go = threading.Event()

    def fail():
        go.wait()
        raise RuntimeError("broken")

    with inside(lambda: embedded(compile_cache)) as there:
        worker = there.service.worker
        monkeypatch.setattr(worker.engine.caches, "pump", fail)
        worker.do(lambda engine: None)
        thread = threading.Thread(target=worker.do, args=[lambda engine: None], daemon=True)
        thread.start()
        until(lambda: worker._runs._to_do, "call that waits")
        go.set()
        thread.join(60)
        assert not thread.is_alive()
        assert worker.state == FAILED


def test_a_full_queue_is_told_and_a_cancelled_request_makes_room(compile_cache):
    with inside(without_end(lambda: embedded(compile_cache, parallel=1)), queue=1) as there, there.http.stream("POST", CHAT, json=LONG) as first:
        lines = first.iter_lines()
        next(lines)
        with httpx2.Client(base_url=there.url, timeout=300) as other, other.stream("POST", CHAT, json=LONG) as second:
            assert second.status_code == 200  # its headers come while it waits
            response = there.http.post(CHAT, json=HELLO)
            assert response.status_code == 429
            assert response.headers["retry-after"] == "1"
            assert response.json()["error"]["code"] == "queue_full"
        until(lambda: there.service.worker.waiting == 1, "room")
        first.close()
        assert there.http.post(CHAT, json=HELLO).status_code == 200


def test_a_client_that_goes_ends_its_request_and_keeps_what_was_computed(compile_cache):
    with inside(without_end(lambda: embedded(compile_cache))) as there:
        text = ""
        with there.http.stream("POST", CHAT, json=LONG | {"chat_template_kwargs": {"enable_thinking": False}}) as stream:
            for line in stream.iter_lines():
                text += line
                if text.count('"content"') > 20:
                    break
        until(lambda: there.service.worker.waiting == 0, "end")
        until(lambda: metric(there, 'qjax_generations_total{finish="cancelled"}') == 1, "record of it")
        record = there.service.worker.engine.caches.ledger.records[-1]
        assert 20 <= record.generated < 3000
        pool = there.service.worker.engine.pool
        assert there.http.post("/v1/cache/clear").status_code == 200
        assert pool.free == pool.pages


def test_a_whole_answer_ends_with_its_client_too(compile_cache):
    with inside(without_end(lambda: embedded(compile_cache))) as there, httpx2.Client(base_url=there.url, timeout=1) as other:
        with pytest.raises(httpx2.ReadTimeout):
            other.post(CHAT, json=LONG | {"stream": False})
        until(lambda: there.service.worker.waiting == 0, "end")
        until(lambda: metric(there, 'qjax_generations_total{finish="cancelled"}') == 1, "record of it")


def test_a_stream_is_kept_alive_while_a_prompt_is_read(compile_cache):
    """The headers come at once, and comments while another request has the engine."""
    with contextlib.ExitStack() as stack:
        there = stack.enter_context(inside(without_end(lambda: embedded(compile_cache, parallel=1)), ping_seconds=0.05))
        first = stack.enter_context(there.http.stream("POST", CHAT, json=LONG)).iter_lines()
        next(first)
        other = stack.enter_context(httpx2.Client(base_url=there.url, timeout=300))
        lines = stack.enter_context(other.stream("POST", CHAT, json=LONG)).iter_lines()
        assert '"role":"assistant"' in next(lines)
        assert list(itertools.islice((line for line in lines if line), 3)) == [": ping"] * 3


def test_a_planned_stop_lets_what_runs_end_and_refuses_the_rest(compile_cache):
    with inside(lambda: embedded(compile_cache), drain_seconds=60) as there:
        with there.http.stream("POST", CHAT, json=LONG | {"max_tokens": 500, "temperature": 0.0}) as stream:
            lines = stream.iter_lines()
            next(lines)
            stop = threading.Thread(target=there.service.worker.drain, args=[60])
            stop.start()
            with httpx2.Client(base_url=there.url) as other:
                until(lambda: other.get("/ready").status_code == 503, "stop")
                assert "stops" in other.post(CHAT, json=HELLO).json()["error"]["message"]
            assert "data: [DONE]" in list(lines)
        stop.join()


def test_what_a_stop_cuts_off_is_told(compile_cache):
    with inside(without_end(lambda: embedded(compile_cache))) as there, there.http.stream("POST", CHAT, json=LONG) as stream:
        lines = stream.iter_lines()
        next(lines)
        there.service.worker.drain(0)
        last = [line for line in lines if line][-1]
        assert '"code":"unavailable"' in last
        assert "cut this answer off" in last


def test_what_a_request_left_to_write_is_written_while_nothing_runs(compile_cache, tmp_path, monkeypatch):
    """A head of 20 pages, for 4 of which the staging has room, goes to NVMe when the answer has ended, not with the next request."""
    disk = DiskConfig.private(tmp_path, disk_min_tokens=0, admit_after=1, staging_gb=4 * 65_536 / 2**30)
    body = {"messages": [{"role": "user", "content": "My room is 2354. " * 300}], "max_tokens": 1}

    def waiting(there) -> int:
        return there.http.get("/v1/cache/stats").json()["nvme"]["waiting"]

    with inside(lambda: embedded(compile_cache, disk)) as there, Slow(monkeypatch) as slow:
        assert there.http.post(CHAT, json=body).status_code == 200
        assert waiting(there) > 0
        slow.go()
        until(lambda: waiting(there) == 0, "end of what waits")
        there.service.worker.do(lambda engine: engine.caches.nvme.drain())
        assert there.http.get("/v1/cache/stats").json()["nvme"]["anchors"] > 0


def test_caches_are_emptied_by_tier(compile_cache, tmp_path):
    disk = DiskConfig.private(tmp_path, disk_min_tokens=0, admit_after=1)
    body = {"messages": [{"role": "user", "content": "My room is 2354. " * 60}], "max_tokens": 1}

    def cached(there) -> int:
        there.service.worker.do(lambda engine: engine.caches.nvme.drain())
        return there.http.post(CHAT, json=body).json()["usage"]["prompt_tokens_details"]["cached_tokens"]

    with inside(lambda: embedded(compile_cache, disk)) as there:
        there.service.worker.do(lambda engine: setattr(engine.caches.nvme, "pays", lambda *_: True))
        assert cached(there) == 0
        assert there.http.post("/v1/cache/clear").json() == {"cleared": "memory"}
        assert cached(there) > 100  # from NVMe
        assert there.http.post("/v1/cache/clear?tier=disk").json() == {"cleared": "disk"}
        assert cached(there) > 100  # from memory
        assert there.http.post("/v1/cache/clear?tier=all").json() == {"cleared": "all"}
        assert cached(there) == 0
        assert cached(there) > 100
        assert there.http.post("/v1/cache/clear", json={"tier": "all"}).json() == {"cleared": "all"}
        assert cached(there) == 0
        assert there.http.post("/v1/cache/clear", json={}).json() == {"cleared": "memory"}
        for wrong in ({"params": {"tier": "some"}}, {"json": {"tier": ["all"]}}, {"json": {"what": "all"}}, {"content": b"all"}):
            assert there.http.post("/v1/cache/clear", **wrong).status_code == 400
