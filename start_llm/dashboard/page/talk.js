// What a chat completion says, as it comes. Knows nothing of the page.

import { ask, complaint, events } from "./net.js";

// Runs one request. `change` is called with the message so far; returns {message, finish, first, rate, usage}.
export async function talk(body, signal, change) {
  const began = performance.now();
  const answer = await ask("/v1/chat/completions", {
    method: "POST",
    headers: { "Content-Type": "application/json" },
    body: JSON.stringify({ ...body, stream: true, stream_options: { include_usage: true } }),
    signal,
  });
  if (!answer.ok) throw new Error(await complaint(answer));
  const message = { role: "assistant", content: "", reasoning_content: "", tool_calls: [] };
  const seen = { first: 0, last: 0, pieces: 0, usage: null, finish: "" };
  let whole = false;
  for await (const data of events(answer)) {
    if (data === "[DONE]") {
      whole = true;
      break;
    }
    const part = JSON.parse(data);
    if (part.error) throw new Error(part.error.message);
    if (part.usage) seen.usage = part.usage;
    seen.finish = part.choices?.[0]?.finish_reason || seen.finish;
    const delta = part.choices && part.choices[0] && part.choices[0].delta;
    if (!delta || !add(message, delta)) continue;
    seen.last = performance.now();
    seen.first = seen.first || seen.last;
    seen.pieces += 1;
    change(message, rate(seen));
  }
  if (!whole) throw new Error("the server ended the answer early");
  return { message, finish: seen.finish, first: seen.first ? (seen.first - began) / 1000 : null, rate: rate(seen), usage: seen.usage };
}

// Tokens a second behind the first one; a piece is about a token.
function rate(seen) {
  const tokens = seen.usage ? seen.usage.completion_tokens : seen.pieces;
  const seconds = (seen.last - seen.first) / 1000;
  return tokens > 1 && seconds > 0 ? (tokens - 1) / seconds : null;
}

function add(message, delta) {
  let told = false;
  for (const name of ["content", "reasoning_content"]) {
    if (delta[name]) { message[name] += delta[name]; told = true; }
  }
  for (const piece of delta.tool_calls || []) {
    const call = message.tool_calls[piece.index] ??= { id: "", type: "function", function: { name: "", arguments: "" } };
    if (piece.id) call.id = piece.id;
    const said = piece.function || {};
    if (said.name) call.function.name += said.name;
    if (said.arguments) call.function.arguments += said.arguments;
    told = true;
  }
  return told;
}
