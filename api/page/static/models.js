// What is served, and what loads.

import { get } from "./api.js";
import { $, el, number } from "./dom.js";
import { onChange, state } from "./state.js";

let visible = false;
let shape = "";

export function startModels() {
  document.addEventListener("view", ({ detail }) => {
    visible = detail === "models";
    if (visible) show();
  });
  document.addEventListener("key-changed", () => visible && show());
  onChange(({ cluster }, name) => {
    if (name !== "cluster") return;
    // Models change with their replicas' states.
    const now = JSON.stringify(cluster.replicas.map((each) => [each.id, each.up, each.loading, each.proving]));
    if (now === shape) return;
    shape = now;
    if (visible) show();
  });
}

async function show() {
  let loaded;
  try {
    loaded = (await get("/v1/models")).data;
  } catch (error) {
    $("models").replaceChildren(el("li", { class: "notice bad" }, error.message));
    return;
  }
  const replicas = state.cluster?.replicas ?? [];
  const known = new Set(loaded.map((model) => model.id));
  const coming = [...new Set(replicas.map((each) => each.model))].filter((name) => !known.has(name));
  $("models").replaceChildren(
    ...loaded.map((model) => card(model, replicas.filter((each) => each.model === model.id))),
    ...coming.map((id) => card({ id }, replicas.filter((each) => each.model === id))));
}

function card(model, replicas) {
  const facts = [];
  if (model.context_length) {
    facts.push(["Context", `${number(model.context_length)} tokens`], ["Reads", model.architecture.input_modalities.join(", ")],
      ["KV", `${model.kv.policy}${model.kv.why ? ` (${model.kv.why})` : ""}`],
      ["Embeddings", model.embedding.supported ? `${model.embedding.dimensions} dimensions` : "no"]);
  }
  return el("li", {}, el("h3", {}, model.id),
    facts.length ? el("dl", {}, facts.map(([title, text]) => [el("dt", {}, title), el("dd", {}, text)])) : null,
    model.proving ? el("p", { class: "notice" }, `Plain mode until its self-test ends: ${model.proving.what}`) : null,
    (model.notes ?? []).map((note) => el("p", { class: "hint" }, note)),
    el("ul", { class: "plain" }, replicas.map(replica)));
}

function replica(each) {
  const progress = each.loading
    ? el("progress", { "aria-label": each.loading.what, max: 1, value: each.loading.fraction }) : null;
  const text = each.loading ? each.loading.what : each.up ? "up" : "does not answer";
  return el("li", {}, `${each.id} on ${each.node}: `, el("span", { class: `state ${each.up ? "good" : each.loading ? "warn" : "bad"}` }, text), progress);
}
