"""What clients send, put into the form that a checkpoint's template takes."""

import re
from collections.abc import Iterable

from qjax.serving.errors import ApiError, BadRequest
from qjax.serving.limits import Limits, check, parse
from qjax.serving.schema import EFFORTS, NAME, TAKEN, AssistantMessage, Chat, Message, SystemMessage, TextPart, ToolCall, ToolMessage
from qjax.thinking import Thinking

UNREAD = "arguments"
"""The parameter under which arguments that are no JSON object are shown to the model as they are."""
NESTED = Limits()


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
        if name in TAKEN or not re.fullmatch(NAME, name):
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
