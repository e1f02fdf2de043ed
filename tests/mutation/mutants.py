"""Faults of the cache code that would really happen, each with the test that sees it. `python -m tests.mutation.run` tries them."""

from tests.mutation.answers import ANSWER_MUTANTS
from tests.mutation.engines import ENGINE_MUTANTS
from tests.mutation.identities import IDENTITY_MUTANTS
from tests.mutation.lookups import LOOKUP_MUTANTS
from tests.mutation.mutant import Mutant
from tests.mutation.requests import REQUEST_MUTANTS
from tests.mutation.sessions import SESSION_MUTANTS
from tests.mutation.shared import SHARED_MUTANTS

MUTANTS: tuple[Mutant, ...] = (
    *LOOKUP_MUTANTS,
    *SESSION_MUTANTS,
    *REQUEST_MUTANTS,
    *ENGINE_MUTANTS,
    *IDENTITY_MUTANTS,
    *ANSWER_MUTANTS,
    *SHARED_MUTANTS,
)
