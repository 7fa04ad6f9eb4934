"""What the tests' trainers are given: a tiny model, prompts, a reward, and an engine that differs from the trainer."""

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig

GROUP, TOKENS, TEMPERATURE, RHO = 4, 6, 0.7, 0.05
PROMPTS = ["bado kila", "gofu", "tupa remi solo", "ni"]


def make_settings(tiny_model, folder, **changed):
    """What a GRPOTrainer is given; `changed` goes into its GRPOConfig."""
    config = GRPOConfig(
        str(folder),
        **{
            "min_p": RHO,
            "temperature": TEMPERATURE,
            "num_generations": GROUP,
            "per_device_train_batch_size": len(PROMPTS) * GROUP,
            "max_completion_length": TOKENS,
            "loss_type": "dr_grpo",
            "scale_rewards": "none",
            "max_steps": 2,
            "logging_steps": 1,
            "learning_rate": 1e-2,
            "lr_scheduler_type": "constant",
            "max_grad_norm": 0.0,
            "report_to": "none",
            "save_strategy": "no",
            "bf16": False,
            "use_cpu": True,
        }
        | changed,
    )
    return {
        "model": AutoModelForCausalLM.from_pretrained(tiny_model),
        "processing_class": AutoTokenizer.from_pretrained(tiny_model, padding_side="left"),
        "args": config,
        "train_dataset": Dataset.from_dict({"prompt": PROMPTS}),
        "reward_funcs": reward,
        "rollout_func": NoisyEngine(config.min_p or 0.0),
    }


def reward(completion_ids, **_):
    """Between 0 and 1, a function of the tokens alone."""
    return [sum(ids) % 7 / 7 for ids in completion_ids]


class NoisyEngine:
    """Samples by min-p from the policy's logits with noise on them, which the trainer does not know."""

    def __init__(self, rho):
        self.rho = rho
        self.generator, self.made = torch.Generator().manual_seed(0), []

    @torch.no_grad()
    def __call__(self, prompts, trainer):
        made = {"prompt_ids": trainer.processing_class(prompts)["input_ids"], "completion_ids": [], "logprobs": []}
        for prompt in made["prompt_ids"]:
            ids, log_probs = [], []
            while len(ids) < TOKENS and trainer.processing_class.eos_token_id not in ids:
                z = trainer.model(torch.tensor([prompt + ids])).logits[0, -1]
                z = (z + 0.4 * torch.randn(z.shape, generator=self.generator)) / TEMPERATURE
                p = z.softmax(dim=0)
                p = torch.where(p >= self.rho * p.max(), p, 0.0)
                token = torch.multinomial(p, 1, generator=self.generator).item()
                ids.append(token)
                log_probs.append((p[token] / p.sum()).log().item())
            made["completion_ids"].append(ids)
            made["logprobs"].append(log_probs)
        self.made.append(made)
        return dict(made)
