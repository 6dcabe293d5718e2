"""MODEL_MAP to another provider: which names lead there; and with the real LiteLLM, a stub plays the provider.

The last tests fail when a LiteLLM update changes what `start_llm/proxy/elsewhere.py` relies on.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from start_llm.core.modelmap import parse_model_map
from start_llm.core.settings import load_settings
from start_llm.proxy.elsewhere import BACK_HEADER, names_elsewhere
from start_llm.proxy.launcher import LiteLLMProxy
from tests.api.fakes import make_server
from tests.proxy.node_stub import NodeStub, nodes
from tests.proxy.real_proxy import DIALECTS, body_of, client_of, in_front_of
from tests.proxy.scripted import Scripted
from tests.proxy.stub import TEXT
from tests.proxy.test_refusals import sentence

pytestmark = pytest.mark.timeout(400)

KEY = "cloud-key-that-nobody-may-log"
MODEL = "openai/cloud"


def meant(table: str, here: str = "") -> dict[str, str]:
    return names_elsewhere(parse_model_map(table), lambda model: model == here)


def test_a_name_leads_elsewhere_only_with_a_provider_its_key_and_no_such_model_here(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    assert meant("gpt-5=openai/gpt-5") == {}
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    monkeypatch.setenv("NOBODY_API_KEY", KEY)
    assert meant("gpt-5=openai/gpt-5,small=tiny") == {"gpt-5": "openai/gpt-5"}
    assert meant("gpt-5=openai/gpt-5", here="openai/gpt-5") == {}
    for local in ("x=x", "x=nobody/x", "x=mlx-community/x", "gpt-*=openai/x", "gpt-?=openai/x", "@side=openai/x"):
        assert meant(local) == {}, local
    assert meant("*-mini=small,gpt-5-mini=openai/x") == {}, "the first pattern that fits counts"


@pytest.fixture(scope="module")
def cloud() -> Iterator[NodeStub]:
    with nodes(1) as [server], pytest.MonkeyPatch.context() as patch:
        patch.setenv("OPENAI_API_KEY", KEY)
        patch.setenv("OPENAI_BASE_URL", f"{server.url}/v1")
        yield server


@pytest.fixture(scope="module")
def proxy(cloud: NodeStub, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiteLLMProxy]:
    folder: Path = tmp_path_factory.mktemp("elsewhere")
    table = f"gpt-5={MODEL}"
    settings = load_settings(None, mlx_port=0, proxy_port=0, log_root=folder, api_key="server-key", model_map=table)
    server = make_server(settings, Scripted().service)
    with in_front_of(server, settings, folder, elsewhere=meant(table)) as proxy:
        yield proxy


@pytest.fixture
def web(proxy: LiteLLMProxy, cloud: NodeStub) -> Iterator[httpx.Client]:
    with client_of(proxy) as client:
        yield client
    cloud.reset()


@pytest.mark.thorough
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("dialect", DIALECTS)
def test_who_asks_by_the_name_is_answered_by_the_provider(
    web: httpx.Client, cloud: NodeStub, dialect: str, stream: bool
) -> None:
    own: dict[str, Any] = {"min_p": 0.1, "chat_template_kwargs": {"a": 1}, "drafts": False}
    given = web.post(dialect, json=body_of(dialect, "hello", stream=stream) | own | {"model": "gpt-5"})
    assert given.status_code == 200 and TEXT in given.text and "From here" not in given.text, given.text
    (seen,) = cloud.seen
    assert seen.headers["authorization"] == f"Bearer {KEY}" and seen.body["model"] == "cloud"
    everything = json.dumps([seen.headers, seen.body])
    assert "hello" in everything and not any(name in everything for name in own)
    assert "server-key" not in everything and web.headers["authorization"].split()[1] not in everything


@pytest.mark.thorough
@pytest.mark.parametrize("dialect", DIALECTS)
def test_other_names_and_what_comes_back_stay_here(web: httpx.Client, cloud: NodeStub, dialect: str) -> None:
    for name in ("tiny", "default", "claude-x", "gpt-5-mini"):
        given = web.post(dialect, json=body_of(dialect, "hello") | {"model": name})
        assert "From here" in given.text, given.text
    for word in ("queue_full", "out_of_memory"):
        assert web.post(dialect, json=body_of(dialect, f"say {word}")).status_code >= 400
    back = web.post(dialect, json=body_of(dialect, "hello") | {"model": "gpt-5"}, headers={BACK_HEADER: "no"})
    assert back.status_code >= 400 and cloud.seen == []


@pytest.mark.thorough
def test_the_list_has_the_name_and_the_providers_error_is_told(
    web: httpx.Client, proxy: LiteLLMProxy, cloud: NodeStub
) -> None:
    cards = {card["id"]: card for card in web.get("models").json()["data"]}
    assert cards["gpt-5"]["owned_by"] == "openai" and len(cards) > 1
    cloud.mode = "locked"
    for dialect in DIALECTS:
        refused = web.post(dialect, json=body_of(dialect, "hello") | {"model": "gpt-5"})
        assert refused.status_code == 401 and sentence(refused), refused.text
    assert len(cloud.seen) == len(DIALECTS) and KEY not in proxy.log_path.read_text()
