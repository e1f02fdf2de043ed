"""Dialogues with facts given early and asked for later, tool calls and thinking blocks, rendered with the shipped chat template.

A value that the assistant must recall is wrapped in two private-use marks; they are cut out after rendering and become loss weights.
Everything is a function of one `random.Random`.
"""

import functools
import json
import pathlib

import jinja2
import jinja2.ext
import jinja2.sandbox

from training import grammar

EMBEDDED = pathlib.Path(__file__).resolve().parent.parent / "qjax" / "embedded"
OPEN, CLOSE = "\ue000", "\ue001"
PERSONAS = ("You are a helpful assistant.", "You answer briefly.", "You are a careful agent.", "You keep facts in mind.", "You help a small team.")
STATE = (
    "The {n} is {v}.", "The {n} is {v}.", "The {n} is {v}.", "My {n} is {v}.", "Our {n} is {v}.",
    "Remember that the {n} is {v}.", "Please note: the {n} is {v}.", "{n} = {v}", "{n}: {v}", "Remember this: the {n} is {v}.",
)  # fmt: skip
ASK = (
    "What is the {n}?", "What is the {n}?", "What is the {n}?", "What is my {n}?", "Tell me the {n}.", "Which {n} did I give you?",
    "Do you remember the {n}?", "Now tell me: what is the {n}?", "What was the {n}?", "I need the {n}.",
)  # fmt: skip


def tool(name, description, **fields):
    """One function definition in OpenAI's form; fields are parameter: description."""
    properties = {k: {"type": "string", "description": v} for k, v in fields.items()}
    body = {"name": name, "description": description, "parameters": {"type": "object", "properties": properties, "required": list(fields)}}
    return {"type": "function", "function": body}


TOOLS = {
    "lookup": tool("lookup", "Look up a value.", key="The name of the value."),
    "list_files": tool("list_files", "List the files of a folder.", path="The folder."),
    "read_file": tool("read_file", "Read a file.", path="The file."),
    "run": tool("run", "Run a command.", command="The command line."),
    "search": tool("search", "Search the notes.", query="The words to find."),
}


def raise_exception(message):
    """What the template calls on misuse."""
    raise jinja2.TemplateError(message)


@functools.cache
def template(path=EMBEDDED / "chat_template.jinja"):
    """The shipped template, compiled as servers compile it."""
    env = jinja2.sandbox.ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols])
    env.filters["tojson"] = lambda x, **_: json.dumps(x, ensure_ascii=False)
    env.globals["raise_exception"] = raise_exception
    return env.from_string(pathlib.Path(path).read_text(encoding="utf-8"))


def render(messages, tools=None, add_generation_prompt=False, **options):
    """The prompt text of an OpenAI-style message list."""
    return template().render(messages=messages, tools=tools, add_generation_prompt=add_generation_prompt, **options)


def mark(value):
    """A recalled value, marked."""
    return f"{OPEN}{value}{CLOSE}"


class Talk:
    """A conversation under construction. `count` gives the tokens of a text; `tokens` is a running estimate."""

    def __init__(self, rng, count, thinking, held=False):
        self.rng, self.count, self.thinking, self.held = rng, count, thinking, held
        self.messages, self.facts, self.used, self.asked, self.tokens = [], [], set(), set(), 0

    def add(self, role, content, **more):
        """Append one message."""
        self.messages.append({"role": role, "content": content, **more})
        self.tokens += self.count(content) + 6

    def say(self, content, reasoning, **more):
        """An assistant message, with its reasoning where this conversation thinks."""
        thinks = self.thinking == "all" or (self.thinking == "mixed" and self.rng.random() < 0.5)
        if thinks:
            more["reasoning_content"] = reasoning
            self.tokens += self.count(reasoning)
        self.add("assistant", content, **more)
        self.tokens += 5

    def call(self, reasoning, *calls):
        """An assistant message with tool calls (name, arguments, result), and their results."""
        content = "" if self.rng.random() < 0.7 else self.rng.choice(("Let me look.", "I will check.", "One moment."))
        self.say(content, reasoning, tool_calls=[{"type": "function", "function": {"name": n, "arguments": a}} for n, a, _ in calls])
        for _, _, result in calls:
            self.add("tool", result)
            self.tokens += 25

    def framed(self, text):
        """A request as users put it: bare, after a word of chatter, or with a word of thanks."""
        x, pick = self.rng.random(), self.rng.choice
        if x < 0.12:
            return f"{pick(('Hello.', 'Thanks.', 'Good.', 'Next question.', 'One more thing.', grammar.sentence(self.rng)))} {text}"
        return f"{text} {pick(('Thank you.', 'Please be brief.', 'I need it now.'))}" if x < 0.18 else text

    def tell(self, n):
        """The user states n new facts; the assistant acknowledges them."""
        new = [grammar.fact(self.rng, self.used, self.held) for _ in range(n)]
        lines = [self.rng.choice(STATE).format(n=name, v=value) for name, value in new]
        text = ("\n" if n > 2 else " ").join(lines)
        x, pick = self.rng.random(), self.rng.choice
        if x < 0.12:
            text = f"{pick(('Hello.', 'Thanks.', 'Here is more.', grammar.sentence(self.rng)))} {text}"
        elif x < 0.24:
            text = f"{text}{' ' if text.endswith('.') else chr(10)}{pick(('Keep it in mind.', 'Do not forget it.', 'I will ask for it later.'))}"
        self.add("user", text)
        thought = "The user gave " + ", ".join(f"{name} = {mark(value)}" for name, value in new) + "."
        if n < 3 and self.rng.random() < 0.5:
            self.say("Noted: " + " and ".join(f"the {name} is {mark(value)}" for name, value in new) + ".", thought)
        else:
            self.say("Noted.", thought)
        self.facts += new

    def ask(self, name, value):
        """The user asks for one fact."""
        self.asked.add(name)
        self.add("user", self.framed(self.rng.choice(ASK).format(n=name)))
        self.say(f"The {name} is {mark(value)}.", f"The user asks for the {name}. It is {mark(value)}.")

    def ask_any(self):
        """Ask for a told fact, more often for one that was not asked for yet or is old."""
        facts, x = self.facts, self.rng.random()
        fresh = [f for f in facts if f[0] not in self.asked]
        pool = fresh if fresh and x < 0.5 else facts[: max(1, len(facts) // 3)] if x < 0.7 else facts
        if len(facts) > 1 and self.rng.random() < 0.12:
            pair = self.rng.sample(facts, 2)
            self.add("user", f"What are the {pair[0][0]} and the {pair[1][0]}?")
            text = " ".join(f"The {name} is {mark(value)}." for name, value in pair)
            self.say(text, "The user asks for two values. " + text)
        else:
            self.ask(*self.rng.choice(pool))

    def repeat(self, n):
        """The user gives a list that the assistant copies: the densest training signal for recall."""
        pick = self.rng.choice
        makers = (lambda: pick(grammar.OWNERS), lambda: grammar.digits(self.rng), lambda: grammar.pseudo(self.rng), lambda: pick(grammar.KINDS))
        words = [pick(makers)() for _ in range(n)]
        text = pick((" ", ", ", "\n")).join(words)
        self.add("user", pick(("Repeat: ", "Say this again: ", "Copy: ")) + text)
        self.say(mark(text), "The user wants the same text again.")

    def chat(self, chars):
        """Chatter, half of it echoed."""
        text = grammar.prose(self.rng, chars)
        self.add("user", text)
        if len(text) < 90 and self.rng.random() < 0.6:
            self.say(f"You say: {mark(text)}", "The user tells me something.")
        else:
            self.say(self.rng.choice(("I see.", "All right.", "Understood.")), "There is no question here.")

    def lookup(self):
        """A value that only a tool knows; the answer repeats it and it can be asked for later."""
        name, value = grammar.fact(self.rng, self.used, self.held)
        self.add("user", self.rng.choice((f"Look up the {name}.", f"Please look up the {name}.", f"Find the {name} with the tool.")))
        result = self.rng.choice((value, value, f"{name} = {value}"))
        self.call(f"I should look up the {name}.", ("lookup", {"key": name}, result))
        self.say(f"The {name} is {mark(value)}.", f"The tool gave {mark(value)}.")
        self.facts.append((name, value))

    def fetch(self, chars):
        """The user wants a value that stands in a file among others."""
        new = [grammar.fact(self.rng, self.used, self.held) for _ in range(self.rng.choice((1, 2, 3)))]
        file, (name, value) = grammar.path(self.rng), self.rng.choice(new)
        self.add("user", f"Read {file} and tell me the {name}.")
        text = grammar.settings(self.rng, new) + "\n" + grammar.prose(self.rng, chars)
        self.call(f"I should read {file}.", ("read_file", {"path": file}, text))
        self.say(f"The {name} is {mark(value)}.", f"The file gives {name} = {mark(value)}.")
        self.facts += new

    def job(self, chars):
        """One piece of an agent's work: (request, what was done, tool, arguments, a result of about `chars` characters)."""
        rng, kind = self.rng, self.rng.randrange(4)
        if kind == 0:
            folder = rng.choice(grammar.FOLDERS)
            return f"list the files in {folder}", f"listed {folder}", "list_files", {"path": folder}, grammar.listing(rng, chars)
        if kind == 1:
            file, text = grammar.path(rng), rng.choice((grammar.prose, grammar.code, grammar.code))(rng, chars)
            if rng.random() < 0.2:
                new = [grammar.fact(rng, self.used, self.held) for _ in range(rng.choice((1, 2, 4)))]
                self.facts += new
                text = grammar.settings(rng, new) + "\n" + text
            return f"{rng.choice(('read', 'read', 'open'))} {file}", f"read {file}", "read_file", {"path": file}, text
        if kind == 2:
            command = f"{rng.choice(('make', 'pytest', 'python', 'ls', 'grep'))} {rng.choice(grammar.FILES)}"
            return f"run {command}", f"run {command}", "run", {"command": command}, grammar.log(rng, chars)
        words = f"{rng.choice(grammar.FILES)} {rng.choice(grammar.FILES)}"
        request = rng.choice((f"search for {words}", f"search the notes for {words}"))
        return request, f"searched for {words}", "search", {"query": words}, grammar.prose(rng, chars)

    def work(self, chars):
        """One or two jobs, the second in a later step or in a parallel call, and a short closing remark."""
        rng = self.rng
        jobs = [self.job(chars)] if rng.random() < 0.75 else [self.job(chars // 2), self.job(chars // 2)]
        text = " and ".join(job[0] for job in jobs)
        self.add("user", self.framed(rng.choice((text[0].upper() + text[1:], text[0].upper() + text[1:], f"Please {text}", f"Now {text}")) + "."))
        if rng.random() < 0.4:
            self.call(f"I should {text}.", *(job[2:] for job in jobs))
        else:
            for job in jobs:
                self.call(f"I should {job[0]}.", job[2:])
        self.say(f"I have {' and '.join(job[1] for job in jobs)}.", "The work is done.")


def begin(rng, count, held=False, tools=False, thinking=None):
    """A new Talk and its rendering options (tools, reasoning_effort)."""
    talk = Talk(rng, count, thinking or rng.choice(("all", "all", "none", "none", "mixed")), held)
    options = {}
    if tools:
        options["tools"] = list(TOOLS.values()) if rng.random() < 0.5 else rng.sample(list(TOOLS.values()), 5)
        talk.tokens += 330
    if rng.random() < 0.85:
        text = rng.choice(PERSONAS) if rng.random() < 0.6 else " ".join(rng.sample(PERSONAS, 2))
        talk.add("system", text if rng.random() < 0.75 or not tools else f"{text}\n{grammar.prose(rng, rng.choice((100, 300, 600)))}")
    if rng.random() < 0.1:
        options["reasoning_effort"] = rng.choice(("low", "xhigh"))
    if talk.thinking == "none":
        options["enable_thinking"] = False
    return talk, options


def conversation(rng, length, stage, count, held=False):
    """One training conversation of at least `length` tokens by estimate. stage 0: copy and recall; 1: tools and chatter too; 2: long outputs."""
    tools = stage == 2 or (stage == 1 and length >= 512 and rng.random() < 0.6)
    talk, options = begin(rng, count, held=held, tools=tools)
    talk.tell(rng.choice((1, 2, 3, 4)) if stage else rng.choice((1, 2, 2, 3)))
    while talk.tokens < length:
        x, late = rng.random(), talk.tokens > 0.7 * length
        if stage == 0:
            step = "ask" if x < 0.4 else "tell" if x < 0.6 else "repeat"
        elif stage == 1:
            step = "ask" if x < 0.45 else "tell" if x < 0.65 else "repeat" if x < 0.75 else "chat" if x < 0.88 or not tools else "lookup"
        elif late:
            step = "ask" if x < 0.75 else "lookup" if x < 0.82 else "fetch" if x < 0.85 else "work" if x < 0.92 else "tell"
        else:
            steps = ("ask", 40), ("tell", 15), ("lookup", 8), ("fetch", 4), ("work", 20), ("chat", 9), ("repeat", 4)
            step = rng.choices([s[0] for s in steps], [s[1] for s in steps])[0]
        if step == "ask":
            talk.ask_any()
        elif step == "tell":
            talk.tell(rng.choice((1, 1, 2, 3)))
        elif step == "repeat":
            talk.repeat(rng.randint(3, 12))
        elif step == "chat":
            talk.chat(rng.choice((30, 30, 60, 200)))
        elif step == "lookup":
            talk.lookup()
        elif step == "fetch":
            talk.fetch(rng.choice((30, 100, 300)))
        else:
            talk.work(rng.choice((60, 150, 300, 700)) if length <= 1024 else rng.choice((60, 200, 500, 1200)))
    return talk, options


def probe(rng, distance, count, thinking=False, facts=4):
    """A held-out recall test: facts, at least `distance` tokens of an agent's work, then one question. -> (messages, options, name, value)."""
    talk, options = begin(rng, count, held=True, tools=True, thinking="all" if thinking else "none")
    options.pop("reasoning_effort", None)
    talk.tell(1)
    for _ in range(facts - 1):
        talk.tell(1)
    name, value = talk.facts[rng.randrange(len(talk.facts))]
    start = talk.tokens
    while 0.91 * (talk.tokens - start) < distance:  # the estimate is up to 9 % too high
        x = rng.random()
        if x < 0.65:
            talk.work(rng.choice((100, 300, 700, 1500)) if distance > 500 else 60)
        elif x < 0.8:
            talk.chat(rng.choice((30, 60, 200)))
        elif x < 0.9:
            talk.lookup()
        else:
            talk.tell(1)
    talk.add("user", rng.choice(ASK).format(n=name))
    return talk.messages, options, name, value
