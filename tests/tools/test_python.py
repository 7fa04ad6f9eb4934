"""The real sandbox: what programs print comes back, and hostile ones reach nothing and outlive nothing.

A hostile program here does so much and then stops: where the sandbox is broken a test must fail, not the machine.
"""

import errno
import os
import platform
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest

from dvp.errors import DvpError
from dvp.experiment.tools import Python
from dvp.tools import make_tool
from dvp.tools.seccomp import program as call_filter

pytestmark = pytest.mark.slow
SETTINGS = Python(kind="python", seconds=20, cpu_seconds=10, memory_mib=512, processes=6, output_bytes=4000)


@pytest.fixture(scope="module")
def python():
    namespaces = ["unshare", "--mount", "--pid", "--net", "--ipc", "--uts", "--fork", "true"]
    user = [] if os.geteuid() == 0 else ["--user"]
    if subprocess.run([*namespaces[:1], *user, *namespaces[1:]], check=False, capture_output=True).returncode:
        pytest.skip("namespaces cannot be made here")
    try:
        return make_tool(SETTINGS)
    except DvpError as error:
        if os.environ.get("CI"):
            raise
        pytest.skip(str(error))


def answer(tool, program):
    (only,) = tool.answers([program])
    return only


def test_what_it_prints_is_the_answer(python):
    programs = [
        "print(sum(range(10)))",
        "import numpy\nprint(numpy.arange(5).dot(numpy.arange(5)))",
        "open('note', 'w').write('ä'); print(open('note').read())",
        "print({str(number) for number in range(3)} and 'done')",
        "pass",
    ]
    answers = python.answers(programs)
    assert [(one.text, one.failed) for one in answers] == [
        ("45", False),
        ("30", False),
        ("ä", False),
        ("done", False),
        ("(it printed nothing)", False),
    ]


def test_calls_are_alike_and_share_nothing(python):
    program = "import os\nprint(os.listdir('.'), hash('a'), {'b', 'c', 'd', 'e'})\nopen('mine', 'w').write('1')"
    (said,) = {one.text for one in python.answers([program] * 3)}
    assert said.startswith("['call.py'] ")


def test_the_error_is_the_answer(python):
    failed = answer(python, "x = 3\nprint('before')\n1 / (x - 3)\n")
    assert failed.failed
    assert failed.text.startswith("before\nTraceback")
    assert "line 3" in failed.text
    assert failed.text.endswith("ZeroDivisionError: division by zero")
    assert answer(python, "1 +").text.endswith("SyntaxError: invalid syntax")
    assert answer(python, "import sys; sys.exit('no')").text == "no"
    assert answer(python, "\ud800").failed
    assert answer(python, "#" * 70000).text == "error: the program has more than 65536 bytes"


def test_the_home_directory_and_the_machine_are_out_of_sight(python, tmp_path, monkeypatch):
    secret = Path.home() / f".secret-of-a-test-{os.getpid()}"
    secret.write_text("secret")
    try:
        shown = answer(python, f"print(open({str(secret)!r}).read())")
    finally:
        secret.unlink()
    assert shown.failed
    assert "FileNotFoundError" in shown.text
    (tmp_path / "data").write_text("data")
    assert answer(python, f"print(open({str(tmp_path / 'data')!r}).read())").failed
    assert answer(python, "print(open('/etc/passwd').read())").failed
    assert (
        answer(python, "import os; print(os.path.exists('/proc/1'), os.path.expanduser('~'))").text == "False /tmp/home"
    )
    monkeypatch.setenv("A_TOKEN", "secret")
    assert "A_TOKEN" not in answer(python, "import os; print(sorted(os.environ))").text


@pytest.mark.parametrize("place", ["/usr/mine", "/mine", "/dev/mine", "/etc/mine", sys.base_prefix + "/mine"])
def test_nothing_but_the_home_can_be_written(python, place):
    assert "Error" in answer(python, f"open({place!r}, 'w').write('1')").text


def test_no_socket_reaches_anything(python):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        tried = answer(python, f"import socket\nsocket.create_connection(('127.0.0.1', {port}), 5)")
    assert tried.failed
    assert "ConnectionRefusedError" in tried.text  # its own loopback, on which nothing listens
    outside = answer(python, "import socket\nsocket.create_connection(('192.0.2.1', 80), 5)")
    assert "Network is unreachable" in outside.text


def test_a_fork_bomb_is_a_few_processes(python):
    """Each process doubles eight times, and all stay: 256 of them without a limit."""
    bomb = (
        "import os, time\nfailed = 0\nfor _ in range(8):\n    try:\n        os.fork()\n"
        "    except OSError:\n        failed += 1\nos.write(1, b'%d\\n' % failed)\ntime.sleep(60)\n"
    )
    before = descendants()
    stopped = answer(make_tool(SETTINGS.changed(seconds=3.0)), bomb)
    *lines, last = stopped.text.splitlines()
    assert last == "(stopped after 3 seconds)"
    assert len(lines) <= SETTINGS.processes
    assert all(int(failed) > 0 for failed in lines)
    assert wait_until(lambda: descendants() <= before)


def test_hostile_calls_leave_the_others_alone(python):
    programs = [
        "for _ in range(10**5):\n    print('y' * 100)",
        "kept = [bytearray(2**24) for _ in range(64)]",
        "import os\nos.kill(os.getpid(), 9)",
    ]
    answers = python.answers([program for hostile in programs for program in (hostile, "print(6 * 7)")])
    assert [one.failed for one in answers] == [True, False] * 3
    assert [one.text for one in answers[1::2]] == ["42"] * 3
    assert answers[0].text.endswith("\n(stopped: it printed more than 4000 bytes)")
    assert len(answers[0].text) < 4100


def test_memory_is_limited(python):
    """Twice what it may take, if nothing stopped it; of the home's files four times."""
    eater = answer(python, "kept = [bytearray(2**24) for _ in range(64)]\nprint(len(kept))")
    assert eater.text.endswith("MemoryError")
    program = "part = bytes(2**20)\nfor number in range(64):\n    open(str(number), 'wb').write(part)\nprint('all')"
    assert "No space left on device" in answer(python, program).text


def test_memory_that_no_process_has_is_refused(python):
    """No limit of a process counts a segment that it has let go, or a file in memory."""
    program = """
import ctypes, os
library = ctypes.CDLL(None, use_errno=True)
print(library.shmget(0, 1 << 20, 0o1600), os.strerror(ctypes.get_errno()))
try:
    print(os.memfd_create("x"))
except OSError as error:
    print(error.strerror)
"""
    refused = os.strerror(errno.EPERM)
    assert answer(python, program).text == f"-1 {refused}\n{refused}"


def test_no_namespace_is_made_within(python):
    program = """
import ctypes, os, threading
library = ctypes.CDLL(None, use_errno=True)
for call in (lambda: library.unshare(0x10000000), lambda: library.syscall({clone}, 0x10000000 | 17, 0, 0, 0, 0)):
    if call() == 0:
        os._exit(1)
    print(os.strerror(ctypes.get_errno()))
thread = threading.Thread(target=print, args=["a thread"])
thread.start()
thread.join()
print(os.waitstatus_to_exitcode(os.system("exit 3")))
"""
    clone = {"x86_64": 56, "aarch64": 220}[platform.machine()]
    refused = os.strerror(errno.EPERM)
    text = answer(python, program.replace("{clone}", str(clone))).text
    assert text == f"{refused}\n{refused}\na thread\n3"


def test_a_processor_whose_calls_are_not_known_is_refused(monkeypatch):
    monkeypatch.setattr(platform, "machine", lambda: "riscv64")
    with pytest.raises(DvpError, match="its sandbox runs on x86_64 and aarch64, and this is riscv64"):
        call_filter()


def test_time_is_limited(python):
    tool = make_tool(SETTINGS.changed(seconds=5.0))  # in which the sandbox has to start as well
    quick, slow = tool.answers(["print(1)", "import time\nprint('so far')\ntime.sleep(60)"])
    assert quick.text == "1"
    assert slow.text == "so far\n(stopped after 5 seconds)"
    # A program that closes its output runs on until its time is over, or it ends.
    closed = answer(tool, "import os, time\nos.close(1)\nos.close(2)\ntime.sleep(60)")
    assert closed.text == "(stopped after 5 seconds)"
    burner = make_tool(SETTINGS.changed(cpu_seconds=1))
    assert answer(burner, "import time\nend = time.monotonic() + 15\nwhile time.monotonic() < end:\n    pass").text in (
        "(ended by SIGXCPU)",
        "(ended by SIGKILL)",
    )


def descendants():
    return {child.pid for child in psutil.Process().children(recursive=True)}


def test_what_a_program_leaves_behind_ends_with_it(python):
    before = descendants()
    left = answer(
        python, "import os, time\nif os.fork() == 0:\n    os.setsid()\n    time.sleep(600)\nprint('parent ends')"
    )
    assert left.text == "parent ends"
    assert wait_until(lambda: descendants() <= before)
    assert answer(python, "import os\nos.kill(os.getpid(), 11)").text == "(ended by SIGSEGV)"
    assert int(answer(python, "import os; print(os.getpid())").text) < 10  # nobody else's process has a number there


def test_a_program_ends_with_the_process_that_started_it(python):
    script = (
        "from dvp.experiment.tools import Python\nfrom dvp.tools import make_tool\n"
        "tool = make_tool(Python(kind='python', seconds=600))\nprint('started', flush=True)\n"
        "tool.answers(['import os, time\\nif os.fork() == 0:\\n    os.setsid()\\ntime.sleep(600)'])"
    )
    parent = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert parent.stdout.readline() == "started\n"
    children = []

    def runs():
        children[:] = psutil.Process(parent.pid).children(recursive=True)
        return len(children) >= 4  # bwrap twice, the program, its child

    assert wait_until(runs)
    parent.kill()
    parent.communicate()
    assert wait_until(lambda: not any(is_alive(child) for child in children))


def is_alive(process):
    return process.is_running() and process.status() != psutil.STATUS_ZOMBIE


def wait_until(condition, seconds=30):
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.05)
    return True


def test_an_exception_ends_the_calls(python, monkeypatch):
    """As training does when it is told to stop in the midst of a rollout. Nothing is left of them, no zombie either."""
    before, files = descendants(), len(os.listdir("/proc/self/fd"))
    seen = []

    def interrupt(*_):
        seen.append(descendants() - before)
        raise KeyboardInterrupt

    processes = 3 * min(4, len(os.sched_getaffinity(0)))  # of a call: bwrap twice, and the program

    def when_they_run():
        wait_until(lambda: len(descendants() - before) >= processes)
        signal.pthread_kill(threading.main_thread().ident, signal.SIGALRM)

    previous = signal.signal(signal.SIGALRM, interrupt)
    try:
        threading.Thread(target=when_they_run).start()
        with pytest.raises(KeyboardInterrupt):
            python.answers(["import time\ntime.sleep(60)"] * 4)
    finally:
        signal.signal(signal.SIGALRM, previous)
    assert len(seen[0]) >= processes
    assert wait_until(lambda: descendants() <= before)
    assert len(os.listdir("/proc/self/fd")) == files


def test_an_exception_while_a_call_starts_leaves_none_that_runs(python, monkeypatch):
    """When its process is there already, but nobody knows it who could end it."""
    before, files = descendants(), len(os.listdir("/proc/self/fd"))
    started = []
    execute = subprocess.Popen._execute_child

    def interrupted(*arguments):
        execute(*arguments)
        started.append(descendants() - before)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(subprocess.Popen, "_execute_child", interrupted)
        with pytest.raises(KeyboardInterrupt):
            python.answers(["import time\ntime.sleep(60)"])
    assert started[0]
    assert wait_until(
        lambda: not any(is_alive(child) for child in psutil.Process().children() if child.pid not in before)
    )
    assert len(os.listdir("/proc/self/fd")) == files


def test_without_bubblewrap_it_is_refused_in_one_line(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(DvpError, match=r"python needs bubblewrap \(`bwrap`\), which is not installed"):
        make_tool(SETTINGS)
    fake = tmp_path / "bwrap"
    fake.write_text("#!/bin/sh\necho 'bwrap: No permissions to create new namespace'\nexit 1\n")
    fake.chmod(0o755)
    with pytest.raises(DvpError, match="sandbox does not work on this machine: bwrap: No permissions to create"):
        make_tool(SETTINGS)


def test_limits_that_do_not_hold_are_refused(python, monkeypatch):
    """Some users' processes are not limited: the proof at the start sees it."""
    import dvp.tools.python as module

    monkeypatch.setattr(module, "_allowed", lambda name, value: 10 * value)
    with pytest.raises(DvpError, match="it starts more than 6 processes"):
        make_tool(SETTINGS)
