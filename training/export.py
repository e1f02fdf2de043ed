"""Write a training state as an ordinary checkpoint directory: `python -m training.export --state DIR/state.npz`."""

import argparse
import json
import os
import pathlib
import struct

import ml_dtypes
import numpy as np

from training import dialogues, model, train, vocabulary

KEPT_FLOAT32 = ("A_log", "linear_attn.norm.weight")


def tensor_bytes(name, array):
    """(dtype name, bytes) of one tensor as it stands in the file."""
    if name.endswith(KEPT_FLOAT32):
        return "F32", array.astype("<f4").tobytes()
    return "BF16", array.astype(ml_dtypes.bfloat16).view("<u2").tobytes()


def write_safetensors(path, arrays):
    """A safetensors file with the tensors in the given order, written in a single step."""
    header, body, at = {"__metadata__": {"format": "pt"}}, [], 0
    for name, array in arrays.items():
        kind, data = tensor_bytes(name, np.asarray(array))
        header[name] = {"dtype": kind, "shape": list(array.shape), "data_offsets": [at, at + len(data)]}
        body.append(data)
        at += len(data)
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    part = path.with_name(f".{path.name}.part")
    part.write_bytes(struct.pack("<Q", len(text)) + text + b"".join(body))
    os.replace(part, path)


def config_json(config, tokenizer):
    """config.json in the names of Qwen3.5's text configuration."""
    end = tokenizer.token_to_id("<|endoftext|>")
    return {
        "architectures": ["Qwen3_5ForCausalLM"],
        "model_type": "qwen3_5_text",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "attn_output_gate": True,
        "bos_token_id": end,
        "dtype": "bfloat16",
        "eos_token_id": end,
        "full_attention_interval": config.interval,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "hidden_size": config.hidden,
        "initializer_range": 0.02,
        "intermediate_size": config.mlp,
        "layer_types": ["full_attention" if config.is_full(i) else "linear_attention" for i in range(config.layers)],
        "linear_conv_kernel_dim": config.conv,
        "linear_key_head_dim": config.k_dim,
        "linear_num_key_heads": config.k_heads,
        "linear_num_value_heads": config.v_heads,
        "linear_value_head_dim": config.v_dim,
        "mamba_ssm_dtype": "float32",
        "max_position_embeddings": 262144,
        "mtp_num_hidden_layers": 1,
        "mtp_use_dedicated_embeddings": False,
        "num_attention_heads": config.heads,
        "num_hidden_layers": config.layers,
        "num_key_value_heads": config.kv_heads,
        "pad_token_id": end,
        "partial_rotary_factor": config.rotary / config.head_dim,
        "rms_norm_eps": config.eps,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": int(config.theta),
            "partial_rotary_factor": config.rotary / config.head_dim,
            "mrope_section": [2, 1, 1],
            "mrope_interleaved": True,
        },
        "tie_word_embeddings": True,
        "use_cache": True,
        "vocab_size": config.vocab,
    }


def main():
    """Write model.safetensors, config.json and generation_config.json."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--state", type=pathlib.Path, required=True)
    args = parser.parse_args()
    p, _, _, meta = train.restore(args.state)
    tokenizer = train.load_tokenizer()
    config = model.Config(vocab=tokenizer.get_vocab_size())
    wanted = model.shapes(config)
    found = {k: v.shape for k, v in p.items()}
    if found != wanted:
        raise ValueError(f"the state's tensors differ from the configuration's: {sorted(set(found.items()) ^ set(wanted.items()))}")
    write_safetensors(dialogues.EMBEDDED / "model.safetensors", {k: p[k] for k in wanted})
    vocabulary.write("config.json", json.dumps(config_json(config, tokenizer), indent=2) + "\n")
    ends = [tokenizer.token_to_id("<|im_end|>"), tokenizer.token_to_id("<|endoftext|>")]
    generation = {"bos_token_id": ends[1], "do_sample": False, "eos_token_id": ends, "pad_token_id": ends[1]}
    vocabulary.write("generation_config.json", json.dumps(generation, indent=2) + "\n")
    print(json.dumps(meta))


if __name__ == "__main__":
    main()
