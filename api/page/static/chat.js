// The chat: messages with pictures to an agent, and what of each turn came from memory.

import { agentPath, events, get, send } from "./api.js";
import { actionsOf } from "./agent_actions.js";
import { costs, fromMemory, reason, sources } from "./decision.js";
import { $, announce, el, number, seconds, share, write } from "./dom.js";
import { onChange, state } from "./state.js";

const AGENT = "satchel-agent";
const PICTURES_MAX = 16;

let pictures = [];
let running = null;
let shown = "";
// The model that was chosen, by hand or as the agent's; its option may still have to come.
let model = "";

export function startChat() {
  const first = decodeURIComponent(location.hash.match(/^#chat\/(.+)$/)?.[1] ?? "");
  choose(first || sessionStorage.getItem(AGENT) || newId());
  $("chat-agent").addEventListener("change", () => choose($("chat-agent").value.trim() || newId()));
  $("chat-new").addEventListener("click", () => {
    choose(newId());
    $("chat-text").focus();
  });
  $("chat-model").addEventListener("change", () => {
    model = $("chat-model").value;
    showProving();
  });
  $("chat-form").addEventListener("submit", (event) => {
    event.preventDefault();
    say();
  });
  $("chat-text").addEventListener("keydown", (event) => {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    say();
  });
  $("chat-stop").addEventListener("click", () => running?.abort());
  $("chat-files").addEventListener("change", async () => {
    await addPictures($("chat-files").files);
    $("chat-files").value = "";
  });
  $("chat-text").addEventListener("paste", (event) => {
    if (event.clipboardData.files.length) {
      event.preventDefault();
      addPictures(event.clipboardData.files);
    }
  });
  $("chat-more").open = matchMedia("(min-width: 44rem)").matches;
  acceptDrops(document.querySelector('section[data-view="chat"]'));
  document.addEventListener("view", ({ detail }) => {
    const named = decodeURIComponent(location.hash.match(/^#chat\/(.+)$/)?.[1] ?? "");
    if (detail === "chat" && named && named !== shown) choose(named);
    if (detail === "chat") listModels();
  });
  document.addEventListener("key-changed", () => {
    listModels();
    choose(shown);
  });
  document.addEventListener("agents-changed", showPlace);
  onChange((_, name) => {
    if (name === "caller") showPlace();
    if (name === "cluster") showProving();
  });
}

function newId() {
  const random = crypto.getRandomValues(new Uint8Array(3));
  return `chat-${[...random].map((byte) => byte.toString(16).padStart(2, "0")).join("")}`;
}

async function choose(id) {
  running?.abort();
  shown = id;
  $("chat-agent").value = id;
  sessionStorage.setItem(AGENT, id);
  $("chat-log").replaceChildren();
  const agent = await showPlace();
  if (!agent) return;
  model = agent.model;
  showModel();
  try {
    const { messages } = await get(agentPath({ id }, "/transcript"));
    if (shown === id && !$("chat-log").childElementCount) messages.forEach(showOld);
    toEnd();
  } catch (error) {
    write($("chat-place"), error.message);
  }
}

async function listModels() {
  try {
    const { data } = await get("/v1/models");
    // What a model reads and writes is unknown until it was loaded once.
    const chatting = data.filter(({ architecture: known }) =>
      !known || (known.input_modalities.includes("text") && known.output_modalities.includes("text")));
    $("chat-model").replaceChildren(...chatting.map(({ id }) => el("option", {}, id)));
    showModel();
    const { data: agents } = await get("/v1/agents?limit=100");
    $("known-agents").replaceChildren(...agents.map((agent) => el("option", { value: agent.id })));
  } catch (error) {
    write($("chat-place"), error.message);
  }
}

function showModel() {
  if ([...$("chat-model").options].some((option) => option.value === model)) $("chat-model").value = model;
  showProving();
}

/** Says what the model cannot do yet while its self-test runs. */
function showProving() {
  const name = $("chat-model").value;
  const proving = state.cluster?.replicas.find((each) => each.model === name && each.proving)?.proving;
  $("chat-proving").hidden = !proving;
  write($("chat-proving"), proving
    ? `${name} sees no pictures and keeps no KV until its self-test ends (${proving.what}).` : "");
}

/** Shows where the agent's memory is, and what can be done with it. Returns the agent, null if it has no memory. */
async function showPlace() {
  const id = shown;
  let agent = { id };
  let text = "A new agent: its memory begins with your first message.";
  try {
    const found = await get(agentPath({ id }));
    agent = { ...found, home: null };
    text = `${number(found.tokens)} tokens in ${number(found.messages)} messages, ${found.tier}`;
    if (state.caller?.admin) {
      const place = await get(`/v1/cluster/agents/${encodeURIComponent(id)}`);
      agent.home = place.home;
      text += `, on ${place.home || "the only node"}`;
      if (place.copies.length) text += `, copied to ${place.copies.join(", ")}`;
    }
  } catch (error) {
    if (error.status !== 404) text = error.message;
  }
  if (shown !== id) return null;
  write($("chat-place"), text);
  $("chat-actions").replaceChildren(...(agent.turns ? actionsOf(agent, { chat: false }) : []));
  return agent.turns ? agent : null;
}

// Pictures.

function acceptDrops(section) {
  section.addEventListener("dragover", (event) => {
    if (!event.dataTransfer.types.includes("Files")) return;
    event.preventDefault();
    section.classList.add("dropping");
  });
  section.addEventListener("dragleave", (event) => {
    if (!section.contains(event.relatedTarget)) section.classList.remove("dropping");
  });
  section.addEventListener("drop", (event) => {
    section.classList.remove("dropping");
    if (!event.dataTransfer.files.length) return;
    event.preventDefault();
    addPictures(event.dataTransfer.files);
  });
}

async function addPictures(files) {
  for (const file of [...files].filter((each) => each.type.startsWith("image/"))) {
    if (pictures.length >= PICTURES_MAX) break;
    pictures.push({ name: file.name || "picture", url: await dataUrl(file) });
  }
  showPictures();
  announce(`${pictures.length} pictures to send`);
}

function dataUrl(file) {
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve(reader.result);
    reader.onerror = () => reject(reader.error);
    reader.readAsDataURL(file);
  });
}

function showPictures() {
  $("chat-pictures").replaceChildren(...pictures.map((picture) =>
    el("li", {}, el("img", { src: picture.url, alt: picture.name }),
      el("button", {
        type: "button", "aria-label": `Remove ${picture.name}`,
        onclick: () => {
          pictures = pictures.filter((each) => each !== picture);
          showPictures();
          $("chat-text").focus();
        },
      }, "×"))));
}

// Messages.

function showMessage(role, text, shownPictures = []) {
  const body = el("div", { class: "text" }, text);
  const row = el("li", { class: `message ${role}` },
    el("p", { class: "who" }, role === "user" ? "You" : role === "assistant" ? shown : role),
    shownPictures.length ? el("div", { class: "pictures" }, shownPictures) : null, body);
  $("chat-log").append(row);
  return { row, body };
}

function showOld(message) {
  const parts = typeof message.content === "string" ? [{ type: "text", text: message.content }] : message.content ?? [];
  const text = parts.map((part) => part.text ?? "").join("");
  const seen = parts.filter((part) => part.type !== "text").map(() => el("span", { class: "chip" }, "picture"));
  const calls = (message.tool_calls ?? []).map((call) => `${call.function.name}(${call.function.arguments})`);
  showMessage(message.role, [text, ...calls].filter(Boolean).join("\n"), seen);
}

function toEnd() {
  $("chat-log").scrollTop = $("chat-log").scrollHeight;
}

/** Changes the messages, and stays at their end if it is shown. */
function keepingEnd(change) {
  const atEnd = $("chat-log").scrollHeight - $("chat-log").scrollTop - $("chat-log").clientHeight < 60;
  change();
  if (atEnd) toEnd();
}

async function say() {
  const text = $("chat-text").value.trim();
  if (running || (!text && !pictures.length)) return;
  const sent = pictures;
  showMessage("user", text, sent.map((picture) => el("img", { src: picture.url, alt: picture.name })));
  $("chat-text").value = "";
  pictures = [];
  showPictures();
  const answer = showMessage("assistant", "");
  toEnd();
  setRunning(new AbortController());
  try {
    await stream(answer, text, sent);
  } catch (error) {
    const stopped = error.name === "AbortError";
    answer.row.append(el("p", { class: stopped ? "hint" : "notice bad", role: "alert" },
      stopped ? "Stopped. This turn is not kept." : error.message));
    if (!stopped && !answer.body.textContent) {
      // The message is given back, so that nothing has to be written again.
      $("chat-text").value = text;
      pictures = sent;
      showPictures();
    }
  } finally {
    setRunning(null);
    toEnd();
  }
  document.dispatchEvent(new CustomEvent("agents-changed"));
}

function setRunning(controller) {
  running = controller;
  $("chat-stop").hidden = !controller;
  $("chat-send").disabled = Boolean(controller);
  $("chat-log").setAttribute("aria-busy", String(Boolean(controller)));
}

function content(text, sent) {
  if (!sent.length) return text;
  const images = sent.map((picture) => ({ type: "image_url", image_url: { url: picture.url } }));
  return text ? [...images, { type: "text", text }] : images;
}

async function stream(answer, text, sent) {
  const began = performance.now();
  const response = await send("POST", "/v1/chat/completions", {
    signal: running.signal,
    headers: { "X-Agent-ID": shown },
    body: {
      model: $("chat-model").value || undefined, stream: true, stream_options: { include_usage: true },
      max_tokens: Number($("chat-most").value) || undefined, agent_continue: true, messages: [{ role: "user", content: content(text, sent) }],
    },
  });
  const turn = { headers: response.headers, usage: null, memory: null, firstMs: null };
  const thought = el("div", { class: "text" });
  const thinking = el("details", { class: "thinking" }, el("summary", {}, "Reasoning"), thought);
  for await (const { data } of events(response)) {
    if (data === "[DONE]") continue;
    const chunk = JSON.parse(data);
    if (chunk.error) throw new Error(chunk.error.message);
    turn.usage = chunk.usage ?? turn.usage;
    turn.memory = chunk.satchel ?? turn.memory;
    const delta = chunk.choices?.[0]?.delta ?? {};
    if (delta.content || delta.reasoning_content) turn.firstMs ??= performance.now() - began;
    if (delta.reasoning_content) {
      if (!thinking.isConnected) answer.body.before(thinking);
      thought.append(delta.reasoning_content);
    }
    if (delta.content) keepingEnd(() => answer.body.append(delta.content));
  }
  turn.endMs = performance.now() - began;
  showTurn(answer, turn);
}

/** Shows below an answer what of its prompt came from memory, where it was computed, and why there. */
function showTurn(answer, turn) {
  const { headers, usage } = turn;
  const cached = usage?.prompt_tokens_details?.cached_tokens ?? 0;
  const prompt = usage?.prompt_tokens ?? 0;
  const why = headers.get("x-satchel-why") ?? "";
  const decoded = Math.max(0, (usage?.completion_tokens ?? 0) - 1) / Math.max(0.001, (turn.endMs - turn.firstMs) / 1000);
  const chips = el("span", { class: "chips" });
  const meter = el("meter", { min: 0, max: Math.max(1, prompt), value: cached, "aria-label": "Share of the prompt from memory" });
  const details = el("details", {}, el("summary", {}, `On ${headers.get("x-satchel-node") || headers.get("x-satchel-replica")}: ${reason(why)}`));
  details.addEventListener("toggle", () => details.open && details.scrollIntoView({ block: "nearest" }));
  answer.row.append(el("div", { class: "turn" },
    el("p", {}, meter, el("strong", { class: "memory" }, ` From memory: ${fromMemory(cached, prompt)} `), chips),
    details,
    el("p", { class: "hint" },
      `${number(usage?.completion_tokens ?? 0)} tokens, the first after ${seconds((turn.firstMs ?? turn.endMs) / 1000)}, then ${Math.round(decoded)} tokens/s`),
    turn.memory && !turn.memory.kept
      ? el("p", { class: "notice bad" }, `This turn is not kept in the agent's memory: ${turn.memory.reason}.`) : null));
  announce(`Answer complete. ${share(cached, prompt)} of the prompt came from memory.`);
  if (!state.caller?.admin) {
    details.append(el("p", { class: "hint" }, `Reason: ${why}. Costs are shown to administrators.`));
    return;
  }
  // Not awaited: the turn is over, and the next message waits for none of this.
  explain(headers.get("x-request-id"), cached, chips, details);
}

/** Adds to a shown turn where its prompt's KV came from, and what the router compared. */
async function explain(request, cached, chips, details) {
  try {
    const path = `/v1/cluster/decisions/${encodeURIComponent(request)}`;
    let explained = await get(path);
    if (explained.actual_cached_tokens === null) {
      // The router hears of the end a moment later than this page.
      await new Promise((done) => setTimeout(done, 500));
      explained = await get(path);
    }
    keepingEnd(() => {
      chips.append(...sources(explained, cached));
      details.append(costs(explained));
    });
  } catch (error) {
    details.append(el("p", { class: "hint" }, error.message));
  }
}
