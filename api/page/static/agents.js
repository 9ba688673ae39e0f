// The list of agents: program, size, primary and copies.

import { get } from "./api.js";
import { actionsOf } from "./agent_actions.js";
import { $, ago, bytes, cells, el, fill, number, write } from "./dom.js";
import { onChange, state } from "./state.js";

const TITLES = ["Agent", "Program", "Model", "Tokens", "Size", "Primary", "Copies", "Last used", "Actions"];
const PAGE = 50;
const EVERY_S = 5;

let visible = false;
let pages = 1;
let listing = null;
let timer = 0;

export function startAgents() {
  document.addEventListener("view", ({ detail }) => {
    visible = detail === "agents";
    clearInterval(timer);
    if (!visible) return;
    list();
    timer = setInterval(() => document.hidden || list(), 1000 * EVERY_S);
  });
  document.addEventListener("agents-changed", () => visible && list());
  document.addEventListener("key-changed", () => visible && list());
  $("agents-all").addEventListener("change", list);
  $("agents-more").addEventListener("click", () => {
    pages += 1;
    list();
  });
  onChange((_, name) => {
    if (name === "caller" && visible) list();
  });
}

async function list() {
  listing ??= read().finally(() => (listing = null));
  return listing;
}

async function read() {
  const every = state.caller?.admin && $("agents-all").checked;
  const tenant = every ? "tenant=*" : "";
  const agents = [];
  let more = true;
  try {
    for (let page = 0, after = ""; more && page < pages; page += 1) {
      const found = await get(`/v1/agents?limit=${PAGE}&after=${encodeURIComponent(after)}&${tenant}`);
      agents.push(...found.data);
      more = found.has_more;
      after = found.last_id;
    }
    await addPlaces(agents, tenant);
  } catch (error) {
    write($("agents-none"), error.message);
    $("agents-none").hidden = false;
    return;
  }
  $("agents-more").hidden = !more;
  $("agents-none").hidden = agents.length > 0;
  fill($("agents"), agents, (agent) => `${agent.tenant ?? ""}/${agent.id}`, makeRow, showRow);
}

async function addPlaces(agents, tenant) {
  if (!state.caller?.admin) return;
  const { agents: placed } = await get(`/v1/cluster?agents=1000&${tenant}`);
  const places = new Map(placed.map((place) => [`${place.tenant ?? ""}/${place.id}`, place]));
  for (const agent of agents) Object.assign(agent, places.get(`${agent.tenant ?? ""}/${agent.id}`));
}

function makeRow() {
  return { ...cells(TITLES, ["Tokens", "Size"]), actions: "" };
}

function showRow(made, agent) {
  const texts = [
    agent.tenant ? `${agent.tenant}/${agent.id}` : agent.id, agent.program ?? "–", agent.model, number(agent.tokens),
    bytes(agent.bytes), agent.home ?? "–", agent.copies?.join(", ") || "–", ago(agent.last_used),
  ];
  texts.forEach((text, position) => write(made.cells[position], text));
  const possible = `${agent.home} ${state.caller?.admin} ${state.cluster?.nodes.length}`;
  if (made.actions !== possible) {
    made.actions = possible;
    made.cells.at(-1).replaceChildren(el("div", { class: "actions" }, actionsOf(agent)));
  }
}
