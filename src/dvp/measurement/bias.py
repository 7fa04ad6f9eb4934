"""At a fixed policy: every estimator of the policy gradient against the exact on-policy gradient.

The exact one needs no engine: the trainer's own policy samples its batches, in fp32, by transformers' `generate`, and
RLOO without any correction is then unbiased. The estimators get batches of the same problems from the engine, and
weights, advantages and safe vocabularies as training has them; their i-th batches have the same seeds whatever the safe
vocabulary, so that differences between estimators are paired.

Estimators that give a response one weight are sums Σ_b c_b ∇log p(response b): the gradients of a batch's responses,
made once, serve all of them. Gradients longer than BUCKETS are count-sketched (dvp.core.count_sketch).

Shape suffixes: B responses of a batch, T tokens, G group, E estimators, D coordinates.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from statistics import fmean

import pandas as pd
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from dvp.config import Experiment, Source
from dvp.core.advantages import ADVANTAGES, Responses, optimal_token_proxy, rloo
from dvp.core.count_sketch import CountSketch
from dvp.core.estimator_bias import STATISTICS, Jackknifed, estimator_bias, inner_products, squared_norm
from dvp.core.head import TokenStatistics
from dvp.core.importance import ImportanceWeights, importance_weights
from dvp.core.objective import zero_outside_safe
from dvp.core.safe_vocabulary import SafeVocabulary
from dvp.data.prompts import encode_prompts, short_enough
from dvp.data.sources import load
from dvp.data.verifier import check_reference, grade
from dvp.errors import DvpError
from dvp.files import atomic_path, sha256_file
from dvp.grid import parse_rho
from dvp.methods import TOKEN_LEVEL_ADVANTAGES
from dvp.progress import Progress
from dvp.rollout.engine import Completion, Engine, Sampling
from dvp.rollout.vllm import VllmEngine, prove_safe_vocabulary
from dvp.training.backend import Batch, Policy
from dvp.training.base import check_vocabulary
from dvp.training.loop import Rollout, derived_seed, prompt_rows
from dvp.training.method import SafeVocabularies, importance_rule

BUCKETS = 2**20
REFERENCE = -1  # in a seed, where the engine's batches have their number
ENGINE_SEQUENCES = 256  # that the engine samples at once
CALL = 512  # responses that it is asked for at once
GENERATED_TOKENS = 2**15  # prompts and responses that the trainer's policy samples at once
SEQUENCES = 16  # responses, or their gradients, at once


@dataclass(frozen=True)
class Measurement:
    """A table a row an estimator, what its intervals are made from, and what there is to know of all."""

    estimators: pd.DataFrame
    """method, rho (None without one) and label; each of STATISTICS with _se, _low and _high, in units of |g|² (the
    cosine in none); batches; empty_batches (nothing was kept: a gradient of 0); kept_fraction of the responses;
    mean_weight of their tokens, 0 for rejected ones; outside_safe_fraction of the sampled tokens; mean reward."""
    jackknife: pd.DataFrame
    """STATISTICS of each method and rho without one batch: of the engine's (sample `engine`) or of the reference."""
    summary: dict
    """Problems, batches, model, and the reference's own numbers; JSON-able."""

    def results(self) -> dict[str, dict[str, float]]:
        """The statistics that are defined, by estimator."""
        return {
            f"{row['method']}.{row['rho'] or 'none'}": {
                name: row[name] for name in STATISTICS if math.isfinite(row[name])
            }
            for row in self.estimators.to_dict("records")
        }


class Estimator:
    """One estimator: a method, at a ρ if it takes one."""

    def __init__(self, experiment: Experiment, method: str, rho: str | None):
        settings = experiment.methods[method]
        self.method, self.rho, self.label = method, rho, settings.label
        self.rule = importance_rule(settings.importance)
        self.safe = SafeVocabularies(
            settings, None if rho is None else parse_rho(rho), experiment.training.max_response_tokens
        )
        self._advantage = ADVANTAGES[settings.advantage]
        self._group_size = experiment.training.group_size
        self.by_token = self.rule.level == "token" or settings.advantage in TOKEN_LEVEL_ADVANTAGES

    def coefficients(
        self, rollout: Rollout, statistics: dict[str, torch.Tensor]
    ) -> tuple[torch.Tensor, ImportanceWeights]:
        """What multiplies each token's ∇log p (B, T), as in training; all 0 if nothing was kept."""
        mask_BT, log_prob_BT = rollout.batch.response_BT, statistics["pruned_log_prob"]
        weights = importance_weights(log_prob_BT - rollout.infer_log_prob_BT, mask_BT, self.rule)
        weight_BT = zero_outside_safe(weights.weight_BT, statistics["target_in_safe"]) * mask_BT
        proxy_BT = optimal_token_proxy(log_prob_BT, statistics["pruned_sum_p_squared"])
        responses = Responses(rollout.rewards_B, mask_BT, self._group_size, proxy_BT, weight_BT)
        return weight_BT * self._advantage(responses) / max(weights.denominator, 1), weights


class Gradients:
    """Exact fp32 gradients of Σ_t c_t log p(y_t) over a model's parameters, sketched if they are long."""

    def __init__(self, policy: Policy, temperature: float, micro_batch: int, seed: int):
        torch.set_float32_matmul_precision("highest")
        self._policy, self._temperature, self._micro_batch = policy, temperature, micro_batch
        self._parameters = list(policy.parameters())
        self.sketch = CountSketch([one.numel() for one in self._parameters], BUCKETS, derived_seed(seed))
        self._device = self._parameters[0].device

    @torch.no_grad()
    def score(self, batch: Batch, safe: SafeVocabulary | None) -> dict[str, torch.Tensor]:
        """The head's statistics of every response token, each (B, T), 0 elsewhere."""
        result: dict[str, torch.Tensor] = {}
        for rows in self._micro_batches(batch, torch.arange(len(batch.tokens_BT))):
            part = batch.rows(rows)
            statistics, (row_n, column_n) = self._statistics(part, safe), part.response_BT.nonzero(as_tuple=True)
            for one in fields(TokenStatistics):
                values_n = getattr(statistics, one.name).cpu()
                values_BT = result.setdefault(one.name, torch.zeros(batch.tokens_BT.shape, dtype=values_n.dtype))
                values_BT[rows[row_n], column_n] = values_n
        return result

    def of_batch(self, batch: Batch, coefficient_BT: torch.Tensor, safe: SafeVocabulary | None) -> torch.Tensor:
        """∇ Σ_b Σ_t c_bt log p^mp(y_bt), (D,); with V_S constant, and no term where c is 0."""
        total_D = torch.zeros(self.sketch.length)
        useful = (coefficient_BT != 0).any(dim=1).nonzero()[:, 0]
        for rows in self._micro_batches(batch, useful):
            part = batch.rows(rows)
            coefficient_N = coefficient_BT[rows, : part.tokens_BT.shape[1]][part.response_BT].to(self._device)
            total_D += self._gradient(self._statistics(part, safe).pruned_log_prob, coefficient_N)
        return total_D

    def of_responses(self, batch: Batch, coefficient_BE: torch.Tensor, safe: SafeVocabulary | None) -> torch.Tensor:
        """Σ_b c_be ∇ Σ_t log p^mp(y_bt) over the tokens in V_S, (E, D): one backward pass a response serves all."""
        total_ED = torch.zeros(coefficient_BE.shape[1], self.sketch.length)
        useful = (coefficient_BE != 0).any(dim=1).nonzero()[:, 0]
        for rows in useful.split(SEQUENCES) if len(useful) else ():
            gradient_bD = torch.stack([self._of_response(batch.rows(row[None]), safe) for row in rows])
            total_ED.addmm_(coefficient_BE[rows].T, gradient_bD)
        return total_ED

    def _micro_batches(self, batch: Batch, rows_B: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Some of the rows at a time, those of like length together, so that little is padded."""
        # A response is never empty, so its last True is its end.
        end_B = (batch.response_BT[rows_B] * torch.arange(batch.response_BT.shape[1])).amax(dim=1)
        return rows_B[end_B.argsort()].split(min(self._micro_batch, SEQUENCES)) if len(rows_B) else ()

    def _of_response(self, batch: Batch, safe: SafeVocabulary | None) -> torch.Tensor:
        statistics = self._statistics(batch, safe)
        return self._gradient(statistics.pruned_log_prob, statistics.target_in_safe.float())

    def _gradient(self, log_prob_N: torch.Tensor, coefficient_N: torch.Tensor) -> torch.Tensor:
        parts = torch.autograd.grad(
            log_prob_N, self._parameters, coefficient_N, allow_unused=True, materialize_grads=True
        )
        return self.sketch(parts).cpu()

    def _statistics(self, batch: Batch, safe: SafeVocabulary | None) -> TokenStatistics:
        on_device = Batch(batch.tokens_BT.to(self._device), batch.response_BT.to(self._device))
        return self._policy(on_device, safe=safe, temperature=self._temperature)


def source_problems(source: Source, where: str, template: str) -> pd.DataFrame:
    """id, answer and prompt of every problem of a source. Raises DvpError, naming `where`."""
    rows = load(source, where)
    return pd.DataFrame(
        {
            "id": [row.id for row in rows],
            "answer": [row.answer for row in rows],
            "prompt": [template.replace("{problem}", row.problem) for row in rows],
        }
    )


def measure_bias(
    experiment: Experiment, model: Path, engine: str, problems: pd.DataFrame, *, where: str, seed: int, name: str
) -> Measurement:
    """Measure every estimator of `experiment.bias` at the policy `model`, a Hugging Face directory.

    Starts an engine, so it needs a process of its own.

    Args:
        engine: a name of experiment.engines.
        problems: id, answer, prompt; the ones that are used are drawn by `seed`.
        where: where they come from, for messages.
        name: how progress is called.

    Raises:
        DvpError: the model or its problems cannot be used, a prompt is too long, the engine does not prune as it is
            told, or the exact gradient is not distinguishable from 0.
    """
    settings, training = experiment.bias, experiment.training
    threads = torch.get_num_threads()
    check_vocabulary(model)
    tokenizer = AutoTokenizer.from_pretrained(model)
    context = AutoConfig.from_pretrained(model).max_position_embeddings
    task = _Task(experiment, tokenizer, problems, where=where, seed=seed, context=context)
    estimators = [Estimator(experiment, *pair) for pair in experiment.estimators]

    started = VllmEngine(
        model,
        experiment.engines[engine],
        max_model_len=task.longest,
        max_num_seqs=min(ENGINE_SEQUENCES, CALL),
        seed=seed,
    )
    torch.set_num_threads(threads)  # starting an engine may change it
    rules = list(dict.fromkeys(estimator.safe.engine for estimator in estimators))
    progress = Progress(f"{name}: engine {engine}", len(rules) * settings.batches)
    rollouts: dict[SafeVocabulary | None, list[Rollout]] = {}
    for rule in rules:
        if rule is not None:
            prove_safe_vocabulary(started, task.prompts, rule)
        rollouts[rule] = []
        for rollout in task.from_engine(started, rule, settings.batches):
            rollouts[rule].append(rollout)
            progress.step(sum(map(len, rollouts.values())), f"reward {rollout.rewards_B.mean():.2f}")

    network = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    if torch.cuda.is_available():
        network = network.cuda()
    exact = task.from_trainer(network, settings.reference_batches, f"{name}: reference")
    gradients = Gradients(Policy(network), training.temperature, training.micro_batch_size, seed)
    return _compare(estimators, rollouts, exact, gradients, task, name)


def write_tables(measured: Measurement, folder: Path) -> dict[str, str]:
    """Write estimators.parquet and jackknife.parquet; their SHA-256 by name."""
    tables = {"estimators.parquet": measured.estimators, "jackknife.parquet": measured.jackknife}
    for name, table in tables.items():
        with atomic_path(folder / name) as temporary:
            table.to_parquet(temporary)
    return {name: sha256_file(folder / name) for name in tables}


class _Task:
    """The problems of a measurement, and batches of responses to them."""

    def __init__(
        self, experiment: Experiment, tokenizer, problems: pd.DataFrame, *, where: str, seed: int, context: int
    ):
        count, self._training = experiment.bias.problems, experiment.training
        if len(problems) < count:
            raise DvpError(f"{where}: {len(problems)} problems are fewer than bias.problems ({count})")
        encoded = encode_prompts(tokenizer, problems, experiment.data.chat, where)
        kept = short_enough(encoded, self._training.max_prompt_tokens)
        if len(kept) < count:
            raise DvpError(
                f"{where}: {len(kept)} problems have at most training.max_prompt_tokens "
                f"({self._training.max_prompt_tokens}) tokens, fewer than bias.problems ({count})"
            )
        self.rows = [kept[index] for index in prompt_rows(len(kept), count, 1, seed)]
        self.ids = [str(problems["id"].iloc[row]) for row in self.rows]
        self.prompts = [encoded[row] for row in self.rows]
        self._answers = [problems["answer"].iloc[row] for row in self.rows]
        for row, answer, prompt in zip(self.rows, self._answers, self.prompts, strict=True):
            at = f"{where}: row {row} (id {problems['id'].iloc[row]})"
            try:
                check_reference(answer)
            except DvpError as error:
                raise DvpError(f"{at}: {error}") from None
            if len(prompt) + self._training.max_response_tokens > context:
                raise DvpError(
                    f"{at}: its prompt has {len(prompt)} tokens; the model's context of {context} leaves "
                    f"{context - self._training.max_response_tokens} beside max_response_tokens"
                )
        self.longest = max(map(len, self.prompts)) + self._training.max_response_tokens
        self._tokenizer, self._seed = tokenizer, seed
        self._pad = tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id

    @property
    def responses(self) -> int:
        """B, in a batch."""
        return len(self.prompts) * self._training.group_size

    def from_engine(self, engine: Engine, rule: SafeVocabulary | None, batches: int) -> Iterator[Rollout]:
        """Batches from the engine. Their seeds do not depend on the safe vocabulary."""
        sampling = Sampling(
            max_tokens=self._training.max_response_tokens,
            n=self._training.group_size,
            temperature=self._training.temperature,
            safe_vocabulary=rule,
        )
        for numbers in torch.arange(batches).split(max(1, CALL // self.responses)):
            seeds = [derived_seed(self._seed, number, row) for number in numbers.tolist() for row in self.rows]
            groups = engine.generate(self.prompts * len(numbers), sampling, seeds)
            for start in range(0, len(groups), len(self.prompts)):
                yield self._graded(groups[start : start + len(self.prompts)])

    def from_trainer(self, model: torch.nn.Module, batches: int, name: str) -> list[Rollout]:
        """Batches from the trainer's policy itself: temperature, and nothing else between the logits and the sample."""
        ends = model.generation_config.eos_token_id
        ends = {self._tokenizer.eos_token_id, *(ends if isinstance(ends, list) else [ends] if ends is not None else [])}
        # Not as an argument: `generate` would fill it up with the model's own defaults, such as top_k.
        model.generation_config = GenerationConfig(
            do_sample=True,
            temperature=self._training.temperature,
            top_k=0,
            top_p=1.0,
            max_new_tokens=self._training.max_response_tokens,
            eos_token_id=sorted(ends),
            pad_token_id=self._pad,
        )
        group = self._training.group_size
        progress = Progress(name, len(self.prompts))
        sampled: list[list[Completion]] = []
        # All responses to a prompt side by side, so that nothing is padded on the left.
        for done, (row, prompt) in enumerate(zip(self.rows, self.prompts, strict=True), start=1):
            at_once = max(1, GENERATED_TOKENS // (len(prompt) + self._training.max_response_tokens))
            own: list[Completion] = []
            with torch.random.fork_rng():
                torch.manual_seed(derived_seed(self._seed, REFERENCE, row))
                for part in torch.arange(batches * group).split(at_once):
                    inputs_BT = torch.tensor([prompt], device=model.device).expand(len(part), -1)
                    outputs_BT = model.generate(inputs_BT, attention_mask=torch.ones_like(inputs_BT))
                    own += [self._completion(tokens, ends) for tokens in outputs_BT[:, len(prompt) :].tolist()]
            sampled.append(own)
            progress.step(done, f"{len(own)} responses a problem")
        return [
            self._graded([own[start : start + group] for own in sampled]) for start in range(0, batches * group, group)
        ]

    def _completion(self, tokens: list[int], ends: set[int]) -> Completion:
        length = next((index for index, token in enumerate(tokens, start=1) if token in ends), None)
        kept = tokens[:length]
        text = self._tokenizer.decode(kept, skip_special_tokens=True)
        return Completion(kept, [0.0] * len(kept), text, "length" if length is None else "stop")

    def _graded(self, groups: list[list[Completion]]) -> Rollout:
        """A batch from a group of responses to each problem."""
        flat = [
            (prompt, answer, one)
            for prompt, answer, group in zip(self.prompts, self._answers, groups, strict=True)
            for one in group
        ]
        batch = Batch.collate([prompt for prompt, _, _ in flat], [one.token_ids for _, _, one in flat], self._pad)
        infer_log_prob_BT = torch.zeros(batch.tokens_BT.shape)
        infer_log_prob_BT[batch.response_BT] = torch.tensor([value for _, _, one in flat for value in one.log_probs])
        if not infer_log_prob_BT.isfinite().all():
            raise DvpError("the engine's log-probs are not finite; is the model whole, is its precision enough?")
        truncated = [one.finish_reason == "length" for _, _, one in flat]
        rewards = [
            float(grade(one.text, answer, truncated=cut)) for (_, answer, one), cut in zip(flat, truncated, strict=True)
        ]
        return Rollout(batch, infer_log_prob_BT, torch.tensor(rewards), torch.tensor(truncated))


def _compare(
    estimators: list[Estimator],
    rollouts: dict[SafeVocabulary | None, list[Rollout]],
    exact: list[Rollout],
    gradients: Gradients,
    task: _Task,
    name: str,
) -> Measurement:
    """Gradients of all batches, and what follows from their inner products."""
    together: dict[tuple, list[Estimator]] = {}
    for estimator in estimators:
        together.setdefault((estimator.safe.trainer, estimator.safe.engine), []).append(estimator)
    batches = len(next(iter(rollouts.values())))
    progress = Progress(f"{name}: gradients", len(exact) + batches * len(together))

    reference_mD = torch.empty(len(exact), gradients.sketch.length)
    for number, rollout in enumerate(exact):
        reference_mD[number] = gradients.of_batch(rollout.batch, _exact_coefficients(rollout, task), None)
        progress.step(number + 1, "reference")
    reference_mm = inner_products(reference_mD, reference_mD)
    norm = squared_norm(reference_mm)

    rows: dict[Estimator, dict] = {}
    for number, ((safe, rule), members) in enumerate(together.items()):
        gradient_EnD = torch.empty(len(members), batches, gradients.sketch.length)
        notes: dict[Estimator, list[dict]] = {one: [] for one in members}
        for index, rollout in enumerate(rollouts[rule]):
            statistics = gradients.score(rollout.batch, safe)
            _fill(gradient_EnD[:, index], members, rollout, statistics, safe, gradients, notes)
            progress.step(len(exact) + number * batches + index + 1, f"safe vocabulary {rule}")
        cross_Enm = inner_products(gradient_EnD.flatten(0, 1), reference_mD).view(len(members), batches, -1)
        for one, gradient_nD, cross_nm in zip(members, gradient_EnD, cross_Enm, strict=True):
            found = estimator_bias(inner_products(gradient_nD, gradient_nD), cross_nm, reference_mm)
            rows[one] = {"found": found, "notes": notes[one], "rollouts": rollouts[rule]}

    lengths = torch.cat([rollout.batch.response_BT.sum(dim=1) for rollout in exact]).float()
    summary = {
        "problems": task.ids,
        "responses_a_batch": task.responses,
        "batches": batches,
        "parameters": gradients.sketch.size,
        "coordinates": gradients.sketch.length,
        "sketched": not gradients.sketch.exact,
        "reference": {
            "batches": len(exact),
            "squared_norm": norm.value,
            "squared_norm_se": norm.se,
            "reward": _mean_reward(exact),
            "response_tokens_mean": lengths.mean().item(),
            "truncated_fraction": torch.cat([rollout.truncated_B for rollout in exact]).float().mean().item(),
        },
    }
    table = pd.DataFrame([_row(one, **rows[one]) for one in estimators])
    return Measurement(
        table.assign(rho=pd.Series([one.rho for one in estimators], dtype=object)),
        pd.concat([_replicates(one, rows[one]["found"]) for one in estimators], ignore_index=True),
        summary,
    )


def _exact_coefficients(rollout: Rollout, task: _Task) -> torch.Tensor:
    mask_BT = rollout.batch.response_BT
    ones_BT = torch.ones(mask_BT.shape)
    responses = Responses(rollout.rewards_B, mask_BT, task.responses // len(task.prompts), ones_BT, ones_BT)
    return rloo(responses) / len(mask_BT)


def _fill(
    gradient_ED: torch.Tensor,
    members: list[Estimator],
    rollout: Rollout,
    statistics: dict[str, torch.Tensor],
    safe: SafeVocabulary | None,
    gradients: Gradients,
    notes: dict[Estimator, list[dict]],
) -> None:
    """One batch's gradient of each estimator that shares its samples and safe vocabularies."""
    mask_BT, batch = rollout.batch.response_BT, rollout.batch
    in_safe_BT = mask_BT & statistics["target_in_safe"]
    # A response's first token in V_S; one without any has no gradient, and a coefficient of 0 there.
    first_B1 = in_safe_BT.float().argmax(dim=1, keepdim=True)
    of_sequences, places = [], []
    for place, one in enumerate(members):
        coefficient_BT, weights = one.coefficients(rollout, statistics)
        notes[one].append(
            {
                "empty": not weights.kept_B.any().item(),
                "kept_fraction": weights.kept_B.float().mean().item(),
                "mean_weight": weights.weight_BT[mask_BT].mean().item(),
                "outside_safe_fraction": 1 - in_safe_BT.sum().item() / mask_BT.sum().item(),
            }
        )
        if one.by_token:
            gradient_ED[place] = gradients.of_batch(batch, coefficient_BT, safe)
        else:
            of_sequences.append(coefficient_BT.gather(1, first_B1)[:, 0])
            places.append(place)
    if places:
        gradient_ED[places] = gradients.of_responses(batch, torch.stack(of_sequences, dim=1), safe)


def _row(one: Estimator, found: dict[str, Jackknifed], notes: list[dict], rollouts: list[Rollout]) -> dict:
    row = {"method": one.method, "rho": one.rho, "label": one.label}
    for name in STATISTICS:
        low, high = found[name].interval
        row |= {name: found[name].value, f"{name}_se": found[name].se, f"{name}_low": low, f"{name}_high": high}
    return row | {
        "batches": len(rollouts),
        "empty_batches": sum(note["empty"] for note in notes),
        **{
            name: fmean(note[name] for note in notes)
            for name in ("kept_fraction", "mean_weight", "outside_safe_fraction")
        },
        "reward": _mean_reward(rollouts),
    }


def _replicates(one: Estimator, found: dict[str, Jackknifed]) -> pd.DataFrame:
    parts = []
    for sample, attribute in (("engine", "over_batches_n"), ("reference", "over_reference_m")):
        values = {name: getattr(found[name], attribute).numpy() for name in STATISTICS}
        part = pd.DataFrame(values)
        parts.append(part.assign(method=one.method, rho=one.rho, sample=sample, batch=range(len(part))))
    return pd.concat(parts, ignore_index=True)[["method", "rho", "sample", "batch", *STATISTICS]]


def _mean_reward(rollouts: list[Rollout]) -> float:
    return torch.cat([rollout.rewards_B for rollout in rollouts]).mean().item()
