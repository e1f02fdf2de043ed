"""Who may ask, and that two keys have no tenant in common whatever salts their requests bring."""

import contextlib
import hmac
import re

import hypothesis.strategies as st
import pytest
from hypothesis import given

from qjax.serving import keys as module
from qjax.serving.errors import Forbidden, Unauthorized
from qjax.serving.keys import ANYONE, Keys, is_loopback, read

ALICE, BOB, ADMIN = "sk-alice-7", "sk-bob-8", "sk-admin-9"


@pytest.fixture
def keys(tmp_path):
    path = tmp_path / "keys"
    path.write_text(f"# who may ask\nalice {ALICE}\n\n  bob\t{BOB}  \n")
    return Keys.of("sk-one", path, ADMIN)


def bearer(key: str) -> str:
    return f"Bearer {key}"


def test_the_keys_of_a_flag_and_of_a_file(keys):
    assert [keys.caller(bearer(key)).name for key in ("sk-one", ALICE, BOB)] == ["default", "alice", "bob"]
    assert keys.caller(f"bearer  {ALICE} ").name == "alice"
    assert bool(keys)
    assert not Keys()


@pytest.mark.parametrize(
    "header", [None, "", "Bearer", "Bearer ", ALICE, f"Basic {ALICE}", bearer(ALICE[:-1]), bearer(ALICE + "x"), bearer("é\ud800"), ADMIN]
)
def test_others_are_refused_without_their_key_being_said(keys, header):
    with pytest.raises(Unauthorized) as refused:
        keys.caller(header)
    assert refused.value.status == 401
    assert refused.value.message == "expected a key of this server in Authorization: Bearer KEY"


def test_without_keys_everyone_may_ask_whatever_is_sent():
    for header in (None, bearer("sk-local"), "x"):
        assert Keys().caller(header) is ANYONE


def test_every_key_is_compared_in_constant_time(keys, monkeypatch):
    compared = []
    monkeypatch.setattr(module.hmac, "compare_digest", lambda a, b, real=hmac.compare_digest: compared.append((a, b)) or real(a, b))
    counts = []
    for key in ("sk-one", BOB, "wrong"):
        before = len(compared)
        with contextlib.suppress(Unauthorized):
            keys.caller(bearer(key))
        counts.append(len(compared) - before)
    assert counts == [3, 3, 3]
    assert {len(side) for pair in compared for side in pair} == {32}


salts = st.none() | st.text(st.characters(codec="utf-8"), max_size=20)


@given(one=salts, other=salts)
def test_f4_two_keys_never_share_and_a_salt_only_parts(one, other):
    alice, again, bob = (
        Keys([("alice", ALICE)]).caller(bearer(ALICE)),
        Keys([("alice", ALICE)]).caller(bearer(ALICE)),
        Keys([("bob", BOB)]).caller(bearer(BOB)),
    )
    assert alice.tenant(one) != bob.tenant(other)
    assert alice.tenant(one) not in (ANYONE.tenant(one), ANYONE.tenant(other))
    assert (alice.tenant(one) == alice.tenant(other)) == ((one or "") == (other or ""))
    assert alice.tenant(one) == again.tenant(one)  # another start of the server finds the files of the first


def test_a_salt_that_is_anothers_tenant_or_key_opens_nothing(keys):
    alice, bob = (keys.caller(bearer(key)) for key in (ALICE, BOB))
    for salt in (alice.tenant(), ALICE, alice.secret.hex(), "alice"):
        assert bob.tenant(salt) not in (alice.tenant(), alice.tenant(salt))


def test_the_key_stands_in_nothing_that_is_shown(keys):
    alice = keys.caller(bearer(ALICE))
    assert re.fullmatch("[0-9a-f]{32}", alice.tenant())
    for shown in (repr(alice), repr(keys), alice.tenant(), str(vars(keys))):
        assert ALICE not in shown
    assert alice.secret.hex()[:16] not in repr(alice) + alice.tenant()


def test_without_keys_and_salt_the_tenant_is_the_commands_own():
    assert ANYONE.tenant() == ANYONE.tenant("") == ""
    assert re.fullmatch("[0-9a-f]{32}", ANYONE.tenant("team"))


def test_the_administrator_has_a_key_of_their_own(keys):
    keys.administrate(bearer(ADMIN), "203.0.113.5")
    for header in (None, bearer(ALICE)):
        with pytest.raises(Unauthorized, match="expected the administrator's key"):
            keys.administrate(header, "127.0.0.1")
    with pytest.raises(Unauthorized):
        keys.caller(bearer(ADMIN))


LOCAL = ("127.0.0.1", "127.8.0.1", "::1", "::ffff:127.0.0.1")
FOREIGN = ("10.0.0.1", "::ffff:10.0.0.1", "0.0.0.0", "localhost", "", None)


@pytest.mark.parametrize(("host", "local"), [*((host, True) for host in LOCAL), *((host, False) for host in FOREIGN)])
def test_without_one_this_machine_administrates(host, local):
    assert is_loopback(host) == local
    if local:
        Keys([("alice", ALICE)]).administrate(None, host)
    else:
        with pytest.raises(Forbidden, match=r"\(--admin-key\)"):
            Keys().administrate(None, host)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (f"alice {ALICE} x", "line 1: expected a name and a key, found 3 words"),
        (f"# a\n{ALICE}", "line 2: expected a name and a key, found 1 word"),
        ("# nobody\n", "expected a name and a key on a line, found none"),
        (f"alice {ALICE}\nalice {BOB}", "found 'alice' twice"),
        (f"alice {ALICE}\nbob {ALICE}", "one key under the names 'alice' and 'bob'"),
        ("alice schlüssel-7", "key 'alice': expected printable ASCII without spaces, found something else"),
        (f"alice {ADMIN}", "found one that is also a caller's"),
    ],
)
def test_a_key_file_that_cannot_be_meant_is_refused_without_a_key_being_said(tmp_path, text, message):
    path = tmp_path / "keys"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ValueError, match=re.escape(message)) as refused:
        Keys.of(key_file=path, admin=ADMIN)
    assert not any(key in str(refused.value) for key in (ALICE, BOB, ADMIN, "schlüssel"))


def test_a_key_file_that_cannot_be_read(tmp_path):
    (tmp_path / "binary").write_bytes(b"alice \xff\xfe\n")
    for name, found in (("absent", "No such file"), ("binary", "no UTF-8")):
        with pytest.raises(ValueError, match=f"{name}: expected a file of keys, found: {found}"):
            read(tmp_path / name)
    with pytest.raises(ValueError, match="key 'default': expected printable ASCII without spaces, found none"):
        Keys.of("")
