"""The transformers side: a Qwen3.5 model with given tensors, run with a cache. Needs torch and transformers."""

import inspect

import numpy as np
import torch
from transformers import DynamicCache, Qwen3_5ForCausalLM, Qwen3_5TextConfig


def build(config, tensors, *, attention="eager", dtype=torch.float32):
    """A model in eval mode whose every parameter is taken from `tensors` (name -> torch tensor or float32 array); anything else is an error."""
    text = Qwen3_5TextConfig(**config)
    with torch.device("meta"):
        model = Qwen3_5ForCausalLM._from_config(text, attn_implementation=attention)
    model.to_empty(device="cpu").to(dtype)
    # The rotary frequencies are the one buffer outside the state dict, and to_empty left it blank.
    model.model.rotary_emb = type(model.model.rotary_emb)(config=text)
    given = {name: value if torch.is_tensor(value) else torch.from_numpy(value) for name, value in tensors.items()}
    if text.tie_word_embeddings:
        model.tie_weights()
        given["lm_head.weight"] = given["model.embed_tokens.weight"]
    with torch.no_grad():
        for value in model.parameters():
            value.fill_(float("nan"))
    model.load_state_dict({name: value.to(dtype) for name, value in given.items()}, strict=True)
    left = [name for name, value in [*model.named_parameters(), *model.named_buffers()] if not torch.isfinite(value).all()]
    if left:
        raise ValueError(f"never assigned: {left}")
    shared = model.lm_head.weight is model.model.embed_tokens.weight
    if shared != bool(text.tie_word_embeddings):
        raise ValueError(f"tie_word_embeddings is {text.tie_word_embeddings}, but head and embedding are {'' if shared else 'not '}one tensor")
    return model.eval()


def empty_cache(model):
    """A cache with nothing in it."""
    return DynamicCache(config=model.config)


def forward(model, tokens, cache, *, keep=0):
    """Run int tokens [T] behind `cache`, which is changed in place; logits [keep or T, V] as a tensor of the model's dtype."""
    ids = torch.as_tensor(np.asarray(tokens), dtype=torch.int64)[None]
    # Named past_key_values before 5.24, which still takes it with a warning.
    name = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
    with torch.inference_mode():
        output = model(input_ids=ids, use_cache=True, logits_to_keep=keep, **{name: cache})
    return output.logits[0]


def state(cache, kinds):
    """What the cache holds, as float32 arrays: S [Lg, Hv, dk, dv], conv [Lg, C, 3], K and V [La, kv_heads, T, head_dim].

    transformers keeps four convolution columns; the oldest is never read again.
    """
    gdn = [layer for layer, kind in zip(cache.layers, kinds, strict=True) if kind == "linear_attention"]
    attention = [layer for layer, kind in zip(cache.layers, kinds, strict=True) if kind == "full_attention"]
    return {
        "S": _stack(layer.recurrent_states[0] for layer in gdn),
        "conv": _stack(layer.conv_states[0][..., -3:] for layer in gdn),
        "K": _stack(layer.keys for layer in attention),
        "V": _stack(layer.values for layer in attention),
    }


def _stack(tensors):
    """[1, ...] tensors -> one array [L, ...]."""
    return np.stack([value[0].float().numpy() for value in tensors])
