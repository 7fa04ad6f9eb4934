"""The generators that a source can name: each a module with `generate` and `careless`."""

from dvp.data import chains, graph_color, products, shortest_path, stories, tales, wide_tales

GENERATORS = {
    "stories": stories,
    "products": products,
    "chains": chains,
    "tales": tales,
    "wide_tales": wide_tales,
    "shortest_path": shortest_path,
    "graph_color": graph_color,
}
