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

let asked = false;

function snippet([name, text]) {
  return make("div", { class: "code" }, make("p", { class: "small quiet" }, name, copier(text, name)),
    make("pre", { tabindex: 0, role: "region", "aria-label": name }, text));
}

export async function openConnect(all) {
  if (!byId("snippets").children.length) byId("snippets").append(...SNIPPETS.map(snippet));
  if (asked || !all) return;
  try {
    const { installed } = await json("/page/agents");
    for (const place of document.querySelectorAll("[data-agent]")) {
      const here = installed.includes(place.dataset.agent);
      const tag = place.querySelector(".installed");
      setText(tag, here ? "installed" : "not installed");
      tag.classList.toggle("good", here);
      place.querySelector(".install").hidden = here;
    }
    asked = true;
  } catch { /* whether they are installed stays untold */ }
}
