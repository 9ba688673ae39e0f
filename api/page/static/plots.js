// The last hour: drawn with uPlot, which is loaded before this module.

import { get } from "./api.js";
import { $, bytes, el, number, write } from "./dom.js";
import { onChange } from "./state.js";

const KEPT = 720;
const HEIGHT = 160;

const PLOTS = [
  { title: "Tokens a second", lines: [["tokens/s", "tokens_per_s"]], shown: (value) => number(Math.round(value)) },
  { title: "Requests", lines: [["running", "running"], ["waiting", "waiting"]], shown: number },
  { title: "Memory", lines: [["in use", "memory_bytes"], ["kept KV", "kept_bytes"], ["KV on disk", "disk_bytes"]], shown: bytes },
  {
    title: "Prompt tokens from memory", lines: [["% from memory", "hits"]], range: [0, 100],
    shown: (value) => `${Math.round(value)}%`,
  },
];

const drawn = [];
let columns = null;
let reading = null;

export function startPlots() {
  for (const plot of PLOTS) {
    const caption = el("figcaption", {}, plot.title);
    const box = el("div", { "aria-hidden": "true" });
    const now = el("p", { class: "hint" });
    $("plots").append(el("figure", {}, caption, box, now));
    drawn.push({ plot, box, now, chart: null });
  }
  document.addEventListener("view", ({ detail }) => detail === "cluster" && draw());
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
  addEventListener("resize", () => {
    for (const { chart, box } of drawn) if (box.clientWidth) chart?.setSize({ width: box.clientWidth, height: HEIGHT });
  });
  onChange(({ samples, caller }, name) => {
    if (name === "caller" && caller.admin) {
      reading = get("/v1/cluster/history").then((found) => {
        columns = found;
        draw();
      }).catch(() => (reading = null));
    }
    if (name === "sample" && columns) {
      samples.forEach(add);
      draw();
    }
  });
}

function add(sample) {
  if (sample.at <= columns.at.at(-1)) return;
  for (const [name, value] of Object.entries(sample)) {
    columns[name].push(value);
    if (columns[name].length > KEPT) columns[name].shift();
  }
}

function values(name) {
  if (name !== "hits") return columns[name];
  return columns.prompt_tokens.map((prompt, position) => (prompt ? (100 * columns.cached_tokens[position]) / prompt : null));
}

function redraw() {
  for (const each of drawn) {
    each.chart?.destroy();
    each.chart = null;
  }
  draw();
}

function draw() {
  if (!columns) return;
  for (const each of drawn) {
    if (!each.box.clientWidth) return;
    const data = [columns.at, ...each.plot.lines.map(([, name]) => values(name))];
    if (each.chart) each.chart.setData(data);
    else each.chart = new uPlot(options(each), data, each.box);
    const last = each.plot.lines.map(([title], position) => {
      const value = data[position + 1].findLast((known) => known !== null);
      return `${title} ${value === undefined ? "–" : each.plot.shown(value)}`;
    });
    write(each.now, `Now: ${last.join(", ")}`);
  }
}

/** The last hour, less if the server has not run as long, but five minutes at least. */
function shownTime() {
  const now = Date.now() / 1000;
  return [Math.max(now - 3600, Math.min(columns.at[0] ?? now, now - 300)), now];
}

function options({ plot, box }) {
  const style = getComputedStyle(document.documentElement);
  const color = (name) => style.getPropertyValue(name).trim();
  const axis = { stroke: color("--quiet"), grid: { stroke: color("--line"), width: 1 }, ticks: { stroke: color("--line") } };
  return {
    width: box.clientWidth, height: HEIGHT, cursor: { y: false }, legend: { show: plot.lines.length > 1, live: false },
    scales: { x: { range: shownTime }, y: { range: (_, __, most) => plot.range ?? [0, most > 0 ? 1.1 * most : 1] } },
    axes: [axis, { ...axis, size: 64, values: (_, marks) => marks.map(plot.shown) }],
    series: [{}, ...plot.lines.map(([label], position) => ({
      label, stroke: color(`--plot-${position + 1}`), width: 2, // A share is known only where prompts came.
      points: { show: plot.range !== undefined || columns.at.length < 3, size: 4 },
    }))],
  };
}
