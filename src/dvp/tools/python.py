"""Python tool: runs a program in a sandbox that bubblewrap (`bwrap`) builds from kernel namespaces.

The sandbox has no network and sees no processes except its own. Of the machine's files it sees the system's libraries
and this environment's Python, read-only; it can write only to a small temporary home folder, deleted when it ends. It
ends with the program, at the limit of wall time, when it prints too much, and with the process that started it. A
program waits for a line on its standard input before it begins, so that one whose start was interrupted ends by itself.

When run as root, the sandbox has no user namespace and the program drops root, because process limits do not apply to
root. Memory is limited per process, and memory that no process's limit counts is refused (dvp.tools.seccomp). All
processes of a call may together take `processes` times the limit; a limit for the whole job is its cgroup's task.
"""

import asyncio
import os
import resource
import shutil
import signal
import sys
from asyncio.subprocess import PIPE, STDOUT, Process
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from pathlib import PurePath

from dvp.errors import DvpError
from dvp.experiment.tools import Python
from dvp.tools.seccomp import program as call_filter
from dvp.tools.tool import Answer

BWRAP = "bwrap"
SHARED = "/tmp"
HOME = f"{SHARED}/home"  # a subfolder, as this environment may itself lie in /tmp and must stay visible there
FILE = "{file}"  # placeholder in a command: the file descriptor of the program
FILTER = "{filter}"  # likewise of the filter of system calls
PROGRAM = f"{HOME}/call.py"
HOME_BYTES = 2**24
OPEN_FILES = 64
LONGEST = 2**16  # bytes of a program
PROOF_SECONDS = 30.0
GRACE_SECONDS = 10.0  # given to a killed process to end
FIRST_USER, USERS = 10_000, 50_000

# Tries to start one process more than allowed, which must fail: some machines do not limit processes.
PROOF = """
import os, time
started = 0
try:
    while started < {processes}:
        if os.fork() == 0:
            time.sleep(60)
            os._exit(0)
        started += 1
    print("it starts more than {processes} processes")
except OSError:
    print("proved")
"""

# Runs in the sandbox before the program and waits for a line on standard input.
BEGIN = 'read -r begin || { echo "the start of this call was interrupted"; exit 1; }; exec "$@" < /dev/null'


class PythonTool:
    """Tool that runs each call as a Python program in a sandbox and answers with its output."""

    def __init__(self, settings: Python):
        """Check that the sandbox and its process limit work on this machine. Raises DvpError if they do not."""
        self._settings = settings
        self._bwrap = shutil.which(BWRAP)
        if self._bwrap is None:
            raise DvpError("tools.kind: python needs bubblewrap (`bwrap`), which is not installed on this machine")
        (answer,) = self.answers([PROOF.format(processes=settings.processes)], PROOF_SECONDS)
        if answer.text != "proved":
            said = " ".join(answer.text.split())[:200]
            raise DvpError(f"tools.kind: python: its sandbox does not work on this machine: {said}")

    def answers(self, calls: Sequence[str], seconds: float | None = None) -> list[Answer]:
        """Run each call as a program and return the answers in order, as Tool.answers does.

        As many programs run at a time as this process may use CPUs. Whatever ends this call ends them, too.
        seconds : limit of wall time per call; None: the one of the settings.
        """

        async def every() -> list[Answer]:
            free = asyncio.Semaphore(len(os.sched_getaffinity(0)))

            async def one(slot: int, call: str) -> Answer:
                async with free:
                    return await self._answer(slot, call, seconds or self._settings.seconds)

            return await asyncio.gather(*(one(slot, call) for slot, call in enumerate(calls)))

        # A new event loop, so that neither the caller's nor the thread's current one is touched.
        with asyncio.Runner(loop_factory=asyncio.new_event_loop) as runner:
            return runner.run(every())

    async def _answer(self, slot: int, program: str, seconds: float) -> Answer:
        """Run a program and return its output, followed by the reason if it was stopped or killed."""
        encoded = program.encode("utf-8", errors="replace")
        if len(encoded) > LONGEST:
            return Answer(f"error: the program has more than {LONGEST} bytes", failed=True)
        try:
            process = await self._started(slot, encoded)
        except OSError as error:
            return Answer(f"error: the sandbox does not start: {error.strerror}", failed=True)
        output, why, most = bytearray(), "", self._settings.output_bytes
        try:
            async with asyncio.timeout(seconds):
                with suppress(ConnectionError):  # bwrap has already exited if it could not build the sandbox
                    process.stdin.write(b"begin\n")
                    await process.stdin.drain()
                while len(output) <= most and (part := await process.stdout.read(2**16)):
                    output += part
                if len(output) > most:
                    why = f"stopped: it printed more than {most} bytes"
                else:  # a program may close its output before it ends
                    await process.wait()
        except TimeoutError:
            why = f"stopped after {seconds:g} seconds"
        finally:
            # Killing bwrap kills the sandbox's first process, and with it all others in the sandbox.
            with suppress(ProcessLookupError):
                process.kill()
            with suppress(TimeoutError):
                await asyncio.wait_for(process.communicate(), GRACE_SECONDS)
        status = process.returncode
        # bwrap reports 128 + signal of the program, as a shell does; Python reports −signal if bwrap itself was killed.
        if not why and (status > 128 or status < 0):
            number = status - 128 if status > 128 else -status
            name = next((known.name for known in signal.Signals if known == number), f"signal {number}")
            why = f"ended by {name}"
        text = bytes(output[:most]).decode("utf-8", errors="replace").strip()
        parts = [part for part in (text, f"({why})" if why else "") if part]
        return Answer("\n".join(parts) or "(it printed nothing)", failed=status != 0)

    async def _started(self, slot: int, program: bytes) -> Process:
        with ExitStack() as files:
            places = {}
            for name, content in ((FILE, program), (FILTER, call_filter())):
                file = files.enter_context(os.fdopen(os.memfd_create("call"), "wb"))
                file.write(content)
                file.seek(0)
                places[name] = file.fileno()
            command = [str(places.get(part, part)) for part in self._command(slot)]
            pipes = {"stdin": PIPE, "stdout": PIPE, "stderr": STDOUT}
            return await asyncio.create_subprocess_exec(*command, **pipes, pass_fds=list(places.values()), env={})

    def _command(self, slot: int) -> list[str]:
        """Return the command that runs a program in a sandbox, with FILE and FILTER in place of file descriptors."""
        settings, root = self._settings, os.geteuid() == 0
        limits = {
            "cpu": settings.cpu_seconds,
            "as": settings.memory_mib * 2**20,
            "fsize": HOME_BYTES,
            "nofile": OPEN_FILES,
            "core": 0,
            # Counted per user: the one of the sandbox's namespace or, as root, a user id that no other sandbox has.
            "nproc": settings.processes,
        }
        user = FIRST_USER + (997 * os.getpid() + slot) % USERS
        given_up = ["setpriv", f"--reuid={user}", f"--regid={user}", "--clear-groups"] if root else []
        environment = {
            "PATH": "/usr/bin:/bin",
            "HOME": HOME,
            "LANG": "C.UTF-8",
            "PYTHONDONTWRITEBYTECODE": "1",
            "PYTHONHASHSEED": "0",  # a set prints in the same order in every call
            "OMP_NUM_THREADS": "1",
            "OPENBLAS_NUM_THREADS": "1",
        }
        return [
            *(str(self._bwrap), "--die-with-parent", "--new-session", "--clearenv", "--hostname", "tool"),
            *("--unshare-ipc", "--unshare-pid", "--unshare-net", "--unshare-uts", "--unshare-cgroup-try"),
            *(["--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID"] if root else ["--unshare-user"]),
            *("--size", str(HOME_BYTES), "--perms", "1777", "--tmpfs", SHARED),
            *("--perms", "1777", "--dir", HOME, "--chdir", HOME),
            *(part for place in _visible() for part in place),
            *("--dev", "/dev", "--remount-ro", "/dev"),
            *(part for name, value in environment.items() for part in ("--setenv", name, value)),
            *("--perms", "0444", "--file", FILE, PROGRAM, "--remount-ro", "/", "--seccomp", FILTER),
            *("--", "/bin/sh", "-c", BEGIN, "sh", *given_up),
            *("prlimit", *(f"--{name}={_allowed(name, value)}" for name, value in limits.items())),
            *(os.path.join(os.path.realpath(sys.prefix), "bin", os.path.basename(sys.executable)), "-u", PROGRAM),
        ]


def _visible() -> list[tuple[str, ...]]:
    """Return bwrap's options that show a program the machine's libraries and this environment's Python."""
    places = []
    for name in ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/etc/ld.so.cache", "/etc/alternatives"):
        if os.path.islink(name):  # on systems where these folders are part of /usr
            places.append(("--symlink", os.readlink(name), name))
        elif os.path.exists(name):
            places.append(("--ro-bind", name, name))
    pythons = {os.path.realpath(sys.prefix), sys.base_prefix, os.path.realpath(sys.base_prefix)}
    # Parents that bwrap creates by itself are readable for its own user only.
    above = {str(parent) for folder in pythons for parent in PurePath(folder).parents} | {"/etc"}
    folders = [("--perms", "0755", "--dir", folder) for folder in sorted(above - {"/", "/usr", SHARED})]
    return [*folders, *places, *(("--ro-bind", folder, folder) for folder in sorted(pythons))]


def _allowed(name: str, value: int) -> int:
    """Lower a resource limit to this process's own hard limit, above which none may be set."""
    highest = resource.getrlimit(getattr(resource, f"RLIMIT_{name.upper()}"))[1]
    return value if highest == resource.RLIM_INFINITY else min(value, highest)
