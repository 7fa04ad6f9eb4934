"""The stages `report` and `evidence`, and what `dvp show`, `dvp bias --model` and `dvp mismatch --model` print."""

from collections import defaultdict
from pathlib import Path
from typing import Any

from dvp.analysis.bases import folders
from dvp.errors import DvpError
from dvp.experiment.config import Experiment
from dvp.experiment.folder import RESULTS, ExperimentDir
from dvp.experiment.loading import check_settings, read_yaml
from dvp.files import atomic_path, read_json, sha256_file, sha256_json, write_json, write_text
from dvp.measurement.files import TOKENS
from dvp.stage import Inputs, run_stage
from dvp.tracking.store import store_name


def report(config: Path) -> None:
    """Report what was measured (dvp.analysis.parts): figures/, tables/, provenance.json and report/, manifest last."""
    from dvp.analysis.load import PROBLEMS
    from dvp.analysis.report import make, provenance, write
    from dvp.analysis.responses import write_page
    from dvp.analysis.series import SERIES
    from dvp.analysis.statistics import ESTIMATES

    directory = ExperimentDir(config)
    experiment, folder = directory.experiment, directory.folder
    result, config_hash = directory.result("report"), experiment.config_hash("report")
    # The analysis itself verifies what it reads.
    with run_stage("report", directory, result, config_hash, _inputs(directory), verify=False) as stage:
        made = make(experiment, folder)
        drawn = write(experiment, made, folder)
        write_json(folder / "provenance.json", provenance(experiment, made))
        page = folder / "report" / "responses.html"
        if experiment.bases:
            names = experiment.of_bases
            links = [f'<li><a href="../../{name}/report/responses.html">{name}</a></li>' for name in names]
            write_text(page, f"<!doctype html>\n<p>Responses, token by token:</p>\n<ul>{''.join(links)}</ul>\n")
        else:
            write_page(experiment, folder, page)
        for file in (folder / "provenance.json", *(folder / name for name in (ESTIMATES, SERIES, PROBLEMS)), page):
            stage.tracked.log_file(file)
        texts = []
        for kind in ("tables", "figures"):
            for file in sorted((folder / kind).iterdir()):
                stage.tracked.log_file(file, kind)
                if file.suffix == ".md":
                    texts.append(file.read_text(encoding="utf-8"))
        texts.append(f"Tables and figures: `{folder}`; the whole report: `{folder}/report.html`")
        stage.tracked.describe("\n".join(texts))
        stage.finish(
            {
                "experiment": experiment.name,
                "files": {Path(name).name: sha256_file(folder / name) for name in (ESTIMATES, SERIES, PROBLEMS)},
                "figures": drawn,
                "origins": made.files,
            }
        )


def _inputs(directory: ExperimentDir) -> Inputs:
    experiment = directory.experiment
    if experiment.bases:
        return {"report": [folder / RESULTS["report"] for folder in folders(experiment, directory.folder)]}
    inputs = defaultdict(list)
    for stage, path in experiment.job("report").after:
        if stage != "base":  # the base model's numbers are its evaluations
            inputs[stage].append(directory.result(stage, path))
    return inputs


def evidence(experiments: list[str], output: Path) -> None:
    """Answer config/claims.yaml from the reports of some experiments (KEY=FOLDER).

    Writes claims.md, claims.html and claims.json to `output`.
    """
    from dvp.analysis.claims import CLAIMS
    from dvp.analysis.evidence import answer, render

    answered = answer(experiments)
    inputs = {key: Path(one["folder"]) / "report" / "manifest.json" for key, one in answered["experiments"].items()}
    config_hash = sha256_json([experiments, sha256_file(CLAIMS)])[:12]
    output = output.resolve()
    with run_stage("evidence", output, output / "claims.json", config_hash, inputs, verify=False) as stage:
        for name, text in render(answered, output).items():
            write_text(output / name, text)
            stage.tracked.log_file(output / name)
        for claim in answered["claims"]:
            stage.tracked.tag(f"claim.{claim['id']}", claim["verdict"])
        stage.finish(answered)
    for claim in answered["claims"]:
        print(f"{claim['verdict']:22} {claim['text']}")
    for key in answered["not_run"]:
        print(f"{'not run':22} {key}")
    print(f"\n{output / 'claims.md'}, {output / 'claims.html'}")


def redraw(results: Path, root: Path = Path()) -> None:
    """Redraw all reports below `results` from the kept estimates, with the claims report and an index.

    Also fills the numbers in the pages below `root`, if docs/numbers.yaml takes them from these results. A picture
    whose estimates or series were not kept stays as it is.
    """
    from dvp.analysis.answers import NUMBERS, fill, pages, read
    from dvp.analysis.evidence import answer, render
    from dvp.analysis.report import draw, kept, provenance

    index = ["| folder | experiment | tables |", "|---|---|---|"]
    manifests = sorted(results.glob("*/report/manifest.json"))
    if not manifests:
        raise DvpError(f"--results {results}: expected a folder with EXPERIMENT/report/manifest.json, found none")
    for file in manifests:
        directory = ExperimentDir(file.parents[1] / "config.yaml")
        experiment, folder = directory.experiment, directory.folder
        made = kept(experiment, folder)
        drawn = draw(experiment, made, folder)
        write_json(folder / "provenance.json", provenance(experiment, made))
        manifest = read_json(file)
        pictures = {picture.stem for picture in (folder / "figures").glob("*.png")}
        write_json(file, manifest | {"figures": sorted({*drawn, *pictures})})
        tables = ", ".join(f"[{name}]({folder.name}/tables/{name}.md)" for name in made.tables)
        index.append(f"| `{folder.name}` | {experiment.description} | {tables} |")
        print(f"{folder}: {len(made.tables)} tables, {len(drawn)} figures", flush=True)
    write_text(results / "experiments.md", "\n".join(["# What is kept", "", *index, ""]))
    asked = check_settings(read_yaml(root / "config/config.yaml")).evidence
    there = [f"{key}={results / name}" for key, name in asked.items() if (results / name / "report").is_dir()]
    answered = answer(there, root / "config/claims.yaml")
    for name, text in render(answered, results).items():
        write_text(results / name, text)
    write_json(results / "claims.json", answered)
    print(f"{results / 'claims.md'}: {len(answered['claims'])} claims")
    if (root / "docs" / NUMBERS).is_file():
        answers = read(root / "docs", results, answered["claims"])
        # The pages quote the results that docs/numbers.yaml names, and no others.
        for page in pages(root) if (root / answers.declared["results"]).resolve() == results.resolve() else ():
            write_text(page, fill(page.read_text(encoding="utf-8"), answers))


def show(config: Path, responses: bool) -> None:
    """Print the main table and where report and tracking store are; with `responses`, write their page so far."""
    from dvp.analysis.formats import to_text
    from dvp.analysis.report import kept
    from dvp.analysis.responses import write_begun

    directory = ExperimentDir(config)
    if responses:
        print(f"responses         {write_begun(directory.experiment, directory.folder)}")
        return
    tables = kept(directory.experiment, directory.folder).tables
    print(f"{directory.experiment.description}\n")
    # Kept results may lack the main table.
    for name in [name for name in ("main_table", *tables) if name in tables][:1]:
        print(to_text(tables[name].formatted()))
    print(f"\ntables, figures   {directory.folder}/tables, {directory.folder}/figures")
    print(f"responses         {directory.folder}/report/responses.html")
    if (directory.folder / "report.html").is_file():
        print(f"report            {directory.folder}/report.html")
    print(f"from which runs   {directory.folder}/provenance.json")
    print(f"MLflow            {store_name(directory.results)}   (make mlflow opens it)")


def show_bias(measured: Any, model: Path, engine: str) -> None:
    """Print the estimators' table (`measured`, a dvp.measurement.bias.BiasTables) of a user's model."""
    from dvp.analysis.formats import to_text
    from dvp.analysis.tables import estimators_table

    title = f"{model}, engine {engine}: estimators of the policy gradient against the exact one"
    print(to_text(estimators_table(measured.estimators, measured.summary, title).formatted(), width=120))


def show_mismatch(experiment: Experiment, engines: list[str], output: Path) -> None:
    """Print the mismatch of a user's model (from dvp.measurement.stage.mismatch_of_model), and write mismatch.html."""
    import pandas as pd
    from transformers import AutoTokenizer

    from dvp.analysis import mismatch_page

    stacks, about = [], {}
    for engine in engines:
        record = read_json(output / engine / "mismatch.json", "folder", "error", "limit", "about")
        tables = {name: pd.read_parquet(output / engine / f"{name}.parquet") for name in mismatch_page.READ}
        tokens, tokenizer = tables.pop(TOKENS), AutoTokenizer.from_pretrained(record["folder"])
        text = {token: tokenizer.decode([token]) for token in tokens["token"].unique()}
        stacks.append(
            mismatch_page.Stack(
                engine, tokens.assign(text=tokens["token"].map(text)), record["error"], record["limit"], tables
            )
        )
        about |= record["about"]
    _write_page(experiment, stacks, f"{about['model']}: engine against trainer", about, output)


def show_rollouts(experiment: Experiment, file: Path, output: Path, more: dict[str, str] | None = None) -> None:
    """Print the mismatch in a file of responses (dvp.measurement.rollouts), and write mismatch.html.

    `more` is shown on the page beside what the file says.
    """
    from dvp.analysis.mismatch_page import Stack
    from dvp.measurement.rollouts import read_rollouts

    read = read_rollouts(file)
    counts = ", ".join(f"{one.tokens['response'].nunique():,} of {len(one.tokens):,} tokens" for one in read)
    about = (more or {}) | {
        "file": str(file),
        "sha256": sha256_file(file),
        "responses": counts,
        "vocabulary": "the sampled tokens alone: KL is k3, r − log r − 1",
    }
    names = [", ".join(filter(None, [file.stem, one.name])) for one in read]
    stacks = [Stack(name, one.tokens, left_out=one.left_out) for name, one in zip(names, read, strict=True)]
    _write_page(experiment, stacks, f"{file.name}: engine against trainer", about, output)


def _write_page(experiment: Experiment, stacks: list[Any], title: str, about: dict[str, str], output: Path) -> None:
    from dvp.analysis import mismatch_page
    from dvp.analysis.formats import to_text
    from dvp.analysis.statistics import to_frame

    rules = {name: experiment.methods[method].importance for name, method in mismatch_page.METHODS.items()}
    found = [mismatch_page.numbers(stack, rules) for stack in stacks]
    write_text(output / "mismatch.html", mismatch_page.page(stacks, found, rules, title, about))
    with atomic_path(output / "estimates.parquet") as temporary:
        to_frame(mismatch_page.estimates(stacks, found)).to_parquet(temporary, index=False)
    print(to_text(mismatch_page.summary(stacks, found, title), width=120))
    print(f"\nfigures, tables and the rules of the advice: {output / 'mismatch.html'}")
