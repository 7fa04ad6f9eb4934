"""Inference servers: the safe vocabulary within vLLM's, and the mismatch of a running one."""

import http.server
import json
import math
import os
import re
import socket
import subprocess
import sys
import threading
import time
from types import SimpleNamespace
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import numpy as np
import pandas as pd
import pytest
import torch
from transformers import AutoModelForCausalLM

from dvp.cli import main
from dvp.core.safe_vocabulary import Entropy, TopK, safe_mask
from rounding import TINY_LOG_PROB

PROCESSOR = "dvp.integrations.vllm:ServedSafeVocabulary"
ENTROPY = {"rule": "entropy", "alpha": 0.1, "target_entropy": 4.0, "lowest": 1e-6, "highest": 0.9}
SMALL = ["--count", "2", "--responses", "2", "--response-tokens", "12"]


def ask(url, **body):
    request = Request(url + "/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urlopen(request, timeout=300) as answer:
        return json.load(answer)["choices"][0]


@pytest.fixture(scope="module")
def vllm_server(tiny_model, tmp_path_factory):
    """The address of vLLM's own server of a tiny model, with the processor."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", tiny_model, "--port", port]
    command += ["--dtype", "float32", "--max-model-len", "256", "--enforce-eager", "--max-logprobs", "400"]
    command += ["--logprobs-mode", "processed_logprobs", "--logits-processors", PROCESSOR, "--max-num-seqs", "8"]
    command += ["--kv-cache-memory-bytes", 2**26, "--host", "127.0.0.1"]
    settings = {"VLLM_USE_V2_MODEL_RUNNER": "0", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "TORCHDYNAMO_DISABLE": "1"}
    settings |= {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "OMP_NUM_THREADS": "1"}
    log = tmp_path_factory.mktemp("server") / "log"
    with log.open("wb") as file:
        process = subprocess.Popen(list(map(str, command)), stdout=file, stderr=file, env=os.environ | settings)
    url, start = f"http://127.0.0.1:{port}", time.monotonic()
    try:
        while True:
            assert process.poll() is None, log.read_text()[-3000:]
            assert time.monotonic() < start + 600, log.read_text()[-3000:]
            try:
                urlopen(url + "/health", timeout=5).close()
                break
            except OSError:
                time.sleep(1)
        yield url
    finally:
        process.terminate()
        process.wait(60)


def next_token(url, model, **options):
    """What a token is sampled from: the log-probs of those that may come, by id."""
    answer = ask(
        url, model=str(model), prompt=[5, 7, 9], max_tokens=1, logprobs=400, return_tokens_as_token_ids=True, **options
    )
    found = {int(name.split(":")[1]): value for name, value in answer["logprobs"]["top_logprobs"][0].items()}
    return {token: value for token, value in found.items() if value > -9999.0}  # −∞ in JSON


@pytest.mark.slow
@pytest.mark.parametrize(
    ("asked", "rule"),
    [
        ({"rule": "top_k", "k": 7}, TopK(rule="top_k", k=7)),
        (ENTROPY | {"rho": 0.3}, Entropy(**ENTROPY).safe(0.3, 1)),
    ],
)
def test_a_request_is_sampled_from_its_safe_vocabulary(asked, rule, vllm_server, tiny_model):
    """After temperature, and renormalised; the reported log-probs are those."""
    whole = next_token(vllm_server, tiny_model, temperature=2.0)
    pruned = next_token(vllm_server, tiny_model, temperature=2.0, vllm_xargs={"safe_vocabulary": json.dumps(asked)})
    assert len(whole) == 400
    logits_1V = torch.tensor([[whole[token] for token in range(400)]])
    safe = safe_mask(logits_1V, rule)[0].nonzero()[:, 0].tolist()
    assert sorted(pruned) == safe
    assert 1 < len(safe) < 400
    mass = math.fsum(math.exp(whole[token]) for token in safe)
    for token in safe:
        assert pruned[token] == pytest.approx(whole[token] - math.log(mass), abs=TINY_LOG_PROB)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("{", "Expecting property name"),
        ('{"rule": "top_k", "k": 0}', "top_k.k: Input should be greater than or equal to 1"),
        (json.dumps(ENTROPY), "entropy needs rho"),
        ('{"rule": "trainer_only", "rho": 0.1}', "restricts nothing in the engine"),
    ],
)
def test_a_rule_that_cannot_be_read_is_a_bad_request(text, why, vllm_server, tiny_model):
    with pytest.raises(HTTPError) as raised:
        next_token(vllm_server, tiny_model, vllm_xargs={"safe_vocabulary": text})
    assert raised.value.code == 400
    assert why in raised.value.read().decode()


@pytest.mark.slow
def test_log_z_follows_from_a_second_request(vllm_server, tiny_model):
    """As docs/vllm.md says: log q of a sampled token from `prompt_logprobs`, log Z' = log q − log q^mp."""
    asked = {"temperature": 1.0, "vllm_xargs": {"safe_vocabulary": json.dumps({"rule": "top_k", "k": 7})}}
    pruned, whole = next_token(vllm_server, tiny_model, **asked), next_token(vllm_server, tiny_model, temperature=1.0)
    token = max(pruned, key=pruned.get)
    answer = ask(vllm_server, model=str(tiny_model), prompt=[5, 7, 9, token], max_tokens=1, prompt_logprobs=0)
    log_q = answer["prompt_logprobs"][-1][str(token)]["logprob"]
    log_mass = math.log(math.fsum(math.exp(whole[kept]) for kept in pruned))
    assert pruned[token] - log_q == pytest.approx(-log_mass, abs=TINY_LOG_PROB)


def test_the_runner_that_prunes_before_temperature_refuses_it():
    from vllm.v1.worker.gpu.sample.logits_processor import build_custom_logits_processors_params_validator

    with pytest.raises(ValueError, match="ServedSafeVocabulary is not a subclass"):
        build_custom_logits_processors_params_validator([PROCESSOR])


@pytest.fixture
def problems(tmp_path):
    file = tmp_path / "problems.jsonl"
    rows = [{"problem": "badu kefi " * number, "answer": str(number)} for number in range(1, 4)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def measure(root, url, model, problems, output):
    command = [sys.executable, "-m", "dvp.cli", "mismatch", "--server", url, "--model", model, *SMALL]
    command += ["--problems", problems, "--output", output]
    return subprocess.run(list(map(str, command)), cwd=root, check=False, capture_output=True, text=True, timeout=600)


@pytest.mark.slow
def test_the_mismatch_of_a_running_server(vllm_server, tiny_model, problems, root, tmp_path):
    done = measure(root, vllm_server, tiny_model, problems, tmp_path / "out")
    assert done.returncode == 0, done.stderr
    assert "check first" not in done.stdout
    page = (tmp_path / "out" / "mismatch.html").read_text(encoding="utf-8")
    assert vllm_server in page
    assert "2 responses of at most 12 tokens each" in page
    table = pd.read_parquet(tmp_path / "out" / "rollouts.parquet")
    assert len(table) == 4
    assert table["problem"].nunique() == 2
    for row in table.itertuples():
        assert 0 < len(row.token_ids) == len(row.engine_logprobs) <= 12
        assert row.trainer_logprobs == pytest.approx(row.engine_logprobs, abs=TINY_LOG_PROB)
    assert len({tuple(tokens) for tokens in table["token_ids"]}) > 1


class Answers(http.server.BaseHTTPRequestHandler):
    """Answers as documented, from a table: path to JSON, or a function of the request."""

    def do_GET(self):
        self.answer({})

    def do_POST(self):
        self.answer(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

    def answer(self, asked):
        found = self.server.table[self.path]
        self.server.asked.append(asked)
        self.server.keys.append(self.headers["Authorization"])
        body = json.dumps(found(asked) if callable(found) else found).encode()
        self.send_response(self.server.status)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args):
        pass


@pytest.fixture
def answering():
    """Start a server that answers from a table."""
    servers = []

    def start(table):
        server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Answers)
        server.table, server.asked, server.keys, server.status = table, [], [], 200
        threading.Thread(target=server.serve_forever, daemon=True).start()
        servers.append(server)
        return server, f"http://127.0.0.1:{server.server_port}"

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


def sglang(asked):
    """As SGLang documents it: of each response [log-prob, token id, text]."""
    one = {"text": "…", "meta_info": {"output_token_logprobs": [[-0.5, 11, None], [-1.5, 12, None]]}}
    return [one] * asked["sampling_params"]["n"]


def test_sglang_is_asked_as_it_documents(answering):
    from dvp.measurement.server import Server

    server, url = answering({"/v1/models": {"data": [{"id": "m", "owned_by": "sglang"}]}, "/generate": sglang})
    assert Server(url + "/").generate([1, 2], 2, 9, seed=3) == [([11, 12], [-0.5, -1.5])] * 2
    asked = server.asked[-1]
    assert (asked["input_ids"], asked["return_logprob"]) == ([1, 2], True)
    whole = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "min_p": 0.0, "max_new_tokens": 9, "n": 2}
    assert whole.items() <= asked["sampling_params"].items()


PART = {"logprobs": {"tokens": ["token_id:1"], "token_logprobs": [-1.0]}}
TEXT = "returns text without token ids and log-probs; needed is vLLM: --return-tokens-as-token-ids"


@pytest.mark.parametrize(
    ("owner", "answer", "says"),
    [
        ("vllm", {"choices": [{"text": "a b", "logprobs": None}]}, TEXT),
        ("vllm", {"choices": [{"logprobs": {"tokens": ["a"], "token_logprobs": [-1.0]}}]}, TEXT),
        ("vllm", {"choices": [{**PART, "token_ids": [1, 2]}]}, TEXT),
        ("vllm", {"choices": [{**PART, "token_ids": ["1"]}]}, TEXT),
        ("vllm", [], TEXT),
        ("vllm", {"choices": [PART, PART]}, "returns 2 responses where n is 1"),
        ("vllm", {"choices": []}, "returns 0 responses where n is 1"),
        ("sglang", {"text": "a b", "meta_info": {}}, "needed is SGLang: return_logprob"),
    ],
)
def test_an_answer_that_cannot_be_used_is_refused(owner, answer, says, answering):
    from dvp.errors import DvpError
    from dvp.measurement.server import Server

    path = "/generate" if owner == "sglang" else "/v1/completions"
    _, url = answering({"/v1/models": {"data": [{"id": "m", "owned_by": owner}]}, path: answer})
    with pytest.raises(DvpError, match=re.escape(says)):
        Server(url).generate([1], 1, 4, seed=0)


def test_a_null_and_an_empty_response_are_read(answering):
    """The rows of a file: one token without a log-prob there, and nothing of the response without tokens."""
    from dvp.measurement.server import Server

    choices = [
        {"token_ids": [3, 4], "logprobs": {"tokens": ["a", "b"], "token_logprobs": [None, -2.0]}},
        {"token_ids": [], "logprobs": {"tokens": [], "token_logprobs": []}},
    ]
    table = {"/v1/models": {"data": [{"id": "m"}]}, "/v1/completions": {"choices": choices}}
    [(tokens, log_probs), empty] = Server(answering(table)[1]).generate([1], 2, 4, seed=0)
    assert (tokens, log_probs[1], empty) == ([3, 4], -2.0, ([], []))
    assert math.isnan(log_probs[0])


@pytest.mark.parametrize("suffix", ["", "/", "/v1", "/v1/"])
def test_the_key_goes_with_each_request(suffix, answering, monkeypatch):
    from dvp.measurement.server import Server

    monkeypatch.setenv("VLLM_API_KEY", "secret")
    server, url = answering({"/v1/models": {"data": [{"id": "m"}]}})
    assert Server(url + suffix).url == url
    assert server.keys == ["Bearer secret"]


def test_a_server_that_wants_a_key_says_where(answering, monkeypatch):
    from dvp.errors import DvpError
    from dvp.measurement.server import Server

    monkeypatch.delenv("VLLM_API_KEY", raising=False)
    server, url = answering({"/v1/models": {"error": "Unauthorized"}})
    server.status = 401
    with pytest.raises(
        DvpError, match=r"HTTP 401: .*Unauthorized.*expected its key in the environment variable VLLM_API"
    ):
        Server(url)


def test_tokens_named_by_their_ids_are_read(answering):
    from dvp.measurement.server import Server

    reported = {"tokens": ["token_id:3", "token_id:4"], "token_logprobs": [-1.0, -2.0]}
    table = {"/v1/models": {"data": [{"id": "m"}]}, "/v1/completions": {"choices": [{"logprobs": reported}]}}
    assert Server(answering(table)[1]).generate([1], 1, 4, seed=0) == [([3, 4], [-1.0, -2.0])]


@pytest.mark.parametrize("listed", [[], {}, {"data": []}, {"data": ["m"]}])
def test_what_lists_no_models_is_refused(listed, answering):
    from dvp.errors import DvpError
    from dvp.measurement.server import Server

    with pytest.raises(DvpError, match="expected a list of models"):
        Server(answering({"/v1/models": listed})[1])


def scored(answering, model, tokens, log_probs):
    """What a server that gives each problem the same two responses is taken for, by a trainer of a tiny model."""
    from dvp.measurement.server import Server, rollouts

    part = {"token_ids": tokens, "logprobs": {"tokens": ["a"] * len(tokens), "token_logprobs": log_probs}}
    table = {"/v1/models": {"data": [{"id": "m"}]}, "/v1/completions": {"choices": [part, part]}}
    network = AutoModelForCausalLM.from_pretrained(model)
    fixed = SimpleNamespace(network=lambda: network, prompts=[[5, 7]], ids=["p"], seed=0)
    return rollouts(Server(answering(table)[1]), fixed, 2, 4)


@pytest.mark.parametrize(
    ("tokens", "log_probs", "says"),
    [
        ([400], [-1.0], "samples token 400, --model has 400: is it the same model?"),
        ([-1], [-1.0], "samples token -1, --model has 400: is it the same model?"),
        ([5, 6], [math.nan, None], "gives no log-prob of a token, but nan"),
        ([], [], "returns no token to any problem"),
    ],
)
def test_tokens_that_cannot_be_scored_are_refused_at_once(answering, tiny_model, tokens, log_probs, says):
    from dvp.errors import DvpError

    with pytest.raises(DvpError, match=re.escape(says)):
        scored(answering, tiny_model, tokens, log_probs)


def test_a_token_without_a_log_prob_is_a_row_without(answering, tiny_model):
    table = scored(answering, tiny_model, [5, 6], [None, -2.0])
    assert np.isnan(table["engine_logprobs"][0][0])
    assert len(table) == 2


@pytest.mark.parametrize(
    ("url", "says"), [("http://u:secret@h", "without user"), ("h:8000", "expected http"), ("http://h:x", "no answer")]
)
def test_an_address_that_is_none_is_one_line(url, says, capsys):
    assert main(["mismatch", "--server", url, "--model", "m"]) == 2
    error = capsys.readouterr().err
    assert says in error
    assert error.count("\n") == 1
    assert "secret" not in error


def test_a_server_that_is_not_there_is_one_line(capsys):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
        assert main(["mismatch", "--server", url, "--model", "m"]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"dvp mismatch: --server: {url}/v1/models: no answer")
    assert error.count("\n") == 1


@pytest.mark.parametrize("other", [["--engine", "bf16"], ["--rho", "0.1"]])
def test_a_server_beside_what_it_cannot_do_is_refused(other, capsys):
    assert main(["mismatch", "--server", "http://h", "--model", "m", *other]) == 2
    assert "without --engine and --rho" in capsys.readouterr().err
