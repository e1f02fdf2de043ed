"""Rates, measured while running: what a restore costs, and what the prefill costs that it saves."""

from __future__ import annotations

KEPT = 0.75
"""What is kept of the sums at each new measurement: the last four or so count."""
FORGOTTEN = 20
"""Refusals after which reads are measured again: a disk that was busy once would never be read any more."""


class Rate:
    """Amounts over seconds, both summed, so that a small measurement counts little."""

    def __init__(self):
        self._amount = self._seconds = 0.0

    def add(self, amount: int, seconds: float) -> None:
        self._amount, self._seconds = KEPT * self._amount + amount, KEPT * self._seconds + max(seconds, 1e-9)

    @property
    def per_second(self) -> float | None:
        return self._amount / self._seconds if self._seconds else None


class Rates:
    """read: bytes into the pool. prefill: tokens forwarded."""

    def __init__(self):
        self.read, self.prefill, self._refused = Rate(), Rate(), 0

    def pays(self, nbytes: int, tokens: int) -> bool:
        """Whether reading so many bytes takes less time than forwarding the tokens that they save; True while one of the two is not known."""
        read, prefill = self.read.per_second, self.prefill.per_second
        if not read or not prefill or nbytes / read < tokens / prefill:
            return True
        self._refused += 1
        if self._refused % FORGOTTEN == 0:
            self.read = Rate()
        return False

    def stats(self) -> dict[str, float | None]:
        return {"read_bytes_per_s": self.read.per_second, "prefill_tokens_per_s": self.prefill.per_second}
