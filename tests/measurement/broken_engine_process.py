"""Run by the tests in place of `dvp`, with the same arguments: the engine alone takes every position for half of it.

That is as if its rotary embedding were scaled by a factor of 2, of which the trainer's model knows nothing.
"""

import sys

from dvp.cli import main
from dvp.rollout.vllm import VllmEngine


def halve_positions(worker) -> None:
    import torch

    caches = {id(module.cos_sin_cache): module.cos_sin_cache for module in rotary(worker)}
    assert caches
    for cache in caches.values():
        cache.copy_(cache[torch.arange(len(cache)) // 2])


def rotary(worker) -> list:
    return [module for module in worker.model_runner.model.modules() if hasattr(module, "cos_sin_cache")]


def break_engines() -> None:
    start = VllmEngine.__init__

    def broken(engine, *arguments, **options):
        start(engine, *arguments, **options)
        engine.llm.collective_rpc(halve_positions)

    VllmEngine.__init__ = broken


if __name__ == "__main__":
    break_engines()
    sys.exit(main(sys.argv[1:]))
