"""`qjax convert` on the embedded checkpoint, and how it refuses."""

import shutil

import jax

from qjax.cli import main
from qjax.model import source
from tests.bits import assert_bits_equal


def test_converts_and_says_so(tmp_path, capsys):
    target = tmp_path / "converted"
    assert main(["convert", str(source.EMBEDDED), str(target)]) == 0
    model, expected = source.load(str(target)), source.load("embedded")
    assert_bits_equal(model.params, expected.params)
    shown = capsys.readouterr().out
    size = sum(x.nbytes for x in jax.tree.leaves(expected.params))
    assert f"{target}: {size:,} bytes of weights, read back bit for bit\n" in shown
    assert main(["convert", str(source.EMBEDDED), str(target)]) == 2
    assert capsys.readouterr().err.startswith(f"qjax: error: {target}: expected a new or an empty directory")


def test_wrong_sources_are_one_line(tmp_path, capsys):
    assert main(["convert", str(tmp_path / "nothing"), str(tmp_path / "to")]) == 2
    broken = shutil.copytree(source.EMBEDDED, tmp_path / "broken")
    weights = broken / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-7])
    assert main(["convert", str(broken), str(tmp_path / "to")]) == 2
    errors = capsys.readouterr().err.splitlines()
    assert [line.startswith("qjax: error: ") for line in errors] == [True, True]
    assert "truncated" in errors[1]
    assert not (tmp_path / "to").exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["broken"]
