"""The agents that are known, one file each: how their requests are known, what they change in them, how they start.

Standard library only: the command line lists them.
"""

from start_llm.clients.agent import AgentClient
from start_llm.clients.aider import AIDER
from start_llm.clients.claude import CLAUDE
from start_llm.clients.cline import CLINE
from start_llm.clients.cn import CN
from start_llm.clients.codex import CODEX
from start_llm.clients.kilo import KILO
from start_llm.clients.openclaw import OPENCLAW
from start_llm.clients.opencode import OPENCODE
from start_llm.clients.pi import PI
from start_llm.clients.qwen import QWEN

CLIENTS: dict[str, AgentClient] = {
    client.name: client for client in (CLAUDE, CODEX, OPENCODE, OPENCLAW, PI, QWEN, CLINE, KILO, CN, AIDER)
}
