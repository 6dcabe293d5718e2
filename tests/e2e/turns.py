"""Programs of Python frameworks: one conversation of several turns, each with a call of a tool.

Each reads ``HOST`` (the server), ``QUESTIONS`` (a JSON list) and ``KIND`` (the API), and prints an answer a line.
"""

from __future__ import annotations

_TOOL = '''
import json, os

host, kind, questions = os.environ["HOST"], os.environ["KIND"], json.loads(os.environ["QUESTIONS"])


def weather(city: str) -> str:
    """The weather in a city."""
    return f"The sun shines in {city}."
'''

LANGCHAIN = (
    _TOOL
    + """
from langchain_core.tools import tool

if kind == "messages":
    from langchain_anthropic import ChatAnthropic

    model = ChatAnthropic(base_url=host, api_key="none", model="default", max_tokens=2000)
elif kind == "ollama":
    from langchain_ollama import ChatOllama

    model = ChatOllama(base_url=host, model="default")
else:
    from langchain_openai import ChatOpenAI

    responses = kind == "responses"
    model = ChatOpenAI(base_url=f"{host}/v1", api_key="none", model="default", use_responses_api=responses)
ask, messages = tool(weather), [("system", "You help with the weather.")]
model = model.bind_tools([ask])
for question in questions:
    messages.append(("user", question))
    answer = model.invoke(messages)
    while answer.tool_calls:
        messages += [answer, *(ask.invoke(call) for call in answer.tool_calls)]
        answer = model.invoke(messages)
    messages.append(answer)
    print(answer.text)
"""
)

LLAMA_INDEX = (
    _TOOL
    + """
import asyncio

from llama_index.core.agent.workflow import FunctionAgent
from llama_index.core.workflow import Context
from llama_index.llms.openai_like import OpenAILike

model = OpenAILike(model="default", api_base=f"{host}/v1", api_key="none", is_chat_model=True,
    is_function_calling_model=True, context_window=32_768)
agent = FunctionAgent(tools=[weather], llm=model, system_prompt="You help with the weather.")


async def main():
    context = Context(agent)
    for question in questions:
        print(await agent.run(question, ctx=context))


asyncio.run(main())
"""
)

AGENTS_SDK = (
    _TOOL
    + """
import agents
from openai import AsyncOpenAI

agents.set_tracing_disabled(True)
model = {"chat": agents.OpenAIChatCompletionsModel, "responses": agents.OpenAIResponsesModel}[kind]
model = model(model="default", openai_client=AsyncOpenAI(base_url=f"{host}/v1", api_key="none"))
agent = agents.Agent(name="Weather", instructions="You help with the weather.", model=model,
    tools=[agents.function_tool(weather)])
said = []
for question in questions:
    result = agents.Runner.run_sync(agent, [*said, {"role": "user", "content": question}])
    said = result.to_input_list()
    print(result.final_output)
"""
)

PYDANTIC_AI = (
    _TOOL
    + """
from pydantic_ai import Agent
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider

model = {"chat": OpenAIChatModel, "responses": OpenAIResponsesModel}[kind]
model = model("default", provider=OpenAIProvider(base_url=f"{host}/v1", api_key="none"))
agent = Agent(model, instructions="You help with the weather.", tools=[weather])
said = []
for question in questions:
    result = agent.run_sync(question, message_history=said)
    said = result.all_messages()
    print(result.output)
"""
)

FRAMEWORKS = {
    **{("langchain", kind): LANGCHAIN for kind in ("chat", "responses", "messages", "ollama")},
    ("llamaindex", "chat"): LLAMA_INDEX,
    **{("openai-agents", kind): AGENTS_SDK for kind in ("chat", "responses")},
    **{("pydantic-ai", kind): PYDANTIC_AI for kind in ("chat", "responses")},
}
"""By the name in `install` and the API."""
