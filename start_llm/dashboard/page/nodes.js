// The servers that the proxy shares requests with, asked anew while somebody looks at them.

import { byId, bytes, make, number, setText } from "./dom.js";
import { json } from "./net.js";

const AGAIN_MS = 5000;
let timer = 0;

function row(node) {
  const answers = node.state === "ready" || node.state === "busy";
  const figures = [node.version, node.loaded.join(", "), number(node.running), number(node.waiting), bytes(node.memory_bytes),
    number(node.stored_tokens), `${Math.round(100 * node.share)}%`];
  return make("tr", {}, make("th", { scope: "row" }, node.name),
    make("td", { class: answers ? "good" : "bad", title: node.detail || null }, node.state),
    ...(node.version ? figures.map((value) => make("td", {}, value || "\u2013")) : [make("td", { class: "words quiet", colspan: figures.length }, node.detail)]));
}

export async function openNodes() {
  clearTimeout(timer);
  if (byId("server").hidden || document.hidden) {
    timer = setTimeout(openNodes, AGAIN_MS);
    return;
  }
  try {
    const { nodes } = await json("/page/nodes");
    byId("nodes").hidden = !nodes.length;
    if (!nodes.length) return; // NODES is read at the start only
    byId("nodes-list").replaceChildren(...nodes.map(row));
    setText(byId("nodes-told"), "");
  } catch (error) {
    byId("nodes").hidden = false;
    setText(byId("nodes-told"), `Nodes cannot be shown: ${error.message}`);
  }
  clearTimeout(timer);
  timer = setTimeout(openNodes, AGAIN_MS);
}
