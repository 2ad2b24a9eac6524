// The engine as the page knows it: frames of server/live.py put together.

export const UNOWNED = 0, FREE = 1, CACHED = 2, USED = 3, SHARED = 4;
const MOST_PAGES = 1 << 22; // more than this can't be told apart on a screen anyway
const RATE_SECONDS = 2;
const KEPT_STEPS = 240;

export function bytesOf(base64) {
  const text = atob(base64);
  const bytes = new Uint8Array(text.length);
  for (let i = 0; i < text.length; i++) bytes[i] = text.charCodeAt(i);
  return bytes;
}

const intsOf = (base64) => new Int32Array(bytesOf(base64).buffer);

/** A list whose first `keep` entries stay and which goes on with others. */
export function spliced(list, [keep, tail]) {
  const more = intsOf(tail);
  const result = new Int32Array(keep + more.length);
  result.set(list.subarray(0, keep));
  result.set(more, keep);
  return result;
}

/** Of drafts between two counts: the mean number of tokens of a row's step, and by place how often a draft's token was accepted. Null without any. */
export function draftsSince(before, after) {
  const counts = after?.map((count, place) => count - (before?.[place] ?? 0)) ?? [];
  const drafts = counts.reduce((sum, count) => sum + count, 0);
  if (!drafts) return null;
  const rates = counts.slice(1).map((_, place) => counts.slice(place + 1).reduce((sum, count) => sum + count, 0) / drafts);
  return { length: 1 + rates.reduce((sum, rate) => sum + rate, 0), rates };
}

/** One memory group: for each of its pages what it is and whose. */
class Group {
  constructor(plan, slabs) {
    Object.assign(this, { name: plan.name, kind: plan.kind, pageTokens: plan.page_tokens, perSlab: plan.pages_per_slab });
    this.pageBytes = plan.page_bytes;
    this.state = new Uint8Array(slabs * this.perSlab);
    this.owner = new Int32Array(slabs * this.perSlab); // the slot of a request, the first one of a shared page
    this.cached = new Uint8Array(0);
    this.counts = new Int32Array(5);
  }
}

export class Model {
  constructor() {
    this.plan = null;
    this.groups = [];
    this.slabOwner = new Int16Array(0); // by slab: its group, or -1
    this.requests = [];
    this.byId = new Map();
    this.steps = [];
    this.history = [];
    this.tokensPerSecond = 0;
    this.sleep = -1;
    this.canSleep = true;
    this.ranks = 1;
  }

  /** Take a frame in. */
  apply(frame) {
    if (frame.plan) this.#start(frame);
    if (!this.plan) return;
    this.clock = frame.clock;
    this.sleep = frame.sleep;
    this.stats = frame.stats;
    this.firstToken = frame.first_token;
    this.interToken = frame.inter_token;
    this.steps = [...this.steps, ...frame.steps].slice(-KEPT_STEPS);
    if (frame.slabs) {
      this.slabOwner.fill(-1);
      const groups = bytesOf(frame.slabs[1]);
      intsOf(frame.slabs[0]).forEach((slab, i) => slab < this.slabs && (this.slabOwner[slab] = groups[i]));
    }
    frame.cached.forEach((bits, i) => bits !== null && (this.groups[i].cached = bytesOf(bits)));
    this.#takeRequests(frame.requests);
    this.#paint();
    this.#measure();
  }

  /** The requests that hold a page, and which of their pages it is. */
  holders(group, page) {
    const found = [];
    for (const request of this.requests) {
      const at = request.pages[group]?.indexOf(page) ?? -1;
      if (at >= 0) found.push({ request, at });
    }
    return found;
  }

  #start({ plan, can_sleep, ranks }) {
    this.plan = plan;
    this.ranks = ranks;
    this.canSleep = can_sleep;
    const most = Math.max(...plan.groups.map((group) => group.pages_per_slab));
    this.slabs = Math.min(plan.num_slabs, Math.ceil(MOST_PAGES / most));
    this.groups = plan.groups.map((group) => new Group(group, this.slabs));
    this.slabOwner = new Int16Array(this.slabs).fill(-1);
    this.byId = new Map();
    this.steps = [];
    this.history = [];
  }

  #takeRequests(rows) {
    const known = this.byId;
    this.requests = rows.map(([id, slot, age, prompt, tokens, computed, cached, limit, wait, changes]) => {
      const before = known.get(id)?.pages ?? [];
      const pages = changes.map((change, i) => (change ? spliced(before[i] ?? new Int32Array(0), change) : before[i] ?? new Int32Array(0)));
      return { id, slot, age, prompt, tokens, computed, cached, limit, wait, pages };
    });
    this.byId = new Map(this.requests.map((request) => [request.id, request]));
  }

  #paint() {
    for (const [number, group] of this.groups.entries()) {
      const { state, owner, perSlab, cached } = group;
      for (let slab = 0; slab < this.slabs; slab++) {
        state.fill(this.slabOwner[slab] === number ? FREE : UNOWNED, slab * perSlab, (slab + 1) * perSlab);
      }
      for (let byte = 0; byte < cached.length; byte++) {
        for (let bits = cached[byte], page = byte * 8; bits; bits >>= 1, page++) {
          if (bits & 1 && page < state.length) state[page] = CACHED;
        }
      }
      for (const { slot, pages } of this.requests) {
        for (const page of pages[number] ?? []) {
          if (page < 0 || page >= state.length) continue;
          if (state[page] === USED) state[page] = SHARED;
          else if (state[page] !== SHARED) {
            state[page] = USED;
            owner[page] = slot;
          }
        }
      }
      group.counts.fill(0);
      for (const one of state) group.counts[one]++;
    }
  }

  #measure() {
    const now = { clock: this.clock, tokens: this.stats.generation_tokens_total, steps: this.stats.steps_total, accepted: this.stats.spec?.accepted };
    this.history = [...this.history.filter((one) => one.clock > now.clock - RATE_SECONDS), now];
    const first = this.history[0];
    const seconds = now.clock - first.clock;
    this.tokensPerSecond = seconds ? (now.tokens - first.tokens) / seconds : 0;
    this.stepsPerSecond = seconds ? (now.steps - first.steps) / seconds : 0;
    this.drafts = draftsSince(first.accepted, now.accepted);
  }
}
