"""The OpenAPI document: every route is in it, and what real clients send fits it."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator
from jsonschema import ValidationError as JsonSchemaError
from referencing import Registry, Resource
from referencing.jsonschema import DRAFT202012

from scripts import openapi_docs
from scripts.openapi_docs import OPERATIONS, error_statuses
from start_llm.api.server import ApiServer
from tests.api.conftest import Connect
from tests.api.test_traces import FOLDER, recorded


@pytest.fixture
def document(server: ApiServer, connect: Connect) -> dict[str, Any]:
    status, headers, body = connect(server).get("/openapi.json").response()
    assert status == 200 and headers["content-type"] == "application/json"
    found = json.loads(body)
    assert isinstance(found, dict)
    return found


def check(document: dict[str, Any], name: str, value: Any) -> None:
    whole: Any = Resource(contents=document, specification=DRAFT202012)
    schema = {"$ref": f"urn:api#/components/schemas/{name}"}
    Draft202012Validator(schema, registry=Registry().with_resource("urn:api", whole)).validate(value)


def test_every_route_is_in_it_and_every_description_is_of_a_route(server: ApiServer, document: dict[str, Any]) -> None:
    assert document["openapi"] == "3.1.0"
    assert set(document["paths"]) == set(server.routes.patterns)
    described = {f"{m} {route.pattern}" for route in server.routes for m in route.handlers}
    assert set(OPERATIONS) <= described
    operations = [op for item in document["paths"].values() for name, op in item.items() if name != "parameters"]
    ids = [operation["operationId"] for operation in operations]
    assert len(ids) == len(set(ids)) == len(described)
    assert {400, 401, 404, 413, 429, 499, 501, 503, 507} <= error_statuses().keys()


def test_docs_and_routes_agree(server: ApiServer) -> None:
    text = (Path(__file__).parents[2] / "docs" / "api.md").read_text(encoding="utf-8")
    rows = [line.split("|")[1] for line in text.splitlines() if line.startswith("| `")]
    assert {path for row in rows for path in re.findall(r"/[\w/{}.]*", row)} == set(server.routes.patterns)


def test_both_files_are_as_the_script_writes_them() -> None:
    for path, wanted in openapi_docs.files().items():
        assert path.read_text("utf-8") == wanted, "run scripts/openapi_docs.py"


def test_references_lead_somewhere_and_schemas_are_sound(document: dict[str, Any]) -> None:
    schemas = document["components"]["schemas"]
    text = json.dumps(document)
    for kind in ("schemas", "responses"):
        names = {part.partition('"')[0] for part in text.split(f"#/components/{kind}/")[1:]}
        assert names <= set(document["components"][kind])
    for schema in schemas.values():
        Draft202012Validator.check_schema(schema)


def test_a_wrong_body_does_not_fit(document: dict[str, Any]) -> None:
    check(document, "ChatBody", {"messages": [{"role": "user", "content": "x"}], "session_id": "a"})
    for wrong in ({}, {"messages": []}, {"messages": [{"role": 1}]}, {"messages": [{"role": "user"}], "top_p": 2}):
        with pytest.raises(JsonSchemaError):
            check(document, "ChatBody", wrong)


def test_recorded_requests_fit(document: dict[str, Any]) -> None:
    if not FOLDER.is_dir():
        pytest.skip("no recorded traces here")
    count = 0
    for record in recorded("*"):
        operation = OPERATIONS.get(f"POST {record.get('path', '').partition('?')[0]}")
        if operation is not None and operation.body is not None and "body" in record:
            check(document, operation.body.__name__, record["body"])
            count += 1
    assert count > 0


def test_the_page_for_people_needs_no_script_and_no_style(
    server: ApiServer, document: dict[str, Any], connect: Connect
) -> None:
    status, headers, body = connect(server).get("/docs").response()
    assert status == 200 and headers["content-type"].startswith("text/html")
    assert "default-src 'none'" in headers["content-security-policy"]
    text = body.decode()
    assert all(path in text for path in document["paths"]) and "<script" not in text and "style" not in text
