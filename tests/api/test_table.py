"""Who may see what: all routes of the table, asked by many kinds of visitors, against one written table."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import httpx
import pytest

from start_llm.api.http import access
from start_llm.api.server import ApiServer
from start_llm.core.report import Background, Miss
from tests.api.fakes import REPORT, FakeService

Sight = Literal["nothing", "numbers", "words"]
SECRET = "zebra"  # stands in all words of the request that is looked for
MADE_BY = {"Authorization": "Bearer ann"}
USER = "one"

# For whom an answer is: `open` for whoever is let in, `private` for who sees everything; the others tell of one
# request: `places` where it was and what it cost, `report` and `note` its words, too, `stored` is all words.
TABLE = {
    "GET /": "open", "GET /page/{}": "open", "GET /health": "open", "GET /metrics": "open", "GET /v1/loads": "open",
    "GET /docs": "open", "GET /openapi.json": "open",
    "GET /page/feed": "places",
    "GET /page/stored": "private", "GET /page/models": "private", "POST /page/models/pull": "private",
    "GET /page/models/search": "private", "POST /page/models/change": "private", "POST /page/models/remove": "private",
    "POST /api/pull": "private", "DELETE /api/delete": "private",
    "POST /api/create": "open", "POST /api/copy": "open", "POST /api/push": "open",
    "POST /page/models/stop": "private", "GET /page/settings": "private", "POST /page/settings": "private",
    "GET /page/agents": "private", "GET /page/nodes": "private", "POST /page/requests/{}/cancel": "private",
    "GET /page/requests/{}": "note",
    "GET /v1/models": "open", "GET /v1/models/{*}": "open",
    "GET /api/v0/models": "open", "GET /api/v0/models/{*}": "open", "POST /api/v0/chat/completions": "open",
    "GET /props": "open", "GET /slots": "open",
    "POST /v1/models/load": "private", "POST /v1/models/unload": "private", "POST /v1/models/pin": "private",
    "POST /v1/chat/completions": "open", "POST /v1/completions": "open", "POST /v1/messages": "open",
    "POST /v1/messages/count_tokens": "open", "POST /v1/responses": "open", "POST /v1/responses/input_tokens": "open",
    "GET /v1/responses/{}": "stored", "GET /v1/responses/{}/input_items": "stored", "DELETE /v1/responses/{}": "stored",
    "POST /api/chat": "open", "POST /api/generate": "open", "POST /api/embed": "open", "POST /api/show": "open",
    "GET /api/tags": "open", "GET /api/ps": "open", "GET /api/version": "open",
    "POST /v1/embeddings": "open", "POST /v1/audio/speech": "open",
    "POST /v1/audio/transcriptions": "open", "POST /v1/cache/explain": "open",
    "GET /v1/cache/requests": "places", "GET /v1/cache/requests/{}": "report",
}  # fmt: skip
WITHOUT_KEY = {"GET /", "GET /page/{}", "GET /health"}


@dataclass(frozen=True)
class Kind:
    """A visitor. `sees`: of the request that was made with the key `ann` by the user `one`."""

    sees: Sight
    private: bool = False  # may see everything
    stored: bool = False  # finds the stored response
    let_in: bool = True  # has the server's key, where it needs one
    headers: Mapping[str, str] = field(default_factory=lambda: MADE_BY)
    user: str = ""
    away: bool = False  # on another machine


OWN_PAGE, OTHER_PAGE = {"Origin": "OWN"}, {"Origin": "http://localhost:5173"}
NO_KEY = {
    "own page": Kind("words", private=True, headers=OWN_PAGE),
    "other local origin": Kind("nothing", headers=OTHER_PAGE),
    "no origin": Kind("words", private=True, headers={}),
    "key": Kind("numbers"),
    "other key": Kind("nothing", headers={"x-api-key": "bob"}),
    "user": Kind("words", stored=True, user=USER),
    "other user": Kind("numbers", user="two"),
    "other local origin with the key": Kind("nothing", headers=OTHER_PAGE | MADE_BY, user=USER),
    "other machine": Kind("nothing", user=USER, away=True),
    "through a proxy": Kind("nothing", headers=MADE_BY | {"X-Forwarded-For": "192.0.2.1"}, user=USER),
}
WITH_KEY = {
    "own page": Kind("numbers", private=True, headers=OWN_PAGE | MADE_BY),
    "other local origin": Kind("numbers", headers=OTHER_PAGE | MADE_BY),
    "no origin": Kind("nothing", let_in=False, headers={}),
    "key": Kind("numbers", private=True),
    "other key": Kind("nothing", let_in=False, headers={"x-api-key": "bob"}),
    "user": Kind("words", private=True, stored=True, user=USER),
    "other user": Kind("numbers", private=True, user="two"),
    "other machine": Kind("words", private=True, stored=True, user=USER, away=True),
}


def seen(answer: httpx.Response, text: str, made: str) -> Sight:
    if answer.status_code != 200:  # an error may repeat the id that was asked for
        return "nothing"
    return "words" if SECRET in text else "numbers" if made in text or '"token":100' in text else "nothing"


def expected(right: str, kind: Kind) -> Sight:
    if right == "stored":
        return "words" if kind.stored else "nothing"
    if right == "places" and kind.sees == "words":
        return "numbers"
    return kind.sees if right in {"places", "report", "note"} else "nothing"


@pytest.fixture
def told(service: FakeService, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the server knows of every request quotes its words."""
    miss = Miss("diverged", 100, found=f"a {SECRET}", message=3, field="content")
    report = replace(REPORT, miss=miss)
    monkeypatch.setattr(service, "cache_report", lambda request_id: report)
    parted = replace(miss, expected=f"another {SECRET}")
    monkeypatch.setattr(service, "background", lambda request_id: Background((f"a {SECRET}",), parted))


def ask(server: ApiServer, route: str, kind: Kind, made: str) -> tuple[httpx.Response, str]:
    method, _, path = route.partition(" ")
    url = server.url + path.replace("{*}", "tiny").replace("{}", made if path != "/page/{}" else "start.js")
    headers = {name: value.replace("OWN", server.url) for name, value in kind.headers.items()}
    more: dict[str, Any] = {"params": {"user": kind.user}} if kind.user else {}
    if method == "POST":
        more |= {"files": {"file": b""}} if path.endswith("transcriptions") else {"json": {}}
    with httpx.stream(method, url, headers=headers, timeout=60, **more) as answer:
        feed = answer.headers["content-type"].startswith("text/event-stream")
        text = next(line for line in answer.iter_lines() if line) if feed else answer.read().decode()
    return answer, text


@pytest.mark.usefixtures("told")
@pytest.mark.parametrize(
    ("api_key", "name"), [*((None, name) for name in NO_KEY), *(("ann", name) for name in WITH_KEY)]
)
def test_every_route_shows_a_visitor_what_it_may_see(
    serve: Callable[..., ApiServer], api_key: str | None, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = serve(**({"api_key": api_key} if api_key else {}))
    kind = (WITH_KEY if api_key else NO_KEY)[name]
    asked = {"model": "tiny", "input": f"a {SECRET}", "instructions": f"a {SECRET}", "user": USER}
    made = httpx.post(f"{server.url}/v1/responses", json=asked, headers=MADE_BY, timeout=60).json()["id"]
    if kind.away:
        monkeypatch.setattr(access, "is_loopback", lambda address: False)
    wrong = {}
    for route, right in TABLE.items():
        answer, text = ask(server, route, kind, made)
        let_in = kind.let_in or route in WITHOUT_KEY
        may = let_in and (right != "private" or kind.private)
        refused = answer.status_code in {401, 403}
        sight: Sight = "nothing" if route.startswith("DELETE") else seen(answer, text, made)
        wanted = expected(right, kind) if let_in and not route.startswith("DELETE") else "nothing"
        if sight != wanted or (right in {"open", "private"} and refused == may) or (not let_in and not refused):
            wrong[route] = (answer.status_code, sight, wanted, text[:200])
        if route == "DELETE /v1/responses/{}":
            assert (answer.status_code == 200) == kind.stored, "deleted by who may not, or not deleted"
    assert not wrong


def test_the_table_has_every_route(server: ApiServer) -> None:
    assert {f"{method} {route.pattern}" for route in server.routes for method in route.handlers} == set(TABLE)


@pytest.mark.usefixtures("told")
def test_logs_and_the_list_of_requests_quote_no_words(server: ApiServer, service: FakeService, tmp_path: Any) -> None:
    quoting = replace(REPORT, miss=Miss("diverged", 100, found=f"a {SECRET}"))
    play = service.script
    service.script = lambda request: [
        replace(event, report=quoting) if hasattr(event, "report") else event for event in play(request)
    ]
    asked = {"model": "tiny", "messages": [{"role": "user", "content": f"a {SECRET}"}]}
    answer = httpx.post(f"{server.url}/v1/chat/completions", json=asked, timeout=60)
    assert SECRET in answer.text, "its own report quotes it"
    assert SECRET not in httpx.get(f"{server.url}/v1/cache/requests").text
    logs = [path.read_text() for path in (tmp_path / "logs").rglob("*.jsonl")]
    assert answer.json()["id"] in "".join(logs) and SECRET not in "".join(logs)
