// Reuse per client over the last day: a row a client, a column a quarter of an hour.

import { byId, make, number, short } from "./dom.js";

const SVG = "http://www.w3.org/2000/svg";
const HEIGHT = 28;
const KINDS = [["reused", 2], ["fresh", 3], ["again", 4]];

function path(slots, kind, index, most) {
  const parts = slots.map((slot) => {
    const below = KINDS.filter(([, at]) => at < index).reduce((sum, [, at]) => sum + slot[at], 0);
    const [from, high] = [(below / most) * HEIGHT, (slot[index] / most) * HEIGHT];
    return high ? `M${slot[0]} ${(HEIGHT - from).toFixed(2)}v${(-high).toFixed(2)}h.9v${high.toFixed(2)}z` : "";
  });
  const element = document.createElementNS(SVG, "path");
  element.setAttribute("class", `fill-${kind}`);
  element.setAttribute("d", parts.join(""));
  return element;
}

function row(client, slots) {
  const sums = [1, 2, 3, 4].map((index) => client.slots.reduce((sum, slot) => sum + slot[index], 0));
  const [requests, reused, fresh, again] = sums;
  const all = Math.max(1, reused + fresh + again);
  const most = Math.max(1, ...client.slots.map((slot) => slot[2] + slot[3] + slot[4]));
  const svg = document.createElementNS(SVG, "svg");
  const label = `${client.name}: ${number(requests)} requests, ${number(reused)} tokens reused, ${number(fresh)} new, ${number(again)} computed again`;
  for (const [name, value] of Object.entries({ viewBox: `0 0 ${slots} ${HEIGHT}`, preserveAspectRatio: "none", role: "img", "aria-label": label })) svg.setAttribute(name, value);
  svg.append(...KINDS.map(([kind, index]) => path(client.slots, kind, index, most)));
  return make("li", {}, make("b", { class: "name", title: client.name }, client.name), svg,
    make("span", { class: "end" }, `${((100 * reused) / all).toFixed(0)}% of ${short(all)}`));
}

export function showDay(day) {
  const rows = day.clients.map((client) => row(client, day.slots));
  byId("day").replaceChildren(...(rows.length ? rows : [make("li", { class: "quiet" }, "No request yet.")]));
}
