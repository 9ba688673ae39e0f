// Calls of the API with the reader's key, which stays in this tab.

import { ask } from "./dom.js";

const KEY = "satchel-key";

export class ApiError extends Error {
  constructor(status, message, code) {
    super(message);
    this.status = status;
    this.code = code;
  }
}

export const hasKey = () => sessionStorage.getItem(KEY) !== null;

function headers(more) {
  const key = sessionStorage.getItem(KEY);
  return { ...(key ? { Authorization: `Bearer ${key}` } : {}), ...more };
}

let asking = null;

/** Asks for a key until one is accepted; false if the reader gives up. */
export function askKey(why) {
  asking ??= ask({
    title: "This server needs a key",
    text: why,
    fields: [{ name: "key", label: "Key", type: "password" }],
    action: "Use this key",
    act: async ({ key }) => {
      const answer = await fetch("/v1/models", { headers: { Authorization: `Bearer ${key.trim()}` } });
      if (answer.status === 401) throw new Error(`This key was refused: ${(await failure(answer)).message}.`);
      if (answer.status === 403) throw await failure(answer);
      sessionStorage.setItem(KEY, key.trim());
    },
  }).then((given) => {
    asking = null;
    if (given !== null) document.dispatchEvent(new CustomEvent("key-changed"));
    return given !== null;
  });
  return asking;
}


async function failure(answer) {
  let told = {};
  try {
    told = (await answer.json()).error ?? {};
  } catch {
    // Not JSON: something between this page and the server answered.
  }
  const message = typeof told === "string" ? told : told.message ?? `the server answered ${answer.status}`;
  return new ApiError(answer.status, message, told.code ?? "");
}

/** Sends a request and returns the response. `body` is sent as JSON. */
export async function send(method, path, { body, headers: more, signal } = {}) {
  for (;;) {
    let answer;
    try {
      answer = await fetch(path, {
        method, signal,
        headers: headers({ ...(body === undefined ? {} : { "Content-Type": "application/json" }), ...more }),
        body: body === undefined ? undefined : JSON.stringify(body),
      });
    } catch (error) {
      if (error.name === "AbortError") throw error;
      throw new ApiError(0, "the server does not answer");
    }
    if (answer.ok) return answer;
    const error = await failure(answer);
    if (answer.status !== 401) throw error;
    const refused = hasKey() ? `The key of this tab was refused: ${error.message}.` : "Keys are made with: satchel keys create NAME";
    if (!(await askKey(refused))) throw error;
  }
}

export const get = async (path) => (await send("GET", path)).json();

export const post = async (path, body) => (await send("POST", path, { body })).json();

/** Yields a response's server-sent events as {name, data}. */
export async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      const parts = (rest + value).split("\n\n");
      rest = parts.pop();
      for (const part of parts) {
        let name = "message";
        let data = "";
        for (const line of part.split("\n")) {
          if (line.startsWith("event: ")) name = line.slice(7);
          else if (line.startsWith("data: ")) data += line.slice(6);
        }
        if (data) yield { name, data };
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

/** A path with an id in it, and for another tenant's agents that tenant. */
export function agentPath(agent, rest = "") {
  const query = agent.tenant ? `?tenant=${encodeURIComponent(agent.tenant)}` : "";
  return `/v1/agents/${encodeURIComponent(agent.id)}${rest}${query}`;
}
