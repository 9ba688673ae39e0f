// A routing decision in words, and its costs.

import { el, number, seconds, share } from "./dom.js";

const REASONS = {
  agent_home: "this node has the agent's memory",
  only_replica: "no other replica of the model answers now",
  home_busy: "the agent's own node was busy, and waiting there would take longer",
  home_lost: "the agent's own node does not answer",
  least_recent: "all replicas would take as long, and this one was idle longest",
  prefix: "it has the most of this prompt in memory",
  least_loaded: "no replica has more of this prompt than others, and this one has the least to do",
  beside: "it computes another answer to the same prompt",
  split: "another node computes the prompt, and this one the answer",
  round_robin: "replicas take turns",
};

const TERMS = {
  queue: "waiting", pull: "moving KV", restore: "reading KV from disk", prefill: "computing the prompt",
  encode: "pictures", decode: "slowing others", away: "away from the agent's node", total: "total",
};

export const reason = (why) => REASONS[why] ?? why;

/** What of a prompt came from memory: a chip for each place where its KV was. */
export function sources(why, cached) {
  const read = Math.min(why.actual_disk_tokens ?? 0, cached);
  const moved = Math.min(why.pull_from ? why.pull_tokens : 0, read);
  const chip = (kind, text, count) => (count > 0 ? el("span", { class: `chip ${kind}` }, `${text} ${number(count)}`) : null);
  return [
    chip("hot", "hot", cached - read),
    chip("disk", "from disk", read - moved),
    chip("moved", `moved from ${why.pull_from}`, moved),
  ].filter(Boolean);
}

/** The estimated seconds to the first token by replica, the chosen one first. */
export function costs(why) {
  const names = Object.keys(why.costs_s).sort((a, b) =>
    (b === why.replica) - (a === why.replica) || why.costs_s[a].total - why.costs_s[b].total);
  if (!names.length) return el("p", { class: "hint" }, "No costs were compared.");
  const terms = Object.keys(TERMS).filter((term) => names.some((name) => why.costs_s[name][term]));
  return el("div", { class: "wide", tabindex: "0", role: "region", "aria-label": "Estimated costs" },
    el("table", { class: "costs" },
      el("thead", {}, el("tr", {}, el("th", { scope: "col" }, "Replica"),
        terms.map((term) => el("th", { scope: "col", class: "number" }, TERMS[term])))),
      el("tbody", {}, names.map((name) =>
        el("tr", { class: name === why.replica ? "chosen" : null },
          el("th", { scope: "row" }, name === why.replica ? `${name} (chosen)` : name),
          terms.map((term) => el("td", { class: "number" }, seconds(why.costs_s[name][term]))))))));
}

/** "512 of 600 prompt tokens (85%)". */
export const fromMemory = (cached, prompt) =>
  `${number(cached)} of ${number(prompt)} prompt tokens (${share(cached, prompt)})`;
