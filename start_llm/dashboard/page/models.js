// Models: what is loaded, what is on this disk, and fetching one.

import { byId, copier, bytes, make, number, setText } from "./dom.js";
import { json } from "./net.js";

let listed = false;
let last = "";
let serves = "";

// What is said of a model that takes more memory than there is for models; nothing where that is not known.
function tooLarge(model, memory) {
  if (!memory || (model.fits ?? model.needs <= memory)) return null;
  if (model.needs <= memory) return make("span", { class: "tag" }, "meant for a machine with more memory");
  return make("span", { class: "tag" }, `does not fit: needs ${bytes(model.needs)}, there are ${bytes(memory)}`);
}

// Those that fit first.
function byFit(models, memory) {
  return [...models].sort((a, b) => Number(tooLarge(a, memory) !== null) - Number(tooLarge(b, memory) !== null));
}

function row(model, memory) {
  const able = model.problem || [...model.can, model.short && `short name ${model.short}`].filter(Boolean).join(", ");
  const isLoaded = model.loaded;
  return make("tr", {},
    make("th", { scope: "row" }, model.name, " ", isLoaded ? null : tooLarge(model, memory), isLoaded ? make("span", { class: "tag good" }, "loaded") : null),
    make("td", {}, bytes(model.bytes)), make("td", {}, model.context ? number(model.context) : "–"),
    make("td", { class: model.problem ? "bad words" : "words" }, able),
    make("td", {}, model.problem || isLoaded ? "" : act("Load", `Load ${model.name}`, "load", { model: model.name }), " ",
      model.problem ? "" : copier(model.command, `the command that serves ${model.name}`)));
}

function known(model, memory) {
  const button = make("button", { type: "button", onclick: () => fetchModel(model.short) }, "Fetch");
  button.setAttribute("aria-label", `Fetch ${model.short}`);
  return make("tr", {}, make("th", { scope: "row" }, model.short), make("td", {}, bytes(model.bytes)),
    make("td", { class: "words" }, model.note, " ", tooLarge(model, memory)), make("td", {}, button));
}

export async function showModels() {
  try {
    const found = await json("/page/models");
    byId("models-list").replaceChildren(...byFit(found.models, found.memory).map((model) => row(model, found.memory)));
    byId("models-list").parentElement.hidden = !found.models.length;
    byId("known").replaceChildren(...byFit(found.known, found.memory).map((model) => known(model, found.memory)));
    byId("pull-names").replaceChildren(...found.known.map((model) => make("option", { value: model.short })));
    setText(byId("models-told"), found.models.length ? "" : "No model is on this disk.");
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
  const state = model.state === "ready" ? "" : make("span", { class: "tag" }, model.state);
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

// --- fetching ---

async function fetchModel(name) {
  try {
    showPull((await json("/page/models/pull", { name })).pull);
  } catch (error) {
    byId("pull-told").className = "bad";
    setText(byId("pull-told"), error.message);
  }
}

export function showPull(pull) {
  const now = JSON.stringify(pull);
  if (!pull || now === last) return;
  const ended = last.includes('"running"') && pull.state !== "running";
  last = now;
  const running = pull.state === "running";
  byId("pull-bar").hidden = byId("pull-stop").hidden = !running;
  byId("pull-bar").value = pull.part;
  byId("pull-told").className = pull.state === "failed" ? "bad" : "";
  const told = running ? `${(100 * pull.part).toFixed(0)}%` : `${pull.state}. ${pull.detail}`;
  setText(byId("pull-told"), `${pull.name}: ${told}`);
  if (ended) showModels();
}

byId("pull").addEventListener("submit", (event) => {
  event.preventDefault();
  fetchModel(byId("pull-name").value);
});
byId("pull-stop").addEventListener("click", () => json("/page/models/stop", {}).catch(() => {}));
