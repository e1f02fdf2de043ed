"""Where a model comes from: a Hugging Face directory, a converted one, the embedded checkpoint, or random weights of a preset's sizes."""

import dataclasses
import os
import re
import time
from collections.abc import Callable
from pathlib import Path

import jax

from qjax.bits import digest
from qjax.model import converted, weights
from qjax.model.checkpoint import read_tensors, shards
from qjax.model.config import ModelConfig
from qjax.model.digest import Files
from qjax.model.template import Template
from qjax.model.tokenizer import Tokenizer
from qjax.model.values import CheckpointError, Fields, is_number, read_json, shortened, shown
from qjax.sampling import Sampling

EMBEDDED = Path(__file__).parent.parent / "embedded"
_SAMPLING = ("temperature", "top_k", "top_p", "min_p", "presence_penalty", "repetition_penalty")


@dataclasses.dataclass(frozen=True)
class Model:
    """A loaded model. `params`: the tree of `weights.spec`, on the device. `template`: None where the checkpoint has none.

    `generation`: the sampling fields that generation_config.json sets. `load_seconds`: reading or making the weights and placing them.
    `origin`: the files that the weights were read from, or what they were made of; None where nothing is known of it.
    """

    name: str
    config: ModelConfig
    params: dict
    tokenizer: Tokenizer
    template: Template | None
    generation: dict
    load_seconds: float
    origin: Files | str | None = None

    def weights_digest(self) -> str:
        """What tells these weights from all others, beside the config and this package's source. Reads them, unless it is known."""
        if isinstance(self.origin, str):
            return self.origin
        found = self.origin.digest() if self.origin else None
        return found or digest({jax.tree_util.keystr(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(self.params)})


def load(spec: str | Path, *, dtype: str | None = None, seed: int = 0) -> Model:
    """Load "embedded", "random:PRESET[@LAYERS]" (weights of `seed`, the embedded tokenizer), or a directory, converted or not.

    `dtype`: "bfloat16" or "float32" instead of the config's own. Raises CheckpointError.
    """
    spec = str(spec)
    directory, config = find(spec)
    config = config if dtype is None else dataclasses.replace(config, dtype=dtype)
    if directory is None:
        return _assemble(spec, EMBEDDED, config, lambda: (f"random, seed {seed}", weights.random(config, seed)))
    name = spec if spec == "embedded" else directory.resolve().name

    def read():
        files, reader = (converted.files, converted.read) if converted.is_converted(directory) else (shards, read_tensors)
        return Files.of(directory, files(directory), keep=directory != EMBEDDED), reader(directory, config)

    return _assemble(name, directory, config, read)


def find(spec: str) -> tuple[Path | None, ModelConfig]:
    """The directory of a model (None for random weights) and its config; no weights are read. Raises CheckpointError."""
    if spec.startswith("random:"):
        parts = re.fullmatch(r"random:([^@]+)(?:@(\d{1,9}))?", spec)
        if parts is None:
            raise CheckpointError(f"model: expected random:PRESET[@LAYERS], found {shown(spec)}")
        config = ModelConfig.preset(parts[1])
        return None, config if parts[2] is None else config.with_layers(int(parts[2]))
    directory = EMBEDDED if spec == "embedded" else Path(spec)
    if not spec or not os.path.isdir(directory):  # Path's own raises for a name too long; Path("") is the current directory
        found = "an empty name" if not spec else "a file" if os.path.exists(directory) else "nothing there"
        raise CheckpointError(f'{shortened(spec) or "model"}: expected a directory, "embedded" or "random:PRESET[@LAYERS]", found {found}')
    return directory, ModelConfig.from_file(directory / "config.json")


def _assemble(name: str, directory: Path, config: ModelConfig, make: Callable[[], tuple[Files | str, dict]]) -> Model:
    """The model of the origin and weights that `make` gives, with a directory's tokenizer, template and defaults; the cheap checks come first."""
    if not config.attention_layers:  # a sequence without pages: its layout is sound, and no engine can hold it
        raise CheckpointError(f"{name}: expected at least one full-attention layer, found {config.layers} layers of linear attention")
    tokenizer = Tokenizer.from_directory(directory, () if name.startswith("random:") else config.eos)
    if tokenizer.size > config.vocab:
        raise CheckpointError(f"{directory / 'tokenizer.json'}: expected ids below vocab_size = {config.vocab}, found {tokenizer.size - 1}")
    template, generation = _template(directory, tokenizer), _generation(directory)
    start = time.perf_counter()
    origin, params = make()
    params = jax.block_until_ready(jax.device_put(params))
    return Model(name, config, params, tokenizer, template, generation, time.perf_counter() - start, origin)


def _template(directory: Path, tokenizer: Tokenizer) -> Template | None:
    """chat_template.jinja, or the template that older checkpoints keep in tokenizer_config.json."""
    path = directory / "chat_template.jinja"
    if path.is_file():
        try:
            source = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as e:
            raise CheckpointError(f"{path}: expected UTF-8 text, found: {e}") from e
    else:
        path = directory / "tokenizer_config.json"
        source = read_json(path, required=False).get("chat_template")
    if source is None:
        return None
    if not isinstance(source, str):
        raise CheckpointError(f"{path}: chat_template: expected one template, found {type(source).__name__}")
    try:
        return Template(source, tokenizer)
    except CheckpointError as e:
        raise CheckpointError(f"{path}: {e}") from e


def _generation(directory: Path) -> dict:
    """The sampling fields of generation_config.json; a temperature of 0 where it says do_sample false."""
    path = directory / "generation_config.json"
    stated = read_json(path, required=False)
    faults = []
    sample = Fields(stated, faults).flag("do_sample", True)
    fields = {key: stated[key] for key in _SAMPLING if stated.get(key) is not None}
    for key, value in fields.items():
        if not is_number(value):
            faults.append(f"{key}: expected a number, found {shown(value)}")
            continue
        try:
            Sampling(**{key: value})
        except ValueError as e:
            faults.append(str(e))
    if faults:
        raise CheckpointError(f"{path}: {'; '.join(faults)}")
    return fields if sample else fields | {"temperature": 0.0}
