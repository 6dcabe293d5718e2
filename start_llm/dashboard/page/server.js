// The server's log and settings; the one setting that can change while it runs. Secrets were taken out before they were sent.

import { byId, make, setText } from "./dom.js";
import { json } from "./net.js";

const LINES = 300;
let opened = false;

export function showLog(lines) {
  if (!lines || !lines.length) return;
  const log = byId("log");
  const atEnd = log.scrollTop + log.clientHeight >= log.scrollHeight - 4;
  if (log.dataset.empty) { log.replaceChildren(); delete log.dataset.empty; }
  for (const line of lines) log.append(make("div", { class: /^\S+ \S+ (ERROR|CRITICAL)/.test(line) ? "bad" : "" }, line));
  while (log.children.length > LINES) log.firstChild.remove();
  if (atEnd) log.scrollTop = log.scrollHeight;
}

export function forgetLog() {
  byId("log").replaceChildren(make("div", { class: "quiet" }, "Nothing was logged yet."));
  byId("log").dataset.empty = "yes";
}

function row(setting) {
  return make("tr", { class: setting.set ? "set" : "" }, make("th", { scope: "row" }, ...setting.name.split(/(?<=_)/).flatMap((part) => [make("wbr"), part])),
    make("td", {}, setting.choices.length ? chooser(setting) : make("code", {}, setting.value || "unset")), make("td", { class: "words quiet" }, setting.about));
}

// A setting that can change while the server runs.
function chooser(setting) {
  const select = make("select", { "aria-label": setting.name },
    ...setting.choices.map((choice) => make("option", { value: choice, selected: choice === setting.value }, choice)));
  select.addEventListener("change", async () => {
    try {
      const changed = await json("/page/settings", { name: setting.name, value: select.value });
      setting.value = changed.value;
      setText(byId("settings-told"), `${setting.name} is ${changed.value} until the server ends. To keep it, write it into .env.`);
    } catch (error) {
      select.value = setting.value;
      setText(byId("settings-told"), error.message);
    }
  });
  return select;
}

function filterSettings() {
  const words = byId("settings-filter").value.toLowerCase().split(/\s+/).filter(Boolean);
  let left = 0;
  for (const line of byId("settings").children) {
    line.hidden = !words.every((word) => line.textContent.toLowerCase().includes(word));
    left += Number(!line.hidden);
  }
  setText(byId("settings-told"), words.length ? `${left} of ${byId("settings").children.length} settings` : "Those that were set stand first.");
}

byId("settings-filter").addEventListener("input", filterSettings);

export async function openServer() {
  if (opened) return;
  try {
    const found = await json("/page/settings");
    const sorted = [...found.settings].sort((a, b) => Number(b.set) - Number(a.set));
    byId("settings").replaceChildren(...sorted.map(row));
    byId("proxy-log").textContent = found.proxy_log.join("\n") || "Nothing.";
    setText(byId("settings-told"), "Those that were set stand first.");
    opened = true;
  } catch (error) {
    setText(byId("settings-told"), `Settings cannot be shown: ${error.message}`);
  }
}
