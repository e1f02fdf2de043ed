"""openai-python against a server: what it gets, and what it raises."""

from collections.abc import Iterator

import openai
import pytest

from tests.serving.inside import embedded, inside

KEY = "sk-of-the-test"
FACT = "My room is 2354. My ticket is 5570. The worker reads the file. The sky is blue."
SLACK = 4
"""Tokens that a turn may read again beside what is new; an answer has many more."""
TOOL = {
    "type": "function",
    "function": {
        "name": "lookup",
        "description": "Look up a value.",
        "parameters": {"type": "object", "properties": {"key": {"type": "string", "description": "The name of the value."}}, "required": ["key"]},
    },
}


@pytest.fixture(scope="module")
def address(compile_cache) -> Iterator[str]:
    with inside(lambda: embedded(compile_cache), api_key=KEY) as server:
        yield f"{server.url}/v1"


@pytest.fixture
def client(address) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=address, api_key=KEY, max_retries=0) as client:
        yield client


def streamed(client: openai.OpenAI, messages: list, **more):
    """The message that a stream makes, and its usage."""
    with client.chat.completions.stream(model="embedded", messages=messages, stream_options={"include_usage": True}, **more) as stream:
        for event in stream:
            if event.type == "chunk":
                usage = event.chunk.usage
        return stream.get_final_completion().choices[0].message, usage


def test_a_streamed_conversation_goes_on_where_it_was(client):
    """The second request sends the messages back as the package has them, with the fields that it does not know."""
    messages = [{"role": "user", "content": f"{FACT} What is my room?"}]
    message, first = streamed(client, messages)
    assert message.content == "The room is 2354."
    assert message.reasoning_content
    assert first.prompt_tokens_details.cached_tokens == 0  # control: it has never been there
    assert 0 < first.completion_tokens_details.reasoning_tokens < first.completion_tokens
    messages += [message, {"role": "user", "content": "What is my ticket?"}]
    message, second = streamed(client, messages)
    assert message.content == "The ticket is 5570."
    assert second.prompt_tokens_details.cached_tokens >= first.prompt_tokens + first.completion_tokens - SLACK


def test_a_stream_with_a_tool_call_and_its_result(client):
    messages = [{"role": "user", "content": "Look up the city."}]
    message, first = streamed(client, messages, tools=[TOOL], tool_choice="auto")
    (call,) = message.tool_calls
    assert (call.type, call.function.name) == ("function", "lookup")
    assert call.function.arguments.startswith('{"key": "')
    messages += [message, {"role": "tool", "tool_call_id": call.id, "content": "blue heron"}]
    message, second = streamed(client, messages, tools=[TOOL])
    assert "blue heron" in message.content
    assert not message.tool_calls
    assert second.prompt_tokens_details.cached_tokens >= first.prompt_tokens + first.completion_tokens - SLACK


def test_a_whole_answer_with_every_field_that_callers_set(client):
    answer = client.chat.completions.create(
        model="embedded",
        messages=[{"role": "developer", "content": "You answer briefly."}, {"role": "user", "content": [{"type": "text", "text": FACT}]}],
        max_completion_tokens=200,
        temperature=0.5,
        top_p=0.9,
        seed=3,
        stop=["\n\n\n"],
        n=1,
        user="somebody",
        logprobs=True,
        top_logprobs=2,
        extra_body={"top_k": 20, "cache_salt": "own", "chat_template_kwargs": {"enable_thinking": False}},
    )
    (choice,) = answer.choices
    assert (answer.model, answer.object, choice.finish_reason) == ("embedded", "chat.completion", "stop")
    assert choice.message.content.startswith("Noted")
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    assert answer.usage.completion_tokens_details.reasoning_tokens == 0
    assert "".join(token.token for token in choice.logprobs.content).strip() == choice.message.content
    assert all(len(token.top_logprobs) == 2 for token in choice.logprobs.content)


def test_completions(client):
    whole = client.completions.create(model="embedded", prompt="The worker reads the", max_tokens=2, temperature=0)
    chunks = list(client.completions.create(model="embedded", prompt="The worker reads the", max_tokens=2, temperature=0, stream=True))
    assert whole.choices[0].text == "".join(choice.text for chunk in chunks for choice in chunk.choices) != ""
    assert whole.usage.completion_tokens == 2
    assert whole.choices[0].finish_reason == "length"


def test_models(client):
    (model,) = client.models.list().data
    assert (model.id, model.max_model_len) == ("embedded", 4096)
    assert client.models.retrieve("embedded") == model


def test_what_is_too_long_is_a_bad_request_with_the_code_that_agents_know(client):
    with pytest.raises(openai.BadRequestError) as error:
        client.chat.completions.create(model="embedded", messages=[{"role": "user", "content": "The sky is blue. " * 2000}])
    assert (error.value.code, error.value.param, error.value.type) == ("context_length_exceeded", "messages", "invalid_request_error")
    assert "maximum context length is 4096 tokens" in error.value.message


def test_what_is_not_there_is_not_found(client):
    hello = [{"role": "user", "content": "Hello."}]
    with pytest.raises(openai.NotFoundError) as error:
        client.chat.completions.create(model="another", messages=hello)
    assert error.value.code == "model_not_found"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("another")
    with pytest.raises(openai.NotFoundError):
        client.responses.create(model="embedded", input="Hello.")


def test_another_key_is_no_key(client):
    hello = [{"role": "user", "content": "Hello."}]
    with pytest.raises(openai.AuthenticationError) as error:
        client.with_options(api_key="sk-of-another").chat.completions.create(model="embedded", messages=hello)
    assert error.value.code == "invalid_api_key"
    assert client.chat.completions.create(model="embedded", messages=hello, max_tokens=1).usage.completion_tokens == 1
