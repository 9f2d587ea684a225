"""From a question to the model's token ids: chat templates, special tokens, and text that a
tokenizer cannot read; and from ids back to text.
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
"""The share of unread characters from which prompts are refused: the model would not see the
questions."""
NOTABLE = 0.01  # and the share from which a warning is given
_PROBE = "7 + 5"  # a question with which a chat template is tried out


@dataclass(frozen=True)
class ChatConfig(Settings):
    """The chat in which the questions of datasets are put to a model (sparrow.tasks.prompts)."""

    system: str | None = None  # A system prompt: the first message of every chat.
    # A file with a Jinja chat template, in place of the tokenizer's.
    template: str | None = None
    # What the template is called with, each as NAME=VALUE, such as enable_thinking=false. A value
    # is read as JSON if possible, and is text otherwise.
    arguments: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        self.values()

    @property
    def is_set(self) -> bool:
        """True if any setting differs from its default."""
        return any(getattr(self, field.name) != field.default for field in fields(self))

    def values(self) -> dict[str, Any]:
        """The template's arguments by name.

        Raises ConfigError: one that is not ``NAME=VALUE``, comes twice, or is not the user's to
        give.
        """
        found: dict[str, Any] = {}
        for argument in self.arguments:
            name, equals, value = argument.partition("=")
            if not equals or not name.isidentifier():
                raise ConfigError(
                    f"chat.arguments has {argument!r}, but must read NAME=VALUE, as in "
                    "enable_thinking=false; change chat.arguments"
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
        """The text of the template's file; None if none is given.

        Raises ConfigError: it cannot be read.
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
    beginning of the model's.

    Raises ConfigError: the template cannot be used, leaves a message out, or does not read an
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
            except ValueError as error:  # several templates, and no default among them
                raise ConfigError(
                    f"the tokenizer has no default chat template ({error}); give chat.template"
                ) from error
        for name in self._arguments:
            if not re.search(rf"\b{name}\b", self._template):
                raise ConfigError(
                    f"chat.arguments sets {name!r}, which the chat template does not read; "
                    "check the name, or leave it out"
                )
        self._try_out()

    def __call__(self, question: str) -> str:
        """The text that the model continues, special tokens included.

        Raises ConfigError: the template refuses the messages.
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
        except Exception as error:  # a template may raise anything
            raise ConfigError(
                f"the chat template cannot render a question ({type(error).__name__}: {error}); "
                "change chat.system, chat.arguments or chat.template"
            ) from error
        return str(text)

    def _try_out(self) -> None:
        rendered = self(_PROBE)
        if _PROBE not in rendered:
            raise ConfigError(
                "the chat template leaves out the user's message; give another chat.template"
                + ("" if self._config.system is None else ", or leave out chat.system")
            )
        if (self._config.system or "").strip() not in rendered:
            raise ConfigError(
                "the chat template leaves out the system prompt; give another chat.template, or "
                "leave out chat.system"
            )


def chat_template(
    tokenizer: PreTrainedTokenizerBase, config: ChatConfig
) -> Callable[[str], str] | None:
    """A function that renders a question for the tokenizer's model; None if it is no chat model.

    Raises ConfigError: settings for a chat where there is no template; and as ``ChatTemplate``.
    """
    if tokenizer.chat_template or config.template is not None:
        return ChatTemplate(tokenizer, config)
    if config.is_set:
        raise ConfigError(
            "the tokenizer has no chat template for the settings of chat; give a file as "
            "chat.template, or leave the settings out"
        )
    return None


class Prompt(NamedTuple):
    """The text that a model continues."""

    name: str  # for messages
    text: str
    rendered: bool = False  # whether the text has the special tokens that the model expects


def prompt_of(problem: Problem) -> Prompt:
    """The prompt of a problem."""
    return Prompt(f"problem {problem.id!r}", problem.prompt, problem.rendered)


def encode(tokenizer: PreTrainedTokenizerBase, text: str, rendered: bool = False) -> list[int]:
    """The ids that the tokenizer itself gives a prompt, special tokens such as BOS included.

    None are added to a text that has them: one that a chat template has ``rendered``, or that
    begins with BOS.

    Raises ConfigError: the tokenizer ends prompts with EOS.
    """
    has_bos = bool(tokenizer.bos_token) and text.startswith(tokenizer.bos_token)
    adds = not (rendered or has_bos)
    ids = list(tokenizer(text, add_special_tokens=adds).input_ids)
    ended = bool(text) and ids[-1:] == [tokenizer.eos_token_id]
    if adds and ended and not text.rstrip().endswith(tokenizer.eos_token):
        raise ConfigError(
            f"the tokenizer ends every prompt with {tokenizer.eos_token!r}, after which a model "
            "writes another text; set add_eos_token to false in its tokenizer_config.json"
        )
    return ids


def check_read(tokenizer: PreTrainedTokenizerBase, prompts: Sequence[Prompt]) -> None:
    """Warn of prompts of which the tokenizer cannot read a notable part.

    Raises ConfigError: it cannot read half of their characters.
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
        f"the tokenizer cannot read {mean:.0%} of the prompts' characters, which reach the model "
        f"as {tokenizer.unk_token or 'nothing'} ({prompts[worst].name}: {shares[worst]:.0%}); "
        "check that it is the model's tokenizer, and that the model knows the prompts' language"
    )
    if mean >= UNREAD:
        raise ConfigError(sentence)
    log.warning("%s", sentence)


def unread(tokenizer: PreTrainedTokenizerBase, text: str) -> float:
    """The share of a text's characters, spaces apart, that the tokenizer drops or maps to its
    unknown token.

    For a tokenizer that does not say where tokens come from, the share of its tokens.
    """
    unknown = tokenizer.unk_token_id
    if unknown in (tokenizer.eos_token_id, tokenizer.bos_token_id):
        unknown = None  # byte-level tokenizers do this, and can encode every text
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
    """The text of each token in its place: joined, they are the decoded response.

    A token's text is what it adds to the text of those before it. Decoded alone, half a character
    would be rubbish, and a SentencePiece token would lose its space. A character of several tokens
    stands at the first of them.
    """
    texts = [""] * len(ids)
    # ``ids[begin:read]`` is enough of what has been read to decode the next token in its place.
    begin = 0
    read = 0
    for end in range(1, len(ids) + 1):
        text = str(tokenizer.decode(ids[begin:end]))
        if text.endswith("\N{REPLACEMENT CHARACTER}") and end < len(ids):
            continue  # a character whose last token is still to come
        texts[read] = text[len(str(tokenizer.decode(ids[begin:read]))) :]
        begin = read
        read = end
    return texts
