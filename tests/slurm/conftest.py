"""A real Slurm for the tests, started once for the session, and working copies of the pipeline to run on it."""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import yaml

HERE = Path(__file__).parent
NEEDED = ("slurmctld", "slurmd", "slurmdbd", "sbatch", "munged", "mariadbd", "mariadb-install-db", "setpriv")
SCRIPTS = Path(sys.executable).parent


def wait(condition: Callable[[], object], what: str, seconds: float = 300):
    """Poll until `condition` is true and return what it returned; fail after `seconds`."""
    end = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < end, f"waited {seconds:.0f} s in vain: {what}"
        time.sleep(0.2)
    return value


@pytest.fixture(scope="session")
def wait_until() -> Callable:
    return wait


class Slurm:
    """What slurm_up.sh started: a node with two pretend GPUs, its partitions cpu, gpu and preemptible (REQUEUE, below
    the other two), and the partition pair of that node and another.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        self.env = {key: value for key, value in os.environ.items() if key != "MLFLOW_TRACKING_URI"}
        for line in (folder / "env").read_text().splitlines():
            key, value = line.removeprefix("export ").split("=", 1)
            self.env[key] = value.replace("$PATH", f"{SCRIPTS}:{self.env['PATH']}")

    def __call__(self, *command: str) -> str:
        """Run one of Slurm's commands; its standard output."""
        done = subprocess.run(command, env=self.env, check=True, capture_output=True, text=True, timeout=300)
        return done.stdout

    def answers(self, *command: str) -> bool:
        return subprocess.run(command, env=self.env, check=False, capture_output=True, timeout=300).returncode == 0

    def accounts(self, *fields: str) -> list[dict[str, str]]:
        """What sacct knows of every job (not of its steps), oldest first; the rule's name under `stage`."""
        names = ("JobID", "Comment", *fields)
        out = self("sacct", "-X", "-n", "-P", "-S", "now-1days", "-o", ",".join(names))
        jobs = [dict(zip(names, line.split("|"), strict=True)) for line in out.splitlines()]
        for job in jobs:
            job["stage"] = job["Comment"].removeprefix("rule_").split("_wildcards_")[0]
        return sorted(jobs, key=lambda job: int(job["JobID"]))

    def jobs(self, *states: str) -> list[str]:
        """Ids of the jobs that are in one of these states, newest last."""
        return self("squeue", "-h", "-S", "i", "-t", ",".join(states), "-o", "%i").split()

    @contextmanager
    def outage(self) -> Iterator[None]:
        """Controller and accounting are away in this block; jobs run on, every query fails."""
        for name in ("slurmctld", "slurmdbd"):
            pid = int((self.folder / f"run/{name}.pid").read_text())
            os.kill(pid, signal.SIGTERM)
            wait(lambda gone=Path(f"/proc/{pid}"): not gone.exists(), f"{name} stops")
        try:
            yield
        finally:
            self("env", f"MYSQL_UNIX_PORT={self.folder}/run/db.sock", "slurmdbd")
            wait(lambda: self.answers("sacctmgr", "-n", "list", "cluster"), "slurmdbd is back")
            self("slurmctld")
            wait(lambda: self.answers("scontrol", "ping"), "slurmctld is back")


@pytest.fixture(scope="session")
def slurm() -> Iterator[Slurm]:
    missing = [name for name in NEEDED if shutil.which(name) is None]
    if missing:  # a proof that is left out proves nothing: in CI that is a failure
        (pytest.fail if os.environ.get("CI") else pytest.skip)(f"Slurm's programs are not installed: {missing}")
    folder = Path(tempfile.mkdtemp(prefix="slurm-", dir="/tmp"))  # short, for the sockets in it
    # Takes everything down should pytest be killed; where the folder is gone already, it does nothing.
    down = HERE / "slurm_down.sh"
    subprocess.Popen([down, folder, str(os.getpid())], start_new_session=True, stdout=subprocess.DEVNULL)
    try:
        subprocess.run([HERE / "slurm_up.sh", folder], check=True, timeout=180)
        yield Slurm(folder)
    finally:
        subprocess.run([down, folder], check=False, timeout=120)


class Snakemake:
    """A Snakemake that runs. When pytest dies it is interrupted, and cancels its jobs."""

    def __init__(self, command: list, folder: Path, env: dict[str, str]):
        self._log = Path(tempfile.mkstemp(suffix=".out", dir=folder)[1])
        with open(self._log, "w") as log:
            self.process = subprocess.Popen(
                ["setpriv", "--pdeathsig", "INT", *command], cwd=folder, env=env, stdout=log, stderr=subprocess.STDOUT
            )

    def finish(self, timeout: float = 600) -> tuple[int, str]:
        """Wait for its end; the exit status and what it said."""
        try:
            status = self.process.wait(timeout)
        finally:
            self.interrupt()
            print(self.output()[-5000:])
        return status, self.output()

    def output(self) -> str:
        """What it has said so far."""
        return self._log.read_text()

    def interrupt(self) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)
            self.process.wait(300)


class Checkout:
    """A working copy of the pipeline that runs the smoke experiment; the installed package is shared."""

    def __init__(self, folder: Path, slurm: Slurm):
        self.folder = folder
        self.slurm = slurm
        self.smoke = folder / "results/smoke"
        self.log = ""  # that Snakemake kept while it made the results

    @classmethod
    def of(cls, root: Path, folder: Path, slurm: Slurm) -> "Checkout":
        for name in ("config", "envs", "profiles", "slurm", "workflow"):
            shutil.copytree(root / name, folder / name)
        shutil.copy(root / "Snakefile", folder)
        shutil.copytree(HERE / "site", folder / "site")
        profile = folder / "slurm/config.yaml"
        shipped = profile.read_text()
        profile.write_text(shipped.replace('account: "" ', "account: testacct "))
        assert profile.read_text() != shipped
        # Two of its three runs: one on the exact engine, one with a safe vocabulary on a coarse one.
        file = folder / "config/experiments/start/smoke.yaml"
        settings = yaml.safe_load(file.read_text())
        settings["grid"] = settings["grid"][:2]
        file.write_text(yaml.safe_dump(settings, sort_keys=False))
        return cls(folder, slurm)

    def copy(self, folder: Path) -> "Checkout":
        """The same with its results and what Snakemake knows of them."""
        shutil.copytree(self.folder, folder)
        return Checkout(folder, self.slurm)

    def run_folder(self, run: str) -> Path:
        return self.smoke / "runs" / run

    def snakemake(self, *arguments: str, results: Path | str = "results") -> Snakemake:
        """Start `snakemake --profile slurm`, with the test machine's own profile laid over it."""
        profiles = ["--profile", "slurm", "--profile", "site"]
        settings = ["--config", "experiment=smoke", f"results={results}"]
        command = [SCRIPTS / "snakemake", *arguments, *profiles, *settings]
        return Snakemake(command, self.folder, self.slurm.env)


@pytest.fixture(scope="session")
def finished(slurm, root, tmp_path_factory) -> Checkout:
    """The smoke experiment, run whole through Slurm. Not to be changed: copy it."""
    checkout = Checkout.of(root, tmp_path_factory.mktemp("cluster"), slurm)
    status, _ = checkout.snakemake().finish(timeout=1200)
    assert status == 0
    (log,) = (checkout.folder / ".snakemake/log").glob("*.log")
    checkout.log = log.read_text()
    return checkout
