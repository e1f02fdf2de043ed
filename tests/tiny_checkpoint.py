"""A tiny Hugging Face checkpoint for tests: its config, its tensors by name, its vocabulary, and how to write them to a directory."""

import functools
import json
from pathlib import Path

import ml_dtypes
import numpy as np
import tokenizers
from safetensors.numpy import save_file

CONTROL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
TAGS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>")
CONFIG = {
    "architectures": ["Qwen3_5ForCausalLM"],
    "model_type": "qwen3_5_text",
    "vocab_size": 512,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 4,
    "layer_types": ["linear_attention"] * 3 + ["full_attention"],
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
    "linear_conv_kernel_dim": 4,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25},
    "tie_word_embeddings": False,
    "eos_token_id": 0,
    "dtype": "bfloat16",
}


def shapes() -> dict[str, tuple[int, ...]]:
    """Every tensor of CONFIG, written out: the tests' own copy of the names and shapes of the format, without prefix."""
    out = {"embed_tokens.weight": (512, 16), "norm.weight": (16,)}
    for i in range(4):
        mixer = (
            {
                "linear_attn.in_proj_qkv.weight": (80, 16),
                "linear_attn.in_proj_z.weight": (48, 16),
                "linear_attn.in_proj_b.weight": (4, 16),
                "linear_attn.in_proj_a.weight": (4, 16),
                "linear_attn.conv1d.weight": (80, 1, 4),
                "linear_attn.A_log": (4,),
                "linear_attn.dt_bias": (4,),
                "linear_attn.norm.weight": (12,),
                "linear_attn.out_proj.weight": (16, 48),
            }
            if i < 3
            else {
                "self_attn.q_proj.weight": (128, 16),
                "self_attn.k_proj.weight": (32, 16),
                "self_attn.v_proj.weight": (32, 16),
                "self_attn.o_proj.weight": (16, 64),
                "self_attn.q_norm.weight": (16,),
                "self_attn.k_norm.weight": (16,),
            }
        )
        block = {
            "input_layernorm.weight": (16,),
            "post_attention_layernorm.weight": (16,),
            "mlp.gate_proj.weight": (24, 16),
            "mlp.up_proj.weight": (24, 16),
            "mlp.down_proj.weight": (16, 24),
        }
        out |= {f"layers.{i}.{name}": shape for name, shape in (mixer | block).items()}
    return out


def tensors(prefix: str = "model.", head: bool = True, dtype=ml_dtypes.bfloat16) -> dict[str, np.ndarray]:
    """Random tensors of CONFIG; A_log and the GDN norm float32, as published checkpoints have them."""
    rng = np.random.default_rng(7)
    out = {}
    for name, shape in shapes().items():
        exact = name.endswith(("A_log", "linear_attn.norm.weight"))
        out[prefix + name] = rng.standard_normal(shape, dtype=np.float32).astype(np.float32 if exact else dtype)
    if head:
        out["lm_head.weight"] = rng.standard_normal((512, 16), dtype=np.float32).astype(dtype)
    return out


@functools.cache
def _tokenizer_json() -> str:
    split = r"[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.normalizer = tokenizers.normalizers.NFC()
    byte_level = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Sequence([tokenizers.pre_tokenizers.Split(tokenizers.Regex(split), "isolated"), byte_level])
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False)
    text = ["think of the tool_call function", "system user assistant", "x < y > z || im_start\n\n", "日本 🙂🙂 Zoë"]
    tokenizer.train_from_iterator(text * 4, trainer)
    tokenizer.add_special_tokens(list(CONTROL))
    tokenizer.add_tokens([tokenizers.AddedToken(tag, normalized=False) for tag in TAGS])
    return tokenizer.to_str()


def tokenizer() -> tokenizers.Tokenizer:
    """A byte-level BPE over a few sentences, with Qwen's marks: CONTROL special, TAGS added but not special, as in the published files."""
    return tokenizers.Tokenizer.from_str(_tokenizer_json())


def write(directory: Path, weights: dict | None = None, config: dict | None = None, shards: int = 1) -> Path:
    """Write a checkpoint of one safetensors file, or of several with an index. Returns the directory."""
    directory.mkdir(parents=True, exist_ok=True)
    weights = tensors() if weights is None else weights
    (directory / "config.json").write_text(json.dumps(CONFIG if config is None else config))
    (directory / "tokenizer.json").write_text(_tokenizer_json())
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": [3, 5], "temperature": 0.7, "top_k": 20, "max_length": 9}))
    (directory / "chat_template.jinja").write_text("{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content | trim }}<|im_end|>\n{% endfor %}")
    if shards == 1:
        save_file(weights, directory / "model.safetensors")
        return directory
    weight_map = {}
    for n in range(shards):
        name = f"model-{n + 1:05d}-of-{shards:05d}.safetensors"
        part = {k: weights[k] for k in list(weights)[n::shards]}
        save_file(part, directory / name)
        weight_map |= dict.fromkeys(part, name)
    (directory / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return directory
