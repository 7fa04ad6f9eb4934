"""A Python program as a tool, in a sandbox that bubblewrap (`bwrap`) makes of the kernel's namespaces.

The sandbox has no network and no process but its own; of the machine's files it has the system's libraries and this
environment's Python, read-only. What it may write is a small temporary folder, its home, gone when it ends. It ends
with the program, at the limit of wall time, when it prints too much, and with the process that started it. A program
waits for the word to begin, so that one whose start was interrupted, and that nobody would end, ends by itself.

Run by root, the sandbox is made without a user namespace and the program gives root up: limits of processes do not hold
for root. Memory is limited by process, and what no process's limit counts is refused (dvp.tools.seccomp), so all of a
call's processes may take `processes` times as much; what a whole job may take is for its cgroup to say.
"""

import os
import resource
import selectors
import shutil
import signal
import subprocess
import sys
import time
from collections import deque
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

# Runs in the sandbox before the program; what it sets holds for the program and all that it starts, for ever.
LIMITED = """
import os, resource, sys
if not os.read(0, 1):
    sys.exit("the start of this call was interrupted")
os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
user, program, *limits = sys.argv[1:]
if os.getuid() == 0 and int(user):
    os.setgroups([])
    os.setgid(int(user))
    os.setuid(int(user))
for limit in limits:
    name, value = limit.split("=")
    resource.setrlimit(getattr(resource, name), (int(value), int(value)))
os.execv(sys.executable, [sys.executable, "-u", program])
"""


class PythonTool:
    """A Tool; see the module."""

    name = "python"

    def __init__(self, settings: Python):
        """Raises DvpError unless the sandbox works on this machine."""
        self._settings = settings
        self._together = len(os.sched_getaffinity(0))
        self._bwrap = shutil.which(BWRAP)
        if self._bwrap is None:
            raise DvpError("tools.kind: python needs bubblewrap (`bwrap`), which is not installed on this machine")
        program = PROOF.format(processes=settings.processes)
        answer = _run([_Call(self._command(0), program, settings.output_bytes, PROOF_SECONDS)], 1)[0]
        if answer.text != "proved":
            said = " ".join(answer.text.split())[:200]
            raise DvpError(f"tools.kind: python: its sandbox does not work on this machine: {said}")

    def answers(self, calls: Sequence[str]) -> list[Answer]:
        """See Tool.answers. As many calls run at a time as this process may use CPUs."""
        settings = self._settings
        return _run(
            [
                _Call(self._command(slot), call, settings.output_bytes, settings.seconds)
                for slot, call in enumerate(calls)
            ],
            self._together,
        )

    def _command(self, slot: int) -> list[str]:
        """What runs a program in a sandbox. FILE and FILTER stand for descriptors that are read."""
        settings, root = self._settings, os.geteuid() == 0
        limits = {
            "RLIMIT_CPU": settings.cpu_seconds,
            "RLIMIT_AS": settings.memory_mib * 2**20,
            "RLIMIT_FSIZE": HOME_BYTES,
            "RLIMIT_NOFILE": OPEN_FILES,
            "RLIMIT_CORE": 0,
            # Of a user: that of the sandbox's own namespace, or for root one that no other sandbox has.
            "RLIMIT_NPROC": settings.processes,
        }
        user = FIRST_USER + (997 * os.getpid() + slot) % USERS if root else 0
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
            *("--", _interpreter(), "-I", "-S", "-c", LIMITED, str(user), PROGRAM),
            *(f"{name}={_allowed(name, value)}" for name, value in limits.items()),
        ]


class _Call:
    """A program, while it runs and afterwards."""

    answer: Answer | None = None
    process: subprocess.Popen | None = None
    ended: int | None = None
    """A descriptor that can be read when the process has ended."""

    def __init__(self, command: list[str], program: str, output_bytes: int, seconds: float):
        self._command, self._program = command, program
        self._output_bytes, self._seconds = output_bytes, seconds
        self._output = bytearray()
        self._stopped = ""

    def start(self) -> None:
        """Start it; there is an answer at once if that cannot be."""
        program = self._program.encode("utf-8", errors="replace")
        if len(program) > LONGEST:
            self.answer = Answer(f"error: the program has more than {LONGEST} bytes", failed=True)
            return
        with ExitStack() as files:
            descriptors = {}
            for name, content in ((FILE, program), (FILTER, call_filter())):
                file = files.enter_context(os.fdopen(os.memfd_create("call"), "wb"))
                file.write(content)
                file.seek(0)
                descriptors[name] = file.fileno()
            try:
                self.process = subprocess.Popen(
                    [str(descriptors.get(part, part)) for part in self._command],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    pass_fds=list(descriptors.values()),
                    env={},
                )
            except OSError as error:
                self.answer = Answer(f"error: the sandbox does not start: {error.strerror}", failed=True)
                return
        with suppress(BrokenPipeError), self.process.stdin as begin:  # a sandbox that could not be made has ended
            begin.write(b"1")
        self.deadline = time.monotonic() + self._seconds
        self.ended = os.pidfd_open(self.process.pid)
        os.set_blocking(self.process.stdout.fileno(), False)

    def read(self) -> bool:
        """Take what it has printed by now, and end it if that is too much; whether more may come."""
        try:
            while part := os.read(self.process.stdout.fileno(), 2**16):
                self._output += part
                if len(self._output) > self._output_bytes:
                    self.stop(f"stopped: it printed more than {self._output_bytes} bytes")
                    return False
        except BlockingIOError:
            return True
        return False

    def check_time(self) -> None:
        """End it if its time is over."""
        if time.monotonic() >= self.deadline:
            self.stop(f"stopped after {self._seconds:g} seconds")

    def stop(self, why: str) -> None:
        """End it and all that it started: a sandbox's first process dies with bwrap, and all others with that one."""
        self._stopped = self._stopped or why
        if self.process is not None:
            self.process.kill()

    def finish(self) -> None:
        """Make the answer of what has ended."""
        status = self.process.wait()
        if not self._stopped:
            self.read()
        self.process.stdout.close()
        if self.ended is not None:
            os.close(self.ended)
        text = bytes(self._output[: self._output_bytes]).decode("utf-8", errors="replace").strip()
        # bwrap says 128 + signal, as a shell does; of its own end Popen says −signal.
        number = status - 128 if status > 128 else -status
        why = self._stopped or (f"ended by {_signal_name(number)}" if status > 128 or status < 0 else "")
        parts = [part for part in (text, f"({why})" if why else "") if part]
        self.answer = Answer("\n".join(parts) or "(it printed nothing)", failed=status != 0)


def _run(calls: list[_Call], together: int) -> list[Answer]:
    """Run the calls, so many at a time, in this thread; whatever ends this ends them."""
    waiting = deque(calls)
    running: list[_Call] = []
    with selectors.DefaultSelector() as selector:
        try:
            while waiting or running:
                while waiting and len(running) < together:
                    running.append(waiting.popleft())
                    running[-1].start()
                    if running[-1].answer is not None:
                        running.pop()
                        continue
                    selector.register(running[-1].process.stdout, selectors.EVENT_READ, running[-1])
                    selector.register(running[-1].ended, selectors.EVENT_READ, running[-1])
                first = min((call.deadline for call in running), default=0.0)
                for key, _ in selector.select(max(0.0, first - time.monotonic())) if running else []:
                    # A program may close its output before it ends.
                    if key.fd != key.data.ended and not key.data.read():
                        selector.unregister(key.fileobj)
                for call in [call for call in running if call.process.poll() is not None]:
                    running.remove(call)
                    for file in (call.process.stdout, call.ended):
                        with suppress(KeyError):
                            selector.unregister(file)
                    call.finish()
                for call in running:
                    call.check_time()
        finally:
            for call in running:
                call.stop("stopped")
                if call.process is not None:
                    call.finish()
    return [call.answer for call in calls]


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


def _interpreter() -> str:
    return os.path.join(os.path.realpath(sys.prefix), "bin", os.path.basename(sys.executable))


def _allowed(name: str, value: int) -> int:
    """A limit that may be set: none above this process's own."""
    highest = resource.getrlimit(getattr(resource, name))[1]
    return value if highest == resource.RLIM_INFINITY else min(value, highest)


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
