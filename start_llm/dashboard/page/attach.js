// What a message in the chat takes along: images and PDF files as data addresses, other files as their text.
// Dropped, pasted or chosen. Knows nothing of the chat.

import { byId, bytes, make, setText } from "./dom.js";

const MOST_IMAGE = 8e6; // bytes
const MOST_PDF = 32e6;
const PDF = "application/pdf";
const MOST_TEXT = 500_000;
const MOST_FILES = 8;
const IMAGES = ["image/png", "image/jpeg", "image/webp", "image/gif"];

let files = []; // {name, size, image}, {name, size, pdf} or {name, size, text}

async function read(file) {
  if (IMAGES.includes(file.type)) {
    if (file.size > MOST_IMAGE) throw new Error(`${file.name} has ${bytes(file.size)}; an image may have ${bytes(MOST_IMAGE)}.`);
    return { name: file.name, size: file.size, image: await dataAddress(file) };
  }
  if (file.type === PDF) { // the server reads its text
    if (file.size > MOST_PDF) throw new Error(`${file.name} has ${bytes(file.size)}; a PDF may have ${bytes(MOST_PDF)}.`);
    return { name: file.name, size: file.size, pdf: await dataAddress(file) };
  }
  if (file.size > MOST_TEXT) throw new Error(`${file.name} has ${bytes(file.size)}; a text file may have ${bytes(MOST_TEXT)}.`);
  const text = await file.text();
  if (text.includes("\0")) throw new Error(`${file.name} is neither text nor a PDF nor a PNG, JPEG, WebP or GIF image.`);
  return { name: file.name, size: file.size, text };
}

function dataAddress(file) {
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve(reader.result);
    reader.onerror = () => reject(new Error(`${file.name} cannot be read.`));
    reader.readAsDataURL(file);
  });
}

async function add(chosen) {
  setText(byId("try-files-note"), "");
  for (const file of chosen) {
    try {
      if (files.length >= MOST_FILES) throw new Error(`A message takes ${MOST_FILES} files.`);
      files.push(await read(file));
    } catch (error) {
      setText(byId("try-files-note"), error.message);
    }
  }
  showFiles();
}

function showFiles() {
  byId("try-form").dispatchEvent(new Event("files"));
  byId("try-files").replaceChildren(...files.map((file, index) => {
    const remove = make("button", { type: "button", "aria-label": `Remove ${file.name}`, onclick: () => {
      files.splice(index, 1);
      showFiles();
      byId("try-text").focus();
    } }, "Remove");
    return make("li", {}, chip(file), " ", remove);
  }));
}

// How a file is shown, in the form and in the conversation.
export function chip(file) {
  const size = make("span", { class: "quiet" }, ` ${bytes(file.size)}`);
  if (file.image) return make("span", { class: "chip" }, make("img", { src: file.image, alt: file.name, height: 48 }), ` ${file.name}`, size);
  return make("span", { class: "chip" }, file.name, size);
}

// The files for the message that is sent now; the form has none after that.
export function takeFiles() {
  const taken = files;
  files = [];
  showFiles();
  return taken;
}

export const hasFiles = () => files.length > 0;
export const hasImages = () => files.some((file) => file.image);

// The content of a message with files, as in the chat API.
export function contentOf(text, attached = []) {
  const texts = attached.filter((file) => file.text !== undefined).map((file) => `File ${file.name}:\n\`\`\`\n${file.text}\n\`\`\``);
  const whole = [...texts, text].filter(Boolean).join("\n\n");
  const images = attached.filter((file) => file.image).map((file) => ({ type: "image_url", image_url: { url: file.image } }));
  const pdfs = attached.filter((file) => file.pdf).map((file) => ({ type: "file", file: { filename: file.name, file_data: file.pdf } }));
  return images.length || pdfs.length ? [...pdfs, ...(whole ? [{ type: "text", text: pdfs.length ? `\n\n${whole}` : whole }] : []), ...images] : whole;
}

const form = byId("try-form");
form.addEventListener("dragover", (event) => {
  event.preventDefault();
  form.classList.add("over");
});
form.addEventListener("dragleave", () => form.classList.remove("over"));
form.addEventListener("drop", (event) => {
  event.preventDefault();
  form.classList.remove("over");
  add([...event.dataTransfer.files]);
});
byId("try-text").addEventListener("paste", (event) => {
  const pasted = [...event.clipboardData.files];
  if (!pasted.length) return;
  event.preventDefault();
  add(pasted);
});
byId("try-choose").addEventListener("click", () => byId("try-file").click());
byId("try-file").addEventListener("change", () => {
  add([...byId("try-file").files]);
  byId("try-file").value = "";
});
