"""The package is a row of rooms: each imports only from rooms before it, and no two modules import each other."""

import ast
import subprocess
import sys
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import dvp

PACKAGE = Path(dvp.__file__).parent
ROOMS = [
    ("errors", "files", "gpus", "hub", "node", "strict", "signals", "progress", "provenance", "versions"),
    ("answers",),
    ("core",),
    ("experiment",),
    ("tracking",),
    ("stage",),
    ("data",),
    ("tools",),
    ("rollout",),
    ("integrations",),
    ("training",),
    ("conversion",),
    ("evaluation",),
    ("measurement",),
    ("analysis",),
    ("planning",),
    ("preflight",),
    ("cli",),
]
# `core.rows` hands over to its kernels where there is a GPU; they take its types.
KNOWN = {("core.rows", "core.rows_triton")}
ORDER = {room: place for place, rooms in enumerate(ROOMS) for room in rooms}


def imported(name: str, source: str, modules: set[str]) -> set[str]:
    """The modules of this package that a module imports, anywhere in it but for the sake of types only."""
    tree = ast.parse(source)
    for_types = [
        node for node in ast.walk(tree) if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
    ]
    skipped = {inner for node in for_types for inner in ast.walk(node)}
    names = set()
    for node in ast.walk(tree):
        if node in skipped:
            continue
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name}: relative import"
            # Of `from dvp.x import y`, y may be a module or not.
            inner = {f"{node.module}.{alias.name}" for alias in node.names}
            names |= {str(node.module)} | {name for name in inner if name.removeprefix("dvp.") in modules}
    return {name.removeprefix("dvp.") for name in names if name.startswith("dvp.")}


@pytest.fixture(scope="module")
def graph() -> dict[str, set[str]]:
    """For every module, those that it imports; by their names below `dvp`."""
    files = {
        ".".join(path.relative_to(PACKAGE).with_suffix("").parts).removesuffix(".__init__"): path
        for path in PACKAGE.rglob("*.py")
        if path != PACKAGE / "__init__.py"
    }
    return {name: imported(name, path.read_text(encoding="utf-8"), set(files)) for name, path in files.items()}


def test_every_module_is_in_a_room(graph):
    assert {name.split(".")[0] for name in graph} == set(ORDER)


def test_every_import_is_of_a_module_that_there_is(graph):
    assert not {f"{name} imports {other}" for name, others in graph.items() for other in others - set(graph)}


def test_no_room_imports_from_a_room_after_it(graph):
    upwards = {
        f"{name} imports {other}"
        for name, others in graph.items()
        for other in others
        if ORDER[other.split(".")[0]] > ORDER[name.split(".")[0]]
    }
    assert not upwards


def test_answers_could_be_a_package_of_its_own(graph):
    needed = {other for name in graph if name.split(".")[0] == "answers" for other in graph[name]}
    assert {other for other in needed if other.split(".")[0] != "answers"} == {"errors"}


def test_no_modules_import_each_other(graph):
    known = {name: {other for other in others if (name, other) not in KNOWN} for name, others in graph.items()}
    TopologicalSorter(known).prepare()  # raises CycleError, which names them


@pytest.mark.parametrize("verb", [["--help"], ["plan", "--config", "experiment=tiny"]])
def test_a_verb_that_needs_no_model_starts_without_heavy_libraries(verb, root):
    program = "import sys; from dvp.cli import main; main(sys.argv[1:]); print(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", program, *verb], cwd=root, check=True, capture_output=True, text=True, timeout=120
    )
    heavy = {"torch", "pandas", "scipy", "pyarrow", "matplotlib", "mlflow", "transformers", "snakemake"}
    assert not heavy & set(done.stdout.splitlines()[-1].split())


@pytest.mark.parametrize(
    "modules", ["dvp.experiment.loading, dvp.experiment.folder", "dvp.analysis.parts", "dvp.cli", "dvp.stage"]
)
def test_reading_an_experiment_imports_no_torch(modules, root):
    program = (
        f"import sys, {modules}\n"
        "from dvp.experiment.loading import load_experiment\n"
        "load_experiment('smoke')\n"
        "print(*sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=root, check=True, capture_output=True, text=True, timeout=120
    )
    assert not {"torch", "transformers", "vllm", "deepspeed", "mlflow"} & set(done.stdout.split())
