"""Test how a question is turned into a prompt: templates, special tokens, and text that the
tokenizer cannot read.
"""

import logging

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from sparrow.errors import ConfigError
from sparrow.tasks.prompts import (
    NO_CHAT,
    ChatConfig,
    Prompt,
    chat_template,
    check_read,
    encode,
    token_texts,
    unread,
)

CHAT = "{{ bos_token }}{% for m in messages %}[{{ m.role }}] {{ m.content | trim }} {% endfor %}"


def words(*known: str, bos: bool = True, eos: bool = False, **settings) -> PreTrainedTokenizerFast:
    """Return a tokenizer for these words that adds special tokens as requested."""
    vocabulary = {word: i for i, word in enumerate(("<unk>", "<s>", "</s>", *known))}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    form = f"{'<s> ' if bos else ''}$A{' </s>' if eos else ''}"
    tokenizer.post_processor = processors.TemplateProcessing(
        form, special_tokens=[("<s>", 1), ("</s>", 2)]
    )
    special = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **{**special, **settings})


def test_an_encoded_text_has_exactly_one_bos_token():
    tokenizer = words("a", "b")
    assert encode(tokenizer, "a b") == tokenizer("a b").input_ids == [1, 3, 4]
    assert encode(tokenizer, "<s>a b") == [1, 3, 4]
    assert encode(tokenizer, "<s>a b", rendered=True) == [1, 3, 4]
    assert encode(tokenizer, "a b", rendered=True) == [3, 4]


def test_a_tokenizer_without_special_tokens_adds_none():
    assert encode(words("a", "b", bos=False), "a b") == [3, 4]
    assert encode(words("a", bos=False, bos_token=None), "a") == [3]


def test_tokenizer_that_appends_eos_to_prompts_raises_an_error():
    tokenizer = words("a", eos=True)
    with pytest.raises(ConfigError, match=r"ends every prompt with '</s>'.*add_eos_token"):
        encode(tokenizer, "a")
    assert encode(tokenizer, "a", rendered=True) == [3]
    assert encode(words("a"), "a </s>") == [1, 3, 2], "this EOS is part of the prompt"


def test_template_arguments_are_parsed_as_json_if_possible():
    given = ("enable_thinking=false", "effort=high", "depth=3", "note=a=b")
    assert ChatConfig(arguments=given).values() == {
        "enable_thinking": False,
        "effort": "high",
        "depth": 3,
        "note": "a=b",
    }


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (("enable_thinking",), "must have the form NAME=VALUE"),
        (("a=1", "a=2"), "sets 'a' twice"),
        (("tokenize=true",), "sets 'tokenize', which Sparrow sets itself"),
        (("messages=[]",), "sets 'messages', which Sparrow sets itself"),
    ],
)
def test_invalid_template_arguments_raise_errors(arguments, reason):
    with pytest.raises(ConfigError, match=reason):
        ChatConfig(arguments=arguments)


@pytest.mark.parametrize(
    ("template", "config", "reason"),
    [
        (CHAT, ChatConfig(arguments=("enable_thinkin=false",)), "template does not use"),
        ("{{ messages[0].content }}", ChatConfig(system="walk"), "omits the user's message"),
        ("{{ messages[-1].content }}", ChatConfig(system="walk"), "omits the system prompt"),
        ("no question", NO_CHAT, "omits the user's message"),
        (
            "{{ raise_exception('no system') }}",
            ChatConfig(system="walk"),
            "cannot render.*no system",
        ),
        ("{% if %}", NO_CHAT, "cannot render a question"),
        (None, ChatConfig(system="walk"), "has no chat template, which the chat settings need"),
        (
            None,
            ChatConfig(arguments=("a=1",)),
            "has no chat template, which the chat settings need",
        ),
        (None, ChatConfig(template="missing.jinja"), "cannot read the chat template missing.jinja"),
        ({"tool_use": CHAT}, NO_CHAT, "no default chat template"),
    ],
)
def test_unusable_chat_templates_raise_errors(template, config, reason):
    tokenizer = words("a")
    tokenizer.chat_template = template
    with pytest.raises(ConfigError, match=reason):
        chat_template(tokenizer, config)


def test_a_template_file_renders_prompts_of_a_base_model_as_chats(tmp_path):
    path = tmp_path / "chat.jinja"
    path.write_text(CHAT)
    assert chat_template(words("a"), NO_CHAT) is None
    render = chat_template(words("a"), ChatConfig(template=str(path), system=" be brief "))
    assert render("a?") == "<s>[system] be brief [user] a? "


@pytest.mark.parametrize(
    ("text", "share"), [("a b", 0), ("", 0), ("a xyz", 0.75), ("xyz", 1), ("<s> a", 0)]
)
def test_text_mapped_to_the_unknown_token_counts_as_unreadable(text, share):
    assert unread(words("a", "b"), text) == share


def test_text_dropped_by_the_tokenizer_counts_as_unreadable():
    tokenizer = Tokenizer(models.BPE({"a": 0, "b": 1}, []))
    dropping = PreTrainedTokenizerFast(tokenizer_object=tokenizer)
    assert unread(dropping, "ab \u4f60\u597d") == 0.5


def test_a_byte_level_tokenizer_can_read_any_text():
    alphabet = {c: i for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE({**alphabet, "<end>": 256}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel()
    end = "<end>"  # GPT-2 uses the same token for unknown text
    loaded = PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token=end, eos_token=end)
    assert unread(loaded, "a \u4f60\u597d \U0001f600 <end>") == 0


def test_mostly_unreadable_prompts_raise_an_error(caplog):
    tokenizer = words("aaaa", "b")
    read, half = Prompt("line 1", "aaaa aaaa"), Prompt("line 2", "aaaa xxxx")
    lost = Prompt("line 3", "xxxx xxxx")
    with caplog.at_level(logging.WARNING):
        check_read(tokenizer, [read, read])
        check_read(tokenizer, [])
        assert not caplog.messages
        check_read(tokenizer, [read, read, half])
    (warning,) = caplog.messages
    assert "cannot read 17% of the prompts' characters" in warning
    assert "(line 2: 50%)" in warning and "<unk>" in warning
    with pytest.raises(ConfigError, match="cannot read 75% of the prompts' characters"):
        check_read(tokenizer, [lost, half])


def byte_level() -> PreTrainedTokenizerFast:
    """Return a GPT-2-like tokenizer that uses exactly one token per byte."""
    alphabet = {c: i for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(alphabet, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def sentence_piece() -> PreTrainedTokenizerFast:
    """Return a tokenizer like Llama 2's: words include their leading space, and all other text is
    split into bytes.
    """
    known = ["<unk>", "\u2581the", "\u2581cat", "s", *(f"<0x{i:02X}>" for i in range(256))]
    tokenizer = Tokenizer(
        models.BPE({t: i for i, t in enumerate(known)}, [], byte_fallback=True, unk_token="<unk>")
    )
    space = decoders.Replace("\u2581", " ")
    tokenizer.decoder = decoders.Sequence(
        [space, decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>")


def test_a_character_that_spans_several_tokens_is_shown_with_the_first_one():
    tokenizer = byte_level()
    ids = tokenizer("a\u4f60 \U0001f600!").input_ids
    texts = ["a", "\u4f60", "", "", " ", "\U0001f600", "", "", "", "!"]
    assert token_texts(tokenizer, ids) == texts
    # A response may be truncated within a character, and may contain invalid bytes.
    for cut in (ids[:3], [ids[1], ids[1], ids[0], ids[0]]):
        texts = token_texts(tokenizer, cut)
        assert len(texts) == len(cut) and "".join(texts) == tokenizer.decode(cut)


def test_a_token_that_starts_a_word_is_shown_with_the_preceding_space():
    tokenizer = sentence_piece()
    byte = {i: 4 + i for i in range(256)}
    ids = [1, 2, 3, *(byte[b] for b in "\u4f60".encode()), 1]
    texts = token_texts(tokenizer, ids)
    assert texts == ["the", " cat", "s", "\u4f60", "", "", " the"]
    assert "".join(texts) == tokenizer.decode(ids)
    assert token_texts(tokenizer, []) == []
