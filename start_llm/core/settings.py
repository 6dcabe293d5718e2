"""Every setting: name, default, meaning. Read once, frozen; the environment wins over `.env`."""

from __future__ import annotations

import difflib
import os
import re
import tomllib
from pathlib import Path
from typing import Annotated, Any, Literal

from dotenv import dotenv_values
from dotenv.parser import parse_stream
from pydantic import AliasChoices, BaseModel, ConfigDict, Field, ValidationError

from start_llm.core import setting_types as kinds
from start_llm.core.errors import Explained
from start_llm.core.modelmap import ModelMap, parse_model_map
from start_llm.core.paths import expanded

ASSUMED_CONTEXT = 200_000
"""Tokens that clients of the Anthropic API take every model to have room for."""
SECRETS = ("api_key", "litellm_master_key", "nodes_api_key")
"""Settings whose values nobody is shown."""
_TABLE = tomllib.loads(Path(__file__).with_name("retired.toml").read_text("utf-8"))["retired"]
RETIRED: dict[str, str] = {name: each["why"] for each in _TABLE for name in each["names"]}
"""Names of older configurations, and why there is nothing to set any more."""
_QUOTED = re.compile(r"\s*(?:export\s+)?(?:'[^']+'|[^=#\s]+)\s*=\s*'")  # a value in single quotes
_LIKE = 0.6  # how alike the nearest name must be to be worth telling
_SURELY_MEANT = 0.85  # and so that a variable of the process, where anything may stand, was meant to be ours
_PLAIN: dict[str, str] = tomllib.loads(Path(__file__).with_name("plain_words.toml").read_text("utf-8"))


class SettingsError(Explained, ValueError):
    """A setting has a bad value. The message names the variable, the value and what is allowed."""

    exit_code = 2


class Settings(BaseModel):
    """One frozen object, built once by `app`. Field names are the variables' names in lower case. It reads no
    environment and no file: `load_settings` does.

    The text below a field is its description in the documents and on the page.
    """

    model_config = ConfigDict(extra="ignore", frozen=True, validate_default=True, use_attribute_docstrings=True)

    # Model
    model_path: Annotated[str | None, kinds.OffOr] = None
    """Hugging Face repository or local folder. Unset: the embedded SmolLM2-135M."""
    model_family: Annotated[str | None, kinds.OffOr] = None
    """qwen3, glm4, llama and others (docs/models.md), or generic. Unset: detected from the model."""
    model_probe: Literal["on", "off"] = "on"
    """on: the first load of a model asks it to call a tool; its answer shows how its calls are read. off: its
    template and family show it."""
    adapter_path: Annotated[str | None, kinds.OffOr] = None
    """Folder of a LoRA adapter (mlx_lm.lora's) that MODEL_PATH is served with; a vision model is then served as a text
    model."""
    served_model_name: Annotated[str | None, kinds.OffOr] = None
    """The name clients see. Unset: the last part of MODEL_PATH."""
    model_map: Annotated[str, kinds.ModelMapText] = ""
    """Table of names: pattern=model, separated by commas; the first pattern that fits counts, e.g.
    claude-haiku-*=small,*-mini=small. @side=small is for side requests. See docs/models.md."""
    embedding_model: Annotated[str | None, kinds.OffOr] = None
    """Repository or folder of an encoder for /v1/embeddings; needs the extra embeddings."""
    transcription_model: Annotated[str | None, kinds.OffOr] = None
    """Repository or folder of the Whisper model that whisper-1 and the like mean in /v1/audio/transcriptions; needs the
    extra audio."""
    speech_model: Annotated[str | None, kinds.OffOr] = None
    """Repository or folder of the Soprano model that tts-1 and the like mean in /v1/audio/speech; needs the extra
    audio."""
    preload_models: Annotated[str, kinds.ModelNames] = ""
    """Models that are loaded at the start beside MODEL_PATH: names, separated by commas."""
    pinned_models: Annotated[str, kinds.ModelNames] = ""
    """Models that are never unloaded for others once they are loaded: names, separated by commas."""
    model_ttl_seconds: kinds.Seconds = 0.0
    """A model idle for this many seconds is unloaded; its KV goes to disk (0 = never)."""
    pool_wait_seconds: kinds.Seconds = 30.0
    """Seconds a request waits for memory for its model while other models work; then it gets 507 (0 = it does not
    wait)."""
    max_loaded_models: kinds.Count = 0
    """Most models that are loaded at the same time (0 = as many as fit)."""
    pool_memory_bytes: Annotated[Annotated[int, Field(ge=2**20)] | None, kinds.OffOr] = None
    """Bytes that weights and KV of all loaded models may take together. Unset: what the machine allows."""
    trust_remote_code: bool = False
    """Run Python code that a checkpoint brings (its config's model_file)."""
    start_llm_cache_dir: Path = Path("~/.cache/start_llm")
    """Where converted models and stored KV live."""

    # Server
    mlx_host: str = "127.0.0.1"
    """Address the server binds to."""
    mlx_port: kinds.Port = 8080
    """Port of the server; 0 picks a free one."""
    ollama_port: Annotated[kinds.Port | None, kinds.OffOr] = None
    """A second port of the server, for clients that look for Ollama at its own, 11434. Unset: none."""
    http_threads: Annotated[int, Field(ge=1, le=1024)] = 16
    """HTTP worker threads; 1 is a strictly single-threaded accept loop."""
    api_key: Annotated[str | None, kinds.OffOr, kinds.Key] = None
    """If set, clients must send it as a bearer token."""
    allow_open_bind: bool = False
    """Let the server listen beyond this machine (MLX_HOST) without API_KEY: to everybody there."""
    allowed_hosts: Annotated[str, kinds.HostNames] = ""
    """Host names, separated by commas, by which clients may address the server, beside localhost and IP addresses; * is
    any, and gives up the protection against web pages that rebind a name."""
    max_concurrency: Annotated[int, Field(ge=1, le=256)] = 8
    """Requests that are computed at the same time."""
    max_queue: kinds.Count = 64
    """Requests that may wait; more get 429."""
    sse_ping_seconds: Annotated[float, Field(gt=0)] = 5.0
    """A streaming answer shows life at least this often, in seconds."""
    prefill_step_size: Literal["auto"] | Annotated[int, Field(ge=16)] = "auto"
    """Prompt tokens per prefill chunk. auto: large while nobody else waits, small when somebody does."""
    idle_shutdown_minutes: Annotated[float, Field(ge=0)] = 0.0
    """The server ends after this many minutes without a request and without a launched agent; 0 = never."""
    keep_awake: Annotated[Literal["on", "off"], kinds.Lower] = "on"
    """on: the machine does not go to sleep while requests are answered and five minutes behind them."""
    context_scale: Literal["auto"] | Annotated[float, Field(gt=0, le=100)] = 1.0
    """Anthropic API: factor of the token counts that clients are told. auto: a client that assumes a context of
    200,000 tokens compacts in time."""

    # Proxy
    proxy: Literal["on", "off"] = "on"
    """Start the LiteLLM proxy in front of the server."""
    proxy_port: kinds.Port = 4000
    """Port of the LiteLLM proxy."""
    proxy_model_id: Annotated[str | None, kinds.OffOr] = None
    """Model name exposed through LiteLLM. Unset: openai/{MODEL_PATH}."""
    proxy_startup_wait_seconds: kinds.Seconds = 2.0
    """Seconds the start waits for the proxy; after that the server goes on and watches the proxy."""
    litellm_master_key: Annotated[str | None, kinds.OffOr, kinds.Key] = None
    """Key for the proxy. Made on first start and kept in .env."""

    # Nodes
    nodes: Annotated[str, kinds.NodeAddresses] = ""
    """Other start_llm servers that the proxy shares requests with: addresses separated by commas, e.g.
    http://mac-1:8080,http://mac-2:8080. See docs/fleet.md."""
    nodes_api_key: Annotated[str | None, kinds.OffOr, kinds.Key] = None
    """API_KEY of the servers in NODES."""
    nodes_self: Literal["on", "off"] = "on"
    """on: this server is a node beside those of NODES; off: the proxy sends conversations to them only."""

    # Hosts
    hosts: Annotated[str, kinds.RankHosts] = ""
    """Machines that compute one model together, this one first: names or addresses, separated by commas, e.g.
    mac-1,mac-2. Each has an equal part of the weights. Unset: this machine alone. See docs/fleet.md."""
    hostfile: Annotated[Path | None, kinds.OffOr] = None
    """File of mlx.distributed_config with these machines and their addresses, in place of HOSTS."""

    # KV
    max_kv_size: Annotated[int, Field(ge=256)] = 196608
    """Most tokens of one request's context."""
    kv_group_size: Annotated[Literal[32, 64, 128], kinds.Number] = 64
    """Numbers that share a scale in quantised KV: 32, 64 or 128."""
    kv_bits: Annotated[Literal[4, 8] | None, kinds.NumberOrOff] = None
    """KV quantisation bits: 4, 8 or OFF. Takes less memory; answers change a little."""

    # Cache
    cache_drift_policy: Literal["append", "strict"] = "append"
    """append: what was shown stays, changes come in a note; strict: the client's bytes."""
    allow_control_tokens: bool = False
    """Let text of messages become control tokens, for clients that send them on purpose (fill-in-the-middle)."""
    cache_rules_file: Annotated[Path | None, kinds.OffOr] = None
    """TOML file with more clients and rules."""
    cache_memory_bytes: Annotated[int | None, kinds.OffOr] = None
    """Bytes of KV kept in memory. Unset: a share of the machine's memory."""
    wired_limit: Literal["auto", "off"] | kinds.Count = "auto"
    """Memory that the GPU keeps resident (macOS): off, bytes, or auto, which wires the weights alone, once, and only if
    they take 32 GiB or more. See docs/memory.md."""
    reanchor: Literal["on", "off"] = "on"
    """Prefill the client's expected next request in idle gaps."""
    kv_disk_dir: str = "auto"
    """Folder of the disk tier; auto is inside START_LLM_CACHE_DIR, off turns it off."""
    kv_disk_bytes: Annotated[int | None, kinds.OffOr] = None
    """Bytes of KV on disk. Unset: 20 GB or 10% of the free disk, whichever is less."""
    kv_events: Annotated[str | None, kinds.OffOr, kinds.EventAddress] = None
    """Address at which routers (llm-d, Dynamo) are told what KV is stored, e.g. tcp://127.0.0.1:5557; the next port
    sends again what they missed. Who connects there reads the tokens of all prompts. Needs the extra fleet."""
    prompt_cache_max_entries_per_session: kinds.Count = 2
    """Conversation ends of one session that are protected from eviction."""
    prompt_cache_ttl_seconds: kinds.Count = 1800
    """Seconds after which unused KV leaves memory (0 = never); the disk tier keeps it."""
    prompt_cache_session_max_idle_seconds: kinds.Count = 1800
    """Seconds after which an idle session loses its protection (0 = never)."""

    # Images
    images_on_text_model: Literal["placeholder", "reject"] = "placeholder"
    """An image that the model cannot see: a line that tells its number, name and size, or error 501."""
    image_max_bytes: Annotated[int, Field(ge=1024)] = 20_000_000
    """Largest image file, in bytes."""
    vision: Literal["auto", "off"] = "auto"
    """auto: a model that can see images is loaded with its eyes; off: as a text model."""

    # Generation
    makers_sampling: bool = True
    """A request without sampling parameters uses the checkpoint's generation_config.json, unless a DEFAULT_ setting
    or file says something else. false: it uses the values below, which copy more to the letter; drafts then save
    much more time (docs/drafts.md has figures)."""
    default_temperature: Annotated[float, Field(ge=0, le=2)] = 0.1
    """Sampling temperature."""
    default_top_p: Annotated[float, Field(gt=0, le=1)] = 0.9
    """Top-p (nucleus) sampling."""
    default_top_k: kinds.Count = 40
    """Top-k sampling; 0 is off."""
    default_min_p: Annotated[float, Field(ge=0, le=1)] = 0.05
    """Minimum probability threshold."""
    default_repetition_penalty: Annotated[float, Field(gt=0, le=2)] = 1.0
    """Repetition penalty; 1.0 is off. Above it the model is punished for copying, code too."""
    default_max_tokens: Annotated[Annotated[int, Field(ge=1)] | None, kinds.OffOr] = None
    """Most tokens of an answer whose request sets no limit. Unset: what the context has left."""
    default_thinking: bool = True
    """Let models that can think do so by default."""
    drafts: Literal["auto", "off"] = "auto"
    """auto: text that repeats the conversation is verified in blocks, where that is quicker."""
    draft_model: Annotated[str, Field(min_length=1)] = "auto"
    """What drafts beside the conversation's own text: auto: the model's own head, one in a folder beside it, or a
    published one that start-llm pull has fetched (docs/drafts.md); off: nothing; else the folder or repository of a
    head, or of a small model with the same vocabulary."""
    repetition_guard: bool = True
    """End an answer that repeats itself for a thousand tokens and more; reasoning is closed, and the answer begins."""
    preserve_thinking: bool = True
    """Show old reasoning to the model where its template can."""
    generation_watchdog_seconds: kinds.Seconds = 600.0
    """Seconds an answer may take once its prompt is computed, and that the model may go without a move (0 = no
    limit)."""

    # Logs
    enable_request_logging: bool = True
    """Write a log line per request to LOG_ROOT."""
    log_root: Path = Path("logs")
    """Folder of the session logs."""
    log_level: Annotated[Literal["debug", "info", "warning", "error"], kinds.Lower] = "warning"
    """debug, info, warning or error: what the process logs of itself."""
    log_json: bool = False
    """JSON lines on the terminal instead of live lines."""
    audit_days: Annotated[float, Field(ge=0)] = 30.0
    """Days that a row for each request (time, client, model, tokens, seconds, outcome; no text) is kept for start-llm
    audit; 0 = none."""
    dump_requests: bool = Field(False, validation_alias=AliasChoices("dump_requests", "vlm_cache_debug"))
    """Write prompt and answer of each request to LOG_ROOT/dumps (0600, keys taken out, at most 256 MiB).
    VLM_CACHE_DEBUG means the same."""

    @property
    def cache_dir(self) -> Path:
        return expanded(self.start_llm_cache_dir)

    @property
    def adapters_folder(self) -> Path:
        """Folder of LoRA adapters that requests may name: each a folder in it, as mlx_lm.lora writes them."""
        return self.cache_dir / "adapters"

    @property
    def host_names(self) -> frozenset[str]:
        """By which this server may be addressed, beside localhost and IP addresses, in lower case; ``*`` is any."""
        names = {*self.allowed_hosts.split(","), self.mlx_host}
        return frozenset(name.lower().removesuffix(".") for name in names if name)

    @property
    def models_by_name(self) -> ModelMap:
        """MODEL_MAP as a table."""
        return parse_model_map(self.model_map)

    @property
    def node_addresses(self) -> list[str]:
        """NODES."""
        return [address for address in self.nodes.split(",") if address]

    @property
    def preloaded(self) -> list[str]:
        """PRELOAD_MODELS."""
        return [name for name in self.preload_models.split(",") if name]

    @property
    def pinned(self) -> list[str]:
        """PINNED_MODELS."""
        return [name for name in self.pinned_models.split(",") if name]

    def context_within(self, own: int | None) -> int:
        """Most tokens of a request to a model whose own limit is `own`; ``None``: not known."""
        return min(self.max_kv_size, own or self.max_kv_size)

    def context_scale_for(self, context: int) -> float:
        """CONTEXT_SCALE for a model with so much room; ``auto`` never makes counts smaller than they are."""
        if self.context_scale == "auto":
            return max(1.0, ASSUMED_CONTEXT / context) if context else 1.0
        return self.context_scale

    @property
    def disk_dir(self) -> Path | None:
        """Folder of the disk tier, or ``None`` if it is off."""
        word = self.kv_disk_dir.strip().lower()
        if word in {"off", "none", "false", ""}:
            return None
        return self.cache_dir / "kv" if word in {"auto", "on"} else expanded(self.kv_disk_dir)


def meaning(name: str) -> str:
    """What the setting of that field is for, in one line."""
    return " ".join((Settings.model_fields[name].description or "").split())


def load_settings(env_file: str | os.PathLike[str] | None = ".env", **overrides: Any) -> Settings:
    """Reads the environment and `env_file`. Raises SettingsError: naming the variable, its value and what is allowed;
    or a name in the file that is no setting. All of them at once."""
    known = {*setting_names(), *RETIRED}
    stored = stored_values(env_file)
    unknown = [name for name in stored if name.upper() not in known]
    wrong = [f"{env_file}: {name} is no setting of start_llm{_hint(name)}" for name in unknown]
    # Both may hold names in small letters. The last one counts: flags, then the environment, then the file.
    values = {name.lower(): value for name, value in (stored | os.environ).items() if value is not None}
    settings = None
    try:
        settings = Settings.model_validate({name: values[name] for name in values if name.upper() in known} | overrides)
    except ValidationError as error:
        for problem in error.errors():
            name = str(problem["loc"][0]).upper() if problem["loc"] else "?"
            hidden = name.lower() in SECRETS or "@" in str(problem["input"])  # http://user:password@host
            shown = "(not shown)" if hidden else repr(problem["input"])
            wrong.append(f"{name}={shown}: {plain(problem['msg'])}")
    if settings is None or wrong:
        raise SettingsError("\n".join(wrong))
    return settings


def doubtful_names(env_file: str | os.PathLike[str] | None = ".env") -> list[str]:
    """A sentence for each variable, in `env_file` and the environment, that does nothing although somebody may think
    so: retired or misspelt."""
    settings = setting_names()
    sentences = []
    for name in dict.fromkeys(name.upper() for name in [*stored_values(env_file), *os.environ]):
        if name in RETIRED:
            sentences.append(f"{name} does nothing any more: {RETIRED[name]}. You can remove it.")
        elif name not in settings and (near := difflib.get_close_matches(name, settings, 1, _SURELY_MEANT)):
            sentences.append(f"{name} is no setting of start_llm; {near[0]} is. It is passed over.")
    return sentences


def setting_names() -> list[str]:
    """Names of settings, older ones that mean the same included."""
    names = list(Settings.model_fields)
    for field in Settings.model_fields.values():
        if isinstance(field.validation_alias, AliasChoices):
            names += [str(choice) for choice in field.validation_alias.choices]
    return [name.upper() for name in dict.fromkeys(names)]


def stored_values(env_file: str | os.PathLike[str] | None) -> dict[str, str | None]:
    """What the file says, as text; nothing where there is no such file. Raises SettingsError: it is not understood."""
    if env_file is None:
        return {}
    try:
        if Path(env_file).is_fifo():
            raise SettingsError(f"{env_file}: it must be a file; a pipe can be read only once")
        literal = _check_lines(Path(env_file)) if Path(env_file).is_file() else {}
        return dotenv_values(env_file) | literal
    except (OSError, UnicodeDecodeError) as error:
        raise SettingsError(f"{env_file}: it must be a text file (UTF-8) that can be read: {error}") from None


def _check_lines(env_file: Path) -> dict[str, str | None]:
    """Values in single quotes, in which dotenv, unlike a shell, replaces ``${...}``. It also passes over lines that it
    does not understand: those are refused. Values are not told: one may be a key."""
    with env_file.open(encoding="utf-8") as lines:
        read = list(parse_stream(lines))
    wrong = []
    for place in (found.original for found in read if found.error or (found.key and found.value is None)):
        text = place.string.lstrip()
        line = place.line + place.string[: len(place.string) - len(text)].count("\n")
        name = re.split(r"[\s=]", text, maxsplit=1)[0]
        wrong.append(f"{env_file}: line {line} ({name}) must be NAME=value; quotes come in pairs.")
    if wrong:
        raise SettingsError("\n".join(wrong))
    last = {found.key: found for found in read if found.key}
    return {name: found.value for name, found in last.items() if _QUOTED.match(found.original.string)}


def _hint(name: str) -> str:
    near = difflib.get_close_matches(name.upper(), map(str.upper, Settings.model_fields), 1, _LIKE)
    return f"; the nearest one is {near[0]}." if near else "; .env.example lists all of them."


def plain(message: str) -> str:
    """What pydantic says of a bad value, in words for somebody who sets one."""
    for theirs, ours in _PLAIN.items():
        message = message.replace(theirs, ours)
    return message
