"""The command line: flags are the settings' own, examples parse, and wrong input, Ctrl-C and a closed pipe end as they should."""

import dataclasses
import importlib
import os
import shlex
import subprocess
import sys
import types

import pytest

from qjax import cli
from qjax.sampling import Sampling


def stand_in(monkeypatch, run):
    monkeypatch.setitem(sys.modules, "qjax.commands.layout", types.SimpleNamespace(run=run))


def raising(error):
    def run(args):
        raise error

    return run


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_every_command_can_run(name):
    assert callable(importlib.import_module(f"qjax.commands.{name}").run)


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_examples_in_the_help_parse(name, capsys):
    with pytest.raises(SystemExit) as end:
        cli.main([name, "--help"])
    assert end.value.code == 0
    shown = capsys.readouterr().out
    for example in cli.COMMANDS[name][2]:
        assert f"  {example}\n" in shown
        words = shlex.split(example.split("|")[-1])
        assert words[0] == "qjax"
        assert cli.parser().parse_args(words[1:]).command == name


def test_the_list_of_commands_says_what_each_does(capsys):
    with pytest.raises(SystemExit):
        cli.main(["--help"])
    shown = " ".join(capsys.readouterr().out.split())
    assert all(what in shown for what, _, _ in cli.COMMANDS.values())


def test_sampling_flags_are_the_fields_of_sampling():
    assert set(cli.SAMPLING) == {field.name for field in dataclasses.fields(Sampling)}
    args = cli.parser().parse_args(["generate", "--top-k", "3", "--temperature", "0.5", "--seed", "9"])
    assert Sampling(**cli.sampling_flags(args)) == Sampling(temperature=0.5, top_k=3, seed=9)
    assert cli.sampling_flags(cli.parser().parse_args(["chat"])) == {}


def test_status_is_the_commands(monkeypatch):
    stand_in(monkeypatch, lambda args: 7 if args.model == "a" else 0)
    assert cli.main(["layout", "a"]) == 7
    assert cli.main(["layout", "b"]) == 0


@pytest.mark.parametrize("error", [ValueError("no such preset: 3b"), FileNotFoundError(2, "No such file or directory", "model")])
def test_wrong_input_is_one_line(monkeypatch, capsys, error):
    stand_in(monkeypatch, raising(error))
    assert cli.main(["layout", "a"]) == 2
    assert capsys.readouterr() == ("", f"qjax: error: {error}\n")
    with pytest.raises(type(error)):
        cli.main(["--debug", "layout", "a"])


def test_faults_of_the_program_are_not_hidden(monkeypatch):
    stand_in(monkeypatch, raising(TypeError("a fault")))
    with pytest.raises(TypeError, match="a fault"):
        cli.main(["layout", "a"])


def test_interrupt(monkeypatch, capsys):
    stand_in(monkeypatch, raising(KeyboardInterrupt()))
    assert cli.main(["layout", "a"]) == 130
    assert capsys.readouterr().err.endswith("qjax: interrupted; nothing that was saved is lost\n")


@pytest.mark.parametrize("argv", [[], ["nonsense"], ["layout"], ["generate", "--top-k", "many"], ["bench"], ["chat", "--seed"]])
def test_unknown_arguments_end_with_2(argv, capsys):
    with pytest.raises(SystemExit) as end:
        cli.main(argv)
    assert end.value.code == 2
    assert "usage: qjax" in capsys.readouterr().err


@pytest.mark.parametrize("number", ["0", "-1", "1.5", "many"])
@pytest.mark.parametrize("argv", [["generate", "--max-tokens"], ["demo", "--tokens"]])
def test_counts_are_positive(argv, number, capsys):
    with pytest.raises(SystemExit) as end:
        cli.main([*argv, number])
    assert end.value.code == 2
    assert f"argument {argv[1]}: expected a whole number, at least 1, found {number!r}\n" in capsys.readouterr().err


def test_closed_pipe_is_silent():
    """As in `qjax layout random:27b | head -1`: the reader goes while there is more to write."""
    program = (
        "import sys, types\n"
        "from qjax import cli\n"
        "def run(args):\n"
        "    print('ready', flush=True)\n"
        "    sys.stdin.readline()\n"
        "    print('more', flush=True)\n"
        "sys.modules['qjax.commands.layout'] = types.SimpleNamespace(run=run)\n"
        "sys.exit(cli.main(['layout', 'a']))\n"
    )
    pipes = dict.fromkeys(["stdin", "stdout", "stderr"], subprocess.PIPE)
    with subprocess.Popen([sys.executable, "-c", program], text=True, **pipes) as process:
        assert process.stdout.readline() == "ready\n"
        process.stdout.close()
        process.stdin.write("go\n")
        process.stdin.flush()
        assert process.stderr.read() == ""
        assert process.wait() == 141


def test_version_and_lazy_commands():
    program = "import sys, qjax.cli; print(sorted(m for m in sys.modules if m.startswith('qjax.commands')))"
    assert subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout == "[]\n"
    shown = subprocess.run([sys.executable, "-m", "qjax.cli", "--version"], capture_output=True, text=True, check=True).stdout
    assert shown.startswith("qjax 0.")


def test_starts_again_tuned_once_and_with_the_same_arguments(monkeypatch):
    started = []
    monkeypatch.setattr(cli.os, "execve", lambda *arguments: started.append(arguments))
    monkeypatch.setattr(cli.sys, "platform", "linux")
    monkeypatch.setattr(cli.sys, "orig_argv", ["python", "-m", "qjax.cli", "layout", "embedded"])
    for name in ("GLIBC_TUNABLES", "PJRT_NPROC"):
        monkeypatch.setenv(name, "")  # put back afterwards, whatever tune sets
        monkeypatch.delenv(name)
    cli.tune()
    ((program, arguments, environment),) = started
    assert arguments == [program, "-m", "qjax.cli", "layout", "embedded"]
    assert environment["GLIBC_TUNABLES"] == "glibc.malloc.hugetlb=1"
    assert int(environment["PJRT_NPROC"]) == len(os.sched_getaffinity(0)) + 1
    monkeypatch.setenv("GLIBC_TUNABLES", environment["GLIBC_TUNABLES"])
    monkeypatch.setenv("PJRT_NPROC", "7")
    cli.tune()
    assert len(started) == 1
    assert os.environ["PJRT_NPROC"] == "7"  # the user's own choice stays
