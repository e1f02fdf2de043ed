"""Measure the exported bfloat16 checkpoint on held-out dialogues: `python -m training.evaluate [--state DIR/state.npz]`.

Weights are the exported bfloat16 values read back from model.safetensors; the arithmetic here is float32. Held out: other seeds, and
digit codes that training never showed. Writes metrics.json beside the checkpoint.
"""

import argparse
import functools
import json
import pathlib
import random
import time

import jax
import jax.numpy as jnp
import ml_dtypes  # noqa: F401  (lets numpy name bfloat16)
import numpy as np
from safetensors import safe_open

from training import dialogues, model, train, vocabulary

SEED = 90_001
SIZES = (1024, 3072, 4096, 10_240, 12_288, 19_456, 24_576)


def load(path=dialogues.EMBEDDED / "model.safetensors"):
    """The exported tensors as float32."""
    with safe_open(str(path), framework="numpy") as f:
        return {k: jnp.asarray(f.get_tensor(k).astype(np.float32)) for k in list(f.keys())}


@functools.partial(jax.jit, static_argnames="config")
def forward(p, ids, config):
    """ids: [1, T] -> (loss of the next token [T], its arg-max [T], the MTP layer's arg-max for the token after it [T])."""
    positions = jnp.arange(ids.shape[1])[None]
    hidden = model.trunk(p, ids, positions, config)
    following = jnp.roll(ids, -1, 1)
    loss = train.cross_entropy(p, hidden, following)
    best = jnp.argmax(model.logits(p, hidden), -1)
    second = jnp.argmax(model.logits(p, model.draft(p, hidden, following, positions, config)), -1)
    return loss[0], best[0], second[0]


@functools.partial(jax.jit, static_argnames="config")
def tail(p, ids, end, config):
    """Arg-max of the next token at the rows [end - 64, end). ids: [1, T] -> [64]."""
    hidden = model.trunk(p, ids, jnp.arange(ids.shape[1])[None], config)
    return jnp.argmax(model.logits(p, jax.lax.dynamic_slice_in_dim(hidden[0], end - 64, 64)), -1)


def last(p, ids, n, config):
    """Arg-max after each of the last n (at most 64) of `ids`. Few padded lengths, so that few programs are compiled."""
    size = next(s for s in SIZES if s >= len(ids))
    padded = np.pad(np.asarray(ids, np.int32), (0, size - len(ids)))[None]
    return np.asarray(tail(p, padded, np.int32(len(ids)), config))[64 - n :]


def held_out(p, config, tokenizer, n=60, length=1024):
    """Loss, accuracy and MTP agreement on held-out conversations of stage 2, weighted as in training only for `weighted_loss`."""
    total = dict.fromkeys(("loss", "weighted", "weights", "right", "assistant", "value_right", "values", "agree", "drafted", "tokens"), 0.0)
    for i in range(n):
        rng = random.Random(f"{SEED}/dialogue/{i}")
        talk, options = dialogues.conversation(rng, length, 2, train.counter(), held=True)
        ids, weights = train.encode(tokenizer, dialogues.render(talk.messages, **options))
        ids, weights = ids[:length], weights[:length]
        padded = np.pad(ids, (0, length - len(ids)))[None]
        loss, best, second = (np.asarray(x)[: len(ids)] for x in forward(p, padded, config))
        w, right = weights[1:], best[:-1] == ids[1:]
        total["loss"] += float(loss[:-1].sum())
        total["tokens"] += len(ids) - 1
        total["weighted"] += float((loss[:-1] * w).sum())
        total["weights"] += float(w.sum())
        total["right"] += int(right[w >= train.WEIGHT_ASSISTANT].sum())
        total["assistant"] += int((w >= train.WEIGHT_ASSISTANT).sum())
        total["value_right"] += int(right[w == train.WEIGHT_VALUE].sum())
        total["values"] += int((w == train.WEIGHT_VALUE).sum())
        mine = weights[2:] >= train.WEIGHT_ASSISTANT
        total["agree"] += int((second[:-2] == best[1:-1])[mine].sum())
        total["drafted"] += int(mine.sum())
    return {
        "conversations": n,
        "tokens": int(total["tokens"]),
        "loss_nats_per_token": total["loss"] / total["tokens"],
        "weighted_loss": total["weighted"] / total["weights"],
        "assistant_token_accuracy": total["right"] / total["assistant"],
        "value_token_accuracy": total["value_right"] / total["values"],
        "mtp_agrees_with_main_model": total["agree"] / total["drafted"],
    }


def unmarked(text):
    """Rendered text without the marks."""
    return text.replace(dialogues.OPEN, "").replace(dialogues.CLOSE, "")


def recall(p, config, tokenizer, distance, n, thinking, facts=4):
    """Held-out recall at a distance: `value` whole value right under teacher forcing, `reply` every token of the reply arg-max.

    A reply whose every token is the arg-max is what greedy generation writes. The distance runs from the end of the exchange
    that told the fact to the end of the prompt.
    """
    value, reply, lengths, distances = 0, 0, [], []
    for i in range(n):
        rng = random.Random(f"{SEED}/recall/{distance}/{thinking}/{i}")
        messages, options, name, code = dialogues.probe(rng, distance, train.counter(), thinking, facts)
        prompt = unmarked(dialogues.render(messages, add_generation_prompt=True, **options))
        told = next(j for j, m in enumerate(messages) if m["role"] == "user" and name in m["content"])
        before = unmarked(dialogues.render(messages[: told + 2], **options))
        marked = f"The {name} is {dialogues.mark(code)}.<|im_end|>"
        if thinking:
            marked = f"The user asks for the {name}. It is {dialogues.mark(code)}.\n</think>\n\n" + marked
        head = tokenizer.encode(prompt).ids
        wanted, weights = train.encode(tokenizer, marked)
        right = last(p, [*head, *wanted[:-1]], len(wanted), config) == wanted
        value += bool(right[weights == train.WEIGHT_VALUE].all())
        reply += bool(right.all())
        lengths.append(len(head))
        distances.append(len(head) - len(tokenizer.encode(before).ids))
    return {
        "probes": n,
        "mean_prompt_tokens": round(float(np.mean(lengths))),
        "least_distance": min(distances),
        "mean_distance": round(float(np.mean(distances))),
        "value_right": value / n,
        "whole_reply_right": reply / n,
    }


def generate(p, config, tokenizer, prompt, most=48):
    """Greedy text after `prompt`, by repeated whole forwards."""
    ids, start, end = list(tokenizer.encode(prompt).ids), len(tokenizer.encode(prompt).ids), tokenizer.token_to_id("<|im_end|>")
    while len(ids) < start + most and ids[-1] != end:
        ids.append(int(last(p, ids, 1, config)[0]))
    return tokenizer.decode(ids[start:], skip_special_tokens=False)


def generated(p, config, tokenizer, n, thinking, distance=200):
    """Recall by real greedy generation: the value stands in the reply after the reasoning, which ends with <|im_end|>."""
    hits, samples = 0, []
    for i in range(n):
        rng = random.Random(f"{SEED}/generate/{distance}/{thinking}/{i}")
        messages, options, name, code = dialogues.probe(rng, distance, train.counter(), thinking)
        prompt = unmarked(dialogues.render(messages, add_generation_prompt=True, **options))
        text = generate(p, config, tokenizer, prompt)
        hits += text.split("</think>")[-1].strip() == f"The {name} is {code}.<|im_end|>"
        samples.append({"question": messages[-1]["content"], "value": code, "reply": text})
    return {"probes": n, "exact_reply": hits / n, "samples": samples[:3]}


def main():
    """Measure and write metrics.json."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--state", type=pathlib.Path, help="the training state that was exported, for its step, tokens and seconds")
    parser.add_argument("--probes", type=int, default=100)
    parser.add_argument("--far", type=int, default=40)
    parser.add_argument("--farther", type=int, default=10)
    parser.add_argument("--dry", action="store_true")
    args = parser.parse_args()
    tokenizer, p, started = train.load_tokenizer(), load(), time.time()
    config = model.Config(vocab=tokenizer.get_vocab_size(), query_block=1024)
    meta = train.restore(args.state)[3] if args.state else {}
    out = {
        "parameters": sum(int(v.size) for v in p.values()),
        "training": {
            "seed": meta.get("seed"),
            "steps": meta.get("step"),
            "tokens": meta.get("tokens"),
            "wall_seconds": meta.get("seconds"),
            "cpu_seconds": meta.get("cpu_seconds"),
        },
        "evaluation_seed": SEED,
        "held_out": held_out(p, config, tokenizer, n=max(4, args.probes * 4 // 10)),
        "recall": {},
    }
    print(json.dumps(out, indent=1), flush=True)
    for distance, n in ((200, args.probes), (2000, args.probes), (8000, args.far), (16_000, args.farther)):
        for thinking in (False, True):
            key = f"{distance}_{'thinking' if thinking else 'direct'}"
            out["recall"][key] = recall(p, config, tokenizer, distance, n, thinking)
            print(key, json.dumps(out["recall"][key]), flush=True)
    out["generation"] = {k: generated(p, config, tokenizer, max(4, args.probes // 6), k == "thinking") for k in ("direct", "thinking")}
    out["evaluation_wall_seconds"] = time.time() - started
    print(json.dumps(out["generation"], indent=1))
    if not args.dry:
        vocabulary.write("metrics.json", json.dumps(out, indent=2) + "\n")


if __name__ == "__main__":
    main()
