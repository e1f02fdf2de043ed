"""Mutants of what a restore from NVMe shares with the pool."""

from tests.mutation.mutant import of

HEAD = "equivalence/test_nvme_head.py::"

SHARED_MUTANTS = (
    *of(
        "caches/nvme/head.py",
        (
            "a page in which the prompts part is shared",
            "// grid, sequence)",
            "// grid + 1, sequence)",
            f"{HEAD}test_what_the_pool_has_is_held_and_the_rest_is_read",
        ),
        (
            "the first that is found is shared, not the longest",
            "number, sequence = max(agrees, key=lambda found: found[0], default=(0, None))",
            "number, sequence = next(agrees, (0, None))",
            f"{HEAD}test_the_longest_of_several_is_shared",
        ),
    ),
    *of(
        "caches/anchors.py",
        (
            "rows of an answer are shared at level grid",
            "max((a for a in anchors if not a.tainted), key",
            "max((a for a in anchors), key",
            f"{HEAD}test_at_level_grid_rows_of_an_answer_are_not_shared",
        ),
    ),
    *of(
        "caches/resident.py",
        (
            "another tenant's pages are shared",
            "if session.tenant == tenant and (anchor := last_clean",
            "if (anchor := last_clean",
            f"{HEAD}test_f4_another_tenants_pages_are_not_shared",
        ),
    ),
    *of(
        "caches/running.py",
        (
            "what a running request has is not shared",
            "yield request.keys, self._now(request, anchor)",
            "pass",
            f"{HEAD}test_what_a_running_request_has_is_shared",
        ),
    ),
    *of(
        "caches/nvme/disk.py",
        (
            "a session resume shares a prefill's rows",
            "chain.keys[: hit.start], chain.grid) if hit.exact else NONE",
            "chain.keys[: hit.start], chain.grid)",
            f"{HEAD}test_at_level_grid_a_session_resume_shares_nothing",
        ),
        (
            "a restore costs what it does not read",
            "return -(-hit.start // self._pool.layout.grid) - head.pages.size",
            "return -(-hit.start // self._pool.layout.grid)",
            "equivalence/test_disk_room.py::test_what_memory_has_saves_nothing",
        ),
    ),
    *of(
        "caches/nvme/room.py",
        (
            "a head takes the whole budget",
            "2 * nbytes > self.budget",
            "nbytes > self.budget",
            "equivalence/test_disk_room.py::test_a_head_takes_half_of_the_budget_at_the_most",
        ),
    ),
    *of(
        "caches/nvme/restore.py",
        (
            "the pages of the head are not held",
            "            pool.hold(head.pages)\n",
            "",
            f"{HEAD}test_what_the_pool_has_is_held_and_the_rest_is_read",
        ),
    ),
    *of(
        "caches/nvme/index.py",
        (
            "a conversation is worth nothing",
            "one = min(self.candidates(use, held), key=lambda one: self.value(one, now), default=None)",
            "one = min(self.candidates(use, held), key=lambda one: self.value(one, now) * isinstance(one, FiledAnchor), default=None)",
            "caches/test_nvme_index.py::test_heads_and_conversations_go_by_one_value",
        ),
        (
            "what another anchor of the conversation saves is not counted",
            "self._by_line.get(page.removeprefix(PAGE), set()) - own for page",
            "self._by_line.get(page.removeprefix(PAGE), set()) - {last.key} for page",
            "caches/test_nvme_index.py::test_heads_and_conversations_go_by_one_value",
        ),
    ),
    *of(
        "caches/nvme/catalog.py",
        (
            "states that another conversation has too go with one",
            "self._of_sessions[key] == 1]",
            "self._of_sessions[key]]",
            "caches/test_nvme_index.py::test_heads_and_conversations_go_by_one_value",
        ),
        (
            "a record that is written again counts twice",
            "            self._forget_record(session.key)\n",
            "",
            "caches/test_nvme_index.py::test_a_record_that_is_written_again_is_one",
        ),
    ),
)
