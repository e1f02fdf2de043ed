"""The sizes of a hybrid Qwen model, read from a Hugging Face config.json or taken from a preset."""

import dataclasses
from pathlib import Path

from qjax.model.values import SIZE_MAX, CheckpointError, Fields, is_number, is_whole, read_json, shortened, shown, size_fault

SUPPORTED = ("qwen3_5", "qwen3_5_text")
LINEAR, FULL = "linear_attention", "full_attention"
LAYERS_MAX = 10_000  # layer_types holds an entry for each

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
        faults = list(filter(None, (size_fault(key, getattr(self, field), _most(field)) for field, key in _SIZES.items())))
        if not faults:
            faults = list(self._misfits())
        if faults:
            raise CheckpointError("config does not fit together: " + "; ".join(faults))

    def _misfits(self):
        """Yield what contradicts what; the single sizes are known to be positive integers."""
        unknown = sorted(set(self.layer_types) - {LINEAR, FULL})
        if unknown:
            yield f"layer_types: expected {LINEAR} or {FULL}, found {shortened(', '.join(map(shown, unknown)))}"
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
            yield f"mrope_section: expected a sum of {self.rotary_dims // 2} (half the rotary dims), found {shown(list(self.mrope_section))}"
        if not (is_number(self.eps) and 1e-30 < self.eps < 1):  # its square root is a float32
            yield f"rms_norm_eps: expected a small positive number, found {self.eps!r}"
        if not (is_number(self.rope_theta) and self.rope_theta > 1):
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
        """The same model with `n` layers: cut, or continued by its period. Raises CheckpointError for a number that no model has."""
        if not is_whole(n, 1, LAYERS_MAX):
            raise CheckpointError(f"layers: expected at least 1 and at most {LAYERS_MAX:,}, found {shown(n)}")
        unit = self.layer_types[: self.period]
        return dataclasses.replace(self, layers=n, layer_types=(unit * (n // len(unit) + 1))[:n])

    @classmethod
    def preset(cls, name: str) -> "ModelConfig":
        """The sizes of a published model, e.g. "qwen3.8-27b" or "27b". Raises CheckpointError for any other name."""
        known = {alias: full for full in _PRESETS for alias in (full, full.split("-", 1)[1])}
        full = known.get(name.lower())
        if full is None:
            raise CheckpointError(f"preset: expected one of {', '.join(_PRESETS)}, found {shown(name)}")
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
        values = read_json(path)
        try:
            return cls.from_dict(values)
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
                raise CheckpointError(f"model_type: expected one of {', '.join(SUPPORTED)}, found {shown(kind)} (this architecture is not supported)")
        missing = [key for key in _SIZES.values() if key not in text]
        if missing:
            raise CheckpointError(f"config: expected {', '.join(missing)}, found no such key")
        # 1 is no 'true': a flag of another type is another program's
        faults = [
            f"{k}: expected {v!r}, found {shown(text[k])}" for k, v in _FIXED.items() if k in text and (text[k] != v or type(text[k]) is not type(v))
        ]
        inner, outer = Fields(text, faults), Fields(d, faults)
        fields = {field: inner.size(key, _most(field)) for field, key in _SIZES.items()}
        dtype = next((c[k] for c in (text, d) for k in ("dtype", "torch_dtype") if c.get(k) is not None), None)
        if dtype is not None and not (isinstance(dtype, str) and dtype in _DTYPES):
            faults.append(f"dtype: expected bfloat16, float16 or float32, found {shown(dtype)}")
            dtype = None
        values = dict(
            **fields,
            **_rope(text, fields["head_dim"], faults),
            layer_types=_layer_types(text, inner, fields["layers"], faults),
            eps=inner.number("rms_norm_eps", 1e-6),
            # of a nested config the outer key is the one that decides whether lm_head.weight is in the file
            tied=outer.flag("tie_word_embeddings", False if text is d else inner.flag("tie_word_embeddings", False)),
            eos=(outer if text.get("eos_token_id") is None else inner).ids("eos_token_id"),
            mtp_layers=inner.read("mtp_num_hidden_layers", 0, "a number of layers", lambda n: is_whole(n, 0, LAYERS_MAX)),
            dtype=_DTYPES[dtype],
            model_type=d["model_type"],
        )
        if faults:
            raise CheckpointError("config: " + "; ".join(faults))
        return cls(**values)


def _most(field: str) -> int:
    """The largest value that a field of _SIZES may have."""
    return LAYERS_MAX if field == "layers" else SIZE_MAX


def _layer_types(text: dict, fields: Fields, layers: int, faults: list[str]) -> tuple[str, ...]:
    """`layer_types`, or every `full_attention_interval`-th layer full where the list is absent."""
    types = text.get("layer_types")
    if types is None:
        every = fields.size("full_attention_interval", default=4)
        return tuple(FULL if (i + 1) % every == 0 else LINEAR for i in range(layers))
    if not isinstance(types, list) or not all(isinstance(kind, str) for kind in types):
        faults.append(f"layer_types: expected a list of {LINEAR} and {FULL}, found {shown(types)}")
        return ()
    return tuple(types)


def _rope(text: dict, head_dim: int, faults: list[str]) -> dict:
    """The rotary fields. `rope_parameters` holds them in current files, `rope_scaling` and outer keys in older ones."""
    name = "rope_parameters" if text.get("rope_parameters") not in (None, {}) else "rope_scaling"
    rope = {} if text.get(name) is None else text[name]
    if not isinstance(rope, dict):
        faults.append(f"{name}: expected a JSON object, found {shown(rope)}")
        return {}
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind != "default":
        faults.append(f"rope_type: expected 'default', found {shown(kind)} (scaled rotary positions are not supported)")
    merged = {k: text[k] for k in ("rope_theta", "partial_rotary_factor") if k in text} | rope
    if merged.get("rope_theta") is None:
        faults.append("rope_parameters: expected rope_theta, found no such key")
    fields = Fields(merged, faults)
    parts = fields.read("mrope_section", (), "a list of whole numbers", lambda x: isinstance(x, list) and all(map(is_whole, x)))
    return {
        "rope_theta": fields.number("rope_theta", 1e7),
        "rotary_dims": int(
            head_dim * fields.read("partial_rotary_factor", 0.25, "a number above 0 and at most 1", lambda x: is_number(x) and 0 < x <= 1)
        ),
        "mrope_section": tuple(parts),
    }


_PRESETS = {
    "qwen3.5-0.8b": dict(hidden=1024, intermediate=3584, layers=24, heads=8, kv_heads=2, value_heads=16, tied=True),
    "qwen3.5-4b": dict(hidden=2560, intermediate=9216, layers=32, heads=16, kv_heads=4, value_heads=32, tied=True),
    "qwen3.5-9b": dict(hidden=4096, intermediate=12288, layers=32, heads=16, kv_heads=4, value_heads=32, tied=False),
    "qwen3.8-27b": dict(hidden=5120, intermediate=17408, layers=64, heads=24, kv_heads=4, value_heads=48, tied=False),
}
