"""Text to token ids and back: byte-level BPE from a checkpoint's tokenizer.json, where text never becomes a special token."""

import codecs
import threading
from collections.abc import Iterable
from pathlib import Path

import tokenizers
import xxhash

from qjax.model.checkpoint import CheckpointError, read_json

STOP = ("<|im_end|>", "<|endoftext|>")
LONG = 16_384
"""Characters of a text that takes 10 ms. A shorter one is not handed to a thread that lets others run; of longer ones only one is encoded at a
time, with up to 180 bytes a token meanwhile."""


def _byte_letters() -> dict[int, int]:
    """The code point that stands for each byte in a byte-level vocabulary, turned round: printable Latin-1 as itself, the rest from 256 up."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    rest = [b for b in range(256) if b not in printable]
    return {b: b for b in printable} | {256 + i: b for i, b in enumerate(rest)}


_LETTERS = _byte_letters()
_ONE = threading.Lock()


class Tokenizer:
    """A vocabulary. `size`: one above the highest id. `special`: control tokens (all added tokens that begin and end with punctuation).

    `wordlike`: the other added tokens, which no text and no template can produce. `stop_ids`: the ids that end a generation.
    `digest`: 32 hex digits of the file that it was read from.
    """

    def __init__(self, inner: tokenizers.Tokenizer, stop_ids: Iterable[int] = (), digest: str | None = None):
        """Takes over `inner`. Raises CheckpointError for a vocabulary that is not byte-level, or that parses a special token out of text."""
        if not isinstance(inner.decoder, tokenizers.decoders.ByteLevel):
            raise CheckpointError(f"decoder: expected ByteLevel, found {type(inner.decoder).__name__}")
        self._inner = inner
        self.digest = digest or xxhash.xxh3_128_hexdigest(inner.to_str().encode())  # to_str of a 12 MB file takes 0.2 s
        added = inner.get_added_tokens_decoder()
        self._added = {i: token.content.encode() for i, token in added.items()}
        inner.no_truncation()
        inner.no_padding()
        # encode_special_tokens spares only what is marked special, which <think> and <tool_call> are not
        inner.add_special_tokens([_as_special(token) for token in added.values()])
        inner.encode_special_tokens = True
        self.special = {t.content: i for i, t in sorted(added.items()) if _is_control(t.content)}
        self.wordlike = frozenset(t.content for t in added.values()) - self.special.keys()
        self.size = max(inner.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        parsed = [text for text in self.special if set(self.encode(text)) & added.keys()]
        if parsed:
            raise CheckpointError(f"special tokens: expected to be told from text, found {', '.join(parsed)} in the ordinary vocabulary")
        named = [self.special[text] for text in STOP if text in self.special]
        self.stop_ids = tuple(dict.fromkeys([*named, *stop_ids]))
        foreign = [i for i in self.stop_ids if not 0 <= i < self.size]
        if foreign:
            raise CheckpointError(f"eos_token_id: expected ids below {self.size}, found {foreign}")

    @classmethod
    def from_directory(cls, directory: str | Path, eos: Iterable[int] = ()) -> "Tokenizer":
        """Read tokenizer.json, and the stop ids of generation_config.json besides `eos`. Raises CheckpointError that names the file."""
        directory = Path(directory)
        path = directory / "tokenizer.json"
        if not path.is_file():
            raise CheckpointError(f"{path}: expected a tokenizer, found no such file")
        try:
            content = path.read_bytes()
            inner = tokenizers.Tokenizer.from_buffer(content)
        except Exception as e:  # the library raises plain Exception for whatever it cannot parse
            raise CheckpointError(f"{path}: expected a tokenizer, found: {e}") from e
        stops = read_json(directory / "generation_config.json", required=False).get("eos_token_id")
        stops = [] if stops is None else stops if isinstance(stops, list) else [stops]
        if not all(isinstance(i, int) and not isinstance(i, bool) for i in stops):
            raise CheckpointError(f"{directory / 'generation_config.json'}: eos_token_id: expected token ids, found {stops!r}")
        try:
            return cls(inner, [*stops, *eos], xxhash.xxh3_128_hexdigest(content))
        except CheckpointError as e:
            raise CheckpointError(f"{path}: {e}") from e

    def encode(self, text: str) -> list[int]:
        """Token ids of plain text; text that reads like a special token stays text. A lone surrogate counts as U+FFFD."""
        try:
            text.encode()
        except UnicodeEncodeError:
            text = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
        if len(text) < LONG:
            return self._inner.encode(text, add_special_tokens=False).ids
        with _ONE:
            return self._inner.encode_batch_fast([text], add_special_tokens=False)[0].ids  # other threads run meanwhile

    def token_bytes(self, token: int) -> bytes:
        """The bytes that a token stands for; none for an id without a token (a padded vocabulary has some)."""
        token = int(token)
        if token in self._added:
            return self._added[token]
        text = self._inner.id_to_token(token) if 0 <= token < self.size else None
        if text is None:
            return b""
        return bytes(_LETTERS[ord(c)] for c in text) if all(ord(c) in _LETTERS for c in text) else text.encode()

    def decode(self, ids: Iterable[int]) -> str:
        """The text of token ids, special tokens spelled out, bytes that are no UTF-8 as U+FFFD."""
        return b"".join(map(self.token_bytes, ids)).decode("utf-8", "replace")

    def stream(self) -> "TextStream":
        """A decoder for one generation."""
        return TextStream(self)


class TextStream:
    """Text as its tokens arrive: the pieces of all steps and of the flush, joined, are `decode` of all the ids."""

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def step(self, token: int) -> str:
        """The text that this token completes; the bytes of an unfinished character are held back."""
        return self._decoder.decode(self._tokenizer.token_bytes(token))

    def flush(self) -> str:
        """What was held back, as U+FFFD; the stream is empty after it."""
        text = self._decoder.decode(b"", final=True)
        self._decoder.reset()
        return text


def _is_control(text: str) -> bool:
    """True for the text of an added token that can be guarded without touching words: punctuation at both ends."""
    ends = (text[:1], text[-1:])
    return len(text) > 1 and not any(c.isalnum() or c.isspace() for c in ends)


def _as_special(token: tokenizers.AddedToken) -> tokenizers.AddedToken:
    """The same added token, marked special."""
    flags = {name: getattr(token, name) for name in ("single_word", "lstrip", "rstrip", "normalized")}
    return tokenizers.AddedToken(token.content, special=True, **flags)
