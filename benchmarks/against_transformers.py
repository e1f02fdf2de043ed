"""qjax against transformers: the same random weights in both, in one process, taking turns on this machine's CPU.

    .venv-reference/bin/python -m benchmarks.against_transformers [--json]

The model has the sizes of Qwen3.5-0.8B (vocabulary 248,320, bfloat16). Prefill is the prompt up to the first token, decode the tokens
behind it, greedy, one at a time and without drafts; both are tokens per second, the median over the rounds, and a ratio is ours over
theirs. transformers runs with a cache, logits of the last row only, oneDNN's bfloat16 products and a thread for each core, without
torch.compile; of eager and sdpa attention it gets the one that is faster, for each length, for prefill and for decode.

One difference is left in the weights: transformers rounds A_log and the norm of the GDN outputs to bfloat16. Close everything else: with a
core taken by another process, torch's threads wait for each other and its rates fall to a tenth.
"""

import argparse
import json
import os
import statistics
import sys
import time

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from qjax.config import EngineConfig
from qjax.engine import Engine
from qjax.model.config import ModelConfig
from qjax.model.names import slots
from qjax.model.source import load
from qjax.process import tune
from qjax.sampling import Sampling
from tests.reference import reference

LENGTHS = (1024, 4096)
ATTENTION = ("eager", "sdpa")
PHASES = ("prefill", "decode")


def text_config(config: ModelConfig) -> dict:
    """The sizes as a Hugging Face text config."""
    return {
        "vocab_size": config.vocab,
        "hidden_size": config.hidden,
        "intermediate_size": config.intermediate,
        "num_hidden_layers": config.layers,
        "layer_types": list(config.layer_types),
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_dim,
        "linear_num_key_heads": config.key_heads,
        "linear_num_value_heads": config.value_heads,
        "linear_key_head_dim": config.key_dim,
        "linear_value_head_dim": config.value_dim,
        "linear_conv_kernel_dim": config.conv,
        "max_position_embeddings": config.context,
        "rms_norm_eps": config.eps,
        "tie_word_embeddings": config.tied,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": config.rope_theta,
            "partial_rotary_factor": config.rotary_dims / config.head_dim,
            "mrope_section": list(config.mrope_section),
            "mrope_interleaved": True,
        },
    }


def unstack(params: dict, config: ModelConfig) -> dict[str, torch.Tensor]:
    """The tensors of a checkpoint by name, copied from qjax's parameter tree: the inverse of qjax.model.weights.stack."""
    tensors = {}
    for name, slot in slots(config).items():
        leaf = params
        for key in slot.path:
            leaf = leaf[key]
        array = np.asarray(leaf)
        array = (array if slot.layer is None else array[slot.layer])[slot.rows].reshape(slot.shape).copy()
        # torch reads no bfloat16 from numpy: two-byte leaves go over as their bits.
        tensor = torch.from_numpy(array.view(np.int16)).view(torch.bfloat16) if array.itemsize == 2 else torch.from_numpy(array)
        tensors[name if name.startswith("lm_head") else f"model.{name}"] = tensor
    return tensors


class Theirs:
    """transformers, with the attention that suits a length and a phase."""

    def __init__(self, params: dict, config: ModelConfig):
        torch.set_num_threads(os.cpu_count())
        self._model = reference.build(text_config(config), unstack(params, config), dtype=torch.bfloat16)
        self._fastest = {}
        self._run(np.zeros(64, np.int32), 1, dict.fromkeys(PHASES, ATTENTION[0]))

    def tune(self, tokens: np.ndarray, steps: int) -> None:
        """Try each attention on a prompt of this length, and keep the faster one for each phase."""
        rates = {name: self._run(tokens, steps, dict.fromkeys(PHASES, name)) for name in ATTENTION}
        self._fastest[tokens.size] = {phase: max(ATTENTION, key=lambda name: rates[name][phase]) for phase in PHASES}

    def attention(self, length: int) -> dict[str, str]:
        """Phase -> the attention chosen for prompts of this length."""
        return self._fastest[length]

    def __call__(self, tokens: np.ndarray, steps: int) -> dict[str, float]:
        return self._run(tokens, steps, self._fastest[tokens.size])

    def _run(self, tokens, steps, attention):
        def generate():
            cache = reference.empty_cache(self._model)
            self._model.set_attn_implementation(attention["prefill"])
            token = int(reference.forward(self._model, tokens, cache, keep=1)[-1].argmax())
            yield token
            self._model.set_attn_implementation(attention["decode"])
            for _ in range(steps):
                token = int(reference.forward(self._model, [token], cache, keep=1)[-1].argmax())
                yield token

        return rates(generate(), tokens.size, steps)


class Ours:
    """qjax, cold for every prompt."""

    def __init__(self, model, longest: int):
        self._engine = Engine(model, EngineConfig(context_tokens=longest))

    def __call__(self, tokens: np.ndarray, steps: int) -> dict[str, float]:
        generation = self._engine.generate(tokens, sampling=Sampling(), max_tokens=steps + 1)
        found = rates((token for token in generation if token.id is not None), tokens.size, steps)
        if generation.start:
            raise RuntimeError(f"{generation.start} of {tokens.size} tokens were not read again: this was no cold prefill")
        self._engine.release(generation.sequence)
        return found


def rates(generation, length: int, steps: int) -> dict[str, float]:
    """Tokens per second of both phases, from the times at which a generation gives its first token and its `steps` further ones."""
    start = time.perf_counter()
    times = [time.perf_counter() for _ in generation]
    if len(times) != steps + 1:
        raise RuntimeError(f"expected {steps + 1} tokens, found {len(times)}: the generation stopped early")
    return {"prefill": length / (times[0] - start), "decode": steps / (times[-1] - times[0])}


def measure(rounds: int, steps: int) -> dict:
    """Every length in both engines, `rounds` times in turn: medians of the rates, and their ratios."""
    log = Console(stderr=True, soft_wrap=True)
    if os.getloadavg()[0] > 0.3:
        log.print(f"warning: other processes are running here (load {os.getloadavg()[0]:.1f}), which slows transformers more than qjax")
    log.print("making random weights, compiling")
    model = load("random:0.8b")
    model.tokenizer.stop_ids = ()  # random weights may choose any id: both engines decode on to the last step
    ours, theirs = Ours(model, max(LENGTHS) + steps + 1), Theirs(model.params, model.config)
    engines = {"qjax": ours, "transformers": theirs}

    def prompt(length, seed):
        return np.random.default_rng([length, seed]).integers(0, model.config.vocab, length, dtype=np.int32)

    for length in LENGTHS:
        log.print(f"{length:,} tokens: warming up, choosing transformers' attention")
        theirs.tune(prompt(length, rounds), steps)
        ours(prompt(length, rounds), steps)
        log.print(f"{length:,} tokens: " + ", ".join(f"{phase} with {name}" for phase, name in theirs.attention(length).items()))
    samples = {name: {phase: {length: [] for length in LENGTHS} for phase in PHASES} for name in engines}
    for number in range(rounds):
        for length in LENGTHS:
            # Who goes first changes, so that a machine that slows down slows both.
            for name in sorted(engines, reverse=number % 2 == 1):
                found = engines[name](prompt(length, number), steps)
                shown = ", ".join(f"{phase} {rate:.1f} tokens/s" for phase, rate in found.items())
                log.print(f"round {number + 1} of {rounds}, {length:,} tokens, {name}: {shown}")
                for phase, rate in found.items():
                    samples[name][phase][length].append(rate)
    medians = {
        name: {phase: {str(n): statistics.median(values) for n, values in by_length.items()} for phase, by_length in phases.items()}
        for name, phases in samples.items()
    }
    return {
        **{f"{p}_ratio": {n: rate / medians["transformers"][p][n] for n, rate in medians["qjax"][p].items()} for p in PHASES},
        "tokens_per_second": medians,
        "attention": {str(length): theirs.attention(length) for length in LENGTHS},
        "rounds": rounds,
        "decode_tokens": steps,
        "cores": os.cpu_count(),
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--rounds", type=int, default=3, metavar="N", help="times that each figure is taken in each engine (default 3)")
    parser.add_argument("--steps", type=int, default=24, metavar="N", help="tokens decoded behind each prompt (default 24)")
    options = parser.parse_args()
    if options.rounds < 1 or options.steps < 1:
        parser.error("--rounds and --steps must be at least 1")
    result = measure(options.rounds, options.steps)
    if options.json:
        json.dump(result, sys.stdout)
        print()
        return
    table = Table("phase", "prompt", "qjax tokens/s", "transformers tokens/s", "ratio", title="Qwen3.5-0.8B sizes, random bfloat16 weights")
    for phase in PHASES:
        for length in map(str, LENGTHS):
            mine, other = (result["tokens_per_second"][name][phase][length] for name in ("qjax", "transformers"))
            table.add_row(phase, length, f"{mine:.1f}", f"{other:.1f}", f"{result[f'{phase}_ratio'][length]:.2f}")
    Console().print(table)


if __name__ == "__main__":
    tune()  # both engines get the huge pages
    main()
