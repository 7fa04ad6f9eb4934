"""Run by the tests in a process of its own, which compiles (the tests' own does not): the head's costs as JSON.

usage: head_process.py TOKENS HIDDEN
"""

import json
import sys

import torch

from dvp.benchmark.head import Size, forward_variants, measure, problem, warm_up

if __name__ == "__main__":
    inputs = problem(Size(int(sys.argv[1]), int(sys.argv[2])), torch.float32, "cpu")
    warm_up(*inputs)
    variants = forward_variants(*inputs)
    variants = {name: variants[name] for name in ("bare product", "head", "dense")}
    print(json.dumps(measure("forward", torch.float32, variants, rounds=3, device="cpu")["variants"]))
