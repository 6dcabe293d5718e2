"""What LiteLLM is given: entries, keys and environment. Which nodes there are, and how `https://` ones are checked."""

from __future__ import annotations

import datetime
import ipaddress
import json
import math
import ssl
import stat
from pathlib import Path
from typing import Any
from urllib.request import proxy_bypass_environment

import httpx
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from start_llm.core.modelmap import PROXIED
from start_llm.core.service import ModelCard
from start_llm.core.settings import Settings, SettingsError, load_settings
from start_llm.proxy.config import (
    ADDITIONS,
    CONFIG,
    master_key,
    proxy_config,
    proxy_environment,
    proxy_model_names,
    usable,
    write_config,
)
from start_llm.proxy.nodes import ServerNode, count_of, detail_of, loaded_of, look_at, nodes_of, state_of
from tests.proxy.node_stub import NodeStub, nodes
from tests.proxy.stub import CARD


def settings(**values: object) -> Settings:
    return load_settings(None, **values)


def test_names_are_the_served_one_and_the_public_one() -> None:
    named = settings(model_path="org/Big-4bit", proxy_model_id=None)
    assert proxy_model_names(named, "Big-4bit") == ["Big-4bit", "openai/org/Big-4bit", "default"]
    assert proxy_model_names(settings(proxy_model_id="mine"), "mine") == ["mine", "default"]
    assert proxy_model_names(settings(), "openai/small") == ["small", "openai/small", "default"]


@pytest.mark.parametrize(("given", "asked"), [("small", "small"), ("openai/small", "small"), ("mine", "default")])
def test_the_server_is_asked_for_a_name_that_it_knows(given: str, asked: str) -> None:
    named = settings(proxy_model_id="mine")
    config = proxy_config(named, server_url="http://h:1", model_id=given, master_key="k", card=CARD)
    assert {entry["litellm_params"]["model"] for entry in config["model_list"][:-1]} == {f"hosted_vllm/{asked}"}
    assert "mine" in [entry["model_name"] for entry in config["model_list"]]


def test_every_entry_leads_to_the_server_and_takes_messages() -> None:
    config = proxy_config(settings(api_key="k1"), server_url="http://h:1/", model_id="m", master_key="sk-1", card=CARD)
    models = {entry["model_name"]: entry["litellm_params"]["model"] for entry in config["model_list"]}
    assert models.pop("*") == f"hosted_vllm/{PROXIED}*"
    assert set(models.values()) == {"hosted_vllm/m"}
    for entry in config["model_list"]:
        assert entry["litellm_params"]["api_base"] == "http://h:1/v1"
        assert entry["litellm_params"]["api_key"] == "k1"
        assert entry["model_info"]["supported_endpoints"] == ["/v1/messages"]
    ids = [entry["model_info"]["id"] for entry in config["model_list"]]
    assert ids[0] == "m" and len(set(ids)) == len(ids) == 4
    assert config["general_settings"]["master_key"] == "sk-1"


@pytest.mark.parametrize("able", [False, True])
def test_the_model_is_said_to_do_what_it_can(able: bool) -> None:
    card = ModelCard("m", 0, 4096, tools=able, reasoning=able, vision=able)
    config = proxy_config(settings(), server_url="http://h:1", model_id="m", master_key="k", card=card)
    for entry in config["model_list"]:
        info = entry["model_info"]
        assert info["max_input_tokens"] == info["max_output_tokens"] == 4096
        names = ("supports_vision", "supports_reasoning", "supports_function_calling")
        assert [info[name] for name in names] == [able, able, able]


def test_the_proxy_shows_life_a_little_more_often_than_was_promised() -> None:
    pinging = settings(sse_ping_seconds=5)
    config = proxy_config(pinging, server_url="http://h:1", model_id="m", master_key="k", card=CARD)
    assert {entry["litellm_params"]["keepalive_seconds"] for entry in config["model_list"]} == {4.0}
    assert config["litellm_settings"]["sse_keepalive_ping_interval_seconds"] == 4.0
    assert config["litellm_settings"]["anthropic_sse_ping_interval_seconds"] == 4.0


def test_the_environment_is_offline_and_not_the_users() -> None:
    given = {"PATH": "/bin", "DATABASE_URL": "postgres://x", "LITELLM_MODE": "DEV", "NO_PROXY": "example.org"}
    made = proxy_environment(given)
    assert "DATABASE_URL" not in made
    assert made["LITELLM_LOCAL_MODEL_COST_MAP"] == "True" and made["LITELLM_MODE"] == "PRODUCTION"
    assert made["NO_PROXY"] == "example.org,127.0.0.1,localhost,::1" and made["no_proxy"] == "127.0.0.1,localhost,::1"
    assert given["LITELLM_MODE"] == "DEV"


def test_nodes_are_asked_without_the_users_http_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    """LiteLLM goes by the environment: another machine would see the nodes' keys."""
    nodes = ["http://Mac-2:8080", "https://192.168.1.12", "http://[fd00::12]:8080"]
    made = proxy_environment({"HTTP_PROXY": "http://squid:3128"}, nodes)
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.setenv(name, made[name])
    assert all(proxy_bypass_environment(httpx.URL(node).host) for node in nodes)
    assert not proxy_bypass_environment("api.example.org")


def test_files_are_the_users_own(tmp_path: Path) -> None:
    write_config(tmp_path, {"a": 1}, {"b": 2})
    files = [tmp_path / CONFIG, tmp_path / ADDITIONS]
    assert [json.loads(file.read_text()) for file in files] == [{"a": 1}, {"b": 2}]
    assert {stat.S_IMODE(file.stat().st_mode) for file in files} == {0o600}


def test_a_key_is_made_once_and_kept(tmp_path: Path) -> None:
    env = tmp_path / ".env"
    assert master_key(settings(litellm_master_key="mine"), env) == "mine" and not env.exists()
    first = master_key(settings(), env)
    assert first.startswith("sk-") and len(first) > 30
    assert env.read_text() == f"LITELLM_MASTER_KEY={first}\n"
    assert stat.S_IMODE(env.stat().st_mode) == 0o600
    assert master_key(settings(), env) == first
    assert load_settings(env).litellm_master_key == first


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("A=1\nLITELLM_MASTER_KEY=\n# note\nB=2", "A=1\nLITELLM_MASTER_KEY={}\n# note\nB=2"),
        ("export LITELLM_MASTER_KEY=off\nA=1\n# note\nB=2\n", "LITELLM_MASTER_KEY={}\nA=1\n# note\nB=2\n"),
        ("A=1\n# note\nB=2", "A=1\n# note\nB=2\nLITELLM_MASTER_KEY={}\n"),
    ],
)
def test_only_that_line_changes(tmp_path: Path, before: str, after: str) -> None:
    env = tmp_path / ".env"
    env.write_text(before)
    env.chmod(0o644)
    key = master_key(settings(), env)
    assert env.read_text() == after.format(key)
    assert stat.S_IMODE(env.stat().st_mode) == 0o600
    assert [path.name for path in tmp_path.iterdir()] == [".env"]


def test_a_linked_file_stays_a_link(tmp_path: Path) -> None:
    real = tmp_path / "real"
    real.write_text("A=1\n")
    link = tmp_path / ".env"
    link.symlink_to(real)
    key = master_key(settings(), link)
    assert link.is_symlink() and real.read_text() == f"A=1\nLITELLM_MASTER_KEY={key}\n"


def test_the_env_file_is_replaced_as_a_whole_and_written_to_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A power failure behind the first start must not cost somebody's settings."""
    env = tmp_path / ".env"
    env.write_text("A=1\n")
    written: list[tuple[Path, bool]] = []

    def no_room(path: Path, data: bytes, *, sync: bool = False) -> None:
        written.append((path, sync))
        raise OSError("no room")

    monkeypatch.setattr("start_llm.proxy.config.write_atomic", no_room)
    assert master_key(load_settings(None), env).startswith("sk-")
    assert written == [(env, True)] and env.read_text() == "A=1\n"


def test_a_key_that_cannot_be_kept_is_good_for_this_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    env = tmp_path / "missing" / ".env"
    key = master_key(settings(), env)
    assert key.startswith("sk-")
    assert "LITELLM_MASTER_KEY" in caplog.text and key not in caplog.text
    no_text = tmp_path / ".env"
    no_text.write_bytes(b"A=\xff\xfe\n")
    assert master_key(settings(), no_text).startswith("sk-") and no_text.read_bytes() == b"A=\xff\xfe\n"


# --- nodes --------------------------------------------------------------------


HERE = "http://127.0.0.1:8080"


def names(**values: Any) -> list[str]:
    return [node.name for node in nodes_of(settings(**values), HERE)]


def test_a_node_that_does_not_know_its_name_says_what_helps() -> None:
    found = httpx.Response(403, json={"error": {"message": "Host 'mac-2:8080' is not this machine.\nAdd it."}})
    state, said = state_of(found)
    assert (state, detail_of(said)) == ("refused", "Host 'mac-2:8080' is not this machine. Add it.")
    for answer in (httpx.Response(403, text="Forbidden"), httpx.Response(200, text="hello")):
        assert state_of(answer)[0] == "foreign"
    assert state_of(httpx.Response(404, json={"state": "ready"}))[0] == "foreign"
    assert state_of(httpx.ReadTimeout("slow"))[0] == "silent"


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
