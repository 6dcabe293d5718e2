// A worker: reads Markdown that takes longer than the page may stand still.

import { html } from "./marks.js";

onmessage = ({ data: { text, ms } }) => {
  try {
    postMessage(html(text, ms));
  } catch {
    postMessage(null);
  }
};
