"""What is impossible is refused in one line that names the key and what was expected."""

import math

import pytest
from changed import BIAS, ESTIMATORS, GONE, HUB, MISMATCH, PLAIN, REVISION, RLOO, TOOLS, experiment, refused

from dvp.experiment.loading import load_experiment

STORIES = "sources.stories_small"
DECAY = {"growth": 0.25, "patience": 8, "factor": 0.5, "every": 32, "lowest": 0.1}


def odd(**settings) -> dict:
    return {"methods.odd": PLAIN | settings}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        # Unknown keys, before all else.
        ({"sedes": [0], "seeds": GONE}, "sedes: unknown key; did you mean seeds? (and 1 more)"),
        ({"training.learning_rte": 1e-3}, "training.learning_rte: unknown key; did you mean learning_rate?"),
        ({f"{STORIES}.sede": 3}, f"{STORIES}.sede: unknown key; did you mean seed?"),
        ({"engines.noise": {"dtype": "float32", "quick": 1}}, "engines.noise.quick: unknown key"),
        ({"grid.0.training": {"groupsize": 4}}, "grid.0.training.groupsize: unknown key; did you mean group_size?"),
        ({"grid.0.training": {"gpus": 2}}, "grid.0.training.gpus: unknown key"),
        (odd(loss={"kind": "reinforce", "clip_low": 0.2}), "methods.odd.loss.clip_low: unknown key"),
        ({"a\nb": 1}, "a b: unknown key"),
        # Values that cannot be.
        ({"seeds": [0, 1, 0]}, "seeds: 0 is listed twice"),
        ({"seeds": [2**32]}, "seeds.0: Input should be less than or equal to 4294967295, found 4294967296"),
        *(({"training.steps": value}, "training.steps: Input should be ") for value in (0, 2.0, "3", True)),
        *(({"training.learning_rate": rate}, "training.learning_rate: ") for rate in (0.0, "fast", math.nan, math.inf)),
        ({"evaluation.temperature": 0.009}, "evaluation: temperature: expected 0 or at least 0.01, found 0.009"),
        ({"evaluation.temperature": 0.0}, "evaluation: samples_per_problem: expected 1 at temperature 0 (greedy)"),
        ({"scale": "One.\n"}, "scale: expected one line without control characters, found 'One.\\n'"),
        (odd(label="a\u2028b"), "methods.odd.label: expected one line without control characters"),
        ({"data.prompt_template": "{{problem}}"}, "data.prompt_template: expected a text that contains {problem}, in"),
        (
            {"data.prompt_template": "{problem} Answer: \boxed{}"},
            "data.prompt_template: a control character, '\\x08', before 'oxed{}'; expected none: two ",
        ),
        ({"engines": {"a/b": {"dtype": "float32"}}}, "engines.a/b: String should match pattern"),
        ({"base.kind": GONE}, "base: kind is missing; docs/keys.md has"),
        ({"sources.remote": HUB | {"revision": "main"}}, "sources.remote.revision: String should match pattern"),
        # A ρ.
        *(
            ({"grid.1.rho": rho}, f"grid.1.rho: ρ must lie in (0, 1), written like 0.01 or exp(-13); found {rho!r}")
            for rho in (0, 1.0, -1, "abc", True, math.nan, "nan", "exp(-0)", "e-13", " 0.01", "٠.٥", "exp(-1e1)", "")
        ),
        ({"grid.1.rho": ["1e-2", 0.01]}, "grid.1.rho: 0.01 is listed twice"),
        ({"grid.1.rho": GONE}, "grid: method~dvp_mis/engine~coarse/rho~none: method 'dvp_mis' needs rho"),
        ({"grid.0.rho": 1e-2}, "grid: method~rloo/engine~fp32/rho~0.01: method 'rloo' takes no rho"),
        ({"grid.1.rho": ["exp(-13)", "exp(-13.0)"]}, "grid.1.rho: exp(-13.0) is listed twice"),
        (
            {"methods.odd": PLAIN | {"learning_rate_decay": DECAY | {"patience": 3}}, "grid.0.method": ["rloo", "odd"]},
            "grid: method~odd/engine~fp32/rho~none: method 'odd': learning_rate_decay.patience (3) must be below",
        ),
        # Names that lead nowhere.
        ({"data.train": "nope"}, "data.train: 'nope' is not defined; known are "),
        ({"data.evaluation": ["nope"]}, "data.evaluation: 'nope' is not defined; known are "),
        ({"grid.0.method": "rlooo"}, "grid.method: 'rlooo' is not defined; did you mean rloo?"),
        ({"evaluation.engine": "nope"}, "evaluation.engine: 'nope' is not defined; known are "),
        ({"evaluation.also": [{"engine": "fp31"}]}, "evaluation.engine: 'fp31' is not defined; did you mean fp32?"),
        ({"base.source": "gsm8k"}, "base.source: 'gsm8k' is not defined; known are stories, stories_small"),
        ({"report.task": "aime25"}, "report.task: 'aime25' is not defined; known are held_out"),
        ({"report.reference": "rloo_tis"}, "report.reference: 'rloo_tis' is not defined; did you mean rloo?"),
        ({"bias": BIAS | {"tasks": ["stories"]}}, "bias.tasks: 'stories' is not defined; known are held_out"),
        ({"bias": BIAS | {"estimators": [{"method": "nope"}]}}, "bias.estimators: 'nope' is not defined"),
        ({"mismatch": MISMATCH | {"engines": ["nope"]}}, "mismatch.engines: 'nope' is not defined; known are "),
        ({"data.evaluation": ["held_out"], "sources.held_out": HUB | {"revision": REVISION}}, "data.evaluation: the "),
        ({"engines.training": {"dtype": "float32"}}, "engines: the name 'training' is reserved"),
        ({"data.evaluation": ["stories_small"]}, "data: evaluation: 'stories_small' is trained on; held_out splits"),
        ({"evaluation.samples_per_problem": {}}, "evaluation.samples_per_problem: expected a number for each of held_"),
        # Numbers that do not fit together.
        ({"training.tokens_per_micro_batch": 47}, "training: tokens_per_micro_batch: expected a prompt and a response"),
        ({"training.gpus": 3}, "training: gpus × nodes (3) must divide prompts_per_step × group_size (16)"),
        ({"training.minibatches": 3}, "training: minibatches (3) must divide prompts_per_step (4)"),
        ({"training.synchronise_every": 3}, "training: synchronise_every (3) must divide checkpoint_every (2)"),
        ({"engines.coarse.tensor_parallel": 2}, "grid: method~dvp_mis/engine~coarse/rho~0.01: tensor_parallel (2) "),
        ({"engines.coarse.quantization": "fp8"}, "engines.coarse: quantization: expected a dtype of 16 bits and no "),
        ({"base.architecture.kv_heads": 3}, "base.architecture: heads (2) must be a multiple of kv_heads (3)"),
        ({f"{STORIES}.steps": [4, 2]}, f"{STORIES}: steps: expected [fewest, most] within 1 and 2, found [4, 2]"),
        ({STORIES: {"kind": "generated", "generator": "chains", "count": 9, "seed": 0, "steps": [7, 14]}}, STORIES),
        ({"data.chat": True}, "data.chat: a base model that is trained here has no chat template; expected false"),
        (
            {"training.max_response_tokens": 2048, "training.tokens_per_micro_batch": 10000},
            "training.max_response_tokens: a prompt of 1 and a response of 2048 tokens are longer than the model's "
            "context, 2048 (base.architecture.max_position_embeddings)",
        ),
        # Methods.
        (odd(loss="ppo2"), "methods.odd.loss: no loss is called 'ppo2'; known are cispo"),
        (odd(loss={"clip_low": 0.1}), "methods.odd.loss: kind is missing"),
        (odd(importance="mis2"), "methods.odd.importance: no importance is called 'mis2'; known are"),
        (odd(importance={"preset": "mis", "vet": 1e-4}), "methods.odd.importance.vet: unknown key; did you mean veto?"),
        (odd(importance={"level": "none", "upper": 2.0}), "methods.odd.importance: level: none has no ratio"),
        (odd(importance="icepop", loss="gspo"), "methods.odd: loss gspo takes a correction of level none, sequence"),
        (odd(advantage="otb", loss="gspo"), "methods.odd: loss gspo takes one advantage a sequence; otb has one a "),
        (odd(true_norms=True), "methods.odd: true_norms: expected an advantage that weighs tokens: otb, "),
        ({"grid.0.method": ["rloo", "otb_oracle"]}, "grid: method~otb_oracle/engine~fp32/rho~none: method "),
        # A tool.
        ({"tools": TOOLS | {"call": ["|", "|"]}}, "tools.call: expected two different texts, found '|'"),
        ({"tools": TOOLS | {"max_answer_tokens": 48}}, "tools.max_answer_tokens (48) must be below training."),
        (
            {"tools": TOOLS, "training.gpus": 2, "engines.fp32.tensor_parallel": 2},
            "tools: engine 'fp32' is spread over several GPUs; expected tensor_parallel 1",
        ),
        ({"tools": TOOLS, "bias": BIAS}, "tools: `mismatch` and `bias` measure responses without tools; remove one"),
        # Measurements.
        ({"mismatch": MISMATCH | {"policies": ["foo"]}}, "mismatch.policies.0: Input should be a valid dictionary"),
        (
            {"mismatch": MISMATCH | {"policies": [RLOO | {"engine": "bf16"}]}},
            "mismatch.policies: method~rloo/engine~bf16/rho~none is not in the grid, which must train it",
        ),
        ({"mismatch": MISMATCH, "training.temperature": 0.7}, "training.temperature: expected 1 for `mismatch`, found"),
        ({"bias": BIAS | {"estimators": [{"method": "dvp"}]}}, "bias.estimators: method 'dvp' needs rho"),
        ({"bias": BIAS | {"estimators": [{"method": "gspo"}]}}, "bias.estimators: method 'gspo': expected loss rein"),
        ({"bias": BIAS | {"estimators": ESTIMATORS * 2}}, "bias.estimators: rloo, ρ None is listed twice"),
        ({"bias": BIAS | {"norm_responses": 4}}, "bias: position_bins and norm_responses go together"),
        ({"bias": BIAS | {"norm_responses": 4, "position_bins": [8, 4]}}, "bias: position_bins: expected ascending "),
        ({"bias": BIAS | {"norm_responses": 4, "position_bins": [900]}}, "bias.position_bins: expected 47 at most, "),
        ({"bias": BIAS | {"norm_responses": 999, "position_bins": [8]}}, "bias.norm_responses: expected 32 at most, "),
        (
            {"bias": BIAS | {"tasks": ["held_out"], "position_bins": [2], "norm_responses": 1}},
            "bias: tasks and position_bins cannot be combined; give one",
        ),
    ],
)  # fmt: skip
def test_what_is_impossible_is_one_line_with_its_key(changes, message):
    assert refused(**changes).startswith(message)


@pytest.mark.parametrize(
    ("training", "line"),
    [
        ({"group_size": [4, "8"]}, "grid.0.training.group_size.1: Input should be a valid integer, found '8'"),
        ([4], "grid.0.training: Input should be a valid dictionary, found [4]"),
        ({"minibatches": 3}, "grid: method~rloo/engine~fp32/rho~none/minibatches~3: minibatches (3) must divide "),
        ({"max_response_tokens": 2048, "tokens_per_micro_batch": 4096}, "grid: method~rloo/engine~fp32/rho~none/max_"),
        ({"group_size": [8, 8]}, "grid.0.training.group_size: 8 is listed twice"),
        # Which of them the others are set against.
        ({"group_size": [8, 2]}, "report.reference: expected one point of the grid, chosen by reference_engine and "),
    ],
)
def test_a_setting_that_cannot_be_an_axis_is_refused(training, line):
    assert refused(RLOO | {"training": training}).startswith(line)


def test_the_same_settings_twice_are_refused():
    twice = {"training": {"group_size": 4}}  # that of the section
    assert refused(RLOO, RLOO | twice, report__reference_training={"group_size": 4}).startswith(
        "grid: method~rloo/engine~fp32/rho~none/group_size~4 and method~rloo/engine~fp32/rho~none have the same"
    )


def test_a_group_of_one_is_refused_where_it_teaches_nothing():
    grid = (RLOO, {"method": ["otb", "grpo"], "engine": "fp32", "training": {"group_size": [4, 1]}})
    line = refused(*grid)
    assert line == (
        "grid: method~grpo/engine~fp32/rho~none/group_size~1: advantage grpo compares a group; expected group_size "
        "above 1"
    )
    assert len(experiment(RLOO, grid[1] | {"method": ["otb", "otb_leave_one_out"]}).points) == 5


def test_a_rho_that_a_rule_cannot_take_is_refused():
    entropy = {"rule": "entropy", "alpha": 1.0, "target_entropy": 1.0, "lowest": 1e-4, "highest": 1e-3}
    grid = (RLOO, {"method": "odd", "engine": "coarse", "rho": [1e-3, 1e-2]})
    line = refused(*grid, **odd(safe_vocabulary=entropy))
    assert line.startswith(
        "grid: method~odd/engine~coarse/rho~0.01: method 'odd': rho: expected lowest ≤ rho ≤ highest"
    )


def test_a_policy_is_measured_at_the_temperature_of_its_training():
    warm = RLOO | {"training": {"temperature": 0.7}}
    line = refused(
        RLOO, warm, mismatch=MISMATCH | {"policies": [warm]}, report__reference_training={"temperature": 1.0}
    )
    assert line.startswith("mismatch.policies: method~rloo/engine~fp32/rho~none/temperature~0.7: expected the temperat")


def test_a_response_may_fill_the_context_where_that_is_known():
    long = {"training__tokens_per_micro_batch": 10000}
    assert experiment(training__max_response_tokens=2047, **long).training.max_response_tokens == 2047
    hub = {"kind": "hub", "path": "a/b", "revision": REVISION}
    experiment(base=hub, training__max_response_tokens=9000, **long)
    shape = load_experiment("paper_8b").base.architecture.model_dump() | {"max_position_embeddings": 8192}
    line = refused(base=hub | {"architecture": shape}, training__max_response_tokens=8192, **long)
    assert line.endswith("longer than the model's context, 8192 (base.architecture.max_position_embeddings)")


def test_fewer_problems_than_are_needed_are_named():
    asked = load_experiment("mismatch")
    asked = asked.model_copy(update={"mismatch": asked.mismatch.changed(problems=99)})
    assert asked.problems_missing({None: 99, "held_out": 1}) is None
    assert asked.problems_missing({None: 98}) == "mismatch.problems: 99 are more than the problems to train on, 98"
    asked = load_experiment("bias_length")
    count, task = asked.bias.problems, asked.bias.tasks[-1]
    assert asked.problems_missing({None: 99, **dict.fromkeys(asked.data.tasks, count)}) is None
    line = f"bias.problems: {count} are more than the problems of task '{task}', {count - 1}"
    assert asked.problems_missing({task: count - 1}) == line
