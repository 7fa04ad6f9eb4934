"""verl's own functions and this project's on the same random cases: equal where the designs agree, and where they do
not, different in the way that docs/other_trainers.md says. The losses run under the configuration that verl makes of
that page's recipe, the pruning in verl's own engine.
"""

import asyncio
import json
import math
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from rounding import rounding

pytest.importorskip("verl", reason="verl is not installed here; `make test-verl` has it")
from hydra import compose, initialize_config_module
from hydra.errors import InstantiationException
from hydra.utils import instantiate
from tensordict import TensorDict
from transformers import AutoModelForCausalLM, AutoTokenizer
from verl.experimental.agent_loop.agent_loop import DictConfigWrap, ToolListWrap, _agent_loop_registry
from verl.trainer.ppo import core_algos
from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_and_rejection_mask
from verl.utils.config import omega_conf_to_dataclass
from verl.utils.dataset.rl_dataset import RLHFDataset
from verl.workers.engine.fsdp import transformer_impl
from verl.workers.rollout.replica import TokenOutput

import dvp.integrations.verl as integration
from dvp.core.advantages import ADVANTAGES, Responses, optimal_token_proxy
from dvp.core.head import token_statistics
from dvp.core.importance import PRESETS, ImportanceRule, importance_weights
from dvp.core.safe_vocabulary import FixedRho
from dvp.errors import DvpError

B, T, G = 12, 9, 4
WHOLE_BATCH = rounding(B * T, dtype=torch.float64)
"""Tolerance, in float64, of sums over all tokens of numbers up to 1."""
PAGE = Path(__file__).parents[2] / "docs/other_trainers.md"
RULES = {
    "tis": (PRESETS["tis"], {"rollout_is": "token", "rollout_is_threshold": 2.0}),
    "seq_tis": (PRESETS["seq_tis"], {"rollout_is": "sequence", "rollout_is_threshold": 2.0}),
    "icepop": (PRESETS["icepop"], {"rollout_is": "token", "rollout_is_threshold": "0.5_5.0"}),
    "mis": (
        PRESETS["mis"],
        {"rollout_is": "sequence", "rollout_rs": "seq_sum_k1", "rollout_rs_threshold": "0.5_2.0"},
    ),
    "mis as weights": (PRESETS["mis"], {"rollout_is": "sequence", "rollout_is_threshold": "0.5_2.0"}),
    "k3": (ImportanceRule(k3_max=0.05), {"rollout_rs": "seq_mean_k3", "rollout_rs_threshold": 0.05}),
    "trm": (PRESETS["trm"], {"rollout_rs": "seq_max_k2", "rollout_rs_threshold": math.log(2.0) ** 2 / 2}),
    "normalised": (
        ImportanceRule(level="sequence", upper=2.0, self_normalise=True),
        {"rollout_is": "sequence", "rollout_is_batch_normalize": True},
    ),
}
"""A correction here, and verl's settings of it (algorithm.rollout_correction)."""


def case(seed: int, spread: float = 0.3) -> dict[str, torch.Tensor]:
    """Responses of unequal length with log-probs of engine and trainer."""
    generator = torch.Generator().manual_seed(seed)
    mask_BT = torch.arange(T) < torch.randint(1, T + 1, (B, 1), generator=generator)
    log_prob_BT = -torch.rand(B, T, generator=generator, dtype=torch.float64) * 3
    noise_BT = torch.randn(B, T, generator=generator, dtype=torch.float64) * spread
    reward_B = torch.randint(2, (B,), generator=generator).double()
    return {
        "mask": mask_BT,
        "trainer": log_prob_BT,
        "engine": log_prob_BT - noise_BT,
        "reward": reward_B,
        "advantage": torch.randn(B, T, generator=generator, dtype=torch.float64),
        "sum_p_squared": log_prob_BT.exp().square() + (1 - log_prob_BT.exp()).square() * 0.6,
    }


def verls_weights(log_ratio_BT: torch.Tensor, mask_BT: torch.Tensor, settings: dict) -> torch.Tensor:
    """What verl multiplies a token's term with: its weight, or 1, times its mask."""
    weights, mask_BT, _ = compute_rollout_correction_and_rejection_mask(
        log_ratio_BT, torch.zeros_like(log_ratio_BT), mask_BT.double(), **{"rollout_is": None} | settings
    )
    return mask_BT if weights is None else weights.batch["rollout_is_weights"] * mask_BT


@pytest.mark.parametrize("rule", RULES)
def test_weights_are_verls(rule):
    ours, settings = RULES[rule]
    zero = set()
    for seed in range(20):
        given = case(seed)
        log_ratio_BT = given["trainer"] - given["engine"]
        weight_BT = importance_weights(log_ratio_BT, given["mask"], ours).weight_BT
        # verl's mean weight of a response is a sum over its number of tokens + 1e-8.
        close = {"rtol": WHOLE_BATCH + (1e-8 if ours.self_normalise else 0), "atol": 0}
        torch.testing.assert_close(weight_BT, verls_weights(log_ratio_BT, given["mask"], settings), **close)
        zero.update((weight_BT == 0)[given["mask"]].tolist())
    assert zero == ({False} if rule in ("tis", "seq_tis", "normalised") else {False, True})


def test_geo_rs_rejects_as_verl_and_weighs_too():
    """verl's weights are 1, ours the geometric means that are bounded: at bounds of ±0.1 % they differ by as much."""
    given = case(0, spread=2e-3)
    log_ratio_BT = given["trainer"] - given["engine"]
    settings = {"rollout_rs": "seq_mean_k1", "rollout_rs_threshold": "0.999_1.001"}
    weight_BT = importance_weights(log_ratio_BT, given["mask"], PRESETS["geo_rs"]).weight_BT
    theirs_BT = verls_weights(log_ratio_BT, given["mask"], settings)
    assert torch.equal(weight_BT != 0, theirs_BT != 0)
    assert 0 < (weight_BT - theirs_BT).abs().max() <= 1e-3 + 1e-9


def test_verls_k1_bounds_are_of_the_inverse_ratio():
    """Its k1 is −log r and its bounds are logarithms of ratios: [0.5, 4] keeps r in [0.25, 2]."""
    log_ratio_BT = torch.tensor([[math.log(3.0)], [math.log(0.3)]], dtype=torch.float64)
    mask_BT = torch.ones(2, 1, dtype=torch.bool)
    rule = ImportanceRule(level="sequence", action="mask", lower=0.5, upper=4.0)
    settings = {"rollout_rs": "seq_sum_k1", "rollout_rs_threshold": "0.5_4.0"}
    assert importance_weights(log_ratio_BT, mask_BT, rule).kept_B.tolist() == [True, False]
    assert verls_weights(log_ratio_BT, mask_BT, settings)[:, 0].tolist() == [0.0, 1.0]


def test_verl_rejects_by_clamped_log_ratios():
    """It clamps each to ±20 before it sums them: −30 and 20 make a ratio of 1. Ours rejects by e^−10."""
    log_ratio_BT = torch.tensor([[-30.0, 20.0]], dtype=torch.float64)
    mask_BT = torch.ones(1, 2, dtype=torch.bool)
    settings = {"rollout_rs": "seq_sum_k1", "rollout_rs_threshold": "0.5_2.0"}
    assert not importance_weights(log_ratio_BT, mask_BT, PRESETS["mis"]).kept_B.any()
    assert verls_weights(log_ratio_BT, mask_BT, settings).all()


def test_no_rejection_of_verls_is_the_veto():
    """The veto has one side; verl's maxima of k2 and k3 have two, and reject a ratio of 1e5 as well."""
    log_ratio_BT = torch.tensor([[1e-5], [1e5]], dtype=torch.float64).log()
    mask_BT = torch.ones(2, 1, dtype=torch.bool)
    assert importance_weights(log_ratio_BT, mask_BT, PRESETS["veto"]).kept_B.tolist() == [False, True]
    for mode, bound in (("seq_max_k2", math.log(1e4) ** 2 / 2), ("seq_max_k3", 1e-4 - 1 + math.log(1e4))):
        settings = {"rollout_rs": mode, "rollout_rs_threshold": bound}
        assert not verls_weights(log_ratio_BT, mask_BT, settings).any()


def advantages(name: str, given: dict, weight_BT: torch.Tensor | None = None) -> torch.Tensor:
    proxy_BT = optimal_token_proxy(given["trainer"], given["sum_p_squared"])
    weight_BT = torch.ones(B, T, dtype=torch.float64) if weight_BT is None else weight_BT
    return ADVANTAGES[name](Responses(given["reward"], given["mask"], G, proxy_BT, weight_BT))


def verls_advantages(name: str, given: dict, **settings) -> torch.Tensor:
    """The reward is at the last token of the response, as verl puts it."""
    mask_BT = given["mask"]
    last_B = T - 1 - mask_BT.flip(1).long().argmax(dim=1)
    rewards_BT = torch.zeros(B, T, dtype=torch.float64)
    rewards_BT[torch.arange(B), last_B] = given["reward"]
    return core_algos.get_adv_estimator_fn(name)(
        token_level_rewards=rewards_BT,
        response_mask=mask_BT.double(),
        index=np.repeat([f"prompt {i}" for i in range(B // G)], G),
        **settings,
    )[0]


def of_otb(given: dict) -> dict[str, torch.Tensor]:
    return {"old_log_probs": given["trainer"], "sum_pi_squared": given["sum_p_squared"]}


@pytest.mark.parametrize(
    ("ours", "theirs", "settings"),
    [
        ("rloo", "rloo", {}),
        ("grpo", "grpo", {}),
        ("dr_grpo", "grpo", {"norm_adv_by_std_in_grpo": False}),
        ("opo", "opo", {}),
        ("otb", "optimal_token_baseline", {}),
        ("otb", "tir_optimal_token_baseline", {}),
    ],
)
def test_advantages_are_verls(ours, theirs, settings):
    for seed in range(20):
        given = case(seed)
        needed = of_otb(given) if ours == "otb" else {}
        expected_BT = verls_advantages(theirs, given, **settings, **needed)
        torch.testing.assert_close(advantages(ours, given), expected_BT, rtol=0, atol=WHOLE_BATCH)


def test_otb_with_weights_and_gaps_is_verls_for_tools():
    """Tokens that the environment wrote do not count as time; verl's other form counts them."""
    given = case(3)
    given["mask"] &= torch.arange(T) % 3 != 1
    weight_BT = importance_weights(given["trainer"] - given["engine"], given["mask"], PRESETS["tis"]).weight_BT
    settings = of_otb(given) | {"rollout_is_weights": weight_BT}
    ours_BT = advantages("otb", given, weight_BT)
    tools_BT = verls_advantages("tir_optimal_token_baseline", given, **settings)
    torch.testing.assert_close(ours_BT, tools_BT, rtol=0, atol=WHOLE_BATCH)
    assert (ours_BT - verls_advantages("optimal_token_baseline", given, **settings)).abs().max() > 0.01


def test_a_rejected_response_is_a_member_in_verls_otb():
    """By weight, as IcePop rejects: verl takes the only one that is kept for its own baseline, and A is 0 for R."""
    given = case(0) | {"mask": torch.ones(B, T, dtype=torch.bool), "reward": torch.ones(B, dtype=torch.float64)}
    weight_BT = torch.zeros(B, T, dtype=torch.float64)
    weight_BT[::G] = 1.0
    theirs_BT = verls_advantages("optimal_token_baseline", given, **of_otb(given), rollout_is_weights=weight_BT)
    assert theirs_BT[::G].abs().max() < 1e-3
    torch.testing.assert_close(advantages("otb", given, weight_BT)[::G], torch.ones(B // G, T, dtype=torch.float64))


def test_verls_whitening_counts_tokens():
    """REINFORCE++: its mean and deviation are over tokens, so a long response counts more; ours are over responses."""
    given = case(1)
    theirs_BT = verls_advantages("reinforce_plus_plus_baseline", given)
    assert (theirs_BT - advantages("reinforce_pp", given)).abs()[given["mask"]].max() > 0.01


def recipe() -> tuple[str, list[str]]:
    """The page's module and settings."""
    module, command = re.search(
        r"^cat > my_dvp.py <<'END'[^\n]*\n(.*?)^END\n(.*?)^```", PAGE.read_text(encoding="utf-8"), flags=re.M | re.S
    ).groups()
    settings = [word for word in shlex.split(command) if "=" in word]
    assert len(settings) > 5
    return module, settings


def configured(*overrides: str):
    """verl's whole configuration under the page's recipe."""
    fixed = ["actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=1"]
    with initialize_config_module("verl.trainer.config", version_base=None):
        return compose("ppo_trainer", overrides=[*recipe()[1], *fixed, *overrides])


def actor(*overrides: str, whole: dict | None = None):
    """Its part for the actor."""
    config = configured(*overrides)
    settings = omega_conf_to_dataclass(config.actor_rollout_ref.actor)
    settings.global_batch_info.update(whole or {"dp_size": 1, "global_batch_size": B})
    return settings


def losses(name: str, given: dict, config) -> tuple[float, torch.Tensor]:
    """The value of a loss and its gradient, called as verl's trainer does."""
    log_prob_BT = given["trainer"].clone().requires_grad_()
    loss, _ = core_algos.get_policy_loss_fn(name)(
        old_log_prob=given["engine"],
        log_prob=log_prob_BT,
        advantages=given["advantage"],
        response_mask=given["mask"],
        loss_agg_mode=config.loss_agg_mode,
        config=config,
        rollout_is_weights=None,
    )
    loss.backward()
    return loss.item(), log_prob_BT.grad


CORRECTION = "algorithm.rollout_correction"


@pytest.mark.parametrize("rule", [name for name in RULES if name != "normalised"])
def test_loss_and_gradient_are_verls(rule):
    ours, settings = RULES[rule]
    integration.install(ours)
    overrides = [f"{CORRECTION}.{key}='{value}'" for key, value in settings.items()]
    config = actor(f"{CORRECTION}.loss_type=reinforce", *overrides)
    given = case(5)
    value, gradient_BT = losses("dvp", given, config)
    expected, expected_BT = losses("bypass_mode", given, config)
    assert value == pytest.approx(expected, abs=WHOLE_BATCH)
    assert value != 0
    torch.testing.assert_close(gradient_BT, expected_BT, rtol=0, atol=WHOLE_BATCH)


def test_parts_on_ranks_sum_to_the_loss_of_the_whole():
    """verl hands over micro-batches, and averages over ranks: mean_r Σ_m of the losses is the loss of all."""
    integration.install(PRESETS["mis"])
    given = case(6)
    value, _ = losses("dvp", given, actor())
    config = actor(whole={"dp_size": 2, "global_batch_size": B})
    parts = [losses("dvp", {key: tensor[i::4] for key, tensor in given.items()}, config)[0] for i in range(4)]
    assert sum(parts) / 2 == pytest.approx(value, abs=WHOLE_BATCH)


def test_verl_divides_by_the_kept_where_no_size_is_given():
    """Its trainer gives the size of the mini-batch, with rejected responses; its aggregation alone counts the kept."""
    ours, settings = RULES["mis"]
    integration.install(ours)
    overrides = [f"{CORRECTION}.{key}='{value}'" for key, value in settings.items()]
    config = actor(f"{CORRECTION}.loss_type=reinforce", *overrides)
    given = case(5)
    value, _ = losses("dvp", given, config)
    kept = importance_weights(given["trainer"] - given["engine"], given["mask"], ours).kept_B.sum().item()
    config.global_batch_info["global_batch_size"] = None
    assert 0 < kept < B
    assert losses("bypass_mode", given, config)[0] == pytest.approx(value * B / kept, abs=WHOLE_BATCH)


@pytest.mark.parametrize(
    "override",
    [
        "actor_rollout_ref.actor.loss_agg_mode=token-mean",
        "algorithm.rollout_correction.bypass_mode=false",
        "actor_rollout_ref.actor.use_kl_loss=true",
        "actor_rollout_ref.model.use_fused_kernels=true",
    ],
)
def test_settings_under_which_it_is_another_loss(override, monkeypatch):
    unpruned(monkeypatch)
    integration.install(PRESETS["mis"], rho=0.1)
    name = override.partition("=")[0].rpartition(".")[2]
    with pytest.raises(DvpError, match=rf"actor\.\S*{name}: \S+; expected \S+ with loss_mode dvp"):
        losses("dvp", case(0), actor(override))


def unpruned(monkeypatch) -> None:
    """Undo the pruning after the test."""
    monkeypatch.setattr(transformer_impl, "_scale_logits_by_temperature", integration._scale_logits)


@pytest.mark.parametrize("importance", [ImportanceRule(denominator="kept"), RULES["normalised"][0]])
def test_a_correction_that_needs_the_whole_batch(importance):
    with pytest.raises(DvpError, match="expected denominator all and no self_normalise"):
        integration.install(importance)


@pytest.mark.parametrize("rho", [0.0, 1.0, math.nan, 1e-13])
def test_a_rho_that_is_none(rho):
    with pytest.raises(DvpError, match=r"rho: \S+; expected a number in"):
        integration.install(ImportanceRule(), rho)


@pytest.mark.parametrize("packed", [True, False])
def test_verls_engine_gives_log_probs_over_v_s(packed, monkeypatch):
    """Two sequences through FSDPEngine's own code, after temperature; tokens outside V_S have the head's mask value."""
    unpruned(monkeypatch)
    integration.install(ImportanceRule(), rho=0.1)
    generator = torch.Generator().manual_seed(0)
    vocabulary, lengths, temperature = 17, [3, 5], 0.7
    hidden_NH = torch.randn(8, 4, generator=generator) * 2
    weight_VH = torch.randn(vocabulary, 4, generator=generator)
    tokens_N = torch.randint(vocabulary, (8,), generator=generator)
    ours_NH, theirs_NH = hidden_NH.clone().requires_grad_(), hidden_NH.clone().requires_grad_()
    given = token_statistics(ours_NH, weight_VH, tokens_N.roll(-1), safe=FixedRho(0.1), temperature=temperature)
    assert 0 < given.target_in_safe.sum() < 8

    logits_NV = theirs_NH @ weight_VH.T
    entries = {"temperature_is_one": False, "input_ids_rmpad_rolled": tokens_N.roll(-1), "pad_size": 0}
    if packed:
        logits, entries["temperature_rmpad"] = logits_NV[None], torch.full((8,), temperature)
    else:
        logits = torch.nn.utils.rnn.pad_sequence(logits_NV.split(lengths), batch_first=True)
        entries["temperature"] = torch.full((2,), temperature)
    sequences = torch.nested.nested_tensor(list(tokens_N.split(lengths)), layout=torch.jagged)
    batch = TensorDict({"input_ids": sequences}, batch_size=2)
    for name, value in (
        ("use_remove_padding", packed),
        ("calculate_entropy", True),
        ("calculate_sum_pi_squared", True),
    ):
        batch.set_non_tensor(name, value)
    engine = SimpleNamespace(
        engine_config=SimpleNamespace(entropy_checkpointing=False, entropy_from_logits_with_chunking=False),
        compute_entropy_from_logits=transformer_impl.verl_F.entropy_from_logits,
        _gather_and_unpad_packed=lambda values, pad_size: values,
    )
    made = transformer_impl.FSDPEngineWithLMHead.prepare_model_outputs(
        engine, SimpleNamespace(logits=logits), entries, batch, None
    )
    for theirs, ours in (
        ("log_probs", given.pruned_log_prob),
        ("entropy", given.pruned_entropy),
        ("sum_pi_squared", given.pruned_sum_p_squared),
    ):
        # Sums of 4 and of as many terms as the vocabulary has; the largest number is the mask's.
        atol = rounding(4 + vocabulary, ours.abs().max().item())
        torch.testing.assert_close(made[theirs].values(), ours, rtol=0, atol=atol)
    made["log_probs"].values().sum().backward()
    given.pruned_log_prob.sum().backward()
    atol = rounding(4 + vocabulary, ours_NH.grad.abs().max().item())
    torch.testing.assert_close(theirs_NH.grad, ours_NH.grad, rtol=0, atol=atol)


@pytest.mark.parametrize("importance", [ImportanceRule(), ImportanceRule(level="sequence")])
def test_tokens_outside_v_s_have_no_gradient(importance, monkeypatch):
    """Nor have the others of their response where its ratio, a product, is 0."""
    unpruned(monkeypatch)
    integration.install(importance, rho=0.1)
    given = case(2)
    given["mask"][0, :2] = True
    given["engine"][:] = given["trainer"]
    given["trainer"][0, 0] = -50.3
    _, gradient_BT = losses("dvp", given, actor())
    expected_BT = torch.where(given["mask"], -given["advantage"] / B, 0.0)
    expected_BT[0, : T if importance.level == "sequence" else 1] = 0.0
    torch.testing.assert_close(gradient_BT, expected_BT, rtol=0, atol=WHOLE_BATCH)


def agent_loop(tiny_model, *overrides: str):
    """The loop as verl makes it, by its name, beside a server that answers with what it was asked."""

    class Server:
        async def generate(self, sampling_params, **_):
            self.asked = sampling_params
            return TokenOutput(token_ids=[3, 4], log_probs=[-0.5, -0.5], stop_reason="completed")

    config, server, tokenizer = configured(*overrides), Server(), AutoTokenizer.from_pretrained(tiny_model)
    tokenizer.chat_template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    loop = instantiate(
        _agent_loop_registry["dvp"],
        trainer_config=DictConfigWrap(config),
        server_manager=server,
        tokenizer=tokenizer,
        processor=None,
        dataset_cls=RLHFDataset,
        data_config=DictConfigWrap(config.data),
        tools=ToolListWrap([]),
    )
    return loop, server


def test_the_agent_loop_samples_with_min_p(tiny_model, monkeypatch):
    unpruned(monkeypatch)
    integration.install(ImportanceRule(), rho=0.25)

    async def ask():
        loop, server = agent_loop(tiny_model)
        made = await loop.run(given, raw_prompt=[{"role": "user", "content": "bado kila"}])
        return type(loop), server.asked, made.response_ids

    given = {"temperature": 1.0}
    assert asyncio.run(ask()) == (integration.DvpAgentLoop, {"temperature": 1.0, "min_p": 0.25}, [3, 4])
    assert given == {"temperature": 1.0}


@pytest.mark.parametrize(
    "override",
    [
        "actor_rollout_ref.rollout.top_p=0.9",
        "actor_rollout_ref.rollout.top_k=50",
        "algorithm.use_kl_in_reward=true",
    ],
)
def test_settings_under_which_it_samples_otherwise(override, tiny_model, monkeypatch):
    unpruned(monkeypatch)
    integration.install(ImportanceRule(), rho=0.25)

    async def make():
        agent_loop(tiny_model, override)

    with pytest.raises(InstantiationException) as raised:
        asyncio.run(make())
    name = override.partition("=")[0]
    assert isinstance(raised.value.__cause__, DvpError)
    assert re.match(rf"{name}: \S+; expected \S+( or \S+)? with agent loop dvp$", str(raised.value.__cause__))


def sampled(model, prompt: torch.Tensor, tokens: int, rho: float) -> torch.Tensor:
    """A response, from V_S."""
    ids = prompt
    for _ in range(tokens):
        p = model(ids[None]).logits[0, -1].softmax(dim=0)
        ids = torch.cat([ids, torch.multinomial(torch.where(p >= rho * p.max(), p, 0.0), 1)])
    return ids[len(prompt) :]


@pytest.mark.slow
def test_a_step_of_verls_own_actor_by_the_pages_recipe(tiny_model, root, tmp_path):
    """verl imports the page's module, makes model, FSDP2 and optimiser, and takes a step; the reference is dense."""
    module, settings = recipe()
    (tmp_path / "my_dvp.py").write_text(module)
    rho, size, length, start = float(re.search(r"rho=([0-9.e-]+)", module)[1]), 4, 5, 3
    model = AutoModelForCausalLM.from_pretrained(tiny_model)
    model.model.norm.weight.data.mul_(6)  # wide enough for this rho to prune
    for one in (model, AutoTokenizer.from_pretrained(tiny_model)):
        one.save_pretrained(tmp_path / "model")
    torch.manual_seed(0)
    prompt_BS = torch.randint(5, 400, (size, start))
    with torch.no_grad():
        response_BT = torch.stack([sampled(model, prompt, length, rho) for prompt in prompt_BS])
        last = model(torch.cat([prompt_BS[0], response_BT[0, :-1]])[None]).logits[0, -1]
    response_BT[0, -1] = last.argmin()  # an engine that leaves V_S
    ids = torch.cat([prompt_BS, response_BT], dim=1)
    advantage_BT = torch.randn(size, 1).expand(-1, length).contiguous()

    model.double()
    z_BTV = model(ids).logits[:, start - 1 : -1]
    own = response_BT[..., None]
    safe_BTV = z_BTV >= z_BTV.amax(dim=-1, keepdim=True) + math.log(rho)
    inside_BT = safe_BTV.gather(2, own)[..., 0]
    log_q_BT = z_BTV.masked_fill(~safe_BTV, -torch.inf).log_softmax(dim=-1).gather(2, own)[..., 0]
    assert inside_BT.sum() == size * length - 1
    assert (~safe_BTV).any()
    # Sequence ratios of e^0.2, e^0.2 and e^2, of which MIS rejects the last; and one of 0.
    apart_B = torch.tensor([0.0, 0.2, 0.2, 2.0])
    engine_BT = torch.where(inside_BT, log_q_BT.detach() - apart_B[:, None] / length, -20.0).float()
    ratio_B = (log_q_BT.detach() - engine_BT).sum(dim=1).exp()
    weight_B = torch.where((ratio_B >= 0.5) & (ratio_B <= 2.0), ratio_B, 0.0)
    assert weight_B.count_nonzero() == 2
    loss = -(weight_B[:, None] * advantage_BT * log_q_BT.masked_fill(~inside_BT, 0.0)).sum() / size
    loss.backward()
    norm = torch.stack([weight.grad.norm() for weight in model.parameters()]).norm().item()

    whole_BL = torch.ones_like(ids)
    columns = {"prompts": prompt_BS, "responses": response_BT, "input_ids": ids, "attention_mask": whole_BL}
    columns |= {"position_ids": whole_BL.cumsum(dim=1) - 1, "response_mask": whole_BL[:, start:].contiguous()}
    torch.save(columns | {"advantages": advantage_BT, "old_log_probs": engine_BT}, tmp_path / "batch.pt")
    here = {
        "model.path": tmp_path / "model",
        "model.use_remove_padding": "false",
        "+model.override_config.attn_implementation": "sdpa",
        "actor.strategy": "fsdp2",
        "actor.fsdp_config.use_torch_compile": "false",
        "+actor.fsdp_config.mixed_precision": "{param_dtype:fp32,reduce_dtype:fp32,buffer_dtype:fp32}",
        "actor.ppo_micro_batch_size_per_gpu": 2,
        "rollout.log_prob_micro_batch_size_per_gpu": 2,
    }
    settings += [re.sub(r"^\+?", r"\g<0>actor_rollout_ref.", name) + f"={value}" for name, value in here.items()]
    command = [sys.executable, root / "tests/integrations/verl_process.py", tmp_path, *settings]
    alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "0"}
    done = subprocess.run(
        command, cwd=tmp_path, env=os.environ | alone, check=False, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads((tmp_path / "result.json").read_text())
    # Sums of as many terms as the vocabulary has, of logits up to 100.
    close = rounding(400, 100)
    assert found["loss"] == pytest.approx(loss.item(), abs=close)
    assert found["grad_norm"] == pytest.approx(norm, rel=close)
    assert norm > 0.1
    assert found["actor/dvp_kept"] == 0.5
    assert found["actor/dvp_outside_safe"] == pytest.approx(1 / (size * length))
    assert "dvp" in found["loops"]
