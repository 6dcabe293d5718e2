// Requests to the server, with the key that the user gave. The key stays in this tab.

const NAME = "start_llm_key";

export const key = {
  get: () => sessionStorage.getItem(NAME),
  set: (value) => sessionStorage.setItem(NAME, value),
  forget: () => sessionStorage.removeItem(NAME),
};

export async function ask(path, options = {}) {
  const headers = { ...(key.get() ? { Authorization: `Bearer ${key.get()}` } : {}), ...options.headers };
  try {
    return await fetch(path, { cache: "no-store", ...options, headers });
  } catch (error) { // a browser's own words for it are no sentence
    throw error instanceof TypeError ? new Error("the server does not answer") : error;
  }
}

// What the server says is wrong, in its own words.
export async function complaint(answer) {
  const body = await answer.json().catch(() => ({}));
  return body.detail || (body.error && body.error.message) || `the server answers ${answer.status}`;
}

export async function json(path, body) {
  const options = body === undefined ? {} : { method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(body) };
  const answer = await ask(path, options);
  if (!answer.ok) throw new Error(await complaint(answer));
  return answer.json();
}

const STAY = 5000; // milliseconds
let leaving = false; // Firefox breaks streams off before it leaves the page
addEventListener("beforeunload", () => {
  leaving = true;
  setTimeout(() => { leaving = false; }, STAY); // who was asked to stay, or loaded a file
});

async function read(reader) {
  try {
    return await reader.read();
  } catch (error) {
    // What had come stays as it is. A page that is still there after that tells what went wrong.
    if (leaving) await new Promise((done) => { setTimeout(done, STAY); });
    throw error instanceof TypeError ? new Error("the connection to the server was lost") : error;
  }
}

// The data of each server-sent event, as text, until the stream ends.
export async function* events(answer) {
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await read(reader);
    if (done) return;
    const parts = (rest + value).split("\n\n");
    rest = parts.pop();
    for (const part of parts) {
      const data = part.split("\n").filter((line) => line.startsWith("data: ")).map((line) => line.slice(6)).join("\n");
      if (data) yield data;
    }
  }
}
