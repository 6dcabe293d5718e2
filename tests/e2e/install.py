"""Installs the agents that the end-to-end tests drive: ``python3.12 tests/e2e/install.py [NAME ...]``.

Each goes into a folder of its own in ``$START_LLM_CLIENTS`` (default: ``clients`` in the cache folder), from npm and
PyPI, at the version that was tested. Standard library only.
"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

NODE_VERSION = "24"
NPM = {
    "pi": "@mariozechner/pi-coding-agent@0.73.1",
    "claude": "@anthropic-ai/claude-code@2.1.329",
    "opencode": "opencode-ai@1.18.33",
    "codex": "@openai/codex@0.169.0",
    "qwen": "@qwen-code/qwen-code@0.24.4",
    "openclaw": "openclaw@2026.9.6",
    "cline": "cline@3.0.65",
    "kilo": "@kilocode/cli@7.7.7",
    "cn": "@continuedev/cli@1.5.47",
    "ollama-js": "ollama@0.6.4",
    "openai-js": "openai@7.57.0",
    "anthropic-js": "@anthropic-ai/sdk@1.13.0",
}
PYPI = {
    "aider": "aider-chat==0.86.2",
    "langchain": "langchain-openai==1.7.3 langchain-anthropic==1.7.7 langchain-ollama==1.1.0",
    "llamaindex": "llama-index-llms-openai-like==0.8.1",
    "openai-agents": "openai-agents==0.24.0",
    "llm": "llm==0.36",
    "ollama": "ollama==0.6.3",
    "pydantic-ai": "pydantic-ai-slim[openai]==2.68.0",
}


def clients_folder() -> Path:
    """Where the agents are installed."""
    if chosen := os.environ.get("START_LLM_CLIENTS"):
        return Path(chosen)
    return Path(os.environ.get("START_LLM_CACHE_DIR", "~/.cache/start_llm")).expanduser() / "clients"


def search_path(name: str) -> list[Path]:
    """The folders in which the agent `name` and its Node are."""
    folder = clients_folder()
    return [folder / "node" / "node_modules" / ".bin", folder / name / "node_modules" / ".bin", folder / name / "bin"]


def _run(command: list[str], folder: Path) -> None:
    path = os.pathsep.join([str(clients_folder() / "node" / "node_modules" / ".bin"), os.environ["PATH"]])
    quiet = {"npm_config_audit": "false", "npm_config_fund": "false", "npm_config_update_notifier": "false"}
    subprocess.run(command, cwd=folder, env=os.environ | quiet | {"PATH": path}, check=True)


def _npm(name: str, package: str) -> None:
    folder = clients_folder() / name
    folder.mkdir(parents=True, exist_ok=True)
    # Install scripts fetch or unpack the agents' binaries; recent npm runs them only if told so.
    flags = ["--no-package-lock", "--loglevel=error", "--foreground-scripts", "--ignore-scripts=false"]
    _run(["npm", "install", *flags, "--prefix", ".", package], folder)


def install(name: str) -> None:
    """Installs one agent; raises `CalledProcessError` if that fails."""
    if name in NPM:
        _npm(name, NPM[name])
        return
    folder = clients_folder() / name
    folder.parent.mkdir(parents=True, exist_ok=True)
    uv = shutil.which("uv", path=os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]))
    if uv is None:
        raise FileNotFoundError("uv (it comes with requirements.txt)")
    _run([uv, "venv", "--quiet", "--allow-existing", "--python", sys.executable, str(folder)], folder.parent)
    _run(
        [uv, "pip", "install", "--quiet", "--python", str(folder / "bin" / "python"), *PYPI[name].split()],
        folder.parent,
    )


def main(names: list[str]) -> int:
    """Installs Node and the agents; goes on after a failure and tells all of them at the end."""
    unknown = sorted(set(names) - {*NPM, *PYPI})
    if unknown:
        print(f"unknown: {', '.join(unknown)}; known: {', '.join([*NPM, *PYPI])}")
        return 2
    system = {"Darwin": "darwin", "Linux": "linux"}[platform.system()]
    machine = {"arm64": "arm64", "aarch64": "arm64", "x86_64": "x64"}[platform.machine()]
    failed = []
    for name in ["node", *(names or [*NPM, *PYPI])]:
        print(f"--- {name}", flush=True)
        try:
            if name == "node":
                _npm(name, f"node-{system}-{machine}@{NODE_VERSION}")
            else:
                install(name)
        except (OSError, subprocess.CalledProcessError) as error:
            failed.append(f"{name}: {error}")
    for line in failed:
        print(f"failed: {line}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
