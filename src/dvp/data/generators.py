"""The generators that a source can name: each a module with `generate` and `careless`."""

from dvp.data import chains, graph_color, products, shortest_path, stories, tales

GENERATORS = {
    "stories": stories,
    "products": products,
    "chains": chains,
    "tales": tales,
    "shortest_path": shortest_path,
    "graph_color": graph_color,
}
