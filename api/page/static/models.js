// What is served, what loads, and buttons for models that come and go.

import { get, post } from "./api.js";
import { $, announce, el, fill, number, write } from "./dom.js";
import { onChange, state } from "./state.js";

let visible = false;
let shape = "";
let models = [];

export function startModels() {
  document.addEventListener("view", ({ detail }) => {
    visible = detail === "models";
    if (visible) read();
  });
  document.addEventListener("key-changed", () => visible && read());
  onChange(({ cluster }, name) => {
    if (name !== "cluster") return;
    // What a model's files say is known once it is loaded.
    const now = JSON.stringify([
      cluster.models.map(({ progress, ...model }) => model), cluster.replicas.map((each) => [each.id, each.up, each.proving]),
    ]);
    const changed = now !== shape;
    shape = now;
    if (visible) changed ? read() : show();
  });
}

async function read() {
  try {
    models = (await get("/v1/models")).data;
  } catch (error) {
    write($("models-error"), error.message);
    $("models-error").hidden = false;
    return;
  }
  $("models-error").hidden = true;
  show();
}

/** Shows what was read last; the cluster's events are newer than that. */
function show() {
  const known = new Map(models.map((model) => [model.id, model]));
  const live = state.cluster?.models ?? models;
  const replicas = state.cluster?.replicas ?? [];
  fill($("models"), live, (model) => model.id, make, (made, model) => {
    const own = replicas.filter((each) => each.model === model.id);
    update(made, { ...known.get(model.id), ...model }, own);
  });
}

function make({ id }) {
  const parts = { facts: el("dl"), notes: el("div"), error: el("p", { class: "notice bad", role: "alert", hidden: true }) };
  parts.state = el("p");
  parts.replicas = el("ul", { class: "plain" });
  parts.load = el("button", { type: "button", "aria-label": `Load ${id}`, onclick: () => act(parts, id, "load") }, "Load");
  parts.unload = el("button", { type: "button", "aria-label": `Unload ${id}`, onclick: () => act(parts, id, "unload") }, "Unload");
  parts.buttons = el("div", { class: "row" }, parts.load, parts.unload);
  const row = el("li", {}, el("h3", {}, id), parts.facts, parts.notes, parts.state, parts.replicas, parts.error, parts.buttons);
  return { row, ...parts };
}

function update(made, model, replicas) {
  renew(made.facts, facts(model).flatMap(([title, text]) => [el("dt", {}, title), el("dd", {}, text)]));
  renew(made.notes, [
    model.proving ? el("p", { class: "notice" }, `Plain mode until its self-test ends: ${model.proving.what}`) : null,
    ...(model.notes ?? []).map((note) => el("p", { class: "hint" }, note)),
  ]);
  renew(made.state, stateOf(model));
  renew(made.replicas, replicas.map(replica));
  made.buttons.hidden = model.load !== "request" || !state.caller?.admin;
  made.load.hidden = !["unloaded", "unloading"].includes(model.state);
  made.unload.hidden = model.state !== "loaded";
}

/** Replaces what an element has, unless it is the same. */
function renew(element, children) {
  const next = element.cloneNode(false);
  next.append(...el("div", {}, children).childNodes);
  if (!next.isEqualNode(element)) element.replaceChildren(...next.childNodes);
}

function facts(model) {
  const found = model.aliases.length ? [["Also called", model.aliases.join(", ")]] : [];
  if (!model.context_length) return found;
  return [
    ...found, ["Context", `${number(model.context_length)} tokens`], ["Reads", model.architecture.input_modalities.join(", ")],
    ["KV", `${model.kv.policy}${model.kv.why ? ` (${model.kv.why})` : ""}`],
    ["Embeddings", model.embedding.supported ? `${model.embedding.dimensions} dimensions` : "no"],
  ];
}

function stateOf(model) {
  if (model.load !== "request") return [];
  const { state: name, progress, error } = model;
  const kind = name === "loaded" ? "good" : progress ? "warn" : "";
  return [
    el("span", { class: `state ${kind}` }, progress?.what ? `${name}: ${progress.what}` : name),
    progress ? el("progress", { "aria-label": `${name} ${model.id}`, max: 1, value: progress.fraction }) : null,
    error ? el("span", { class: "hint" }, ` The last load failed: ${error}`) : null,
  ];
}

function replica(each) {
  const progress = each.loading
    ? el("progress", { "aria-label": each.loading.what, max: 1, value: each.loading.fraction }) : null;
  const text = each.loading ? each.loading.what : each.up ? "up" : "does not answer";
  return el("li", {}, `${each.id} on ${each.node}: `, el("span", { class: `state ${each.up ? "good" : each.loading ? "warn" : "bad"}` }, text), progress);
}

async function act(parts, id, what) {
  parts.error.hidden = true;
  const button = parts[what];
  button.disabled = true;
  try {
    await post(`/v1/models/${encodeURIComponent(id)}/${what}`);
    announce(what === "load" ? `${id} is loaded` : `${id} is being unloaded`);
  } catch (error) {
    write(parts.error, error.message);
    parts.error.hidden = false;
  } finally {
    button.disabled = false;
  }
  await read();
}
