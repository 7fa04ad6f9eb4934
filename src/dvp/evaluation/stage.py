"""The stage `evaluate`."""

from pathlib import Path

from dvp.experiment.config import Experiment
from dvp.experiment.folder import ExperimentDir
from dvp.experiment.grid import Sampler
from dvp.experiment.jobs import BASE
from dvp.files import sha256_file
from dvp.gpus import claim
from dvp.rollout.vllm import VllmEngine, configure_environment
from dvp.stage import run_stage

ENGINE_SEQUENCES = 256  # that the engine samples at once


def evaluate(config: Path, path: str, task: str, threads: int) -> None:
    """Samples of a model on a task → evals/RUN/TASK/samples.parquet and scores.json.

    path : of the run, of the run after a step (RUN/step~16), or `base`; with /by~ENGINE/min_p~RHO where that is one of
        evaluation.also.
    """
    directory = ExperimentDir(config)
    experiment, settings = directory.experiment, directory.experiment.evaluation
    job = experiment.job("evaluate", f"{path}/{task}")
    run, sampler = job.run, job.sampler
    claim(job.gpus)
    configure_environment(threads)
    import torch

    torch.set_num_threads(threads)
    made_by, model_result = directory.model(run)
    inputs = {made_by: model_result, "prepare": directory.result("prepare")}
    config_hash, result = experiment.config_hash("evaluate", job.path), directory.result("evaluate", job.path)
    # Its scores must not stand in the store as those of the sampler that all models have.
    called = task if sampler == experiment.sampler else f"{task}-{sampler.path.replace('/', '-')}"
    with run_stage("evaluate", directory, result, config_hash, inputs, run=run and run.path, task=called) as stage:
        if stage.reuse():
            return
        shown = settings.model_dump(mode="json", exclude={"also"})
        shown |= {"samples_per_problem": settings.samples_per_problem[task], **sampler.model_dump()}
        stage.tracked.log_params({"evaluation": shown})
        folder = result.parent
        scores = sample(experiment, task, model_result.parent, directory.data / "eval.parquet", folder, sampler)
        stage.tracked.log_result({name: metric["value"] for name, metric in scores["metrics"].items()})
        stage.tracked.log_file(folder / "samples.parquet")
        files = {"samples.parquet": sha256_file(folder / "samples.parquet")}
        stage.finish({"run": BASE if run is None else run.path, **sampler.model_dump(), **scores, "files": files})


def sample(
    experiment: Experiment,
    task: str,
    model: Path,
    eval_parquet: Path,
    folder: Path,
    sampler: Sampler | None = None,
) -> dict:
    """Sample a model on a task's rows of a table with an engine started for it, and score; see runner.evaluate.

    sampler : by default what all models are sampled with.
    """
    from transformers import AutoConfig, AutoTokenizer

    from dvp.core.safe_vocabulary import FixedRho
    from dvp.data.prepared import read_task
    from dvp.data.prompts import encode_prompts
    from dvp.evaluation.runner import evaluate as evaluate_model
    from dvp.rollout.turns import ToolEngine
    from dvp.tools import make_tool

    settings, sampler = experiment.evaluation, sampler or experiment.sampler
    rho = sampler.rho_value
    tool = make_tool(experiment.tools) if experiment.tools else None
    tokenizer = AutoTokenizer.from_pretrained(model)
    problems = read_task(eval_parquet, task)
    encoded = encode_prompts(tokenizer, problems, experiment.data.chat, "data/eval.parquet")
    longest = max(map(len, encoded), default=0) + settings.max_response_tokens
    engine = VllmEngine(
        model,
        experiment.engines[sampler.engine],
        max_model_len=min(longest, AutoConfig.from_pretrained(model).max_position_embeddings),
        max_num_seqs=ENGINE_SEQUENCES,
        seed=settings.seed,
    )
    if experiment.tools:
        engine = ToolEngine(engine, tool, experiment.tools, tokenizer)
    return evaluate_model(
        experiment,
        task,
        model_dir=model,
        eval_parquet=eval_parquet,
        engine=engine,
        tokenizer=tokenizer,
        folder=folder,
        safe_vocabulary=None if rho is None else FixedRho(rho),
    )
