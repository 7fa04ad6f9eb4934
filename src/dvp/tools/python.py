"""A Python program as a tool, in a sandbox that bubblewrap (`bwrap`) makes of the kernel's namespaces.

The sandbox has no network and no process but its own; of the machine's files it has the system's libraries and this
environment's Python, read-only. What it may write is a small temporary folder, its home, gone when it ends. It ends
with the program, at the limit of wall time, when it prints too much, and with the process that started it. A program
waits for the word to begin, so that one whose start was interrupted, and that nobody would end, ends by itself.

Run by root, the sandbox is made without a user namespace and the program gives root up: limits of processes do not hold
for root. Memory is limited by process, and what no process's limit counts is refused (dvp.tools.seccomp), so all of a
call's processes may take `processes` times as much; what a whole job may take is for its cgroup to say.
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
HOME = f"{SHARED}/home"  # a folder below: this environment may lie in /tmp, and is then to be seen there
FILE = "{file}"  # in a command, where the descriptor of the program goes
FILTER = "{filter}"  # and that of the filter of system calls
PROGRAM = f"{HOME}/call.py"
HOME_BYTES = 2**24
OPEN_FILES = 64
LONGEST = 2**16  # bytes of a program
PROOF_SECONDS = 30.0
GRACE_SECONDS = 10.0  # for what was killed to end
FIRST_USER, USERS = 10_000, 50_000

# Starts one process more than it may, and must not succeed: some machines do not limit processes.
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

# Runs in the sandbox before the program, which is told to begin by a line.
BEGIN = 'read -r begin || { echo "the start of this call was interrupted"; exit 1; }; exec "$@" < /dev/null'


class PythonTool:
    """A Tool; see the module."""

    def __init__(self, settings: Python):
        """Raises DvpError unless the sandbox works on this machine."""
        self._settings = settings
        self._bwrap = shutil.which(BWRAP)
        if self._bwrap is None:
            raise DvpError("tools.kind: python needs bubblewrap (`bwrap`), which is not installed on this machine")
        (answer,) = self.answers([PROOF.format(processes=settings.processes)], PROOF_SECONDS)
        if answer.text != "proved":
            said = " ".join(answer.text.split())[:200]
            raise DvpError(f"tools.kind: python: its sandbox does not work on this machine: {said}")

    def answers(self, calls: Sequence[str], seconds: float | None = None) -> list[Answer]:
        """See Tool.answers. As many calls run at a time as this process may use CPUs; whatever ends this ends them."""

        async def every() -> list[Answer]:
            free = asyncio.Semaphore(len(os.sched_getaffinity(0)))

            async def one(slot: int, call: str) -> Answer:
                async with free:
                    return await self._answer(slot, call, seconds or self._settings.seconds)

            return await asyncio.gather(*(one(slot, call) for slot, call in enumerate(calls)))

        # A loop of its own, which is nobody else's afterwards either.
        with asyncio.Runner(loop_factory=asyncio.new_event_loop) as runner:
            return runner.run(every())

    async def _answer(self, slot: int, program: str, seconds: float) -> Answer:
        """What a program printed, and how it ended if not by itself."""
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
                with suppress(ConnectionError):  # a sandbox that could not be made has ended
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
            # A sandbox's first process dies with bwrap, and all others with that one.
            with suppress(ProcessLookupError):
                process.kill()
            with suppress(TimeoutError):
                await asyncio.wait_for(process.communicate(), GRACE_SECONDS)
        status = process.returncode
        # bwrap says 128 + signal, as a shell does; of its own end Python says −signal.
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
        """What runs a program in a sandbox. FILE and FILTER stand for descriptors that are read."""
        settings, root = self._settings, os.geteuid() == 0
        limits = {
            "cpu": settings.cpu_seconds,
            "as": settings.memory_mib * 2**20,
            "fsize": HOME_BYTES,
            "nofile": OPEN_FILES,
            "core": 0,
            # Of a user: that of the sandbox's own namespace, or for root one that no other sandbox has.
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
    """bwrap's options for what a program sees of this machine's files: libraries, and this environment's Python."""
    places = []
    for name in ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/etc/ld.so.cache", "/etc/alternatives"):
        if os.path.islink(name):  # where they are part of /usr
            places.append(("--symlink", os.readlink(name), name))
        elif os.path.exists(name):
            places.append(("--ro-bind", name, name))
    pythons = {os.path.realpath(sys.prefix), sys.base_prefix, os.path.realpath(sys.base_prefix)}
    # bwrap makes the folders above for its own user only.
    above = {str(parent) for folder in pythons for parent in PurePath(folder).parents} | {"/etc"}
    folders = [("--perms", "0755", "--dir", folder) for folder in sorted(above - {"/", "/usr", SHARED})]
    return [*folders, *places, *(("--ro-bind", folder, folder) for folder in sorted(pythons))]


def _allowed(name: str, value: int) -> int:
    """A limit that may be set: none above this process's own."""
    highest = resource.getrlimit(getattr(resource, f"RLIMIT_{name.upper()}"))[1]
    return value if highest == resource.RLIM_INFINITY else min(value, highest)
