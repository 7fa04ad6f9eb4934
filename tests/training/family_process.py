"""Run by the tests in a process of its own (one engine a process): trainer and engine of a model, then after an update.

usage: family_process.py MODEL. Prints as JSON how far `Agreement` found them apart.
"""

import json
import sys
from pathlib import Path

from dvp.cli import quiet
from dvp.rollout.vllm import VllmEngine, configure_environment

ROOT = Path(__file__).parents[2]
PROMPTS = [[20 + 7 * row + column for column in range(2 + row % 4)] for row in range(8)]


def main() -> None:
    quiet()
    configure_environment(threads=1)
    import torch

    from dvp.core.batch import Batch
    from dvp.experiment.training import EngineConfig, TrainingConfig
    from dvp.training import agreement
    from dvp.training.backend import Trainer

    torch.set_num_threads(1)
    model, config = Path(sys.argv[1]), EngineConfig(dtype="float32")
    settings = TrainingConfig(
        steps=1,
        prompts_per_step=8,
        group_size=1,
        tokens_per_micro_batch=64,
        max_response_tokens=16,
        learning_rate=1e-3,
        deepspeed="zero1",
        checkpoint_every=1,
    )
    options = json.loads((ROOT / "config/deepspeed/zero1.json").read_text())
    trainer = Trainer(model, settings, options, PROMPTS)
    engine = VllmEngine(model, config, max_model_len=64, max_num_seqs=8, seed=0)
    compare, worst = agreement.compare, []

    def measured(*arguments, **options):
        compared = compare(*arguments, **options)
        worst.append(compared.log_ratio_N.view(-1, agreement.DRAWN).abs().mean(1).max().item())
        return compared

    agreement.compare = measured
    held = agreement.Agreement(trainer, engine, PROMPTS, 0, config)
    engine.load_weights(trainer.weights())
    held.check()
    batch = Batch.collate([prompt[:1] for prompt in PROMPTS], [prompt[1:] for prompt in PROMPTS], pad=0)
    trainer.forward_backward(batch, None, lambda statistics: -statistics.log_prob.mean(), last=True)
    engine.load_weights(trainer.weights())
    held.check_again()
    print(json.dumps(worst))


if __name__ == "__main__":
    main()
