"""``--my-config``, with a home folder of its own."""

from __future__ import annotations

import json
import os
import stat
import tomllib
from pathlib import Path
from typing import Any

import pytest

from start_llm.clients import CLIENTS
from start_llm.clients.agent import LaunchPlan, UserConfig
from start_llm.launch import cli, mine
from start_llm.launch.mine import NOTE, bring, take_away
from tests.launch.stub import make_client, serving
from tests.launch.test_cli import main, settings

SERVER = {"command": "npx", "args": ["-y", "mine"], "env": {"TOKEN": "t"}}
HOMES: dict[str, dict[str, Any]] = {
    "claude": {
        ".claude/skills/mine/SKILL.md": "my skill",
        ".claude/CLAUDE.md": "my words",
        ".claude/.credentials.json": "secret",
        ".claude/projects/x/session.jsonl": "old session",
        ".claude/settings.json": {"outputStyle": "brief", "permissions": {"allow": ["Bash(*)"]}, "hooks": {"Stop": []}},
        ".claude.json": {"mcpServers": {"mine": SERVER}, "theme": "light", "oauthAccount": "secret"},
    },
    "codex": {
        ".codex/skills/mine/SKILL.md": "my skill",
        ".codex/auth.json": "secret",
        ".codex/config.toml": 'model = "o9"\n[tui]\ntheme = "light"\n[mcp_servers.mine]\ncommand = "npx"\n'
        'args = ["-y"]\n[projects."/x"]\ntrust_level = "trusted"\n',
    },
    "pi": {
        ".pi/agent/skills/mine/SKILL.md": "my skill",
        ".pi/agent/auth.json": "secret",
        ".pi/agent/settings.json": {"theme": "light", "defaultModel": "o9"},
    },
    "qwen": {
        ".qwen/skills/mine/SKILL.md": "my skill",
        ".qwen/oauth_creds.json": "secret",
        ".qwen/settings.json": {"mcpServers": {"mine": SERVER}, "ui": {"theme": "light"}, "model": {"name": "o9"}},
    },
    "openclaw": {
        ".openclaw/skills/mine/SKILL.md": "my skill",
        ".openclaw/credentials/x": "secret",
        ".openclaw/openclaw.json": {"mcp": {"servers": {"mine": SERVER}}, "gateway": {"port": 1}},
    },
    "cline": {
        ".cline/data/settings/cline_mcp_settings.json": {"mcpServers": {"mine": SERVER}},
        ".cline/data/settings/providers.json": "secret",
    },
    "cn": {
        ".continue/rules/mine.md": "my rule",
        ".continue/skills/mine/SKILL.md": "my skill",
        ".continue/config.yaml": "secret",
        ".continue/sessions/x.json": "old session",
    },
    "opencode": {},
    "kilo": {},
    "aider": {},
}
TOLD = {  # file in the private folder, and what it says of the user's own
    "claude": {".claude.json": {"mcpServers": {"mine": SERVER}, "theme": "light", "hasCompletedOnboarding": True}},
    "codex": {"config.toml": {"tui": {"theme": "light"}, "mcp_servers": {"mine": {"command": "npx", "args": ["-y"]}}}},
    "pi": {"settings.json": {"theme": "light"}},
    "cline": {"settings/cline_mcp_settings.json": {"mcpServers": {"mine": SERVER}}},
}


def make_home(home: Path, files: dict[str, Any]) -> dict[str, bytes]:
    """What lies there afterwards."""
    for name, content in files.items():
        path = home / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content if isinstance(content, str) else json.dumps(content))
    return files_of(home)


def files_of(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "bin").mkdir()
    for client in CLIENTS.values():
        if client.user_config.variable:
            monkeypatch.delenv(client.user_config.variable, raising=False)
        make_client(tmp_path / "bin", client.name)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:/usr/bin:/bin")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("START_LLM_TEST_OUT", str(tmp_path / "out"))
    (tmp_path / "home").mkdir()
    return tmp_path / "home"


@pytest.mark.live
@pytest.mark.parametrize("name", CLIENTS)
def test_the_users_own_comes_along_as_copies_and_goes_again(
    name: str, home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = make_home(home, HOMES[name])
    private = tmp_path / "cache" / "launch" / name
    with serving(context=200_000) as port:
        assert main([name], settings(tmp_path, mlx_port=port)) == 7
        alone = files_of(private)
        capsys.readouterr()
        for _ in range(2):
            assert main([name, "--my-config"], settings(tmp_path, mlx_port=port)) == 7
            said = capsys.readouterr().err
            brought = files_of(private)
            for file, expected in TOLD.get(name, {}).items():
                text = brought[file].decode()
                assert (tomllib.loads(text) if file.endswith(".toml") else json.loads(text)) == expected
            config = CLIENTS[name].user_config
            if HOMES[name]:
                assert f"copies of {home / config.folder}" in said
            else:
                assert config.always_read in said
            if "skills" in config.copied:
                skill = private / "skills" / "mine" / "SKILL.md"
                assert skill.read_text() == "my skill" and stat.S_IMODE(skill.stat().st_mode) == 0o400
                assert stat.S_IMODE(skill.parent.stat().st_mode) == 0o500
            text = b"".join(content for file, content in brought.items())
            assert b"secret" not in text and b"old session" not in text and b"o9" not in text and b"trusted" not in text
            assert b"permissions" not in text and b"Stop" not in text
        assert main([name], settings(tmp_path, mlx_port=port)) == 7
    after = files_of(private)
    assert {file: content for file, content in after.items() if content.strip() not in (b"", b"{}")}.keys() <= {*alone}
    assert b"my skill" not in b"".join(after.values()) and b"mine" not in b"".join(after.values())
    assert files_of(home) == before


def test_what_a_running_agent_has_does_not_go_under_it(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    make_home(home, HOMES["pi"])
    folders: dict[str, Path] = {}

    def agent(_: str, plan: LaunchPlan, arguments: list[str]) -> int:
        (name,) = arguments
        folder = folders[name] = Path(plan.env["PI_CODING_AGENT_DIR"])
        if name == "first":
            before = files_of(folder)
            assert main(["pi", "--my-config", "--", "the same"], settings(tmp_path, mlx_port=one)) == 0
            assert main(["pi", "--", "without"], settings(tmp_path, mlx_port=one)) == 0
            assert main(["pi", "--my-config", "--", "other server"], settings(tmp_path, mlx_port=two)) == 0
            assert files_of(folder) == before and "my skill" in map(bytes.decode, before.values())
        elif name == "without":
            assert not (folder / "skills").exists()
        elif name == "other server":
            assert f":{two}/" in (folder / "models.json").read_text() and (folder / "skills").exists()
        return 0

    monkeypatch.setattr(cli, "run", agent)
    with serving() as one, serving() as two:
        assert main(["pi", "--my-config", "--", "first"], settings(tmp_path, mlx_port=one)) == 0
        said = capsys.readouterr().err
        assert main(["pi", "--", "afterwards"], settings(tmp_path, mlx_port=one)) == 0
    first = tmp_path / "cache" / "launch" / "pi"
    second = first.with_name("pi-2")
    assert folders == {
        "first": first, "the same": first, "without": second, "other server": second, "afterwards": first
    }  # fmt: skip
    assert said.count(f"another PI runs with another set-up; this one keeps its sessions in {second}") == 2
    assert not (first / "skills" / "mine").exists(), "nobody uses it any more, so it is set up again"


def test_what_the_agent_has_itself_stays(home: Path, tmp_path: Path) -> None:
    make_home(home, HOMES["claude"])
    private = tmp_path / "private"
    make_home(private, {"skills/mine/SKILL.md": "the agent's", ".claude.json": {"theme": "dark", "n": 1}})
    config = CLIENTS["claude"].user_config
    assert set(bring(config, private, os.environ, print)) == {"CLAUDE.md", "mcpServers", "outputStyle"}
    data = json.loads((private / ".claude.json").read_text())
    assert data["theme"] == "dark"
    (private / ".claude.json").write_text(json.dumps(data | {"mcpServers": {"added": {}}}))
    take_away(config, private)
    assert json.loads((private / ".claude.json").read_text()) == {"theme": "dark", "n": 1, "mcpServers": {"added": {}}}
    assert (private / "skills/mine/SKILL.md").read_text() == "the agent's" and not (private / "CLAUDE.md").exists()


def test_links_are_followed_but_not_for_ever(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_home(home, {"dotfiles/one/SKILL.md": "linked", ".pi/agent/themes/t.json": "{}"})
    skills = home / ".pi/agent/skills"
    skills.mkdir()
    (skills / "one").symlink_to(home / "dotfiles/one")
    (skills / "round").symlink_to(skills)
    (skills / "gone").symlink_to(home / "nowhere")
    os.mkfifo(home / "dotfiles/one/pipe")
    private, said = tmp_path / "private", list[str]()
    private.mkdir()
    config = CLIENTS["pi"].user_config
    assert bring(config, private, os.environ, said.append) == ["skills", "themes"]
    assert (private / "skills/one/SKILL.md").read_text() == "linked"
    assert not (private / "skills/one").is_symlink() and not (private / "skills/round").exists()
    assert len(said) == 1 and "leads back into itself" in said[0]
    take_away(config, private)
    assert files_of(private) == {}
    monkeypatch.setattr(mine, "MOST_BYTES", 3)
    assert bring(config, private, os.environ, said.append) == ["themes"]
    assert "in all" in said[-1] and files_of(private).keys() == {NOTE, "themes/t.json"}


def test_a_file_that_cannot_be_read_is_told(home: Path, tmp_path: Path) -> None:
    make_home(home, {".openclaw/openclaw.json": "{ // a comment\n}"})
    said: list[str] = []
    assert bring(CLIENTS["openclaw"].user_config, tmp_path, os.environ, said.append) == []
    assert len(said) == 1 and "openclaw.json is not brought along" in said[0]


@pytest.mark.parametrize(
    "note",
    ["", "[]", '{"copied": 1}', '{"copied": ["../../victim", "skills/../../../victim", "other", 3], "fields": {}}'],
)
def test_a_note_that_was_tampered_with_removes_nothing_else(note: str, home: Path) -> None:
    private, victim = home / "a" / "b", home / "victim"
    make_home(home, {"victim": "stays", "a/b/other": "stays", f"a/b/{NOTE}": note})
    take_away(CLIENTS["pi"].user_config, private)
    assert victim.read_text() == "stays" and (private / "other").exists()


def test_a_folder_that_is_named_elsewhere_and_one_that_is_the_private_one(home: Path, tmp_path: Path) -> None:
    make_home(home, {"else/skills/s/SKILL.md": "x"})
    config, private = CLIENTS["pi"].user_config, tmp_path / "private"
    private.mkdir()
    assert bring(config, private, {"HOME": str(home), config.variable: str(home / "else")}, print) == ["skills"]
    assert bring(config, private, {"HOME": str(home), config.variable: str(private)}, print) == []
    assert bring(UserConfig(), private, os.environ, print) == []


def test_print_tells_what_would_be_copied(home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["pi", "--print", "--my-config"], settings(tmp_path, mlx_port=1)) == 0
    assert f"# {cli.user_config_help(CLIENTS['pi'])}" in capsys.readouterr().out


@pytest.mark.parametrize("name", CLIENTS)
def test_the_page_says_what_is_brought_and_what_stays_hidden(name: str) -> None:
    page = (Path(__file__).parents[2] / "docs" / "clients" / f"{name}.md").read_text()
    config = CLIENTS[name].user_config
    names = [*config.copied, *(key for keys in config.fields.values() for key in keys)]
    section = page.partition("## Your own set-up")[2].partition("\n## ")[0]
    assert section and [word for word in names if f"`{word}`" not in section] == []
