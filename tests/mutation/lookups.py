"""Mutants of what is found, and what is kept outside the pool: keys, reach, returns, the state store, the response cache, the budget."""

from tests.mutation.mutant import of

KEYS = of(
    "caches/keys.py",
    (
        "keys are compared in their low 32 bits",
        "min(a.size, b.size), 0, STEP\n",
        "min(a.size, b.size), 0, STEP\n    a, b = a.astype(np.int32), b.astype(np.int32)\n",
        "caches/test_keys.py::test_ids_are_compared_whole",
    ),
    (
        "the comparison ends after its first piece",
        "start, step = start + step, min(2 * step, MOST)",
        "return shared",
        "caches/test_keys.py::test_one_difference",
    ),
    ("the first key that differs counts as equal", "int(differs.argmax())", "int(differs.argmax()) + 1", "caches/test_keys.py::test_one_difference"),
)

REACH = of(
    "caches/reach.py",
    (
        "a whole prompt is served without its logits",
        "== agrees and logits:",
        "== agrees:",
        "caches/test_store_bits.py::test_a_whole_prompt_needs_its_logits",
    ),
    (
        "nothing is left to forward and no logits are there",
        "prompt - 1)",
        "prompt)",
        "caches/test_store_bits.py::test_a_prompt_that_ends_inside_a_snapshots_open_block_is_served",
    ),
    (
        "a state serves the row below its block line",
        "most >= length // BLOCK * BLOCK",
        "most >= length // BLOCK * BLOCK - 1",
        "caches/test_store_bits.py::test_a_snapshot_is_cut_inside_its_open_block",
    ),
    (
        "at level grid an untainted state off a line is gone on with",
        "if most == length and (tainted or length % grid == 0) else None",
        "if most == length else None",
        "equivalence/test_parallel_caches.py::test_at_level_grid_what_is_shared_is_exact",
    ),
    (
        "at level grid a state serves its whole open block",
        "Reach(length, False, not tainted) if most == length and",
        "Reach(most, False, not tainted) if most >= length // BLOCK * BLOCK and",
        "equivalence/test_grid.py::test_exact_means_bits_and_a_session_resume_says_so",
    ),
    (
        "a session resume is called exact",
        "Reach(length, False, not tainted)",
        "Reach(length, False, True)",
        "equivalence/test_grid.py::test_exact_means_bits_and_a_session_resume_says_so",
    ),
    (
        "a whole prompt on a tainted state is called exact",
        "Reach(length, True, not tainted)",
        "Reach(length, True, True)",
        "equivalence/test_grid.py::test_a_random_walk_holds_the_promise",
    ),
)

RETURNS = of(
    "caches/returns.py",
    (
        "another tenant's session is gone on with",
        'page = tenant.encode("utf-8", "surrogatepass") + b"\\0" + keys',
        "page = keys",
        "caches/test_returns.py::test_another_tenants_session_is_not_found",
    ),
    ("a gone session is gone on with twice", "self._gone.pop(found)", "self._gone[found]", "caches/test_returns.py::test_it_is_gone_on_with_once"),
    (
        "gone sessions are remembered without end",
        "if len(self._gone) > GONE:",
        "if False:",
        "caches/test_returns.py::test_so_many_are_remembered_and_the_oldest_goes_first",
    ),
    (
        "a page is known wherever it lies",
        'return line.to_bytes(8, "little") + hashlib',
        "return hashlib",
        "caches/test_returns.py::test_the_same_page_at_another_place_is_not_the_session",
    ),
    (
        "a shorter gone session than what is kept is found",
        "* self._grid, after, -self._grid)",
        "* self._grid, 0, -self._grid)",
        "caches/test_returns.py::test_the_longest_is_found_and_none_that_is_no_longer_than_what_is_kept",
    ),
    (
        "every session is as likely to be gone on with",
        "return min(turns.bit_length(), KINDS) - 1",
        "return 0",
        "caches/test_returns.py::test_what_goes_on_again_is_worth_more",
    ),
)

STORE = of(
    "caches/store.py",
    (
        "tenants see each other in the store",
        "if entry.tenant == tenant else None",
        "if True else None",
        "caches/test_store.py::test_tenants_do_not_see_each_other",
    ),
    (
        "an offer is taken for another tenant's",
        "(e.tenant, e.tainted) == (tenant, tainted)",
        "e.tainted == tainted",
        "caches/test_store.py::test_tenants_do_not_see_each_other",
    ),
    (
        "an offer without taint is taken for a tainted one",
        "(e.tenant, e.tainted) == (tenant, tainted)",
        "e.tenant == tenant",
        "equivalence/test_grid.py::test_an_equal_offer_with_a_taint_does_not_change_what_the_store_keeps",
    ),
    (
        "an offer is known by its length",
        "np.array_equal(e.keys, keys)",
        "e.length == keys.size",
        "caches/test_store_room.py::test_the_least_recently_used_goes_first",
    ),
    (
        "a snapshot is served at its own length, whatever was asked",
        "self._pool.copy_in(entry.rows, start)",
        "self._pool.copy_in(entry.rows, entry.length)",
        "caches/test_store_bits.py::test_a_snapshot_is_cut_inside_its_open_block",
    ),
    (
        "the open block is not restored",
        '_moved(entry.open, "device") or {',
        "{",
        "caches/test_store_bits.py::test_a_snapshot_goes_on_as_a_cold_run_does",
    ),
    (
        "the open block is not copied",
        "if keys.size % BLOCK else {}",
        "if keys.size % BLOCK == 0 else {}",
        "caches/test_store_bits.py::test_a_snapshot_goes_on_as_a_cold_run_does",
    ),
    (
        "a snapshot that is not whole gives its logits",
        "Restored(sequence, entry.logits if hit.whole else None, ",
        "Restored(sequence, entry.logits, ",
        "caches/test_store_bits.py::test_a_snapshot_goes_on_as_a_cold_run_does",
    ),
    (
        "the store's budget is not enforced",
        "        self._make_room(size)\n",
        "",
        "caches/test_store_room.py::test_room_is_made_before_the_copy_and_too_large_is_refused_before_it",
    ),
    (
        "an entry is as large as the whole budget",
        "if size > self.entry_bytes:",
        "if size > self.budget_bytes:",
        "caches/test_store_room.py::test_room_is_made_before_the_copy_and_too_large_is_refused_before_it",
    ),
    (
        "a state whose pages were released is stored",
        "and bool((self._pool.holders[sequence.pages] > 0).all())",
        "",
        "caches/test_store.py::test_a_state_that_is_not_the_keys_is_refused",
    ),
    (
        "a state is stored under keys of another length",
        "not keys.size == int(sequence.length) == sequence.tokens.size > 0",
        "not sequence.tokens.size > 0",
        "caches/test_store.py::test_a_state_that_is_not_the_keys_is_refused",
    ),
    (
        "the taint is forgotten in the store",
        "            tainted=tainted,\n        )\n",
        "        )\n",
        "equivalence/test_grid.py::test_the_store_keeps_the_taint",
    ),
    (
        "an equal offer's logits are forgotten",
        "entry = dataclasses.replace(entry, logits=_own(logits, np.float32))",
        "pass",
        "caches/test_store_room.py::test_an_equal_offer_copies_nothing_and_adds_what_it_knows",
    ),
    (
        "a snapshot looks into its caller's arrays",
        "copy = np.array(array, dtype)",
        "copy = np.asarray(array, dtype)",
        "caches/test_store.py::test_a_snapshot_is_its_own",
    ),
    (
        "a session that a later turn went on from stays",
        "next((e for e in self._entries if e in self._passed), None) or next(iter(self._entries))",
        "next(iter(self._entries))",
        "caches/test_store_room.py::test_a_session_that_a_later_turn_went_on_from_goes_first",
    ),
    (
        "another tenant's turn passes a session",
        "if e.tenant == tenant and e.use == use and",
        "if e.use == use and",
        "caches/test_store_room.py::test_a_session_that_a_later_turn_went_on_from_goes_first",
    ),
    (
        "a hit is no use",
        "            self._entries[entry] = self._entries.pop(entry)\n",
        "            pass\n",
        "caches/test_store_room.py::test_the_least_recently_used_goes_first",
    ),
)

RESPONSE = of(
    "caches/response.py",
    ("the answer of another max_tokens", "int(max_tokens), tuple(stop)", "0, tuple(stop)", "caches/test_response.py::test_another_request_does_not"),
    (
        "the answer of other stop strings",
        "int(max_tokens), tuple(stop)",
        "int(max_tokens), ()",
        "caches/test_response.py::test_another_request_does_not",
    ),
    ("the answer of another tenant", ".tobytes(), tenant, int", '.tobytes(), "", int', "caches/test_response.py::test_another_request_does_not"),
    ("the answer of other penalties", "tuple(stop), penalties", "tuple(stop), (0.0, 1.0)", "caches/test_response.py::test_another_request_does_not"),
    (
        "the answer of a request that samples",
        '        if sampling.temperature > 0:\n            self._counts["refused_sampling"] += 1\n            return None\n',
        "",
        "caches/test_response.py::test_sampling_is_refused",
    ),
    (
        "a cancelled answer is kept",
        'FINISHED = ("stop", "length")',
        'FINISHED = ("stop", "length", "cancelled")',
        "caches/test_response.py::test_a_cancelled_answer_is_refused",
    ),
    (
        "an answer's hit is no use",
        "        self._entries[key] = self._entries.pop(key)\n",
        "",
        "caches/test_response.py::test_the_least_recently_used_goes_first",
    ),
    (
        "the answers' limit is not enforced",
        "        self.shrink(limit - size)\n",
        "",
        "caches/test_response.py::test_the_least_recently_used_goes_first",
    ),
    (
        "an answer that is replaced is counted twice",
        "        if key in self._entries:\n            self._drop(key)\n",
        "",
        "caches/test_response.py::test_a_later_answer_replaces_the_first",
    ),
)

BUDGET = of(
    "caches/budget.py",
    (
        "room is made for what is there, not for what comes",
        "if self._left(before, more) >= before:",
        "if self._left(before, 0) >= before:",
        "equivalence/test_budget.py::test_the_limit_holds_at_every_moment",
    ),
    (
        "anchors of running requests are not counted",
        " + self._running.anchor_bytes",
        "",
        "equivalence/test_budget.py::test_the_limit_holds_at_every_moment",
    ),
    (
        "what running requests may still take is not counted",
        " - self._running.outstanding",
        "",
        "equivalence/test_budget.py::test_the_limit_holds_while_two_run",
    ),
    ("snapshots are not counted", " + self._store.nbytes", "", "equivalence/test_budget.py::test_the_limit_holds_at_every_moment"),
    (
        "a snapshot is copied where the others leave no room",
        "        if left < 0:\n            return False\n",
        "",
        "equivalence/test_budget.py::test_a_snapshot_that_does_not_fit_beside_the_others_is_not_copied",
    ),
    (
        "sessions do not give way to a request",
        "        self._resident.shrink(self._left(self._resident.anchor_bytes, more))\n",
        "",
        "equivalence/test_budget.py::test_what_is_given_back_only_moves_a_start",
    ),
    (
        "answers do not count the other caches",
        "return self._left(self._responses.nbytes, 0)",
        "return self.limit",
        "equivalence/test_response.py::test_the_answers_count_against_the_caches_together",
    ),
)

LOOKUP_MUTANTS = (*KEYS, *REACH, *RETURNS, *STORE, *RESPONSE, *BUDGET)
