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
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cache

from dvp.data import stories
from dvp.data.stories import Lexicon, Story

careless = stories.careless


class Words:
    """`times` 13,000 words, a lexicon for each kind."""

    def __init__(self, times: int) -> None:
        self.adverbs = Lexicon(1000 * times, ending="ly", capital=True, seed=4)
        self.adjectives = Lexicon(4000 * times, ending="y", capital=False, seed=5)
        self.nouns = Lexicon(6000 * times, ending="et", capital=False, seed=6)
        self.verbs = Lexicon(2000 * times, ending="sed", capital=False, seed=7)

    def sentence(self, rng: random.Random) -> str:
        """Seven words."""
        adverb, verb = self.adverbs.draw(rng), self.verbs.draw(rng)
        first, second = (f"the {self.adjectives.draw(rng)} {self.nouns.draw(rng)}" for _ in range(2))
        return f"{adverb} {first} {verb} {second} of the {self.nouns.draw(rng)}"


words = cache(Words)  # made when they are first asked for: many take two seconds


def told(times: int) -> Callable[..., Iterator[Story]]:
    """`generate` with so many times the words."""

    def generate(count: int, seed: int, steps: Sequence[int] = (2, 4)) -> Iterator[Story]:
        """As `stories.generate`, whose problems with the same arguments these are."""
        rng = random.Random(f"tales {seed}")  # a stream of its own
        for story in stories.generate(count, seed, steps):
            *lines, last = story.solution.splitlines()
            lines = [f"{words(times).sentence(rng)}: {line}" for line in lines]
            yield replace(story, solution="\n".join([*lines, last]))

    return generate


generate = told(1)
