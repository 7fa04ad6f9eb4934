"""Write what `dvp diagnose-rollouts` reads, in TRL's own trainer."""

import json

from trl import GRPOTrainer


class DumpingTrainer(GRPOTrainer):
    def _generate_and_score_completions(self, inputs):
        made = super()._generate_and_score_completions(inputs)
        names = ["completion_ids", "completion_mask", "tool_mask", "sampling_per_token_logps", "old_per_token_logps"]
        lists = {name: made[name].tolist() for name in names if name in made}
        mode = "train" if self.model.training else "eval"
        with open(f"rollouts_{self.accelerator.process_index}.jsonl", "a") as file:
            for given, *row in zip(inputs, *lists.values(), strict=True):
                about = {"step": self.state.global_step, "mode": mode, "prompt": given["prompt"]}
                file.write(json.dumps(about | dict(zip(lists, row, strict=True))) + "\n")
        return made
