"""Convert questions to token ids, with chat templates and special tokens, and convert token ids
back to text. Also detect text that a tokenizer can't read.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from sparrow.errors import ConfigError
from sparrow.settings import Settings, read_value
from sparrow.tasks.base import Problem

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

log = logging.getLogger(__name__)

UNREAD = 0.5
"""Prompts are rejected if at least this share of their characters is unreadable. The model wouldn't
see the questions.
"""
NOTABLE = 0.01  # log a warning if the tokenizer can't read this share of the characters
_PROBE = "7 + 5"  # a question for testing a chat template


@dataclass(frozen=True)
class ChatConfig(Settings):
    """How to present a dataset's questions to a chat model (sparrow.tasks.prompts)."""

    system: str | None = None  # System prompt, the first message of every chat.
    # File with a Jinja chat template to use instead of the tokenizer's.
    template: str | None = None
    # Arguments for the template, each as NAME=VALUE, such as enable_thinking=false. A value is read
    # as JSON if possible, otherwise as text.
    arguments: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        self.values()

    @property
    def is_set(self) -> bool:
        """Whether any setting differs from its default."""
        return any(getattr(self, field.name) != field.default for field in fields(self))

    def values(self) -> dict[str, Any]:
        """Parse the template arguments into a dict.

        Raises ConfigError if an argument is not ``NAME=VALUE``, occurs twice, or is set by Sparrow
        itself.
        """
        found: dict[str, Any] = {}
        for argument in self.arguments:
            name, equals, value = argument.partition("=")
            if not equals or not name.isidentifier():
                raise ConfigError(
                    f"chat.arguments contains {argument!r}, but each argument must have the form "
                    "NAME=VALUE, such as enable_thinking=false"
                )
            if name in ("messages", "conversation", "tokenize", "add_generation_prompt"):
                raise ConfigError(
                    f"chat.arguments sets {name!r}, which Sparrow sets itself; leave it out"
                )
            if name in found:
                raise ConfigError(f"chat.arguments sets {name!r} twice; remove one of them")
            found[name] = read_value(value)
        return found

    def read_template(self) -> str | None:
        """Read the template file, or return None if none is set.

        Raises ConfigError if the file cannot be read.
        """
        if self.template is None:
            return None
        try:
            return Path(self.template).read_text(encoding="utf-8")
        except (OSError, ValueError) as error:  # ValueError: not UTF-8
            reason = getattr(error, "strerror", None) or error
            raise ConfigError(
                f"cannot read the chat template {self.template}: {reason}; check chat.template"
            ) from error


NO_CHAT = ChatConfig()


class ChatTemplate:
    """Renders a question as a chat: the system prompt, the question as the user's message, and the
    start of the model's message.

    Raises ConfigError if the template cannot be used, leaves out a message, or does not use an
    argument.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, config: ChatConfig) -> None:
        self._tokenizer = tokenizer
        self._config = config
        self._arguments = config.values()
        self._template = config.read_template()
        if self._template is None:
            try:
                self._template = tokenizer.get_chat_template()
            # The tokenizer has several templates, but no default.
            except ValueError as error:
                raise ConfigError(
                    f"the tokenizer has no default chat template ({error}); set chat.template"
                ) from error
        for name in self._arguments:
            if not re.search(rf"\b{name}\b", self._template):
                raise ConfigError(
                    f"chat.arguments sets {name!r}, which the chat template does not use; "
                    "check the name, or leave it out"
                )
        self._try_out()

    def __call__(self, question: str) -> str:
        """Render the text for the model to continue, including special tokens.

        Raises ConfigError if the template fails on the messages.
        """
        messages = [{"role": "user", "content": question}]
        if self._config.system is not None:
            messages.insert(0, {"role": "system", "content": self._config.system})
        try:
            text = self._tokenizer.apply_chat_template(
                messages,
                chat_template=self._template,
                tokenize=False,
                add_generation_prompt=True,
                **self._arguments,
            )
        except Exception as error:  # a template may raise any exception
            raise ConfigError(
                f"the chat template cannot render a question ({type(error).__name__}: {error}); "
                "change chat.system, chat.arguments or chat.template"
            ) from error
        return str(text)

    def _try_out(self) -> None:
        rendered = self(_PROBE)
        if _PROBE not in rendered:
            raise ConfigError(
                "the chat template omits the user's message; set a different chat.template"
                + ("" if self._config.system is None else ", or leave out chat.system")
            )
        if (self._config.system or "").strip() not in rendered:
            raise ConfigError(
                "the chat template omits the system prompt; set a different chat.template, "
                "or leave out chat.system"
            )


def chat_template(
    tokenizer: PreTrainedTokenizerBase, config: ChatConfig
) -> Callable[[str], str] | None:
    """Return a function that renders a question for the tokenizer's model, or None if it is not a
    chat model.

    Raises ConfigError if chat settings are given but the tokenizer has no template, or in the same
    cases as ``ChatTemplate``.
    """
    if tokenizer.chat_template or config.template is not None:
        return ChatTemplate(tokenizer, config)
    if config.is_set:
        raise ConfigError(
            "the tokenizer has no chat template, which the chat settings need; set chat.template to "
            "a file, or leave the chat settings out"
        )
    return None


class Prompt(NamedTuple):
    """A text for a model to continue."""

    name: str  # how error messages refer to the prompt
    text: str
    rendered: bool = False  # whether the text already has the special tokens that the model expects


def prompt_of(problem: Problem) -> Prompt:
    """Return a problem's prompt."""
    return Prompt(f"problem {problem.id!r}", problem.prompt, problem.rendered)


def encode(tokenizer: PreTrainedTokenizerBase, text: str, rendered: bool = False) -> list[int]:
    """Encode a prompt with the tokenizer, including special tokens such as BOS.

    Special tokens aren't added to a text that already has them. A text has them if a chat template
    ``rendered`` it, or if it starts with BOS.

    Raises ConfigError if the tokenizer appends EOS to prompts.
    """
    has_bos = bool(tokenizer.bos_token) and text.startswith(tokenizer.bos_token)
    adds = not (rendered or has_bos)
    ids = list(tokenizer(text, add_special_tokens=adds).input_ids)
    ended = bool(text) and ids[-1:] == [tokenizer.eos_token_id]
    if adds and ended and not text.rstrip().endswith(tokenizer.eos_token):
        raise ConfigError(
            f"the tokenizer ends every prompt with {tokenizer.eos_token!r}, so the model would not "
            "answer it; set add_eos_token to false in its tokenizer_config.json"
        )
    return ids


def check_read(tokenizer: PreTrainedTokenizerBase, prompts: Sequence[Prompt]) -> None:
    """Log a warning if the tokenizer cannot read a noticeable share of the prompts' characters.

    Raises ConfigError if at least half of the characters are unreadable.
    """
    shares = [unread(tokenizer, prompt.text) for prompt in prompts]
    total = sum(len(prompt.text) for prompt in prompts)
    if not total:
        return
    mean = sum(s * len(p.text) for s, p in zip(shares, prompts, strict=True)) / total
    if mean < NOTABLE:
        return
    worst = max(range(len(prompts)), key=shares.__getitem__)
    sentence = (
        f"the tokenizer cannot encode {mean:.0%} of the prompts' characters, which reach the "
        f"model as {tokenizer.unk_token or 'nothing'} ({prompts[worst].name}: "
        f"{shares[worst]:.0%}); check that it is the model's tokenizer, and that the model "
        "supports the prompts' language"
    )
    if mean >= UNREAD:
        raise ConfigError(sentence)
    log.warning("%s", sentence)


def unread(tokenizer: PreTrainedTokenizerBase, text: str) -> float:
    """Return the share of a text's non-space characters that the tokenizer drops or maps to its
    unknown token.

    For a tokenizer without token offsets, return the share of unknown tokens instead.
    """
    unknown = tokenizer.unk_token_id
    if unknown in (tokenizer.eos_token_id, tokenizer.bos_token_id):
        # Byte-level tokenizers can encode any text. As the unknown token, they reuse another
        # special token.
        unknown = None
    if not tokenizer.is_fast:
        ids = tokenizer(text, add_special_tokens=False).input_ids
        return ids.count(unknown) / max(len(ids), 1)
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    missing = {i for i, character in enumerate(text) if not character.isspace()}
    count = len(missing)
    for token, (start, end) in zip(encoded.input_ids, encoded.offset_mapping, strict=True):
        if token != unknown:
            missing.difference_update(range(start, end))
    return len(missing) / max(count, 1)


def token_texts(tokenizer: PreTrainedTokenizerBase, ids: list[int]) -> list[str]:
    """Return each token's text in context. Joined together, the texts are the decoded response.

    A token's text is whatever the token adds to the text before it. Tokens can't be decoded one by
    one, because half a character would be garbage, and a SentencePiece token would lose its space.
    A character that spans several tokens belongs to the first of them.
    """
    texts = [""] * len(ids)
    # ``ids[begin:read]`` is enough context to decode the next token.
    begin = 0
    read = 0
    for end in range(1, len(ids) + 1):
        text = str(tokenizer.decode(ids[begin:end]))
        if text.endswith("\N{REPLACEMENT CHARACTER}") and end < len(ids):
            continue  # the rest of this character is still to come
        texts[read] = text[len(str(tokenizer.decode(ids[begin:read]))) :]
        begin = read
        read = end
    return texts
