"""Write what `dvp diagnose-rollouts` reads, in verl's own trainer."""

import json


def dump(queue, batch, step: int) -> None:
    """Append the responses of a batch that is in verl's queue to rollouts.jsonl."""
    names = ["uid", "responses", "response_mask", "rollout_log_probs", "old_log_probs"]
    made = queue.kv_batch_get(keys=batch.keys, partition_id=batch.partition_id, select_fields=names)
    lists = [made["uid"].tolist(), *([row.tolist() for row in made[name].unbind()] for name in names[1:])]
    with open("rollouts.jsonl", "a") as file:
        for row in zip(*lists, strict=True):
            file.write(json.dumps({"step": step, **dict(zip(names, row, strict=True))}) + "\n")
