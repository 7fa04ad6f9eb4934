"""TRL's trainer with the method: trl_process.py MODEL FOLDER CONFIG, under torchrun in several processes."""

import json
import sys
import zlib
from pathlib import Path
from types import SimpleNamespace

from transformers import AutoModelForCausalLM
from trl_settings import RHO, NoisyEngine, make_settings

from dvp.integrations.trl import MismatchTrainer


class ByPrompt(NoisyEngine):
    """Its responses follow from prompt and step, whichever process asks; its weights are those of the start."""

    def __init__(self, model):
        super().__init__(RHO)
        self.model = model

    def __call__(self, prompts, trainer):
        engine = SimpleNamespace(model=self.model, processing_class=trainer.processing_class)
        made = []
        for place, prompt in enumerate(prompts):
            number = prompts[:place].count(prompt)
            self.generator.manual_seed(zlib.crc32(f"{prompt} {number} {trainer.state.global_step}".encode()))
            made.append(super().__call__([prompt], engine))
        return {key: [item for one in made for item in one[key]] for key in made[0]}


model, folder, config = sys.argv[1:]
engine = ByPrompt(AutoModelForCausalLM.from_pretrained(model))  # before DeepSpeed cuts what is loaded into shards
# By SGD, without clipping: the weights move by the gradient.
fixed = {"seed": 1, "optim": "sgd", "learning_rate": 1.0, "max_grad_norm": 1e9, "loss_type": "grpo"}
given = make_settings(model, folder, **fixed | json.loads(config))
given["rollout_func"] = None if given["args"].use_vllm else engine
trainer = MismatchTrainer(**given, correction="tis", advantage="otb", rollouts=f"{folder}/rollouts.jsonl")
if trainer.use_vllm:
    # TRL's own hands one weight after the other to the model's load_weights: vLLM has packed each matrix on a CPU and
    # left an empty parameter, which has no weight_loader.
    vllm = trainer.vllm_generation

    def sync_weights():
        vllm.llm.collective_rpc("reload_weights", kwargs={"weights_iterator": vllm._iter_named_params()})
        vllm.llm.reset_prefix_cache()

    vllm.sync_weights = sync_weights
trainer.train()
trainer.save_model(folder)
of_all = ("mismatch/", "sampling/")
logged = [{name: value for name, value in row.items() if name.startswith(of_all)} for row in trainer.state.log_history]
Path(folder, "logged.json").write_text(json.dumps([row for row in logged if row]))
