"""Random bodies through the real LiteLLM, with parameters of LiteLLM's own in many of them.

``--slow`` sends 20,000, in parts. Whatever is sent: an answer or a clear refusal, no error of the proxy's own, no
traceback in its log, no connection to an address and no look at a file that a client named.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from random import Random
from typing import Any, NamedTuple, get_type_hints

import httpx
import pytest

from start_llm.api.anthropic.messages import MessagesBody
from start_llm.api.common.request import FIELDS
from start_llm.api.http.access import USER_FIELDS
from start_llm.api.media.embeddings import EmbeddingsBody
from start_llm.api.openai.chat import ChatBody, CompletionBody
from start_llm.api.openai.responses import ResponsesBody
from start_llm.core.errors import BadRequest
from start_llm.core.protocol import SESSION_FIELDS
from start_llm.core.settings import load_settings
from start_llm.host.home import python_path
from start_llm.proxy.bodies import LiteLLMNames
from start_llm.proxy.config import proxy_environment
from start_llm.proxy.launcher import LiteLLMProxy
from start_llm.proxy.own_fields import OWN_FIELDS
from tests.api.fakes import make_server
from tests.fuzz.requests import BODIES, request
from tests.fuzz.tape import Tape
from tests.proxy.real_proxy import in_front_of
from tests.proxy.scripted import Scripted, Sounds, Vectors
from tests.vendors import anthropic, openai

FEW, PARTS, IN_A_PART, BYTES = 200, 8, 2_500, 350
pytestmark = [pytest.mark.timeout(1200), pytest.mark.thorough]

PATHS = [path for path in BODIES if path.startswith("/v1/") and "models" not in path and "cache" not in path]
PARAMETERS = [
    "api_base", "base_url", "api_key", "api_version", "ssl_verify", "fallbacks", "context_window_fallbacks", "timeout",
    "langfuse_host", "langfuse_public_key", "litellm_metadata", "litellm_params", "model_list", "mock_response",
    "custom_llm_provider", "vertex_credentials", "aws_profile_name", "extra_headers", "headers", "num_retries", "cache",
    "guardrails", "prompt_id", "proxy_server_request", "user_config", "s3_endpoint_url", "gcs_path_service_account",
    "_litellm_internal", "callbacks", "client", "deployment_id", "specific_deployment", "litellm_credential_name",
]  # fmt: skip
ARGUMENTS = ["original_function", "data", "kwargs", "args", "self", "deployment", "response", "exception", "call_type"]
DOCUMENTED = {501, 503, 504, 507}


class Traps(NamedTuple):
    """What a request names: an address and a file.

    Attributes:
        touched: what was connected to or opened.
    """

    url: str
    file: Path
    touched: list[str]


@pytest.fixture(scope="module")
def traps(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Traps]:
    pipe, touched = tmp_path_factory.mktemp("trap") / "secret.pem", []
    os.mkfifo(pipe)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        found = Traps(f"http://127.0.0.1:{listener.getsockname()[1]}", pipe, touched)

        def connections() -> None:
            while True:
                try:
                    listener.accept()[0].close()
                except OSError:
                    return
                touched.append(found.url)

        def opens() -> None:
            os.close(os.open(pipe, os.O_WRONLY))  # returns when somebody opens it for reading
            touched.append(str(pipe))

        for watch in (connections, opens):
            threading.Thread(target=watch, daemon=True).start()
        yield found
        os.close(os.open(pipe, os.O_RDONLY | os.O_NONBLOCK))


@pytest.fixture(scope="module")
def proxy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiteLLMProxy]:
    folder = tmp_path_factory.mktemp("campaign")
    given = {"start_llm_cache_dir": folder / "cache", "log_root": folder, "litellm_master_key": "sk-t"}
    settings = load_settings(None, proxy_port=0, mlx_port=0, **given)
    server = make_server(settings, Scripted().service, audio=Sounds(), encoders=Vectors())
    with in_front_of(server, settings, folder) as found:
        yield found


def body_of(random: Random, traps: Traps) -> tuple[str, bytes, dict[str, str], str]:
    """(path, body, headers, the parameter of LiteLLM's that is in it)."""
    while True:
        made = request(Tape(random.randbytes(BYTES)))
        if made.method == "POST" and made.path in PATHS:
            break
    left_out = {"Authorization", "x-api-key", "Host", "Origin", "Content-Encoding"}
    headers = {name: value for name, value in made.headers.items() if name not in left_out}
    try:
        body = json.loads(made.body)
    except ValueError:
        return made.path, made.body, headers, ""
    planted = ""
    if isinstance(body, dict):
        values: list[Any] = [traps.url, str(traps.file), f"file://{traps.file}", [traps.url]]
        values += [True, None, 5, {}, {"a": 1}]
        if random.random() < 0.1:
            body[random.choice(["model", "input", "user", "prompt", "metadata"])] = random.choice(values)
        if random.random() < 0.3:
            planted = random.choice(PARAMETERS)
            nested = body.setdefault("metadata", {}) if planted in ("api_base", "base_url") else body
            place = random.choice([body, nested])
            if isinstance(place, dict):
                place[planted] = random.choice(values)
            else:
                planted = ""
        if random.random() < 0.2:
            body[random.choice(ARGUMENTS)] = random.choice(values)
    raw = json.dumps(body).encode()
    if random.random() < 0.05:
        raw = random.choice([raw[:-1], b"[" + raw + b"]", raw.replace(b"1", b"NaN"), b"", b"null", b"\xff" + raw])
        planted = ""
    if random.random() < 0.1:
        headers["Content-Type"] = "application/x-www-form-urlencoded"
    return made.path, raw, headers, planted


CAMPAIGN = [pytest.param(IN_A_PART, f"part {part}", marks=pytest.mark.slow) for part in range(PARTS)]


@pytest.mark.parametrize(("count", "seed"), [(FEW, "few"), *CAMPAIGN])
def test_random_bodies_are_answered_or_refused(proxy: LiteLLMProxy, traps: Traps, count: int, seed: str) -> None:
    random, seen, wrong = Random(f"bodies {seed}"), Counter[int](), []
    key = {"Authorization": f"Bearer {proxy.master_key}"}
    with httpx.Client(base_url=proxy.url, timeout=120) as client, ThreadPoolExecutor(8) as threads:

        def send(case: tuple[str, bytes, dict[str, str], str]) -> None:
            path, raw, headers, planted = case
            sent = {"Content-Type": "application/json", **headers, **key}
            given: Any = {name: value.encode("utf-8") for name, value in sent.items()}
            try:
                answer = client.post(path, content=raw, headers=given)
            except httpx.RemoteProtocolError as error:  # no answer at all
                wrong.append((str(error), path, raw[:600], headers))
                return
            seen[answer.status_code] += 1
            if answer.status_code >= 500 and answer.status_code not in DOCUMENTED:
                wrong.append((answer.status_code, path, raw[:600], answer.text[:600]))
            if planted and answer.status_code != 400 and path not in ("/v1/audio/transcriptions",):
                wrong.append((planted, answer.status_code, path, raw[:600], answer.text[:300]))

        list(threads.map(send, [body_of(random, traps) for _ in range(count)]))
    assert wrong == []
    assert seen[200] > count / 10 and seen[400] > count / 10
    assert traps.touched == []
    log = proxy.log_path.read_text("utf-8", "replace")
    assert "Traceback" not in log


HI = [{"role": "user", "content": "Hi"}]
UNREADABLE: list[tuple[str, dict[str, Any], int, str]] = [
    ("responses", {"model": "default", "input": 1}, 400, "input"),
    ("completions", {"model": "default", "prompt": [1, 2, 3]}, 200, "From here"),
    ("completions", {"model": "default", "prompt": "Hi", "prompt_cache_key": "k", "top_k": 4}, 200, "From here"),
    ("messages", {"model": "a\nb", "max_tokens": 5, "messages": HI}, 200, "From here"),
    ("messages", {"model": [[0]], "max_tokens": 5, "messages": HI}, 400, "model"),
]
"""What LiteLLM answered with 500, or not at all: the path, the body, and what the server makes of it."""


@pytest.mark.parametrize(("path", "body", "status", "words"), UNREADABLE)
def test_what_litellm_cannot_read_gets_the_servers_own_answer(
    proxy: LiteLLMProxy, path: str, body: dict[str, Any], status: int, words: str
) -> None:
    headers = {"Authorization": f"Bearer {proxy.master_key}", "Content-Type": "application/x-www-form-urlencoded"}
    answer = httpx.post(f"{proxy.url}/v1/{path}", content=json.dumps(body), headers=headers, timeout=120)
    assert (answer.status_code, words in answer.text) == (status, True), answer.text


NAMES = """
import json
from start_llm.proxy.application import litellm_names
names = litellm_names()
print(json.dumps([sorted(names.parameters), sorted(names.nested), sorted(names.arguments)]))
"""


@pytest.mark.live
def test_the_names_are_all_that_litellm_declares_and_nothing_that_a_vendor_or_this_server_knows() -> None:
    """It fails when a LiteLLM update declares its names elsewhere, or takes a vendor's for its own."""
    environment = proxy_environment(os.environ) | {"PYTHONPATH": python_path()}
    run = subprocess.run(
        [sys.executable, "-P", "-c", NAMES], env=environment, capture_output=True, text=True, timeout=300
    )
    parameters, nested, arguments = json.loads(run.stdout.splitlines()[-1])
    known = LiteLLMNames(frozenset(parameters), frozenset(nested), frozenset(arguments))
    assert len(parameters) > 400 and len(nested) > 200 and len(arguments) > 100
    assert {"specific_deployment", "model_group_retry_policy"} <= {*arguments, *parameters}
    for name in PARAMETERS:
        with pytest.raises(BadRequest, match=name):
            known.check({name: 1})
    for name in ("api_base", "base_url", "langfuse_host", "vertex_credentials", "aws_profile_name", "fallbacks"):
        with pytest.raises(BadRequest, match=rf"metadata\.{name}"):
            known.check({"metadata": {name: 1}})

    chat = openai.types.chat.completion_create_params.CompletionCreateParamsStreaming
    responses = openai.types.responses.response_create_params.ResponseCreateParamsStreaming
    claude = anthropic.types.message_create_params.MessageCreateParamsStreaming
    bodies = (ChatBody, MessagesBody, ResponsesBody, CompletionBody, EmbeddingsBody)
    ours = {name for body in bodies for name in body.model_fields}
    ours |= {*OWN_FIELDS, *SESSION_FIELDS, *USER_FIELDS, *FIELDS}
    vendors = {*chat.__annotations__, *responses.__annotations__, *get_type_hints(claude)}
    vendors -= {"workspace_id"}  # whose workspace pays
    body = dict.fromkeys(sorted(ours | vendors), 1)
    assert [name for name in body if known._is_parameter(name, known.parameters)] == []
    assert [name for name in body if name in known.arguments] == []
