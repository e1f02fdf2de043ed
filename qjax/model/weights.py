"""The parameter tree: its shapes, and how it is stacked from a checkpoint's tensors or made at random.

A stacked leaf of a 2-byte dtype is held as its bits (uint16): on a CPU a scan over bfloat16 stacks would widen the whole stack at every step.
"""

import math
import zlib
from collections.abc import Callable, Iterator, Mapping
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from qjax.model.config import LINEAR, CheckpointError, ModelConfig
from qjax.model.names import NAMES, Found, Slot, check, file_shape, leaf_dtypes, leaves, plain_name


def _build(config: ModelConfig, make: Callable) -> dict:
    """The tree whose leaves are make(path)."""
    tree = {}
    for path, _ in leaves(config):
        node = tree if len(path) == 1 else tree.setdefault(path[0], {})
        node[path[-1]] = make(path)
    return tree


def spec(config: ModelConfig) -> dict:
    """The tree of jax.ShapeDtypeStruct, in the form that is held."""
    patterns = dict(leaves(config))

    def leaf(path):
        shapes = [file_shape(name, config) for name in patterns[path]]
        rest = shapes[0][1:] if len(shapes[0]) < 3 else shapes[0][2:]  # conv1d [C, 1, 4] is held as [C, 4]
        shape = (sum(s[0] for s in shapes), *rest)
        if len(path) == 2:
            shape = (config.gdn_layers if path[0] == "gdn" else config.attention_layers, *shape)
        return jax.ShapeDtypeStruct(shape, leaf_dtypes(path, config)[1])

    return _build(config, leaf)


class Stacker:
    """The tree under construction: arrays allocated once, tensors written straight into their rows."""

    def __init__(self, config: ModelConfig):
        self._config = config
        self._held = jax.tree.map(lambda s: _aligned(s.shape, s.dtype), spec(config))

    def put(self, slot: Slot, tensor: np.ndarray):
        """Write one tensor of the file's shape, converted to its leaf's dtype."""
        target = self._rows(slot)
        value = np.asarray(tensor).reshape(target.shape)
        with np.errstate(over="ignore", invalid="ignore"):
            target[...] = value if value.dtype == target.dtype else value.astype(target.dtype)

    def same(self, name: str, slot: Slot, tensor: np.ndarray):
        """Raise CheckpointError unless the tensor has the very bits that its rows hold already (the head of a tied model)."""
        target = self._rows(slot)
        with np.errstate(over="ignore", invalid="ignore"):
            value = np.asarray(tensor).reshape(target.shape).astype(target.dtype)
        bits = f"uint{8 * target.itemsize}"
        differing = int(np.count_nonzero((value.view(bits) != target.view(bits)).any(axis=-1)))
        if differing:
            raise CheckpointError(f"{name}: expected the embedding (tie_word_embeddings is true), found {differing} rows that differ from it")

    def _rows(self, slot: Slot) -> np.ndarray:
        leaf = self._held
        for key in slot.path:
            leaf = leaf[key]
        true, _ = leaf_dtypes(slot.path, self._config)
        return (leaf if slot.layer is None else leaf[slot.layer])[slot.rows].view(true)

    def tree(self) -> dict:
        """The tree of numpy arrays; complete once every slot was put."""
        return self._held


def fill(read: Callable[[str], np.ndarray], order: list[str], places: Mapping[str, Slot], config: ModelConfig) -> dict:
    """Read each tensor of `order` once and stack it. A tied model's lm_head is compared at the end instead of written."""
    stacker = Stacker(config)
    tied = [n for n in order if config.tied and plain_name(n) == "lm_head.weight"]
    for name in order:
        if name not in tied:
            stacker.put(places[name], read(name))
    for name in tied:
        stacker.same(name, places[name], read(name))
    return stacker.tree()


def stack(tensors: Mapping[str, np.ndarray], config: ModelConfig) -> dict:
    """The tree of numpy arrays, in the form that is held, from tensors by checkpoint name. Raises CheckpointError with all faults at once."""
    places = check({name: Found(tuple(t.shape), t.dtype.name) for name, t in tensors.items()}, config)
    return fill(tensors.__getitem__, list(places), places, config)


def _aligned(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """Fresh memory at a 64-byte border, which the CPU backend takes over without a copy."""
    size = int(np.prod(shape)) * dtype.itemsize
    raw = np.empty(size + 64, np.uint8)
    start = -raw.ctypes.data % 64
    return raw[start : start + size].view(dtype).reshape(shape)


def random(config: ModelConfig, seed: int) -> dict:
    """The tree of jax arrays, in the form that is held, of random weights that depend on the seed, the leaf and the layer only.

    Rows of unit size stay so (projections have deviation 1/sqrt(in)), logits have deviation 2, and the states forget slowly, 0.002 to 0.03
    per token, so that a wrong state shows hundreds of tokens later. Raises CheckpointError for a seed that is no 32-bit number.
    """
    if not 0 <= seed < 2**32:
        raise CheckpointError(f"seed: expected 0 to {2**32 - 1}, found {seed}")
    shapes = spec(config)

    def leaf(path):
        held = shapes[path[0]] if len(path) == 1 else shapes[path[0]][path[1]]
        keys = jnp.asarray([seed, zlib.crc32("/".join(path).encode())], jnp.uint32)
        width, offset = _distribution(path, config, held.shape[-1])
        return _uniform(keys, jnp.asarray(width), jnp.asarray(offset), held.shape, leaf_dtypes(path, config), len(path) == 2)

    return _build(config, leaf)


def _distribution(path: tuple[str, ...], config: ModelConfig, width: int) -> tuple[np.ndarray, np.ndarray]:
    """(half width of each row, centre), float32 [rows or 1, 1] or [1], of the uniform distribution of a leaf whose rows have `width` entries."""
    unit = np.sqrt(np.float32(3))  # half width of a uniform distribution of deviation 1
    name = path[-1]
    if name == "A_log":  # softplus(dt_bias + a) is about 0.1: log decays of 0.002 to 0.03, evenly in the logarithm
        low, high = np.log(0.02), np.log(0.3)
        return np.full(1, (high - low) / 2, np.float32), np.full(1, (high + low) / 2, np.float32)
    if name == "dt_bias":
        return np.full(1, 0.2, np.float32), np.full(1, np.log(np.expm1(0.1)), np.float32)
    if name.endswith("norm"):  # all but the GDN's own are zero-centred
        return np.full(1, 0.1 * unit, np.float32), np.full(1, float(path == ("gdn", "norm")), np.float32)
    scale = unit / np.sqrt(np.float32(width))
    if name == "head" or path == ("embed",):
        scale *= 2 if name == "head" or config.tied else np.sqrt(np.float32(width))
    rows = np.full((1, 1), scale, np.float32)
    if path == ("gdn", "inputs"):
        sizes = [file_shape(n, config)[0] for n in NAMES["gdn"]["inputs"]]
        rows = np.repeat(scale * np.array([1, 1, 1, 0.1], np.float32), sizes)[:, None]
    return rows, np.zeros((1, 1), np.float32)


@partial(jax.jit, static_argnums=(3, 4, 5))
def _uniform(keys, width, offset, shape, dtypes, stacked):
    """An array of `shape`, uniform in offset ± width, of the dtype pair (values, held), from keys: uint32 [2]."""
    true, held = dtypes
    one_shape = shape[1:] if stacked else shape
    strides = [math.prod(one_shape[axis + 1 :]) for axis in range(len(one_shape))]

    def one(layer):
        # a hash of the element's number: jax.random takes 29 s for the 0.8B sizes on two cores and three times their memory, this 2 s
        key = _hash(_hash(_hash(keys[0]) ^ keys[1]) ^ layer)
        at = sum(jax.lax.broadcasted_iota(jnp.uint32, one_shape, axis) * jnp.uint32(s) for axis, s in enumerate(strides))
        bits = _hash(_hash(at) ^ key) >> 16
        # the middles of 65,536 equal steps of -1 to 1
        step = (bits.astype(jnp.float32) - jnp.float32(32767.5)) * jnp.float32(1 / 32768)
        value = (step * width + offset).astype(true)
        return value if held == true else jax.lax.bitcast_convert_type(value, held)

    if not stacked:
        return one(jnp.uint32(0))
    # layer by layer, so that the temporaries are one layer's at most
    return jax.lax.map(one, jnp.arange(shape[0], dtype=jnp.uint32))


def _hash(x):
    """A mixing bijection of uint32 (every bit of x reaches every bit of the result)."""
    x = (x ^ (x >> 16)) * jnp.uint32(0x7FEB352D)
    x = (x ^ (x >> 15)) * jnp.uint32(0x846CA68B)
    return x ^ (x >> 16)


def layer_spec(config: ModelConfig, kind: str) -> dict:
    """What `layers` gives for one layer of a kind, "gdn" or "attention": name -> ShapeDtypeStruct."""

    def one(name, leaf):
        shape = leaf.shape[:0:-1] if name == "conv" else leaf.shape[1:]
        return jax.ShapeDtypeStruct(shape, jnp.dtype(config.dtype) if leaf.dtype == np.uint16 else leaf.dtype)

    return {name: one(name, leaf) for name, leaf in spec(config)[kind].items()}


def layers(params: dict, config: ModelConfig) -> Iterator[tuple[str, np.ndarray, dict]]:
    """Each layer in the model's order: its kind, its number among its kind (int32 scalar), its own arrays in the model's dtype.

    On a CPU they are the stacks' memory, not copies of it, but for the small `conv`, which comes as [taps, C].
    """
    stacks = {kind: {name: np.asarray(leaf) for name, leaf in params[kind].items()} for kind in ("gdn", "attention")}
    seen = dict.fromkeys(stacks, 0)

    def own(name, a):
        a = np.ascontiguousarray(a.T) if name == "conv" else a
        return jax.device_put(a.view(config.dtype) if a.dtype == np.uint16 else a)

    for layer_type in config.layer_types:
        kind = "gdn" if layer_type == LINEAR else "attention"
        yield kind, np.int32(seen[kind]), {name: own(name, stack[seen[kind]]) for name, stack in stacks[kind].items()}
        seen[kind] += 1
