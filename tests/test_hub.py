"""Downloads reach the hub in the environment of an engine, and nothing asks the hub once an engine has started."""

import os
import subprocess
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread

import pytest

SCRIPT = """
from dvp.rollout.vllm import configure_environment
configure_environment(1)
from dvp.errors import DvpError
from dvp.hub import download, go_offline
for leave in (lambda: None, go_offline):
    leave()
    try:
        download("someone/model", None, "give a folder")
    except DvpError as error:
        print(error, flush=True)
"""


@pytest.fixture
def hub():
    """A hub without models, and the paths that were asked of it."""

    class Nothing(BaseHTTPRequestHandler):
        def do_GET(self):
            asked.append(self.path)
            self.send_error(404)

        do_HEAD = do_GET

        def log_message(self, *_):
            pass

    asked: list[str] = []
    with ThreadingHTTPServer(("127.0.0.1", 0), Nothing) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}", asked
        server.shutdown()


@pytest.mark.slow
def test_the_hub_is_asked_until_an_engine_starts(hub, tmp_path):
    address, asked = hub
    environment = {key: value for key, value in os.environ.items() if key != "HF_HUB_OFFLINE"}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        env=environment | {"HF_ENDPOINT": address, "HF_HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        check=True,
    )
    first, second = done.stdout.splitlines()
    assert all(line.startswith("someone/model cannot be downloaded from the hub (") for line in (first, second))
    assert asked
    assert "404" in first
    assert "404" not in second
