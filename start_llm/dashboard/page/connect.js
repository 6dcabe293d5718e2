// How agents and other clients are pointed at this server.

import { byId, copier, make, setText } from "./dom.js";
import { json } from "./net.js";

const KEY = document.body.dataset.needsKey === "yes" ? "YOUR_API_KEY" : "any";
const HERE = location.origin;
const QUESTION = `{"model": "default", "messages": [{"role": "user", "content": "Hello"}]}`;
const SNIPPETS = [
  ["OpenAI clients, by environment", `export OPENAI_BASE_URL=${HERE}/v1\nexport OPENAI_API_KEY=${KEY}`],
  ["Anthropic clients, by environment", `export ANTHROPIC_BASE_URL=${HERE}\nexport ANTHROPIC_AUTH_TOKEN=${KEY}`],
  ["Python, with the package openai", `from openai import OpenAI\n\nclient = OpenAI(base_url="${HERE}/v1", api_key="${KEY}")\n`
    + `answer = client.chat.completions.create(model="default", messages=[{"role": "user", "content": "Hello"}])\nprint(answer.choices[0].message.content)`],
  ["A shell", `curl ${HERE}/v1/chat/completions -H 'Content-Type: application/json' -H 'Authorization: Bearer ${KEY}' \\\n  -d '${QUESTION}'`],
];

// Those that have to be told what the model can do. docs/clients/apps.md tells what of this was tried.
function applications({ context_length: context = 8192, capabilities = {} }) {
  const answer = Math.min(16384, Math.floor(context / 4)), images = Boolean(capabilities.vision);
  const zed = {
    language_models: { openai_compatible: { start_llm: { api_url: `${HERE}/v1`, available_models: [{
      name: "default", max_tokens: context, capabilities: { tools: true, images, parallel_tool_calls: true, prompt_cache_key: false },
    }] } } },
  };
  const code = [{
    name: "start_llm", vendor: "customendpoint", apiKey: KEY, apiType: "chat-completions", models: [{
      id: "default", name: "start_llm", url: `${HERE}/v1/chat/completions`, toolCalling: true, vision: images,
      maxInputTokens: context - answer, maxOutputTokens: answer,
    }],
  }];
  return [
    ["Open WebUI", `OPENAI_API_BASE_URL=${HERE}/v1 OPENAI_API_KEY=${KEY} ENABLE_OLLAMA_API=false \\\n`
      + "  ENABLE_FORWARD_USER_INFO_HEADERS=true open-webui serve --port 3000"],
    [`Zed: settings.json, with START_LLM_API_KEY=${KEY} in its environment`, JSON.stringify(zed, null, 2)],
    ["VS Code with Copilot: chatLanguageModels.json (Manage Language Models, Add, Custom Endpoint)", JSON.stringify(code, null, 2)],
  ];
}

function snippet([name, text]) {
  return make("div", { class: "code" }, make("p", { class: "small quiet" }, name, copier(text, name)),
    make("pre", { tabindex: 0, role: "region", "aria-label": name }, text));
}

export async function openConnect(all) {
  if (!byId("snippets").children.length) {
    byId("snippets").append(...SNIPPETS.map(snippet));
    const models = await json("/v1/models").catch(() => ({ data: [] }));
    byId("snippets").append(...applications(models.data[0] || {}).map(snippet));
  }
  if (!all) return;
  try {
    const { installed } = await json("/page/agents");
    for (const place of document.querySelectorAll("[data-agent]")) {
      const here = installed.includes(place.dataset.agent);
      const tag = place.querySelector(".installed");
      setText(tag, here ? "installed" : "not found on the server's PATH");
      tag.classList.toggle("good", here);
      place.querySelector(".install").hidden = here;
    }
  } catch { /* whether they are installed stays untold */ }
}
