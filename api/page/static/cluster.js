// What runs: nodes, links, replicas, memory by its use, and plots.

import { $, bytes, cells, el, fill, number, write } from "./dom.js";
import { startPlots } from "./plots.js";
import { onChange } from "./state.js";

const NODE = ["Node", "State", "Links", "Memory free", "KV in memory", "KV on disk", "Agents"];
const REPLICA = ["Replica", "Node", "State", "Running", "Waiting", "Tokens/s", "KV slots", "Memory"];
const SLOTS = ["running", "kept", "free"];

export function startCluster() {
  startPlots();
  onChange(({ cluster }, name) => {
    if (name !== "cluster") return;
    showTiles(cluster);
    fill($("nodes"), cluster.nodes, (node) => node.name, () => cells(NODE, NODE.slice(3)), showNode);
    $("nodes-one").hidden = cluster.nodes.length !== 1;
    fill($("replicas"), cluster.replicas, (each) => each.id, makeReplica, showReplica);
  });
}

const sum = (items, value) => items.reduce((total, item) => total + (value(item) ?? 0), 0);

function showTiles({ nodes, replicas }) {
  const up = nodes.filter((node) => node.up).length;
  const tiles = [
    ["Nodes up", `${up} of ${nodes.length}`],
    ["Tokens/s", number(Math.round(10 * sum(replicas, (each) => each.tokens_per_s)) / 10)],
    ["Running", number(sum(replicas, (each) => each.running))],
    ["Waiting", number(sum(replicas, (each) => each.waiting))],
    ["KV in memory", bytes(sum(nodes, (node) => node.tiers.memory_bytes))],
    ["KV on disk", bytes(sum(nodes, (node) => node.tiers.disk_bytes))],
  ];
  fill($("tiles"), tiles, ([title]) => title, ([title]) => {
    const value = el("dd");
    return { row: el("div", {}, el("dt", {}, title), value), value };
  }, (made, [, text]) => write(made.value, text));
}

function nodeState(node) {
  if (!node.up) return ["down", "bad"];
  if (node.draining) return ["leaving", "warn"];
  if (node.disk_full || node.disk_error) return [node.disk_error || "its disk is full", "warn"];
  if (node.waits_for.length) return [`waits for ${node.waits_for.join(", ")}`, "warn"];
  return ["up", "good"];
}

function link({ from, kind, bytes_per_s: rate }) {
  return `from ${from}${kind ? ` (${kind})` : ""}${rate ? ` ${bytes(rate)}/s` : ""}`;
}

function showState(cell, [text, kind]) {
  if (cell.dataset.state === kind && cell.textContent === text) return;
  cell.dataset.state = kind;
  cell.replaceChildren(el("span", { class: `state ${kind}` }, text));
}

function showNode(made, node) {
  const [name, state, links, free, memory, disk, agents] = made.cells;
  write(name, `${node.name} ${node.address}`);
  showState(state, nodeState(node));
  write(links, node.links.map(link).join("\n") || "–");
  write(free, bytes(node.memory_free_bytes));
  write(memory, bytes(node.tiers.memory_bytes));
  write(disk, bytes(node.tiers.disk_bytes));
  write(agents, number(node.agents));
}

function makeReplica() {
  const made = cells(REPLICA, ["Running", "Waiting", "Tokens/s", "Memory"]);
  const parts = SLOTS.map((use) => el("span", { class: `part ${use}` }));
  const text = el("span", { class: "hint" });
  const bar = el("div", { class: "stack", "aria-hidden": "true" }, parts);
  made.cells[6].append(bar, text);
  return { ...made, parts, text };
}

function replicaState(each) {
  if (each.loading) {
    const share = each.loading.fraction === null ? "" : ` ${Math.round(100 * each.loading.fraction)}%`;
    return [`${each.loading.what}${share}`, each.loading.what.startsWith("it cannot") ? "bad" : "warn"];
  }
  if (!each.up) return ["does not answer", "bad"];
  if (each.proving) return [`plain mode until its self-test ends: ${each.proving.what}`, "warn"];
  return ["up", "good"];
}

function showReplica(made, each) {
  const [name, node, state, running, waiting, rate, , memory] = made.cells;
  write(name, each.id);
  write(node, each.node);
  showState(state, replicaState(each));
  write(running, number(each.running));
  write(waiting, number(each.waiting));
  write(rate, number(each.tokens_per_s));
  write(memory, `${bytes(each.memory_bytes)} of ${bytes(each.memory_bytes_max)}`);
  const all = Math.max(1, sum(SLOTS, (use) => each.slots[use]));
  SLOTS.forEach((use, position) => (made.parts[position].style.width = `${(100 * each.slots[use]) / all}%`));
  write(made.text, SLOTS.map((use) => `${number(each.slots[use])} ${use}`).join(", "));
}
