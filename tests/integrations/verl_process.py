"""A step of verl's own actor by the page's recipe, on a CPU: verl_process.py FOLDER OVERRIDE ...

FOLDER has batch.pt, the columns of verl's batch, and gets result.json. verl imports the recipe's module from the folder
in which this runs.
"""

import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace

import torch
import verl.models.transformers.monkey_patch as patches
from hydra import compose, initialize_config_module
from tensordict import TensorDict
from verl.plugin.platform import set_platform
from verl.plugin.platform.platform_cuda import PlatformCUDA

ABSENT = ("empty_cache", "memory_reserved", "memory_allocated", "max_memory_reserved", "max_memory_allocated")


class PlatformCPU(PlatformCUDA):
    """verl has none for processors without a card."""

    device_name = "cpu"
    device_module = SimpleNamespace(
        **vars(torch.cpu),
        **dict.fromkeys(ABSENT, lambda *_: 0),
        mem_get_info=lambda: (0, 0),
        get_device_name=lambda *_: "cpu",
    )

    def is_available(self):
        return True

    def current_device(self):
        return "cpu"

    def communication_backend_name(self):
        return "gloo"


def main(folder: str, *overrides: str) -> None:
    """Take the step and write what verl's actor says of it."""
    set_platform(PlatformCPU())  # before verl's modules ask for it
    patches.is_trl_available = lambda: False  # verl 0.9.1 imports from TRL what TRL 1.16 does not have

    from verl.experimental.agent_loop.agent_loop import _agent_loop_registry
    from verl.utils import tensordict_utils
    from verl.workers.engine import EngineRegistry
    from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead
    from verl.workers.engine_workers import ActorRolloutRefWorker
    from verl.workers.utils.padding import left_right_2_no_padding

    EngineRegistry.register(model_type="language_model", backend=["fsdp", "fsdp2"], device="cpu")(FSDPEngineWithLMHead)
    sys.path.insert(0, os.getcwd())
    with initialize_config_module("verl.trainer.config", version_base=None):
        config = compose("ppo_trainer", overrides=overrides)
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    worker = ActorRolloutRefWorker(config=config.actor_rollout_ref, role="actor")
    worker.init_model()
    columns = torch.load(Path(folder, "batch.pt"))
    size = len(columns["responses"])
    batch = left_right_2_no_padding(TensorDict(columns, batch_size=size))
    # As verl's trainer asks for a step of the whole batch.
    tensordict_utils.assign_non_tensor(
        batch,
        temperature=config.actor_rollout_ref.rollout.temperature,
        calculate_entropy=False,
        compute_loss=True,
        global_batch_size=size,
        mini_batch_size=size,
        dataloader_kwargs={"shuffle": False},
        distillation_use_topk=False,
        distillation_only=False,
    )
    metrics = tensordict_utils.get(worker.update_actor(batch), "metrics")
    result = {
        name: float(metrics[name][0]) for name in ("loss", "grad_norm", "actor/dvp_kept", "actor/dvp_outside_safe")
    }
    Path(folder, "result.json").write_text(json.dumps(result | {"loops": list(_agent_loop_registry)}))


if __name__ == "__main__":
    main(*sys.argv[1:])
