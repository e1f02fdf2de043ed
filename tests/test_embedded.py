"""The embedded model's directory: template, tokenizer, sizes; and the generator it was trained on."""

import json
import pathlib
import random
import struct

import pytest
from tokenizers import Tokenizer

from training import dialogues, grammar

ROOT = pathlib.Path(__file__).resolve().parent.parent
EMBEDDED = ROOT / "qjax" / "embedded"
SPECIAL = (
    "<|endoftext|> <|im_start|> <|im_end|> <|vision_start|> <|vision_end|> <|image_pad|> <|video_pad|> "
    "<tool_call> </tool_call> <tool_response> </tool_response> <think> </think>"
).split()
ASK = [{"role": "user", "content": " Hello. "}]
CALL = {"type": "function", "function": {"name": "lookup", "arguments": {"key": "deploy code", "limit": 2, "tags": ["é"]}}}


def header():
    """The JSON header of model.safetensors."""
    with open(EMBEDDED / "model.safetensors", "rb") as f:
        return json.loads(f.read(struct.unpack("<Q", f.read(8))[0]))


@pytest.fixture(scope="module")
def tokenizer():
    """The shipped tokenizer."""
    return Tokenizer.from_file(str(EMBEDDED / "tokenizer.json"))


def test_generation_prompt_opens_or_closes_the_think_block():
    head = "<|im_start|>user\nHello.<|im_end|>\n<|im_start|>assistant\n<think>\n"
    assert dialogues.render(ASK, add_generation_prompt=True) == head
    assert dialogues.render(ASK, add_generation_prompt=True, enable_thinking=False) == head + "\n</think>\n\n"


def test_effort_low_and_xhigh_add_one_sentence_and_medium_none():
    plain = dialogues.render(ASK)
    assert dialogues.render(ASK, reasoning_effort="medium") == plain
    texts = [dialogues.render(ASK, reasoning_effort=e) for e in ("low", "xhigh")]
    assert len({plain, *texts}) == 3
    assert all(t.startswith("<|im_start|>system\nThink ") and t.endswith(".<|im_end|>\n" + plain) for t in texts)
    assert dialogues.render(ASK, reasoning_effort="low", enable_thinking=False) == plain


def test_history_keeps_reasoning_and_renders_an_empty_block_without_it():
    turns = [
        *ASK,
        {"role": "assistant", "content": " Hi. ", "reasoning_content": " A greeting. "},
        *ASK,
        {"role": "assistant", "content": "Hi."},
        *ASK,
    ]
    user = "<|im_start|>user\nHello.<|im_end|>\n"
    kept = f"{user}<|im_start|>assistant\n<think>\nA greeting.\n</think>\n\nHi.<|im_end|>\n"
    empty = f"{user}<|im_start|>assistant\n<think>\n\n</think>\n\nHi.<|im_end|>\n"
    assert dialogues.render(turns) == kept + empty + user
    bare = f"{user}<|im_start|>assistant\nHi.<|im_end|>\n"
    assert dialogues.render(turns, preserve_thinking=False) == bare + bare + user


def test_tool_calls_and_grouped_results():
    turns = [
        {"role": "system", "content": "Be brief."},
        *ASK,
        {"role": "assistant", "content": "Let me look.", "tool_calls": [CALL, {"function": {"name": "run", "arguments": {}}}]},
        {"role": "tool", "content": " 7391 "},
        {"role": "tool", "content": "done"},
    ]
    text = dialogues.render(turns, tools=[dialogues.TOOLS["lookup"]])
    assert text.startswith("<|im_start|>system\n# Tools\n\n")
    assert f"<tools>\n{json.dumps(dialogues.TOOLS['lookup'])}\n</tools>" in text
    assert "</tool_call>\n\nBe brief.<|im_end|>\n<|im_start|>user\nHello.<|im_end|>\n" in text
    assert text.endswith(
        "<|im_start|>assistant\n<think>\n\n</think>\n\nLet me look.\n\n<tool_call>\n<function=lookup>\n<parameter=key>\ndeploy code\n</parameter>\n"
        '<parameter=limit>\n2\n</parameter>\n<parameter=tags>\n["é"]\n</parameter>\n</function>\n</tool_call>\n<tool_call>\n<function=run>\n'
        "</function>\n</tool_call><|im_end|>\n<|im_start|>user\n<tool_response>\n7391\n</tool_response>\n<tool_response>\ndone\n</tool_response><|im_end|>\n"
    )


@pytest.mark.parametrize(
    ("turns", "options"),
    [
        ([], {}),
        ([{"role": "system", "content": "x"}], {}),
        ([*ASK, {"role": "system", "content": "x"}], {}),
        ([*ASK, {"role": "nobody", "content": "x"}], {}),
        (ASK, {"reasoning_effort": "huge"}),
        ([{"role": "user", "content": 3}], {}),
    ],
)
def test_misuse_raises(turns, options):
    with pytest.raises(dialogues.jinja2.TemplateError):
        dialogues.render(turns, **options)


def test_directory_is_small_and_the_model_has_the_promised_size():
    files = [f for f in EMBEDDED.iterdir() if f.is_file()]
    assert sum(f.stat().st_size for f in files) <= 4 * 1024 * 1024
    tensors = {k: v for k, v in header().items() if k != "__metadata__"}
    sizes = dict.fromkeys(tensors, 1)
    for name, entry in tensors.items():
        for n in entry["shape"]:
            sizes[name] *= n
    assert 800_000 <= sum(sizes.values()) <= 1_200_000
    kept = {k for k, v in tensors.items() if v["dtype"] == "F32"}
    assert kept == {k for k in tensors if k.endswith(("A_log", "linear_attn.norm.weight"))}
    assert {v["dtype"] for v in tensors.values()} == {"F32", "BF16"}
    assert sum(k.startswith("mtp.") for k in tensors) == 15


def test_special_tokens_are_single_ids_and_text_comes_back(tokenizer):
    config = json.loads((EMBEDDED / "config.json").read_text())
    assert tokenizer.get_vocab_size() == config["vocab_size"]
    assert 512 <= config["vocab_size"] <= 1024
    for token in SPECIAL:
        assert tokenizer.encode(token).ids == [tokenizer.token_to_id(token)]
    assert tokenizer.encode("<think>\n\n</think>\n\n").tokens[1:2] == tokenizer.encode("\n\n").tokens  # one token, not twice a line end
    for text in ("The deploy code is 7391.", "def f(x):\n    return [x]  # 3\n\n\n", "Grüße, 東京 🙂\r\n\ttab", " " * 7 + "x"):
        assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text


def test_generator_is_a_function_of_its_seed():
    def text(seed):
        rng = random.Random(seed)
        talk, options = dialogues.conversation(rng, 400, rng.choice((0, 1, 2)), len)
        return dialogues.render(talk.messages, **options)

    assert [text(s) for s in range(5)] == [text(s) for s in range(5)]
    assert len({text(s) for s in range(5)}) == 5


def test_digit_codes_of_training_and_held_out_are_disjoint():
    rng = random.Random(1)
    assert all(grammar.held_out(grammar.digits(rng, held=True)) for _ in range(50))
    assert not any(grammar.held_out(grammar.digits(rng)) for _ in range(50))
