"""Log probabilities in the two forms that clients know."""

from collections.abc import Iterable

from qjax.generation import Token
from qjax.model.tokenizer import Tokenizer


def chat_logprobs(tokens: Iterable[Token], tokenizer: Tokenizer) -> dict:
    """Of a chat's choice; every token has its own."""
    return {
        "content": [_entry(t.id, t.logprobs.own, tokenizer) | {"top_logprobs": [_entry(*top, tokenizer) for top in t.logprobs.top]} for t in tokens]
    }


def completion_logprobs(tokens: Iterable[Token], tokenizer: Tokenizer, offset: int) -> dict:
    """Of a completion's choice. offset: characters of the text before the first of these tokens."""
    found = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
    for token in tokens:
        text = tokenizer.decode([token.id])
        found["tokens"].append(text)
        found["token_logprobs"].append(token.logprobs.own)
        found["top_logprobs"].append({tokenizer.decode([i]): value for i, value in reversed(token.logprobs.top)})
        found["text_offset"].append(offset)
        offset += len(text)
    return found


def _entry(token: int, value: float, tokenizer: Tokenizer) -> dict:
    spelled = tokenizer.token_bytes(token)
    return {"token": spelled.decode("utf-8", "replace"), "logprob": value, "bytes": list(spelled)}
