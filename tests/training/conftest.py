"""A training loop with a scripted engine, for the tests of the loop and of what it survives."""

from functools import partial

import pytest
from test_loop import build_loop


@pytest.fixture
def make_loop(tiny_model, root):
    return partial(build_loop, tiny_model, root)
