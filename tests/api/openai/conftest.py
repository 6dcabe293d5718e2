from __future__ import annotations

import pytest

from start_llm.api.server import ApiServer
from tests.vendors import openai


@pytest.fixture
def client(server: ApiServer) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
