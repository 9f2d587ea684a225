"""The synthetic task's vocabulary, its tokenizer (under 200 tokens, one per word), and functions
that find answers in responses.

As in most subword vocabularies, a word includes its leading space. To restore the original text,
decode tokens one by one and join them.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

_NUCLEI = ("a", "e", "i", "o", "u", "ai", "oi", "ou")
NAMES = tuple(onset + nucleus for onset in "bdfghjklmnprstvz" for nucleus in _NUCLEI)
"""128 pronounceable variable names."""

LINKS = ("also", "hence", "here", "next", "now", "then", "thus", "well")
"""Words between the parts of a line. None of them is also a variable name."""

PAD, BOS, EOS, UNK = SPECIAL = ("<pad>", "<bos>", "<eos>", "<unk>")
# No task uses map, ask or walk any more, but they are in the bundled checkpoint's vocabulary.
_PLAIN = ("\n", ":", ",", "program", "trace", "map", "ask", "walk", "answer")
_SPACED = (*"0123456789", "+", "-", "->", *LINKS, *NAMES)


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Build the synthetic task's word-level tokenizer, in Hugging Face format.

    It adds no special tokens, maps unknown words to ``<unk>``, and round-trips the task's texts
    exactly.
    """
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = (*SPECIAL, *_PLAIN, *(" " + word for word in _SPACED))
    tokenizer = Tokenizer(
        models.WordLevel({word: i for i, word in enumerate(words)}, unk_token=UNK)
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"\n|[:,]| ?[^\s:,]+"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        bos_token=BOS,
        eos_token=EOS,
        unk_token=UNK,
        padding_side="left",
        clean_up_tokenization_spaces=False,
    )


_ANSWER = re.compile(r"answer: (\d)\s*(?:<eos>\s*)*\Z")


def stated_answer(response: str) -> str | None:
    """Return the digit if the response ends in ``answer: <digit>``, otherwise None."""
    match = _ANSWER.search(response)
    return match[1] if match else None


def check_answer(response: str, expected: int) -> float:
    """Return 1.0 if the response ends in ``answer: <expected>``, otherwise 0.0."""
    return float(stated_answer(response) == str(expected))
