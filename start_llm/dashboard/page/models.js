// Models: what is loaded, what is on this disk with its settings, finding and fetching others.

import { byId, bytes, copier, duration, make, number, setText } from "./dom.js";
import { json } from "./net.js";

let listed = false;
let last = "";
let serves = "";
let memory = 0;
let shorts = new Set();
let whole = new Set(); // names of models that are on this disk

// What is said of a model that takes more memory than there is for models; nothing where that is not known.
function tooLarge(model) {
  if (!memory || !model.needs || (model.fits ?? model.needs <= memory)) return null;
  if (model.needs <= memory) return make("span", { class: "tag" }, "meant for a machine with more memory");
  return make("span", { class: "tag", title: "Its weights, 32,768 tokens of KV, and 1.1 GB to compute" },
    `does not fit: needs ${bytes(model.needs)}, there are ${bytes(memory)}`);
}

// Those that fit first.
function byFit(models) {
  return [...models].sort((a, b) => Number(tooLarge(a) !== null) - Number(tooLarge(b) !== null));
}

function button(text, label, onclick) {
  return make("button", { type: "button", "aria-label": label, onclick }, text);
}

// What does not fit may be fetched, too (the disk may be for another machine), but its button stands back and says so.
function fetcher(model, name) {
  const large = tooLarge(model);
  const made = button("Fetch", `Fetch ${name}${large ? `, ${large.textContent}` : ""}`, () => fetchModel(name));
  if (large) { made.className = "back"; made.title = large.textContent; }
  return made;
}

function row(model) {
  const able = model.problem || [...model.can, model.short && `short name ${model.short}`].filter(Boolean).join(", ");
  const isLoaded = model.loaded;
  const acts = make("td", {});
  const element = make("tr", {},
    make("th", { scope: "row" }, model.name, " ", isLoaded ? null : tooLarge(model), isLoaded ? make("span", { class: "tag good" }, "loaded") : null),
    make("td", { "data-label": "size" }, bytes(model.bytes)), make("td", { "data-label": "context" }, model.context ? number(model.context) : "–"),
    make("td", { class: model.problem ? "bad words" : "words" }, able), acts);
  if (!model.problem && !isLoaded) acts.append(act("Load", `Load ${model.name}`, "load", { model: model.name }), " ");
  if (!model.problem) {
    acts.append(copier(model.command, model.command, "Copy its command"), " ", button("Settings", `Settings of ${model.name}`, (event) => {
      const open = element.nextSibling && element.nextSibling.className === "own";
      if (open) element.nextSibling.remove(); else element.after(own(model));
      event.target.setAttribute("aria-expanded", String(!open));
    }), " ");
  }
  if (model.hub && !isLoaded) acts.append(button("Delete", `Delete ${model.name}`, () => askToDelete(model, acts)));
  return element;
}

function askToDelete(model, place) {
  const before = [...place.childNodes];
  const keep = button("Keep", `Keep ${model.name}`, () => place.replaceChildren(...before));
  place.replaceChildren(`Delete ${bytes(model.bytes)}? `, button("Delete", `Delete ${model.name} from this disk`, () => drop(model.name)), " ", keep);
  keep.focus();
}

async function drop(name) {
  try {
    const gone = await json("/page/models/remove", { name });
    setText(byId("models-told"), `${gone.name} was deleted: ${bytes(gone.bytes)} are free again.`);
  } catch (error) {
    setText(byId("models-told"), error.message);
  }
  await showModels(true);
}

// --- a model's own settings ---

const VALUES = [["context", "context: most tokens of a request", 1], ["ttl", "unload after idle seconds (0: never)", "any"],
  ["sampling.temperature", "temperature", "any"], ["sampling.top_p", "top_p", "any"], ["sampling.top_k", "top_k", 1],
  ["sampling.min_p", "min_p", "any"], ["sampling.repetition_penalty", "repetition penalty", "any"]];
const CHOICES = [["thinking", "thinks, if not asked otherwise"], ["pinned", "stays loaded (pinned)"]];

function own(model) {
  const told = make("span", { role: "status" });
  const numbers = VALUES.map(([key, label, step]) => make("label", {}, `${label} `,
    make("input", { type: "number", min: 0, step, "data-key": key, value: model.own[key] ?? null, placeholder: "not set" })));
  const choices = CHOICES.map(([key, label]) => {
    const chosen = String(model.own[key] ?? "");
    const options = [["", "not set"], ["true", "yes"], ["false", "no"]].map(([value, text]) => make("option", { value, selected: value === chosen }, text));
    return make("label", {}, `${label} `, make("select", { "data-key": key }, ...options));
  });
  const form = make("form", { onsubmit: async (event) => {
    event.preventDefault();
    const changes = {};
    for (const field of form.querySelectorAll("[data-key]")) {
      const value = field.type === "number" ? Number(field.value) : field.value === "true"; // ".5" is no JSON
      changes[field.dataset.key] = field.value === "" ? null : value;
    }
    try {
      model.own = (await json("/page/models/change", { name: model.name, changes })).own;
      setText(told, `Saved${model.loaded ? ". Unload it and load it again: they count when it is loaded" : ""}.`);
    } catch (error) {
      setText(told, error.message);
    }
  } }, ...numbers, ...choices, make("button", { class: "main" }, "Save"), " ", told,
  make("p", { class: "quiet small" }, "For requests that do not say. What is not set comes from the server's settings and the model's makers. The command line changes the same: ",
    make("code", {}, model.set_command)));
  return make("tr", { class: "own" }, make("td", { colspan: 5, class: "words" }, form));
}

// --- lists ---

function known(model) {
  return make("tr", {}, make("th", { scope: "row" }, model.short), make("td", {}, bytes(model.bytes)),
    make("td", { class: "words" }, model.note, " ", tooLarge(model)),
    make("td", {}, fetcher(model, model.short)));
}

function hit(model) {
  const dash = (label, value, text) => make("td", { "data-label": label }, value ? text(value) : "–");
  return make("tr", {}, make("th", { scope: "row" }, model.name, " ", tooLarge(model)), dash("size", model.bytes, bytes),
    dash("bits", model.quantisation, (bits) => bits.replace("-bit", "")), dash("context", model.context, number), make("td", { "data-label": "downloads" }, number(model.downloads)),
    make("td", {}, fetcher(model, model.name)));
}

// `keep`: what is told above the list stays.
export async function showModels(keep) {
  try {
    const found = await json("/page/models");
    memory = found.memory;
    byId("models-list").replaceChildren(...byFit(found.models).map(row));
    byId("models-list").parentElement.hidden = !found.models.length;
    byId("known").replaceChildren(...byFit(found.known).map(known));
    byId("pull-names").replaceChildren(...found.known.map((model) => make("option", { value: model.short })));
    whole = new Set(found.models.filter((model) => !model.problem).map((model) => model.name));
    shorts = new Set(found.known.map((model) => model.short));
    setText(byId("models-warning"), found.warning);
    byId("models-warning").hidden = !found.warning;
    if (keep !== true) setText(byId("models-told"), found.models.length ? "" : "No model is on this disk.");
    listed = true;
  } catch (error) {
    setText(byId("models-told"), `Models cannot be listed: ${error.message}`);
  }
}

export function openModels() {
  if (!listed) showModels();
}

function served(model, all) {
  const able = ["tools", "reasoning", "vision"].filter((name) => model[name]).join(", ");
  const size = model.bytes ? `, ${bytes(model.bytes)}` : "";
  const step = model.loading ? `${model.loading.step}: ${Math.round(100 * model.loading.part)}%` : model.state;
  const state = model.state === "ready" ? "" : make("span", { class: "tag" }, step);
  const pin = model.pinned ? "Let it go" : "Keep loaded";
  const acts = all && model.state === "ready" ? [
    act(pin, `${pin}: ${model.id}`, "pin", { model: model.id, pinned: !model.pinned }), " ",
    act("Unload", `Unload ${model.id}`, "unload", { model: model.id })] : [];
  return make("p", {}, make("b", {}, model.id), ` ${number(model.context)} tokens of context${able ? `, ${able}` : ""}${size} `,
    state, model.problem ? make("span", { class: "bad" }, ` ${model.problem}`) : "", " ", ...acts);
}

// A button that asks the server to load, unload or pin a model; what it refuses is told above the list.
function act(text, label, what, body) {
  const button = make("button", { type: "button", onclick: async () => {
    button.disabled = true;
    try {
      await json(`/v1/models/${what}`, body);
      setText(byId("models-told"), "");
    } catch (error) {
      setText(byId("models-told"), error.message);
    }
    button.disabled = false;
  } }, text);
  button.setAttribute("aria-label", label);
  return button;
}

export function showServed(models, health, all) {
  const now = JSON.stringify([models, health.state, all]);
  if (now === serves) return;
  serves = now;
  const cards = models.map((model) => served(model, all));
  byId("served").replaceChildren(...(cards.length ? cards : [make("p", { class: "quiet" }, `No model is loaded (${health.state}).`)]));
  if (listed) showModels();
}

// --- finding and fetching ---

const isName = (text) => /[/:]|^[~.]/.test(text) || shorts.has(text.toLowerCase());
let began = { at: 0, part: 0 };
let dropping = "";

function say(text, bad) {
  byId("pull-told").className = bad ? "bad" : "";
  setText(byId("pull-told"), text);
}

async function search(words) {
  say(`Looking for ${words} ...`);
  try {
    const found = (await json(`/page/models/search?words=${encodeURIComponent(words)}`)).models;
    byId("hits-list").replaceChildren(...byFit(found).map(hit));
    byId("hits").hidden = !found.length;
    say(found.length ? `${found.length} models for MLX, those that are fetched most first` : `Hugging Face has no model for MLX with “${words}” in its name.`);
  } catch (error) {
    byId("hits").hidden = true;
    say(error.message, true);
  }
}

async function fetchModel(name) {
  try {
    showPull((await json("/page/models/pull", { name })).pull);
  } catch (error) {
    say(error.message, true);
  }
}

function progress(pull) {
  const seconds = (Date.now() - began.at) / 1000, rate = (pull.part - began.part) / seconds;
  const size = pull.bytes ? ` of ${bytes(pull.bytes)}` : "";
  const left = seconds > 2 && rate > 0 ? `, ${bytes(rate * pull.bytes)}/s, about ${duration((1 - pull.part) / rate)} left` : "";
  return `${(100 * pull.part).toFixed(0)}%${size}${left}`;
}

export function showPull(pull) {
  const now = JSON.stringify(pull);
  if (!pull || now === last) return;
  const before = last ? JSON.parse(last) : {};
  last = now;
  const running = pull.state === "running";
  if (running && (before.state !== "running" || before.name !== pull.name || !began.part)) began = { at: Date.now(), part: pull.part };
  byId("pull-bar").hidden = byId("pull-stop").hidden = !running;
  byId("pull-go").hidden = running || pull.state === "done";
  byId("pull-drop").hidden = pull.state === "done" || !pull.part || whole.has(pull.name); // not while it is renewed
  byId("pull-bar").value = pull.part;
  say(`${pull.name}: ${running ? progress(pull) : `${pull.state}. ${pull.detail}`}`, pull.state === "failed");
  if (before.state === "running" && !running) {
    if (dropping === pull.name) dropFetched(pull.name); else showModels();
  }
}

async function dropFetched(name) {
  dropping = "";
  byId("pull-go").hidden = byId("pull-drop").hidden = true;
  say("");
  await drop(name);
}

byId("pull-name").addEventListener("input", (event) => setText(byId("pull-act"), isName(event.target.value.trim()) ? "Fetch" : "Search"));
byId("pull").addEventListener("submit", (event) => {
  event.preventDefault();
  const text = byId("pull-name").value.trim();
  if (isName(text)) fetchModel(text); else if (text) search(text);
});
byId("pull-stop").addEventListener("click", () => json("/page/models/stop", {}).catch((error) => say(error.message, true)));
byId("pull-go").addEventListener("click", () => fetchModel(JSON.parse(last).name));
byId("pull-drop").addEventListener("click", () => {
  const pull = JSON.parse(last);
  if (pull.state !== "running") { dropFetched(pull.name); return; }
  dropping = pull.name;
  json("/page/models/stop", {}).catch((error) => say(error.message, true));
});
