"""Two verifiable tasks with long contexts for SmolLM2-135M-Instruct.

*Story*: write a long story with a given word in every sentence. Responses are long, and prompts are
short. A sentence counts if it is complete, contains the word, and differs enough from all sentences
that have counted so far.

*Ledger*: look up entries in a long ledger. Prompts are long, and responses are short. Every line of
an answer depends on one entry, anywhere in the prompt, so this task tests which pages are selected.
Many entries share a first name, and many share a last name, so both names must be compared. The
untrained model can't do this; ``warm_start.py`` teaches it with worked examples.

The reward is the fraction of sentences or lines that count, so responses to the same prompt earn
different rewards. ``SETTINGS`` was fixed before any run of the study; ``training_base.py`` measures
what the models earn before training.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial

from sparrow.tasks import Problem


@dataclass(frozen=True)
class Setting:
    """A task as it is used in all runs."""

    task: str  # as in sparrow train --task
    max_new_tokens: int
    temperature: float  # of the actor and the policy
    warm_start: bool  # whether training starts from the model that warm_start.py writes


SETTINGS = {
    "story": Setting("training_tasks:Story:sentences=16", 2048, 0.8, False),
    "ledger": Setting("training_tasks:Ledger:entries=320,asked=16", 288, 1.0, True),
}

SYSTEM = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"
"""The system prompt that the model was trained with."""
SENTENCE_WORDS = range(6, 41)
"""A sentence of a story only counts if its number of words is in this range."""
ALIKE = 0.6
"""Two sentences are alike if they share more than this fraction of the words that occur in either.
"""
OPENING = 4
"""Two sentences are also alike if their first ``OPENING`` words are the same."""


def listed(words: str) -> list[str]:
    """Split words separated by spaces."""
    return words.split()


SUBJECTS = listed(
    "river garden winter letter bridge doctor window horse island market kitchen teacher "
    "forest train picture mother stone king dog boat farmer castle mountain lamp soldier "
    "baker clock tree ring mirror"
)
FIRST_NAMES = listed(
    "Anna Ben Carla David Emma Felix Grace Henry Irene Jack Karen Leo Maria Nick Olga Paul "
    "Quinn Rosa Sam Tina Vera Will"
)
LAST_NAMES = listed(
    "Adams Baker Clark Davis Evans Fisher Green Hill Irwin Jones King Lopez Moore Nash Owen "
    "Price Reed Scott Turner Vance White Young"
)
GOODS = listed(
    "lamps chairs candles ropes barrels carpets mirrors clocks blankets baskets knives books "
    "bells hats boots spoons brushes drums maps pens plates wheels nails bricks tents"
)
CITIES = listed(
    "Paris London Berlin Madrid Rome Vienna Oslo Dublin Athens Prague Lisbon Warsaw Budapest "
    "Helsinki Brussels Zurich Geneva Milan Munich Hamburg"
)


def chat(request: str) -> str:
    """Render a request with the model's chat template."""
    return (
        f"<|im_start|>system\n{SYSTEM}<|im_end|>\n<|im_start|>user\n{request}<|im_end|>\n"
        "<|im_start|>assistant\n"
    )


@dataclass(frozen=True)
class Story:
    """Write a story with a given word in every sentence. If ``sentences`` sentences count, the
    story earns the full reward.
    """

    sentences: int = 16

    def problem(self, index: int, seed: int = 0) -> Problem:
        """Return problem ``index`` of the stream ``seed``. Problems only differ in the word."""
        word = random.Random(f"story/{seed}/{index}").choice(SUBJECTS)
        request = (
            f'Write a very long story about a {word}. Use the word "{word}" in every sentence.'
        )
        return Problem(
            id=f"story-{self.sentences}-{seed}-{index}",
            prompt=chat(request),
            verify=partial(story_reward, word, self.sentences),
            source="story",
            rendered=True,
        )


def story_reward(word: str, sentences: int, response: str) -> float:
    """Return how many sentences count minus how many are repetitions, divided by ``sentences`` and
    clipped to [0, 1].

    A sentence counts if it contains the word, ends with a full stop, question mark or exclamation
    mark, has a length in ``SENTENCE_WORDS``, and is not like any sentence that already counts. A
    sentence that contains the word, but is like one that already counts, is a repetition. It costs
    as much as a good sentence earns. Sentences without the word neither count nor cost anything.
    """
    counted: list[set[str]] = []
    openings: set[tuple[str, ...]] = set()
    repetitions = 0
    for sentence in re.split(r"(?<=[.!?])[\"')]*\s+", response.strip()):
        words = re.findall(r"[a-z']+", sentence.lower())
        opening = tuple(words[:OPENING])
        distinct = set(words)
        if word not in distinct:
            continue
        if opening in openings or any(alike(distinct, other) for other in counted):
            repetitions += 1
        elif len(words) in SENTENCE_WORDS and re.search(r"[.!?][\"')]*$", sentence):
            counted.append(distinct)
            openings.add(opening)
    return min(1.0, max(0, len(counted) - repetitions) / sentences)


def alike(words: set[str], others: set[str]) -> bool:
    """Return whether two sentences share more than ``ALIKE`` of the words that occur in either."""
    return len(words & others) > ALIKE * len(words | others)


@dataclass(frozen=True)
class Ledger:
    """Look up ``asked`` people in a ledger of ``entries`` people, and write what each of them
    bought and where. The prompt has about 9 tokens per entry.
    """

    entries: int = 320
    asked: int = 16

    def problem(self, index: int, seed: int = 0) -> Problem:
        """Return problem ``index`` of the stream ``seed``."""
        rng = random.Random(f"ledger/{self.entries}/{seed}/{index}")
        people = rng.sample([f"{a} {b}" for a in FIRST_NAMES for b in LAST_NAMES], self.entries)
        ledger = {person: (rng.choice(GOODS), rng.choice(CITIES)) for person in people}
        asked = rng.sample(people, self.asked)
        request = (
            "This is a ledger of purchases.\n\n"
            + lines(
                f"{person} bought {goods} in {city}." for person, (goods, city) in ledger.items()
            )
            + "\nWhat did each of these people buy, and where? Write one line per person, in this "
            "order, such as: Name: goods, city\n\n" + lines(asked)
        )
        answers = {person: f"{person}: {', '.join(ledger[person])}" for person in asked}
        return Problem(
            id=f"ledger-{self.entries}-{seed}-{index}",
            prompt=chat(request),
            verify=partial(ledger_reward, answers),
            source="ledger",
            solution=lines(answers.values()).rstrip("\n"),
            rendered=True,
        )


def ledger_reward(answers: Mapping[str, str], response: str) -> float:
    """Return the number of right answers, divided by the number of answers that were asked for or
    the number of lines in the response, whichever is larger. Only the first line about a person
    counts.

    Args:
        answers: the line expected for each person.
    """
    written = [line.strip() for line in response.splitlines() if line.strip()]
    first: dict[str, str] = {}
    for line in written:
        first.setdefault(line.partition(":")[0], line)
    right = sum(first.get(person) == answer for person, answer in answers.items())
    return right / max(len(answers), len(written))


def lines(texts: Iterable[str]) -> str:
    """Join texts as lines, each with a line break at its end."""
    return "".join(f"{text}\n" for text in texts)
