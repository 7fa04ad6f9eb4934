"""List the experiments: `dvp list`."""

from itertools import groupby
from pathlib import Path

from dvp.experiment.loading import config_folder, experiment_files, load_experiment

REPORT = "report/manifest.json"
KEPT = Path("results/reference")


def experiments(results: Path) -> str:
    """List the experiments by folder, one per line.

    A line has the number of training runs, whether a report is there or kept, and what the experiment asks.
    """
    lines, config = ["runs  report  experiment"], config_folder()
    for folder, files in groupby(experiment_files(config).values(), key=lambda file: file.parent):
        lines += ["", f"{config.name}/{folder.relative_to(config)}/"]
        lines += [_line(file.stem, results, config) for file in files]
    return "\n".join(lines)


def _line(name: str, results: Path, config: Path) -> str:
    experiment = load_experiment(name, config)
    found = "here" if (results / name / REPORT).is_file() else "-"
    found = "kept" if found == "-" and (KEPT / name / REPORT).is_file() else found
    runs = len(experiment.runs) * (len(experiment.bases) or 1)
    return f"{runs:4}  {found:6}  {name}: {' '.join(experiment.description.split())}"
