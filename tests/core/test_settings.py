"""Settings: precedence, bad values, and that every one is documented. MODEL_MAP: which entry decides."""

from __future__ import annotations

import os
import re
from dataclasses import fields
from pathlib import Path

import pytest
from pydantic import ValidationError

from scripts.settings_docs import ROOT, env_example, page
from start_llm.core.modelmap import MOST_NAME, ModelMap, parse_model_map
from start_llm.core.request import Sampling
from start_llm.core.settings import RETIRED, SECRETS, Settings, SettingsError, doubtful_names, load_settings
from start_llm.service.control import changed_settings


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in Settings.model_fields:
        monkeypatch.delenv(name.upper(), raising=False)


def test_environment_wins_over_env_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / ".env"
    file.write_text("MLX_PORT=9001\nHTTP_THREADS=3\n")
    monkeypatch.setenv("MLX_PORT", "9002")
    settings = load_settings(file)
    assert (settings.mlx_port, settings.http_threads) == (9002, 3)
    file.write_bytes(b"\xef\xbb\xbfHTTP_THREADS=4\r\n")  # as some editors write it
    assert load_settings(file).http_threads == 4


def test_single_quotes_keep_what_they_hold_and_a_pipe_is_refused(tmp_path: Path) -> None:
    (file := tmp_path / ".env").write_text("HTTP_THREADS=3\nexport API_KEY = 'a${HTTP_THREADS}b'\n")
    assert load_settings(file).api_key == "a${HTTP_THREADS}b"
    file.write_text("HTTP_THREADS=3\nAPI_KEY='x'\nAPI_KEY=\"a${HTTP_THREADS}b\"\n")
    assert load_settings(file).api_key == "a3b"
    file.unlink()
    os.mkfifo(file)
    with pytest.raises(SettingsError, match="must be a file; a pipe"):
        load_settings(file)


@pytest.mark.parametrize(
    "given", ["http://me:hunter2@mac-2:8080", f"http://me:hunter2,{'x' * 100}@b:1", "http://a:1,b@hunter2"]
)
def test_a_password_in_an_address_is_not_shown(given: str) -> None:
    with pytest.raises(SettingsError, match=r"NODES=.*no password") as caught:
        load_settings(None, nodes=given)
    assert "hunter2" not in str(caught.value)


def test_every_key_is_a_secret() -> None:
    assert {name for name in Settings.model_fields if name.endswith("_key")} == set(SECRETS)


@pytest.mark.parametrize("line", ["MLX_PORT 8099", 'MLX_PORT="8099', "MLX_PORT: 8099", "MLX_PORT", "MLX_PORT='80'99"])
def test_a_line_that_says_nothing_is_no_setting_that_is_passed_over(line: str, tmp_path: Path) -> None:
    (file := tmp_path / ".env").write_text(f"# a port\n\n{line}\nHTTP_THREADS=3\n")
    with pytest.raises(SettingsError) as error:
        load_settings(file)
    name = "MLX_PORT:" if ":" in line else "MLX_PORT"
    assert str(error.value) == f"{file}: line 3 ({name}) must be NAME=value; quotes come in pairs."


def test_all_mistakes_of_a_file_are_told_at_once(tmp_path: Path) -> None:
    (file := tmp_path / ".env").write_text("MLX_PROT=1\nHTTP_THREADS=0\nKV_BITS=5\nLOG_ROOT=/x\n")
    with pytest.raises(SettingsError) as error:
        load_settings(file)
    lines = str(error.value).splitlines()
    assert len(lines) == 3 and all(any(n in line for line in lines) for n in ("MLX_PROT", "HTTP_THREADS", "KV_BITS"))


@pytest.mark.parametrize(
    ("name", "value", "allowed"),
    [
        ("KV_BITS", "5", "4 or 8"),
        ("DRAFT_MODEL", "", "it must have at least 1 character"),
        ("MLX_PORT", "no", "a whole number"),
        ("CACHE_DRIFT_POLICY", "maybe", "'append' or 'strict'"),
        ("HTTP_THREADS", "0", "it must be at least 1"),
        ("DEFAULT_TOP_P", "1.5", "it must be at most 1"),
    ],
)
def test_bad_value_names_variable_value_and_what_is_allowed(
    name: str, value: str, allowed: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(SettingsError) as error:
        load_settings(None)
    assert all(word in str(error.value) for word in (name, value, allowed))


@pytest.mark.parametrize(
    ("variable", "value", "name", "read"),
    [
        *(("KV_BITS", word, "kv_bits", None) for word in ("OFF", "off", "", "none")),
        ("KEEP_AWAKE", " OFF", "keep_awake", "off"),
        ("LOG_LEVEL", "Info", "log_level", "info"),
        ("START_LLM_CACHE_DIR", "/cache", "disk_dir", Path("/cache/kv")),
        ("KV_DISK_DIR", "off", "disk_dir", None),
        ("KV_DISK_DIR", "/somewhere/else", "disk_dir", Path("/somewhere/else")),
    ],
)
def test_what_is_read_of_a_variable(monkeypatch, variable: str, value: str, name: str, read: object) -> None:
    monkeypatch.setenv(variable, value)
    assert getattr(load_settings(None), name) == read


def test_counts_are_told_as_parts_of_what_clients_assume(monkeypatch: pytest.MonkeyPatch) -> None:
    assert load_settings(None).context_scale_for(40_000) == 1.0
    assert load_settings(None, context_scale=3.0).context_scale_for(40_000) == 3.0
    monkeypatch.setenv("CONTEXT_SCALE", "auto")
    settings = load_settings(None)
    assert settings.context_scale_for(40_000) == 5.0
    assert settings.context_scale_for(1_000_000) == 1.0


def test_frozen() -> None:
    with pytest.raises(ValidationError):
        load_settings(None).mlx_port = 1  # type: ignore[misc]


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("DEFAULT_MAX_TOKEN", "the nearest one is DEFAULT_MAX_TOKENS."),
        ("mlx_prot", "the nearest one is MLX_PORT."),
        ("PORT", "the nearest one is MLX_PORT."),
        ("VLM_CACHE_DEBUGS", ".env.example lists all of them."),  # an older name is not advised
        ("ZZZ", ".env.example lists all of them."),
    ],
)
def test_an_unknown_name_in_the_file_is_told_with_the_nearest_one(name: str, says: str, tmp_path: Path) -> None:
    file = tmp_path / ".env"
    file.write_text(f"MLX_PORT=1\n{name}=5\n")
    with pytest.raises(SettingsError) as error:
        load_settings(file)
    assert str(error.value) == f"{file}: {name} is no setting of start_llm; {says}"


def test_names_of_old_configurations_are_doubted_and_not_refused(tmp_path: Path) -> None:
    file = tmp_path / ".env"
    file.write_text("PROMPT_CACHE_BLOCK_SIZE=16\nmlx_port=7\n")
    assert load_settings(file).mlx_port == 7
    (doubt,) = doubtful_names(file)
    assert doubt.startswith("PROMPT_CACHE_BLOCK_SIZE does nothing any more: ")


def test_a_variable_of_the_process_is_doubted_if_it_was_surely_meant(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("KV_BIT", "MODEL_PATHS", "OPENAI_API_KEY", "MLX_HOSTFILE", "HTTP_PROXY", "LANG", "MLX_PORT"):
        monkeypatch.setenv(name, "8080")
    load_settings(None)
    assert sorted(doubt.split()[0] for doubt in doubtful_names(None)) == ["KV_BIT", "MODEL_PATHS"]


def test_every_setting_is_read_somewhere() -> None:
    package = ROOT / "start_llm"
    text = "\n".join(file.read_text("utf-8") for file in package.rglob("*.py"))
    sampling = (
        {f"default_{field.name}" for field in fields(Sampling)}
        if 'getattr(settings, f"default_{name}")' in text
        else set()
    )
    unread = [name for name in Settings.model_fields if not re.search(rf"\.{name}\b", text)]
    assert set(unread) - sampling == set()


@pytest.mark.parametrize("name", ["DUMP_REQUESTS", "VLM_CACHE_DEBUG"])
def test_an_older_name_means_the_same(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    env = tmp_path / ".env"
    env.write_text(f"{name}=true\n")
    assert load_settings(env).dump_requests and not load_settings(None).dump_requests
    monkeypatch.setenv(name, "on")
    assert load_settings(None).dump_requests and doubtful_names(env) == []
    assert not load_settings(None, dump_requests=False).dump_requests
    assert changed_settings(load_settings(None)) == {"DUMP_REQUESTS": "True"}


def test_every_setting_has_a_comment() -> None:
    assert [name for name, field in Settings.model_fields.items() if not field.description] == []


def test_documents_match_the_settings() -> None:
    text = (ROOT / "docs" / "settings.md").read_text("utf-8")
    assert (ROOT / ".env.example").read_text("utf-8") == env_example()
    assert page(text) == text
    missing = [n for n in Settings.model_fields if f"`{n.upper()}`" not in text or n.upper() not in env_example()]
    assert missing == []


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"kv_events": "tcp://*:65535"}, "KV_EVENTS='tcp://*:65535': the port must be less than 65535"),
        ({"kv_events": "tcp://*:99999"}, "KV_EVENTS='tcp://*:99999': the port must be less than 65535"),
        ({"hosts": "-V,mac-2"}, "HOSTS='-V,mac-2': '-V' is no host"),
    ],
)
def test_an_address_that_cannot_work_is_refused_at_once(given: dict[str, str], says: str) -> None:
    with pytest.raises(SettingsError, match=re.escape(says)):
        load_settings(None, **given)
    assert load_settings(None, kv_events="tcp://*:65534", hosts="mac-1,_b").kv_events == "tcp://*:65534"


FIRST_DESIGN = """
MODEL_PATH=lmstudio-community/GLM-4.7-Flash-MLX-4bit
MODEL_FAMILY=glm4
PROXY_MODEL_ID=openai/lmstudio-community/GLM-4.7-Flash-MLX-4bit
MLX_HOST=127.0.0.1
MLX_PORT=8080
PROXY_PORT=4000
PROXY_STARTUP_WAIT_SECONDS=2.0
MAX_KV_SIZE=196608
KV_GROUP_SIZE=64
KV_BITS=OFF
KV_QUANT_SCHEME=uniform
QUANTIZED_KV_START=5000
PROMPT_CACHE_MAX_ENTRIES_GLOBAL=24
PROMPT_CACHE_MAX_ENTRIES_PER_SESSION=2
PROMPT_CACHE_TTL_SECONDS=1800
PROMPT_CACHE_SESSION_MAX_IDLE_SECONDS=1800
PROMPT_CACHE_BLOCK_SIZE=16
CACHE_USE_BLOCK_INDEX=true
CACHE_CANONICALIZE_TOOL_CONTEXT=true
CACHE_VLM_IMAGE_IDENTITY=true
CACHE_SESSION_PARTITIONING=true
CACHE_NORM_SAFETY_CHECK=false
NORMALIZE_WRITE_TOOL_CONTENT_FOR_PROMPT=false
DEFAULT_TEMPERATURE=0.1
DEFAULT_TOP_P=0.9
DEFAULT_TOP_K=40
DEFAULT_MIN_P=0.05
DEFAULT_REPETITION_PENALTY=1.08
DEFAULT_REPETITION_CONTEXT_SIZE=256
DEFAULT_MAX_TOKENS=2048
DEFAULT_THINKING=true
PRESERVE_THINKING=true
GENERATION_WATCHDOG_SECONDS=600
ENABLE_REQUEST_LOGGING=true
LOG_ROOT=logs
VLM_CACHE_DEBUG=false
"""
"""All variables of the first description of this project, with its values."""


def test_a_file_of_the_first_design_starts_and_what_does_nothing_is_told(tmp_path: Path) -> None:
    file = tmp_path / ".env"
    file.write_text(FIRST_DESIGN)
    settings = load_settings(file)
    assert (settings.kv_group_size, settings.default_max_tokens, settings.dump_requests) == (64, 2048, False)
    told = {sentence.split()[0] for sentence in doubtful_names(file)}
    assert told == set(re.findall(r"^\w+", FIRST_DESIGN, re.MULTILINE)) & RETIRED.keys() and len(told) == 11


@pytest.mark.parametrize("line", [line[2:] for line in env_example().splitlines() if re.match(r"# [A-Z_0-9]+=", line)])
def test_every_line_of_the_example_may_be_uncommented(line: str, tmp_path: Path) -> None:
    file = tmp_path / ".env"
    file.write_text(f"{line}\n")
    assert load_settings(file) == load_settings(None)


ORDER = "claude-haiku-*=small, *-mini = owner/Small-1B,\nclaude-*=large,"
SIGNS = "claude-opus[1m]=large,gpt-?=small,hub/*=far"
LONG = "*a*a*a*a*a*a*b=small"
SIDE = "@SIDE=small,*-mini=other"


@pytest.mark.parametrize(
    ("table", "name", "model"),
    [
        (ORDER, "claude-haiku-4-5-20251001", "small"),
        (ORDER, "claude-opus-4-1", "large"),
        (ORDER, "GPT-5-Mini", "owner/Small-1B"),  # case does not matter
        (ORDER, "openai/gpt-5-mini", "owner/Small-1B"),  # nor does the provider in front
        (ORDER, "gpt-5-minimal", None),
        (ORDER, "", None),
        ("a=b,b=a", "a", "b"),  # what comes out is not looked up again
        ("a=b,b=a", "b", "a"),
        (SIGNS, "claude-opus[1m]", "large"),  # the star and the question mark alone are signs
        (SIGNS, "claude-opus1", None),
        (SIGNS, "gpt-5", "small"),
        (SIGNS, "gpt-51", None),
        (SIGNS, "hub/x", "far"),
        (SIGNS, "other/hub", None),
        (LONG, "a" * 2_000_000, None),  # a name of any length costs nothing
        (LONG, "a" * MOST_NAME, None),
        (LONG, "a" * 200 + "b", "small"),
        (LONG, "aaaaab", None),
        (SIDE, "@side", None),  # no name fits it
        (SIDE, "openai/@side", None),
    ],
    ids=lambda value: str(value)[:20],
)
def test_the_first_pattern_that_fits_decides(table: str, name: str, model: str | None) -> None:
    assert parse_model_map(table).resolve(name) == (name if model is None else model)


def test_entries_stand_in_their_order_and_one_is_for_side_requests() -> None:
    pairs = [("claude-haiku-*", "small"), ("*-mini", "owner/Small-1B"), ("claude-*", "large")]
    assert [(entry.pattern, entry.model) for entry in parse_model_map(ORDER).entries] == pairs
    table = parse_model_map(SIDE)
    assert table.side == "small" and [entry.pattern for entry in table.entries] == ["@side", "*-mini"]
    assert parse_model_map("side=small,*@side=small").side is None


def test_an_empty_table_changes_nothing() -> None:
    assert parse_model_map(" , \n") == ModelMap() == Settings(_env_file=None).models_by_name  # type: ignore[call-arg]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("claude-haiku-*", "'claude-haiku-*' is no entry; write pattern=model"),
        ("a=", "'a=' is no entry"),
        ("=small", "'=small' is no entry"),
        ("a b=c", "a pattern has no spaces in it"),
        ("a=small,b=*", "'*' is no model's name"),
        ("a=b=c", "'b=c' is no model's name"),
        ("a=b,A=c", "'A' stands in the table twice"),
        ("@side=b,@Side=c", "'@Side' stands in the table twice"),
        ("x" * 300 + "=b", "at most 256 characters"),
    ],
)
def test_a_bad_entry_is_told_in_one_sentence(text: str, says: str) -> None:
    with pytest.raises(SettingsError) as caught:
        load_settings(None, model_map=text)
    assert says in str(caught.value) and str(caught.value).startswith("MODEL_MAP=")
    assert "\n" not in str(caught.value)
