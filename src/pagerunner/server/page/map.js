// The arena: one tile a slab, in it one cell a page. Everything visible is written into one array and drawn at once.

import { UNOWNED, FREE, CACHED, SHARED } from "./model.js";

/** Sizes of a cell in device pixels, small to large: the fitting view takes the largest with which all slabs fit. */
const CELLS = [[1, 1], [2, 1], [2, 2], [3, 2], [3, 3], [4, 3], [4, 4], [5, 5], [6, 6], [8, 8], [10, 10], [12, 12], [16, 16], [24, 24]];
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
  constructor(model, canvas, scroller, spacer, onPoint) {
    Object.assign(this, { model, canvas, scroller, spacer, onPoint });
    this.context = canvas.getContext("2d", { alpha: false });
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
  }

  /** The colour of a group or of a request's slot, and of the map's other parts. */
  colour(kind, number = 0) {
    if (kind === "group") return hue(number * 3 + 1, this.dark);
    return kind === "owner" ? hue(number, this.dark) : this.line;
  }

  zoomBy(steps) {
    const [, index] = this.#cell();
    this.zoom = Math.max(0, Math.min(this.zoom + steps, CELLS.length - 1 - (index - this.zoom)));
    this.draw();
  }

  zoomFit() {
    this.zoom = 0;
    this.draw();
  }

  /** Show one slab with large cells. */
  zoomTo(slab) {
    if (slab === undefined) return;
    const [, now] = this.#cell();
    this.zoomBy(Math.max(0, CELLS.length - 2 - now));
    this.#measure();
    const { columns, tileHeight } = this.layout;
    this.scroller.scrollTop = (Math.floor(slab / columns) * tileHeight) / devicePixelRatio - 40;
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

  #fit(cell) {
    const [width, height] = cell;
    const most = Math.max(1, ...this.model.groups.map((group) => group.perSlab));
    const gap = width > 2 ? 3 : 2;
    const room = Math.max(Math.floor((this.width - gap) / width), 1);
    const across = Math.min(Math.max(Math.ceil(Math.sqrt((most * height) / width)), 1), room);
    const tileWidth = across * width + gap;
    const tileHeight = Math.ceil(most / across) * height + gap;
    const columns = Math.max(1, Math.floor((this.width - gap) / tileWidth));
    return { width, height, gap, tileWidth, tileHeight, columns, tall: Math.ceil(this.model.slabs / columns) * tileHeight + gap };
  }

  #cell() {
    let index = 0;
    while (index + 1 < CELLS.length && this.#fit(CELLS[index + 1]).tall <= this.height) index++;
    index = Math.min(index + this.zoom, CELLS.length - 1);
    return [CELLS[index], index];
  }

  #measure() {
    const most = Math.floor(parseFloat(getComputedStyle(this.scroller).maxHeight) - BORDERS);
    this.width = Math.floor(this.scroller.clientWidth * devicePixelRatio);
    this.height = Math.floor(most * devicePixelRatio);
    this.layout = this.#fit(this.#cell()[0]);
    const tall = Math.ceil(this.layout.tall / devicePixelRatio);
    this.height = Math.min(this.height, Math.ceil(tall * devicePixelRatio));
    this.spacer.style.height = `${tall}px`;
    this.scroller.style.height = `${Math.min(tall, most) + BORDERS}px`;
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
  #grid(group) {
    const { width, height, gap, tileWidth, tileHeight } = this.layout;
    const [wide, high] = [tileWidth - gap, tileHeight - gap];
    let across = Math.max(1, Math.min(Math.ceil(Math.sqrt((group.perSlab * wide) / high)), Math.floor(wide / width)));
    while (Math.ceil(group.perSlab / across) * height > high && across * width < wide) across++;
    return { across, w: Math.floor(wide / across), h: Math.max(height, Math.floor(high / Math.ceil(group.perSlab / across))) };
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
    for (let slab = firstRow * columns; slab < model.slabs; slab++) {
      const y = Math.floor(slab / columns) * tileHeight + gap - this.top;
      if (y >= height) break;
      const x = (slab % columns) * tileWidth + gap;
      const owner = model.slabOwner[slab];
      this.#fill(x, y, tileWidth - gap, tileHeight - gap, colours.tile);
      if (owner < 0) continue;
      if (model.groups.length > 1) this.#fill(x - gap + 1, y, gap - 1, tileHeight - gap, colours.groups[owner]);
      this.#slab(model.groups[owner], owner, slab, x, y, grids[owner], colours, marks[owner]);
    }
    this.context.putImageData(this.image, 0, 0);
    if (this.cursor) this.#outline();
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

  #slab(group, number, slab, left, top, { across, w, h }, colours, marks) {
    const { state, owner, perSlab } = group;
    const space = w >= 4 && h >= 4 ? 1 : 0;
    const byGroup = this.paint === "group";
    const first = slab * perSlab;
    for (let cell = 0; cell < perSlab; cell++) {
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
    const slab = Math.floor(y / tileHeight) * columns + column;
    if (column >= columns || slab >= this.model.slabs || slab < 0) return null;
    const number = this.model.slabOwner[slab];
    if (number < 0) return { slab };
    const { across, w, h } = this.#grid(this.model.groups[number]);
    const place = Math.min(Math.floor(Math.max((x % tileWidth) - gap, 0) / w), across - 1);
    return this.#page(slab, place + Math.floor(Math.max((y % tileHeight) - gap, 0) / h) * across);
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

  #place({ slab, group, cell }) {
    const { tileWidth, tileHeight, columns, gap } = this.layout;
    const x = (slab % columns) * tileWidth + gap, y = Math.floor(slab / columns) * tileHeight + gap - this.top;
    if (group === undefined) return [x, y, tileWidth - gap, tileHeight - gap];
    const { across, w, h } = this.#grid(this.model.groups[group]);
    return [x + (cell % across) * w, y + Math.floor(cell / across) * h, w, h];
  }

  #outline() {
    const [x, y, wide, high] = this.#place(this.cursor);
    this.context.strokeStyle = this.dark ? "#fff" : "#000";
    this.context.lineWidth = 2;
    this.context.strokeRect(x - 2, y - 2, wide + 3, high + 3);
  }

  #key(event) {
    const { model } = this;
    if (event.key === "+" || event.key === "=") return this.zoomBy(1);
    if (event.key === "-") return this.zoomBy(-1);
    if (event.key === "Escape") return this.zoomFit();
    const steps = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: 0, ArrowUp: 0 };
    if (!(event.key in steps) || !this.layout) return;
    event.preventDefault();
    let { slab, cell = 0 } = this.cursor ?? { slab: 0, cell: -1 };
    if (event.key === "ArrowDown") [slab, cell] = [slab + this.layout.columns, 0];
    if (event.key === "ArrowUp") [slab, cell] = [slab - this.layout.columns, 0];
    const sizeOf = (one) => (model.slabOwner[one] < 0 ? 1 : model.groups[model.slabOwner[one]].perSlab);
    cell += steps[event.key];
    if (cell >= sizeOf(slab)) [slab, cell] = [slab + 1, 0];
    if (cell < 0) [slab, cell] = [slab - 1, slab > 0 ? sizeOf(slab - 1) - 1 : 0];
    if (slab < 0 || slab >= model.slabs) return;
    const found = this.#page(slab, cell);
    const [x, y] = this.#place(found);
    const box = this.canvas.getBoundingClientRect();
    if (y < 0 || y > this.height - 20) this.scroller.scrollTop += y / devicePixelRatio - box.height / 2;
    this.#show(found, box.left + x / devicePixelRatio, box.top + Math.min(Math.max(y, 0), this.height) / devicePixelRatio, true);
  }
}
