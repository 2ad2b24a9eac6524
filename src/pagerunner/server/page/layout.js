// What is drawn where, as numbers: nothing here knows the document, so that tests can run it without a browser.

import { CACHED, SHARED, USED } from "./model.js";

/** Sizes of a cell in device pixels, small to large: the fitting view takes the largest with which all tiles fit. */
export const CELLS = [[1, 1], [2, 1], [2, 2], [3, 2], [3, 3], [4, 3], [4, 4], [5, 5], [6, 6], [8, 8], [10, 10], [12, 12], [16, 16], [24, 24]];
/** Pages of a tile at most: a slab with more is drawn as several. */
export const TILE_PAGES = 256;
/** The first of CELLS in which a page in use can be told from its neighbours at a glance. */
const LEGIBLE = CELLS.findIndex(([width]) => width === 6);

/** Which pages are drawn, as tiles of at most TILE_PAGES: tile i begins with page `cells[i]` of slab `slabs[i]`. */
export class Tiles {
  /** With `all`, every slab; otherwise those that a group owns, and of their parts those with a page in use or cached. */
  constructor(model, all) {
    this.model = model;
    this.slabs = [];
    this.cells = [];
    this.first = new Int32Array(model.slabs + 1); // by slab: its first tile, or where that would be
    for (let slab = 0; slab < model.slabs; slab++) {
      this.first[slab] = this.slabs.length;
      const owner = model.slabOwner[slab];
      if (owner >= 0) this.#parts(slab, model.groups[owner], all);
      else if (all) this.#add(slab, 0);
    }
    this.first[model.slabs] = this.slabs.length;
  }

  get count() {
    return this.slabs.length;
  }

  /** Pages of a tile, 0 for a free slab. */
  pages(tile) {
    const owner = this.model.slabOwner[this.slabs[tile]];
    return owner < 0 ? 0 : Math.min(this.model.groups[owner].perSlab - this.cells[tile], TILE_PAGES);
  }

  /** The tile with a cell of a slab, -1 if it is not drawn. */
  find(slab, cell = 0) {
    for (let tile = this.first[slab]; tile < this.first[slab + 1]; tile++) {
      const at = cell - this.cells[tile];
      if (at >= 0 && at < Math.max(this.pages(tile), 1)) return tile;
    }
    return -1;
  }

  #parts(slab, { perSlab, state }, all) {
    const begin = this.slabs.length;
    for (let cell = 0; cell < perSlab; cell += TILE_PAGES) {
      if (all || perSlab <= TILE_PAGES || busy(state, slab * perSlab + cell, Math.min(TILE_PAGES, perSlab - cell))) this.#add(slab, cell);
    }
    if (this.slabs.length === begin) this.#add(slab, 0);
  }

  #add(slab, cell) {
    this.slabs.push(slab);
    this.cells.push(cell);
  }
}

function busy(state, first, count) {
  for (let page = first; page < first + count; page++) if (state[page] === USED || state[page] === SHARED || state[page] === CACHED) return true;
  return false;
}

/** The most pages that a tile of this model has. */
export const largestTile = (model) => Math.max(1, ...model.groups.map((group) => Math.min(group.perSlab, TILE_PAGES)));

/** How `count` tiles of at most `pages` cells lie in a width (device pixels). */
export function fit([width, height], count, pages, wide) {
  const gap = width > 2 ? 3 : 2;
  const room = Math.max(Math.floor((wide - gap) / width), 1);
  const across = Math.min(Math.max(Math.ceil(Math.sqrt((pages * height) / width)), 1), room);
  const tileWidth = across * width + gap;
  const tileHeight = Math.ceil(pages / across) * height + gap;
  const columns = Math.max(1, Math.floor((wide - gap) / tileWidth));
  return { width, height, gap, tileWidth, tileHeight, columns, tall: Math.ceil(count / columns) * tileHeight + gap };
}

/** The index in CELLS of the largest cell with which `count` tiles need no more than `high`. */
export function fittingCell(count, pages, wide, high) {
  let index = 0;
  while (index + 1 < CELLS.length && fit(CELLS[index + 1], count, pages, wide).tall <= high) index++;
  return index;
}

/** Whether all slabs can be shown at once with cells that one can tell apart. */
export function allLegible(model, wide, high) {
  const parts = Math.max(...model.groups.map((group) => Math.ceil(group.perSlab / TILE_PAGES)));
  return fittingCell(model.slabs * parts, largestTile(model), wide, high) >= LEGIBLE;
}

/** For how many tiles there is to be room: a few more than there are, and the same again until they are many more or fewer. */
export function roomFor(count, before) {
  return count <= before && count > before / 3 ? before : Math.max(Math.ceil(count * 1.25), 4);
}

/** By column of a strip `wide` pixels long: the group that owns most of the slabs there, -1 if none does. */
export function strip(model, wide) {
  const found = new Int16Array(wide).fill(-1);
  const counts = new Int32Array(model.groups.length);
  for (let x = 0; x < wide; x++) {
    const first = Math.floor((x * model.slabs) / wide);
    const end = Math.max(Math.floor(((x + 1) * model.slabs) / wide), first + 1);
    counts.fill(0);
    for (let slab = first; slab < end; slab++) if (model.slabOwner[slab] >= 0) counts[model.slabOwner[slab]]++;
    const most = Math.max(...counts);
    if (most) found[x] = counts.indexOf(most);
  }
  return found;
}

/** The least of 1, 2, 5, 10, 20, ... times a power of ten that is no smaller. */
export function roundUp(value) {
  const power = 10 ** Math.floor(Math.log10(value));
  return power * [1, 2, 5, 10].find((digit) => digit * power >= value * (1 - 1e-9));
}

/** Powers of ten from 1 to the first one that is no smaller than `most`, at least to 10. */
export function decades(most) {
  const ticks = [1, 10];
  while (ticks.at(-1) < most) ticks.push(ticks.at(-1) * 10);
  return ticks;
}

/** The place between 0 and 1 of a number of tokens on a logarithmic axis from one half to `top`. */
export const onDecades = (value, top) => Math.log(2 * Math.max(value, 1)) / Math.log(2 * top);
