"""The generators that a source can name: each has `generate` and `careless`, see dvp.data.stories."""

from dvp.data import graph_color, shortest_path, stories

GENERATORS = {
    "stories": stories.STORIES,
    "products": stories.PRODUCTS,
    "chains": stories.CHAINS,
    "tales": stories.TALES,
    "wide_tales": stories.WIDE_TALES,
    "shortest_path": shortest_path,
    "graph_color": graph_color,
}
