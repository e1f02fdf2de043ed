"""Tiny hybrid models that qjax and transformers both run: their configs, their prompts, and every tensor from a seed.

Nothing here needs torch or jax. A tensor is drawn from numpy's PCG64 keyed by (seed, name), so that both sides make the same bits and
no weights need be stored.
"""

import dataclasses
import zlib
from pathlib import Path

import numpy as np

GOLDENS = Path(__file__).parent
LAYER_PATTERN = ("linear_attention", "linear_attention", "linear_attention", "full_attention")


@dataclasses.dataclass(frozen=True, eq=False)
class Case:
    """One tiny model and the prompt lengths at which it is compared.

    `config` is a flat Hugging Face text config. `decay` names how A_log and dt_bias are drawn: "ordinary" forgets within a few tokens, "weak"
    keeps most of the state over the whole prompt, "mixed" has both in turn. `cuts` are the forwards of the chunked run, in tokens.
    `conv_scale` is the deviation of the convolution's taps: small ones make q and k so short that a wrong eps in their norms shows.

    The seeds are the best of 40 by transformers' distance from itself: a row whose GDN output happens to lie near zero is blown up by the
    norm behind it, whoever computes it, and would ask for ten times the tolerance.
    """

    name: str
    seed: int
    config: dict
    lengths: tuple[int, ...]
    decay: str
    cuts: tuple[int, ...]
    conv_scale: float = 0.5

    @property
    def context(self):
        """The longest prompt, in tokens."""
        return max(self.lengths)

    def tokens(self, length):
        """The prompt, int32 [length]: a shorter prompt is a prefix of a longer one."""
        stream = np.random.Generator(np.random.PCG64([self.seed, 1]))
        return stream.integers(0, self.config["vocab_size"], self.context, dtype=np.int32)[:length]

    def rows(self, length):
        """The rows whose logits are kept, int32: all of a short prompt; of a long one every 8th and the last 64."""
        rows = np.arange(length, dtype=np.int32)
        return rows[(rows % 8 == 7) | (rows >= length - 64)]

    def golden(self, length):
        """Path of the golden file for one length."""
        return GOLDENS / f"{self.name}-{length}.npz"

    def chunks(self, length):
        """The chunked run as (start, stop) pairs: `cuts` in turn until `length` is covered."""
        start, pairs = 0, []
        while start < length:
            stop = min(length, start + self.cuts[len(pairs) % len(self.cuts)])
            pairs.append((start, stop))
            start = stop
        return pairs

    def tensors(self):
        """Every parameter by its Hugging Face name (prefix `model.`), float32; all of them random, norms around their neutral value too."""
        return {name: _draw(name, shape, self) for name, shape in shapes(self.config).items()}


def shapes(config):
    """Name and shape of each tensor of a flat text config, in file order."""
    d, f, hd = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    value_heads, value_dim = config["linear_num_value_heads"], config["linear_value_head_dim"]
    values = value_heads * value_dim
    channels = 2 * config["linear_num_key_heads"] * config["linear_key_head_dim"] + values
    found = {"model.embed_tokens.weight": (config["vocab_size"], d)}
    for layer, kind in enumerate(config["layer_types"]):
        at = f"model.layers.{layer}"
        found[f"{at}.input_layernorm.weight"] = (d,)
        if kind == "full_attention":
            found |= {
                f"{at}.self_attn.q_proj.weight": (2 * heads * hd, d),
                f"{at}.self_attn.k_proj.weight": (kv_heads * hd, d),
                f"{at}.self_attn.v_proj.weight": (kv_heads * hd, d),
                f"{at}.self_attn.o_proj.weight": (d, heads * hd),
                f"{at}.self_attn.q_norm.weight": (hd,),
                f"{at}.self_attn.k_norm.weight": (hd,),
            }
        else:
            found |= {
                f"{at}.linear_attn.in_proj_qkv.weight": (channels, d),
                f"{at}.linear_attn.in_proj_z.weight": (values, d),
                f"{at}.linear_attn.in_proj_b.weight": (value_heads, d),
                f"{at}.linear_attn.in_proj_a.weight": (value_heads, d),
                f"{at}.linear_attn.conv1d.weight": (channels, 1, config["linear_conv_kernel_dim"]),
                f"{at}.linear_attn.A_log": (value_heads,),
                f"{at}.linear_attn.dt_bias": (value_heads,),
                f"{at}.linear_attn.norm.weight": (value_dim,),
                f"{at}.linear_attn.out_proj.weight": (d, values),
            }
        found |= {
            f"{at}.post_attention_layernorm.weight": (d,),
            f"{at}.mlp.gate_proj.weight": (f, d),
            f"{at}.mlp.up_proj.weight": (f, d),
            f"{at}.mlp.down_proj.weight": (d, f),
        }
    found["model.norm.weight"] = (d,)
    if not config["tie_word_embeddings"]:
        found["lm_head.weight"] = (config["vocab_size"], d)
    return found


def _draw(name, shape, case):
    """One tensor, float32."""
    stream = np.random.Generator(np.random.PCG64([case.seed, zlib.crc32(name.encode())]))
    if name.endswith("A_log"):
        ordinary, weak = np.log(stream.uniform(0.05, 2.0, shape)), np.log(stream.uniform(1e-4, 1e-2, shape))
        pick = {"ordinary": np.ones(shape, bool), "weak": np.zeros(shape, bool), "mixed": np.arange(shape[0]) % 2 == 0}[case.decay]
        values = np.where(pick, ordinary, weak)
    elif name.endswith("linear_attn.norm.weight"):
        values = 1 + 0.3 * stream.standard_normal(shape)
    elif name.endswith(("norm.weight", "dt_bias")):
        values = 0.3 * stream.standard_normal(shape)
    elif name.endswith("conv1d.weight"):
        values = case.conv_scale * stream.standard_normal(shape)
    elif name.endswith("embed_tokens.weight"):
        # Small, so that a wrong eps in the first norms shows.
        values = 0.05 * stream.standard_normal(shape)
    else:
        values = stream.standard_normal(shape) / np.sqrt(shape[-1])
    return values.astype(np.float32)


def _config(*, hidden, layers, vocab, heads, gdn, tied, theta, rotary=0.25, eps=1e-6):
    """A flat text config; heads: (query, key/value, width), gdn: (key heads, value heads, key width, value width)."""
    pairs = int(heads[2] * rotary) // 2
    sections = [pairs - 2 * (pairs // 3), pairs // 3, pairs // 3]
    return {
        "architectures": ["Qwen3_5ForCausalLM"],
        "model_type": "qwen3_5_text",
        "dtype": "float32",
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": hidden * 3 // 2,
        "num_hidden_layers": layers,
        "layer_types": list(LAYER_PATTERN * (layers // len(LAYER_PATTERN))),
        "full_attention_interval": len(LAYER_PATTERN),
        "num_attention_heads": heads[0],
        "num_key_value_heads": heads[1],
        "head_dim": heads[2],
        "attention_bias": False,
        "attn_output_gate": True,
        "hidden_act": "silu",
        "linear_num_key_heads": gdn[0],
        "linear_num_value_heads": gdn[1],
        "linear_key_head_dim": gdn[2],
        "linear_value_head_dim": gdn[3],
        "linear_conv_kernel_dim": 4,
        "max_position_embeddings": 2048,
        "rms_norm_eps": eps,
        "tie_word_embeddings": tied,
        "mtp_num_hidden_layers": 0,
        "eos_token_id": 0,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": theta,
            "partial_rotary_factor": rotary,
            "mrope_section": sections,
            "mrope_interleaved": True,
        },
    }


CASES = (
    Case(
        "equal",
        4,
        _config(hidden=32, layers=4, vocab=64, heads=(4, 4, 16), gdn=(2, 2, 16, 16), tied=True, theta=1e4),
        (2, 7),
        "ordinary",
        (1, 2),
    ),
    Case(
        "deep",
        38,
        _config(hidden=48, layers=8, vocab=96, heads=(4, 2, 32), gdn=(2, 4, 16, 16), tied=False, theta=1e7),
        (63,),
        "weak",
        (5, 31),
    ),
    Case(
        "wide",
        21,
        _config(hidden=64, layers=4, vocab=128, heads=(4, 1, 64), gdn=(2, 6, 32, 16), tied=True, theta=1e6),
        (64,),
        "mixed",
        (16, 33),
    ),
    Case(
        "half",
        21,
        _config(hidden=48, layers=4, vocab=160, heads=(8, 2, 16), gdn=(3, 3, 16, 32), tied=False, theta=1e5, rotary=0.5),
        (65,),
        "weak",
        (64,),
    ),
    Case(
        "epsilon",
        26,
        _config(hidden=32, layers=8, vocab=80, heads=(2, 1, 32), gdn=(1, 3, 16, 16), tied=True, theta=1e7, eps=1e-5),
        (129,),
        "ordinary",
        (64,),
        conv_scale=0.05,
    ),
    Case(
        "long",
        35,
        _config(hidden=40, layers=4, vocab=72, heads=(4, 1, 16), gdn=(2, 4, 16, 16), tied=False, theta=1e7),
        (300,),
        "mixed",
        (128, 64, 7, 57),
    ),
)
