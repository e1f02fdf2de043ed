"""The command line: flags are the settings' own, examples parse, and wrong input, Ctrl-C and a closed pipe end as they should."""

import contextlib
import dataclasses
import importlib
import json
import os
import shlex
import signal
import subprocess
import sys
import types

import pytest

from qjax import cli, process
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
        if words[0] == "curl":  # what a server is asked
            assert json.loads(words[-1])["messages"]
            continue
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
    heavy = "('qjax.commands', 'jax', 'numpy', 'rich')"
    program = f"import sys, qjax.cli; print(sorted(m for m in sys.modules if m.startswith({heavy})))"
    assert subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout == "[]\n"
    shown = subprocess.run([sys.executable, "-m", "qjax.cli", "--version"], capture_output=True, text=True, check=True).stdout
    assert shown.startswith("qjax 0.")


def test_starts_again_tuned_once_and_with_the_same_arguments(monkeypatch):
    started = []
    monkeypatch.setattr(process.os, "execve", lambda *arguments: started.append(arguments))
    monkeypatch.setattr(process.sys, "platform", "linux")
    monkeypatch.setattr(process.sys, "orig_argv", ["python", "-m", "qjax.cli", "layout", "embedded"])
    for name in ("GLIBC_TUNABLES", "PJRT_NPROC"):
        monkeypatch.setenv(name, "")  # put back afterwards, whatever tune sets
        monkeypatch.delenv(name)
    process.tune()
    ((program, arguments, environment),) = started
    assert arguments == [program, "-m", "qjax.cli", "layout", "embedded"]
    assert environment["GLIBC_TUNABLES"] == "glibc.malloc.hugetlb=1"
    assert int(environment["PJRT_NPROC"]) == len(os.sched_getaffinity(0)) + 1
    monkeypatch.setenv("GLIBC_TUNABLES", environment["GLIBC_TUNABLES"])
    monkeypatch.setenv("PJRT_NPROC", "7")
    process.tune()
    assert len(started) == 1
    assert os.environ["PJRT_NPROC"] == "7"  # the user's own choice stays


PRESS = """
import os, signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # also where the tests themselves run with it ignored
def press():
    signal.raise_signal(signal.SIGINT)
class Callback:
    def __del__(self):
        press()  # what is raised here, nobody sees
class Finder:
    def find_spec(self, name, path, target=None):
        if name == "jax" and {when!r} != "exec":
            press() if {when!r} == "import" else Callback()
sys.meta_path.insert(0, Finder())
start = os.execve
def again(*arguments):
    if {when!r} == "exec":
        press()
    start(*arguments)
os.execve = again
from qjax.cli import entry
sys.exit(entry())
"""


@pytest.mark.parametrize("when", ["import", "callback", "exec"])
def test_interrupt_while_it_imports(when):
    """Also in a callback, which swallows what is raised, and while the process starts itself again."""
    environment = {name: value for name, value in os.environ.items() if name != "GLIBC_TUNABLES"}
    command = [sys.executable, "-c", PRESS.format(when=when), "layout", "27b"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "\nqjax: interrupted\n")


@contextlib.contextmanager
def run_with(run: str, *, prelude: str = "", **options):
    """A process, ended whatever happens, of `qjax layout a` in which the command is this text of a function `run(args)`."""
    program = f"""
import gc, os, signal, subprocess, sys, tempfile, time, types
{prelude}
from qjax.cli import entry
{run}
sys.modules["qjax.commands.layout"] = types.SimpleNamespace(run=run)
sys.argv[1:] = ["layout", "a"]
sys.exit(entry())
"""
    pipes = dict.fromkeys(["stdin", "stdout", "stderr"], subprocess.PIPE)
    environment = os.environ | {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"} | options.pop("env", {})
    with subprocess.Popen([sys.executable, "-c", program], env=environment, **pipes, **options) as process:
        try:
            yield process
        finally:
            process.kill()


HOLDS = """
def run(args):
    with tempfile.TemporaryDirectory() as directory:
        # ends by itself only when this process has gone
        child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            print(directory, flush=True)
            time.sleep(600)
        finally:
            child.kill()
            print(child.wait(), flush=True)
"""


@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 143), (signal.SIGHUP, 129), (signal.SIGKILL, -9)])
def test_a_signal_to_end_clears_away(number, status, tmp_path):
    """SIGKILL is the control: it leaves the directory."""
    with run_with(HOLDS, prelude="signal.signal(signal.SIGHUP, signal.SIG_DFL)", env={"TMPDIR": str(tmp_path)}) as process:
        directory = process.stdout.readline().decode().strip()
        assert os.path.isdir(directory)
        process.send_signal(number)
        assert process.stdout.readline() == (b"" if number == signal.SIGKILL else b"-9\n")
        assert process.wait() == status
        assert process.stderr.read() == b""
    assert os.path.isdir(directory) == (number == signal.SIGKILL)


SWALLOWED = """
class Callback:
    def __del__(self):
        signal.raise_signal(signal.{name})
def run(args):
    Callback()
    time.sleep(600)
"""


@pytest.mark.parametrize(
    ("name", "status", "said"), [("SIGINT", 130, b"\nqjax: interrupted; nothing that was saved is lost\n"), ("SIGTERM", 143, b"")]
)
def test_a_signal_that_a_callback_swallows_comes_again(name, status, said):
    default = "signal.signal(signal.SIGINT, signal.default_int_handler)"
    with run_with(SWALLOWED.format(name=name), prelude=default) as process:
        assert process.stderr.read() == said
        assert process.wait() == status


def test_signals_are_as_before_after_a_command(monkeypatch):
    numbers = signal.SIGINT, signal.SIGTERM, signal.SIGHUP
    before, inside = [signal.getsignal(n) for n in numbers], []
    stand_in(monkeypatch, lambda args: inside.extend(signal.getsignal(n) for n in numbers) or 0)
    hook = sys.unraisablehook
    assert cli.main(["layout", "a"]) == 0
    assert [signal.getsignal(n) for n in numbers] == before
    assert inside[1] != before[1]
    assert sys.unraisablehook is hook


def test_streams_replace_what_they_cannot_hold():
    run = "def run(args):\n    print('2 × 3', sys.stdin.readline().strip())\n    print(sys.stdin.readline().strip())"
    with run_with(run, env={"PYTHONIOENCODING": "ascii"}) as process:
        out, err = process.communicate("café\nnext\n".encode())
        assert (process.returncode, out, err) == (0, b"2 ? 3 caf??\nnext\n", b"")
