"""Tales: story arithmetic whose worked solutions are written with words from a long natural tail.

Each step comes with a sentence that tells nothing: seven words, each drawn by Zipf's law from thousands. So most of a
response is a choice among many words of which none is wrong, and what is unlikely there was learned, and is no error of
the model. A vocabulary of 16,384 tokens fills up.

    Bomira has 9 tesons. Lavu gives Bomira 5 more. Bomira sells 3 in Dorik. How many tesons are left?

    Vemaly the kosuty fanet rimased the gody telanet of the sovet: 9 + 5 = 14.
    Tuply the zariny dupet mokesed the legivy banet of the pizulet: 14 - 3 = 11.
    Answer: 11
"""

import random
from collections.abc import Iterator, Sequence
from dataclasses import replace

from dvp.data import stories
from dvp.data.stories import Lexicon, Story

_BETWEEN = ": "  # the sentence that tells nothing, and the step


class Words:
    """`times` 13,000 words, a lexicon for each kind."""

    def __init__(self, times: int = 1) -> None:
        self.adverbs = Lexicon(1000 * times, ending="ly", capital=True, seed=4)
        self.adjectives = Lexicon(4000 * times, ending="y", capital=False, seed=5)
        self.nouns = Lexicon(6000 * times, ending="et", capital=False, seed=6)
        self.verbs = Lexicon(2000 * times, ending="sed", capital=False, seed=7)


WORDS = Words()


def generate(count: int, seed: int, steps: Sequence[int] = (2, 4), *, words: Words = WORDS) -> Iterator[Story]:
    """Yield `count` tales of steps[0] to steps[1] steps: the problems of `stories` with the same arguments.

    The same arguments give the same tales in every process; a larger count extends a smaller one.
    """
    # A stream of its own: the problems are those of `stories`.
    rng = random.Random(f"tales {seed}")
    for story in stories.generate(count, seed, steps):
        *lines, last = story.solution.splitlines()
        told = [f"{_sentence(words, rng)}{_BETWEEN}{line}" for line in lines]
        yield replace(story, solution="\n".join([*told, last]))


def careless(tale: Story, error_rate: float, rng: random.Random) -> str:
    """The worked solution with the same sentences and each step wrong with probability `error_rate`, and "is" for "=".

    What a wrong step is, and what follows from it, is that of `stories.careless`.
    """
    *lines, answer = tale.solution.splitlines()
    sentences, steps = zip(*(line.split(_BETWEEN) for line in lines), strict=True)
    plain = replace(tale, solution="\n".join([*steps, answer]))
    *steps, answer = stories.careless(plain, error_rate, rng).splitlines()
    pairs = zip(sentences, steps, strict=True)
    return "\n".join([*(f"{sentence}{_BETWEEN}{step}" for sentence, step in pairs), answer])


def _sentence(words: Words, rng: random.Random) -> str:
    adverb, verb = words.adverbs.draw(rng), words.verbs.draw(rng)
    first, second = (f"the {words.adjectives.draw(rng)} {words.nouns.draw(rng)}" for _ in range(2))
    return f"{adverb} {first} {verb} {second} of the {words.nouns.draw(rng)}"
