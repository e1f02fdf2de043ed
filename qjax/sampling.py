"""One token from one row of logits, on the host: what a request may ask for, and the draw.

The transforms come in the order of transformers and vLLM: repetition penalty, presence penalty, temperature, top-k, top-p, min-p.
Draws are counter based: the token at one place of a generation depends on the row, the seed and that place, and on nothing drawn before, so
a generation that is resumed draws what the unbroken one would have drawn.
"""

import dataclasses
import math

import numpy as np

from qjax.flags import WrongSetting

SUM_BLOCK = 1024  # weights summed at a time: a float64 running sum over a whole vocabulary is 30 times slower than sums of blocks
FIRST_TRY = 128  # tokens sorted at first for top-p; times 8 until they hold the mass, since a sort of 248,320 logits costs 6 ms


@dataclasses.dataclass(frozen=True)
class Sampling:
    """How tokens are chosen; the default is greedy. ValueError names the field that is out of range.

    temperature: 0 takes the largest logit (of equal ones the lowest id).  top_k: 0 is off, else exactly the k largest (equal ones by id).
    top_p: the fewest tokens that hold this mass.  min_p: least probability relative to the largest.
    presence_penalty: subtracted once from the logit of every token generated so far.
    repetition_penalty: the logit of every token of prompt and generation is divided by it when positive, multiplied when negative.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int = 0

    def __post_init__(self):
        for field, wanted, kind, low, high in RANGES:
            value = getattr(self, field)
            number = isinstance(value, kind) and not isinstance(value, bool)
            if not (number and low <= value <= high):  # a NaN is in no range
                raise WrongSetting(field, f"must be {wanted}, not {value!r}")

    @property
    def penalizes(self) -> bool:
        """True where the tokens so far enter the choice."""
        return self.presence_penalty != 0 or self.repetition_penalty != 1


WHOLE, REAL = (int, np.integer), (int, float, np.integer, np.floating)


def is_whole(value: object) -> bool:
    """True for an integer, which a boolean is not."""
    return isinstance(value, WHOLE) and not isinstance(value, bool)


RANGES = (
    ("temperature", "a finite number, 0 (greedy) or more", REAL, 0, np.finfo(np.float32).max),
    ("top_k", "a whole number, 0 (off) or more", WHOLE, 0, math.inf),
    ("top_p", "above 0 and at most 1", REAL, np.nextafter(0, 1), 1),
    ("min_p", "from 0 to 1", REAL, 0, 1),
    ("presence_penalty", "from -2 to 2", REAL, -2, 2),
    ("repetition_penalty", "from 0.01 to 100", REAL, 0.01, 100),
    ("seed", "a whole number from 0 to 2**64 - 1", WHOLE, 0, 2**64 - 1),
)


def sample(logits: np.ndarray, sampling: Sampling, history: np.ndarray, draw: int, allowed: int) -> int:
    """The next token's id, below `allowed`.

    logits: [V] float32.  history: [N] integers, the prompt's tokens and then those generated; the last `draw` of them are the generated ones.
    draw: the new token's index within the generation.  Ids from `allowed` on take no part: a padded vocabulary has rows without a text.
    ValueError when the allowed logits hold a NaN or +inf, or are all -inf: such a row comes from broken weights or state, and no token
    drawn from it would mean anything.
    """
    logits = np.asarray(logits)
    if logits.ndim != 1 or not 0 < allowed <= logits.size:
        raise ValueError(f"logits {list(logits.shape)} with {allowed} allowed ids: expected [V] and 1 to V allowed")
    logits = _penalized(logits[:allowed].astype(np.float32, copy=False), sampling, np.asarray(history, np.int64), draw)
    top = logits.max()
    if not np.isfinite(top):
        raise ValueError(_fault(logits))
    if sampling.temperature == 0:
        return int(logits.argmax())
    ids, weights = _candidates(logits, top, sampling)
    index = _pick(weights, np.random.Generator(np.random.Philox(key=np.array([sampling.seed, draw], np.uint64))).random())
    return index if ids is None else int(ids[index])


def _fault(logits) -> str:
    for name, places in (("NaN", np.isnan(logits)), ("+inf", np.isposinf(logits))):
        if places.any():
            return f"{int(places.sum())} of {logits.size} logits are {name}, the first at id {int(places.argmax())}"
    return f"all {logits.size} allowed logits are -inf: no token can be drawn"


def _penalized(logits, sampling: Sampling, history, draw: int):
    """The logits after both penalties; a copy when there are any. A token counts once however often it stands in the history."""
    if sampling.repetition_penalty == 1 and sampling.presence_penalty == 0:
        return logits
    logits = logits.copy()
    generated = history[max(history.size - draw, 0) :]
    # Equal ids write equal values, gathered before anything is written, so nothing has to be made unique first.
    ids = history[(history >= 0) & (history < logits.size)]
    seen = logits[ids]
    logits[ids] = np.where(seen > 0, seen / np.float32(sampling.repetition_penalty), seen * np.float32(sampling.repetition_penalty))
    ids = generated[(generated >= 0) & (generated < logits.size)]
    logits[ids] = logits[ids] - np.float32(sampling.presence_penalty)
    return logits


def _candidates(logits, top, sampling: Sampling):
    """(ids [N] or None for all of them in order, weights [N] float32): what the filters leave, weighted by exp of the scaled logits."""
    ids = None
    if 0 < sampling.top_k < logits.size:
        ids = largest(logits, sampling.top_k)
        logits = logits[ids]
    # The largest becomes 0 before the division, so that the smallest temperature overflows towards -inf only.
    with np.errstate(over="ignore"):
        scaled = (logits - top) / np.float32(max(sampling.temperature, np.finfo(np.float32).tiny))
    weights = np.exp(scaled)
    if sampling.top_p < 1:
        kept = _nucleus(logits, weights, sampling.top_p, ids is not None)
        ids, scaled, weights = kept if ids is None else ids[kept], scaled[kept], weights[kept]
    if sampling.min_p > 0:
        # In logarithms, where min_p = 1 is exactly 0 and keeps nothing below the largest.
        kept = np.flatnonzero(scaled >= np.float32(math.log(sampling.min_p)))
        ids, weights = kept if ids is None else ids[kept], weights[kept]
    return ids, weights


def largest(values, count: int):
    """Ids of the `count` largest values, largest first, equal ones by id; partitioning values is five times faster than argpartition."""
    if count >= values.size:
        return np.argsort(-values, kind="stable")
    bound = np.partition(values, values.size - count)[values.size - count]
    above = np.flatnonzero(values > bound)
    ids = np.concatenate([above, np.flatnonzero(values == bound)[: count - above.size]])
    return ids[np.argsort(-values[ids], kind="stable")]


def _nucleus(logits, weights, mass: float, is_sorted: bool):
    """Indices of the fewest largest weights that hold `mass` of their sum, largest first."""
    wanted = mass * weights.sum(dtype=np.float64)
    count = weights.size if is_sorted else FIRST_TRY
    while True:
        order = np.arange(weights.size) if is_sorted else largest(logits, count)
        held = np.cumsum(weights[order], dtype=np.float64)
        if held[-1] >= wanted or count >= weights.size:
            return order[: np.searchsorted(held, wanted) + 1]
        count *= 8


def _pick(weights, uniform: float) -> int:
    """The index at which the running sum of the weights passes `uniform` (in [0, 1)) of the whole; never one of weight 0."""
    sums = np.cumsum(np.add.reduceat(weights, np.arange(0, weights.size, SUM_BLOCK), dtype=np.float64))
    wanted = uniform * sums[-1]
    block = _passes(sums, wanted)
    first = block * SUM_BLOCK
    within = np.cumsum(weights[first : first + SUM_BLOCK], dtype=np.float64)
    return first + _passes(within, wanted - (sums[block - 1] if block else 0.0))


def _passes(sums, wanted: float) -> int:
    # Rounding may put `wanted` at the last sum, past everything that has a weight.
    return int(np.searchsorted(sums, min(wanted, np.nextafter(sums[-1], 0)), side="right"))
