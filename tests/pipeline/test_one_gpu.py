"""The whole DAG of one GPU's experiment, on a CPU, with a random model of its architecture and local problems."""

import json
import shutil

import pandas as pd
import pytest
import yaml
from working_copy import Copy

from dvp.files import read_json

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]
NAME = "qwen3_0.6b"
RLOO, DVP_MIS = (
    f"method~{part}/seed~0" for part in ("rloo/engine~bf16_fp8kv/rho~none", "dvp_mis/engine~bf16_fp8kv/rho~exp-13")
)
# transformers' names, as dvp.training.base has them.
SIZES = {
    "hidden_size": "hidden_size",
    "layers": "num_hidden_layers",
    "heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "intermediate_size": "intermediate_size",
    "vocabulary_size": "vocab_size",
    "tie_word_embeddings": "tie_word_embeddings",
}


def problems(count: int, offset: int, math: bool) -> str:
    """JSON lines in the columns of GSM8K, or of MATH-500."""
    lines = []
    for number in range(offset, offset + count):
        question = f"Anna has {number} apples and buys {number % 7} more. How many apples does she have?"
        answer = str(number + number % 7)
        gsm8k = {"question": question, "answer": f"{number} + {number % 7} = {answer}.\n#### {answer}"}
        level = {"solution": f"It is $\\boxed{{{answer}}}$.", "unique_id": f"test/{number}.json"}
        lines.append(json.dumps({"problem": question, "answer": answer, **level} if math else gsm8k))
    return "\n".join(lines) + "\n"


@pytest.fixture(scope="module")
def copy(tmp_path_factory, root, tiny_model) -> Copy:
    folder = tmp_path_factory.mktemp("one_gpu")
    copy = Copy(folder, root, "--config", f"experiment={NAME}")
    shutil.copytree(tiny_model, folder / "model")
    made = read_json(tiny_model / "config.json")
    path = folder / f"config/experiments/gpu/{NAME}.yaml"
    value = yaml.safe_load(path.read_text())
    value["base"] = {
        "kind": "local",
        "path": "model",
        "architecture": {ours: made[theirs] for ours, theirs in SIZES.items()},
    }
    catalogue = yaml.safe_load((folder / "config/catalogue/sources.yaml").read_text())
    value["sources"] = {}
    for place, (source, count) in enumerate((("gsm8k", 200), ("gsm8k_test", 12), ("math500", 12))):
        (folder / f"{source}.jsonl").write_text(problems(count, 1000 * place, source == "math500"))
        kept = {key: catalogue[source][key] for key in ("columns", "answer_format") if key in catalogue[source]}
        value["sources"][source] = {"kind": "file", "path": f"{source}.jsonl", **kept}
    value["seeds"] = [0]
    value["training"] |= {"steps": 2, "prompts_per_step": 4, "group_size": 4, "max_response_tokens": 48}
    value["training"] |= {"tokens_per_micro_batch": 1024, "checkpoint_every": 1}
    value["evaluation"] |= {"max_response_tokens": 48, "bootstrap_resamples": 200}
    value["grid"] = [
        {"method": "rloo", "engine": "bf16_fp8kv"},
        {"method": "dvp_mis", "engine": "bf16_fp8kv", "rho": "exp(-13)"},
    ]
    path.write_text(yaml.safe_dump(value, sort_keys=False))
    done = copy.snakemake()
    assert done.returncode == 0, done.stdout[-5000:]
    return copy


def test_the_whole_dag_of_one_gpu(copy):
    results = copy.results / NAME
    assert read_json(results / "preflight/engine~bf16_fp8kv/preflight.json")["passed"]
    rows = [json.loads(line) for line in (results / "runs" / DVP_MIS / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 2]
    assert all(row["k3"] > 0 for row in rows)
    table = pd.read_csv(results / "tables/main_table.csv")
    assert list(table["label"]) == ["base model", "RLOO (naive)", "DVP + MIS"]
    scores = read_json(results / "evals" / RLOO / "gsm8k_test/scores.json")
    assert (scores["problems"], scores["samples_per_problem"]) == (12, 4)
    assert "Pre-registered criterion" in (results / "tables/main_table.md").read_text()
