// Puts the page together.

import { ApiError, control, get, live } from "./api.js";
import { Chat } from "./chat.js";
import { KeyDialog } from "./keys.js";
import { ArenaMap, css } from "./map.js";
import { CACHED, FREE, Model, SHARED, UNOWNED, USED } from "./model.js";
import { bytes, describePage, Figures, number, percent, RequestTable, say } from "./panels.js";
import { Timeline } from "./timeline.js";

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

const map = new ArenaMap(
  model,
  { canvas: $("arena-canvas"), scroller: $("arena"), spacer: $("arena-size"), overview: $("overview") },
  showPage,
);
const figures = new Figures($("figures"));
const table = new RequestTable($("request-rows"), $("no-requests"), $("requests-summary"), (id) => {
  map.focus = id ? [id] : [];
  map.draw();
});
const timeline = new Timeline($("steps"), $("step-words"), $("step-rate"), $("no-steps"));
const chat = new Chat({
  form: $("ask"), log: $("log"), prompt: $("prompt"), send: $("send"), stop: $("stop"), showProbs: $("show-probs"),
  onTip: showAlternatives, fail: failed,
});
model.ownText = (...place) => chat.ownText(...place);
$("clear").addEventListener("click", () => chat.clear());
$("model").addEventListener("change", () => (chat.model = $("model").value));
$("paint").addEventListener("change", () => ((map.paint = $("paint").value), map.draw(), legend()));
$("extent").addEventListener("change", () => ((map.all = $("extent").value === "all"), map.zoomFit(), show()));
$("engine").addEventListener("change", () => watch());
$("zoom-in").addEventListener("click", () => map.zoomBy(1));
$("zoom-out").addEventListener("click", () => map.zoomBy(-1));
$("zoom-fit").addEventListener("click", () => map.zoomFit());

/** Of the prompt tokens that a group was looked up for, how many it had cached. */
function hitRate(group) {
  const { queries_total: queries, hits_total: hits } = model.stats.groups[group];
  return queries ? `, prefix hits ${percent(hits, queries)}` : "";
}

const owned = () => model.slabOwner.reduce((sum, group) => sum + (group >= 0), 0);

function legend() {
  const sums = new Map([[USED, 0], [SHARED, 0], [CACHED, 0], [FREE, 0], [UNOWNED, 0]]);
  for (const group of model.groups) for (const kind of sums.keys()) sums.set(kind, sums.get(kind) + group.counts[kind]);
  const free = model.plan.num_slabs - owned();
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
  showMemory();
}

function showMemory() {
  const { plan } = model;
  const one = plan.num_slabs === 1;
  $("arena").hidden = false;
  if (map.all === null) $("extent").value = map.drawsAll ? "all" : "owned";
  const nothing = !map.drawsAll && !owned();
  $("arena-empty").hidden = !nothing;
  $("arena").hidden = nothing;
  if (nothing) say($("arena-empty"), one ? "The slab is free." : `All ${number(plan.num_slabs)} slabs are free.`);
  const size = one ? `1 slab of ${bytes(plan.slab_bytes)}` : `${number(plan.num_slabs)} slabs of ${bytes(plan.slab_bytes)}`;
  const ranks = model.ranks > 1 ? `, the same on each of ${model.ranks} ranks` : "";
  say($("memory-summary"), `${size}, ${number(owned())} in use${ranks}`);
  map.update();
}

function status(state, text) {
  $("status").dataset.state = state;
  say($("status"), text);
  const sleeps = model.plan === null || model.canSleep;
  $("no-sleep").hidden = sleeps;
  $("level-label").hidden = !sleeps;
  say($("no-sleep"), "Sleep needs a server started with --enable-sleep-mode.");
  $("sleep").title = sleeps ? "" : $("no-sleep").textContent;
  $("sleep").disabled = state !== "awake" || !sleeps;
  $("wake").disabled = state !== "asleep";
  $("reset").disabled = state !== "awake";
}

/** Say in the map's place why there is none. */
function noMap(text) {
  if (model.plan) return;
  $("arena-empty").hidden = false;
  say($("arena-empty"), text);
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
      for await (const frame of await live(mine.signal, $("engine").value || 0)) {
        if (frame.error) throw new Error(frame.error);
        if (mine.signal.aborted) return;
        pause = 500;
        model.apply(frame);
        if (frame.engines) offerEngines(...frame.engines);
        show();
      }
    } catch (error) {
      if (mine.signal.aborted) return;
      if (locked(error)) return;
      status("off", "not connected");
      failed(error);
    }
    await new Promise((resolve) => setTimeout(resolve, pause));
    pause = Math.min(pause * 2, 10_000);
  }
}

/** With several engines behind the server, the page shows one of them. */
function offerEngines(count, shown) {
  $("engine-label").hidden = count === 1;
  if ($("engine").options.length === count) return;
  $("engine").replaceChildren(...Array.from({ length: count }, (_, i) => new Option(i, i)));
  $("engine").value = shown;
}

/** Whether the live figures stay shut until there is another key. The playground may still work. */
function locked(error) {
  if (!(error instanceof ApiError) || ![401, 403].includes(error.status)) return false;
  const partly = error.which === "admin" && chat.model;
  status(partly ? "partly" : "off", partly ? "playground only" : "not connected");
  if (error.status === 403) noMap(`${error.message} The live figures are shown to nobody.`);
  else if (!partly) noMap("The server asks for a key: Keys, above.");
  else noMap("The live figures need the admin key: Keys, above.");
  if (error.status === 401 && !(partly && keys.withoutAdmin)) keys.ask(error);
  return true;
}

async function readModels() {
  const { data } = await (await get("v1/models")).json();
  $("model").replaceChildren(...data.map((one) => new Option(one.id)));
  chat.model = data[0].id;
}

/** Say what went wrong, and ask for the key where one was missing. */
function failed(error) {
  if (error instanceof ApiError && error.status === 401) return keys.ask(error);
  notice(error instanceof TypeError ? "The server cannot be reached." : error.message);
}

const keys = new KeyDialog($("key-dialog"), readModels, () => {
  notice("");
  watch();
});
$("keys").addEventListener("click", () => keys.open());

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

// On a small screen the engine's buttons are folded away; on a large one there is no button to unfold them.
const large = matchMedia("(min-width: 960px)");
const fold = () => ($("controls").open = large.matches);
large.addEventListener("change", fold);
fold();

globalThis.pagerunner = { model, map, timeline, show }; // for the console, and for tests
watch();
