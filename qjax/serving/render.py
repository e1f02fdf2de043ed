"""A chat request as a prompt: what clients send put into the form that a checkpoint's template takes, and its tokens."""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from qjax.boundaries import Boundaries
from qjax.model.source import Model
from qjax.serving.errors import ApiError, BadRequest
from qjax.serving.limits import Limits, check, parse
from qjax.serving.schema import AssistantMessage, Chat, Message, SystemMessage, TextPart, ToolCall, ToolMessage
from qjax.serving.thinking import OPEN, Thinking

EFFORTS = {"none": None, "minimal": "low", "low": "low", "medium": "medium", "high": "xhigh", "xhigh": "xhigh"}
"""The names that clients have for an effort -> the template's; none thinks not at all."""
TAKEN = {"self", "messages", "tools", "add_generation_prompt"}
"""Arguments of the template's that no variable may stand for."""
UNREAD = "arguments"
"""The parameter under which arguments that are no JSON object are shown to the model as they are."""
NESTED = Limits()


@dataclass(frozen=True, eq=False)
class Prompt:
    """tokens: int32 [n]. history, user: as Engine.generate takes them. opened: whether the answer begins inside the reasoning.

    messages, tools, variables: what they were rendered from.
    """

    tokens: np.ndarray
    history: int | None
    user: int | None
    opened: bool
    messages: list[dict]
    tools: list[dict] | None
    variables: dict


class Renderer:
    """Renders for one model."""

    def __init__(self, model: Model):
        self._model = model

    def prompt(self, chat: Chat) -> Prompt:
        """Raises BadRequest for what the template cannot take."""
        messages, tools, variables = messages_of(chat.messages), tools_of(chat), variables_of(chat)
        tokens = self.tokens(messages, tools, variables)
        boundaries = Boundaries(self._model.template, **variables)
        opened = self._model.tokenizer.decode(tokens[-8:]).rstrip().endswith(OPEN)
        return Prompt(tokens, boundaries.history(tokens), boundaries.user(messages, tokens), opened, messages, tools, variables)

    def tokens(self, messages: list[dict], tools: list[dict] | None, variables: dict, *, ask: bool = True) -> np.ndarray:
        """int32 [n], with the beginning of an answer where `ask`. Raises BadRequest with the template's words."""
        template = self._model.template
        if template is None:
            raise BadRequest(f"{self._model.name} has no chat template: /v1/completions continues plain text", "messages")
        try:
            return np.array(template.render(messages, tools, add_generation_prompt=ask, **variables), np.int32)
        except ValueError as e:
            raise BadRequest(str(e)[:300]) from None


def messages_of(messages: Iterable[Message]) -> list[dict]:
    """Messages as a template takes them: contents as texts, one system message and that first, reasoning under `reasoning_content`.

    The texts of several system and developer messages are joined in their order. BadRequest where there is no user message.
    """
    system, rest = [], []
    for message in messages:
        if isinstance(message, SystemMessage):
            system.append(text_of(message.content))
        else:
            rest.append(_message(message))
    if not any(message["role"] == "user" for message in rest):
        raise BadRequest("expected a message of the user, found none", "messages")
    system = [text for text in system if text.strip()]
    return [{"role": "system", "content": "\n\n".join(system)}, *rest] if system else rest


def tools_of(chat: Chat) -> list[dict] | None:
    """The tools that the prompt has, as they were sent. tool_choice none leaves them out, since no drawn token could be held to it."""
    return chat.tools if chat.tools and chat.tool_choice != "none" else None


def variables_of(chat: Chat) -> dict:
    """The template's further variables. BadRequest for an effort that nobody knows, or a variable that is none."""
    fields = {name: getattr(chat, name) for name in ("reasoning_effort", "enable_thinking", "preserve_thinking")}
    given = {name: value for name, value in (fields | _set(chat.chat_template_kwargs or {})).items() if value is not None}
    for name in given:
        if name in TAKEN or not name.isidentifier():
            raise BadRequest("a name of chat_template_kwargs is no variable of a template", "chat_template_kwargs")
    for name in ("enable_thinking", "preserve_thinking"):
        if not isinstance(given.get(name, True), bool):
            raise BadRequest(f"{name}: expected true or false", name)
    effort = given.pop("reasoning_effort", None)
    if effort is not None:
        if not isinstance(effort, str) or effort not in EFFORTS:
            raise BadRequest(f"reasoning_effort: expected {', '.join(EFFORTS)}, found another", "reasoning_effort")
        if EFFORTS[effort] is None:
            given.setdefault("enable_thinking", False)
        elif given.get("enable_thinking", True):
            given["reasoning_effort"] = EFFORTS[effort]
    return given


def text_of(content: str | list[TextPart] | None) -> str:
    """Parts have nothing between them, as in the template."""
    return content if isinstance(content, str) else "".join(part.text for part in content or ())


def arguments_of(arguments: str | dict | None) -> dict:
    """A call's arguments as an object, which they may be JSON of; what is neither becomes the one argument `arguments`."""
    if isinstance(arguments, dict):
        return arguments
    if not arguments or not arguments.strip():
        return {}
    try:
        found = parse(arguments)
        if isinstance(found, dict):
            check(found, NESTED)
            return found
    except (ValueError, RecursionError, ApiError):
        pass
    return {UNREAD: arguments}


def _message(message: Message) -> dict:
    body = {"role": message.role, "content": text_of(message.content)}
    if isinstance(message, AssistantMessage):
        reasoning = message.reasoning_content or message.reasoning or message.thinking or ""
        if not reasoning:
            # a client that shows no reasoning leaves it in the content, where the template does not look for it
            thinking = Thinking(opened=False)
            pieces = [thinking.feed(body["content"]), thinking.flush()]
            reasoning, body["content"] = ("".join(parts) for parts in zip(*pieces, strict=True))
        if reasoning:
            body["reasoning_content"] = reasoning
        if message.tool_calls:
            body["tool_calls"] = [_call(call) for call in message.tool_calls]
    elif isinstance(message, ToolMessage):
        body |= _set({"tool_call_id": message.tool_call_id})
    return body


def _call(call: ToolCall) -> dict:
    function = {"name": call.function.name, "arguments": arguments_of(call.function.arguments)}
    return {"type": "function", "function": function} | _set({"id": call.id})


def _set(fields: dict) -> dict:
    """Without those that are null."""
    return {name: value for name, value in fields.items() if value is not None}
