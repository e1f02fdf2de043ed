"""benchmarks/lookup.py runs, and what it begins it gives back."""

from benchmarks.lookup import filled, measure


def test_it_finds_every_prompt_where_it_should():
    found = measure(tokens=3000, sessions=8, rounds=2)
    sources = {name: case["source"] for name, case in found["lookups"].items()}
    assert sources == {"same prompt": "prompt", "next turn": "end", "parts late": "resident"}
    assert all(0 < case["median_ms"] <= case["worst_ms"] for case in found["lookups"].values())


def test_its_tiers_are_all_filled():
    caches, _ = filled(3000, 8)
    assert {s.role for s in caches.resident.sessions} == {"resident", "guest", "parked", "pinned"}
    assert caches.store.stats()["entries"] > 0
