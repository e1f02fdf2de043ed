"""What a server does with the body of a chat request before the engine has it: CPU milliseconds of each part, for an agent's long conversation.

    python -m benchmarks.prompts [--model DIRECTORY] [--tokens 32768] [--messages 40 400] [--rounds 50] [--json]

The last answer is on record and a tool's result is new, as in every step of an agent. A part is timed alone, on what the parts before it made;
`whole` is all of them, and `first` the same where nothing was sent before. A model is its tokenizer.json and its chat_template.jinja.
"""

import argparse
import json
import random
import statistics
import time
import types
from collections.abc import Callable
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from qjax.model.source import EMBEDDED
from qjax.model.template import Guard, Template
from qjax.model.tokenizer import Tokenizer
from qjax.serving.align import Answer
from qjax.serving.limits import Limits, read
from qjax.serving.parse import parse_whole
from qjax.serving.pieces import Pieces
from qjax.serving.prompts import Prompts
from qjax.serving.records import Chain
from qjax.serving.render import messages_of
from qjax.serving.schema import ChatRequest
from qjax.serving.validation import validated

WORDS = (
    "the file was read and its function returns a list of values which the caller writes into another table so that each row has "
    "one name def class return self import path open line error test value index for while if else not None True result < >"
).split()
TOOLS, KEYS = 10, ("path", "mode", "text")


def body(messages: int, words: int) -> dict:
    """A request with that many messages: a question every eighth, between them calls and results of so many words. It ends with a result."""
    source = random.Random(0)

    def text(count: int) -> str:
        return " ".join(source.choices(WORDS, k=count))

    said = [{"role": "system", "content": text(300)}]
    while len(said) < messages:
        at, thought = len(said), {"role": "assistant", "reasoning_content": text(words // 2)}
        arguments = json.dumps({"path": "src/a.py", "mode": "read", "text": text(words // 4)})
        call = {"id": f"call_{at}", "type": "function", "function": {"name": "tool_1", "arguments": arguments}}
        if at % 8 == 1:
            said.append({"role": "user", "content": text(words)})
        elif at % 2:
            said.append({"role": "tool", "tool_call_id": f"call_{at - 1}", "content": text(words)})
        else:
            said.append(thought | ({"content": text(words // 2)} if at % 8 == 0 else {"content": "", "tool_calls": [call]}))
    fields = {key: {"type": "string", "description": text(10)} for key in KEYS}
    functions = [{"name": f"tool_{i}", "description": text(60), "parameters": {"type": "object", "properties": fields}} for i in range(TOOLS)]
    return {"messages": said, "tools": [{"type": "function", "function": function} for function in functions], "stream": True}


def sized(prompts: Prompts, messages: int, tokens: int) -> dict:
    """The longest of these bodies that has at most so many tokens."""
    least, most = 4, tokens
    while most - least > 1:
        words = (least + most) // 2
        size = prompts.prompt(validated(ChatRequest, body(messages, words)), ask=False).tokens.size
        least, most = (words, most) if size <= tokens else (least, words)
    return body(messages, least)


def answered(prompts: Prompts, tokenizer: Tokenizer, asked: dict) -> None:
    """Puts the last answer of a body on record, in the tokens that the template writes it with."""
    before = prompts.prompt(validated(ChatRequest, asked | {"messages": asked["messages"][:-2]}))
    after = prompts.prompt(validated(ChatRequest, asked | {"messages": asked["messages"][:-1]}), ask=False)
    closing = np.flatnonzero(after.tokens == tokenizer.special["<|im_end|>"])[-1]
    tokens = after.tokens[before.tokens.size : closing]
    parsed = parse_whole(tokenizer.decode(tokens), True, before.tools, str)
    prompts.keep(before, Answer(tokens, parsed.spans, parsed.calls))


def timed(act: Callable[[], object], rounds: int) -> float:
    """The median, in milliseconds of this thread: others may be at work on the machine."""
    found = []
    for _ in range(rounds):
        begin = time.thread_time()
        act()
        found.append(1e3 * (time.thread_time() - begin))
    return statistics.median(found)


def measure(tokenizer: Tokenizer, template: Template, tokens: int, messages: int, rounds: int) -> dict:
    prompts = Prompts(types.SimpleNamespace(name="", template=template, tokenizer=tokenizer))
    asked = sized(prompts, messages, tokens)
    prompts.clear()
    sent = json.dumps(asked).encode()
    chat = validated(ChatRequest, asked)
    rendered, tools = messages_of(chat.messages), chat.tools
    guard, chain, pieces = Guard(tokenizer.special, template.source), Chain(True), Pieces(template, tokenizer, 2**30)

    def whole():
        return prompts.prompt(validated(ChatRequest, read(sent, Limits())))

    def first():
        prompts.clear()
        whole()

    found = {"first": timed(first, max(3, rounds // 10))}
    prompts.clear()
    answered(prompts, tokenizer, asked)
    prompt = whole()
    assert prompt.aligned.matched == messages - 2, prompt.aligned.parted
    pieces.render(rendered, tools, {})
    found["whole"] = timed(whole, rounds)
    parts = {
        "json": lambda: read(sent, Limits()),
        "schema": lambda: validated(ChatRequest, asked),
        "roles": lambda: messages_of(chat.messages),
        "guard": lambda: guard.put({"messages": rendered, "tools": tools}),
        "template": lambda: template.parts(rendered, tools),
        "render": lambda: pieces.render(rendered, tools, {}),
        "keys": lambda: chain.keys(chain.start("", tools, {}), rendered),
        "prompt": lambda: prompts.prompt(chat),
    }
    return {"messages": messages, "tokens": int(prompt.tokens.size), "bytes": len(sent)} | found | {k: timed(act, rounds) for k, act in parts.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=EMBEDDED, help="the directory of a checkpoint (default: the embedded one)")
    parser.add_argument("--tokens", type=int, default=32_768)
    parser.add_argument("--messages", type=int, nargs="+", default=[40, 400], help="even numbers (default 40 400)")
    parser.add_argument("--rounds", type=int, default=50)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    tokenizer = Tokenizer.from_directory(args.model)
    template = Template((args.model / "chat_template.jinja").read_text(encoding="utf-8"), tokenizer)
    found = [measure(tokenizer, template, args.tokens, messages, args.rounds) for messages in args.messages]
    if args.json:
        print(json.dumps(found))
        return
    table = Table("", *(f"{one['messages']:,} messages" for one in found), box=None, header_style="bold", pad_edge=False)
    for name in list(found[0])[1:]:
        table.add_row(name, *(f"{one[name]:.2f} ms" if isinstance(one[name], float) else f"{one[name]:,}" for one in found))
    Console().print(table)


if __name__ == "__main__":
    main()
