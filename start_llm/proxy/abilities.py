"""What LiteLLM tells of a model, and by which it decides what to leave out of a request.

It leaves `thinking` and `output_config` out of messages to models that it does not know to take them. Standard library
only: `counts.py` loads it by path in LiteLLM's process.
"""

from __future__ import annotations

from typing import Any


def abilities(*, context: int, reasoning: bool, tools: bool, vision: bool) -> dict[str, Any]:
    """`context`: most tokens of a request, answer included."""
    return {
        "mode": "chat",
        "max_tokens": context,
        "max_input_tokens": context,
        "max_output_tokens": context,
        "supports_reasoning": reasoning,
        "supports_adaptive_thinking": reasoning,
        "supports_legacy_thinking": reasoning,
        "supports_output_config": True,
        "supports_response_schema": True,
        "supports_system_messages": True,
        "supports_function_calling": tools,
        "supports_tool_choice": tools,
        "supports_parallel_function_calling": tools,
        "supports_vision": vision,
        "supports_pdf_input": False,
        "supports_audio_input": False,
    }
