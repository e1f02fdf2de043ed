"""The digest of a checkpoint's weights: the same for the same bytes, another for others, and kept only for the very files that were loaded."""

import dataclasses
import json
import os
import shutil
import stat

import pytest

from qjax.model import digest as digests
from qjax.model.convert import convert
from qjax.model.digest import KEPT, Files
from qjax.model.source import EMBEDDED, load
from tests import tiny_checkpoint as tiny
from tests.storage.children import run_with_mounts

FORMS = ["one file", "shards", "converted"]


@pytest.fixture(params=FORMS)
def directory(request, tmp_path, monkeypatch):
    """A checkpoint in one of its forms, named `model`; files that were just made count as settled."""
    monkeypatch.setattr(digests, "FRESH", 0)
    return checkpoint(tmp_path, request.param)


def checkpoint(parent, form="one file"):
    directory = tiny.write(parent / "model", shards=3 if form == "shards" else 1)
    if form == "converted":
        convert(directory.rename(parent / "source"), directory)
    return directory


def largest(directory):
    """The weight file in which a byte is changed, and where in it: in the middle of a tensor, in the low byte of a number."""
    path = max((p for p in directory.rglob("*") if p.is_file()), key=lambda p: p.stat().st_size * (p.suffix not in (".json", ".jinja")))
    return path, path.stat().st_size // 2 // 64 * 64 + 64


def flip(directory):
    """One bit of one weight, written in place."""
    path, at = largest(directory)
    with path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 1]))
    return path


@pytest.fixture
def reads(monkeypatch):
    """How often weight files have been read for their digest."""
    found, read = [], Files._read

    def counted(self):
        found.append(self.directory)
        return read(self)

    monkeypatch.setattr(Files, "_read", counted)
    return found


def test_it_is_computed_once(directory, reads):
    digest = load(directory).weights_digest()
    assert len(digest) == 32
    assert len(reads) == 1
    assert stat.S_IMODE((directory / KEPT).stat().st_mode) == 0o600
    assert load(directory).weights_digest() == digest
    assert len(reads) == 1
    (directory / KEPT).unlink()  # control
    assert load(directory).weights_digest() == digest
    assert len(reads) == 2
    assert not [p for p in directory.iterdir() if p.name.startswith(".")]


@pytest.mark.parametrize("put_back", [False, True])
def test_e1_another_byte_is_another_digest(directory, reads, put_back):
    """E1 (reported faults): the same name, the same size, and where it is put back the same time of change."""
    before = load(directory).weights_digest()
    old = largest(directory)[0].stat()
    path = flip(directory)
    if put_back:
        os.utime(path, ns=(old.st_atime_ns, old.st_mtime_ns))
        assert (path.stat().st_size, path.stat().st_mtime_ns) == (old.st_size, old.st_mtime_ns)
    after = load(directory).weights_digest()
    assert after != before
    assert load(directory).weights_digest() == after
    assert len(reads) == 2
    flip(directory)  # as it was
    assert load(directory).weights_digest() == before
    assert len(reads) == 3


def test_a_copy_has_the_same_digest_of_its_own(directory, reads):
    """It takes the kept one along, which is of other files."""
    digest = load(directory).weights_digest()
    copy = shutil.copytree(directory, directory.parent / "copy")
    assert (copy / KEPT).exists()
    assert load(copy).weights_digest() == digest
    assert reads == [directory, copy]


def other_digest(text: bytes) -> bytes:
    kept = json.loads(text)
    return json.dumps(kept | {"digest": kept["digest"][::-1]}).encode()


DAMAGES = {
    "empty": lambda text: b"",
    "half": lambda text: text[: len(text) // 2],
    "no text": lambda text: b"\xff\x00" * 40,
    "another thing": lambda text: b"[]",
    "no digest": lambda text: b'{"files": {}}',
    "a digest that is a list": lambda text: b'{"digest": [1]}',
    "deep": lambda text: b"[" * 100_000,
    "another digest": other_digest,
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_kept_digest_that_is_damaged_is_made_anew(tmp_path, monkeypatch, reads, damage):
    monkeypatch.setattr(digests, "FRESH", 0)
    directory = checkpoint(tmp_path)
    digest = load(directory).weights_digest()
    whole = (directory / KEPT).read_bytes()
    (directory / KEPT).write_bytes(DAMAGES[damage](whole))
    assert load(directory).weights_digest() == digest
    assert len(reads) == 2
    assert (directory / KEPT).read_bytes() == whole


def test_where_it_cannot_be_written_it_is_computed_anew(tmp_path, monkeypatch, reads, caplog):
    """A directory has its name. Nothing is left beside it, and it is said at every start."""
    monkeypatch.setattr(digests, "FRESH", 0)
    directory = checkpoint(tmp_path)
    (directory / KEPT / "inside").mkdir(parents=True)
    assert load(directory).weights_digest() == load(directory).weights_digest()
    assert len(reads) == 2
    assert [r.getMessage() for r in caplog.records] == [
        f"{directory}: the digest of its weights cannot be kept and is computed at every start: Is a directory"
    ] * 2
    assert not [p for p in directory.iterdir() if p.name.startswith(".")]


READ_ONLY = """
import subprocess, sys
from pathlib import Path
from qjax.model import digest as digests
from qjax.model.source import load
digests.FRESH = 0
directory = Path(sys.argv[1])
subprocess.run(["mount", "--bind", directory, directory], check=True)
subprocess.run(["mount", "-o", "remount,bind,ro", directory], check=True)
model = load(directory)
print(model.weights_digest())
"""


def test_a_file_system_that_is_read_only(tmp_path):
    directory = checkpoint(tmp_path)
    digest = load(directory).weights_digest()
    assert run_with_mounts(READ_ONLY, directory) == f"{digest}\n"
    assert not (directory / KEPT).exists()


def test_of_a_file_that_has_just_changed_it_is_not_kept(tmp_path, monkeypatch, reads):
    """The file system's clock may stand still meanwhile: another change could leave the same times."""
    directory = checkpoint(tmp_path)
    monkeypatch.setattr(digests, "FRESH", 3600)
    digest = load(directory).weights_digest()
    assert not (directory / KEPT).exists()
    monkeypatch.setattr(digests, "FRESH", 0)  # control
    assert load(directory).weights_digest() == digest
    assert (directory / KEPT).exists()


def test_files_that_changed_since_they_were_loaded(directory, reads):
    """What was loaded counts: it is read from memory, and nothing is kept."""
    model = load(directory)
    loaded = dataclasses.replace(model, origin=None).weights_digest()
    flip(directory)
    assert model.weights_digest() == loaded
    assert not reads
    assert not (directory / KEPT).exists()
    assert dataclasses.replace(load(directory), origin=None).weights_digest() != loaded  # control: memory is told from memory


@pytest.mark.parametrize("change", [flip, lambda directory: largest(directory)[0].unlink()])
def test_files_that_change_while_they_are_read(tmp_path, monkeypatch, change):
    monkeypatch.setattr(digests, "FRESH", 0)
    directory = checkpoint(tmp_path)
    model, read = load(directory), Files._read

    def disturbed(self):
        found = read(self)
        change(directory)
        return found

    monkeypatch.setattr(Files, "_read", disturbed)
    assert model.weights_digest() == dataclasses.replace(model, origin=None).weights_digest()
    assert not (directory / KEPT).exists()


def test_the_directory_may_be_named_from_where_one_stood(tmp_path, monkeypatch, reads):
    directory = checkpoint(tmp_path)
    monkeypatch.chdir(tmp_path)
    model = load("model")
    monkeypatch.chdir("/")
    assert model.weights_digest() == load(directory).weights_digest()
    assert len(reads) == 2


def test_a_long_reading_says_how_far_it_is(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(digests, "PATIENCE", -1)
    directory = checkpoint(tmp_path)
    load(directory).weights_digest()
    assert caplog.records[-1].getMessage() == f"{directory}: 0.0 of 0.0 GB of weights read for their digest"


def test_what_the_embedded_and_the_random_models_have(reads):
    embedded = load("embedded")
    assert not reads  # nobody has asked
    assert embedded.weights_digest() == load("embedded").weights_digest()
    assert reads == [EMBEDDED] * 2
    assert not (EMBEDDED / KEPT).exists()
    assert load("random:0.8b@4", seed=1).weights_digest() == "random, seed 1"
    assert len(reads) == 2
