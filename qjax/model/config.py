"""The sizes of a hybrid Qwen model, read from a Hugging Face config.json or taken from a preset."""

import dataclasses
import json
import math
from pathlib import Path

SUPPORTED = ("qwen3_5", "qwen3_5_text")
LINEAR, FULL = "linear_attention", "full_attention"

# our field: the key in config.json, all positive integers that a config must name
_SIZES = {
    "vocab": "vocab_size",
    "hidden": "hidden_size",
    "intermediate": "intermediate_size",
    "layers": "num_hidden_layers",
    "heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "key_heads": "linear_num_key_heads",
    "value_heads": "linear_num_value_heads",
    "key_dim": "linear_key_head_dim",
    "value_dim": "linear_value_head_dim",
    "conv": "linear_conv_kernel_dim",
    "context": "max_position_embeddings",
}
# what the forward pass takes for granted: key and the only value it can run; an absent key means that value
_FIXED = {
    "hidden_act": "silu",
    "attention_bias": False,
    "attn_output_gate": True,
    "mamba_ssm_dtype": "float32",
}
_DTYPES = {None: "bfloat16", "bfloat16": "bfloat16", "float16": "bfloat16", "float32": "float32"}


class CheckpointError(ValueError):
    """A checkpoint, a config or a model name that cannot be used: the message says where, what was expected and what was found."""


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """Sizes and constants of one model; hashable, so that it can be a static argument of a jitted function.

    Counts are of elements, `rope_theta` is the rotary base, `rotary_dims` the leading dims of a head that are rotated, `context` the
    longest position trained for, `conv` the taps of the causal convolution, `eos` the ids of config.json. Raises CheckpointError on
    sizes that no model can have.
    """

    vocab: int
    hidden: int
    intermediate: int
    layers: int
    layer_types: tuple[str, ...]
    heads: int
    kv_heads: int
    head_dim: int
    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    conv: int = 4
    eps: float = 1e-6
    rope_theta: float = 1e7
    rotary_dims: int = 64
    mrope_section: tuple[int, ...] = (11, 11, 10)
    tied: bool = False
    context: int = 262144
    eos: tuple[int, ...] = ()
    mtp_layers: int = 0
    dtype: str = "bfloat16"
    model_type: str = "qwen3_5_text"

    def __post_init__(self):
        faults = []
        for field, key in _SIZES.items():
            value = getattr(self, field)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                faults.append(f"{key}: expected a positive integer, found {value!r}")
        if not faults:
            faults = list(self._misfits())
        if faults:
            raise CheckpointError("config does not fit together: " + "; ".join(faults))

    def _misfits(self):
        """Yield what contradicts what; the single sizes are known to be positive integers."""
        unknown = sorted(set(self.layer_types) - {LINEAR, FULL})
        if unknown:
            yield f"layer_types: expected {LINEAR} or {FULL}, found {', '.join(map(repr, unknown))}"
        if len(self.layer_types) != self.layers:
            yield f"layer_types: expected num_hidden_layers = {self.layers} entries, found {len(self.layer_types)}"
        if self.heads % self.kv_heads:
            yield f"num_attention_heads: expected a multiple of num_key_value_heads = {self.kv_heads}, found {self.heads}"
        if self.value_heads % self.key_heads:
            yield f"linear_num_value_heads: expected a multiple of linear_num_key_heads = {self.key_heads}, found {self.value_heads}"
        if self.conv < 2:
            yield f"linear_conv_kernel_dim: expected at least 2, found {self.conv}"
        if self.rotary_dims % 2 or not 2 <= self.rotary_dims <= self.head_dim:
            yield f"rotary dims: expected an even number from 2 to head_dim = {self.head_dim}, found {self.rotary_dims}"
        if self.mrope_section and 2 * sum(self.mrope_section) != self.rotary_dims:
            yield f"mrope_section: expected a sum of {self.rotary_dims // 2} (half the rotary dims), found {list(self.mrope_section)}"
        if not (self.eps > 0 and math.isfinite(self.eps)):
            yield f"rms_norm_eps: expected a small positive number, found {self.eps!r}"
        if not (self.rope_theta > 1 and math.isfinite(self.rope_theta)):
            yield f"rope_theta: expected a number above 1, found {self.rope_theta!r}"
        if self.dtype not in ("bfloat16", "float32"):
            yield f"dtype: expected bfloat16 or float32, found {self.dtype!r}"

    @property
    def gdn_layers(self) -> int:
        """Number of Gated DeltaNet layers."""
        return self.layer_types.count(LINEAR)

    @property
    def attention_layers(self) -> int:
        """Number of full-attention layers."""
        return self.layer_types.count(FULL)

    @property
    def conv_channels(self) -> int:
        """Channels of the causal convolution: all q, then all k, then all v of a GDN layer."""
        return 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim

    @property
    def period(self) -> int:
        """Length of the shortest unit of `layer_types` that repeated gives all of it."""
        for n in range(1, self.layers):
            if self.layers % n == 0 and self.layer_types == self.layer_types[:n] * (self.layers // n):
                return n
        return self.layers

    def with_layers(self, n: int) -> "ModelConfig":
        """The same model with `n` layers: cut, or continued by its period. Raises CheckpointError for n < 1."""
        if n < 1:
            raise CheckpointError(f"layers: expected at least 1, found {n}")
        unit = self.layer_types[: self.period]
        return dataclasses.replace(self, layers=n, layer_types=(unit * (n // len(unit) + 1))[:n])

    @classmethod
    def preset(cls, name: str) -> "ModelConfig":
        """The sizes of a published model, e.g. "qwen3.8-27b" or "27b". Raises CheckpointError for any other name."""
        known = {alias: full for full in _PRESETS for alias in (full, full.split("-", 1)[1])}
        full = known.get(name.lower())
        if full is None:
            raise CheckpointError(f"preset: expected one of {', '.join(_PRESETS)}, found {name!r}")
        layers = _PRESETS[full]["layers"]
        return cls(
            vocab=248320,
            layer_types=((LINEAR,) * 3 + (FULL,)) * (layers // 4),
            head_dim=256,
            key_heads=16,
            key_dim=128,
            value_dim=128,
            eos=(248044,),
            mtp_layers=1,
            **_PRESETS[full],
        )

    @classmethod
    def from_file(cls, path: str | Path) -> "ModelConfig":
        """Read config.json. Raises CheckpointError that names the file for unreadable JSON and for all that from_dict refuses."""
        path = Path(path)
        try:
            d = json.loads(path.read_text(encoding="utf-8"))
        except OSError as e:
            raise CheckpointError(f"{path}: expected a readable config.json, found {e.strerror or e}") from e
        except ValueError as e:
            raise CheckpointError(f"{path}: expected JSON, found {e}") from e
        try:
            return cls.from_dict(d)
        except CheckpointError as e:
            raise CheckpointError(f"{path}: {e}") from e

    @classmethod
    def from_dict(cls, d: dict) -> "ModelConfig":
        """Read the content of a config.json, nested (`text_config`) or flat. Raises CheckpointError, all faults of one stage at once."""
        if not isinstance(d, dict):
            raise CheckpointError(f"config: expected a JSON object, found {type(d).__name__}")
        text = d.get("text_config", d)
        if not isinstance(text, dict):
            raise CheckpointError(f"text_config: expected a JSON object, found {type(text).__name__}")
        for kind in (d.get("model_type"), text.get("model_type", d.get("model_type"))):
            if kind not in SUPPORTED:
                raise CheckpointError(f"model_type: expected one of {', '.join(SUPPORTED)}, found {kind!r} (this architecture is not supported)")
        missing = [key for key in _SIZES.values() if key not in text]
        if missing:
            raise CheckpointError(f"config: expected {', '.join(missing)}, found no such key")
        fields = {field: text[key] for field, key in _SIZES.items()}
        faults = [f"{k}: expected {v!r}, found {text[k]!r}" for k, v in _FIXED.items() if text.get(k, v) != v]
        dtype = next((c[k] for c in (text, d) for k in ("dtype", "torch_dtype") if c.get(k) is not None), None)
        if dtype not in _DTYPES:
            faults.append(f"dtype: expected bfloat16, float16 or float32, found {dtype!r}")
        mtp = text.get("mtp_num_hidden_layers") or 0
        if isinstance(mtp, bool) or not isinstance(mtp, int) or mtp < 0:
            faults.append(f"mtp_num_hidden_layers: expected a number of layers, found {mtp!r}")
        if faults:
            raise CheckpointError("config: " + "; ".join(faults))
        return cls(
            **fields,
            **_rope(text),
            layer_types=_layer_types(text),
            eps=_number(text, "rms_norm_eps", 1e-6),
            # of a nested config the outer key is the one that decides whether lm_head.weight is in the file
            tied=bool(d.get("tie_word_embeddings", text.get("tie_word_embeddings", False))),
            eos=_ids(text.get("eos_token_id", d.get("eos_token_id")), "eos_token_id"),
            mtp_layers=mtp,
            dtype=_DTYPES[dtype],
            model_type=d["model_type"],
        )


def _number(d: dict, key: str, default: float) -> float:
    """`d[key]` as a float, or the default where it is absent or null."""
    value = d.get(key)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise CheckpointError(f"{key}: expected a number, found {value!r}")
    return float(value)


def _ids(value, key: str) -> tuple[int, ...]:
    """Token ids of a key that holds an id, a list of ids, or null."""
    ids = [] if value is None else value if isinstance(value, list) else [value]
    if any(isinstance(i, bool) or not isinstance(i, int) for i in ids):
        raise CheckpointError(f"{key}: expected a token id or a list of them, found {value!r}")
    return tuple(ids)


def _layer_types(text: dict) -> tuple[str, ...]:
    """`layer_types`, or every `full_attention_interval`-th layer full where the list is absent."""
    types = text.get("layer_types")
    if types is None:
        every, layers = text.get("full_attention_interval", 4), text["num_hidden_layers"]
        if isinstance(layers, bool) or not isinstance(layers, int):
            return ()  # the sizes are checked later, with the others
        if not isinstance(every, int) or every < 1:
            raise CheckpointError(f"full_attention_interval: expected a positive integer, found {every!r}")
        return tuple(FULL if (i + 1) % every == 0 else LINEAR for i in range(layers))
    if not isinstance(types, list):
        raise CheckpointError(f"layer_types: expected a list, found {types!r}")
    return tuple(map(str, types))


def _rope(text: dict) -> dict:
    """The rotary fields. `rope_parameters` holds them in current files, `rope_scaling` and outer keys in older ones."""
    rope = text.get("rope_parameters") or text.get("rope_scaling") or {}
    if not isinstance(rope, dict):
        raise CheckpointError(f"rope_parameters: expected a JSON object, found {rope!r}")
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind != "default":
        raise CheckpointError(f"rope_type: expected 'default', found {kind!r} (scaled rotary positions are not supported)")
    outer = {k: text[k] for k in ("rope_theta", "partial_rotary_factor") if k in text}
    merged = {**outer, **rope}
    if merged.get("rope_theta") is None:
        raise CheckpointError("rope_parameters: expected rope_theta, found no such key")
    factor = _number(merged, "partial_rotary_factor", 0.25)
    head_dim = text["head_dim"] if isinstance(text["head_dim"], int) else 0
    return {
        "rope_theta": _number(merged, "rope_theta", 1e7),
        "rotary_dims": int(head_dim * factor),
        "mrope_section": _ids(rope.get("mrope_section"), "mrope_section"),
    }


_PRESETS = {
    "qwen3.5-0.8b": dict(hidden=1024, intermediate=3584, layers=24, heads=8, kv_heads=2, value_heads=16, tied=True),
    "qwen3.5-4b": dict(hidden=2560, intermediate=9216, layers=32, heads=16, kv_heads=4, value_heads=32, tied=True),
    "qwen3.5-9b": dict(hidden=4096, intermediate=12288, layers=32, heads=16, kv_heads=4, value_heads=32, tied=False),
    "qwen3.8-27b": dict(hidden=5120, intermediate=17408, layers=64, heads=24, kv_heads=4, value_heads=48, tied=False),
}
