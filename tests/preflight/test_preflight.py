"""`dvp preflight`: it passes on what works, and each thing that is broken is refused by the line that is about it."""

import re
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pandas as pd
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from dvp.core.safe_vocabulary import safe_mask
from dvp.errors import DvpError
from dvp.experiment.folder import ExperimentDir
from dvp.experiment.loading import load_experiment
from dvp.experiment.training import EngineConfig
from dvp.files import read_json
from dvp.preflight import checks, processes, stage
from dvp.preflight.brief import FullLength, GpuMemory, brief, chosen_run
from dvp.preflight.checks import check_forward, check_same_engine
from dvp.preflight.report import Report, check_memory, check_steps
from dvp.training import checkpoint
from dvp.training.backend import Trainer
from dvp.training.responses import ResponseRecorder
from noisy_engine import NoisyEngine

pytestmark = pytest.mark.slow
ENGINE = "coarse"
CHECKS = ["start", "safe vocabulary", "forward", "mismatch", "resume", "steps", "memory", "save"]
CHECKS += ["convert", "synchronise", "evaluate"]


# --- the whole path ---


@pytest.fixture(scope="module")
def prepared(dvp, tmp_path_factory) -> Path:
    """The smoke experiment with its data and base model; its config.yaml."""
    folder = tmp_path_factory.mktemp("preflight") / "results/smoke"
    for verb, *options in (
        ("resolve", "--experiment", "smoke", "--folder", folder),
        ("prepare", "--config", folder / "config.yaml"),
        ("base", "--config", folder / "config.yaml"),
    ):
        assert dvp(verb, *options)[0] == 0
    return folder / "config.yaml"


@pytest.fixture(scope="module")
def passed(prepared, dvp) -> dict:
    status, _, errors = dvp("preflight", "--config", prepared, "--engine", ENGINE, "--stop-seconds", 500)
    assert status == 0, errors
    return read_json(ExperimentDir(prepared).result("preflight", ENGINE))


SECONDS = {"rollout": 1, "update": 2, "sync": 1}


def measured(record: dict, check: str) -> dict:
    return next(line["measured"] for line in record["checks"] if line["check"] == check)


def test_the_smoke_experiment_passes_every_check(passed, prepared):
    assert passed["passed"]
    assert [line["check"] for line in passed["checks"]] == CHECKS
    assert all(line["passed"] for line in passed["checks"])
    assert passed["config_hash"] == ExperimentDir(prepared).experiment.config_hash("preflight", ENGINE)
    assert measured(passed, "safe vocabulary")["rules"] == 1  # DVP's; the mass budget needs an engine of its own kind
    assert measured(passed, "mismatch")["positions"] >= 200
    assert 0 < measured(passed, "mismatch")["kl"] < 0.5
    assert measured(passed, "steps") | {"steps": 2, "longest": 48} == measured(passed, "steps")
    assert measured(passed, "save")["stop_seconds"] == 500
    assert measured(passed, "convert")["host"] > 1e8
    # Two steps have moved the weights; the engine that got them in memory has them all.
    assert measured(passed, "synchronise")["apart"] < 0.1 * measured(passed, "synchronise")["moved"]
    assert measured(passed, "evaluate")["problems"] == 4
    assert min(passed["seconds"].values()) > 0
    folder = ExperimentDir(prepared).result("preflight", ENGINE).parent
    assert [file.name for file in folder.iterdir() if not file.name.startswith(".")] == ["preflight.json"]
    logged = read_json(prepared.parent / "tracking/preflight-coarse.json")
    assert logged["status"] == "FINISHED"
    assert logged["results"]["preflight/coarse/mismatch/kl"] == measured(passed, "mismatch")["kl"]


def test_a_job_with_too_little_memory_is_refused_in_one_line(passed, prepared, dvp):
    """The report stays, and no result."""
    result = ExperimentDir(prepared).result("preflight", ENGINE)
    status, line, errors = dvp("preflight", "--config", prepared, "--engine", ENGINE, "--memory-mb", 200)
    assert status == 2, errors
    assert line.startswith("dvp preflight: memory: ")
    assert line.endswith("95% of 0.21 GB are allowed")
    assert "Traceback" not in errors
    assert not result.exists()
    report = read_json(result.with_name("report.json"))
    assert not report["passed"]
    assert [one["check"] for one in report["checks"] if not one["passed"]] == ["memory"]
    assert not (result.parent / "work").exists()
    assert read_json(prepared.parent / "tracking/preflight-coarse.json")["status"] == "FAILED"


@pytest.mark.parametrize(
    ("exits", "line"),
    [
        ({"train": 143, "resume": 0}, r"save: 4\d s from SIGTERM .* of an update that has just begun: .* leaves 40 s"),
        ({"train": 0}, "save: the processes did not leave on SIGTERM"),
        ({"train": -9}, r"steps: ended by SIGKILL; was there too little memory\?"),
        ({"train": 143, "resume": 1}, "steps: ended with status 1"),
    ],
)
def test_processes_that_end_as_they_should_not_are_told_by_the_check(prepared, monkeypatch, exits, line):
    """With made-up processes, which say what they took, and of which the first takes 40 s to leave."""
    clock = iter(range(0, 10**6, 40))

    class Process:
        def __init__(self, command, pass_fds):
            process, work = command[-1], ExperimentDir(prepared).result("preflight", "fp32").parent / "work"
            self.returncode, report = exits[process], Report(work)
            report.note(peaks={"host": 1e9, "gpu_total": 0}, seconds=SECONDS, begun="steps")
            (work / "sampling").touch()
            self.poll = iter([None, self.returncode]).__next__

        def send_signal(self, number):
            assert number == 15

    monkeypatch.setattr(stage, "subprocess", SimpleNamespace(Popen=Process))
    monkeypatch.setattr(stage, "time", SimpleNamespace(monotonic=lambda: next(clock), sleep=lambda seconds: None))
    monkeypatch.chdir(prepared.parents[2])
    with pytest.raises(DvpError, match=f"^{line}$"):
        stage.preflight(prepared, "fp32", threads=1, stop_seconds=40, memory=None, process=None)
    result = ExperimentDir(prepared).result("preflight", "fp32")
    assert not result.exists()
    assert not read_json(result.with_name("report.json"))["passed"]


@pytest.mark.parametrize(("exits", "started"), [([1, 143, 0, 0, 0], 5), ([1, 1], 2)])
def test_a_start_that_fails_is_tried_once_more(prepared, monkeypatch, exits, started):
    """A node may falter; what fails later fails at once."""
    result = ExperimentDir(prepared).result("preflight", "fp32")
    left, names = iter(exits), []

    class Process:
        def __init__(self, command, pass_fds):
            names.append(command[-1])
            self.returncode, report = next(left), Report(result.parent / "work")
            if self.returncode == 1:
                report.note(begun="start")
            else:
                report.note(peaks={"host": 1e9, "gpu_total": 0}, seconds=SECONDS)
            self.poll = iter([self.returncode]).__next__

    monkeypatch.setattr(stage, "subprocess", SimpleNamespace(Popen=Process))
    monkeypatch.chdir(prepared.parents[2])
    if started == 2:
        with pytest.raises(DvpError, match=r"^start: ended with status 1$"):
            stage.preflight(prepared, "fp32", threads=1, stop_seconds=0, memory=None, process=None)
    else:
        stage.preflight(prepared, "fp32", threads=1, stop_seconds=0, memory=None, process=None)
    assert names == ["train", "train", "resume", "convert", "evaluate"][:started]


def test_an_engine_that_no_run_has_is_refused(prepared, dvp):
    status, line, _ = dvp("preflight", "--config", prepared, "--engine", "fp8")
    assert (status, line) == (
        2,
        "dvp preflight: preflight: 'fp8' is not in experiment 'smoke'; the nearest is 'fp32'",
    )


# --- what is broken is refused, before any step ---


class ModelEngine(NoisyEngine):
    """The trainer's model as an engine, with noise or without; some ignore what they are asked for."""

    def __init__(self, model, tokenizer, sigma: float = 0.0, ignores_rules: bool = False):
        super().__init__(model, tokenizer, sigma)
        self.ignores_rules = ignores_rules

    def generate(self, prompts, sampling, seeds):
        rule = None if self.ignores_rules else sampling.safe_vocabulary
        # It ends at max_tokens alone.
        return super().generate(prompts, replace(sampling, safe_vocabulary=rule), seeds)

    @torch.no_grad()
    def log_probs(self, prompt, rule):
        logits_V = self._model(torch.tensor([prompt])).logits[0, -1].double()
        if rule is not None and not self.ignores_rules:
            logits_V = logits_V.masked_fill(~safe_mask(logits_V[None], rule)[0], -torch.inf)
        return logits_V.log_softmax(0).float()


@pytest.fixture
def make_loop(tiny_model, root, monkeypatch):
    """A loop on the tiny model with real DeepSpeed, and an engine of its own model."""
    monkeypatch.chdir(root)

    def make(**options) -> FullLength:
        experiment = load_experiment("smoke")
        changes = {"max_response_tokens": 12, "tokens_per_micro_batch": 64}
        experiment = brief(experiment.model_copy(update={"training": experiment.training.model_copy(update=changes)}))
        tokenizer = AutoTokenizer.from_pretrained(tiny_model)
        model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
        problems = pd.DataFrame({"id": range(20), "answer": ["7"] * 20})
        prompts = [[10 + index, 20 + index, 30 + index][: 2 + index % 2] for index in range(20)]
        loop = FullLength(
            experiment,
            chosen_run(experiment, "coarse"),
            problems,
            prompts,
            1,
            Trainer(tiny_model, experiment.training, experiment.deepspeed),
            ModelEngine(model, tokenizer, **options),
            ResponseRecorder(experiment.training.keep_responses, experiment.training.steps, tokenizer),
        )
        loop.experiment = experiment
        loop.agreement._config = EngineConfig(dtype="float32")  # what ModelEngine is, whatever the run's rounds
        return loop

    return make


def refusal(loop: FullLength, engine: str, work: Path) -> str:
    """The line with which trainer and engine are refused, which is the report's last one as well."""
    work.mkdir(exist_ok=True)
    report = Report(work)
    with pytest.raises(DvpError) as raised:
        processes.check_engine(loop, loop.experiment, engine, report, work)
    verdicts = report.read()["checks"]
    assert [line["passed"] for line in verdicts[:-1]] == [True] * (len(verdicts) - 1)
    assert str(raised.value) == f"{verdicts[-1]['check']}: {verdicts[-1]['says']}"
    return str(raised.value)


def test_an_engine_that_ignores_rho_is_refused(make_loop, tmp_path):
    line = refusal(make_loop(ignores_rules=True), ENGINE, tmp_path)
    assert line.startswith("safe vocabulary: the engine ignores FixedRho(rho=0.3)")


def test_a_model_that_does_something_to_its_logits_is_refused(make_loop, tmp_path):
    """Soft-capping as Gemma 2 has it, of which the trainer knows nothing."""
    loop = make_loop()

    def cap(module, arguments, output):
        output.logits = 5 * torch.tanh(output.logits / 5)
        return output

    assert check_forward(loop.trainer, loop.problems.prompts, 1.0).passed
    loop.trainer.policy.model.register_forward_hook(cap)
    line = refusal(loop, ENGINE, tmp_path)
    assert line.startswith("forward: log-probs are up to ")


def test_an_engine_that_is_further_off_than_its_precision_is_refused(make_loop, tmp_path):
    line = refusal(make_loop(sigma=0.01), "fp32", tmp_path)
    assert re.match(
        r"mismatch: vLLM computes another Qwen3ForCausalLM than transformers .* weights: KL [45]\S*e-05 ", line
    )
    # The same engine, where bf16 explains it.
    work = tmp_path / "bf16"
    work.mkdir()
    loop = make_loop(sigma=0.01)
    engines = loop.experiment.engines | {ENGINE: EngineConfig(dtype="bfloat16")}
    processes.check_engine(loop, loop.experiment.model_copy(update={"engines": engines}), ENGINE, Report(work), work)
    assert [line["check"] for line in Report(work).read()["checks"]] == ["safe vocabulary", "forward", "mismatch"]


def tf32(values: torch.Tensor) -> torch.Tensor:
    """With 10 bits of mantissa, as a GPU's tensor cores take fp32 by default."""
    return ((values.view(torch.int32) + 0x1000) & ~0x1FFF).view(torch.float32)


def test_an_fp32_engine_that_multiplies_in_tf32_is_refused(make_loop, tmp_path):
    loop = make_loop()
    for module in loop.engine._model.modules():
        if isinstance(module, torch.nn.Linear):
            module.weight.data = tf32(module.weight.data)
            module.register_forward_pre_hook(lambda _, inputs: (tf32(inputs[0].contiguous()),))
    line = refusal(loop, "fp32", tmp_path)
    found = re.match(r"mismatch: vLLM computes another .* weights: KL (\S+) nats per token, at most 1e-09 is", line)
    assert found, line
    assert 1e-9 < float(found[1]) < 1e-5


def test_a_gpu_node_without_compilers_is_refused_in_a_line(monkeypatch, tmp_path):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.delenv("CC", raising=False)
    (tmp_path / "Python.h").touch()
    monkeypatch.setattr(checks.sysconfig, "get_path", lambda _: tmp_path)
    monkeypatch.setattr(checks.shutil, "which", lambda name: "/usr/bin/clang" if name == "clang" else None)
    checks.check_compilers()
    (tmp_path / "Python.h").unlink()
    monkeypatch.setattr(checks.shutil, "which", lambda name: None)
    with pytest.raises(DvpError, match=r"lacks .*/Python\.h \(the package .* and a C compiler \(gcc\), with which"):
        checks.check_compilers()


def test_the_preflight_trains_on_the_longest_prompts_and_responses(make_loop, tmp_path):
    loop = make_loop()
    longest = {len(loop.problems.prompts[row]) for row in loop.rows(1)}
    assert longest == {3}
    assert loop.rows(2) == loop.rows(1)
    rows = [loop.step(step) for step in (1, 2)]
    assert check_steps(rows, 12).passed
    assert [row["reward"] for row in rows] == [0.5, 0.5]
    assert {row["kept_fraction"] for row in rows} == {1.0}
    assert not check_steps(rows, 13).passed
    assert not check_steps([rows[0], rows[1] | {"skipped": True, "gradient_norm": None}], 12).passed


def test_what_was_not_restored_is_seen(make_loop, tmp_path):
    loop = make_loop()
    loop.step(1)
    metrics = tmp_path / "metrics.jsonl"
    metrics.write_text("{}\n")
    path = checkpoint.Saving(tmp_path / "checkpoints", 1, loop.trainer, [metrics]).finish()
    resumed = make_loop()
    resumed.trainer.load(path, written_by=1)
    assert processes._same_when_saved_again(resumed, path, tmp_path / "again").passed
    shutil.rmtree(tmp_path / "again")
    with torch.no_grad():
        next(resumed.trainer.policy.parameters()).view(-1)[0].mul_(1 + 1e-6)
    verdict = processes._same_when_saved_again(resumed, path, tmp_path / "again")
    assert not verdict.passed
    assert "is another one when saved again" in verdict.says


def test_an_engine_that_kept_its_old_weights_is_refused():
    generator = torch.Generator().manual_seed(0)
    before, moves = torch.randn(3, 50, generator=generator), torch.randn(3, 50, generator=generator)
    fresh = (before + 0.01 * moves).log_softmax(-1)
    half = (before + 0.005 * moves).log_softmax(-1)
    before = before.log_softmax(-1)
    assert check_same_engine(fresh.clone(), fresh, before).passed
    assert not check_same_engine(before, fresh, before).passed
    assert not check_same_engine(half, fresh, before).passed


def test_the_gpus_memory_is_held_against_what_it_has():
    peaks = {"host": 5e9, "update": 60e9, "rollout": 70e9, "gpu_total": 80e9}
    verdict = check_memory(peaks, 10e9)
    assert verdict.passed
    assert "60 GB of a GPU's memory, in updates, 95% of 80 GB are allowed; 70 GB of" in verdict.says
    assert not check_memory(peaks | {"update": 79e9}, 10e9).passed
    assert not check_memory(peaks | {"host": 9.9e9}, 10e9).passed


class Gpu:
    """A GPU of 100 bytes as torch sees it: 10 are the trainer's; blocks that tensors have left stay with torch."""

    def __init__(self, monkeypatch):
        self.live = self.peak = self.kept = 10
        self.engine = 60
        """Bytes that the engine has mapped."""
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (100 - self.engine - self.kept, 100))
        # An engine's memory is allocated, whether it is mapped or not.
        monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: self.live + 60)
        monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: self.peak + 60)
        monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda: self.take(0))
        monkeypatch.setattr(torch.cuda, "empty_cache", lambda: setattr(self, "kept", self.live))

    def take(self, size, fragments=0):
        """Tensors of so many bytes come and go; what is reset then is the peak."""
        self.peak = max(self.peak, self.live + size) if size else self.live
        self.kept = max(self.kept, self.peak) + fragments


def test_memory_that_an_engine_takes_before_it_first_sleeps_is_none_of_an_update(monkeypatch):
    """On an H200 it was: 77 GB of an update that was planned with 19."""
    gpu, memory = Gpu(monkeypatch), GpuMemory()
    gpu.take(25)  # by the checks before
    for _ in range(2):
        memory.reset()
        memory.record("rollout")
        gpu.engine = 0  # it sleeps
        memory.record("update")
        gpu.engine = 60
    assert memory.peaks == {"update": 10, "rollout": 70, "gpu_total": 100}


def test_a_phase_needs_what_its_tensors_took_not_what_torch_caches(monkeypatch):
    """An update of 40 bytes leaves 55 cached, which are no update's need, nor the next rollout's."""
    gpu, memory = Gpu(monkeypatch), GpuMemory()
    memory.reset()
    memory.record("rollout")
    gpu.engine = 0
    gpu.take(40, fragments=5)
    memory.record("update")
    gpu.engine = 60
    memory.reset()
    gpu.take(8)
    memory.record("rollout")
    assert memory.peaks == {"update": 50, "rollout": 78, "gpu_total": 100}


def test_the_phases_of_a_step_are_recorded_in_their_order(make_loop, monkeypatch):
    loop, begun = make_loop(), []
    monkeypatch.setattr(loop.memory, "reset", lambda: begun.append("begin"))
    monkeypatch.setattr(loop.memory, "record", begun.append)
    loop.step(1)
    assert begun == ["begin", "rollout", "update"]
