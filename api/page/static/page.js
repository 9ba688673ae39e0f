// The page: which view is shown, the key, and what the server says of itself.

import { askKey, hasKey } from "./api.js";
import { startAgents } from "./agents.js";
import { startChat } from "./chat.js";
import { startCluster } from "./cluster.js";
import { $, write } from "./dom.js";
import { startModels } from "./models.js";
import { startRequests } from "./requests.js";
import { follow, onChange } from "./state.js";

const VIEWS = ["chat", "cluster", "agents", "requests", "models"];

function show() {
  const wanted = location.hash.slice(1).split("/")[0];
  if (wanted === "main") return;
  const view = VIEWS.includes(wanted) ? wanted : VIEWS[0];
  for (const section of document.querySelectorAll("section[data-view]")) section.hidden = section.dataset.view !== view;
  for (const link of document.querySelectorAll("nav a[data-view]")) {
    if (link.dataset.view === view) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  document.title = `${view[0].toUpperCase()}${view.slice(1)} – Satchel`;
  document.dispatchEvent(new CustomEvent("view", { detail: view }));
}

onChange((state, name) => {
  if (name === "trouble") {
    $("trouble").hidden = state.trouble === null;
    write($("trouble"), state.trouble ?? "");
  }
  if (name !== "caller") return;
  const { admin, tenant, version } = state.caller;
  for (const note of document.querySelectorAll(".for-admins")) note.hidden = admin;
  for (const control of document.querySelectorAll(".for-admins-only")) control.hidden = !admin;
  $("live").title = `Satchel ${version}, as ${tenant}`;
});

$("change-key").addEventListener("click", async () => {
  if (await askKey(hasKey() ? "This tab has a key. Another one replaces it." : "")) follow();
});

document.querySelector(".skip").addEventListener("click", (event) => {
  event.preventDefault();
  $("main").focus();
});

window.addEventListener("hashchange", show);
startChat();
startCluster();
startAgents();
startRequests();
startModels();
show();
follow();
