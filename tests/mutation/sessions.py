"""Mutants of anchors, sessions and the resident prefix: what stays in the page pool, and what goes."""

from tests.mutation.mutant import of

ANCHORS = of(
    "caches/anchors.py",
    (
        "arrays that several anchors share are counted for each",
        "sizes |= anchor.sizes",
        "sizes |= {(id(anchor), one): n for one, n in anchor.sizes.items()}",
        "caches/test_anchors.py::test_live_bytes_count_shared_arrays_once",
    ),
    (
        "the open inputs of an anchor are not counted",
        "if self.length > self.line else ()",
        "if self.length < self.line else ()",
        "caches/test_anchors.py::test_live_bytes_count_what_is_kept_alive",
    ),
    (
        "the newest anchors are thinned out",
        "kept, stay = list(anchors), [] if few else newest(anchors)",
        "kept, stay = list(anchors), []",
        "caches/test_anchors.py::test_no_budget_leaves_the_newest",
    ),
    (
        "the last end is taken for a superseded one",
        "later = {a.kind: a for a in anchors}",
        "later = {a.kind: a for a in reversed(anchors)}",
        "caches/test_anchors.py::test_superseded_go_first",
    ),
    (
        "superseded anchors count as the newest",
        "return [a for a in anchors if a not in passed][-NEWEST:]",
        "return anchors[-NEWEST:]",
        "caches/test_anchors.py::test_the_newest_do_not_count_what_is_superseded",
    ),
    (
        "an anchor's loss is the gap above it",
        "* (lengths[i + 1] - lengths[i])",
        "* (lengths[i + 2] - lengths[i + 1])",
        "caches/test_anchors.py::test_the_cheapest_goes_first",
    ),
    (
        "anchors that just fit are thinned",
        "while live_bytes(kept) > budget",
        "while live_bytes(kept) >= budget",
        "caches/test_anchors.py::test_the_cheapest_goes_first",
    ),
    (
        "of a head's anchors the last one goes",
        "most + 1)[1:]",
        "most + 1)[:-1]",
        "caches/test_anchors.py::test_spread_keeps_the_last_and_others_evenly",
    ),
)

SESSION = of(
    "caches/session.py",
    (
        "anchors name the pages that they were taken over",
        "replace(a, sequence=a.sequence.replace(**of))",
        "a",
        "caches/test_session.py::test_anchors_get_the_pages_that_the_session_holds",
        "equivalence/test_resident.py::test_the_same_prompt_many_times_names_pages_that_are_held",
    ),
    (
        "a session does not hold its pages",
        "        pool.hold(self.pages)\n",
        "",
        "caches/test_session.py::test_it_holds_its_pages_until_it_is_closed",
    ),
    (
        "a session that is closed twice gives its pages up twice",
        "self.pages, self.anchors = [], []",
        "self.anchors = []",
        "caches/test_session.py::test_it_holds_its_pages_until_it_is_closed",
    ),
    (
        "a cut gives up the page that the last anchor ends in",
        "count = -(-length // self._pool.layout.grid)",
        "count = length // self._pool.layout.grid",
        "caches/test_session.py::test_cut_keeps_what_an_anchor_reaches",
    ),
    (
        "a cut leaves the keys of rows that are gone",
        "self.pages, self.keys = self.pages[:count], self.keys[:length].copy()",
        "self.pages = self.pages[:count]",
        "caches/test_session.py::test_cut_keeps_what_an_anchor_reaches",
    ),
    (
        "a few tokens that all prompts begin with are a hit",
        "some.start >= max(1, min(BLOCK, anchor.length))",
        "some.start >= 1",
        "caches/test_session.py::test_best_is_the_best_of_all",
    ),
    (
        "the first anchor that serves is taken for the best",
        "if found is not None and anchor.length <= found.start:",
        "if found is not None:",
        "caches/test_session.py::test_best_is_the_best_of_all",
    ),
)

SESSIONS = of(
    "caches/sessions.py",
    (
        "pages that others hold too count as freeable",
        "int(self._pool.holders[page]) == times",
        "int(self._pool.holders[page]) >= times",
        "equivalence/test_given_up.py::test_nothing_is_given_up_for_a_snapshot_that_does_not_fit_all_the_same",
    ),
    (
        "anchors that the resident session has too count against a role",
        'states = {a.state for a in now.anchors} if now and role != "resident" else set()',
        "states = set()",
        "equivalence/test_given_up.py::test_what_a_guest_shares_with_the_conversation_is_not_its_own",
    ),
    (
        "why a prompt is read again is told of another tenant's session",
        "if of == tenant and common(gone, keys) > agrees)",
        "if common(gone, keys) > agrees)",
        "equivalence/test_given_up.py::test_why_a_prompt_is_read_again_is_not_told_of_another_tenants",
    ),
    (
        "a session that is gone and agreed no further is the reason",
        "common(gone, keys) > agrees)",
        "common(gone, keys) >= agrees)",
        "equivalence/test_resident.py::test_a_full_pool_gives_up_what_is_kept",
    ),
    (
        "a full pool takes the resident session first",
        '[*self._least("guest", "pinned", "parked"), *self._of("resident")]',
        '[*self._of("resident"), *self._least("guest", "pinned", "parked")]',
        "equivalence/test_given_up.py::test_the_conversation_goes_last",
    ),
    (
        "a full pool takes sessions that free no page",
        "for sparing in (True, False):",
        "for sparing in (False,):",
        "equivalence/test_given_up.py::test_a_session_that_frees_no_page_is_spared",
    ),
    (
        "a session that is cut does not go to the store",
        '                self._demote(session)\n                self._forget(session, "pool")\n',
        '                self._forget(session, "pool")\n',
        "equivalence/test_resident.py::test_a_full_pool_gives_up_what_is_kept",
    ),
    (
        "a session that is cut is not remembered",
        '                self._forget(session, "pool")\n',
        "",
        "equivalence/test_resident.py::test_a_full_pool_gives_up_what_is_kept",
    ),
    (
        "a role's budget is not enforced",
        "for role, (name, _) in BUDGETS.items():",
        "for role, (name, _) in ():",
        "equivalence/test_reported_memory.py::test_g1_budgets_hold_before_anything_is_kept",
    ),
    (
        "a session that goes gives its pages to nobody",
        "        session.close()\n",
        "",
        "equivalence/test_resident.py::test_stats_are_the_live_bytes",
    ),
    (
        "what was cleared goes to the store",
        '("superseded", "cleared", "budget")',
        '("superseded", "budget")',
        "equivalence/test_given_up.py::test_emptying_copies_nothing",
    ),
    (
        "a head is pinned for every session that begins with it",
        '                if self._has(session, some[-1].length):\n                    self._close(session, "park")\n                    return\n',
        "",
        "equivalence/test_resident.py::test_heads_of_many_sessions_are_pinned_once",
    ),
    (
        "a head goes because another tenant keeps the same",
        "if s is not session and s.tenant == session.tenant)",
        "if s is not session)",
        "equivalence/test_given_up.py::test_each_tenants_head_is_pinned",
    ),
    (
        "the session that is most likely to be gone on with goes first",
        "self._is_awaited(s), self.returns.worth(s.turns, self._requests - s.request + 1), s.used",
        "self._is_awaited(s), -self.returns.worth(s.turns, self._requests - s.request + 1), s.used",
        "equivalence/test_given_up.py::test_the_session_that_is_least_likely_to_go_on_goes_first",
    ),
    (
        "a conversation that waits for its sub-agents goes as any other",
        "return self._is_awaited(s), self.returns.worth",
        "return False, self.returns.worth",
        "equivalence/test_named.py::test_a_conversation_that_waits_for_its_sub_agents_stays",
    ),
    (
        "a name is awaited for every tenant",
        "(session.tenant, session.owner) in self._awaited",
        "session.owner in [owner for _, owner in self._awaited]",
        "equivalence/test_named.py::test_another_tenants_request_keeps_nothing",
    ),
    (
        "a conversation that has gone on is awaited still",
        "for name in (owner, parent):",
        "for name in (parent,):",
        "equivalence/test_named.py::test_it_waits_no_longer_when_it_has_gone_on_itself",
    ),
    (
        "the caches' limit does not reach the sessions",
        "                if self.anchor_bytes > limit:\n",
        "                if self.anchor_bytes > limit + 2**30:\n",
        "equivalence/test_budget.py::test_the_limit_holds_at_every_moment",
    ),
)

RESIDENT = of(
    "caches/resident.py",
    (
        "tenants see each other",
        "            if session.tenant != tenant:\n                continue\n",
        "",
        "equivalence/test_resident.py::test_tenants_do_not_see_each_other",
    ),
    (
        "how far a prompt agrees is told of another tenant",
        "for s in self.sessions if s.tenant == tenant]",
        "for s in self.sessions]",
        "equivalence/test_resident.py::test_tenants_do_not_see_each_other",
    ),
    (
        "a hit's pages are not held",
        "        self._pool.hold(sequence.pages)\n",
        "",
        "equivalence/test_resident.py::test_a_guest_leaves_the_conversation_where_it_was",
    ),
    (
        "a hit is taken at its anchor's length",
        "anchor.sequence.cut(hit.start, self._pool.layout.grid)",
        "anchor.sequence",
        "equivalence/test_resident.py::test_an_edit_in_the_middle_resumes_below_it",
    ),
    (
        "a hit inside an anchor's block has the anchor's logits",
        "anchor.logits if hit.whole else None",
        "anchor.logits",
        "equivalence/test_anchored.py::test_a_hit_inside_a_block_has_no_logits",
    ),
    (
        "at level grid anchors stay with rows that are read again",
        "if self._level == GRID:",
        "if self._level is None:",
        "equivalence/test_anchored.py::test_at_level_grid_an_anchor_stays_with_the_rows_that_it_was_taken_over",
    ),
    (
        "anchors past where the rows agree are inherited",
        "[a for a in heir.anchors if a.length <= most]",
        "[*heir.anchors]",
        "equivalence/test_anchored.py::test_a_longer_edit_has_no_anchors_past_where_it_parts",
    ),
    (
        "a branch takes the place of the session that it parts from",
        "agrees >= before.history",
        "agrees >= BLOCK",
        "equivalence/test_resident.py::test_sessions_in_turn_come_back_where_they_left",
    ),
    (
        "the conversation stays parked after a request that left nothing",
        '            plan.parked.role = "resident"\n',
        "            pass\n",
        "equivalence/test_resident.py::test_a_request_that_leaves_nothing_takes_nothing",
    ),
    (
        "a prompt as long as the conversation is its guest",
        "GUEST_SHARE * size < now.length",
        "size < now.length",
        "equivalence/test_resident.py::test_a_branch_gets_an_anchor_on_the_next_pass",
    ),
    (
        "inherited anchors take the place of new ones",
        "for a in (*plan.inherited, *anchors) if",
        "for a in (*anchors, *plan.inherited) if",
        "equivalence/test_anchored.py::test_a_prompts_end_at_a_line_takes_the_logits",
    ),
    (
        "a cancelled prefill keeps anchors past its rows",
        "for a in (*plan.inherited, *anchors) if a.length <= keys.size}",
        "for a in (*plan.inherited, *anchors)}",
        "equivalence/test_anchored.py::test_a_cancelled_request_keeps_no_anchor_past_its_rows",
    ),
    (
        "every turn of a session stays beside the next one",
        '            self._close(plan.replaces, "superseded", but=session)\n',
        "            pass\n",
        "equivalence/test_reported.py::test_b1_a_chat_of_twenty_turns",
    ),
    (
        "inherited anchors do not count against the budget",
        " - live_bytes(plan.inherited), most)",
        ", most)",
        "caches/test_resident.py::test_a_running_requests_anchors_fit_the_budget_with_what_it_inherits",
    ),
    (
        "a request's anchors take more than it was promised",
        " - live_bytes(plan.inherited), most)",
        " - live_bytes(plan.inherited), 2**60)",
        "equivalence/test_budget.py::test_the_limit_holds_while_two_run",
    ),
    (
        "a running request's anchors do not hold the budget",
        "kept = thin(anchors, max(0, room), self.depths, new.length)",
        "kept = anchors[:]",
        "caches/test_resident.py::test_a_running_requests_anchors_fit_the_budget_with_what_it_inherits",
    ),
)

SESSION_MUTANTS = (*ANCHORS, *SESSION, *SESSIONS, *RESIDENT)
