"""Mutants of one request among others: the lookup, what runs beside, whose turn it is."""

from tests.mutation.mutant import of

LOOKUP = of(
    "caches/lookup.py",
    (
        "a deeper tier is taken though a higher one starts later",
        "if hit is None or any((hit.start, hit.whole, hit.exact) <= (h.start, h.whole, h.exact) for h in hits):",
        "if hit is None:",
        "equivalence/test_resident.py::test_a_session_that_the_park_cannot_hold_leaves_its_head",
    ),
    (
        "a restored snapshot finds no pages",
        "        self.make_room(lambda: self.pool.free >= pages)\n",
        "",
        "equivalence/test_resident.py::test_a_full_pool_gives_up_what_is_kept",
    ),
    (
        "sessions are given up for a snapshot that does not fit all the same",
        "            raise NoRoom(",
        "            str(",
        "equivalence/test_given_up.py::test_nothing_is_given_up_for_a_snapshot_that_does_not_fit_all_the_same",
    ),
    (
        "a tainted state is stored as a head",
        "store.may_be_head(a.length) and not a.tainted",
        "store.may_be_head(a.length)",
        "equivalence/test_grid.py::test_the_head_that_the_store_keeps_is_exact",
    ),
    ("the taint does not go to the store", "a.logits, use, a.tainted)", "a.logits, use)", "equivalence/test_grid.py::test_the_store_keeps_the_taint"),
    (
        "nobody waits for a head that is being read",
        "return coming > 0 and coming > max(",
        "return 0 > coming > max(",
        "equivalence/test_parallel_caches.py::test_b7_four_at_once_with_one_head_read_it_once",
    ),
    (
        "a request waits for what it has",
        "coming > max((hit.start for hit in self.find(keys, tenant)), default=0)",
        "coming > 0",
        "equivalence/test_parallel_caches.py::test_a_next_turn_does_not_wait_for_another_that_reads_its_beginning",
    ),
    (
        "a request's anchors are more than room was made for",
        "(new // layout.grid + 5) *",
        "(new // layout.grid - 2) *",
        "equivalence/test_budget.py::test_the_limit_holds_at_every_moment",
    ),
)

REQUEST = of(
    "caches/request.py",
    (
        "the state of an answer is not tainted",
        'self.caches.level == GRID and (kind == "end" or not self.exact)',
        "self.caches.level == GRID and not self.exact",
        "equivalence/test_grid.py::test_exact_means_bits_and_a_session_resume_says_so",
    ),
    (
        "what a session resume read is not tainted",
        'self.caches.level == GRID and (kind == "end" or not self.exact)',
        'self.caches.level == GRID and kind == "end"',
        "equivalence/test_grid.py::test_exact_means_bits_and_a_session_resume_says_so",
    ),
    (
        "a request is exact whatever it starts on",
        "(taken.start, taken.source, taken.exact)",
        "(taken.start, taken.source, True)",
        "equivalence/test_grid.py::test_exact_means_bits_and_a_session_resume_says_so",
    ),
    (
        "an anchor keeps a whole batch of logits alive",
        "None if logits is None else np.array(logits), tainted",
        "logits, tainted",
        "equivalence/test_resident.py::test_logits_that_an_anchor_keeps_are_its_own",
    ),
    (
        "a line is marked at the end of a forward",
        "if start < line < end)",
        "if start < line <= end)",
        "equivalence/test_resident.py::test_boundaries_that_the_caller_names_are_captured",
    ),
    (
        "what was taken before a clear comes back",
        "if caches.clears > self._clears:",
        "if False:",
        "equivalence/test_anchored.py::test_what_was_taken_before_a_clear_does_not_come_back",
    ),
    (
        "a prefill that was cancelled off a grid line is kept at level grid",
        "else caches.level == TOKEN or length % caches.pool.layout.grid == 0",
        "else True",
        "equivalence/test_anchored.py::test_at_level_grid_a_prefill_that_is_cancelled_off_a_line_leaves_nothing",
    ),
    (
        "a cancelled prefill is kept as finished",
        ".astype(np.int64)])[:length]",
        ".astype(np.int64)])",
        "equivalence/test_anchored.py::test_a_cancelled_request_keeps_no_anchor_past_its_rows",
    ),
    (
        "a cancelled prefill's session is not gone on with",
        "self.anchors, min(self._history, length))",
        "self.anchors, self._history)",
        "equivalence/test_anchored.py::test_a_cancelled_prefill_is_the_session_that_the_retry_goes_on_with",
    ),
    (
        "the end of an answer is kept as a prompt's",
        'self.add("end" if length > self._tokens.size else "prompt"',
        'self.add("prompt"',
        "equivalence/test_resident.py::test_the_next_turn_goes_on_at_the_end",
    ),
    (
        "a request that fails leaves the conversation parked",
        "        self.caches.resident.give_back(self._plan)\n",
        "",
        "equivalence/test_resident.py::test_a_request_that_leaves_nothing_takes_nothing",
    ),
    (
        "a request that has ended is found as running",
        "        caches.running.remove(self)\n",
        "",
        "equivalence/test_parallel_caches.py::test_what_runs_is_counted",
    ),
    (
        "a request that failed is found as running",
        "        self.caches.running.remove(self)\n",
        "",
        "equivalence/test_anchored.py::test_a_request_that_failed_runs_no_more",
    ),
    (
        "what was cleared was evicted, says the ledger",
        'return Why.CLEARED if gone == "cleared" else Why.EVICTED',
        "return Why.EVICTED",
        "equivalence/test_resident.py::test_a_full_pool_gives_up_what_is_kept",
    ),
    (
        "a missing anchor is a difference, says the ledger",
        "        if self._agrees > self.start:\n",
        "        if self._agrees < self.start:\n",
        "equivalence/test_resident.py::test_an_edit_in_the_middle_resumes_below_it",
    ),
    (
        "what is read again is not counted",
        "read_again=max(0, self._agrees - self.start)",
        "read_again=0",
        "equivalence/test_resident.py::test_an_edit_in_the_middle_resumes_below_it",
    ),
)

RUNNING = of(
    "caches/running.py",
    (
        "an anchor is served from the pages that it was taken over",
        "pages = np.array(request.slot.pages[: -(-anchor.length // self._pool.layout.grid)], np.int32)",
        "pages = anchor.sequence.pages",
        "equivalence/test_parallel_caches.py::test_an_anchor_is_served_from_the_pages_that_its_request_has_now",
    ),
    (
        "a running request's pages are not held for the next",
        "        self._pool.hold(sequence.pages)\n",
        "",
        "equivalence/test_parallel_caches.py::test_b7_four_at_once_with_one_head_read_it_once",
    ),
    (
        "a few tokens of a running request that all prompts begin with are a hit",
        "found is not None and found.start >= min(BLOCK, anchor.length) and",
        "found is not None and",
        "equivalence/test_anchored.py::test_a_few_tokens_that_all_begin_with_are_no_hit",
    ),
    (
        "a running request is found by another tenant",
        "if request.tenant != tenant or request.slot is None",
        "if request.slot is None",
        "equivalence/test_parallel_caches.py::test_another_tenant_finds_nothing_of_what_runs",
    ),
    (
        "a request waits for another tenant's",
        "            if request.tenant != tenant:\n                continue\n            agrees",
        "            agrees",
        "equivalence/test_parallel_caches.py::test_tenants_share_nothing_while_they_run",
    ),
    (
        "a request waits for a line that was passed",
        "if line > (request.start if request.slot is None else request.slot.length):",
        "if line:",
        "equivalence/test_parallel_caches.py::test_a_line_whose_anchor_was_given_up_is_not_waited_for",
    ),
    (
        "a request waits for a line that is none",
        "agrees if agrees == request.keys.size else agrees // grid * grid",
        "agrees",
        "equivalence/test_parallel_caches.py::test_a_short_common_head_is_not_waited_for",
    ),
    (
        "what runs is found after a clear",
        'no more."""\n        self.requests = []\n',
        'no more."""\n',
        "equivalence/test_parallel_caches.py::test_what_runs_is_not_found_after_a_clear",
    ),
    (
        "a running request's anchor is taken whole",
        ".cut(hit.start, self._pool.layout.grid)",
        "",
        "equivalence/test_parallel_caches.py::test_one_that_comes_later_goes_on_beside_the_first",
    ),
    (
        "a hit inside a running request's block has its logits",
        "anchor.logits if hit.whole else None",
        "anchor.logits",
        "equivalence/test_anchored.py::test_a_hit_inside_a_block_has_no_logits",
    ),
)

PARALLEL = of(
    "parallel.py",
    (
        "all that read take a forward in a round",
        "                yield run\n                return\n",
        "                yield run\n",
        "test_parallel.py::test_an_answer_waits_for_one_prefill_forward_at_the_most",
    ),
    (
        "one reads to its end before the next",
        "                self._running.remove(run)\n                self._running.append(run)\n                yield",
        "                yield",
        "test_parallel.py::test_an_answer_waits_for_one_prefill_forward_at_the_most",
    ),
    (
        "a page is taken for granted",
        "return run.full is None or self._engine.make_room(run.full)",
        "return True",
        "test_parallel_ends.py::test_a_request_without_a_page_waits_for_one_that_ends",
    ),
    (
        "one starts while another waits for a page",
        " or any(run.full for run in self._running)",
        "",
        "test_parallel_ends.py::test_none_starts_while_one_waits_for_a_page",
    ),
    (
        "where all wait the oldest ends",
        "run = max(self._running, key",
        "run = min(self._running, key",
        "test_parallel_ends.py::test_where_all_wait_the_youngest_that_has_said_something_ends",
    ),
    ("more run than may", "len(self._running) >= self._most or ", "", "test_parallel.py::test_at_most_so_many_run_at_once_and_they_start_in_order"),
    (
        "a cancel does not reach the queue",
        "gone = [generation for generation in self._waiting if self._open[generation]]",
        "gone = []",
        "test_parallel_ends.py::test_a_cancel_reaches_one_that_waits_in_a_full_queue",
    ),
    (
        "a cancel waits for the next round",
        "            if self._open[generation]:\n                generation.close()\n",
        "",
        "test_parallel_ends.py::test_a_running_request_is_cancelled_before_its_next_forward",
    ),
    (
        "a waiting request's head is read twice",
        "            if self._running and self._is_being_read(generation):\n                continue\n",
        "",
        "equivalence/test_parallel_caches.py::test_b7_four_at_once_with_one_head_read_it_once",
    ),
    (
        "one that waits for a head holds up the others",
        "self._is_being_read(generation):\n                continue",
        "self._is_being_read(generation):\n                return",
        "equivalence/test_parallel_caches.py::test_others_pass_one_that_waits_for_a_head",
    ),
)

REQUEST_MUTANTS = (*LOOKUP, *REQUEST, *RUNNING, *PARALLEL)
