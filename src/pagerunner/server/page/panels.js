// Figures, requests, and what a page is in words.

import { css } from "./map.js";
import { CACHED, SHARED } from "./model.js";

/** Why a request waits: in a word or two, and as the rest of "It waits ...". */
const WAITS = {
  sibling: ["a sibling's pages", "for a sibling to fill the pages that it goes on from"],
  slot: ["a slot", "for a slot: as many run as may"],
  pages: ["pages", "for pages: those of its prompt can't be had now"],
  snapshot: ["a snapshot", "for another request that is about to leave a snapshot of the same prefix"],
  adapter: ["an adapter", "for its adapter, which is on its way to the device or waits for a slot there"],
  transfer: ["a transfer", "for pages of its prompt that are on their way from another memory"],
  moves: ["moves", "for pages: others are being moved together to make room"],
  budget: ["the next step", "for the next step: this one's tokens are spoken for"],
  turn: ["its last step", "for its own last step to come back"],
  line: ["others", "for those before it"],
  grammar: ["its grammar", "for its grammar: what may come next isn't known yet"],
  paused: ["the engine to go on", "for the engine, which is paused or sleeps"],
};

const COLUMNS = ["Request", "State", "Tokens", "Prefix", "Pages", "Age"];

export const number = (value) => Math.round(value).toLocaleString("en");

export function seconds(value) {
  if (value === undefined) return "–";
  return value < 1 ? `${(value * 1000).toFixed(value < 0.01 ? 1 : 0)} ms` : `${value.toFixed(value < 10 ? 2 : 0)} s`;
}

/** How long ago something was: always in seconds with one decimal, so that a column can be read at a glance. */
export const age = (value) => `${value.toLocaleString("en", { minimumFractionDigits: 1, maximumFractionDigits: 1 })} s`;

/** Times in one unit, that of the last, and with as many decimals each as the first one needs. */
export function together(list) {
  if (!list.length) return "–";
  const [scale, unit] = list.at(-1) < 1 ? [1000, "ms"] : [1, "s"];
  const decimals = list[0] * scale < 10 ? 1 : 0;
  return `${list.map((value) => (value * scale).toFixed(decimals)).join(" · ")} ${unit}`;
}

export function bytes(size) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  const power = size ? Math.min(Math.floor(Math.log2(size) / 10), 4) : 0;
  return `${(size / 2 ** (10 * power)).toFixed(power ? 1 : 0)} ${units[power]}`;
}

export const percent = (part, whole) => (whole ? `${((100 * part) / whole).toFixed(1)} %` : "–");
export const shortId = (id) => (id.length > 12 ? `${id.slice(0, 4)}…${id.slice(-4)}` : id);

/** Set an element's text only when it changes: five times a second for hundreds of cells. */
export function say(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

export class Figures {
  constructor(list) {
    this.values = {};
    for (const [key, name, title] of [
      ["rate", "Tokens/s", "Generated tokens of the last two seconds"],
      ["running", "Running"],
      ["waiting", "Waiting"],
      ["memory", "Memory in use", "Share of the page memory's bytes that requests hold"],
      ["hits", "Prefix hits", "Share of all prompt tokens so far that were found in the prefix cache of the device; with host memory, then the share of the others that was loaded from there"],
      ["first", "First token p50·90·99", "Seconds from arrival to the first token: percentiles of the latest 1,024 while the page is open"],
      ["between", "Between tokens p50·90·99", "Seconds between tokens: percentiles of the latest 4,096 while the page is open"],
      ["preempted", "Preemptions"],
      ["drafts", "Drafts accepted", "Tokens that a row with a draft gets in a step, and how often the draft's first, second, ... token is accepted: of the last two seconds"],
      ["costs", "Steps foreseen", "By how much the engine was wrong about what its steps take, of their time: all steps so far"],
      ["host", "Host memory · loads", "Share of the host memory for pages that holds some, and loads and stores that are under way"],
      ["adapters", "Adapters · hits · loads", "Adapters in pages of the device, their bytes, and those of them that requests use now; share of admitted requests with an adapter that found it there; how often one was brought there so far"],
      ["disk", "Disk · hits", "Bytes of the disk tier's directory, prompt tokens whose pages were read from it, and requests that wait for pages"],
      ["peers", "Other engines", "Loans of pages to other engines that last; prompts whose pages have come from others, and those whose pages are being pulled"],
    ]) {
      const item = document.createElement("div");
      const term = document.createElement("dt"), value = document.createElement("dd");
      term.textContent = name;
      if (title) item.title = title;
      value.id = `figure-${key}`;
      value.textContent = "–";
      item.append(term, value);
      list.append(item);
      this.values[key] = value;
    }
  }

  show(model) {
    const { stats } = model;
    const texts = {
      rate: number(model.tokensPerSecond),
      running: number(stats.running),
      waiting: number(stats.waiting),
      memory: percent(stats.kv_usage, 1),
      hits: percent(stats.prefix_hits_total, stats.prefix_queries_total) + (stats.tier ? ` · ${percent(stats.tier.hits_total, stats.tier.queries_total)}` : ""),
      first: together(model.firstToken),
      between: together(model.interToken),
      preempted: number(stats.preemptions_total),
      host: stats.tier ? `${percent(stats.tier.used_bytes, stats.tier.num_bytes)} · ${stats.tier.loads} ↑ ${stats.tier.stores} ↓` : "",
    };
    texts.drafts = model.drafts ? [model.drafts.length.toFixed(2), ...model.drafts.rates.slice(0, 8).map((rate) => percent(rate, 1))].join(" · ") : "–";
    texts.costs = stats.costs?.measured_seconds_total ? `${percent(stats.costs.error_seconds_total, stats.costs.measured_seconds_total)} off` : "–";
    const disk = stats.tier?.disk, peers = stats.exchange, lora = stats.lora;
    texts.adapters = lora ? `${lora.resident} (${(lora.num_bytes / 2 ** 20).toFixed(0)} MiB, ${percent(lora.used_bytes, lora.num_bytes)} in use) · ${percent(lora.hits_total, lora.hits_total + lora.fills_total)} · ${number(lora.fills_total)} ↑` : "";
    texts.disk = disk ? `${(disk.bytes / 2 ** 30).toFixed(1)} GiB · ${number(disk.hits)}${disk.waiting ? ` · ${disk.waiting} wait` : ""}` : "";
    texts.peers = peers ? `${peers.loans} lent · ${number(peers.pulled_total)} came${peers.pulls ? ` · ${peers.pulls} wait` : ""}` : "";
    for (const [key, there] of [["drafts", stats.spec], ["costs", stats.costs], ["host", stats.tier], ["adapters", lora], ["disk", disk], ["peers", peers]]) this.values[key].parentElement.hidden = !there;
    for (const [key, text] of Object.entries(texts)) say(this.values[key], text);
  }
}

export class RequestTable {
  /** `onPoint(id | null)` is told which row is pointed at. */
  constructor(body, empty, summary, onPoint) {
    Object.assign(this, { body, empty, summary, onPoint });
    this.rows = new Map();
  }

  show(model, colour) {
    const seen = new Set();
    let last = null;
    for (const request of model.requests) {
      seen.add(request.id);
      let row = this.rows.get(request.id);
      if (!row) this.rows.set(request.id, (row = this.#row(request)));
      this.#fill(row, request, model, colour);
      const place = last ? last.nextSibling : this.body.firstChild;
      if (place !== row) this.body.insertBefore(row, place);
      last = row;
    }
    for (const [id, row] of this.rows) {
      if (!seen.has(id)) {
        row.remove();
        this.rows.delete(id);
      }
    }
    this.empty.hidden = seen.size > 0;
    const listed = model.requests.filter((request) => request.slot < 0).length;
    const more = model.stats.waiting - listed;
    say(this.summary, `${number(model.stats.running)} running, ${number(model.stats.waiting)} waiting${more > 0 ? ` (${number(more)} not listed)` : ""}`);
  }

  #row(request) {
    const row = document.createElement("tr");
    row.setAttribute("role", "row"); // on a phone rows are no table rows to CSS, and would be none to a screen reader
    for (const column of COLUMNS) {
      const cell = document.createElement(row.children.length ? "td" : "th");
      cell.setAttribute("role", row.children.length ? "cell" : "rowheader");
      cell.dataset.name = column;
      row.append(cell);
    }
    const [name, , ...numbers] = row.children;
    name.scope = "row";
    const swatch = document.createElement("i");
    swatch.className = "swatch";
    name.append(swatch, shortId(request.id));
    name.title = request.id;
    for (const cell of numbers) cell.className = "num";
    row.addEventListener("pointerenter", () => this.onPoint(request.id));
    row.addEventListener("pointerleave", () => this.onPoint(null));
    return row;
  }

  #fill(row, request, model, colour) {
    const [name, state, tokens, prefix, pages, old] = row.children;
    const runs = request.slot >= 0;
    const swatch = name.firstChild;
    swatch.style.background = runs ? css(colour("owner", request.slot)) : "none";
    row.classList.toggle("waits", !runs);
    const reads = request.computed < request.prompt;
    let text = reads ? "reads its prompt" : "generates";
    if (request.wait) text = `waits for ${WAITS[request.wait][0]}`;
    say(state, text);
    state.title = request.wait ? `It waits ${WAITS[request.wait][1]}.` : "";
    say(tokens, `${number(reads ? request.computed : request.tokens)} / ${number(reads ? request.prompt : request.limit)}`);
    tokens.title = `${number(request.prompt)} tokens of prompt, ${number(request.tokens - request.prompt)} generated, at most ${number(request.limit)} in all`;
    say(prefix, request.cached < 0 ? "–" : number(request.cached));
    const held = request.pages.map((list) => list.reduce((sum, page) => sum + (page >= 0), 0));
    say(pages, runs ? number(held.reduce((sum, count) => sum + count, 0)) : "–");
    pages.title = held.map((count, i) => `${number(count)} ${model.groups[i].name}`).join(", ");
    say(old, age(request.age));
  }
}

/** What a page of the map is and whose, as [heading, lines]. */
export function describePage(model, { slab, group, page, holders = [] }) {
  if (group === undefined) return [`Slab ${number(slab)}`, ["Free: it belongs to no group."]];
  const { name, kind, pageTokens, state, perSlab } = model.groups[group];
  const heading = `Page ${number(page)} · slab ${number(slab)} · group ${name}`;
  const lines = [];
  if (state[page] === CACHED) lines.push("Cached: no request holds it; a prompt with the same prefix can.");
  else if (!holders.length) lines.push(`Free, in a slab of ${number(perSlab)} pages of this group.`);
  if (state[page] === SHARED) lines.push(`Shared by ${number(holders.length)} requests.`);
  for (const { request, at } of holders.slice(0, 5)) {
    lines.push(`${shortId(request.id)}: ${kind === "recurrent" ? (at ? "a snapshot of its state" : "its state") : tokensOf(request, at, pageTokens)}`);
    lines.push(`  ${number(request.tokens)} tokens, ${request.cached > 0 ? `the first ${number(request.cached)} from the prefix cache` : "none from the prefix cache"}`);
    const text = model.ownText?.(request.id, request.prompt, at * pageTokens, (at + 1) * pageTokens);
    if (text) lines.push(`  “${text}”`);
  }
  if (holders.length > 5) lines.push(`and ${number(holders.length - 5)} more`);
  return [heading, lines];
}

function tokensOf(request, at, pageTokens) {
  const first = at * pageTokens, end = Math.min(first + pageTokens, Math.max(request.tokens, first + 1));
  const part = end <= request.cached ? "prefix from the cache" : end <= request.prompt ? "prompt" : first >= request.prompt ? "answer" : "prompt and answer";
  return `tokens ${number(first)} to ${number(end - 1)} (${part})`;
}
