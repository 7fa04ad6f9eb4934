"""Evaluation of one model on one task through lm-eval: sample k responses per problem, grade, summarise and write."""

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
"""Columns with a tool: `response` includes calls and answers, `tokens` counts only tokens that the model wrote."""


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
    """Evaluate a model on a task: write folder/samples.parquet and return the content of scores.json for the task.

    eval_parquet : evaluation problems; the rows of this task are used.
    engine : already holds the weights of `model_dir`.
    safe_vocabulary : restricts the engine as in training; None: the full vocabulary.
    The samples are determined by the engine, the experiment, the problems and the safe vocabulary.
    Raises DvpError if a prompt does not fit the engine.
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
        # simple_evaluate would also list the system's packages (five seconds) and reseed numpy.
        results = lm_eval.evaluator.evaluate(model, tasks, bootstrap_iters=0)
    documents = results["samples"][task]
    responses = [response for document in documents for response in document["filtered_resps"][0]]
    schema = TOOL_SAMPLES if experiment.tools else SAMPLES
    table = _table(task, documents, schema)
    correct_PK = np.array(table["correct"]).reshape(-1, k)
    by_id_P = np.argsort(table["problem_id"][::k])
    answers = np.array(table["stated_answer"], dtype=object).reshape(-1, k)[by_id_P].tolist()
    answers = None if experiment.data.reward else answers  # which grades whole responses
    metrics = summarise(correct_PK[by_id_P], answers, resamples=settings.bootstrap_resamples, seed=settings.seed)
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
    """Write a task file that includes this package's own and adds the experiment's settings."""
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
        "generation_kwargs": {"do_sample": settings.temperature > 0, "until": []},  # EngineLM has the rest
    }
    (scratch / f"{task}.yaml").write_text(yaml.safe_dump(config), encoding="utf-8")


def _table(task: str, documents: list[dict[str, Any]], schema: pa.Schema) -> dict[str, list]:
    """Convert lm-eval's log into the columns of `schema`, one row per sample, in the order of the problems."""
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
                    "stated_answer": None if response.grader.own else stated_answer(response, **how),
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
    """Silence lm-eval and datasets apart from errors: no progress bars, and no report of downloads to the hub."""
    for name in ("lm_eval", "datasets"):
        logging.getLogger(name).setLevel(logging.ERROR)
    datasets.disable_progress_bars()
    datasets.config.HF_UPDATE_DOWNLOAD_COUNTS = False
