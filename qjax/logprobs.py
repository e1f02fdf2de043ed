"""How likely a row of logits made its token, and which others were likelier."""

from typing import NamedTuple

import numpy as np

from qjax.sampling import largest

MOST = 20
"""The most other tokens that a request may ask about, as in OpenAI's API."""


class Logprobs(NamedTuple):
    """Natural logarithms of probabilities. own: of the token itself; top: (id, logarithm) of the likeliest, equal ones by id."""

    own: float
    top: list[tuple[int, float]]


def logprobs(logits: np.ndarray, token: int, top: int, allowed: int) -> Logprobs:
    """Of the softmax, in float64, of the first `allowed` logits as they are: before penalties and temperature.

    logits: [V] float32, finite, as `sample` takes them. top: how many of the likeliest, 0 for none.
    """
    logits = logits[:allowed]
    row = logits.astype(np.float64)
    row -= row.max()
    row -= np.log(np.exp(row).sum())
    return Logprobs(float(row[token]), [(int(i), float(row[i])) for i in largest(logits, top)] if top else [])
