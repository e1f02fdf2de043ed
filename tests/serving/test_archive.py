"""The answers on record after a restart: a client that leaves reasoning out goes on with the rows all the same."""

import dataclasses
import logging

import pytest

from qjax.config import DiskConfig
from qjax.serving.archive import NAME, Archive
from qjax.serving.records import Records
from tests.serving.inside import embedded, inside

CHAT = "/v1/chat/completions"


def turn(there, messages: list[dict], text: str) -> dict:
    """One turn of a chat whose client keeps no reasoning; its usage."""
    messages.append({"role": "user", "content": text})
    answer = there.http.post(CHAT, json={"messages": messages, "max_tokens": 60, "temperature": 0}).json()
    messages.append({"role": "assistant", "content": answer["choices"][0]["message"]["content"]})
    return answer["usage"]


def talk(there, messages: list[dict]) -> dict:
    """The last turn's usage, which has reasoning of three answers in its rows."""
    turn(there, messages, "My room is 2354. " + "The worker reads the file. " * 60 + "What is my room?")
    turn(there, messages, "And my room again?")
    return turn(there, messages, "What is my room?")


def restarted(compile_cache, directory, between=lambda: None) -> tuple[dict, dict, dict]:
    """Usage of the turn before a restart, of the one after it, and of that one where there was no restart."""
    disk = DiskConfig.private(directory, spill_min_tokens=0)
    messages: list[dict] = []

    def serve():
        return inside(lambda: embedded(compile_cache, disk), disk=disk)

    with serve() as there:
        before = talk(there, messages)
        alive = turn(there, list(messages), "Thanks, and my room?")
    between()
    with serve() as there:
        there.service.worker.do(lambda engine: setattr(engine.caches.nvme, "pays", lambda *_: True))
        return before, turn(there, messages, "Thanks, and my room?"), alive


def cached(usage: dict) -> int:
    return usage["prompt_tokens_details"]["cached_tokens"]


def test_a_conversation_goes_on_with_its_own_rows_after_a_restart(compile_cache, tmp_path):
    before, after, alive = restarted(compile_cache, tmp_path)
    assert after["prompt_tokens"] == alive["prompt_tokens"]
    assert cached(after) >= before["prompt_tokens"] + before["completion_tokens"] - 1
    file = tmp_path / "embedded" / NAME
    assert file.stat().st_mode & 0o777 == 0o600


def test_the_control_without_the_file_parts_at_the_first_answer(compile_cache, tmp_path):
    before, after, alive = restarted(compile_cache, tmp_path, (tmp_path / "embedded" / NAME).unlink)
    assert after["prompt_tokens"] < alive["prompt_tokens"]  # the reasoning is not in it
    assert cached(after) < before["prompt_tokens"]


@pytest.mark.parametrize("tier", ["disk", "all"])
def test_what_empties_the_files_removes_it(compile_cache, tmp_path, tier):
    disk = DiskConfig.private(tmp_path)
    with inside(lambda: embedded(compile_cache, disk), disk=disk) as there:
        talk(there, [])
    file = tmp_path / "embedded" / NAME
    assert file.exists()
    with inside(lambda: embedded(compile_cache, disk), disk=disk) as there:
        assert there.http.post("/v1/cache/clear").status_code == 200
        assert file.exists()
        assert there.http.post(f"/v1/cache/clear?tier={tier}").status_code == 200
        assert not file.exists()


def test_a_second_server_on_the_directory_reads_it_and_leaves_it_alone(compile_cache, tmp_path):
    """It cannot write there, and goes on with the conversations all the same."""
    disk, messages = DiskConfig.private(tmp_path, spill_min_tokens=0), []
    with inside(lambda: embedded(compile_cache, disk), disk=disk) as there:
        before = talk(there, messages)
    file = tmp_path / "embedded" / NAME
    with inside(lambda: embedded(compile_cache, disk), disk=disk):
        whole = file.read_bytes()
        with inside(lambda: embedded(compile_cache, disk), disk=disk) as second:
            assert second.service.worker.engine.caches.nvme.storage.read_only
            second.service.worker.do(lambda engine: setattr(engine.caches.nvme, "pays", lambda *_: True))
            after = turn(second, messages, "Thanks, and my room?")
            assert second.http.post("/v1/cache/clear?tier=all").status_code == 200
        assert file.read_bytes() == whole
    assert cached(after) >= before["prompt_tokens"] + before["completion_tokens"] - 1


@pytest.fixture
def kept(compile_cache, tmp_path):
    """Records as a server has them, and the directory in which they lie."""
    disk = DiskConfig.private(tmp_path)
    with inside(lambda: embedded(compile_cache, disk), disk=disk) as there:
        talk(there, [])
        talk(there, [])
        records = there.service.prompts.records.all()
    return records, tmp_path / "embedded"


def loaded(directory, model: str | None = None) -> list:
    records = Records(2**20)
    Archive(directory, model or "m").load(records)
    return records.all()


def test_every_field_comes_back(kept, tmp_path):
    records, _ = kept
    there = Records(2**20)
    for record in records:
        there.add(record)
    Archive(tmp_path, "m").save(there)
    found = loaded(tmp_path)
    assert len(found) == len(there) >= 3
    for one, other in zip(there.all(), found, strict=True):
        for f in dataclasses.fields(one):
            mine, others = getattr(one, f.name), getattr(other, f.name)
            if f.name in ("tail", "tokens"):
                assert mine.tolist() == others.tolist()
            elif f.name != "base":
                assert mine == others, f.name
        assert one.prompt.tolist() == other.prompt.tolist()
        assert (one.base is None) == (other.base is None)
    assert any(record.base is not None for record in found)
    assert loaded(tmp_path, "another tokenizer") == []


@pytest.mark.parametrize("damage", ["flip", "cut", "empty", "foreign", "directory"])
def test_a_damaged_file_is_told_and_nothing_of_it_is_used(kept, tmp_path, damage, caplog):
    records, _ = kept
    there = Records(2**20)
    for record in records:
        there.add(record)
    archive, file = Archive(tmp_path, "m"), tmp_path / NAME
    archive.save(there)
    whole = file.read_bytes()
    if damage == "directory":
        file.unlink()
        file.mkdir()
    else:
        changed = {"flip": whole[:-9] + bytes([whole[-9] ^ 1]) + whole[-8:], "cut": whole[: len(whole) // 2], "empty": b"", "foreign": b"[1, 2]\n{}"}
        file.write_bytes(changed[damage])
    with caplog.at_level(logging.WARNING):
        assert loaded(tmp_path) == []
    assert "is damaged, and is not used" in caplog.text


def test_a_file_that_cannot_be_written_is_told_and_the_old_one_stays(kept, tmp_path, caplog):
    records, _ = kept
    there = Records(2**20)
    there.add(records[0])
    gone = tmp_path / "gone"
    with caplog.at_level(logging.WARNING):
        Archive(gone, "m").save(there)
    assert "was not written" in caplog.text
    assert not gone.exists()
