"""The names of a Hugging Face checkpoint as a table: which tensors make which leaf of ours, with every fault found in one pass."""

from collections.abc import Iterator, Mapping
from typing import NamedTuple

import ml_dtypes
import numpy as np

from qjax.model.config import FULL, LINEAR, CheckpointError, ModelConfig

_MLP = {
    "post_norm": ("post_attention_layernorm.weight",),
    "gate_up": ("mlp.gate_proj.weight", "mlp.up_proj.weight"),
    "down": ("mlp.down_proj.weight",),
}
# our key: the tensors of a checkpoint whose rows make it, in order; "gdn" and "attention" are stacked over the layers of that kind
NAMES = {
    "embed": ("embed_tokens.weight",),
    "norm": ("norm.weight",),
    "head": ("lm_head.weight",),
    "gdn": {
        "input_norm": ("input_layernorm.weight",),
        "inputs": tuple(f"linear_attn.in_proj_{part}.weight" for part in ("qkv", "z", "b", "a")),
        "conv": ("linear_attn.conv1d.weight",),
        "A_log": ("linear_attn.A_log",),
        "dt_bias": ("linear_attn.dt_bias",),
        "norm": ("linear_attn.norm.weight",),
        "out": ("linear_attn.out_proj.weight",),
        **_MLP,
    },
    "attention": {
        "input_norm": ("input_layernorm.weight",),
        "inputs": tuple(f"self_attn.{part}_proj.weight" for part in "qkv"),
        "q_norm": ("self_attn.q_norm.weight",),
        "k_norm": ("self_attn.k_norm.weight",),
        "out": ("self_attn.o_proj.weight",),
        **_MLP,
    },
}
_FLOAT32 = {("gdn", "A_log"), ("gdn", "norm")}  # rounding A_log to bfloat16 changes every decay
_TEXT = ("model.language_model.", "model.")
_ASIDE = ("model.visual.", "mtp.")
_DTYPES = ("float32", "float16", "bfloat16")


class Found(NamedTuple):
    """One tensor as a checkpoint's header states it."""

    shape: tuple[int, ...]
    dtype: str  # as numpy names it


class Slot(NamedTuple):
    """Where a tensor goes: rows `rows` of leaf `path`, of layer `layer` in its stack (None where the leaf is no stack)."""

    path: tuple[str, ...]
    layer: int | None
    rows: slice
    shape: tuple[int, ...]  # as in the file


def file_shape(name: str, config: ModelConfig) -> tuple[int, ...]:
    """Shape in the file of the tensor that a pattern of NAMES names."""
    c, d = config, config.hidden
    values, queries, keys = c.value_heads * c.value_dim, c.heads * c.head_dim, c.kv_heads * c.head_dim
    return {
        "embed_tokens.weight": (c.vocab, d),
        "lm_head.weight": (c.vocab, d),
        "norm.weight": (d,),
        "input_layernorm.weight": (d,),
        "post_attention_layernorm.weight": (d,),
        "mlp.gate_proj.weight": (c.intermediate, d),
        "mlp.up_proj.weight": (c.intermediate, d),
        "mlp.down_proj.weight": (d, c.intermediate),
        "linear_attn.in_proj_qkv.weight": (c.conv_channels, d),
        "linear_attn.in_proj_z.weight": (values, d),
        "linear_attn.in_proj_b.weight": (c.value_heads, d),
        "linear_attn.in_proj_a.weight": (c.value_heads, d),
        "linear_attn.conv1d.weight": (c.conv_channels, 1, c.conv),
        "linear_attn.A_log": (c.value_heads,),
        "linear_attn.dt_bias": (c.value_heads,),
        "linear_attn.norm.weight": (c.value_dim,),
        "linear_attn.out_proj.weight": (d, values),
        "self_attn.q_proj.weight": (2 * queries, d),  # of each head its query, then its gate
        "self_attn.k_proj.weight": (keys, d),
        "self_attn.v_proj.weight": (keys, d),
        "self_attn.q_norm.weight": (c.head_dim,),
        "self_attn.k_norm.weight": (c.head_dim,),
        "self_attn.o_proj.weight": (d, queries),
    }[name]


def leaves(config: ModelConfig) -> Iterator[tuple[tuple[str, ...], tuple[str, ...]]]:
    """(path, patterns) of each leaf that this model has. A model without layers of a kind keeps their stacks, with no layer in them."""
    for key, entry in NAMES.items():
        if isinstance(entry, dict):
            yield from (((key, name), patterns) for name, patterns in entry.items())
        elif key != "head" or not config.tied:
            yield (key,), entry


def leaf_dtypes(path: tuple[str, ...], config: ModelConfig) -> tuple[np.dtype, np.dtype]:
    """(dtype of the values, dtype they are held in) of a leaf."""
    true = np.dtype("float32") if path in _FLOAT32 or config.dtype == "float32" else np.dtype(ml_dtypes.bfloat16)
    return true, np.dtype("uint16") if len(path) == 2 and true.itemsize == 2 else true


def slots(config: ModelConfig) -> dict[str, Slot]:
    """Every text tensor of a checkpoint by its name without prefix, with its place in the tree. A tied model has a slot for the head too."""
    out = {}
    numbers = {"gdn": [], "attention": []}
    for i, kind in enumerate(config.layer_types):
        numbers[{LINEAR: "gdn", FULL: "attention"}[kind]].append(i)
    for path, patterns in leaves(config):
        row = 0
        for name in patterns:
            shape = file_shape(name, config)
            rows = slice(row, row + shape[0])
            row += shape[0]
            if len(path) == 1:
                out[name] = Slot(path, None, rows, shape)
            else:
                out.update({f"layers.{i}.{name}": Slot(path, at, rows, shape) for at, i in enumerate(numbers[path[0]])})
    return out


def plain_name(name: str) -> str | None:
    """A tensor's name without its prefix; None for the vision tower and the draft layer, which are set aside by name."""
    if name.startswith(_ASIDE):
        return None
    return next((name.removeprefix(p) for p in _TEXT if name.startswith(p)), name)


def check(found: Mapping[str, Found], config: ModelConfig) -> dict[str, Slot]:
    """The slot of every tensor to be read, by its name in the checkpoint. Raises CheckpointError with all faults at once."""
    wanted, out, faults, seen = slots(config), {}, [], {}
    head = {"lm_head.weight": Slot(("embed",), None, slice(0, config.vocab), (config.vocab, config.hidden))} if config.tied else {}
    for name, tensor in found.items():
        plain = plain_name(name)
        if plain is None:
            continue
        slot = wanted.get(plain) or head.get(plain)
        if slot is None:
            faults.append(f"unexpected tensor {name} {list(tensor.shape)}")
        elif plain in seen:
            faults.append(f"{name}: expected once, found as {seen[plain]} too")
        elif tuple(tensor.shape) != slot.shape:
            faults.append(f"{name}: expected shape {list(slot.shape)}, found {list(tensor.shape)}")
        elif tensor.dtype not in _DTYPES:
            faults.append(f"{name}: expected dtype float32, float16 or bfloat16, found {tensor.dtype}")
        else:
            out[name] = slot
        seen.setdefault(plain, name)
    faults += [f"missing tensor {plain} {list(slot.shape)}" for plain, slot in wanted.items() if plain not in seen]
    if faults:
        shown = "".join(f"\n  {f}" for f in faults)
        raise CheckpointError(f"tensors do not fit the config ({len(faults)} fault{'s' * (len(faults) > 1)}):{shown}")
    return out
