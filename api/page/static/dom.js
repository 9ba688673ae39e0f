// Elements, tables that keep their rows, dialogs, and how numbers are written.

/** Makes an element. A property that begins with "on" is a listener, others are attributes; null and false are left out. */
export function el(tag, properties = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else if (name === "class") made.className = value;
    else made.setAttribute(name, value === true ? "" : value);
  }
  made.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined));
  return made;
}

export const $ = (id) => document.getElementById(id);

/** Sets an element's text unless it is the same: selections and screen readers are not disturbed. */
export function write(element, text) {
  const shown = String(text ?? "");
  if (element.textContent !== shown) element.textContent = shown;
}

const kept = new WeakMap();

/** Fills a list or a table's body. Rows stay the same elements, so that focus and open details stay.
 *  `make(item)` returns {row, ...}, and `update(made, item)` writes what may change. */
export function fill(body, items, key, make, update) {
  const known = kept.get(body) ?? new Map();
  const next = new Map();
  let place = body.firstElementChild;
  for (const item of items) {
    const id = key(item);
    const made = known.get(id) ?? make(item);
    next.set(id, made);
    update(made, item);
    if (made.row === place) place = place.nextElementSibling;
    else body.insertBefore(made.row, place);
  }
  for (const [id, made] of known) if (!next.has(id)) made.row.remove();
  kept.set(body, next);
}

/** Makes a row of `count` cells; titles are shown beside the cells on narrow screens. */
export function cells(titles, numbers = []) {
  const made = titles.map((title, position) => {
    const head = position === 0;
    return el(head ? "th" : "td", {
      scope: head ? "row" : null, "data-title": title, class: numbers.includes(title) ? "number" : null,
    });
  });
  return { row: el("tr", {}, made), cells: made };
}

export function announce(text) {
  write($("announcer"), "");
  setTimeout(() => write($("announcer"), text), 50);
}

/** Shows a dialog with fields and returns their values, or null if it was cancelled.
 *  `act(values)` may throw: the error is shown and the dialog stays. */
export function ask({ title, text = "", fields = [], action, danger = false, act = async () => {}, keep = false }) {
  return new Promise((resolve) => {
    const error = el("p", { class: "notice bad", role: "alert", hidden: true });
    const inputs = fields.map((field) =>
      field.options
        ? el("select", { name: field.name, required: true }, field.options.map((value) => el("option", {}, value)))
        : el("input", {
            name: field.name, type: field.type ?? "text", value: field.value ?? "", required: true,
            autocomplete: "off", spellcheck: "false",
          }));
    const go = el("button", { type: "submit", class: danger ? "danger" : "primary" }, action);
    const cancel = el("button", { type: "button", onclick: () => dialog.close() }, "Cancel");
    let answer = null;
    const form = el("form", {
      onsubmit: async (event) => {
        event.preventDefault();
        const values = Object.fromEntries(inputs.map((input) => [input.name, input.value]));
        go.disabled = true;
        error.hidden = true;
        try {
          answer = (await act(values)) ?? values;
          dialog.close();
        } catch (failure) {
          error.textContent = failure.message;
          error.hidden = false;
        } finally {
          go.disabled = false;
        }
      },
    },
    el("h2", {}, title), text ? el("p", {}, text) : null,
    fields.map((field, position) => el("label", {}, field.label, inputs[position])),
    error, el("div", { class: "row end" }, cancel, go));
    const dialog = el("dialog", {
      "aria-label": title,
      onclose: () => {
        dialog.remove();
        resolve(answer);
      },
    }, form);
    document.body.append(dialog);
    dialog.showModal();
    (inputs[0] ?? (danger ? cancel : go)).focus();
  });
}

export function bytes(count) {
  if (count === null || count === undefined) return "–";
  let amount = count;
  for (const unit of ["B", "kB", "MB", "GB"]) {
    if (amount < 999.5) return `${amount < 10 && unit !== "B" ? amount.toFixed(1) : Math.round(amount)} ${unit}`;
    amount /= 1000;
  }
  return `${amount.toFixed(1)} TB`;
}

export const number = (count) => (count === null || count === undefined ? "–" : count.toLocaleString("en"));

export const share = (part, whole) => (whole ? `${Math.round((100 * part) / whole)}%` : "0%");

export function seconds(count) {
  if (count === null || count === undefined) return "–";
  return count < 1 ? `${Math.round(1000 * count)} ms` : `${count.toFixed(1)} s`;
}

export function ago(unixTime) {
  const past = Math.max(0, Date.now() / 1000 - unixTime);
  if (past < 60) return "just\u00a0now";
  if (past < 3600) return `${Math.floor(past / 60)}\u00a0min\u00a0ago`;
  if (past < 86400) return `${Math.floor(past / 3600)}\u00a0h\u00a0ago`;
  return `${Math.floor(past / 86400)}\u00a0d\u00a0ago`;
}
