// What the server tells this page as it changes, for all views.

import { events, send } from "./api.js";
import { $, write } from "./dom.js";

const EMPTY = { cluster: null, requests: [], decisions: [], samples: [], caller: null };
const RETRY_S = [1, 2, 5, 10];
const DECISIONS_SHOWN = 200;

export const state = { ...EMPTY };

const listeners = [];
let following = null;

/** Calls `listener(state, name)` whenever something named `name` has changed. */
export function onChange(listener) {
  listeners.push(listener);
}

function take(name, data) {
  if (name === "decisions") {
    // A decision comes again when its sequence has ended.
    const again = new Set(data.map((each) => each.sequence));
    const others = state.decisions.filter((each) => !again.has(each.sequence));
    state.decisions = [...others, ...data].sort((a, b) => a.at_s - b.at_s).slice(-DECISIONS_SHOWN);
  }
  else if (name === "sample") state.samples = [data];
  else state[name] = data;
  for (const listener of listeners) listener(state, name);
}

function say(word, text) {
  $("live").dataset.state = word;
  write($("live"), text);
}

/** Follows the server's events, and again after they break off. */
export async function follow() {
  following?.abort();
  const mine = (following = new AbortController());
  Object.assign(state, EMPTY);
  for (let failures = 0; !mine.signal.aborted; failures += 1) {
    try {
      const response = await send("GET", "/v1/cluster/events", { signal: mine.signal });
      failures = 0;
      say("live", "live");
      state.decisions = [];
      for await (const { name, data } of events(response)) take(name, JSON.parse(data));
    } catch (error) {
      if (mine.signal.aborted) return;
      if (error.status === 401 || error.status === 403) {
        say("lost", error.status === 401 ? "no key" : "refused");
        return;
      }
    }
    if (mine.signal.aborted) return;
    say("lost", "the server does not answer");
    await new Promise((done) => setTimeout(done, 1000 * RETRY_S[Math.min(failures, RETRY_S.length - 1)]));
  }
}
