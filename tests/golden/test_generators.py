"""Every generator's text, to the byte: problems, worked solutions, answers, and solutions with mistakes."""

import hashlib
import random

import pytest

from dvp.data.sources import GENERATORS

SHA256 = {
    "stories": "32a710a9846d7a1d1822a19e573d4ca06084a959547ceaa9ed37fd1317265560",
    "english_stories": "9a1461a597f5c2985c75ad8a40e47003072cc831a803410696e4f5ae67a7ffd3",
    "sums": "20fc8f7ac84b24a0f7023e7527cee975394d57d9eae4a32112dd043b29aaf1ec",
    "products": "dfcf72e39ac2ded9f8922232858ceb919eb07accddbaa98b5ad97bc56712a56c",
    "chains": "f47c416be4fb2e895152b94eabe476358cb80f2529830687bf23a60fd2d16565",
    "tales": "1926f80a36106f55f67788e02e72e6906a81f8282cb9e44d941df0812d13c465",
    "wide_tales": "03df6e3ec6aa77a0cde7f6a0bc535b5a0945312d517795ca0ab9b23554f93221",
    "graph_color": "1e407fe9762654fae6890c2d2da3c03b36a9992eaaf7bb0e9800913649725b9a",
}


@pytest.mark.parametrize("name", GENERATORS)
def test_a_generator_writes_what_it_wrote(name):
    generator, digest = GENERATORS[name], hashlib.sha256()
    for seed in (0, 1, 77):
        rng = random.Random(seed)
        for story in generator.generate(60, seed):
            mistakes = [generator.careless(story, rate, rng) for rate in (0.0, 0.3, 1.0)]
            digest.update("\0".join([story.problem, story.solution, story.answer, *mistakes]).encode())
    assert digest.hexdigest() == SHA256[name]
