"""The stages `report` and `evidence`, and what `dvp show` and `dvp bias --model` print."""

from pathlib import Path
from typing import Any

from dvp.analysis.parts import parts
from dvp.errors import DvpError
from dvp.experiment.folder import BASE, ExperimentDir
from dvp.files import sha256_file, sha256_json, write_json, write_text
from dvp.stage import Inputs, run_stage
from dvp.tracking.store import store_name


def report(config: Path, part: str) -> None:
    """A part of what was measured (dvp.analysis.parts) → figures/, tables/ and, last, report/PART.json."""
    from dvp.analysis.report import make, provenance, record, write
    from dvp.analysis.responses import write_page

    directory = ExperimentDir(config)
    experiment = directory.experiment
    if part not in parts(experiment):
        raise DvpError(f"--part {part}: the report of '{experiment.name}' has {', '.join(parts(experiment))}")
    result, config_hash = directory.result("report", part), experiment.config_hash("report")
    # What is read, the analysis verifies itself.
    with run_stage(f"report_{part}", directory, result, config_hash, _inputs(directory, part), verify=False) as stage:
        made = make(experiment, directory.folder, part)
        write(made, directory.folder)
        if part == "training":
            write_json(directory.folder / "provenance.json", provenance(experiment, made))
            stage.tracked.log_file(directory.folder / "provenance.json")
            page = directory.folder / "report" / "responses.html"
            write_page(experiment, directory.folder, page)
            stage.tracked.log_file(page)
        texts = []
        for folder, names in (("tables", made.tables), ("figures", made.figures)):
            for file in sorted((directory.folder / folder).glob("*")):
                if file.stem in names:
                    stage.tracked.log_file(file, folder)
                    if file.suffix == ".md":
                        texts.append(file.read_text(encoding="utf-8"))
        texts.append(f"Tables and figures: `{directory.folder}`; the whole report: `{directory.folder}/report.html`")
        stage.tracked.describe("\n".join(texts))
        stage.finish({"experiment": experiment.name, "part": part, **record(made)})


def _inputs(directory: ExperimentDir, part: str) -> Inputs:
    experiment = directory.experiment
    inputs: dict[str, list[Path]] = {}
    runs = [run.path for run in experiment.runs]
    if part in ("training", "matrix", "diversity", "curve", "sweep"):
        inputs["train"] = [directory.result("train", path) for path in runs]
    if part in ("training", "curve", "sweep"):
        paths, tasks = runs, [experiment.report.task]
        if part == "curve":
            paths, tasks = [*paths, *(run.path for run in experiment.snapshots)], experiment.data.tasks
        inputs["evaluate"] = [
            directory.result("evaluate", f"{path}/{task}") for path in [BASE, *paths] for task in tasks
        ]
    if part in ("matrix", "diversity"):
        asked = [BASE, *runs]
        further = experiment.further_evaluations
        asked += [f"{BASE if run is None else run.path}/{sampler.path}" for run, sampler in further]
        inputs["evaluate"] = [directory.result("evaluate", f"{path}/{experiment.report.task}") for path in asked]
    if part == "diversity":
        inputs["base"] = [directory.result("base")]
    for name, in_parts in (("mismatch", ("mismatch",)), ("bias", ("bias", "variance", "bias_length", "sweep"))):
        if part in in_parts:
            inputs[name] = [directory.result(name, measurement.path) for measurement in experiment.measurements(name)]
    return inputs


def evidence(experiments: list[str], output: Path, earlier: Path | None) -> None:
    """The reports of some experiments (KEY=FOLDER), and config/claims.yaml → claims.md, claims.html, claims.json.

    earlier : the claims.json of an earlier page, for what none of these experiments answers.
    """
    from dvp.analysis.claims import CLAIMS
    from dvp.analysis.evidence import answer, collect_figures, render

    answered = answer(experiments, earlier=earlier)
    inputs = {
        key: [Path(experiment["folder"]) / "report" / f"{part}.json" for part in experiment["reports"]]
        for key, experiment in answered["experiments"].items()
        if not experiment["earlier"]
    }
    config_hash = sha256_json([experiments, sha256_file(CLAIMS), earlier and sha256_file(earlier)])[:12]
    output = output.resolve()
    with run_stage("evidence", output, output / "claims.json", config_hash, inputs, verify=False) as stage:
        collect_figures(answered, output)
        pages = render(answered, output)
        for name, text in pages.items():
            write_text(output / name, text)
        for claim in answered["claims"]:
            stage.tracked.tag(f"claim.{claim['id']}", claim["verdict"])
        for name in pages:
            stage.tracked.log_file(output / name)
        stage.finish(answered)
    for claim in answered["claims"]:
        print(f"{claim['verdict']:22} {claim['text']}")
    for key in answered["not_run"]:
        print(f"{'not run':22} {key}")
    print(f"\n{output / 'claims.md'}, {output / 'claims.html'}")


def show(config: Path) -> None:
    """Print the main table and where report and tracking store are."""
    from dvp.analysis.report import print_table

    directory = ExperimentDir(config)
    print(f"{directory.experiment.description}\n")
    print(print_table(directory.folder))
    print(f"\ntables, figures   {directory.folder}/tables, {directory.folder}/figures")
    print(f"responses         {directory.folder}/report/responses.html   (--responses shows them here)")
    if (directory.folder / "report.html").is_file():
        print(f"report            {directory.folder}/report.html")
    print(f"from which runs   {directory.folder}/provenance.json")
    print(f"MLflow            {store_name(directory.results)}   (make mlflow opens it)")


def show_bias(measured: Any, model: Path, engine: str) -> None:
    """Print what was measured of the estimators (a dvp.measurement.bias.BiasTables) at a model of the user's own."""
    from dvp.analysis.bias import format_estimators
    from dvp.analysis.formats import to_text

    title = f"{model}, engine {engine}: estimators of the policy gradient against the exact one"
    print(to_text(format_estimators(measured.estimators, measured.summary, title), width=120))
