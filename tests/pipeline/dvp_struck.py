"""`dvp`, struck by a signal at a known moment: dvp_struck.py SIGNAL MOMENT CALL ARGUMENTS…

The process sends itself what somebody else would have sent, at the n-th time that it comes to the moment; all else is
`dvp ARGUMENTS…` as it is.
"""

import importlib
import os
import signal
import sys

from dvp import cli

MOMENTS = {
    "rollout": ("dvp.training.loop", "Loop", "sample"),
    "token": ("vllm.v1.engine.llm_engine", "LLMEngine", "step"),
    "update": ("dvp.training.backend", "Trainer", "forward_backward"),
    "checkpoint": ("dvp.training.checkpoint", None, "checksums"),  # DeepSpeed's files are there, their sums are not
}


def strike(number: int, moment: str, call: int) -> None:
    module, owner, name = MOMENTS[moment]
    place = importlib.import_module(module)
    place = getattr(place, owner) if owner else place
    original, calls = getattr(place, name), 0

    def struck(*arguments, **options):
        nonlocal calls
        calls += 1
        if calls == call and moment == "rollout":
            strike(number, "token", 10)  # in the middle of it
        elif calls == call:
            os.kill(os.getpid(), number)
        return original(*arguments, **options)

    setattr(place, name, struck)


if __name__ == "__main__":
    from dvp.rollout.vllm import configure_environment

    configure_environment(threads=1)  # before vllm is imported
    cli.quiet()
    strike(signal.Signals[sys.argv[1]], sys.argv[2], int(sys.argv[3]))
    sys.exit(cli.main(sys.argv[4:]))
