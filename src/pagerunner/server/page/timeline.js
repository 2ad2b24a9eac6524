// The latest steps as two charts with one axis of steps: tokens above, time below.

import { decades, onDecades, roundUp } from "./layout.js";
import { number, say, seconds } from "./panels.js";

const LEFT = 46, TOP = 16, BETWEEN = 22, BOTTOM = 18; // room for words, CSS pixels
const NARROWEST = 4, WIDEST = 16; // a bar with its gap

/** Where n bars lie in a width: how many of the latest are drawn, and the pixels of each. They fill it when there are enough. */
export function bars(count, wide) {
  const shown = Math.min(count, Math.max(Math.floor(wide / NARROWEST), 1));
  return { shown, pitch: Math.min(wide / Math.max(shown, 1), WIDEST) };
}

/** The top of an axis of seconds, and its marks with their words, all in the unit of the top. */
export function timeAxis(longest) {
  const top = roundUp(Math.max(longest, 1e-5));
  const [scale, unit] = top < 1 ? [1000, "ms"] : [1, "s"];
  const word = (value) => `${Number((value * scale).toPrecision(3))} ${unit}`;
  return { top, marks: [0, top / 2, top].map((value) => [value, word(value)]) };
}

export class Timeline {
  constructor(canvas, words, rate, empty) {
    Object.assign(this, { canvas, words, rate, empty });
    this.pointed = null;
    canvas.addEventListener("pointermove", (event) => {
      this.pointed = event.clientX - canvas.getBoundingClientRect().left;
      this.draw();
    });
    canvas.addEventListener("pointerleave", () => {
      this.pointed = null;
      this.draw();
    });
    new ResizeObserver(() => this.draw()).observe(canvas);
  }

  show(model) {
    this.model = model;
    this.draw();
  }

  draw() {
    if (!this.model?.plan) return;
    const all = this.model.steps;
    this.empty.hidden = all.length > 0;
    const context = this.#clear();
    const { width, height } = this;
    const high = height - TOP - BETWEEN - BOTTOM;
    const tokens = { top: TOP, high: Math.round(high * 0.58) };
    const time = { top: TOP + tokens.high + BETWEEN, high: high - Math.round(high * 0.58) };
    const { shown, pitch } = bars(all.length, width - LEFT);
    const steps = all.slice(all.length - shown);
    const top = decades(Math.max(1, ...steps.map((step) => step[4])));
    const axis = timeAxis(Math.max(0, ...steps.map((step) => step[2])));
    this.axes = { tokens: top.map(String), seconds: axis.marks.map((mark) => mark[1]), bars: shown, pitch, left: LEFT, width };
    this.#axis(context, tokens, "tokens of a step (log)", top.map((value) => [onDecades(value, top.at(-1)), number(value)]));
    this.#axis(context, time, "its time", axis.marks.map(([value, word]) => [value / axis.top, word]));
    const first = width - shown * pitch;
    this.#bars(context, steps, first, pitch, (step) => onDecades(step[4], top.at(-1)), tokens, true);
    this.#bars(context, steps, first, pitch, (step) => step[2] / axis.top, time, false);
    this.#numbers(context, steps, first, pitch);
    this.#say(steps, this.pointed === null ? shown - 1 : Math.floor((this.pointed - first) / pitch));
  }

  #clear() {
    const { canvas } = this;
    const scale = devicePixelRatio;
    this.width = canvas.clientWidth;
    this.height = canvas.clientHeight;
    const [wide, high] = [Math.round(this.width * scale), Math.round(this.height * scale)];
    if (canvas.width !== wide || canvas.height !== high) [canvas.width, canvas.height] = [wide, high];
    const context = canvas.getContext("2d");
    context.setTransform(scale, 0, 0, scale, 0, 0);
    context.clearRect(0, 0, this.width, this.height);
    const style = getComputedStyle(document.documentElement);
    this.colours = Object.fromEntries(["accent", "line", "muted"].map((name) => [name, style.getPropertyValue(`--${name}`).trim()]));
    context.font = `11px ${getComputedStyle(document.body).fontFamily}`;
    return context;
  }

  /** A line and a word for each mark, and above them what is counted. */
  #axis(context, { top, high }, title, marks) {
    context.fillStyle = this.colours.muted;
    context.textAlign = "left";
    context.textBaseline = "bottom";
    context.fillText(title, LEFT, top - 3);
    context.textAlign = "right";
    context.textBaseline = "middle";
    let last = Infinity;
    for (const [share, word] of marks) {
      const y = Math.round(top + high * (1 - share)) + 0.5;
      context.fillStyle = this.colours.line;
      context.fillRect(LEFT, y - 0.5, this.width - LEFT, 1);
      if (last - y < 11) continue; // no room for another word
      last = y;
      context.fillStyle = this.colours.muted;
      context.fillText(word, LEFT - 5, y);
    }
  }

  #bars(context, steps, first, pitch, share, { top, high }, framed) {
    context.fillStyle = context.strokeStyle = this.colours.accent;
    context.lineWidth = 1;
    const wide = pitch - Math.max(1, Math.round(pitch / 6));
    for (const [place, step] of steps.entries()) {
      const x = first + place * pitch, tall = Math.max(1, share(step) * high);
      if (framed && !step[5]) context.strokeRect(x + 0.5, top + high - tall + 0.5, Math.max(wide - 1, 1), Math.max(tall - 1, 1));
      else context.fillRect(x, top + high - tall, wide, tall);
    }
  }

  /** The numbers of the first and the last step under the bars, and of some between. */
  #numbers(context, steps, first, pitch) {
    context.fillStyle = this.colours.muted;
    context.textBaseline = "bottom";
    const y = this.height - 2, every = Math.max(Math.ceil(90 / pitch), 1);
    for (let place = steps.length - 1; place >= 0; place -= every) {
      const x = first + (place + 1) * pitch, last = place === steps.length - 1;
      const word = last ? `step ${number(steps[place][0])}` : number(steps[place][0]);
      context.textAlign = "right";
      if (x - context.measureText(word).width >= LEFT) context.fillText(word, x, y);
    }
  }

  #say(steps, at) {
    say(this.rate, `${number(this.model.stepsPerSecond)} steps a second`);
    if (!steps[at]) return say(this.words, steps.length ? "" : "none yet");
    const [count, , took, rows, tokens, graph] = steps[at];
    say(this.words, `${number(count)}: ${number(tokens)} tokens, ${number(rows)} rows, ${seconds(took)}, ${graph ? "graph" : "eager"}`);
  }
}
