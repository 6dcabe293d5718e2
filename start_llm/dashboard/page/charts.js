// The last hour and the last day as small charts, each with its numbers in words, and all of them as a table.

import { byId, bytes, duration, make, number, setText } from "./dom.js";

const SVG = "http://www.w3.org/2000/svg";
const HEIGHT = 40;
// The fields of a point, as `dashboard/history.py` lists them, behind the point's place.
const FIELDS = ["requests", "reused", "computed", "answered", "seconds_answered", "firsts", "seconds_first", "memory"];
const CHARTS = [
  { name: "Tokens a second", colour: "fresh", tell: (value) => value.toFixed(1), of: (point) => share(point.answered, point.seconds_answered) },
  { name: "Time to the first token", colour: "again", tell: duration, of: (point) => share(point.seconds_first, point.firsts) },
  { name: "Memory of models and KV", colour: "memory", tell: bytes, of: (point) => point.memory || null, stays: true },
  { name: "Prompt tokens reused", colour: "reused", tell: (value) => `${Math.round(100 * value)}%`, of: (point) => share(point.reused, point.reused + point.computed), most: 1 },
];

let history = null;
let range = "hour";

function share(part, whole) {
  return whole > 0 ? part / whole : null;
}

// The values of one chart by place; null where nothing was measured.
function valuesOf(chart, series) {
  const values = new Array(series.count).fill(null);
  for (const [place, ...numbers] of series.points) {
    values[place] = chart.of(Object.fromEntries(FIELDS.map((name, index) => [name, numbers[index]])));
  }
  if (chart.stays) for (let at = 1; at < values.length; at += 1) values[at] ??= values[at - 1];
  return values;
}

function picture(values, chart, label) {
  const measured = values.filter((value) => value !== null);
  const most = chart.most || Math.max(...measured, 0) || 1;
  const svg = document.createElementNS(SVG, "svg");
  const attributes = { viewBox: `0 0 ${values.length} ${HEIGHT}`, preserveAspectRatio: "none", role: "img", "aria-label": label };
  for (const [name, value] of Object.entries(attributes)) svg.setAttribute(name, value);
  const bars = document.createElementNS(SVG, "path");
  bars.setAttribute("class", `fill-${chart.colour}`);
  bars.setAttribute("d", values.map((value, at) => {
    if (value === null) return "";
    const height = Math.max(1, (value / most) * HEIGHT).toFixed(2);
    return `M${at} ${HEIGHT}v-${height}h.85v${height}z`;
  }).join(""));
  svg.append(bars);
  return svg;
}

function figure(chart, series) {
  const values = valuesOf(chart, series);
  const measured = values.filter((value) => value !== null);
  const words = measured.length
    ? [`latest ${chart.tell(measured.at(-1))}`, measured.length > 1 && `${chart.tell(Math.min(...measured))} to ${chart.tell(Math.max(...measured))}`]
      .filter(Boolean).join(", ")
    : "nothing measured yet";
  return make("figure", {}, make("figcaption", {}, make("b", {}, chart.name), make("p", { class: "quiet small" }, words)),
    picture(values, chart, `${chart.name}, last ${range}: ${words}`),
    make("p", { class: "ends quiet small", "aria-hidden": "true" }, make("span", {}, clock(series, 0)), make("span", {}, "now")));
}

function clock(series, place) {
  return new Date(1000 * (series.begin + place * series.seconds)).toLocaleTimeString([], { hour: "2-digit", minute: "2-digit" });
}

function table(series) {
  const columns = CHARTS.map((chart) => valuesOf(chart, series));
  return series.points.map(([place, requests]) => make("tr", {}, make("th", { scope: "row" }, clock(series, place)), make("td", {}, number(requests)),
    ...CHARTS.map((chart, at) => make("td", {}, columns[at][place] === null ? "–" : chart.tell(columns[at][place])))));
}

function draw() {
  if (!history) return;
  const series = history[range];
  byId("charts").replaceChildren(...CHARTS.map((chart) => figure(chart, series)));
  if (byId("charts-table").open) byId("charts-rows").replaceChildren(...table(series));
  for (const button of document.querySelectorAll("button[data-range]")) button.setAttribute("aria-pressed", String(button.dataset.range === range));
}

// "48,210 tokens not computed today, about 3 minutes of computing"
function headline({ spared, spared_seconds: seconds, prefill_rate: rate }) {
  if (!spared) return "";
  const minutes = Math.round(seconds / 60);
  const time = seconds === null ? "" : minutes ? `, about ${number(minutes)} minute${minutes === 1 ? "" : "s"}` : ", less than a minute";
  const speed = seconds === null ? "" : `. Reading a prompt was measured at ${number(rate)} tokens a second`;
  return [`${number(spared)} tokens not computed today${time}`, speed];
}

export function showHistory(news) {
  history = news;
  const [words, speed] = headline(news);
  byId("spared").hidden = !words;
  setText(byId("spared-words"), words || "");
  setText(byId("spared-speed"), speed || "");
  draw();
}

for (const button of document.querySelectorAll("button[data-range]")) {
  button.addEventListener("click", () => {
    range = button.dataset.range;
    draw();
  });
}
byId("charts-table").addEventListener("toggle", draw);
