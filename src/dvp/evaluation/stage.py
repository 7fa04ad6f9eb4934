"""The stage `evaluate`: sample responses of a model to each task, grade them and write the scores."""

import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path

from dvp.errors import DvpError
from dvp.experiment.config import Experiment
from dvp.experiment.folder import ExperimentDir
from dvp.experiment.grid import Sampler
from dvp.experiment.jobs import BASE, Job
from dvp.files import read_json, sha256_file, write_json
from dvp.gpus import claim
from dvp.rollout.engine import make_engine
from dvp.rollout.vllm import configure_environment
from dvp.stage import Inputs, read_inputs, run_stage

MANIFEST = "manifest.json"  # written when all tasks of a model are done
ENGINE_SEQUENCES = 256  # sequences that the engine samples at once

Sample = Callable[[str, Path], dict]
"""Function (task, folder) that writes folder/samples.parquet and returns the scores; see runner.evaluate."""


def evaluate(config: Path, path: str, threads: int) -> None:
    """Evaluate a model on its tasks, with one engine: write evals/RUN/TASK/ for each, and evals/RUN/manifest.json.

    A task that is done is kept.
    path : the path of a run, of a run after a step (RUN/step~16), or `base`; followed by /by~ENGINE/min_p~RHO for a
        sampler of evaluation.also.
    threads : processor threads.
    Raises DvpError. A task that fails does not stop the others: the first error is raised at the end.
    """
    directory = ExperimentDir(config)
    experiment = directory.experiment
    jobs = [experiment.job("evaluate", f"{path}/{task}") for task in experiment.data.tasks]
    run, sampler = jobs[0].run, jobs[0].sampler
    claim(jobs[0].gpus)
    configure_environment(threads)
    import torch

    torch.set_num_threads(threads)
    made_by, model_result = directory.model(run)
    inputs = {made_by: model_result, "prepare": directory.result("prepare")}
    read_inputs(directory, inputs, run and run.path)  # once: a model may have tens of gigabytes
    tasks = experiment.data.tasks
    sample = sampling(experiment, tasks, model_result.parent, directory.data / "eval.parquet", sampler)
    failures = []
    for job in jobs:
        try:
            _evaluate_task(directory, job, inputs, sample)
        except DvpError as error:
            failures.append(error)
    if failures:
        raise failures[0]
    results = {task: directory.result("evaluate", job.path) for task, job in zip(tasks, jobs, strict=True)}
    files = {f"{task}/{result.name}": sha256_file(result) for task, result in results.items()}
    write_json(results[tasks[0]].parents[1] / MANIFEST, {"files": files})


def _evaluate_task(directory: ExperimentDir, job: Job, inputs: Inputs, sample: Sample) -> None:
    """Evaluate one task of a model whose files have been verified, unless it is done."""
    experiment, run, sampler, task = directory.experiment, job.run, job.sampler, job.task
    assert sampler is not None
    assert task is not None
    result = directory.result("evaluate", job.path)
    samples = result.parent / "samples.parquet"
    # In the tracking store, scores by another sampler must not be mistaken for those by the default one.
    called = task if sampler == experiment.sampler else f"{task}-{sampler.path.replace('/', '-')}"
    of = {"run": run.path if run else None, "task": called}
    config_hash = experiment.config_hash("evaluate", job.path)
    with run_stage("evaluate", directory, result, config_hash, inputs, verify=False, **of) as stage:
        done = stage.is_done()
        if not done and stage.reuse():
            return
        shown = experiment.evaluation.model_dump(mode="json", exclude={"also"})
        shown |= {"samples_per_problem": shown["samples_per_problem"][task], **sampler.model_dump()}
        stage.tracked.log_params({"evaluation": shown})
        scores = read_json(result, "metrics") if done else sample(task, result.parent)
        if run is None and (share := scores["metrics"]["pass@1"]["value"]) in (0.0, 1.0):
            print(
                f"warning: of the base model's {scores['samples']} samples of {task} {'all' if share else 'none'} are "
                "right: if training's problems are alike, all rewards of each group are equal, and RL learns nothing; "
                f"take {'harder' if share else 'easier'} problems, another prompt or another base",
                file=sys.stderr,
            )
        stage.tracked.log_result({name: metric["value"] for name, metric in scores["metrics"].items()})
        stage.tracked.log_file(samples)
        if done:
            stage.tracked.log_file(result)
            return
        files = {samples.name: sha256_file(samples)}
        stage.finish({"run": run.path if run else BASE, **sampler.model_dump(), **scores, "files": files})


def sampling(
    experiment: Experiment, tasks: list[str], model: Path, eval_parquet: Path, sampler: Sampler | None = None
) -> Sample:
    """Return a function that evaluates a model on any of these tasks with one engine, started at the first call.

    model : folder of the model.
    eval_parquet : evaluation problems of all tasks.
    sampler : engine and ρ to sample with; by default the experiment's.
    """
    from transformers import AutoConfig, AutoTokenizer

    from dvp.core.safe_vocabulary import FixedRho
    from dvp.data.prompts import encode_prompts, read_problems
    from dvp.data.reward import Grader
    from dvp.evaluation.runner import evaluate as evaluate_model
    from dvp.rollout.turns import ToolEngine
    from dvp.tools import make_tool

    settings, sampler = experiment.evaluation, sampler or experiment.sampler
    tokenizer = AutoTokenizer.from_pretrained(model)
    Grader(own=experiment.data.reward)  # what is wrong with it is said before an engine starts

    @cache
    def engine():
        tool = make_tool(experiment.tools) if experiment.tools else None
        longest = max(
            len(prompt)
            for task in tasks
            for prompt in encode_prompts(
                tokenizer, read_problems(eval_parquet, task), experiment.data.chat, "data/eval.parquet"
            )
        )
        started = make_engine(
            model,
            experiment.engines[sampler.engine],
            max_model_len=min(
                longest + settings.max_response_tokens, AutoConfig.from_pretrained(model).max_position_embeddings
            ),
            max_num_seqs=ENGINE_SEQUENCES,
            seed=settings.seed,
        )
        return ToolEngine(started, tool, experiment.tools, tokenizer) if experiment.tools else started

    def sample(task: str, folder: Path) -> dict:
        return evaluate_model(
            experiment,
            task,
            model_dir=model,
            eval_parquet=eval_parquet,
            engine=engine(),
            tokenizer=tokenizer,
            folder=folder,
            safe_vocabulary=None if sampler.rho is None else FixedRho(sampler.rho.value),
        )

    return sample
