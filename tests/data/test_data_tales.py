"""Tales: the stories of the same seed, with sentences that tell nothing and whose words have a tail."""

import random
import re
from collections import Counter

import pytest

from dvp.data import stories, wide_tales
from dvp.data.tales import careless, generate, words
from dvp.data.verifier import grade

STEPS = (3, 6)
WORDS = words(1)
TALES = list(generate(400, seed=7, steps=STEPS))
STORIES = list(stories.generate(400, seed=7, steps=STEPS))
SENTENCE = re.compile(r"(\w+) the (\w+) (\w+) (\w+) the (\w+) (\w+) of the (\w+)")
_SECOND = (WORDS.adjectives, WORDS.nouns, WORDS.nouns)
SLOTS = (WORDS.adverbs, WORDS.adjectives, WORDS.nouns, WORDS.verbs, *_SECOND)


def parted(solution: str) -> tuple[list[str], str]:
    """The sentences, and the solution without them."""
    *lines, last = solution.splitlines()
    pairs = [line.split(": ") for line in lines]
    return [sentence for sentence, _ in pairs], "\n".join([*(step for _, step in pairs), last])


def test_without_their_sentences_they_are_stories():
    for tale, story in zip(TALES, STORIES, strict=True):
        sentences, plain = parted(tale.solution)
        assert (tale.problem, plain, tale.answer) == (story.problem, story.solution, story.answer)
        assert 3 <= len(sentences) <= 6
        assert grade(tale.solution, tale.answer)


def test_every_word_comes_from_the_lexicon_of_its_place_and_common_ones_come_often():
    counts: Counter[str] = Counter()
    for tale in TALES:
        for sentence in parted(tale.solution)[0]:
            words = SENTENCE.fullmatch(sentence).groups()
            for word, lexicon in zip(words, SLOTS, strict=True):
                assert word in lexicon.words
            counts.update([words[3]])
    # Zipf: the likeliest of 2,000 has 1 / (1 + 1/2 + … + 1/2000) = 0.122, the second half of it.
    total = counts.total()
    assert counts[WORDS.verbs.words[0]] / total == pytest.approx(0.122, abs=0.03)
    assert counts[WORDS.verbs.words[1]] / total == pytest.approx(0.061, abs=0.02)
    assert sum(count == 1 for count in counts.values()) > 200


def test_a_seed_gives_the_same_ones_and_a_larger_count_extends_them():
    assert list(generate(5, seed=7, steps=STEPS)) == TALES[:5]
    assert list(generate(5, seed=8, steps=STEPS)) != TALES[:5]
    assert len({parted(tale.solution)[0][0] for tale in TALES}) == len(TALES)


def test_careless_solutions_keep_the_sentences_and_are_those_of_the_story():
    wrong = 0
    for number, (tale, story) in enumerate(zip(TALES, STORIES, strict=True)):
        written = careless(tale, 0.35, random.Random(number))
        sentences, plain = parted(written)
        assert sentences == parted(tale.solution)[0]
        assert plain == stories.careless(story, 0.35, random.Random(number))
        wrong += not grade(written, tale.answer)
    assert 100 < wrong < 400


def test_wide_tales_are_the_same_stories_in_other_words():
    """Of 400 tales' some 12,600 draws sixteen times the words leave more different ones."""
    wide = list(wide_tales.generate(400, seed=7, steps=STEPS))
    different = []
    for tales in (TALES, wide):
        assert [parted(tale.solution)[1] for tale in tales] == [story.solution for story in STORIES]
        different.append(len({word for tale in tales for word in tale.solution.split()}))
    assert different[1] > 1.4 * different[0]
