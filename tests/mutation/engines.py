"""Mutants of pages, sequences, slots, the engine, generation, the gate and the probe."""

from tests.mutation.mutant import of

PAGES = of(
    "pages.py",
    ("a second hold is not counted", "self.holders[page] += 1", "self.holders[page] = 1", "test_pages.py::test_pages_are_counted"),
    (
        "a page is free while one still holds it",
        "if self.holders[page] == 0:",
        "if self.holders[page] <= 1:",
        "test_pages.py::test_pages_are_counted",
    ),
    (
        "a release that is refused has released a part",
        '                raise ValueError(f"page {page} is released more often than it was held")\n        for page in pages:\n',
        '                raise ValueError(f"page {page} is released more often than it was held")\n',
        "test_pages.py::test_a_refused_call_changes_no_page",
    ),
    (
        "a page that is given out again is taken for the one before",
        "1, 0, next(STAMPS)",
        "1, 0, 1",
        "test_engine.py::test_a_released_sequence_is_refused",
    ),
    (
        "a restored page keeps what was in it past the rows",
        "to[:, :, :n], to[:, :, n:] = rows[name][:, :, first : first + n], 0",
        "to[:, :, :n] = rows[name][:, :, first : first + n]",
        "caches/test_store_bits.py::test_a_snapshot_goes_on_as_a_cold_run_does",
    ),
    (
        "a restored page has no fill mark",
        "self.fill[page] = n = min(",
        "n = min(",
        "caches/test_store_bits.py::test_copies_keep_every_row",
    ),
    (
        "a restore that finds no room keeps its pages",
        "            self.release(pages)\n            raise\n",
        "            raise\n",
        "caches/test_store.py::test_a_full_pool_leaves_nothing_held",
    ),
    (
        "rows are copied from a page's first rows",
        "to[...] = np.asarray(one)[:, :, : to.shape[2]]",
        "to[...] = np.asarray(one)[:, :, -to.shape[2] :]",
        "caches/test_store_bits.py::test_copies_keep_every_row",
    ),
)

CUT = of(
    "state.py",
    (
        "a state is rewound past its block line",
        "if not line <= length <= longest:",
        "if not 0 <= length <= longest:",
        "equivalence/test_reported.py::test_a15_no_state_is_rewound",
    ),
    (
        "a cut sequence keeps a page too many",
        "pages = -(-length // grid)\n        stamps",
        "pages = length // grid + 1\n        stamps",
        "test_slot.py::test_a_sequence_cut_to_its_line_goes_on_as_one_that_ended_there",
    ),
    (
        "a cut sequence keeps its tokens",
        "tokens=self.tokens[:length], pages=self.pages[:pages]",
        "pages=self.pages[:pages]",
        "test_slot.py::test_a_sequence_cut_to_its_line_goes_on_as_one_that_ended_there",
    ),
    (
        "a cut sequence has another's stamps",
        "else self.stamps[:pages]",
        "else self.stamps",
        "test_slot.py::test_a_sequence_cut_to_its_line_goes_on_as_one_that_ended_there",
    ),
)

SLOT = of(
    "slot.py",
    (
        "two write in one page",
        "return self._pool.fill[last] != row and self._pool.holders[last] != 1",
        "return False",
        "test_pages.py::test_two_continuations_disturb_neither_each_other_nor_the_original",
    ),
    (
        "whoever writes on in a page that others hold copies it",
        "return self._pool.fill[last] != row and self._pool.holders[last] != 1",
        "return self._pool.holders[last] != 1",
        "test_pages.py::test_two_continuations_disturb_neither_each_other_nor_the_original",
    ),
    (
        "a page that was copied stays held",
        "        self._pool.release([last])\n",
        "",
        "test_pages.py::test_two_continuations_disturb_neither_each_other_nor_the_original",
    ),
    (
        "a slot does not hold what it goes on from",
        "        pool.hold(self.pages)\n",
        "",
        "test_pages.py::test_two_continuations_disturb_neither_each_other_nor_the_original",
    ),
    (
        "a slot that is closed twice gives its pages up twice",
        "self.pages, self._ahead = [], 0",
        "self._ahead = 0",
        "test_slot.py::test_a_closed_slot_is_done",
    ),
    (
        "the open block is not computed again for a step",
        "self._forward.reopen if self.length % BLOCK else self._forward.place",
        "self._forward.place",
        "equivalence/test_resident.py::test_the_next_turn_goes_on_at_the_end",
    ),
    (
        "a page for rows that were rejected is in the sequence",
        "self.pages[: -(-length // self._grid)]",
        "self.pages",
        "test_pages.py::test_a_draft_rejected_at_a_grid_line_leaves_no_page_behind",
    ),
    (
        "rejected rows keep others out of the page",
        "        self._advance(tokens)\n        if len(tokens) and",
        "        self.tokens.extend(tokens)\n        if len(tokens) and",
        "test_pages.py::test_a_rejected_draft_lowers_the_mark",
    ),
)

ENGINE = of(
    "engine.py",
    (
        "a hit's pages stay held",
        "                    self.release(restored.sequence)\n",
        "",
        "equivalence/test_resident.py::test_a_guest_leaves_the_conversation_where_it_was",
    ),
    (
        "a prompt's anchor has no logits",
        "request.add(kind, slot.freeze(), logits)",
        "request.add(kind, slot.freeze())",
        "equivalence/test_resident.py::test_the_same_prompt_again_needs_no_forward",
    ),
    (
        "a prompt's logits are its first row's",
        "logits = slot.logits(hidden, n - 1)",
        "logits = slot.logits(hidden, 0)",
        "test_engine.py::test_the_first_logits_at_every_edge",
    ),
    (
        "others do not find what a running request has read",
        "            request.slot = slot\n",
        "            pass\n",
        "equivalence/test_parallel_caches.py::test_one_that_comes_later_goes_on_beside_the_first",
    ),
    (
        "a request with a sequence of its own asks the caches",
        "if self.caches and sequence is None:",
        "if self.caches:",
        "equivalence/test_response.py::test_off_by_default_and_after_a_clear_and_for_a_request_with_a_sequence",
    ),
    (
        "sessions give way to a request that needs no page",
        "return self.pool.free > 0 or not slot.needs_page()",
        "return self.pool.free > 0",
        "equivalence/test_given_up.py::test_nothing_gives_way_to_a_request_that_has_its_page",
    ),
    (
        "a released sequence is taken",
        "        self.pool.check(sequence)\n        self.pool.release",
        "        self.pool.release",
        "test_engine.py::test_a_released_sequence_is_refused",
    ),
)

GENERATION = of(
    "generation.py",
    (
        "an end's anchor has another row's logits",
        "last = logits if at == slot.length else None",
        "last = logits if at != slot.length else None",
        "equivalence/test_reported_memory.py::test_an_answer_that_reaches_the_limit",
    ),
    (
        "an interrupt leaves the logits of the row before",
        "last = logits if at == slot.length else None",
        "last = logits",
        "equivalence/test_anchored.py::test_an_interrupted_step_leaves_no_logits_of_the_row_before",
    ),
    (
        "the answer of a session resume is kept for others",
        "if request.exact and self._asked:",
        "if self._asked:",
        "equivalence/test_response.py::test_at_level_grid_the_answer_of_a_session_resume_is_not_kept",
    ),
    (
        "a cancelled prefill leaves nothing",
        "                self.sequence = cancelled.sequence\n                self._settle(request)\n",
        "                self.sequence = cancelled.sequence\n",
        "equivalence/test_resident.py::test_a_cancelled_prefill_is_gone_on_with",
    ),
    (
        "what goes back to the queue keeps its pages",
        "        if self.sequence is not None:\n            self._engine.release(self.sequence)\n",
        "",
        "test_parallel_ends.py::test_where_all_wait_the_youngest_goes_back_to_the_queue",
    ),
    (
        "a request that fails is not taken back",
        "                request.fail(None if self._theirs else error)\n",
        "                pass\n",
        "equivalence/test_resident.py::test_a_request_that_leaves_nothing_takes_nothing",
    ),
    (
        "a request whose end breaks off goes on as running",
        "                        request.fail()\n",
        "                        pass\n",
        "equivalence/test_anchored.py::test_a_request_whose_end_broke_off_is_not_found_as_running",
    ),
    (
        "a prefill that is closed leaves nothing",
        "                    closed = True",
        "                    raise",
        "test_parallel_ends.py::test_a_running_request_is_cancelled_before_its_next_forward",
    ),
    (
        "an answer does not say that it waits for a page",
        "                if not engine.make_room(slot):\n                    yield Full(slot)\n",
        "                engine.make_room(slot)\n",
        "test_parallel_ends.py::test_none_starts_while_one_waits_for_a_page",
    ),
)

GATE = of(
    "gate.py",
    ("a near tie is two ulps", "- 1, -126) - 7)", "- 1, -126) - 6)", "test_gate.py::test_any_other_difference_fails"),
    ("a near tie is less than an ulp", "<= ulp(best)", "< ulp(best)", "test_gate.py::test_a_near_tie_is_counted_and_what_follows_is_not_compared"),
    (
        "the second best is compared, not the other answer's token",
        "float(logits[at, warm[at]])",
        "float(np.sort(logits[at])[-2])",
        "test_gate.py::test_only_a_token_as_good_as_the_best_passes",
    ),
)

PROBE = of(
    "probe.py",
    (
        "steps are not probed",
        "_run(forward, pool, tokens, CUTS)",
        "_run(forward, pool, tokens, ())",
        "equivalence/test_grid.py::test_the_probe_finds_the_level",
    ),
    ("the probe keeps its page", "        slot.close()\n", "        pass\n", "equivalence/test_grid.py::test_the_probe_finds_the_level"),
    (
        "two runs that differ are taken for equal",
        "if not _same(whole, _run(forward, pool, tokens, ())):",
        "if False:",
        "test_probe.py::test_two_prefills_that_differ_are_refused",
    ),
    ("only the logits are compared", "for name in a)", 'for name in ("logits",))', "test_probe.py::test_a_state_that_steps_leave_is_compared_whole"),
)

ENGINE_MUTANTS = (*PAGES, *CUT, *SLOT, *ENGINE, *GENERATION, *GATE, *PROBE)
