// What can be done with an agent: buttons, and the dialogs behind them.

import { agentPath, post, send } from "./api.js";
import { $, announce, ask, bytes, el } from "./dom.js";
import { state } from "./state.js";

/** Makes an agent's buttons. `agent` has `id`, `home` (null if unknown), and `tenant` if it is another one's. */
export function actionsOf(agent, { chat = true } = {}) {
  const button = (text, act, kind = null) =>
    el("button", { type: "button", class: kind, "aria-label": `${text} ${agent.id}`, onclick: act }, text);
  const nodes = state.cluster?.nodes ?? [];
  return [
    chat && !agent.tenant
      ? el("a", { class: "button", href: `#chat/${encodeURIComponent(agent.id)}`, "aria-label": `Chat with ${agent.id}` }, "Chat")
      : null,
    state.caller?.admin && nodes.length > 1 ? button("Move", () => move(agent)) : null,
    button("Fork", () => fork(agent)),
    button("Pack", () => pack(agent)),
    button("Forget", () => forget(agent), "danger"),
  ].filter(Boolean);
}

function changed(text) {
  announce(text);
  document.dispatchEvent(new CustomEvent("agents-changed"));
}

async function move(agent) {
  const options = state.cluster.nodes.filter((node) => node.up && node.name !== agent.home).map((node) => node.name);
  const done = await ask({
    title: `Move ${agent.id}`,
    text: options.length
      ? "Its branches and KV are copied there first; then that node commits its turns. A turn that runs goes on."
      : "No other node is up.",
    fields: options.length ? [{ name: "to", label: "To node", options }] : [],
    action: "Move",
    act: ({ to }) => {
      if (!to) throw new Error("there is no node to move to");
      return post(agentPath(agent, "/move"), { to });
    },
  });
  if (done) changed(`${agent.id} moved`);
}

async function fork(agent) {
  const done = await ask({
    title: `Fork ${agent.id}`, text: "The copy has the same memory and goes its own way.",
    fields: [{ name: "as", label: "New agent", value: `${agent.id}-2` }], action: "Fork",
    act: (values) => post(agentPath(agent, "/fork"), values),
  });
  if (done) changed(`${agent.id} was forked`);
}

async function forget(agent) {
  const done = await ask({
    title: `Forget ${agent.id}?`, text: "Its transcripts and KV are erased on all nodes. This cannot be undone.",
    action: "Forget", danger: true,
    act: async () => (await send("DELETE", agentPath(agent))).json(),
  });
  if (!done) return;
  // The button that had the focus is gone.
  $("main").focus();
  changed(`${agent.id} was forgotten`);
}

async function pack(agent) {
  const done = await ask({
    title: `Pack ${agent.id}`, action: "Download",
    text: `The file has its transcripts, token ids and KV${agent.bytes ? ` (transcripts ${bytes(agent.bytes)})` : ""}. `
      + "Whoever has it can read the conversation.",
    act: async () => (await send("GET", agentPath(agent, "/satchel"))).blob(),
  });
  if (!(done instanceof Blob)) return;
  const url = URL.createObjectURL(done);
  el("a", { href: url, download: `${agent.id}.satchel` }).click();
  setTimeout(() => URL.revokeObjectURL(url), 60_000);
  announce(`${agent.id} was packed`);
}
