"""The identity: the same fields in every process, and whatever changes the bits changes the fields that are named for it."""

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

from qjax.config import EngineConfig
from qjax.engine import Engine
from qjax.identity import identity, processor, source, xla_flags
from qjax.model import qwen3_5
from qjax.model.config import FULL, LINEAR
from qjax.model.source import load
from qjax.model.tokenizer import Tokenizer
from tests import tiny_checkpoint as tiny
from tests.bits import assert_bits_equal
from tests.models import prompt, random_model, tiny_config
from tests.mutation.run import copied
from tests.runs import run

SOURCE = "the same"

VIEWS = {"view K", "view V"}
SECTIONS = {"section gdn.S", "section gdn.conv", "section gdn.u", "section gdn.b", "section gdn.a"}


def differing(a: dict[str, str], b: dict[str, str]) -> set[str]:
    return {name for name in a | b if a.get(name) != b.get(name)}


@pytest.fixture(autouse=True)
def no_source(monkeypatch):
    """Somebody may write in the tree meanwhile; processes of their own run in a copy."""
    monkeypatch.setattr("qjax.identity.source", lambda packages: SOURCE)


def of(engine: Engine, **changes) -> dict[str, str]:
    """The engine's identity, not kept with the engine."""
    return identity(dataclasses.replace(engine.model, **changes), engine.programs, engine.level)


def started(compile_cache, config=None, **options) -> Engine:
    """As `tiny_engine` is, but for what is given."""
    options = {"grid": 64, "context_tokens": 448} | options
    return Engine(random_model(config or tiny_config()), EngineConfig(compile_cache=compile_cache, **options))


def test_the_engine_has_it(compile_cache):
    engine = started(compile_cache)
    assert engine.identity == of(engine)
    assert engine.identity is engine.identity


def test_it_is_a_text_by_name(tiny_engine):
    found = of(tiny_engine)
    assert all(isinstance(x, str) for item in found.items() for x in item)
    assert {"weights", "tokenizer", "template", "exactness", "grid", "source", "programs", *VIEWS, *SECTIONS} <= found.keys()
    assert {"jax", "jaxlib", "numpy", "backend", "backend version", "device", "processor", "processor features"} <= found.keys()
    assert {"jax_enable_x64", "jax_default_matmul_precision", "xla_allow_excess_precision", "xla_cpu_enable_fast_math"} <= found.keys()
    assert {f"model.{field.name}" for field in dataclasses.fields(tiny_config())} <= found.keys()
    assert (found["exactness"], found["grid"], found["model.layers"], found["view K"]) == ("token", "64", "6", "bfloat16 [2, 2, 32]")
    assert not any("dump" in name or "timeout" in name for name in found)


LAYERS = dict(layers=4, layer_types=(LINEAR, FULL) * 2)
CHANGES = {
    "layers": (LAYERS, {}, {"weights", "model.layers", "model.layer_types", "programs", *SECTIONS}),
    "kv dtype": ({"dtype": "float32"}, {}, {"weights", "model.dtype", "programs", "section gdn.conv", "section gdn.u", *VIEWS}),
    "rope": ({"rope_theta": 1e6}, {}, {"model.rope_theta", "programs"}),
    "grid": ({}, {"grid": 128}, {"grid", "programs"}),
    "exactness": ({}, {"exactness": "grid"}, {"exactness"}),
}


@pytest.mark.parametrize("change", CHANGES)
def test_e2_another_model_or_engine(tiny_engine, compile_cache, change):
    """E2 (reported faults): layers, dtype of the rows, grid, rope."""
    config, options, wanted = CHANGES[change]
    other = started(compile_cache, tiny_config(**config), **options)
    level = {"exactness"} if other.level != tiny_engine.level else set()  # float32 may be of level grid
    assert differing(of(tiny_engine), of(other)) == wanted | level


def test_how_much_room_there_is_changes_neither_identity_nor_bits(tiny_engine, compile_cache):
    """--kv-gb, --context-tokens, --parallel: only how many pages there are."""
    roomy = started(compile_cache, context_tokens=640, parallel=3)
    assert roomy.pool.pages > tiny_engine.pool.pages
    assert roomy.programs.shapes.sequence_pages > tiny_engine.programs.shapes.sequence_pages
    assert of(roomy) == of(tiny_engine)
    assert roomy.golden == tiny_engine.golden
    assert_bits_equal(run(roomy, prompt(333)), run(tiny_engine, prompt(333)))


CHECKPOINT = dict(grid=64, context_tokens=256)


def config(theta: float = 1e7) -> dict:
    return tiny.CONFIG | {"rope_parameters": tiny.CONFIG["rope_parameters"] | {"rope_theta": theta, "mrope_section": [1, 1, 0]}}


@pytest.fixture
def directory(tmp_path) -> Path:
    return tiny.write(tmp_path / "model", config=config())


@pytest.fixture(scope="module")
def checkpoint_engine(compile_cache, tmp_path_factory) -> Engine:
    """Of the tiny checkpoint, in a directory of its own."""
    model = load(tiny.write(tmp_path_factory.mktemp("identity") / "model", config=config()))
    return Engine(model, EngineConfig(compile_cache=compile_cache, **CHECKPOINT))


def flip_a_weight(directory):
    path = directory / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[-2] ^= 1  # the low byte of the last tensor's last number
    path.write_bytes(data)


def change_the_tokenizer(directory):
    path = directory / "tokenizer.json"
    path.write_text(path.read_text().replace("<tool_call>", "<tool_kall>"))


def change_the_template(directory):
    path = directory / "chat_template.jinja"
    path.write_text(path.read_text().replace("| trim", ""))


FILES = {
    "nothing": (lambda directory: None, set()),
    "a byte of a weight": (flip_a_weight, {"weights"}),  # E1 (reported faults)
    "tokenizer": (change_the_tokenizer, {"tokenizer"}),
    "template": (change_the_template, {"template"}),
    "no template": (lambda directory: (directory / "chat_template.jinja").unlink(), {"template"}),
    # with the programs of the other: its own would differ too
    "config": (lambda directory: (directory / "config.json").write_text(json.dumps(config(theta=1e6))), {"model.rope_theta"}),
}


@pytest.mark.parametrize("change", FILES)
def test_e1_e2_another_file_of_the_same_name(checkpoint_engine, directory, change):
    act, wanted = FILES[change]
    act(directory)
    model = load(directory)
    assert model.name == checkpoint_engine.model.name
    found = identity(model, checkpoint_engine.programs, checkpoint_engine.level)
    assert differing(of(checkpoint_engine), found) == wanted


def test_a_tokenizer_from_no_file_has_a_digest_too(tiny_engine):
    assert differing(of(tiny_engine), of(tiny_engine, tokenizer=Tokenizer(tiny.tokenizer()))) == {"tokenizer"}


@pytest.mark.parametrize("name", ["jax", "jaxlib", "numpy"])
def test_e2_another_version(tiny_engine, monkeypatch, name):
    before = of(tiny_engine)
    monkeypatch.setattr(sys.modules[name], "__version__", "0.0.1")
    found = of(tiny_engine)
    assert differing(before, found) == {name}
    assert found[name] == "0.0.1"


@pytest.mark.parametrize(
    ("option", "value", "field"),
    [("jax_default_matmul_precision", "tensorfloat32", "jax_default_matmul_precision"), ("jax_optimization_level", "O1", "optimization_level")],
)
def test_an_option_of_jax(tiny_engine, option, value, field):
    default, before = getattr(jax.config, option), of(tiny_engine)
    jax.config.update(option, value)
    try:
        found = of(tiny_engine)
    finally:
        jax.config.update(option, default)
    assert differing(before, found) == {field}


def test_a_program_that_is_lowered_otherwise(tiny_engine, compile_cache, monkeypatch):
    """As by an option of JAX that nobody thought of."""
    monkeypatch.setattr(qwen3_5, "final_norm", lambda c, params, x, norm=qwen3_5.final_norm: norm(c, params, x) + np.zeros((), x.dtype))
    assert differing(of(tiny_engine), of(started(compile_cache))) == {"programs"}


ELSEWHERE = """
import json, sys
from pathlib import Path
import qjax, storage
from qjax.config import EngineConfig
from qjax.engine import Engine
from qjax.model.source import load
assert {Path(p.__file__).parents[1] for p in (qjax, storage)} == {Path.cwd()}
engine = Engine(load(sys.argv[1]), EngineConfig(compile_cache=Path(sys.argv[2]), **json.loads(sys.argv[3])))
print(json.dumps([engine.identity, engine.golden]))
"""


class Tree:
    """A copy of this tree, in which processes start an engine of a checkpoint."""

    def __init__(self, root: Path, compile_cache: Path):
        self.root, self._compile_cache = root, compile_cache

    def engine(self, directory: Path, commented: str | None = None, **environment) -> tuple[dict[str, str], str]:
        """Its identity and golden digest. commented: a file that has one comment more meanwhile, without it one that is no source."""
        command = [sys.executable, "-c", ELSEWHERE, directory, self._compile_cache, json.dumps(CHECKPOINT)]
        path = self.root / (commented or "README.md")
        before = path.read_bytes()
        path.write_bytes(before + b"# \n")
        done = subprocess.run(command, cwd=self.root, env=os.environ | environment, capture_output=True, text=True, timeout=300, check=False)
        path.write_bytes(before)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)


@pytest.fixture(scope="module")
def tree(compile_cache):
    with copied() as root:
        yield Tree(root, compile_cache)


@pytest.fixture(scope="module")
def plain(tree, tmp_path_factory) -> tuple[dict[str, str], str]:
    """What a process finds where nothing is changed."""
    return tree.engine(tiny.write(tmp_path_factory.mktemp("plain") / "model", config=config()))


def test_another_process_finds_the_same(plain, tree, directory, checkpoint_engine):
    """Also with the checkpoint in another place."""
    assert tree.engine(directory) == plain
    assert differing(of(checkpoint_engine), plain[0]) == {"source"}  # a constant here
    assert checkpoint_engine.golden == plain[1]


PROCESSES = {
    "XLA flags": ({"XLA_FLAGS": "--xla_cpu_prefer_vector_width=128 --xla_dump_max_hlo_modules=7"}, {"xla_cpu_prefer_vector_width"}),
    "threads": ({"PJRT_NPROC": "5"}, set()),
    "source": ({"commented": "qjax/sampling.py"}, {"source"}),
    "source of storage": ({"commented": "storage/lock.py"}, {"source"}),
}


@pytest.mark.parametrize("change", PROCESSES)
def test_e2_another_process(plain, tree, directory, change):
    """XLA's flags, the package's source."""
    options, wanted = PROCESSES[change]
    found, _ = tree.engine(directory, **options)
    assert differing(plain[0], found) == wanted


def test_names_of_source_files_count(tmp_path):
    (tmp_path / "one").mkdir()
    (tmp_path / "one" / "a.py").write_text("x = 1\n")
    (tmp_path / "one" / "a.txt").write_text("x")
    before = source([tmp_path / "one"])
    (tmp_path / "one" / "a.txt").write_text("y")
    assert source([tmp_path / "one"]) == before
    (tmp_path / "one" / "a.py").rename(tmp_path / "one" / "b.py")
    assert source([tmp_path / "one"]) != before


X86 = """processor\t: 0
vendor_id\t: GenuineIntel
cpu family\t: 6
model\t\t: 143
model name\t: Intel(R) Xeon(R)
stepping\t: 8
flags\t\t: fpu mmx sse2 ssse3 fma avx2 {0}

processor\t: 1
model\t\t: 7
flags\t\t: fpu
"""


def test_processor(tmp_path):
    """What a new kernel reports besides is no other processor; another vector unit is."""
    file = tmp_path / "cpuinfo"
    found = []
    for more in ("", "ibrs_enhanced", "avx512_bf16"):
        file.write_text(X86.format(more))
        found.append(processor(file))
    assert found[:2] == [("GenuineIntel 6 143 8 Intel(R) Xeon(R)", "avx2 fma sse2 ssse3")] * 2
    assert found[2] == (found[0][0], "avx2 avx512_bf16 fma sse2 ssse3")
    file.write_text("processor\t: 0\nFeatures\t: fp asimd sve\nCPU implementer\t: 0x41\nCPU part\t: 0xd40\n")
    assert processor(file) == ("0x41 0xd40", "asimd fp sve")
    assert processor(tmp_path / "none")[0]


def test_xla_flags():
    text = 'head   \nxla_one: true\nxla_list: A\nxla_list: B\nxla_map {\n  key: "k"\n  value: "1"\n}\nxla_dump_to: "/tmp"\n'
    assert xla_flags(text) == {"xla_one": "true", "xla_list": "A B", "xla_map": '{ key: "k" value: "1" }'}
    assert xla_flags("another   form:\n 1") == {"XLA flags": "another form: 1"}
