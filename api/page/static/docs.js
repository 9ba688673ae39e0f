// The API's description as a page.

import { get } from "./api.js";
import { $, el, write } from "./dom.js";

const METHODS = ["get", "post", "put", "delete"];

/** Writes a schema's type in one line. */
function typeOf(schema, components) {
  if (!schema) return "";
  if (schema.$ref) return schema.$ref.split("/").at(-1);
  if (schema.enum) return schema.enum.map((value) => JSON.stringify(value)).join(" | ");
  if (schema.const !== undefined) return JSON.stringify(schema.const);
  const several = schema.anyOf ?? schema.oneOf;
  if (several) return [...new Set(several.map((each) => typeOf(each, components)))].join(" | ");
  if (schema.type === "array") return `list of ${typeOf(schema.items, components) || "anything"}`;
  return [schema.type ?? "anything"].flat().join(" | ");
}

function fields(schema, components) {
  const whole = schema.$ref ? components[schema.$ref.split("/").at(-1)] : schema;
  const required = new Set(whole.required ?? []);
  const rows = Object.entries(whole.properties ?? {}).map(([name, field]) =>
    el("tr", {}, el("th", { scope: "row" }, el("code", {}, name), required.has(name) ? " (required)" : ""),
      el("td", {}, typeOf(field, components)), el("td", {}, field.description ?? "")));
  if (!rows.length) return el("p", { class: "hint" }, typeOf(schema, components));
  return el("div", { class: "wide", tabindex: "0", role: "region", "aria-label": "Fields" }, el("table", {}, el("tbody", {}, rows)));
}

function route(path, method, operation, components) {
  const parts = [el("p", {}, operation.description ?? operation.summary ?? "")];
  for (const parameter of operation.parameters ?? []) {
    parts.push(el("p", { class: "hint" }, el("code", {}, parameter.name), ` in the ${parameter.in}: ${typeOf(parameter.schema, components)}`));
  }
  for (const [kind, body] of Object.entries(operation.requestBody?.content ?? {})) {
    parts.push(el("h4", {}, `Body, ${kind}`), fields(body.schema, components));
  }
  const answers = Object.keys(operation.responses?.["200"]?.content ?? {});
  if (answers.length) parts.push(el("p", { class: "hint" }, `Answers with ${answers.join(" or ")}`));
  const text = `${method} ${path} ${operation.description ?? ""}`.toLowerCase();
  return el("li", { "data-text": text }, el("details", {},
    el("summary", {}, el("span", { class: "method" }, method.toUpperCase()), el("code", {}, path), ` ${operation.summary ?? ""}`), parts));
}

function find() {
  const words = $("find").value.toLowerCase().split(/\s+/);
  let count = 0;
  for (const each of document.querySelectorAll("li[data-text]")) {
    each.hidden = !words.every((word) => each.dataset.text.includes(word));
    count += !each.hidden;
  }
  write($("found"), `${count} routes`);
}

async function show() {
  try {
    const { paths, components } = await get("/openapi.json");
    const routes = Object.entries(paths).flatMap(([path, operations]) =>
      METHODS.filter((method) => operations[method]).map((method) => route(path, method, operations[method], components?.schemas ?? {})));
    $("routes").replaceChildren(el("ul", { class: "decisions" }, routes));
    find();
  } catch (error) {
    $("routes").replaceChildren(el("p", { class: "notice bad", role: "alert" }, error.message));
  }
}

$("find").addEventListener("input", find);
show();
