"""What the model is to say, where a prompt says it.

A user message may hold `##[STEP, STEP, ...]##`, a STEP being {"reasoning": TEXT, "content": TEXT, "tools": [[NAME, {ARGUMENT: VALUE}], ...]}
with any of the three. The first step is the answer to that message, the next one the answer that follows the results of the first
one's calls, and so on. So a script belongs to its turn whatever requests come between. A request without tools, a title or a
summary of a conversation, quotes other requests' scripts and follows none.
"""

import json
import re
from collections.abc import Sequence

from tests.serving.talk import call

SCRIPT = re.compile(r"##(\[.*\])##", re.DOTALL)
MESSAGE = re.compile(r"<\|im_start\|>(system|user|assistant)\n(.*?)(?:<\|im_end\|>\n|\Z)", re.DOTALL)


def scripted(text: str, *steps: dict) -> str:
    """A message with its script."""
    return f"{text} ##{json.dumps(steps)}##"


def step(content: str = "", tools: Sequence[tuple[str, dict]] = (), reasoning: str = "It is clear what to do.") -> dict:
    return {"reasoning": reasoning, "content": content, "tools": [list(tool) for tool in tools]}


def answer(prompt: str) -> str | None:
    """The text of the answer to a rendered prompt, without the token that ends it; None where no script has one."""
    messages = [(role, text) for role, text in MESSAGE.findall(prompt)]
    if "<tools>" not in messages[0][1]:
        return None
    asked = [i for i, (role, text) in enumerate(messages) if role == "user" and not text.startswith("<tool_response>")][-1]
    found = SCRIPT.search(messages[asked][1])
    said = len(messages) - asked - 1  # answers and tool results after it; the last one is being written
    steps = json.loads(found[1]) if found else []
    if said // 2 >= len(steps):
        return None
    return _text(steps[said // 2], opened=messages[-1][1].endswith("<think>\n"))


def _text(step: dict, opened: bool) -> str:
    """As the template writes it, from where the prompt ends."""
    parts = [step["content"], "\n".join(call(name, arguments) for name, arguments in step["tools"])]
    return (f"{step['reasoning']}\n</think>\n\n" if opened else "") + "\n\n".join(part for part in parts if part)
