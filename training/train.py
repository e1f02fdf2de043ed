"""Train the embedded model on generated dialogues: `python -m training.train --out DIR`. Resumes from DIR/state.npz.

The schedule counts tokens, so a run is a function of the seed and not of the machine's speed.
"""

import argparse
import functools
import json
import os
import pathlib
import random
import time

import jax
import jax.numpy as jnp
import numpy as np
from tokenizers import Tokenizer

from training import dialogues, model

SEED = 20
# (tokens until here, sequence length, rows, weights of the generator's stages 0, 1, 2)
SCHEDULE = (
    (1_000_000, 128, 16, (1, 0, 0)),
    (2_500_000, 256, 8, (2, 1, 0)),
    (4_500_000, 512, 4, (1, 3, 1)),
    (6_300_000, 1024, 2, (0, 1, 3)),
    (8_700_000, 2048, 2, (0, 0, 1)),
    (9_700_000, 4096, 1, (0, 0, 1)),
)
WEIGHT_OTHER, WEIGHT_ASSISTANT, WEIGHT_VALUE = 0.1, 1.0, 4.0
MTP_WEIGHT = 0.2
STRETCHED, LONGEST = 0.7, 32_768


def load_tokenizer():
    """The tokenizer of the embedded directory."""
    return Tokenizer.from_file(str(dialogues.EMBEDDED / "tokenizer.json"))


@functools.cache
def counter():
    """A function that counts the tokens of a text; short texts are cached."""
    tokenizer = load_tokenizer()
    short = functools.lru_cache(50_000)(lambda text: len(tokenizer.encode(text).ids))
    return lambda text: short(text) if len(text) < 100 else len(tokenizer.encode(text).ids)


def encode(tokenizer, text):
    """Marked text -> (ids, loss weight of each id): recalled values, other assistant tokens, everything else."""
    spans, clean, size, start = [], [], 0, 0
    for i, part in enumerate(text.replace(dialogues.CLOSE, dialogues.OPEN).split(dialogues.OPEN)):
        clean.append(part)
        start, size = size, size + len(part)
        if i % 2:
            spans.append((start, size))
    coded = tokenizer.encode("".join(clean))
    ids, weights = np.asarray(coded.ids, np.int32), np.full(len(coded.ids), WEIGHT_OTHER, np.float32)
    opening, closing = tokenizer.token_to_id("<|im_start|>"), tokenizer.token_to_id("<|im_end|>")
    assistant = tokenizer.encode("assistant").ids[0]
    inside = False
    for i, token in enumerate(ids):
        if token == opening:
            inside = i + 1 < len(ids) and ids[i + 1] == assistant
        elif inside and i >= 2 and ids[i - 2] != opening and ids[i - 1] != opening:
            weights[i] = WEIGHT_ASSISTANT
        inside = inside and token != closing
    begins, ends = np.asarray([o[0] for o in coded.offsets]), np.asarray([o[1] for o in coded.offsets])
    for a, b in spans:
        weights[(begins < b) & (ends > a)] = WEIGHT_VALUE
    return ids, weights


def row(tokenizer, rng, length, stage):
    """One conversation cut or padded to `length` tokens. -> ids [length], weights [length]."""
    talk, options = dialogues.conversation(rng, length, stage, counter())
    ids, weights = encode(tokenizer, dialogues.render(talk.messages, **options))
    pad = max(0, length - len(ids))
    return np.pad(ids, (0, pad))[:length], np.pad(weights, (0, pad))[:length]


def stretched(rng, length):
    """Positions [length] for one row, mostly with a few forward jumps, so that rotations of far distances are seen in short rows."""
    steps = np.ones(length, np.int64)
    steps[0] = 0
    if rng.random() < STRETCHED:
        extra = int(length * (LONGEST / length) ** rng.random()) - length
        places = [rng.randrange(1, length) for _ in range(rng.randint(1, 6))]
        for place in places:
            steps[place] += extra // len(places)
    return np.cumsum(steps).astype(np.int32)


def batch(tokenizer, seed, step, length, rows, mix):
    """The batch of one step: ids and positions [rows, length] int32, weights [rows, length] float32."""
    rng = random.Random(f"{seed}/{step}")
    pairs = [row(tokenizer, rng, length, rng.choices((0, 1, 2), mix)[0]) for _ in range(rows)]
    return np.stack([p[0] for p in pairs]), np.stack([stretched(rng, length) for _ in pairs]), np.stack([p[1] for p in pairs])


def cross_entropy(p, rows, targets):
    """rows: [B, T, D], targets: [B, T] -> [B, T]."""
    scores = model.logits(p, rows)
    return jax.nn.logsumexp(scores, -1) - jnp.take_along_axis(scores, targets[..., None], -1)[..., 0]


def losses(p, ids, positions, weights, config, mtp):
    """Weighted loss and its parts. The MTP layer sees the trunk's rows without sending a gradient into them."""
    hidden = model.trunk(p, ids, positions, config)
    rolled, w1 = jnp.roll(ids, -1, 1), jnp.roll(weights, -1, 1).at[:, -1:].set(0.0)
    main = cross_entropy(p, hidden, rolled)
    value = w1 == WEIGHT_VALUE
    parts = {
        "loss": jnp.sum(main * w1) / jnp.sum(w1),
        "value": jnp.sum(main * value) / jnp.maximum(1, jnp.sum(value)),
        "hit": jnp.sum((main < 0.6931) * value) / jnp.maximum(1, jnp.sum(value)),
    }
    if not mtp:
        return parts["loss"], parts
    rows = model.draft(p, jax.lax.stop_gradient(hidden), rolled, positions, config)
    w2 = jnp.roll(weights, -2, 1).at[:, -2:].set(0.0)
    extra = jnp.sum(cross_entropy(p, rows, jnp.roll(ids, -2, 1)) * w2) / jnp.sum(w2)
    return parts["loss"] + MTP_WEIGHT * extra, {**parts, "mtp": extra}


def orthogonal(m):
    """Newton-Schulz iteration towards the nearest orthogonal matrix (Muon's update direction). m: [out, in]."""
    x = m if m.shape[0] <= m.shape[1] else m.T
    x = x / (jnp.linalg.norm(x) + 1e-7)
    for _ in range(5):
        a = x @ x.T
        x = 3.4445 * x + (-4.7750 * a + 2.0315 * a @ a) @ x
    return x if m.shape[0] <= m.shape[1] else x.T


def is_matrix(name, w):
    """True for the matrices that Muon updates."""
    return w.ndim == 2 and "embed" not in name and min(w.shape) >= 32


@functools.partial(jax.jit, static_argnames=("config", "muon", "mtp"), donate_argnums=(0, 1, 2))
def update(p, first, second, ids, positions, weights, rate, step, config, muon, mtp):
    """One AdamW step (Muon on the matrices if asked). -> parameters, both moments, loss parts."""
    (_, parts), grad = jax.value_and_grad(losses, has_aux=True)(p, ids, positions, weights, config, mtp)
    norm = jnp.sqrt(sum(jnp.sum(g * g) for g in grad.values()))
    scale = jnp.minimum(1.0, 1.0 / (norm + 1e-6))
    fresh, m1, m2 = {}, {}, {}
    for name, w in p.items():
        g = grad[name] * scale
        if muon and is_matrix(name, w):
            m1[name] = 0.95 * first[name] + grad[name]
            m2[name] = second[name]
            move = orthogonal(grad[name] + 0.95 * m1[name]) * (0.2 * max(w.shape) ** 0.5)
        else:
            m1[name] = 0.9 * first[name] + 0.1 * g
            m2[name] = 0.95 * second[name] + 0.05 * g * g
            move = (m1[name] / (1 - 0.9**step)) / (jnp.sqrt(m2[name] / (1 - 0.95**step)) + 1e-8)
        decay = 0.05 if w.ndim == 2 else 0.0
        fresh[name] = w - rate * (move + decay * w)
    return fresh, m1, m2, {**parts, "norm": norm}


def learning_rate(seen, total, peak):
    """Linear warm-up over 400k tokens, constant, then a linear fall to 3 % over the last 30 %."""
    return peak * min(1.0, seen / 400_000, 0.03 + 0.97 * (total - seen) / (0.3 * total))


def save(path, p, first, second, meta):
    """Write the whole training state in a single step."""
    arrays = {f"{kind}/{k}": np.asarray(v) for kind, tree in (("p", p), ("m", first), ("v", second)) for k, v in tree.items()}
    part = path.with_suffix(".part.npz")
    np.savez(part, meta=json.dumps(meta), **arrays)
    os.replace(part, path)


def restore(path):
    """The training state of `save`."""
    with np.load(path) as f:
        trees = [{k[2:]: jnp.asarray(f[k]) for k in f.files if k.startswith(kind + "/")} for kind in "pmv"]
        return (*trees, json.loads(str(f["meta"])))


def main():
    """Train until the schedule ends, `--tokens` are seen or `--seconds` have passed."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=pathlib.Path, required=True)
    parser.add_argument("--seed", type=int, default=SEED)
    parser.add_argument("--peak", type=float, default=3e-3)
    parser.add_argument("--adam", action="store_true", help="Adam for the matrices too, instead of Muon")
    parser.add_argument("--seconds", type=float, default=1e9)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    tokenizer, path, started = load_tokenizer(), args.out / "state.npz", time.time()
    config = model.Config(vocab=tokenizer.get_vocab_size())
    if path.exists():
        p, first, second, meta = restore(path)
    else:
        p = model.initial(config, args.seed)
        first, second = ({k: jnp.zeros_like(v) for k, v in p.items()} for _ in range(2))
        meta = {"step": 0, "tokens": 0, "seconds": 0.0, "cpu_seconds": 0.0, "seed": args.seed}
    before, cpu, total, saved, sums = meta["seconds"], meta.get("cpu_seconds", 0.0), SCHEDULE[-1][0], time.time(), []
    while meta["tokens"] < total and time.time() - started < args.seconds:
        _, length, rows, mix = next(s for s in SCHEDULE if meta["tokens"] < s[0])
        ids, positions, weights = batch(tokenizer, args.seed, meta["step"], length, rows, mix)
        rate = np.float32(learning_rate(meta["tokens"] + 2048, total, args.peak))
        mtp, now = length <= 512 or meta["step"] % 4 == 0, np.float32(meta["step"] + 1)
        p, first, second, parts = update(p, first, second, ids, positions, weights, rate, now, config, not args.adam, mtp)
        meta.update(step=meta["step"] + 1, tokens=meta["tokens"] + rows * length, seconds=before + time.time() - started)
        meta["cpu_seconds"] = cpu + time.process_time()
        sums.append({k: float(v) for k, v in parts.items()})
        if meta["step"] % 50 == 0:
            means = " ".join(f"{k} {np.mean([s[k] for s in sums if k in s]):.3f}" for k in {**sums[0], **sums[1]})
            print(f"{meta['seconds']:6.0f} s  step {meta['step']}  {meta['tokens'] / 1e6:.2f} M  T {length}  rate {rate:.5f}  {means}", flush=True)
            sums = []
        if time.time() - saved > 60:
            save(path, p, first, second, meta)
            saved = time.time()
    save(path, p, first, second, meta)


if __name__ == "__main__":
    main()
