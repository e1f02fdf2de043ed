"""Entries that are whole, with right sums, and say what is not so: the answer is a cold run's, and what is forged is gone.

A10 (reported faults): an entry that claims to be longer than it is. F5: what has another's key is told by its contents.
"""

import shutil

import numpy as np
import pytest

from qjax.config import GRID, TOKEN
from storage.arrays import Leaf
from storage.entry import seal
from tests.bits import assert_bits_equal
from tests.equivalence.nvme import started
from tests.equivalence.nvme_damage import (
    assert_cold,
    entry,
    file,
    keys,
    line_keys,
    read,
    there,
    warnings,
    write,
    write_array,
    write_conversation,
    write_heads,
)
from tests.equivalence.test_nvme_faults import ANCHORS, ASKED, HEAD, NOTHING_WRITTEN, PAGES
from tests.equivalence.test_resident import answer, cold
from tests.models import prompt

OTHER = np.concatenate([prompt(64, seed=1), HEAD[64:]])
"""Differs in the first line, and so in no key id after it."""
OTHER_PAGES, OTHER_ANCHORS = line_keys(OTHER)


@pytest.fixture(scope="module")
def heads(tiny_engine, tmp_path_factory):
    """Pages and anchors at the first four lines of two prompts."""
    directory = write_heads(tiny_engine, tmp_path_factory.mktemp("heads"), HEAD, OTHER)
    assert keys(directory, "[pa]-") == {*PAGES[1:5], *ANCHORS[1:5], *OTHER_PAGES[1:5], *OTHER_ANCHORS[1:5]}
    return directory


@pytest.fixture
def directory(heads, tmp_path):
    return shutil.copytree(heads, tmp_path / "heads")


def move(directory, key: str, to: str) -> None:
    """An entry in the place of another, under its key."""
    shutil.rmtree(entry(directory, to))
    was = read(directory, key)
    shutil.copytree(entry(directory, key), entry(directory, key).with_name(to))
    was.key = to
    (entry(directory, to) / "meta").write_bytes(seal(was))


def longer(directory) -> None:
    """The first anchor says that it is the fourth, which is not there."""
    shutil.rmtree(entry(directory, ANCHORS[4]))
    write(directory, ANCHORS[1], fields={"length": 256, "line": ANCHORS[4][2:], "pages": PAGES[1:5]})


def longer_of_its_line(directory) -> None:
    """The first anchor says that it has four pages, and keeps its line."""
    write(directory, ANCHORS[1], fields={"length": 256, "pages": PAGES[1:5]})


def of_another_prompt(directory) -> None:
    """The other prompt's anchor says that it is this one's."""
    shutil.rmtree(entry(directory, ANCHORS[4]))
    write(directory, OTHER_ANCHORS[4], fields={"line": ANCHORS[4][2:], "pages": PAGES[1:5]})


def over_another_chain(directory) -> None:
    """Its second page is the other chain's, whose key ids are the same and whose rows are not."""
    write(directory, ANCHORS[4], fields={"pages": [PAGES[1], OTHER_PAGES[2], *PAGES[3:5]]})


def over(last: str):
    def forge(directory) -> None:
        write(directory, ANCHORS[4], fields={"pages": [*PAGES[1:4], last]})

    return forge


FORGED = {
    longer: (ANCHORS[1], 192),
    longer_of_its_line: (ANCHORS[1], 256),
    of_another_prompt: (OTHER_ANCHORS[4], 192),
    over_another_chain: (ANCHORS[4], 192),
    over(OTHER_PAGES[4]): (ANCHORS[4], 192),
    over(PAGES[3]): (ANCHORS[4], 192),
    over("golden"): (ANCHORS[4], 192),
}


@pytest.mark.parametrize("forge", FORGED, ids=lambda forge: forge.__name__)
def test_a10_a_forged_anchor(tiny_engine, directory, caplog, forge):
    """What it stands on stays, for whoever else does: the other prompt is served from all its lines."""
    key, start = FORGED[forge]
    forge(directory)
    with started(tiny_engine, directory, **NOTHING_WRITTEN):
        record = assert_cold(tiny_engine, ASKED)
        assert (record.source, record.start) == ("disk", start)
        (line,) = warnings(caplog)
        assert key in line
        assert key not in there(directory)
        assert {PAGES[1], *OTHER_PAGES[1:4]} <= there(directory)
        record = assert_cold(tiny_engine, np.concatenate([OTHER[:280], prompt(20, seed=9)]))
        assert record.start == (192 if forge is of_another_prompt else 256)
        assert len(warnings(caplog)) == 1
    with started(tiny_engine, directory, **NOTHING_WRITTEN):
        assert assert_cold(tiny_engine, ASKED).start == start


def test_control_two_chains_differ(tiny_engine):
    """What `over_another_chain` would serve: rows after equal ids are others where those before them were."""
    one, other = ({k: v[:, :, 64:128] for k, v in cold(tiny_engine, tokens)[1]["rows"].items()} for tokens in (HEAD, OTHER))
    with pytest.raises(AssertionError, match="differ"):
        assert_bits_equal(one, other)


def test_f5_the_page_of_another_prompt(tiny_engine, directory, caplog):
    """Under this one's key, whole: the first key id tells it."""
    move(directory, OTHER_PAGES[1], PAGES[1])
    with started(tiny_engine, directory, **NOTHING_WRITTEN) as caches:
        record = assert_cold(tiny_engine, ASKED)
        assert (record.source, record.failed) == ("cold", [f"nvme: {PAGES[1]} has other key ids than the prompt"])
        assert warnings(caplog) == [f"entry {PAGES[1]} has other key ids than the prompt, and is removed"]
        assert not {*PAGES, *ANCHORS} & there(directory)
        assert caches.nvme.stats()["damaged"] == 1
        assert assert_cold(tiny_engine, np.concatenate([OTHER[:280], prompt(20, seed=9)])).start == 256


@pytest.mark.parametrize(("name", "array"), [("ids", prompt(64, seed=8).astype(np.int64)), ("tokens", prompt(64, seed=8))])
def test_other_ids_in_a_page(tiny_engine, directory, caplog, name, array):
    """Key ids that are not the prompt's, and tokens that are not those of the key ids."""
    write_array(directory, PAGES[4], name, array)
    with started(tiny_engine, directory, **NOTHING_WRITTEN):
        record = assert_cold(tiny_engine, ASKED)
        assert (record.source, record.start, record.why) == ("disk", 192, "damaged")
        assert "has other" in record.failed[0]
        assert len(warnings(caplog)) == 1
        assert ANCHORS[4] not in there(directory)


FIELDS = {
    "length": [-64, 0, 255, 2**80, 256.0, "256", True, None],
    "pages": [[], PAGES[1:4], [*PAGES[1:4], None], "x" * 4, None, dict.fromkeys(PAGES[1:5])],
    "tail": [[1], [[]], "", None, [2**70]],
    "line": [None, "", "zz", "ab", 7],
    "use": ["", "both", None],
    "tainted": ["no", None, 1],
    "kind": [None, []],
}


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in FIELDS.items() for value in values])
def test_a_field_of_another_kind(tiny_engine, directory, caplog, name, value):
    """Or that is missing, or a number that cannot be: never a crash, and the next shorter one serves."""
    write(directory, ANCHORS[4], fields={name: value})
    with started(tiny_engine, directory, **NOTHING_WRITTEN):
        record = assert_cold(tiny_engine, ASKED)
        assert (record.source, record.start) == ("disk", 192)
        assert len(warnings(caplog)) == 1
        assert ANCHORS[4] not in there(directory)


def test_arrays_of_other_sizes(tiny_engine, tmp_path, caplog):
    """Logits, which are read as they are: more of them than there is memory, less than none, and of another kind. Sections: as they must be."""
    tokens = HEAD[:256]
    with started(tiny_engine, tmp_path / "kept", session_spill=False):
        answer(tiny_engine, tokens, user=256)
    _, anchors = line_keys(tokens)
    leaves = read(tmp_path / "kept", anchors[4]).leaves
    assert "logits" in leaves
    forged = [{"logits": Leaf("float32", shape, leaves["logits"].sum)} for shape in ((2**40,), (-1, -1), (-5,), (2**62, 4), (), (16, 68))]
    forged += [{"logits": Leaf("float64", (544,), leaves["logits"].sum)}, {"section.gdn.S": Leaf("float32", (3,), "")}]
    for number, change in enumerate(forged):
        directory = shutil.copytree(tmp_path / "kept", tmp_path / str(number))
        write(directory, anchors[4], leaves={**leaves, **change})
        caplog.clear()
        with started(tiny_engine, directory, **NOTHING_WRITTEN):
            assert assert_cold(tiny_engine, tokens).start == 192
            assert len(warnings(caplog)) == 1
            assert anchors[4] not in there(directory)


def test_an_anchor_with_no_array(tiny_engine, heads, directory, caplog):
    """It holds no byte of its own: that can be weighed where something must go, and is no state."""
    write(directory, ANCHORS[1], leaves={})
    with started(tiny_engine, directory, **NOTHING_WRITTEN | {"disk_gb": 700_000 / 2**30}) as caches:
        assert 0 < len(caches.nvme.index.anchors) < 8
        assert_cold(tiny_engine, HEAD[:100])
        assert caches.nvme.stats()["disk_bytes"] <= 700_000
    caplog.clear()
    shutil.copytree(heads, directory, dirs_exist_ok=True)
    write(directory, ANCHORS[1], leaves={})
    with started(tiny_engine, directory, **NOTHING_WRITTEN):
        record = assert_cold(tiny_engine, HEAD[:100])
        assert (record.source, record.failed) == ("cold", [f"nvme: {ANCHORS[1]} is damaged or gone"])
        assert ANCHORS[1] not in there(directory)
        assert len(warnings(caplog)) == 1


BOOKS = [
    {"lines": Leaf("uint8", (2**45, 16), ""), "counts": Leaf("int64", (2**45,), "")},
    {"lines": Leaf("uint8", (-1, -16), "")},
    {"lines": Leaf("int64", (4, 16), "")},
    {"counts": Leaf("float64", (4,), "")},
    {"counts": Leaf("int64", (4, 1), "")},
]


@pytest.mark.parametrize("leaves", BOOKS)
def test_a_forged_book(tiny_engine, directory, caplog, leaves):
    """It is not read, and the start goes on."""
    (book,) = keys(directory, "b-")
    write(directory, book, leaves={**read(directory, book).leaves, **leaves})
    with started(tiny_engine, directory, **NOTHING_WRITTEN) as caches:
        assert len(warnings(caplog)) == 1
        assert (book in there(directory), caches.nvme._admission._counts) == (False, {})
        assert assert_cold(tiny_engine, ASKED).start == 256


def test_books_with_fields_of_any_kind(tiny_engine, directory):
    for hits in (None, [], {ANCHORS[4]: "many"}, {ANCHORS[4]: -1}, {"nobody": 3}):
        (book,) = keys(directory, "b-")
        write(directory, book, fields={"hits": hits})
        with started(tiny_engine, directory, **NOTHING_WRITTEN) as caches:
            assert caches.nvme.index.anchors[ANCHORS[4]].hits == 0
            assert assert_cold(tiny_engine, ASKED).start == 256


SESSION = {
    "tenant": ["somebody", None, 5],
    "length": [305, -1, 2**80, None],
    "history": [-1, 305, "all", None],
    "turns": [0, -3, 2.5, None],
    "resident": ["yes", None],
    "anchors": [[], ["golden"], None],
    "pages": [[], None],
    "tail": [[], None],
}


@pytest.fixture(scope="module", params=[TOKEN, GRID])
def conversation(request, tiny_engine, tmp_path_factory):
    """(directory with a conversation and no heads, its next turn), at each level."""
    tiny_engine.level = request.param
    yield write_conversation(tiny_engine, tmp_path_factory.mktemp("conversation"), HEAD)
    tiny_engine.level = TOKEN


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in SESSION.items() for value in values])
def test_a_forged_session(tiny_engine, conversation, tmp_path, caplog, name, value):
    """It is not the resident one; what was written of it serves, unless nobody could tell whose it is."""
    kept, turn = conversation
    directory = shutil.copytree(kept, tmp_path / "conversation")
    (session,) = keys(directory, "s-")
    write(directory, session, fields={name: value})
    with started(tiny_engine, directory, **NOTHING_WRITTEN | {"session_spill": True}) as caches:
        assert caches.resident.sessions == []
        assert session not in there(directory)
        assert len(warnings(caplog)) == 1
        record = assert_cold(tiny_engine, turn)
        assert (record.source, record.start) == (("cold", 0) if value == "somebody" else ("spill", 304))


@pytest.mark.parametrize("what", ["length", "tail", "pages", "sections", "ids"])
def test_a_forged_end_of_a_conversation(tiny_engine, conversation, tmp_path, caplog, what):
    """Nothing of it is believed where no prompt is there to compare it with."""
    kept, turn = conversation
    directory = shutil.copytree(kept, tmp_path / "conversation")
    found = {read(directory, key).fields["length"]: key for key in keys(directory, "a-")}
    end = read(directory, found[304])
    if what == "length":  # four tokens longer than its state
        write(directory, found[300], fields={name: end.fields[name] for name in ("length", "tail", "line")})
        shutil.rmtree(entry(directory, found[304]))
        (session,) = keys(directory, "s-")
        write(directory, session, fields={"anchors": [found[300]]})
    elif what == "tail":
        write(directory, found[304], fields={"tail": [i + 1 for i in end.fields["tail"]]})
    elif what == "pages":
        write(directory, found[304], fields={"pages": end.fields["pages"][::-1]})
    elif what == "sections":
        if tiny_engine.level == TOKEN:
            pytest.skip("a key of the chain says nothing about the state")
        below = file(directory, found[192], "section.gdn.S").read_bytes()
        write_array(
            directory, found[304], "section.gdn.S", np.frombuffer(below, np.uint8).view(np.float32).reshape(end.leaves["section.gdn.S"].shape)
        )
    else:
        ids = np.frombuffer(file(directory, end.fields["pages"][-1], "ids").read_bytes(), np.int64) + 1
        write_array(directory, end.fields["pages"][-1], "ids", ids)
    with started(tiny_engine, directory, **NOTHING_WRITTEN | {"session_spill": True}) as caches:
        for session in caches.resident.sessions:
            assert np.array_equal(session.keys, turn[: session.length])
        record = assert_cold(tiny_engine, turn)
        assert record.start < 304
        assert len(warnings(caplog)) == 1
        assert found[300 if what == "length" else 304] not in there(directory)
