"""What this machine can do at best, and what a forward has to do: the two sides of every share."""

from __future__ import annotations

import math
import time
from functools import partial

import jax
import jax.numpy as jnp

from qjax.model import qwen3_5, weights
from qjax.model.config import ModelConfig
from qjax.model.layers import product
from qjax.state import BLOCK

PRODUCTS = ((1024, 1024, 4096), (2048, 2048, 2048), (4096, 4096, 4096))
"""Rows, inner and outer size of the products with weights that are tried for the peak: a prefill's, and two square ones."""
READ_BYTES = 2**29
READ_ROWS = (2, 16, 1024)
"""An array of READ_BYTES is summed row by row, in so many rows: how many are the fastest depends on the cores."""
TRIES = 3


class Machine:
    """The best matmul rate in the model's dtype and the best memory read rate; every `measure` can only raise them."""

    def __init__(self, dtype: str):
        self._array = jnp.ones(READ_BYTES // 4, jnp.float32)
        self._reads = [jax.jit(partial(_row_sums, rows)).lower(self._array).compile() for rows in READ_ROWS]
        self._products = []
        for rows, inner, outer in PRODUCTS:
            operands = jnp.ones((rows, inner), dtype), jnp.ones((outer, inner), dtype)
            self._products.append((2 * rows * inner * outer, jax.jit(product).lower(*operands).compile(), operands))
        self.peak_gflops = self.read_gb_s = 0.0

    def measure(self) -> None:
        for flops, run, operands in self._products:
            self.peak_gflops = max(self.peak_gflops, flops / _best_seconds(run, *operands) / 1e9)
        for run in self._reads:
            self.read_gb_s = max(self.read_gb_s, READ_BYTES / _best_seconds(run, self._array) / 1e9)


def _row_sums(rows: int, array):
    return array.reshape(rows, -1).sum(axis=1)


def _best_seconds(run, *arguments) -> float:
    """The fastest of TRIES calls."""
    seconds = []
    for _ in range(TRIES):
        begin = time.perf_counter()
        jax.block_until_ready(run(*arguments))
        seconds.append(time.perf_counter() - begin)
    return min(seconds)


def prefill_flops(c: ModelConfig, tokens: int) -> float:
    """Arithmetic that a cold prefill of a dense model needs, a multiply-add as two; no row is counted twice, and no padding.

    The products with weights (the head for the last row only), attention's score and value products over the keys that a row
    sees, and the products of the chunked GDN form over the entries that a row sees. Elementwise work is not counted.
    """
    spec = weights.spec(c)
    matrices = [a for kind in ("gdn", "attention") for name, a in spec[kind].items() if name in ("inputs", "out", "gate_up", "down")]
    flops = 2 * sum(math.prod(a.shape) for a in matrices) * tokens + 2 * c.vocab * c.hidden
    flops += c.attention_layers * c.heads * c.head_dim * 4 * tokens * (tokens + 1) / 2
    seen = (BLOCK + 1) / 2  # entries that a row sees of its block, on average
    k_and_q = c.key_heads * 2 * 2 * c.key_dim * seen  # K K^T and Q K^T
    inverse = c.value_heads * BLOCK**2 / 3
    state = c.value_heads * 3 * 2 * c.key_dim * c.value_dim  # K S, Q S and the state's update
    values = c.value_heads * 2 * 2 * c.value_dim * seen  # T rhs and (Q K^T * D) U
    return flops + c.gdn_layers * tokens * (k_and_q + inverse + state + values)


def decode_bytes(c: ModelConfig, context: int) -> int:
    """Bytes that a decode step must read: every weight once (of an untied embedding one row), S, and the context's K and V rows."""
    layout = qwen3_5.layout(c)
    stored = sum(math.prod(a.shape) * a.dtype.itemsize for a in jax.tree.leaves(weights.spec(c)))
    if not c.tied:
        stored -= (c.vocab - 1) * c.hidden * jnp.dtype(c.dtype).itemsize
    return stored + sum(s.nbytes for s in layout.sections if s.name == "gdn.S") + context * layout.row_bytes
