"""The generators that a source can name: each a module with `generate` and `careless`."""

from dvp.data import chains, products, stories, tales

GENERATORS = {"stories": stories, "products": products, "chains": chains, "tales": tales}
