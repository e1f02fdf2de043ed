"""The demo's conversations: a coding agent that reads files and logs. Facts are told early and asked for late.

The phrasings are those that the embedded model was trained on. Everything is a function of SEED and the length.
"""

import random
from collections.abc import Callable

SEED = 7
THINKING = False
SYSTEM = "You are a careful agent. You keep facts in mind."
FACTS = (("deploy code", "4417"), ("backup key", "90263"), ("release branch color", "teal"))
TOLD = "The {name} is {value}."
NOTED = "Noted: the {name} is {value}."
ASKED = "What is the {name}?"
ANSWERED = "The {name} is {value}."
FIRST = FACTS[1]
"""Asked for at the end of the first prompt."""
READ = ("notes/plan.txt", ("staging port", "5821"), (("staging port", "5821"), ("mail login", "30774")))
"""The next turn: a file, the value that is wanted of it, and all values that stand in it."""
GUEST = ("door code", "2290")
OTHER = (("test server", "violet"), ("license number", "66125"))
"""The facts of the second session, of which the first is asked for."""
BACK = FACTS[0]
"""Asked for when the first session comes back; told in its first message."""
MORE, EDITED = ("mail server", "8306"), ("mail server", "1759")
"""Told in the middle of the long turn, and what the edit makes of it."""

AFTER = FIRST
"""Asked for again after the restart."""

FOLDERS = "src tests docs notes data tools build core web config".split()
FILES = "main util reader writer parser model table index cache queue server client report plan".split()
ENDINGS = "py md txt json log toml".split()
SUBJECTS = "the worker|the server|the client|a user|the team|the engine|the parser|the writer|the reader".split("|")
VERBS = "reads|writes|keeps|moves|checks|loads|sends|counts|opens|closes|finds|holds|sorts|copies|drops|joins".split("|")
OBJECTS = "the file|a page|the list|every line|the table|some rows|the cache|a block|the index|the letter".split("|")
TAILS = "in the morning|at night|with care|again|without delay|before the next step|for the team|on every run|once a day".split("|")
EVENTS = "request done|cache hit|cache miss|page loaded|worker started|worker stopped|retry later|block written|queue empty|lease renewed".split("|")


def _tool(name: str, description: str, key: str, meaning: str) -> dict:
    properties = {key: {"type": "string", "description": meaning}}
    parameters = {"type": "object", "properties": properties, "required": [key]}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


TOOLS = [
    _tool("list_files", "List the files of a folder.", "path", "The folder."),
    _tool("read_file", "Read a file.", "path", "The file."),
    _tool("run", "Run a command.", "command", "The command line."),
    _tool("search", "Search the notes.", "query", "The words to find."),
]


def user(text: str) -> dict:
    return {"role": "user", "content": text}


def agent(text: str) -> dict:
    return {"role": "assistant", "content": text}


def call(name: str, key: str, value: str, result: str) -> list[dict]:
    """A tool call of the agent and its result."""
    function = {"name": name, "arguments": {key: value}}
    return [agent("") | {"tool_calls": [{"type": "function", "function": function}]}, {"role": "tool", "content": result}]


def asked(fact: tuple[str, str]) -> dict:
    return user(ASKED.format(name=fact[0]))


def answered(fact: tuple[str, str]) -> str:
    return ANSWERED.format(name=fact[0], value=fact[1])


def told(facts: tuple[tuple[str, str], ...]) -> list[dict]:
    """Messages that tell facts, each noted."""
    return [m for name, value in facts for m in (user(TOLD.format(name=name, value=value)), agent(NOTED.format(name=name, value=value)))]


def history(count: Callable[[list[dict]], int], tokens: int, facts=FACTS, seed: int = SEED) -> list[dict]:
    """The messages before the first question: the facts, then as many steps of work as make `count` of the messages reach `tokens`."""
    rng = random.Random(seed)
    messages = told(facts)
    while count(messages) < tokens:
        messages += _work(rng)
    return messages


def second_turn() -> list[dict]:
    """A request, the tool call that it leads to, and the file that the tool gives."""
    path, (name, _), values = READ
    text = "\n".join(f"{name} = {value}" for name, value in values) + "\n" + _prose(random.Random(f"{SEED}/second"), 600)
    return _fetch(path, name, text)


def more_work(count: Callable[[list[dict]], int], tokens: int, fact: tuple[str, str]) -> list[dict]:
    """Steps of work that make `count` of the messages reach `tokens`, a fact told in their middle, and the question for it.

    At least half of the tokens are before the fact.
    """
    rng = random.Random(f"{SEED}/more")
    messages = _work(rng)
    while count(messages) < tokens // 2:
        messages += _work(rng)
    messages += told((fact,))
    while count(messages) < tokens:
        messages += _work(rng)
    return [*messages, asked(fact)]


def _fetch(path: str, name: str, text: str) -> list[dict]:
    return [user(f"Read {path} and tell me the {name}."), *call("read_file", "path", path, text)]


def _work(rng: random.Random) -> list[dict]:
    """One piece of work: what the user wants, the tool call, the agent's report."""
    size, pick = rng.choice((300, 700, 1200)), rng.choice
    kind = pick(("list", "read", "read", "run", "search"))
    if kind == "list":
        folder = pick(FOLDERS)
        step = call("list_files", "path", folder, _lines(rng, size, _entry))
        return [user(f"List the files in {folder}."), *step, agent(f"I have listed {folder}.")]
    if kind == "read":
        path = _path(rng)
        step = call("read_file", "path", path, pick((_prose, _code))(rng, size))
        return [user(f"Read {path}."), *step, agent(f"I have read {path}.")]
    if kind == "run":
        command = f"{pick(('make', 'pytest', 'grep'))} {pick(FILES)}"
        step = call("run", "command", command, _lines(rng, size, _event))
        return [user(f"Run {command}."), *step, agent(f"I have run {command}.")]
    words = f"{pick(FILES)} {pick(FILES)}"
    step = call("search", "query", words, _prose(rng, size))
    return [user(f"Search for {words}."), *step, agent(f"I have searched for {words}.")]


def _lines(rng: random.Random, size: int, line: Callable[[random.Random, int], str]) -> str:
    """About `size` characters of lines; line(rng, number)."""
    out = []
    while sum(map(len, out)) < size:
        out.append(line(rng, len(out)))
    return "\n".join(out)


def _path(rng: random.Random) -> str:
    return f"{rng.choice(FOLDERS)}/{rng.choice(FILES)}.{rng.choice(ENDINGS)}"


def _entry(rng: random.Random, number: int) -> str:
    return f"{_path(rng)} {rng.randrange(1, 99)} kB"


def _event(rng: random.Random, number: int) -> str:
    took = f" in {rng.randrange(2, 900)} ms" if rng.random() < 0.4 else ""
    return f"{8 + number // 60:02d}:{number % 60:02d} {rng.choice(('INFO', 'INFO', 'DEBUG', 'WARN'))} {rng.choice(FILES)}: {rng.choice(EVENTS)}{took}"


def _sentence(rng: random.Random, number: int) -> str:
    tail = f" {rng.choice(TAILS)}" if rng.random() < 0.6 else ""
    text = f"{rng.choice(SUBJECTS)} {rng.choice(VERBS)} {rng.choice(OBJECTS)}{tail}."
    return text[0].upper() + text[1:]


def _prose(rng: random.Random, size: int) -> str:
    return _lines(rng, size, _sentence).replace("\n", " ")


def _code(rng: random.Random, size: int) -> str:
    def function(rng: random.Random, number: int) -> str:
        head = f"def {rng.choice(FILES)}_{rng.choice(FILES)}(rows, limit={rng.randrange(2, 64)}):"
        return f'{head}\n    """{_sentence(rng, 0)}"""\n    out = [{rng.choice(VERBS)}(row) for row in rows[:limit]]\n    return out\n'

    return _lines(rng, size, function)
