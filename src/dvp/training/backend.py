"""Train with DeepSpeed: fp32 weights, AdamW, ZeRO stage from config/deepspeed.

The policy that DeepSpeed wraps returns statistics of the sampled tokens instead of logits, so that no step ever holds
the logits of a whole batch. On several ranks (dvp.training.ranks) all of them call the same methods in the same order.
"""

import logging
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import redirect_stderr, redirect_stdout
from copy import deepcopy
from dataclasses import replace
from enum import Enum
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import torch
import torch.distributed as dist
from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.integrations.sdpa_attention import repeat_kv, sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask
from transformers.modeling_layers import GradientCheckpointingLayer

from dvp.core.batch import Batch, Shared, unflatten_parts
from dvp.core.head import OF_TOKENS, TokenStatistics, dense_log_prob, token_statistics
from dvp.core.kept_sets import KeptSets
from dvp.core.safe_vocabulary import EngineSets, SafeVocabulary
from dvp.errors import DvpError
from dvp.experiment.training import TrainingConfig
from dvp.training import launch, ranks
from dvp.training.rollouts import in_a_line, with_sets

CHECKED_PROMPTS, CHECKED_TOKENS = 2, 16  # prompts, and tokens of each, in `Policy.check`
# Nats. Two orders of summation in fp32 differ by 1e-6 in a small model, by up to 6e-4 in one of 8 billion parameters.
OWN_TOLERANCE = 1e-3
TAG = "deepspeed"
ATTENTION = "sdpa_fp32"


def attention(
    module: torch.nn.Module,
    query_BHTD: torch.Tensor,
    key_BKTD: torch.Tensor,
    value_BKTD: torch.Tensor,
    *args,
    **options,
) -> tuple[torch.Tensor, None]:
    """Compute attention as transformers' `sdpa`; in fp32, repeat the K keys and values for each of the H heads.

    Of PyTorch's kernels on CUDA the flash kernel takes no fp32, and the memory-efficient one no keys and values that
    several heads share (`enable_gqa`, which transformers asks for). The kernel that is left computes a number for every
    pair of tokens: 11 GB for 32 heads and 9,215 tokens, several times over.
    """
    groups = query_BHTD.shape[1] // key_BKTD.shape[1]
    if groups > 1 and key_BKTD.dtype == torch.float32 and not torch.is_autocast_enabled(key_BKTD.device.type):
        key_BKTD, value_BKTD = repeat_kv(key_BKTD, groups), repeat_kv(value_BKTD, groups)
        # Given the real module, transformers would see that heads share keys, and ask for `enable_gqa`.
        module = SimpleNamespace(is_causal=getattr(module, "is_causal", True))
    return sdpa_attention_forward(module, query_BHTD, key_BKTD, value_BKTD, *args, **options)


AttentionInterface.register(ATTENTION, attention)
AttentionMaskInterface.register(ATTENTION, sdpa_mask)


class Head(torch.nn.Module):
    """The language-model head as a module that returns statistics: ZeRO-3 gathers a weight only for its own module."""

    def __init__(self, weight_VH: torch.nn.Parameter):
        super().__init__()
        self.weight = weight_VH

    def forward(
        self, hidden_NH: torch.Tensor, targets_N: torch.Tensor | None = None, **options
    ) -> torch.Tensor | tuple[torch.Tensor, ...]:
        """Return the fields of TokenStatistics as a plain tuple, in which DeepSpeed finds the tensors for its hooks.

        Without targets, return the product that the model's own forward pass expects of its head: logits (N, V).
        """
        if targets_N is None:
            return torch.nn.functional.linear(hidden_NH, self.weight)
        statistics = token_statistics(hidden_NH, self.weight, targets_N, **options)
        return tuple(value for value in vars(statistics).values() if value is not None)


class Policy(torch.nn.Module):
    """A causal language model whose forward scores given responses.

    Its logits are a multiple of the head's product. The scale that Granite, Cohere and others apply is measured, as the
    names and meanings of such settings differ from model to model. A bias and soft-capping are refused.
    """

    def __init__(self, model: PreTrainedModel, *, head_dtype: Literal["auto", "float32"] = "auto"):
        """Take over `model`: its head is replaced by one of the same name and weight, so that no logits come out.

        head_dtype : see TrainingConfig.head_dtype.
        Raises DvpError, naming the model's class, if its logits are anything but a multiple of the head's product.
        """
        super().__init__()
        head = model.get_output_embeddings()
        if head is None:
            raise DvpError(f"{type(model).__name__}: has no language-model head")
        if getattr(head, "bias", None) is not None:
            raise DvpError(f"{type(model).__name__}: its head has a bias, which the trainer does not support")
        self._logit_scale = _logit_scale(model, head.weight)
        self._head_dtype = head_dtype
        model.set_output_embeddings(Head(head.weight))
        self.model = model
        self.shares_prompts = False
        """Whether `check` found that responses may share their prompt."""

    def forward(
        self,
        batch: Batch,
        *,
        safe: SafeVocabulary | EngineSets | None,
        temperature: float,
        coefficient_N: torch.Tensor | None = None,
    ) -> TokenStatistics:
        """Return statistics of the response tokens, flattened row by row (N = number of response tokens)."""
        hidden_NH, targets_N = self.scored(batch)
        return TokenStatistics(
            *self.model.get_output_embeddings()(
                hidden_NH,
                targets_N,
                **_sets(batch, safe, hidden_NH.device),
                coefficient_N=coefficient_N,
                temperature=temperature / self._logit_scale,
                # The head's product is out of autocast's sight.
                product_dtype=torch.bfloat16 if torch.is_autocast_enabled(hidden_NH.device.type) else None,
                logits_dtype=torch.float32 if self._head_dtype == "float32" else None,
            )
        )

    def dense_log_prob(
        self, batch: Batch, *, safe: SafeVocabulary | EngineSets | None, temperature: float
    ) -> torch.Tensor:
        """Return log p^mp (N,) of the response tokens so that its gradients can be vectorised; for few tokens only."""
        hidden_NH, targets_N = self.scored(batch)
        options = _sets(batch, safe, hidden_NH.device) | {"temperature": temperature / self._logit_scale}
        return dense_log_prob(hidden_NH, self.model.get_output_embeddings().weight, targets_N, **options)

    def logits(self, hidden_NH: torch.Tensor) -> torch.Tensor:
        """Return the model's logits (N, V) of hidden states (N, H)."""
        return self.model.get_output_embeddings()(hidden_NH) * self._logit_scale

    def scored(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the hidden states (N, H) before the response tokens, and these tokens (N,), row by row."""
        # Found on the host before the model runs, so that the host need not wait for the device.
        device = self.model.device
        scored_N = batch.response_BT[:, 1:].flatten().nonzero()[:, 0].to(device)
        tokens_BT = batch.tokens_BT.to(device)
        if batch.shared_B2 is None:
            # Right padding under a causal mask: no real position sees a pad, so no attention mask is needed.
            inputs, options, places_N = tokens_BT[:, :-1], {}, scored_N
        else:
            shared = Shared.of(batch)
            inputs, places_N = shared.tokens_RL.to(device), shared.place_N.to(device)
            options = {"attention_mask": shared.mask(device), "position_ids": shared.position_RL.to(device)}
        hidden_BTH = self.model.base_model(inputs, use_cache=False, **options).last_hidden_state
        return hidden_BTH.flatten(0, 1)[places_N], tokens_BT[:, 1:].flatten()[scored_N]

    @torch.no_grad()
    def check(self, prompts: list[list[int]]) -> None:
        """Compare the policy with the model's own forward pass, which scores each prompt (token ids) by itself.

        Sets `shares_prompts`. Raises DvpError if the log-prob of any of the prompts' first tokens differs by more than
        OWN_TOLERANCE nats.
        """
        # A prompt of one token would have nothing to score.
        prompts = [(prompt + prompt)[:CHECKED_TOKENS] for prompt in prompts[:CHECKED_PROMPTS]]
        device = next(self.parameters()).device
        batch = Batch.collate([prompt[:1] for prompt in prompts], [prompt[1:] for prompt in prompts], pad=0).to(device)
        ours_N = self(batch, safe=None, temperature=1.0).log_prob
        own = []
        for prompt in prompts:
            tokens_1T = torch.tensor([prompt], device=device)
            log_prob_TV = self.model(tokens_1T).logits[0, :-1].float().log_softmax(dim=1)
            own.append(log_prob_TV.gather(1, tokens_1T[0, 1:, None])[:, 0])
        difference = (ours_N - torch.cat(own)).abs().max().item()
        if not difference <= OWN_TOLERANCE:
            raise DvpError(
                f"{type(self.model).__name__}: the trainer's log-probs differ from the model's own by {difference:.2g} "
                f"nats, at most {OWN_TOLERANCE:g} is allowed: the model does something between its layers and its "
                "logits that the trainer does not know"
            )
        self.shares_prompts = self._attends_alone() and self._is_indifferent(prompts)

    def _attends_alone(self) -> bool:
        """Return whether all layers have full attention by the model's settings, so that our own masks suit them."""
        config = self.model.config.get_text_config()
        windows = getattr(config, "use_sliding_window", True) and getattr(config, "sliding_window", None)
        other = {*(getattr(config, "layer_types", None) or ())} - {"full_attention"}
        return not (windows or other or getattr(config, "attention_chunk_size", None))

    def _is_indifferent(self, prompts: list[list[int]]) -> bool:
        """Return whether two responses to a prompt (token ids) score the same when they share it as each by itself."""
        # Each prompt's first half is the shared prompt; its second half, as it is and reversed, the two responses.
        half = min(map(len, prompts)) // 2
        parts = [(prompt[:half], prompt[half:]) for prompt in prompts for _ in range(2)]
        responses = [response[:: 1 - 2 * (number % 2)] for number, (_, response) in enumerate(parts)]
        apart = Batch.collate([prompt for prompt, _ in parts], responses, pad=0)
        numbers = torch.arange(len(prompts)).repeat_interleave(2)
        shared = replace(apart, shared_B2=torch.stack([numbers, torch.full_like(numbers, half)], dim=1))
        try:
            each = [self(batch, safe=None, temperature=1.0).log_prob for batch in (apart, shared)]
        except (TypeError, ValueError, RuntimeError):  # its forward pass takes no such mask, or no positions
            return False
        return (each[0] - each[1]).abs().max().item() <= OWN_TOLERANCE


def _sets(batch: Batch, safe: SafeVocabulary | EngineSets | None, device: torch.device) -> dict[str, Any]:
    """Return the head's options for a safe vocabulary, with the engine's sets to replay or, in scoring, to compare.

    Raises DvpError if sets that are replayed are missing.
    """
    kept = None if batch.kept is None else KeptSets.cat(batch.kept).to(device)
    if isinstance(safe, EngineSets):
        if kept is None:
            raise DvpError("the engine did not report the sets that it sampled from, which this method replays")
        return {"safe": safe.rule, "kept": kept}
    return {"safe": safe} if kept is None or torch.is_grad_enabled() else {"safe": safe, "compared": kept}


@torch.no_grad()
def _logit_scale(model: PreTrainedModel, weight_VH: torch.Tensor) -> float:
    """Measure the factor by which the model multiplies its head's logits. Raises DvpError if it does more to them."""
    known_V = torch.ones(len(weight_VH))  # on the CPU, also where the model has shapes alone (dvp.training.models)
    known_V[1::2] = 64.0  # far into any soft-capping
    width = model.get_input_embeddings().weight.shape[1]
    hook = model.get_output_embeddings().register_forward_hook(lambda *call: known_V.expand(call[-1].shape))
    made_V = model(inputs_embeds=torch.zeros(1, 1, width, device=weight_VH.device)).logits[0, 0].float()
    hook.remove()
    scale = made_V[0].item()
    if not (scale > 0.0 and torch.allclose(made_V, scale * known_V, rtol=1e-5)):
        capped = getattr(model.config.get_text_config(), "final_logit_softcapping", None) is not None
        what = "soft-caps its logits" if capped else "does more to its logits than to scale them"
        raise DvpError(f"{type(model).__name__}: {what}, which the trainer does not support")
    return scale


def _on_host(state: Any) -> Any:
    """Copy a state into the machine's memory, with plain values in place of enums; shared memory stays shared."""
    storages: dict[int, torch.UntypedStorage] = {}
    copies: dict[int, Any] = {}  # deepcopy's memo: the copies made so far, by the id of the original

    def copy_tensors(value: Any) -> None:
        if isinstance(value, torch.Tensor):
            storage = value.untyped_storage()
            if storage.data_ptr() not in storages:
                storages[storage.data_ptr()] = storage.cpu() if storage.device.type != "cpu" else storage.clone()
            made = torch.empty(0, dtype=value.dtype)
            made.set_(storages[storage.data_ptr()], value.storage_offset(), value.shape, value.stride())
            copies[id(value)] = made.requires_grad_(value.requires_grad)
        elif isinstance(value, Enum):
            # Python 3.11.2 pickles an enum as a call of getattr, which is refused when the checkpoint is read.
            copies[id(value)] = value.value
        elif isinstance(value, dict | list | tuple):
            for part in value.values() if isinstance(value, dict) else value:
                copy_tensors(part)

    copy_tensors(state)
    return deepcopy(state, copies)


class Trainer:
    """The policy under DeepSpeed: it scores, accumulates gradients, steps, saves, and hands its weights out."""

    def __init__(self, base: Path, config: TrainingConfig, options: dict[str, Any], prompts: Sequence[list[int]] = ()):
        """Load the model of `base` in fp32 and wrap it; `options` are DeepSpeed's own (a file of config/deepspeed).

        prompts : token ids for `Policy.check`, which is left out without any.
        Raises DvpError as `Policy` and its `check`.
        """
        on_gpu = torch.cuda.is_available()
        # A process that torchrun did not start is alone. With port 0 the store takes a free port when it starts to
        # listen. A port chosen earlier may be taken by then, as it was when two trainings started at the same moment.
        alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
        for key, value in (alone if on_gpu else alone | {"DS_ACCELERATOR": "cpu"}).items():
            os.environ.setdefault(key, value)
        import deepspeed
        from deepspeed.utils import logger, set_z3_leaf_modules

        logger.setLevel(logging.ERROR)
        if not on_gpu:
            # This kernel serves inference only, and a process that is killed while building or looking for it leaves a
            # lock behind for which every later process of this user waits for ever. On a GPU DeepSpeed does not look
            # for it, and asking for this table would make it look for CUDA's compiler once for each of its kernels.
            deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
        local_rank, backend = int(os.environ["LOCAL_RANK"]), "nccl" if on_gpu else "gloo"
        if on_gpu:
            torch.cuda.set_device(local_rank)
        if not dist.is_initialized():
            # DeepSpeed takes over an existing group. Its own would be bound to this GPU, and each of the fifty or so
            # that vLLM makes would be split off it at once, by all ranks together; most are never used. A group that is
            # not bound makes its communicator when it is first used.
            dist.init_process_group(backend, timeout=launch.WAIT)
        deepspeed.init_distributed(dist_backend=backend, verbose=False, auto_mpi_discovery=False)
        known = AutoConfig.from_pretrained(base)
        model = AutoModelForCausalLM.from_pretrained(
            base,
            dtype=torch.float32,
            # Straight to where it is checked and trained: no rank holds it in fp32 in the machine's memory.
            device_map={"": torch.device("cuda", local_rank) if on_gpu else torch.device("cpu")},
            attn_implementation=ATTENTION if on_gpu else None,
            # No dropout: engines have none, and the importance ratio is one of two policies without it.
            **{name: 0.0 for name, rate in known.to_dict().items() if "drop" in name and isinstance(rate, float)},
        )
        if config.gradient_checkpointing:
            model.gradient_checkpointing_enable()
            model.train()  # transformers recomputes in this mode only
        self.policy = Policy(model, head_dtype=config.head_dtype)
        if prompts:
            self.policy.check(list(prompts))
        optimizer = torch.optim.AdamW(
            self.policy.parameters(),
            lr=config.learning_rate,
            betas=tuple(config.adam_betas),
            weight_decay=config.weight_decay,
        )
        # ZeRO-3 gathers a layer at once: hooks on each of its parts would double the CPU time of an update.
        set_z3_leaf_modules(self.policy, [GradientCheckpointingLayer], raise_if_not_found=False)
        warmup = config.warmup_steps
        self._learning_rate_share = 1.0
        self._schedule = torch.optim.lr_scheduler.LambdaLR(
            optimizer,
            lambda step: self._learning_rate_share * (min(1.0, (step + 1) / warmup) if warmup else 1.0),
        )
        self._engine, *_ = deepspeed.initialize(
            model=self.policy,
            optimizer=optimizer,
            lr_scheduler=self._schedule,
            config={
                "train_micro_batch_size_per_gpu": 1,  # micro-batches are formed here, not by DeepSpeed
                "gradient_accumulation_steps": 1,
                "gradient_clipping": config.gradient_clipping,
                "zero_allow_untested_optimizer": True,
                "zero_force_ds_cpu_optimizer": False,
                **options,
            },
        )
        self.device = self._engine.device
        self.context: int = self.policy.model.config.max_position_embeddings
        self.bf16: bool = self._engine.torch_autocast_enabled()
        self._temperature = config.temperature
        self._tokens = config.tokens_per_micro_batch

    def sharing_prompts(self, batch: Batch) -> Batch:
        """Return the batch, with each prompt to be computed once if the model can and it is less work.

        All ranks call this.
        """
        if not all(ranks.gather(self.policy.shares_prompts)):
            return batch
        return batch.sharing_prompts(self.policy.model.config.get_text_config().hidden_size, self._tokens)

    @torch.no_grad()
    def score(
        self,
        batch: Batch,
        safe: SafeVocabulary | EngineSets | None,
        *,
        tokens: int | None = None,
        bf16: bool | None = None,
    ) -> dict[str, torch.Tensor]:
        """Return TokenStatistics' fields for every response token, each (B, T), 0 elsewhere, without gradients.

        tokens : of a micro-batch, at most; as in training if not given.
        bf16 : whether to multiply in bf16 rather than fp32; as in training if not given.
        Each rank scores its share and gets all.
        """
        parts = batch.micro_batches(tokens or self._tokens)
        # Under ZeRO-3 every forward pass is one of all ranks.
        dealt = ranks.deal(parts, parts[0])
        batch, mine = with_sets(batch, dealt), dealt[ranks.rank()]
        # DeepSpeed's engine would set autocast itself; without gradients it does nothing else for a forward pass.
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.bf16 if bf16 is None else bf16):
            scored = [self.policy(batch.rows(rows), safe=safe, temperature=self._temperature) for rows in mine]
        scored = ranks.join([[getattr(part, name).cpu() for name in OF_TOKENS] for part in scored], len(parts))
        return {
            name: unflatten_parts(parts, values, batch.response_BT)
            for name, *values in zip(OF_TOKENS, *scored, strict=True)
        }

    def forward_backward(
        self,
        batch: Batch,
        safe: SafeVocabulary | EngineSets | None,
        loss: Callable[[TokenStatistics], torch.Tensor],
        last: bool,
        coefficient_N: torch.Tensor | None = None,
    ) -> None:
        """Accumulate the gradient of `loss(statistics of the batch)`; `last` marks the step's final micro-batch.

        The losses of all ranks add up; all ranks make equally many calls.
        coefficient_N : one for each response token, where the loss is the statistics' `objective`.
        """
        self._engine.set_gradient_accumulation_boundary(last)
        if coefficient_N is not None:
            coefficient_N = coefficient_N.to(self.device)  # before the device has work to wait for
        options = {"safe": safe, "temperature": self._temperature, "coefficient_N": coefficient_N}
        statistics = self._engine(batch, **options)
        # DeepSpeed takes the mean over the ranks.
        self._engine.backward(loss(statistics) * ranks.count())
        self._engine.step()

    def scale_learning_rate(self, share: float) -> None:
        """Use this share of the learning rate from the next update on, warm-up included."""
        self._learning_rate_share = share
        [rate], [function], step = self._schedule.base_lrs, self._schedule.lr_lambdas, self._schedule.last_epoch
        for group in self._schedule.optimizer.param_groups:
            group["lr"] = rate * function(step)

    @property
    def learning_rate(self) -> float:
        """Return the learning rate of the next update."""
        return self._schedule.optimizer.param_groups[0]["lr"]

    @property
    def gradient_norm(self) -> float:
        """Return the global norm of the last step's gradient, before clipping."""
        return float(self._engine.get_global_grad_norm())

    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield name and value of every parameter, named as in the Hugging Face model.

        Under ZeRO-3 they are gathered one by one, on all ranks; none is kept.
        """
        from deepspeed.runtime.zero import GatheredParameters

        for name, parameter in self.policy.model.named_parameters():
            with GatheredParameters([parameter]):
                yield name, parameter.detach()

    def parts(self, folder: Path) -> list[tuple[Path, Callable[[], None]]]:
        """Copy DeepSpeed's checkpoint (weights, optimiser, schedule) as it is now, to be written to rank 0's `folder`.

        Returns this rank's files, each with a call that writes it from its copy in the machine's memory, so that a
        thread can do so while training continues.
        """
        found: list[tuple[Path, Callable[[], None]]] = []
        writer = self._engine.checkpoint_engine
        write = writer.save
        writer.save = lambda state_dict, path: found.append((Path(path), partial(write, _on_host(state_dict), path)))
        try:
            self._engine.save_checkpoint(str(ranks.gather(folder)[0]), tag=TAG)
        finally:
            writer.save = write
        return found

    def load(self, folder: Path, written_by: int) -> None:
        """Read the checkpoint that `parts` wrote on so many ranks; the caller has verified its files.

        Where there is another number of ranks now, rank 0 first makes DeepSpeed's universal checkpoint of it, beside
        `folder`, which is as large and deleted afterwards. Raises DvpError without a checkpoint.
        """
        reshaped = written_by != ranks.count()
        source = folder.with_name(f".{folder.name}.universal") if reshaped else folder
        if reshaped and ranks.is_main():
            _write_universal(folder / TAG, source / TAG)
        ranks.gather(None)
        self._engine._config.load_universal_checkpoint = reshaped
        path, _ = self._engine.load_checkpoint(str(source), tag=TAG)
        ranks.gather(None)
        if reshaped and ranks.is_main():
            shutil.rmtree(source)
        if path is None:
            raise DvpError(f"{folder}: DeepSpeed finds no checkpoint here")


def _write_universal(source: Path, target: Path) -> None:
    """Convert DeepSpeed's checkpoint into one that any number of ranks can read: a file per weight and moment.

    Raises DvpError if it cannot be written, and leaves nothing of it.
    """
    from deepspeed.checkpoint import ds_to_universal

    shutil.rmtree(target.parent, ignore_errors=True)  # of a process that was killed
    options = {"num_extract_workers": 1, "num_merge_workers": 1, "keep_temp_folder": False, "strict": True}
    folders = {"input_folder": str(source), "output_folder": str(target)}
    with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere), redirect_stderr(nowhere):
        try:
            ds_to_universal.main(SimpleNamespace(**folders, **options, inject_missing_state=True))
        except (OSError, RuntimeError) as error:  # torch's own for a file that it cannot write
            shutil.rmtree(target.parent, ignore_errors=True)
            said = f"no copy for another number of ranks can be written ({in_a_line(error)})"
            raise DvpError(f"{source.parent}: {said}; it takes as much room") from error
