"""Which nodes there are, and how `https://` ones are checked."""

from __future__ import annotations

import datetime
import ipaddress
import math
import ssl
from pathlib import Path
from typing import Any

import httpx
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from start_llm.core.settings import SettingsError
from start_llm.proxy.config import proxy_config, usable
from start_llm.proxy.nodes import ServerNode, count_of, detail_of, loaded_of, look_at, nodes_of, state_of
from tests.proxy.node_stub import NodeStub, nodes
from tests.proxy.stub import CARD
from tests.proxy.test_config import settings

HERE = "http://127.0.0.1:8080"


def names(**values: Any) -> list[str]:
    return [node.name for node in nodes_of(settings(**values), HERE)]


def test_a_node_that_does_not_know_its_name_says_what_helps() -> None:
    found = httpx.Response(403, json={"error": {"message": "Host 'mac-2:8080' is not this machine.\nAdd it."}})
    state, said = state_of(found)
    assert (state, detail_of(said)) == ("refused", "Host 'mac-2:8080' is not this machine. Add it.")
    assert state_of(httpx.Response(403, text="Forbidden"))[0] == "foreign"


def test_this_server_is_a_node() -> None:
    assert names() == ["127.0.0.1:8080"]
    assert names(nodes="http://mac-1:8080, https://mac-2/") == ["127.0.0.1:8080", "mac-1:8080", "mac-2"]
    assert names(nodes="http://mac-1:8080", nodes_self="off") == ["mac-1:8080"]
    assert names(nodes="http://192.168.1.12:8080,http://[fe80::1]")[1:] == ["192.168.1.12:8080", "[fe80::1]"]


@pytest.mark.parametrize("local", ["http://localhost:8080", HERE, "http://[::1]:8080"])
def test_this_server_counts_once(local: str) -> None:
    for own in ("on", "off"):
        assert names(nodes=f"http://mac-1:8080,{local}", nodes_self=own) == ["127.0.0.1:8080", "mac-1:8080"]


def test_each_node_has_its_own_key() -> None:
    found = nodes_of(settings(nodes="http://mac-1:8080", nodes_api_key="theirs", api_key="ours"), HERE)
    assert [node.key for node in found] == ["ours", "theirs"]
    assert "theirs" not in repr(found)
    # Without NODES_API_KEY other machines do not get to know this one's.
    assert [node.key for node in nodes_of(settings(nodes="http://mac-1:8080", api_key="ours"), HERE)] == ["ours", ""]


@pytest.mark.parametrize(
    "bad",
    [
        *("mac-1:8080", "ftp://mac-1", "http://mac-1:8080/v1", "http://mac-1:99999", "http://"),
        *("http://999.1.1.1:80", "http://[::1:2::3]", "http://1.2.3"),
    ],
)
def test_a_bad_address_is_one_sentence(bad: str) -> None:
    with pytest.raises(
        SettingsError, match=r"NODES=.*is no address of a node; give scheme, host and port, e.g."
    ) as found:
        settings(nodes=f"http://mac-2:8080,{bad}")
    assert "\n" not in str(found.value)


def test_an_address_with_a_password_is_refused_without_being_shown() -> None:
    with pytest.raises(SettingsError, match="an address has no user and no password") as found:
        settings(nodes="http://mac-2:8080,http://user:pw-of-mac@mac-1")
    assert "pw-of-mac" not in str(found.value)


def test_an_address_stands_there_once() -> None:
    with pytest.raises(SettingsError, match="'http://mac-1:8080' stands there twice"):
        settings(nodes="http://mac-1:8080,http://mac-1:8080/")
    with pytest.raises(SettingsError, match="NODES_SELF='maybe': it must be 'on' or 'off'"):
        settings(nodes_self="maybe")


def test_litellm_has_an_entry_for_each_node_and_model() -> None:
    given = settings(nodes="http://mac-1:8080,https://mac-2", nodes_api_key="theirs", api_key="ours")
    config = proxy_config(given, server_url=HERE, model_id="m", master_key="k", card=CARD)
    places = {
        (entry["model_name"], entry["model_info"]["node"]): entry["litellm_params"] for entry in config["model_list"]
    }
    assert {name for name, _ in places} == {"m", "openai/m", "default", "*"}
    assert {node for _, node in places} == {"127.0.0.1:8080", "mac-1:8080", "mac-2"} and len(places) == 12
    assert (places["m", "mac-2"]["api_base"], places["m", "mac-2"]["api_key"]) == ("https://mac-2/v1", "theirs")
    assert places["m", "127.0.0.1:8080"]["api_key"] == "ours"
    ids = [entry["model_info"]["id"] for entry in config["model_list"]]
    assert len(set(ids)) == 12 and ids[0] == "m"
    again = proxy_config(given, server_url=HERE, model_id="m", master_key="other", card=CARD)
    assert ids == [entry["model_info"]["id"] for entry in again["model_list"]], "so that two proxies find one response"


def test_what_cannot_work_is_said_at_the_start(tmp_path: Path) -> None:
    said: list[str] = []
    assert usable(settings(nodes="http://mac-1:8080"), said.append).nodes
    assert not usable(settings(nodes="http://mac-1:8080", proxy="off"), said.append).nodes
    assert "http://mac-1:8080 and this server" in said[0] and "PROXY=off" in said[1] and len(said) == 2


def test_something_else_at_that_address() -> None:
    assert state_of(httpx.Response(200, text="hello"))[0] == "foreign"
    assert state_of(httpx.Response(404, json={"state": "ready"}))[0] == "foreign"
    assert state_of(httpx.ReadTimeout("slow"))[0] == "silent"


@pytest.mark.parametrize("value", [None, "x", [1], -3, math.nan, math.inf])
def test_a_count_that_is_none_is_zero(value: object) -> None:
    assert count_of({"running": value}, "running") == 0 and count_of([value], "running") == 0
    assert count_of({"running": 3.0}, "running") == 3


@pytest.mark.parametrize("details", ["ready", ["ready"], None, 1])
def test_details_of_a_model_that_are_no_object(details: object) -> None:
    assert loaded_of([{"id": "a", "details": details}, {"id": "b", "details": {"state": "ready"}}]) == ("b",)


# --- https ------------------------------------------------------------------------------------


def make_certificate(folder: Path) -> Path:
    """A certificate of 127.0.0.1 that nobody but itself has signed, with its key in the same file."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "a node")])
    now = datetime.datetime.now(datetime.UTC)
    made = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    form = (serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    path = folder / "node.pem"
    path.write_bytes(
        made.public_bytes(serialization.Encoding.PEM) + key.private_bytes(serialization.Encoding.PEM, *form)
    )
    return path


def with_tls(stub: NodeStub, folder: Path) -> tuple[ServerNode, Path]:
    certificate = make_certificate(folder)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate)
    stub.use_tls(context)
    return ServerNode(f"https://{stub.name}", "key"), certificate


def test_certificates_of_your_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with nodes(1) as [stub]:
        node, own = with_tls(stub, tmp_path)
        assert [found["state"] for found in look_at([node])] == ["gone"], "a stranger's certificate"
        assert not stub.keys, "it was not asked anything"
        monkeypatch.setenv("SSL_CERT_FILE", str(own))
        assert [found["state"] for found in look_at([node])] == ["ready"]
