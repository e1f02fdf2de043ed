"""The bodies of requests, as an OpenAPI document can publish them. What is not supported is refused in words.

Without effect, as every field that is not here: user, parallel_tool_calls, service_tier, metadata, store, and whatever else clients send.
A field that is null counts as one that is not there.
"""

import dataclasses
import math
import sys
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Discriminator, Field, StringConstraints, WrapValidator, model_validator
from pydantic_core import PydanticCustomError

from qjax.sampling import RANGES, Sampling

T = TypeVar("T")
STOP_CHARACTERS = 1000
"""Of a stop string at the most: each token compares its end with every beginning of one."""


def refused(message: str) -> PydanticCustomError:
    """A refusal whose words the client gets as they are."""
    return PydanticCustomError("refused", "{message}", {"message": message})


def _whole(value):
    """JSON knows one kind of number: 4.0 is a whole one."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _only(wanted, words: str):
    """A check that lets one value through, or null, and refuses all others in words."""

    def check(value):
        value = _whole(value)
        if value is not None and (value != wanted or isinstance(value, bool) != isinstance(wanted, bool)):
            raise refused(words)
        return value

    return BeforeValidator(check)


def _raw(value, valid):
    """A value that is checked and then taken as it came: the template writes its keys in the client's order."""
    valid(value)
    return value


def _text_only(part):
    if isinstance(part, dict) and isinstance(part.get("type"), str) and part["type"] != "text":
        raise refused("only parts of type text are supported: images, audio, video and files are not")
    return part


def _no_format(value):
    if isinstance(value, dict) and value.get("type") in ("json_object", "json_schema"):
        raise refused("only type text is supported: describe the format in a message")
    return value


def _no_forced_call(value):
    if value == "required" or isinstance(value, dict):
        raise refused("a call cannot be forced: tool_choice is auto or none")
    return value


def _one_prompt(value):
    """The prompt out of a list of one."""
    if isinstance(value, list) and value and isinstance(value[0], (str, list)):
        if len(value) > 1:
            raise refused(f"one prompt a request, found {len(value):,}")
        return value[0]
    return value


def _in_range(name: str, low: float | None = None) -> Any:
    """The range that Sampling has for a field; low: a lower end of the server's own."""
    least, most = next((least, most) for field, _, _, least, most in RANGES if field == name)
    least = least if low is None else low
    above = {"gt": 0.0} if 0 < least < sys.float_info.min else {"ge": float(least)}
    return Field(**above, **({} if math.isinf(most) else {"le": float(most)}))


Many = Annotated[list[T], Field(fail_fast=True)]  # the first fault is told, and a million wrong entries make no million errors
WHOLE = BeforeValidator(_whole)  # after the range: pydantic publishes a range that follows a validator under no name of JSON Schema
Count = Annotated[int, Field(ge=1), WHOLE]
TokenId = Annotated[int, Field(ge=0, lt=2**31), WHOLE]
Stop = Annotated[str, StringConstraints(min_length=1, max_length=STOP_CHARACTERS)]
Object = dict[str, Any]
One = Annotated[Literal[1] | None, _only(1, "one answer a request, so 1 is the only value")]
No = Annotated[Literal[False] | None, _only(False, "not supported: the logits of a prompt that is in a cache are not computed again")]
Zero = Annotated[Literal[0] | None, _only(0, "not supported: presence_penalty and repetition_penalty are")]
Prompt = Annotated[str, StringConstraints(min_length=1)] | Annotated[Many[TokenId], Field(min_length=1)]

# What the document says of rules that stand elsewhere: a message of the user's, and what render.py takes for a variable of the template.
EFFORTS = {"none": None, "minimal": "low", "low": "low", "medium": "medium", "high": "xhigh", "xhigh": "xhigh"}
"""The names that clients have for an effort -> the template's; none thinks not at all."""
TAKEN = ("self", "messages", "tools", "add_generation_prompt")
"""Arguments of the template's that no variable may stand for."""
NAME = "[A-Za-z_][A-Za-z0-9_]*"
ASKS = {"contains": {"type": "object", "required": ["role"], "properties": {"role": {"const": "user"}}}}
EFFORT = {"enum": [*EFFORTS, None]}
VARIABLES = {
    "propertyNames": {"pattern": f"^{NAME}$", "not": {"enum": TAKEN}},
    "properties": {"reasoning_effort": EFFORT} | {name: {"type": ["boolean", "null"]} for name in ("enable_thinking", "preserve_thinking")},
}
TOP = {"if": {"required": ["top_logprobs"], "properties": {"top_logprobs": {"exclusiveMinimum": 0, "type": "number"}}}} | {
    "then": {"required": ["logprobs"], "properties": {"logprobs": {"const": True}}}
}


class Body(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore", frozen=True, json_schema_extra={"additionalProperties": True})


class TextPart(Body):
    type: Literal["text"]
    text: str


Content = str | Many[Annotated[TextPart, BeforeValidator(_text_only)]]


class SystemMessage(Body):
    role: Literal["system", "developer"]
    content: Content


class UserMessage(Body):
    role: Literal["user"]
    content: Content


class Function(Body):
    name: Annotated[str, StringConstraints(min_length=1)]
    arguments: str | Object | None = Field(default=None, description="JSON, or the object itself")


class ToolCall(Body):
    id: str | None = None
    function: Function


class AssistantMessage(Body):
    """An answer that comes back. Its reasoning may stand under any of three names, or in think tags at the content's beginning."""

    role: Literal["assistant"]
    content: Content | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    thinking: str | None = None
    tool_calls: Many[ToolCall] | None = None


class ToolMessage(Body):
    role: Literal["tool"]
    content: Content | None = None
    tool_call_id: str | None = None


Message = Annotated[SystemMessage | UserMessage | AssistantMessage | ToolMessage, Discriminator("role")]


class Declaration(Body):
    name: Annotated[str, StringConstraints(min_length=1)]
    description: str | None = None
    parameters: Object | None = None


class Tool(Body):
    type: Literal["function"]
    function: Declaration


class StreamOptions(Body):
    include_usage: bool | None = None


class TextFormat(Body):
    type: Literal["text"]


class Chat(Body):
    """What a prompt is rendered from."""

    model: str | None = None
    messages: Annotated[Many[Message], Field(min_length=1, json_schema_extra=ASKS)]
    tools: Many[Annotated[Tool, WrapValidator(_raw)]] | None = None
    tool_choice: Annotated[Literal["auto", "none"] | None, BeforeValidator(_no_forced_call)] = Field(
        default=None, description="none leaves the tools out of the prompt"
    )
    chat_template_kwargs: Object | None = Field(
        default=None, description="variables of the chat template; they go before the three fields below", json_schema_extra=VARIABLES
    )
    reasoning_effort: str | None = Field(default=None, json_schema_extra=EFFORT)
    enable_thinking: bool | None = None
    preserve_thinking: bool | None = None


class Generated(Body):
    """What an answer is generated with."""

    max_tokens: Count | None = None
    stop: Stop | Many[Stop] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    temperature: Annotated[float, _in_range("temperature")] | None = None
    top_p: Annotated[float, _in_range("top_p")] | None = None
    top_k: Annotated[int, _in_range("top_k", -1), WHOLE] | None = Field(default=None, description="0 and -1 are off")
    min_p: Annotated[float, _in_range("min_p")] | None = None
    presence_penalty: Annotated[float, _in_range("presence_penalty")] | None = None
    repetition_penalty: Annotated[float, _in_range("repetition_penalty")] | None = None
    frequency_penalty: Zero = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**64), WHOLE] | None = None
    n: One = None
    cache_salt: str | None = Field(default=None, description="caches are shared within one key and one salt")
    session_id: str | None = None
    prompt_cache_key: str | None = None
    promptCacheKey: str | None = None

    @property
    def limit(self) -> int | None:
        """Tokens of the answer at the most, as far as the request says."""
        return self.max_tokens

    def sampling(self, defaults: dict, seed: int = 0) -> Sampling:
        """The request's fields over the model's defaults over Sampling's. seed: in place of one that the request names; greedy answers need none."""
        names = [field.name for field in dataclasses.fields(Sampling)]
        fields = defaults | {"seed": seed} | {name: value for name in names if (value := getattr(self, name)) is not None}
        if not fields.get("temperature"):
            fields["seed"] = 0  # equal answers are equal requests
        fields["seed"] %= 2**64  # clients write 64 bits with a sign or without
        fields["top_k"] = max(fields.get("top_k", 0), 0)
        return Sampling(**fields)

    @property
    def stops(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    @property
    def session(self) -> str | None:
        """The body's session key; headers come after it. It says whose a request is, not what the caches have of it."""
        return self.session_id or self.prompt_cache_key or self.promptCacheKey or None

    @property
    def include_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)


class ChatRequest(Chat, Generated):
    """/v1/chat/completions"""

    model_config = ConfigDict(json_schema_extra={"additionalProperties": True} | TOP)

    max_completion_tokens: Count | None = Field(default=None, description="goes before max_tokens")
    thinking_budget: Annotated[int, Field(ge=0), WHOLE] | None = Field(default=None, description="tokens after which a thought is closed")
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20), WHOLE] | None = Field(default=None, description="with logprobs only")
    response_format: Annotated[TextFormat | None, BeforeValidator(_no_format)] = None

    @property
    def limit(self) -> int | None:
        return self.max_completion_tokens or self.max_tokens

    @model_validator(mode="after")
    def _top_with_logprobs(self):
        if self.top_logprobs and not self.logprobs:
            raise refused("top_logprobs wants logprobs: true")
        return self


class CompletionRequest(Generated):
    """/v1/completions"""

    model: str | None = None
    prompt: Annotated[
        Prompt, BeforeValidator(_one_prompt, json_schema_input_type=Prompt | Annotated[list[Prompt], Field(min_length=1, max_length=1)])
    ]
    logprobs: Annotated[int, Field(ge=0, le=20), WHOLE] | None = None
    echo: No = None
    best_of: One = None


class TokenizeText(Body):
    model: str | None = None
    prompt: str


class TokenizeChat(Chat):
    add_generation_prompt: bool | None = None


class DetokenizeRequest(Body):
    """/detokenize"""

    model: str | None = None
    tokens: Many[TokenId]
