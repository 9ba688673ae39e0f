// Running requests with abort, and where requests went and why.

import { send } from "./api.js";
import { costs, fromMemory, reason } from "./decision.js";
import { $, announce, ask, cells, el, fill, number, seconds, write } from "./dom.js";
import { onChange, state } from "./state.js";

const TITLES = ["Agent or request", "Model", "Node", "Prompt", "From memory", "Answer", "Seconds", "Actions"];
const SHOWN = 100;

let paused = false;

export function startRequests() {
  $("decisions-pause").addEventListener("click", (event) => {
    paused = !paused;
    event.target.setAttribute("aria-pressed", String(paused));
    write(event.target, paused ? "Go on" : "Pause");
    if (!paused) showDecisions();
  });
  onChange((_, name) => {
    if (name === "requests") showRunning();
    if (name === "decisions" && !paused) showDecisions();
  });
  setInterval(() => state.requests.length && showRunning(), 1000);
}

const whose = (agent) => agent && agent.slice(agent.indexOf("/") + 1);

function showRunning() {
  $("running-none").hidden = state.requests.length > 0;
  fill($("running"), state.requests, (each) => each.id, makeRunning, (made, each) => {
    const texts = [
      each.agent ?? each.request_id, each.model, each.node ?? each.replica, number(each.prompt_tokens),
      number(each.cached_tokens), each.answers ? number(each.completion_tokens) : "waits",
      seconds(Date.now() / 1000 - each.begun),
    ];
    texts.forEach((text, position) => write(made.cells[position], text));
  });
}

function makeRunning(each) {
  const made = cells(TITLES, TITLES.slice(3, 7));
  const name = each.agent ?? each.request_id;
  made.cells.at(-1).append(el("button", { type: "button", class: "danger", "aria-label": `Abort ${name}`, onclick: () => abort(each, name) }, "Abort"));
  return made;
}

async function abort(each, name) {
  const tenant = state.caller?.admin ? "?tenant=*" : "";
  const done = await ask({
    title: `Abort the request of ${name}?`, text: "Its client gets an error. The agent keeps the memory of its earlier turns.",
    action: "Abort", danger: true,
    act: async () => (await send("DELETE", `/v1/requests/${encodeURIComponent(each.id)}${tenant}`)).json(),
  });
  if (done) announce("The request was aborted");
}

function showDecisions() {
  const latest = state.decisions.slice(-SHOWN).reverse();
  fill($("decisions"), latest, (each) => each.sequence, makeDecision, (made, each) => write(made.outcome, outcome(each)));
}

function outcome({ why, prompt_tokens: prompt }) {
  const total = why.costs_s[why.replica]?.total;
  const moved = why.pull_from ? `, ${number(why.pull_tokens)} of them moved from ${why.pull_from}` : "";
  const expected = total === undefined ? "" : `estimated ${seconds(total)}`;
  if (why.actual_cached_tokens === null) {
    return `${fromMemory(why.cached_tokens, prompt)} expected from memory${moved}; first token ${expected || "not estimated"}`;
  }
  const first = why.actual_first_token_s === null ? "no token came" : `first token after ${seconds(why.actual_first_token_s)}`;
  const disk = why.actual_disk_tokens ? `, ${number(why.actual_disk_tokens)} of them from disk` : "";
  return `${fromMemory(why.actual_cached_tokens, prompt)} from memory${disk}${moved}; ${first}${expected && ` (${expected})`}`;
}

function makeDecision(each) {
  const { why } = each;
  const at = new Date(1000 * each.at_s);
  const outcome = el("span", { class: "hint" });
  const row = el("li", {},
    el("details", {},
      el("summary", {},
        el("time", { datetime: at.toISOString() }, at.toLocaleTimeString()), " ",
        el("strong", {}, whose(each.agent) || each.sequence.split("/")[0]), " → ",
        el("strong", {}, why.node || why.replica), `: ${reason(why.why)}. `, outcome),
      el("p", { class: "hint" }, `Request ${each.sequence}, model ${each.model}, replica ${why.replica}, reason ${why.why}`
        + (why.prefill_on ? `, prefilled on ${why.prefill_on}` : "")),
      costs(why)));
  return { row, outcome };
}
