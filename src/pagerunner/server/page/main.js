// Puts the page together.

import { ApiError, control, get, live, setKeys } from "./api.js";
import { Chat } from "./chat.js";
import { ArenaMap, css } from "./map.js";
import { CACHED, FREE, Model, SHARED, UNOWNED, USED } from "./model.js";
import { bytes, describePage, Figures, number, percent, RequestTable, Timeline } from "./panels.js";

const $ = (id) => document.getElementById(id);
const model = new Model();
const tip = $("tip");

// -- the box beside the pointer

function place(x, y) {
  tip.hidden = false;
  const { width, height } = tip.getBoundingClientRect();
  tip.style.left = `${Math.max(8, Math.min(x + 12, innerWidth - width - 8))}px`;
  tip.style.top = `${y + height + 24 > innerHeight ? Math.max(8, y - height - 28) : y + 14}px`;
}

function heading(text) {
  const line = document.createElement("strong");
  line.textContent = text;
  return line;
}

function showAlternatives(found) {
  if (!found) return void (tip.hidden = true);
  const table = document.createElement("table");
  for (const { text, share, value, chosen } of found.rows) {
    const row = table.insertRow();
    const name = row.insertCell(), bar = row.insertCell(), figure = row.insertCell();
    name.textContent = chosen ? `▸ ${text}` : text;
    const fill = document.createElement("i");
    fill.className = "share";
    fill.style.width = `${Math.max(2, share * 80)}px`;
    bar.append(fill);
    figure.textContent = value;
    row.className = chosen ? "chosen" : "";
  }
  tip.replaceChildren(heading(found.title), table);
  place(found.x, found.y);
}

function showPage(found) {
  if (!found) return void (tip.hidden = true);
  const [title, lines] = describePage(model, found);
  const text = document.createElement("div");
  text.className = "lines";
  text.textContent = lines.join("\n");
  tip.replaceChildren(heading(title), text);
  if (found.byKey) $("page-words").textContent = `${title}. ${lines.join(" ")}`;
  place(found.x, found.y);
}

// -- parts

const map = new ArenaMap(model, $("arena-canvas"), $("arena"), $("arena-size"), showPage);
const figures = new Figures($("figures"));
const table = new RequestTable($("request-rows"), $("no-requests"), $("requests-summary"), (id) => {
  map.focus = id ? [id] : [];
  map.draw();
});
const timeline = new Timeline($("steps"), $("step-words"), $("step-rate"));
const chat = new Chat({
  form: $("ask"), log: $("log"), prompt: $("prompt"), send: $("send"), stop: $("stop"), showProbs: $("show-probs"),
  onTip: showAlternatives, fail: failed,
});
model.ownText = (...place) => chat.ownText(...place);
$("clear").addEventListener("click", () => chat.clear());
$("model").addEventListener("change", () => (chat.model = $("model").value));
$("paint").addEventListener("change", () => ((map.paint = $("paint").value), map.draw(), legend()));
$("zoom-in").addEventListener("click", () => map.zoomBy(1));
$("zoom-out").addEventListener("click", () => map.zoomBy(-1));
$("zoom-fit").addEventListener("click", () => map.zoomFit());

/** Of the prompt tokens that a group was looked up for, how many it had cached. */
function hitRate(group) {
  const { queries_total: queries, hits_total: hits } = model.stats.groups[group];
  return queries ? `, prefix hits ${percent(hits, queries)}` : "";
}

function legend() {
  const sums = new Map([[USED, 0], [SHARED, 0], [CACHED, 0], [FREE, 0], [UNOWNED, 0]]);
  for (const group of model.groups) for (const kind of sums.keys()) sums.set(kind, sums.get(kind) + group.counts[kind]);
  const free = model.plan.num_slabs - model.slabOwner.filter((group) => group >= 0).length;
  const entries = [
    ["used", `in use ${number(sums.get(USED))}`],
    ["shared", `shared ${number(sums.get(SHARED))}`],
    ["cached", `cached ${number(sums.get(CACHED))}`],
    ["free", `free in its group ${number(sums.get(FREE))}`],
    ["slab", `free slabs ${number(free)} of ${number(model.plan.num_slabs)}`],
  ];
  const parts = [...entries, ...(model.groups.length > 1 ? model.groups.map((group, i) => [map.paint, `group ${group.name}${hitRate(i)}`, css(map.colour("group", i))]) : [])];
  const list = $("legend");
  while (list.children.length > parts.length) list.lastChild.remove();
  for (const [i, [kind, text, colour]] of parts.entries()) {
    const item = list.children[i] ?? list.appendChild(document.createElement("span"));
    if (item.dataset.kind !== kind) {
      item.dataset.kind = kind;
      item.replaceChildren(Object.assign(document.createElement("i"), { className: `swatch ${kind}` }), "");
    }
    if (colour) item.firstChild.style.background = colour;
    if (item.lastChild.data !== text) item.lastChild.data = text;
  }
}

function show() {
  status(model.sleep < 0 ? "awake" : "asleep", model.sleep < 0 ? "awake" : `asleep, level ${model.sleep}`);
  figures.show(model);
  table.show(model, (kind, slot) => map.colour(kind, slot));
  timeline.show(model);
  legend();
  const { plan } = model;
  $("memory-summary").textContent = `${number(plan.num_slabs)} slabs of ${bytes(plan.slab_bytes)}, ${bytes(plan.kv_bytes)}`;
  map.update();
}

function status(state, text) {
  $("status").dataset.state = state;
  if ($("status").textContent !== text) $("status").textContent = text;
  $("sleep").disabled = state !== "awake";
  $("wake").disabled = state !== "asleep";
  $("reset").disabled = state !== "awake";
}

function notice(text) {
  $("notice").hidden = !text;
  $("notice").textContent = text;
}

// -- the connection: open while the page is seen

let connection = null;

async function watch() {
  connection?.abort();
  const mine = (connection = new AbortController());
  let pause = 500;
  while (!mine.signal.aborted) {
    try {
      if (!chat.model) await readModels();
      for await (const frame of await live(mine.signal)) {
        if (frame.error) throw new Error(frame.error);
        if (mine.signal.aborted) return;
        pause = 500;
        model.apply(frame);
        show();
      }
    } catch (error) {
      if (mine.signal.aborted) return;
      status("off", "not connected");
      if (failed(error)) return;
    }
    await new Promise((resolve) => setTimeout(resolve, pause));
    pause = Math.min(pause * 2, 10_000);
  }
}

async function readModels() {
  const { data } = await (await get("v1/models")).json();
  $("model").replaceChildren(...data.map((one) => new Option(one.id)));
  chat.model = data[0].id;
}

/** Say what went wrong; whether it was a missing key, which is then asked for. */
function failed(error) {
  const unknown = error instanceof ApiError && error.status === 401;
  notice(unknown ? "The server asks for a key." : error instanceof TypeError ? "The server cannot be reached." : error.message);
  if (unknown && !$("key-dialog").open) $("key-dialog").showModal();
  return unknown;
}

document.addEventListener("visibilitychange", () => {
  if (document.hidden) connection?.abort();
  else watch();
});

// -- controls

function button(id, path) {
  $(id).addEventListener("click", async () => {
    $(id).disabled = true;
    try {
      await control(path());
      notice("");
    } catch (error) {
      failed(error);
    } finally {
      if (model.plan) show();
    }
  });
}

button("sleep", () => `sleep?level=${$("level").value}`);
button("wake", () => "wake_up");
button("reset", () => "reset_prefix_cache");

$("keys").addEventListener("click", () => $("key-dialog").showModal());
$("key-dialog").addEventListener("close", () => {
  if ($("key-dialog").returnValue !== "ok") return;
  setKeys($("api-key").value.trim(), $("admin-key").value.trim());
  notice("");
  watch();
});

globalThis.pagerunner = { model, map, show }; // for the console, and for tests
watch();
