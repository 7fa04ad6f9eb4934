"""Fixtures and settings shared by all tests: a tiny untrained model, the `dvp` command, the repository's root."""

import os
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import settings

from dvp.cli import quiet
from dvp.gpus import CLAIMED
from dvp.rollout.vllm import configure_environment

ROOT = Path(__file__).parents[1]
# Test workers and their subprocesses share a GPU.
os.environ.setdefault(CLAIMED, "shared by tests")
# Must run before vllm, deepspeed or mlflow is imported. One thread: tensors are tiny, and another worker needs a core.
configure_environment(threads=1)
torch.set_num_threads(1)
quiet()
LINEAR = torch.nn.functional.linear
settings.register_profile("untimed", deadline=None)  # the machine may be busy
settings.load_profile("untimed")
settings.register_profile("quick", max_examples=20)  # for `make check`; 100 otherwise

# The longest tests begin first, so that no worker is left alone with them at the end.
FIRST = ("slurm", "pipeline", "training", "rollout", "tracking")


@pytest.hookimpl(tryfirst=True)  # before xdist's own hook, which reads the groups
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Send tests with shared slow fixtures to the same worker, for `make test`, which runs two.

    These are the tests of a file and, as a machine has one Slurm, all of tests/slurm.
    """
    if not config.pluginmanager.hasplugin("xdist"):
        return

    def folder(item: pytest.Item) -> str:
        return item.path.relative_to(ROOT / "tests").parts[0]

    for item in items:
        group = "slurm" if folder(item) == "slurm" else item.path.relative_to(ROOT / "tests").as_posix()
        item.add_marker(pytest.mark.xdist_group(group))
    items.sort(key=lambda item: FIRST.index(folder(item)) if folder(item) in FIRST else len(FIRST))


def pytest_collection_finish(session: pytest.Session) -> None:
    """Check that xdist has grouped the tests: with an unsupported pytest it silently does not (its issue 1386)."""
    if getattr(session.config.option, "loadgroup", False):
        assert all("@" in item.nodeid for item in session.items), "pytest-xdist groups no tests with this pytest"


NEEDED = {
    "real data": "the real data sets beside the clone (tests/data/conftest.py)",
    "Slurm's programs": "Slurm and munge (.ci/run names Debian's packages)",
    "bubblewrap": "Debian's bubblewrap",
    "chromium": "Debian's chromium",
    "TRL": "envs/dev.txt",
    "verl": "verl, for which there is `make test-verl`",
    "namespaces": "a kernel that lets this user make namespaces",
    "no right to mount": "the right to mount",
    "GPU": "a GPU",
}
"""Requirement of skipped tests, by a word in the reason for which they are skipped."""


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print at the end, in one line, what the skipped tests require."""
    skipped = terminalreporter.stats.get("skipped", [])
    reasons = "\n".join(str(report.longrepr) for report in skipped)
    if wanted := [what for word, what in NEEDED.items() if word in reasons]:
        terminalreporter.write_line(f"to run the {len(skipped)} skipped tests: {'; '.join(wanted)}")


@pytest.fixture(scope="module", autouse=True)
def torch_is_as_before() -> Iterator[None]:
    """Undo after each file what its engines and trainers leave in the process, before another file sees it.

    These are the process groups, and the `linear` with which DeepSpeed's ZeRO-3 replaces torch's.
    """
    yield
    torch.nn.functional.linear = LINEAR
    if not torch.distributed.is_initialized():
        return
    if "vllm.distributed.parallel_state" in sys.modules:
        from vllm.distributed.parallel_state import destroy_distributed_environment, destroy_model_parallel

        destroy_model_parallel()
        destroy_distributed_environment()
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    if "deepspeed.comm.comm" in sys.modules:  # as its own destroy_process_group would do, had torch's not been called
        from deepspeed.utils import groups

        groups._release_process_group_references()
        sys.modules["deepspeed.comm.comm"].cdb = None


@pytest.fixture(scope="session")
def root() -> Path:
    """Return the root folder of the repository."""
    return ROOT


@pytest.fixture(scope="session")
def dvp():
    """Return a function that runs `dvp …` in a subprocess: (exit status, last line of standard error, all of it)."""

    def run(*arguments: str, cwd: Path = ROOT, timeout: int = 600) -> tuple[int, str, str]:
        done = subprocess.run(
            [sys.executable, "-m", "dvp.cli", *map(str, arguments)],
            cwd=cwd,
            check=False,
            capture_output=True,
            text=True,
            timeout=timeout,
            env=os.environ,
        )
        lines = done.stderr.strip().splitlines()
        return done.returncode, lines[-1] if lines else "", done.stderr

    return run


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory) -> Path:
    """Create a Hugging Face directory: a Qwen3 with two layers, a tied head and random weights.

    The weights are large enough for distributions that are far from uniform.
    """
    from transformers import Qwen3Config, Qwen3ForCausalLM

    from dvp.training.base import train_tokenizer

    folder = tmp_path_factory.mktemp("tiny-model")
    rng = random.Random(0)
    words = ["".join(rng.choice("bdfgklmnprst") + rng.choice("aeiou") for _ in range(3)) for _ in range(400)]
    tokenizer = train_tokenizer((" ".join(rng.choices(words, k=30)) for _ in range(500)), 400)
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=400,
            hidden_size=64,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            head_dim=32,
            intermediate_size=96,
            max_position_embeddings=512,
            tie_word_embeddings=True,
            bos_token_id=None,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
            initializer_range=0.15,
        )
    ).float()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
