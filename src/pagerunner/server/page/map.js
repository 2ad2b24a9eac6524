// The arena: one tile a slab (or a part of one), in it one cell a page. Everything visible is written into one array and drawn
// at once.

import { allLegible, CELLS, fit, fittingCell, largestTile, roomFor, strip, Tiles, TILE_PAGES } from "./layout.js";
import { UNOWNED, FREE, CACHED, SHARED } from "./model.js";

const BORDERS = 2; // of the scroller, in CSS pixels

/** A colour by its number: neighbours on the wheel are far apart. */
export function hue(number, dark) {
  const light = (dark ? 0.6 : 0.47) + (number % 2 ? 0.06 : 0);
  return hsl((number * 137.508 + 215) % 360, 0.6, light);
}

function hsl(degrees, saturation, light) {
  const spread = saturation * Math.min(light, 1 - light);
  const part = (n) => {
    const k = (n + degrees / 30) % 12;
    return Math.round(255 * (light - spread * Math.max(-1, Math.min(k - 3, 9 - k, 1))));
  };
  return [part(0), part(8), part(4)];
}

const packed = ([r, g, b]) => ((255 << 24) | (b << 16) | (g << 8) | r) >>> 0;
const mixed = (a, b, share) => a.map((value, i) => Math.round(value + (b[i] - value) * share));
export const css = ([r, g, b]) => `rgb(${r} ${g} ${b})`;

function colourOf(name) {
  const hex = getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  return [1, 3, 5].map((at) => parseInt(hex.slice(at, at + 2), 16));
}

export class ArenaMap {
  /** `onPoint({slab, group, page, holders, x, y, byKey} | null)` is told what the pointer or the cursor is on. */
  constructor(model, { canvas, scroller, spacer, overview }, onPoint) {
    Object.assign(this, { model, canvas, scroller, spacer, overview, onPoint });
    this.context = canvas.getContext("2d", { alpha: false });
    this.all = null; // whether free slabs are drawn; null: when all can be told apart
    this.room = 0; // for so many tiles
    this.zoom = 0; // steps from the fitting size
    this.paint = "owner";
    this.focus = []; // ids of the requests that are pointed at
    this.cursor = null; // what is pointed at
    this.drawMs = 0;
    this.readColours();
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => (this.readColours(), this.draw()));
    new ResizeObserver(() => this.draw()).observe(scroller);
    scroller.addEventListener("scroll", () => this.draw());
    canvas.addEventListener("pointermove", (event) => this.#point(event));
    canvas.addEventListener("pointerdown", (event) => this.#point(event));
    canvas.addEventListener("pointerleave", () => this.#leave());
    canvas.addEventListener("blur", () => this.#leave());
    canvas.addEventListener("dblclick", (event) => this.zoomTo(this.#at(event)?.slab));
    canvas.addEventListener("keydown", (event) => this.#key(event));
  }

  readColours() {
    this.dark = matchMedia("(prefers-color-scheme: dark)").matches;
    this.ground = colourOf("--map");
    this.tile = colourOf("--map-slab");
    this.line = colourOf("--map-line");
    this.ink = colourOf("--panel");
    this.accent = colourOf("--accent");
  }

  /** The colour of a group or of a request's slot, and of the map's other parts. */
  colour(kind, number = 0) {
    if (kind === "group") return hue(number * 3 + 1, this.dark);
    return kind === "owner" ? hue(number, this.dark) : this.line;
  }

  zoomBy(steps) {
    this.zoom = Math.max(0, Math.min(this.zoom + steps, CELLS.length - 1 - (this.fitting ?? 0)));
    this.draw();
  }

  zoomFit() {
    this.zoom = this.room = 0;
    this.draw();
  }

  /** Show one slab with large cells. */
  zoomTo(slab) {
    if (slab === undefined || !this.layout) return;
    this.zoomBy(Math.max(0, CELLS.length - 2 - this.cellIndex));
    this.#measure();
    const { columns, tileHeight } = this.layout;
    this.scroller.scrollTop = (Math.floor(Math.max(this.tiles.find(slab), 0) / columns) * tileHeight) / devicePixelRatio - 40;
    this.draw();
  }

  draw() {
    if (this.waiting) return;
    this.waiting = requestAnimationFrame(() => {
      this.waiting = 0;
      const started = performance.now();
      this.#drawNow();
      this.drawMs = performance.now() - started;
    });
  }

  /** Whether free slabs are drawn. */
  get drawsAll() {
    return this.all ?? allLegible(this.model, this.#wide(), this.#mostHigh());
  }

  #wide() {
    return Math.floor(this.scroller.clientWidth * devicePixelRatio);
  }

  #mostHigh() {
    return Math.floor((parseFloat(getComputedStyle(this.scroller).maxHeight) - BORDERS) * devicePixelRatio);
  }

  /** The cell's index in CELLS, of the latest layout. */
  get cellIndex() {
    return Math.min(this.fitting + this.zoom, CELLS.length - 1);
  }

  #measure() {
    const all = this.drawsAll, most = this.#mostHigh();
    this.tiles = new Tiles(this.model, all);
    this.room = all ? this.tiles.count : roomFor(this.tiles.count, this.room);
    this.width = this.#wide();
    const pages = largestTile(this.model);
    this.fitting = fittingCell(this.room, pages, this.width, most);
    this.layout = fit(CELLS[this.cellIndex], this.tiles.count, pages, this.width);
    const tall = Math.ceil(this.layout.tall / devicePixelRatio);
    this.height = Math.min(most, Math.ceil(tall * devicePixelRatio));
    this.spacer.style.height = `${tall}px`;
    this.scroller.style.height = `${Math.min(tall, most / devicePixelRatio) + BORDERS}px`;
    this.overview.hidden = all;
    this.top = Math.floor(this.scroller.scrollTop * devicePixelRatio);
    if (this.canvas.width !== this.width || this.canvas.height !== this.height || !this.image) {
      this.canvas.width = this.width;
      this.canvas.height = this.height;
      this.canvas.style.width = `${this.width / devicePixelRatio}px`;
      this.canvas.style.height = `${this.height / devicePixelRatio}px`;
      this.image = this.context.createImageData(this.width, this.height);
      this.pixels = new Uint32Array(this.image.data.buffer);
    }
  }

  /** How a group's pages lie in a tile: cells across, and a cell's size. Groups with fewer pages a slab have larger ones. */
  #grid({ perSlab }) {
    const pages = Math.min(perSlab, TILE_PAGES);
    const { width, height, gap, tileWidth, tileHeight } = this.layout;
    const [wide, high] = [tileWidth - gap, tileHeight - gap];
    let across = Math.max(1, Math.min(Math.ceil(Math.sqrt((pages * wide) / high)), Math.floor(wide / width)));
    while (Math.ceil(pages / across) * height > high && across * width < wide) across++;
    return { across, w: Math.floor(wide / across), h: Math.max(height, Math.floor(high / Math.ceil(pages / across))) };
  }

  #drawNow() {
    const { model } = this;
    if (!model.plan || !this.scroller.clientWidth) return;
    this.#measure();
    const { tileWidth, tileHeight, columns, gap } = this.layout;
    const { pixels, height } = this;
    pixels.fill(packed(this.ground));
    const grids = model.groups.map((group) => this.#grid(group));
    const focus = this.focus.map((id) => model.byId.get(id)).filter((request) => request?.pages.length);
    const marks = model.groups.map((_, number) => (focus.length ? new Set(focus.flatMap((one) => [...one.pages[number]])) : null));
    const colours = this.#palette(focus.length > 0);
    const firstRow = Math.max(0, Math.floor(this.top / tileHeight));
    for (let tile = firstRow * columns; tile < this.tiles.count; tile++) {
      const y = Math.floor(tile / columns) * tileHeight + gap - this.top;
      if (y >= height) break;
      const x = (tile % columns) * tileWidth + gap;
      const owner = model.slabOwner[this.tiles.slabs[tile]];
      this.#fill(x, y, tileWidth - gap, tileHeight - gap, colours.tile);
      if (owner < 0) continue;
      if (model.groups.length > 1) this.#fill(x - gap + 1, y, gap - 1, tileHeight - gap, colours.groups[owner]);
      this.#tile(tile, owner, x, y, grids[owner], colours, marks[owner]);
    }
    this.context.putImageData(this.image, 0, 0);
    if (this.cursor) this.#outline();
    if (!this.overview.hidden) this.#drawOverview();
  }

  /** The whole arena in a strip: which parts of it groups own. */
  #drawOverview() {
    const { overview, model } = this;
    overview.width = Math.max(Math.floor(overview.clientWidth * devicePixelRatio), 1);
    overview.height = Math.max(Math.floor(overview.clientHeight * devicePixelRatio), 1);
    const context = overview.getContext("2d");
    const one = model.groups.length === 1;
    for (const [x, group] of strip(model, overview.width).entries()) {
      if (group < 0) continue;
      context.fillStyle = css(one ? this.accent : this.colour("group", group));
      context.fillRect(x, 0, 1, overview.height);
    }
  }

  #palette(dims) {
    const dim = (colour) => packed(dims ? mixed(colour, this.tile, 0.75) : colour);
    const slots = [], dimSlots = [];
    for (const { slot } of this.model.requests) {
      if (slot < 0) continue;
      slots[slot] = packed(this.colour("owner", slot));
      dimSlots[slot] = dim(this.colour("owner", slot));
    }
    const groups = this.model.groups.map((_, number) => packed(this.colour("group", number)));
    const dimGroups = this.model.groups.map((_, number) => dim(this.colour("group", number)));
    return { tile: packed(this.tile), line: packed(this.line), ink: packed(this.ink), slots, dimSlots, groups, dimGroups };
  }

  #tile(tile, number, left, top, { across, w, h }, colours, marks) {
    const { state, owner, perSlab } = this.model.groups[number];
    const space = w >= 4 && h >= 4 ? 1 : 0;
    const byGroup = this.paint === "group";
    const first = this.tiles.slabs[tile] * perSlab + this.tiles.cells[tile], pages = this.tiles.pages(tile);
    for (let cell = 0; cell < pages; cell++) {
      const kind = state[first + cell];
      const x = left + (cell % across) * w, y = top + Math.floor(cell / across) * h;
      const wide = w - space, high = h - space;
      if (kind === FREE || kind === UNOWNED) {
        this.#fill(x + (wide >> 1), y + (high >> 1), 1, 1, colours.line);
      } else if (kind === CACHED) {
        this.#hatch(x, y, wide, high, byGroup ? colours.groups[number] : colours.line);
      } else {
        const plain = !marks || marks.has(first + cell);
        const colour = byGroup ? (plain ? colours.groups : colours.dimGroups)[number] : (plain ? colours.slots : colours.dimSlots)[owner[first + cell]];
        this.#fill(x, y, wide, high, colour);
        if (kind === SHARED) this.#fill(x + (wide >> 2 || 1), y + (high >> 2 || (high > 1 ? 1 : 0)), Math.max(wide >> 1, 1), Math.max(high >> 1, 1), colours.ink);
      }
    }
  }

  #fill(x, y, wide, high, colour) {
    const { pixels, width, height } = this;
    const from = Math.max(x, 0), to = Math.min(x + wide, width), end = Math.min(y + high, height);
    if (wide < 8) {
      for (let row = Math.max(y, 0); row < end; row++) for (let at = row * width + from; at < row * width + to; at++) pixels[at] = colour;
    } else for (let row = Math.max(y, 0); row < end; row++) pixels.fill(colour, row * width + from, row * width + to);
  }

  /** Diagonals that go on from cell to cell, so that they can be told from a filled cell at any size. */
  #hatch(x, y, wide, high, colour) {
    const { pixels, width, height, top } = this;
    const period = wide >= 8 ? 4 : 3;
    const to = Math.min(x + wide, width), end = Math.min(y + high, height);
    for (let row = Math.max(y, 0); row < end; row++) {
      for (let at = x; at < to; at++) if ((at + row + top) % period === 0) pixels[row * width + at] = colour;
    }
  }

  // -- what is pointed at

  #at(event) {
    if (!this.layout) return null;
    const box = this.canvas.getBoundingClientRect();
    const x = (event.clientX - box.left) * devicePixelRatio, y = (event.clientY - box.top) * devicePixelRatio + this.top;
    const { tileWidth, tileHeight, columns, gap } = this.layout;
    const column = Math.floor(x / tileWidth);
    const tile = Math.floor(y / tileHeight) * columns + column;
    if (column >= columns || tile >= this.tiles.count || tile < 0) return null;
    const slab = this.tiles.slabs[tile];
    const number = this.model.slabOwner[slab];
    if (number < 0) return { slab };
    const { across, w, h } = this.#grid(this.model.groups[number]);
    const place = Math.min(Math.floor(Math.max((x % tileWidth) - gap, 0) / w), across - 1);
    const cell = place + Math.floor(Math.max((y % tileHeight) - gap, 0) / h) * across;
    return cell < this.tiles.pages(tile) ? this.#page(slab, this.tiles.cells[tile] + cell) : { slab };
  }

  #point(event) {
    this.#show(this.#at(event), event.clientX, event.clientY);
  }

  #leave() {
    this.#show(null);
  }

  #show(found, x, y, byKey = false) {
    if (!found && !this.cursor) return;
    const holders = found?.page === undefined ? [] : this.model.holders(found.group, found.page);
    this.cursor = found && { ...found, holders, x, y, byKey };
    this.focus = holders.map((one) => one.request.id);
    this.onPoint(this.cursor);
    this.draw();
  }

  /** The model has changed: draw it, and say anew what is pointed at. */
  update() {
    const { cursor } = this;
    if (!cursor) return this.draw();
    const { slab, cell = 0 } = cursor;
    this.#show(this.#page(slab, cell), cursor.x, cursor.y);
  }

  /** What lies at a place of a slab. */
  #page(slab, cell) {
    const group = this.model.slabOwner[slab];
    if (group < 0) return { slab };
    const { perSlab } = this.model.groups[group];
    return cell < perSlab ? { slab, group, cell, page: slab * perSlab + cell } : { slab };
  }

  /** Where that is on the canvas: x, y, width and height in device pixels; null if it is not drawn. */
  #place({ slab, group, cell }) {
    const { tileWidth, tileHeight, columns, gap } = this.layout;
    const tile = this.tiles.find(slab, cell);
    if (tile < 0) return null;
    const x = (tile % columns) * tileWidth + gap, y = Math.floor(tile / columns) * tileHeight + gap - this.top;
    if (group === undefined) return [x, y, tileWidth - gap, tileHeight - gap];
    const { across, w, h } = this.#grid(this.model.groups[group]);
    const at = cell - this.tiles.cells[tile];
    return [x + (at % across) * w, y + Math.floor(at / across) * h, w, h];
  }

  #outline() {
    const place = this.#place(this.cursor);
    if (!place) return;
    const [x, y, wide, high] = place;
    this.context.strokeStyle = this.dark ? "#fff" : "#000";
    this.context.lineWidth = 2;
    this.context.strokeRect(x - 2, y - 2, wide + 3, high + 3);
  }

  #key(event) {
    if (event.key === "+" || event.key === "=") return this.zoomBy(1);
    if (event.key === "-") return this.zoomBy(-1);
    if (event.key === "Escape") return this.zoomFit();
    const steps = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: 0, ArrowUp: 0 };
    if (!(event.key in steps) || !this.layout) return;
    event.preventDefault();
    const found = this.#step(event.key, steps[event.key]);
    const place = found && this.#place(found);
    if (!place) return;
    const [x, y] = place;
    const box = this.canvas.getBoundingClientRect();
    if (y < 0 || y > this.height - 20) this.scroller.scrollTop += y / devicePixelRatio - box.height / 2;
    this.#show(found, box.left + x / devicePixelRatio, box.top + Math.min(Math.max(y, 0), this.height) / devicePixelRatio, true);
  }

  /** What lies one page or one row of tiles from the cursor, null at an end. */
  #step(key, by) {
    const { tiles, cursor } = this;
    let tile = cursor ? tiles.find(cursor.slab, cursor.cell) : 0;
    let at = cursor && tile >= 0 ? (cursor.cell ?? tiles.cells[tile]) - tiles.cells[tile] : -1;
    tile = Math.max(tile, 0);
    if (key === "ArrowDown") [tile, at] = [tile + this.layout.columns, 0];
    if (key === "ArrowUp") [tile, at] = [tile - this.layout.columns, 0];
    const sizeOf = (one) => Math.max(tiles.pages(one), 1);
    at += by;
    if (tile < tiles.count && tile >= 0 && at >= sizeOf(tile)) [tile, at] = [tile + 1, 0];
    if (at < 0) [tile, at] = [tile - 1, tile > 0 ? sizeOf(tile - 1) - 1 : 0];
    return tile < 0 || tile >= tiles.count ? null : this.#page(tiles.slabs[tile], tiles.cells[tile] + at);
  }
}
