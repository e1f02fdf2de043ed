"""The `qwen4_exp` family (Qwen3.8-Flash-Next): what a sequence of it is made of, from the values of its config.json.

Its layout only: a checkpoint of this family is refused where a model is loaded.
"""

from qjax.model.config import LAYERS_MAX
from qjax.model.values import SIZE_MAX, CheckpointError, is_whole, shortened, shown, size_fault
from qjax.state import BLOCK, Layout, Section, View

MODEL_TYPES = ("qwen4_exp", "qwen4_exp_text")
GRID = 4096

PRESETS = {
    "qwen3.8-flash-next": {
        "model_type": "qwen4_exp_text",
        "hidden_size": 2560,
        "num_hidden_layers": 48,
        "full_attention_interval": 4,
        "num_key_value_heads": 2,
        "head_dim": 256,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 48,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_conv_kernel_dim": 4,
        "hc_count": 4,
        "ple_layer_ids": [2],
        "ple_conv_kernel_size": 4,
        "ngram_size": 3,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 128,
        "mtp_num_hidden_layers": 1,
    },
}
# every size that a config must name; one without the draft layer has no mtp_num_hidden_layers, or 0
_SIZES = tuple(key for key, value in PRESETS["qwen3.8-flash-next"].items() if isinstance(value, int) and key[:4] not in ("full", "mtp_"))


def layout(values: dict, grid: int = GRID) -> Layout:
    """The layout of a model with these config values, nested (`text_config`) or flat. Raises CheckpointError, all faults at once."""
    text = values.get("text_config", values)
    if not isinstance(text, dict):
        raise CheckpointError(f"text_config: expected a JSON object, found {type(text).__name__}")
    most = {"num_hidden_layers": LAYERS_MAX}
    faults = [fault for key in _SIZES if (fault := size_fault(key, text.get(key), most.get(key, SIZE_MAX)))]
    ple, mtp = text.get("ple_layer_ids"), text.get("mtp_num_hidden_layers")
    mtp = 0 if mtp is None else mtp
    if not is_whole(mtp, 0, LAYERS_MAX):
        faults.append(f"mtp_num_hidden_layers: expected a number of layers, found {shown(mtp)}")
    if not isinstance(ple, list) or not all(is_whole(i, 0, LAYERS_MAX) for i in ple):
        faults.append(f"ple_layer_ids: expected a list of layers, found {shown(ple)}")
    if faults:
        raise CheckpointError("config: " + "; ".join(faults))
    gdn, attention = _layers(text)
    key_heads, value_heads, dk, dv = (text[f"linear_{name}"] for name in ("num_key_heads", "num_value_heads", "key_head_dim", "value_head_dim"))
    channels = 2 * key_heads * dk + value_heads * dv
    streams, hidden, ngram = text["hc_count"], text["hidden_size"], text["ngram_size"]
    kv_heads, dim, index_heads, index_dim = (text[key] for key in ("num_key_value_heads", "head_dim", "indexer_kv_heads", "indexer_head_dim"))

    def views(prefix: str, layers: int) -> tuple[View, ...]:
        heads = {"K": (kv_heads, dim), "V": (kv_heads, dim), "idx": (index_heads, index_dim)}
        return tuple(View(prefix + name, layers, *shape, "bfloat16") for name, shape in heads.items())

    return Layout(
        sections=(
            Section("gdn.S", (gdn, value_heads, dk, dv), "float32"),
            Section("gdn.conv", (gdn, channels, text["linear_conv_kernel_dim"] - 1), "bfloat16"),
            # the n-gram convolution is dilated by the n-gram's length
            Section("ple.conv", (len(ple), streams * hidden, ngram * (text["ple_conv_kernel_size"] - 1)), "bfloat16"),
            Section("ple.tokens", (len(ple), ngram - 1), "int64"),
            *([Section("mtp.h_last", (streams, hidden), "bfloat16")] if mtp else []),
        ),
        open=(
            Section("gdn.u", (gdn, BLOCK, channels), "bfloat16"),
            Section("gdn.b", (gdn, value_heads, BLOCK), "float32"),
            Section("gdn.a", (gdn, value_heads, BLOCK), "float32"),
        ),
        views=views("", attention) + (views("mtp.", mtp) if mtp else ()),
        grid=grid,
    )


def _layers(text: dict) -> tuple[int, int]:
    """GDN layers and attention layers; published files call the sparse attention layers full_attention, other tools by other names."""
    layers, types = text["num_hidden_layers"], text.get("layer_types")
    if types is None:
        every = text.get("full_attention_interval", 4)
        if fault := size_fault("full_attention_interval", every):
            raise CheckpointError(fault)
        return layers - layers // every, layers // every
    if not isinstance(types, list) or len(types) != layers:
        raise CheckpointError(f"layer_types: expected a list of num_hidden_layers = {layers} entries, found {shown(types)}")
    unknown = sorted({str(kind) for kind in types} - {"linear_attention", "full_attention", "indexed_attention", "qwen_sparse_attention"})
    if unknown:
        raise CheckpointError(f"layer_types: expected linear_attention or full_attention, found {shortened(', '.join(unknown))}")
    gdn = types.count("linear_attention")
    return gdn, layers - gdn
