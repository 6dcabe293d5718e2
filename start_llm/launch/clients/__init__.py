"""The agents that `launch` knows, one file each."""

from start_llm.launch.clients.aider import AIDER
from start_llm.launch.clients.claude import CLAUDE
from start_llm.launch.clients.cline import CLINE
from start_llm.launch.clients.codex import CODEX
from start_llm.launch.clients.openclaw import OPENCLAW
from start_llm.launch.clients.opencode import OPENCODE
from start_llm.launch.clients.pi import PI
from start_llm.launch.clients.qwen import QWEN
from start_llm.launch.plan import AgentClient

CLIENTS: dict[str, AgentClient] = {
    client.name: client for client in (CLAUDE, CODEX, OPENCODE, OPENCLAW, PI, QWEN, CLINE, AIDER)
}
