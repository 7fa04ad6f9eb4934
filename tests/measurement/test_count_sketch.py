"""The count sketch keeps inner products, on average over its seeds, and sums exactly."""

import pytest
import torch

from dvp.errors import DvpError
from dvp.measurement.count_sketch import CountSketch


def test_inner_products_are_unbiased_with_the_variance_that_is_stated():
    torch.manual_seed(0)
    x, y = torch.randn(300, dtype=torch.float64), torch.randn(300, dtype=torch.float64)
    y = y + x
    buckets = 64
    products = []
    for seed in range(800):
        sketch = CountSketch([100, 200], buckets, seed)
        products.append((sketch([x[:100], x[100:]]) @ sketch([y[:100], y[100:].view(20, 10)])).item())
    products = torch.tensor(products, dtype=torch.float64)
    bound = 2 * (x @ x) * (y @ y) / buckets
    assert abs(products.mean() - x @ y) < 4 * products.std() / 800**0.5
    assert 0.3 * bound < products.var() < 1.2 * bound


def test_a_sum_of_sketches_is_the_sketch_of_the_sum_and_equal_seeds_agree():
    torch.manual_seed(0)
    x, y = torch.randn(50, dtype=torch.float64), torch.randn(50, dtype=torch.float64)
    sketch, again = CountSketch([50], 8, 3), CountSketch([50], 8, 3)
    torch.testing.assert_close(sketch([x]) + sketch([y]), again([x + y]))
    assert not torch.equal(sketch([x]), CountSketch([50], 8, 4)([x]))
    assert sketch.length == len(sketch([x])) == 8
    assert not sketch.exact


def test_what_fits_stays_as_it_is():
    x = torch.arange(6.0)
    sketch = CountSketch([4, 2], 6, 0)
    assert sketch.exact
    assert torch.equal(sketch([x[:4].view(2, 2), x[4:]]), x)


def test_impossible_sizes_are_refused():
    with pytest.raises(DvpError, match="buckets"):
        CountSketch([4], 0, 0)
