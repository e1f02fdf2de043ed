"""The trainable hybrid in float32: chunked Gated DeltaNet, gated attention, dense MLP, one MTP layer.

Parameters are a flat dict of Hugging Face tensor names, matrices stored [out, in], so an export is a copy.
Letters: B batch, T tokens, D hidden, Hk/Hv key/value heads of the GDN, K/V their widths, C chunk, N chunks, Hq query heads, h head width.
"""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np


@dataclasses.dataclass(frozen=True)
class Config:
    """Sizes of the embedded model; the same figures stand in its config.json."""

    vocab: int = 1024
    hidden: int = 128
    layers: int = 4
    interval: int = 4
    mlp: int = 320
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 32
    k_heads: int = 2
    v_heads: int = 4
    k_dim: int = 32
    v_dim: int = 32
    conv: int = 4
    rotary: int = 8
    theta: float = 1e7
    eps: float = 1e-6
    chunk: int = 32
    query_block: int = 128

    def is_full(self, layer):
        """True where the layer is full attention (every fourth)."""
        return (layer + 1) % self.interval == 0


def attention_shapes(config, prefix):
    """Names and shapes of one gated attention block and its MLP, under `prefix`."""
    d, h = config.hidden, config.head_dim
    a = f"{prefix}.self_attn"
    return {
        f"{a}.q_proj.weight": (2 * config.heads * h, d),
        f"{a}.k_proj.weight": (config.kv_heads * h, d),
        f"{a}.v_proj.weight": (config.kv_heads * h, d),
        f"{a}.o_proj.weight": (d, config.heads * h),
        f"{a}.q_norm.weight": (h,),
        f"{a}.k_norm.weight": (h,),
    }


def shapes(config):
    """Every tensor's name and shape, in file order."""
    d, hv = config.hidden, config.v_heads
    key, value = config.k_heads * config.k_dim, hv * config.v_dim
    out = {"model.embed_tokens.weight": (config.vocab, d)}
    prefixes = [f"model.layers.{i}" for i in range(config.layers)] + ["mtp.layers.0"]
    for i, prefix in enumerate(prefixes):
        out[f"{prefix}.input_layernorm.weight"] = (d,)
        if i == config.layers or config.is_full(i):
            out.update(attention_shapes(config, prefix))
        else:
            g = f"{prefix}.linear_attn"
            out[f"{g}.in_proj_qkv.weight"] = (2 * key + value, d)
            out[f"{g}.in_proj_z.weight"] = (value, d)
            out[f"{g}.in_proj_b.weight"] = (hv, d)
            out[f"{g}.in_proj_a.weight"] = (hv, d)
            out[f"{g}.conv1d.weight"] = (2 * key + value, 1, config.conv)
            out[f"{g}.A_log"] = (hv,)
            out[f"{g}.dt_bias"] = (hv,)
            out[f"{g}.norm.weight"] = (config.v_dim,)
            out[f"{g}.out_proj.weight"] = (d, value)
        out[f"{prefix}.post_attention_layernorm.weight"] = (d,)
        out[f"{prefix}.mlp.gate_proj.weight"] = (config.mlp, d)
        out[f"{prefix}.mlp.up_proj.weight"] = (config.mlp, d)
        out[f"{prefix}.mlp.down_proj.weight"] = (d, config.mlp)
    out["model.norm.weight"] = (d,)
    out["mtp.fc.weight"] = (d, 2 * d)
    for name in ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm"):
        out[f"mtp.{name}.weight"] = (d,)
    return out


def initial(config, seed):
    """Float32 parameters. Decays start at half-lives from 8 to 16,384 tokens, so some heads are very slow."""
    rng = np.random.default_rng(seed)
    rate = np.log(2) / np.geomspace(8, 16384, config.v_heads)
    params = {}
    for name, shape in shapes(config).items():
        if name.endswith("A_log"):
            w = 0.5 * np.log(rate)
        elif name.endswith("dt_bias"):
            w = np.log(np.expm1(np.sqrt(rate)))
        elif name.endswith("linear_attn.norm.weight"):
            w = np.ones(shape)
        elif len(shape) == 1:
            w = np.zeros(shape)
        elif name.endswith("conv1d.weight"):
            w = rng.normal(0, 0.25, shape)
            w[:, :, -1] += 0.5
        elif name.endswith("embed_tokens.weight"):
            w = rng.normal(0, 0.05, shape)
        else:
            w = rng.normal(0, shape[1] ** -0.5, shape)
            if name.endswith(("out_proj.weight", "o_proj.weight", "down_proj.weight")):
                w *= (2 * config.layers) ** -0.5
        params[name] = jnp.asarray(w, jnp.float32)
    return params


def rms(x, w, eps):
    """Zero-centred RMSNorm over the last axis: x * rsqrt(mean(x^2) + eps) * (1 + w)."""
    return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + eps) * (1.0 + w)


def unit(x):
    """x / sqrt(sum(x^2) + 1e-6) over the last axis."""
    return x * jax.lax.rsqrt(jnp.sum(x * x, -1, keepdims=True) + 1e-6)


def inverse_unit_lower(strict):
    """(I + strict)^-1 for strictly lower triangular [..., C, C], by forward substitution."""
    eye = jnp.broadcast_to(jnp.eye(strict.shape[-1], dtype=strict.dtype), strict.shape)
    return jax.lax.linalg.triangular_solve(strict + eye, eye, left_side=True, lower=True, unit_diagonal=True)


def delta_rule(q, k, v, beta, g, chunk):
    """Chunked gated delta rule from a zero state. q, k: [B, H, T, K] (unit length, q scaled); v: [B, H, T, V]; beta, g: [B, H, T] -> [B, H, T, V]."""
    b, h, t, width = v.shape
    n = t // chunk
    q, k, v = (x.reshape(b, h, n, chunk, -1) for x in (q, k, v))
    beta, total = beta.reshape(b, h, n, chunk, 1), jnp.cumsum(g.reshape(b, h, n, chunk), -1)
    lower = jnp.tril(jnp.ones((chunk, chunk), bool))
    decay = jnp.exp(jnp.where(lower, total[..., :, None] - total[..., None, :], -jnp.inf))
    kb = k * beta
    strict = jnp.tril((kb @ jnp.swapaxes(k, -1, -2)) * decay, -1)
    inverse = inverse_unit_lower(strict)
    grow = jnp.exp(total)[..., None]
    u, w = inverse @ (v * beta), inverse @ (kb * grow)
    inner = (q @ jnp.swapaxes(k, -1, -2)) * decay
    last = total[..., -1:]
    tail = k * jnp.exp(last - total)[..., None]

    def step(s, xs):
        """One chunk. s: [B, H, K, V]."""
        q_, w_, u_, inner_, tail_, last_ = xs
        fresh = u_ - w_ @ s
        out = q_ @ s + inner_ @ fresh
        return s * jnp.exp(last_)[..., None] + jnp.swapaxes(tail_, -1, -2) @ fresh, out

    xs = tuple(jnp.moveaxis(x, 2, 0) for x in (q * grow, w, u, inner, tail, last))
    _, out = jax.lax.scan(step, jnp.zeros((b, h, q.shape[-1], width), v.dtype), xs)
    return jnp.moveaxis(out, 0, 2).reshape(b, h, t, width)


def gated_delta(p, prefix, x, config):
    """One Gated DeltaNet block. x: [B, T, D] -> [B, T, D]."""
    b, t, _ = x.shape
    hk, hv, kd, vd = config.k_heads, config.v_heads, config.k_dim, config.v_dim
    raw = x @ p[f"{prefix}.in_proj_qkv.weight"].T
    taps = p[f"{prefix}.conv1d.weight"][:, 0]
    padded = jnp.pad(raw, ((0, 0), (config.conv - 1, 0), (0, 0)))
    c = jax.nn.silu(sum(padded[:, j : j + t] * taps[:, j] for j in range(config.conv)))
    q, k, v = jnp.split(c, (hk * kd, 2 * hk * kd), axis=-1)
    q = unit(q.reshape(b, t, hk, kd)) * kd**-0.5
    k = unit(k.reshape(b, t, hk, kd))
    q, k = (jnp.repeat(y.swapaxes(1, 2), hv // hk, axis=1) for y in (q, k))
    v = v.reshape(b, t, hv, vd).swapaxes(1, 2)
    beta = jax.nn.sigmoid(x @ p[f"{prefix}.in_proj_b.weight"].T)
    g = -jnp.exp(p[f"{prefix}.A_log"]) * jax.nn.softplus(x @ p[f"{prefix}.in_proj_a.weight"].T + p[f"{prefix}.dt_bias"])
    o = delta_rule(q, k, v, beta.swapaxes(1, 2), g.swapaxes(1, 2), config.chunk).swapaxes(1, 2)
    z = (x @ p[f"{prefix}.in_proj_z.weight"].T).reshape(b, t, hv, vd)
    o = o * jax.lax.rsqrt(jnp.mean(o * o, -1, keepdims=True) + config.eps) * p[f"{prefix}.norm.weight"]
    return (o * jax.nn.silu(z)).reshape(b, t, hv * vd) @ p[f"{prefix}.out_proj.weight"].T


def rotate(x, positions, config):
    """Rotary embedding of the first `rotary` dims, half-split pairs. x: [B, T, H, h], positions: [B, T]."""
    half = config.rotary // 2
    frequency = config.theta ** (-np.arange(half) / half)
    angle = positions.astype(jnp.float32)[..., None, None] * jnp.asarray(frequency, jnp.float32)
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    a, b, rest = jnp.split(x, (half, 2 * half), axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin, rest], axis=-1)


def gated_attention(p, prefix, x, positions, config):
    """Causal gated attention, computed in blocks of queries over the keys they may see. x: [B, T, D] -> [B, T, D]."""
    b, t, _ = x.shape
    hq, hkv, h = config.heads, config.kv_heads, config.head_dim
    qg = (x @ p[f"{prefix}.q_proj.weight"].T).reshape(b, t, hq, 2 * h)
    q, gate = qg[..., :h], qg[..., h:]
    q = rotate(rms(q, p[f"{prefix}.q_norm.weight"], config.eps), positions, config)
    k = (x @ p[f"{prefix}.k_proj.weight"].T).reshape(b, t, hkv, h)
    k = rotate(rms(k, p[f"{prefix}.k_norm.weight"], config.eps), positions, config)
    v = (x @ p[f"{prefix}.v_proj.weight"].T).reshape(b, t, hkv, h)
    q = q.reshape(b, t, hkv, hq // hkv, h).transpose(0, 2, 3, 1, 4) * h**-0.5
    k, v = k.transpose(0, 2, 3, 1)[:, :, None], v.transpose(0, 2, 1, 3)[:, :, None]

    def block(q_, k_, v_, start):
        """q_: [B, Hkv, G, R, h] rows from `start` on; k_: [B, Hkv, 1, h, E]; v_: [B, Hkv, 1, E, h]."""
        rows, ends = start + jnp.arange(q_.shape[3]), jnp.arange(k_.shape[-1])
        score = jnp.where(rows[:, None] >= ends[None, :], q_ @ k_, -1e30)
        return jax.nn.softmax(score, -1) @ v_

    outs = []
    size = config.query_block if t > 512 else t
    for start in range(0, t, size):
        end = min(t, start + size)
        run = jax.checkpoint(block, static_argnums=(3,)) if t > 512 else block
        outs.append(run(q[:, :, :, start:end], k[..., :end], v[:, :, :, :end], start))
    o = jnp.concatenate(outs, 3).transpose(0, 3, 1, 2, 4).reshape(b, t, hq * h)
    return (o * jax.nn.sigmoid(gate.reshape(b, t, hq * h))) @ p[f"{prefix}.o_proj.weight"].T


def layer(p, prefix, x, positions, config, full):
    """One pre-norm decoder layer. x: [B, T, D]."""
    y = rms(x, p[f"{prefix}.input_layernorm.weight"], config.eps)
    x = x + (gated_attention(p, f"{prefix}.self_attn", y, positions, config) if full else gated_delta(p, f"{prefix}.linear_attn", y, config))
    y = rms(x, p[f"{prefix}.post_attention_layernorm.weight"], config.eps)
    m = f"{prefix}.mlp"
    return x + (jax.nn.silu(y @ p[f"{m}.gate_proj.weight"].T) * (y @ p[f"{m}.up_proj.weight"].T)) @ p[f"{m}.down_proj.weight"].T


def trunk(p, tokens, positions, config):
    """Hidden rows after the final norm. tokens, positions: [B, T] -> [B, T, D]; T is a multiple of the chunk."""
    x = p["model.embed_tokens.weight"][tokens]
    for i in range(config.layers):
        x = layer(p, f"model.layers.{i}", x, positions, config, config.is_full(i))
    return rms(x, p["model.norm.weight"], config.eps)


def draft(p, hidden, following, positions, config):
    """MTP rows: row t sees hidden[t] and token t+1 and predicts token t+2. hidden: [B, T, D], following, positions: [B, T] -> [B, T, D]."""
    e = rms(p["model.embed_tokens.weight"][following], p["mtp.pre_fc_norm_embedding.weight"], config.eps)
    h = rms(hidden, p["mtp.pre_fc_norm_hidden.weight"], config.eps)
    u = jnp.concatenate([e, h], -1) @ p["mtp.fc.weight"].T
    return rms(layer(p, "mtp.layers.0", u, positions, config, True), p["mtp.norm.weight"], config.eps)


def logits(p, rows):
    """Scores of the tied head. rows: [..., D] -> [..., vocab]."""
    return rows @ p["model.embed_tokens.weight"].T


def count(config):
    """Number of parameters, MTP layer included."""
    return sum(math.prod(s) for s in shapes(config).values())
