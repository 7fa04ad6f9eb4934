"""Run by the tests in a process of its own (one engine a process): sample with an engine, optionally after an update.

Fails if the engine does not prune as each kind of rule says, if its logits are not as fine as its head, if its cache
has not the room for what it may sample at once, or twice that, or if it starts by what only this process could do.

usage: engine_process.py MODEL PRECISION_JSON [UPDATE_MODEL]; prints the completions as JSON on its last line.
ENGINE_PROCESSES is how many it is spread over; one that is spread over several takes no update.
"""

import json
import math
import os
import sys
from dataclasses import asdict
from functools import partial
from pathlib import Path

from dvp.core.safe_vocabulary import Entropy, EntropyScaled, FixedRho, MassBudget
from dvp.rollout.vllm import VllmEngine, configure_environment, prove_safe_vocabulary

PROMPTS = [[20, 30, 40, 50], [60, 70], [80, 90, 100, 110, 120, 130]]
SEEDS = [11, 22, 33]
PROCESSES = int(os.environ.get("ENGINE_PROCESSES", "1"))
ENTROPY = Entropy(rule="entropy", alpha=1.5, target_entropy=3.0, lowest=1e-4, highest=0.5)
RULES = [FixedRho(0.02), MassBudget(0.02), EntropyScaled(0.05, ENTROPY)]


def main() -> None:
    configure_environment(threads=1)
    import cloudpickle
    import torch
    import vllm
    from transformers import AutoModelForCausalLM
    from vllm import LLM

    from dvp.experiment.training import EngineConfig
    from dvp.rollout.engine import Sampling

    torch.set_num_threads(1)
    config = EngineConfig(**json.loads(sys.argv[2]))
    to_workers = LLM.collective_rpc

    def sendable(llm, *arguments, **options):
        cloudpickle.dumps((arguments, options))  # as vLLM sends it to an engine's other processes
        return to_workers(llm, *arguments, **options)

    LLM.collective_rpc = sendable
    if PROCESSES > 1:  # on a CPU nobody can ask for it
        vllm.LLM = partial(LLM, tensor_parallel_size=PROCESSES, distributed_executor_backend="mp")
    engine = VllmEngine(
        Path(sys.argv[1]),
        config,
        max_model_len=128,
        max_num_seqs=32,
        seed=0,
        rules=RULES,
    )
    LLM.collective_rpc = to_workers
    cache = engine.llm.llm_engine.vllm_config.cache_config
    needed = 32 * math.ceil(128 / cache.block_size)
    if not torch.cuda.is_available():
        assert needed < cache.num_gpu_blocks < 2 * needed, (cache.num_gpu_blocks, cache.block_size)
    if len(sys.argv) > 3:
        engine.generate(PROMPTS, Sampling(max_tokens=8), SEEDS)  # something that the caches must forget
        model = AutoModelForCausalLM.from_pretrained(sys.argv[3], dtype=torch.float32)
        engine.load_weights(model.named_parameters())
    for rule in RULES:
        prove_safe_vocabulary(engine, PROMPTS, rule)
    for prompt in PROMPTS:
        values_V = engine.log_probs(prompt, None)
        equal = len(values_V) - len(values_V.unique())
        assert (equal > len(values_V) / 8) == (config.dtype == "bfloat16" and config.head_dtype == "auto"), equal
    groups = engine.generate(PROMPTS, Sampling(max_tokens=24, n=4), SEEDS)
    print(json.dumps([[asdict(one) for one in group] for group in groups]))


if __name__ == "__main__":
    main()
