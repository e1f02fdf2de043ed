"""Train the byte-level BPE of the embedded model on generated dialogues: `python -m training.vocabulary [size]`."""

import json
import os
import random
import sys

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from training import dialogues

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
ORDINARY = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>")
PIECES = r"[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


def texts(seed, n):
    """Rendered conversations of all stages without the marks and the added tokens."""
    rng = random.Random(seed)
    for _ in range(n):
        talk, options = dialogues.conversation(rng, rng.choice((256, 512, 1024)), rng.choice((0, 1, 2, 2)), lambda text: len(text) // 3)
        yield strip(dialogues.render(talk.messages, **options))


def strip(text):
    """Text with the marks cut out and added tokens replaced by line ends, so that no merge crosses them."""
    text = text.replace(dialogues.OPEN, "").replace(dialogues.CLOSE, "")
    for token in SPECIAL + ORDINARY:
        text = text.replace(token, "\x00")
    return text


def train(size, seed=11, n=4000):
    """A tokenizer of `size` ids in all: bytes and merges first, then the added tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PIECES), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size - len(SPECIAL) - len(ORDINARY), initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()), show_progress=False
    )
    tokenizer.train_from_iterator((piece for text in texts(seed, n) for piece in text.split("\x00")), trainer)
    tokenizer.add_tokens([AddedToken(t, special=True, normalized=False) for t in SPECIAL])
    tokenizer.add_tokens([AddedToken(t, special=False, normalized=False) for t in ORDINARY])
    if tokenizer.get_vocab_size() != size:
        raise ValueError(f"the vocabulary has {tokenizer.get_vocab_size()} tokens, not {size}")
    return tokenizer


def write(name, text):
    """Write one file of the embedded directory in a single step."""
    part = dialogues.EMBEDDED / f".{name}.part"
    part.write_text(text, encoding="utf-8")
    os.replace(part, dialogues.EMBEDDED / name)


def main():
    """Write tokenizer.json and tokenizer_config.json."""
    tokenizer = train(int(sys.argv[1]) if len(sys.argv) > 1 else 1024)
    write("tokenizer.json", tokenizer.to_str(pretty=False))
    added = {
        str(tokenizer.token_to_id(t)): {
            "content": t, "lstrip": False, "normalized": False, "rstrip": False, "single_word": False, "special": t in SPECIAL,
        }
        for t in SPECIAL + ORDINARY
    }  # fmt: skip
    config = {
        "added_tokens_decoder": added, "add_bos_token": False, "add_prefix_space": False, "bos_token": None, "clean_up_tokenization_spaces": False,
        "eos_token": "<|im_end|>", "errors": "replace", "model_max_length": 262144, "pad_token": "<|endoftext|>",
        "tokenizer_class": "Qwen2TokenizerFast", "unk_token": None,
    }  # fmt: skip
    write("tokenizer_config.json", json.dumps(config, indent=2) + "\n")
    sample = next(texts(5, 1)).replace("\x00", "")
    print(f"{tokenizer.get_vocab_size()} tokens, {len(sample) / len(tokenizer.encode(sample).ids):.2f} characters a token")


if __name__ == "__main__":
    main()
