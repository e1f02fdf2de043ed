"""`qjax layout`: the published byte counts through the command line, for every way to name a model, with no weights read."""

import json
import shutil

import pytest

from qjax.cli import main
from qjax.commands.layout import find
from qjax.model.qwen4_exp import PRESETS
from qjax.model.source import EMBEDDED

FLASH = PRESETS["qwen3.8-flash-next"]


def as_json(capsys, *argv) -> dict:
    assert main(["layout", *argv, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


@pytest.mark.parametrize(
    ("model", "sections", "added", "row", "grid"),
    [
        ("27b", 153_944_064, 64_094_208, 65_536, 1024),
        ("random:qwen3.8-27b", 153_944_064, 64_094_208, 65_536, 1024),
        ("random:27b@32", 76_972_032, 32_047_104, 32_768, 1024),
        ("0.8B", 19_537_920, 14_303_232, 12_288, 1024),
        ("qwen3.8-flash-next", 115_662_864, 48_070_656, 29_952, 4096),
        ("flash-next", 115_662_864, 48_070_656, 29_952, 4096),
    ],
)
def test_byte_counts(capsys, model, sections, added, row, grid):
    shown = as_json(capsys, model)
    totals = {"section_bytes": sections, "open_bytes": added, "row_bytes": row, "page_bytes": row * grid}
    assert {key: shown[key] for key in totals} == totals
    assert shown["grid"] == grid
    for group, total in (("sections", sections), ("open", added), ("views", row)):
        assert sum(leaf["bytes"] for leaf in shown[group]) == total


def test_grid_sets_the_page(capsys):
    assert as_json(capsys, "27b", "--grid", "256")["page_bytes"] == 256 * 65_536
    assert main(["layout", "27b", "--grid", "320"]) == 2
    assert capsys.readouterr().err == "qjax: error: --grid must be a multiple of 64 up to 256, or of 256, not 320\n"


def test_every_leaf_is_printed(capsys):
    leaves = as_json(capsys, "qwen3.8-flash-next")
    assert main(["layout", "qwen3.8-flash-next"]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    for leaf in leaves["sections"] + leaves["open"] + leaves["views"]:
        shape = " × ".join(map(str, leaf["shape"])).split()
        assert [leaf["name"], *shape, leaf["dtype"], f"{leaf['bytes']:,}"] in lines
    printed = {" ".join(line) for line in lines}
    assert printed >= {
        "an anchor at a line 115,662,864 (110.3 MiB)",
        "added off a line 48,070,656 (45.84 MiB)",
        "a token 29,952 (29.25 KiB)",
        "a page of 4,096 tokens 122,683,392 (117 MiB)",
    }


def test_directories_need_a_config_only(tmp_path, capsys):
    shutil.copy(EMBEDDED / "config.json", tmp_path)
    assert find(str(tmp_path)) == find("embedded")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen4_exp", "text_config": FLASH}))
    assert find(str(tmp_path)) == ("qwen4_exp", find("qwen3.8-flash-next")[1])


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"model_type": "llama"}, "model_type: expected one of qwen3_5, qwen3_5_text, found 'llama'"),
        ({"model_type": "qwen4_exp", "text_config": FLASH | {"hc_count": 0}}, "hc_count: expected a positive integer, found 0"),
    ],
)
def test_a_wrong_config_is_named(tmp_path, capsys, values, message):
    (tmp_path / "config.json").write_text(json.dumps(values))
    assert main(["layout", str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"qjax: error: {tmp_path / 'config.json'}: ")
    assert message in error


@pytest.mark.parametrize(
    ("model", "message"), [("3b", "found '3b'"), ("flash-next@8", "expected the whole model"), ("27b@0", "at least 1"), ("/nowhere", "'/nowhere'")]
)
def test_wrong_names_are_one_line(capsys, model, message):
    assert main(["layout", model]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def test_columns_stay_apart_whatever_the_sizes(capsys):
    """The largest model and page that there can be."""
    assert main(["layout", "27b@10000", "--grid", "1048576"]) == 0
    lines = capsys.readouterr().out.splitlines()
    ends = [len(line.split("  (")[0]) for line in lines if line.startswith("  ")]
    assert len(set(ends)) == 1
    leaf = next(line for line in lines if line.startswith("  gdn.S ")).split("  ")
    assert [word.strip() for word in leaf if word] == ["gdn.S", "7500 × 48 × 128 × 128", "float32", "23,592,960,000"]


@pytest.mark.parametrize("argv", [["27b", "--grid", "256000000000000000000000"], ["0.8b@99999999"], ["random:27b@99999999"]])
def test_sizes_are_bounded(capsys, argv):
    assert main(["layout", *argv]) == 2
    error = capsys.readouterr().err
    assert "at most 1" in error
    assert error.count("\n") == 1


def test_what_is_no_directory_of_a_checkpoint_is_said_in_one_short_line(tmp_path, capsys):
    path = tmp_path / "config.json"
    path.write_text("x")
    cases = [
        (str(path), f"{path}: expected a directory with a config.json, found a file"),
        ("x" * 5000, "(5,002 characters); a layout also has"),
        ("", "found ''"),
        ("27b@" + "9" * 5000, "(5,006 characters); a layout also has"),
        ("27b@999999999", "at most 10,000, found 999999999"),
    ]
    for content in ("[" * 200_000, json.dumps({"model_type": "qwen4_exp", "hidden_size": 10**400})):
        directory = tmp_path / str(len(content))
        directory.mkdir()
        (directory / "config.json").write_text(content)
        cases.append(
            (
                str(directory),
                "nested too deeply" if content[0] == "[" else "hidden_size: expected a positive integer of at most 2,147,483,647, found 1",
            )
        )
    for model, message in cases:
        assert main(["layout", model]) == 2
        shown = capsys.readouterr().err
        assert shown.startswith("qjax: error: ")
        assert message in shown
        assert len(shown) < 1200
        assert shown.count("\n") == 1
