"""One model on one task, through lm-eval: k samples a problem, graded, summarised, kept."""

import logging
import tempfile
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import datasets
import lm_eval.evaluator
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import yaml
from lm_eval.tasks import TaskManager

from dvp.core.safe_vocabulary import SafeVocabulary
from dvp.data.verifier import stated_answer
from dvp.evaluation.lm import EngineLM
from dvp.evaluation.metrics import summarise
from dvp.experiment.config import Experiment
from dvp.files import atomic_path
from dvp.rollout.engine import Engine, Sampling
from dvp.rollout.turns import turn_metrics

TASKS = Path(__file__).parent / "tasks"

SAMPLES = pa.schema(
    {
        "task": pa.string(),
        "problem_id": pa.string(),
        "sample": pa.int32(),
        "prompt": pa.string(),
        "response": pa.string(),
        "reference": pa.string(),
        "stated_answer": pa.string(),
        "correct": pa.bool_(),
        "tokens": pa.int32(),
        "finish_reason": pa.string(),
        "seed": pa.int64(),
    }
)
TOOL_SAMPLES = pa.schema([*SAMPLES, pa.field("calls", pa.int32()), pa.field("failed_calls", pa.int32())])
"""Of an experiment with a tool. `response` has calls and answers, `tokens` counts those that the model wrote."""


def evaluate(
    experiment: Experiment,
    task: str,
    *,
    model_dir: Path,
    eval_parquet: Path,
    engine: Engine,
    tokenizer: Any,
    folder: Path,
    safe_vocabulary: SafeVocabulary | None = None,
) -> dict[str, Any]:
    """Sample, grade and summarise; write folder/samples.parquet and return what scores.json says of the task.

    `engine` already holds the model of `model_dir`; it, the experiment, the rows and the safe vocabulary, to which the
    engine is restricted as in training (None: the full one), determine the samples.
    Raises DvpError if a prompt does not fit.
    """
    started = time.monotonic()
    settings = experiment.evaluation
    k = settings.samples_per_problem[task]
    sampling = Sampling(
        max_tokens=settings.max_response_tokens,
        temperature=settings.temperature,
        top_p=settings.top_p,
        safe_vocabulary=safe_vocabulary,
    )
    model = EngineLM(engine, tokenizer, sampling, data=experiment.data, seed=settings.seed)
    _quiet()
    with tempfile.TemporaryDirectory(prefix="dvp-lm-eval-") as scratch:
        _write_task(experiment, task, eval_parquet, Path(scratch))
        tasks = TaskManager(include_path=scratch, include_defaults=False).load(task)
        # Not simple_evaluate: it also lists the system's packages (five seconds) and reseeds numpy.
        results = lm_eval.evaluator.evaluate(model, tasks, bootstrap_iters=0)
    documents = results["samples"][task]
    responses = [response for document in documents for response in document["filtered_resps"][0]]
    schema = TOOL_SAMPLES if experiment.tools else SAMPLES
    table = _table(task, documents, schema)
    correct_PK = np.array(table["correct"]).reshape(-1, k)
    answers = np.array(table["stated_answer"], dtype=object).reshape(-1, k)
    by_id_P = np.argsort(table["problem_id"][::k])
    metrics = summarise(
        correct_PK[by_id_P], answers[by_id_P].tolist(), resamples=settings.bootstrap_resamples, seed=settings.seed
    )
    with atomic_path(folder / "samples.parquet") as temporary:
        pq.write_table(pa.table(table, schema=schema), temporary, compression="zstd")
    return {
        "task": task,
        "model": str(model_dir),
        "problems": len(correct_PK),
        "samples_per_problem": k,
        "samples": correct_PK.size,
        "metrics": metrics,
        "truncated_fraction": table["finish_reason"].count("length") / correct_PK.size,
        "mean_response_tokens": sum(table["tokens"]) / correct_PK.size,
        **(turn_metrics([response.completion for response in responses]) if experiment.tools else {}),
        "temperature": settings.temperature,
        "top_p": settings.top_p,
        "lm_eval_version": version("lm_eval"),
        "task_version": results["versions"][task],
        "seconds": round(time.monotonic() - started, 3),
    }


def _write_task(experiment: Experiment, task: str, eval_parquet: Path, scratch: Path) -> None:
    """The task as a file that includes ours and adds what this experiment sets."""
    settings = experiment.evaluation
    k = settings.samples_per_problem[task]
    own = TASKS / f"{task}.yaml"
    config = {
        "include": str(own if own.is_file() else TASKS / "math.yaml"),
        "task": task,
        "dataset_kwargs": {
            "data_files": {"test": str(eval_parquet.resolve())},
            "filters": [["task", "==", task]],
            "cache_dir": str(scratch / "cache"),
        },
        "repeats": k,
        "filter_list": [{"name": "all_k", "filter": [{"function": "take_first_k", "k": k}]}],
        "generation_kwargs": {"do_sample": settings.temperature > 0, "until": []},  # the rest is ours
    }
    (scratch / f"{task}.yaml").write_text(yaml.safe_dump(config), encoding="utf-8")


def _table(task: str, documents: list[dict[str, Any]], schema: pa.Schema) -> dict[str, list]:
    """The columns of `schema` from lm-eval's log, problem by problem, sample by sample, as its task graded them."""
    rows = []
    for document in documents:
        doc, (responses,) = document["doc"], document["filtered_resps"]
        for sample, response in enumerate(responses):
            completion = response.completion
            how = {"truncated": completion.finish_reason == "length", "thinking": response.grader.thinking}
            rows.append(
                {
                    "task": task,
                    "problem_id": doc["id"],
                    "sample": sample,
                    "prompt": doc["prompt"],
                    "response": completion.transcript or str(response),
                    "reference": doc["answer"],
                    "stated_answer": stated_answer(response, **how),
                    "correct": response.correct,
                    "tokens": len(completion.log_probs),
                    "finish_reason": completion.finish_reason,
                    "seed": response.seed,
                    "calls": completion.calls,
                    "failed_calls": completion.failed_calls,
                }
            )
    return {name: [row[name] for row in rows] for name in schema.names}


def _quiet() -> None:
    """From lm-eval and datasets errors only; from datasets no bars, and no download counted at its server."""
    for name in ("lm_eval", "datasets"):
        logging.getLogger(name).setLevel(logging.ERROR)
    datasets.disable_progress_bars()
    datasets.config.HF_UPDATE_DOWNLOAD_COUNTS = False
