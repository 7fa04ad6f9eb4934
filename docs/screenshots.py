"""Pictures of MLflow's pages for the documentation: docs/images/mlflow_*.png, from a store of real results.

    python docs/screenshots.py --results results

It starts MLflow's server from the repository's .venv on a copy of RESULTS/mlflow.db, and looks at it with Chromium.
What it needs besides is no part of the locked environment, so any Python will do: `pip install playwright==1.65.2`,
and `playwright install chromium` or the system's own (Debian: `apt-get install chromium fonts-dejavu-core`).
"""

import argparse
import os
import shutil
import socket
import sqlite3
import subprocess
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

from playwright.sync_api import Page, sync_playwright

ROOT = Path(__file__).resolve().parents[1]
SIZE = {"width": 1680, "height": 1000}
SLOW = 300_000  # milliseconds; charts are drawn without a GPU
VIEW = "/#/experiments/{experiment}/runs?viewStateShareKey={view}&compareRunsMode={mode}&workflowType=machine_learning"


@contextmanager
def server(store: Path) -> Iterator[str]:
    """The address of an MLflow server on a copy of this SQLite file."""
    with tempfile.TemporaryDirectory() as folder, socket.socket() as free:
        # A copy by SQLite itself, as the file may be in use.
        with closing(sqlite3.connect(store)) as source, closing(sqlite3.connect(f"{folder}/mlflow.db")) as copy:
            source.backup(copy)
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
        free.close()
        process = subprocess.Popen(
            [ROOT / ".venv/bin/mlflow", "ui", "--workers", "1", "--port", str(port)],
            env=os.environ
            | {
                "MLFLOW_BACKEND_STORE_URI": f"sqlite:///{folder}/mlflow.db",
                "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",
                "MLFLOW_DISABLE_TELEMETRY": "true",
            },
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:
            for _ in range(120):
                try:
                    with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5):
                        break
                except OSError:
                    time.sleep(1)
            yield f"http://127.0.0.1:{port}"
        finally:
            process.terminate()
            process.wait()


def main() -> None:
    """Take the pictures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--results", type=Path, default=ROOT / "results", help="the folder with mlflow.db")
    parser.add_argument("--experiment", default="tiny")
    parser.add_argument("--output", type=Path, default=ROOT / "docs/images")
    options = parser.parse_args()
    store = options.results / "mlflow.db"
    with closing(sqlite3.connect(f"file:{store}?mode=ro", uri=True)) as database:
        query = "SELECT experiment_id FROM experiments WHERE name = ?"
        (experiment,) = database.execute(query, [options.experiment]).fetchone()
        query = (
            "SELECT runs.run_uuid FROM runs JOIN tags USING (run_uuid) JOIN latest_metrics USING (run_uuid) "
            "WHERE experiment_id = ? AND tags.key = 'policy' AND latest_metrics.key LIKE 'eval/%' "
            "ORDER BY runs.name LIKE 'DVP + MIS%' DESC, runs.name LIMIT 1"
        )
        (run,) = database.execute(query, [experiment]).fetchone()
    options.output.mkdir(parents=True, exist_ok=True)
    pages = {
        "mlflow_runs": VIEW.format(experiment=experiment, view="table", mode="TABLE"),
        "mlflow_curves": VIEW.format(experiment=experiment, view="curves", mode="CHART"),
        "mlflow_run": f"/#/experiments/{experiment}/runs/{run}?workflowType=machine_learning",
    }
    with server(store) as address, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        page = browser.new_page(viewport=SIZE)
        page.set_default_timeout(SLOW)
        for name, path in pages.items():
            page.goto(address + path)
            settle(page)
            page.screenshot(path=options.output / f"{name}.png")
            print(options.output / f"{name}.png")


def settle(page: Page) -> None:
    """Wait until the page is drawn, and close what MLflow shows to a new visitor."""
    page.wait_for_timeout(8_000)
    for label in ("Close", "Close panel", "Close assistant", "Got it"):
        for button in page.get_by_role("button", name=label, exact=True).all():
            button.click()
    page.wait_for_timeout(4_000)


if __name__ == "__main__":
    main()
