// The playground: one conversation, streamed, with the probabilities of its tokens.

import { chat } from "./api.js";

const NUMBERS = ["temperature", "top_p", "top_k", "max_tokens", "seed"];
/** Probabilities at and above which a token looks more and more expected. */
const STEPS = [0.1, 0.5, 0.9];

/** Make blanks visible where a token is shown alone. */
export const visible = (text) => (text === "" ? "∅" : text.replaceAll("\n", "↵").replaceAll("\t", "⇥").replaceAll(" ", "␣"));
const percent = (logprob) => `${(100 * Math.exp(logprob)).toFixed(1)} %`;

/** What the form asks for, as fields of a chat request. Blank fields are left to the server. */
export function parameters(form) {
  const fields = {};
  for (const name of NUMBERS) if (form[name].value !== "") fields[name] = Number(form[name].value);
  const stop = form.stop.value.split("\n").filter((line) => line);
  if (stop.length) fields.stop = stop;
  return fields;
}

export class Chat {
  /** `onTip({title, rows, x, y} | null)` shows what a token's alternatives were; `fail(error)` is told of failures. */
  constructor({ form, log, prompt, send, stop, showProbs, onTip, fail }) {
    Object.assign(this, { form, log, prompt, send, stop, onTip, fail });
    this.hint = log.firstElementChild;
    this.model = "";
    this.messages = [];
    this.answers = new Map(); // request id -> {prompt, texts}: what this tab's own requests wrote
    this.running = null;
    form.addEventListener("submit", (event) => (event.preventDefault(), this.ask()));
    stop.addEventListener("click", () => this.running?.abort());
    prompt.addEventListener("keydown", (event) => {
      if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
        event.preventDefault();
        form.requestSubmit();
      }
    });
    showProbs.addEventListener("change", () => log.classList.toggle("plain", !showProbs.checked));
    for (const type of ["pointerover", "click"]) log.addEventListener(type, (event) => this.#point(event.target));
    log.addEventListener("pointerleave", () => onTip(null));
    log.addEventListener("blur", () => this.#step(null));
    log.addEventListener("keydown", (event) => this.#key(event));
  }

  clear() {
    this.running?.abort();
    this.messages = [];
    this.log.replaceChildren(this.hint);
  }

  /** What one of this tab's requests wrote at token positions [from, to), "" if it isn't ours or that is its prompt. */
  ownText(id, prompt, from, to) {
    const texts = this.answers.get(id);
    return texts ? texts.slice(Math.max(from - prompt, 0), Math.max(to - prompt, 0)).join("") : "";
  }

  async ask() {
    const text = this.prompt.value.trim();
    if (!text || this.running) return;
    this.prompt.value = "";
    this.messages.push({ role: "user", content: text });
    this.#say("user", "You").append(text);
    const abort = (this.running = new AbortController());
    this.#busy(true);
    const box = this.#say("assistant", "Model");
    const message = { role: "assistant", content: "" };
    const note = document.createElement("p");
    note.className = "note";
    try {
      await this.#stream(box, message, note, abort.signal);
    } catch (error) {
      if (abort.signal.aborted) note.textContent = "stopped";
      else {
        note.textContent = error.message;
        note.classList.add("bad");
        this.fail(error);
      }
    } finally {
      this.messages.push(message);
      if (!message.content && !box.textContent) this.messages.splice(-2); // a turn that failed is not part of the talk
      box.parentElement.append(note);
      this.running = null;
      this.#busy(false);
      this.#scroll();
    }
  }

  async #stream(box, message, note, signal) {
    const system = this.form.system.value.trim();
    const top = Number(this.form.top_logprobs.value || 0);
    const body = {
      model: this.model,
      messages: system ? [{ role: "system", content: system }, ...this.messages] : this.messages,
      stream: true,
      stream_options: { include_usage: true },
      logprobs: true,
      top_logprobs: top,
      ...parameters(this.form),
    };
    const started = performance.now();
    let first = 0, waiting = [], reason = "";
    for await (const chunk of await chat(body, signal)) {
      if (chunk.error) throw new Error(chunk.error.message);
      if (chunk.usage) note.textContent = this.#summary(chunk.usage, reason, first - started, performance.now() - first);
      const [choice] = chunk.choices;
      if (!choice) continue;
      reason = choice.finish_reason ?? reason;
      const tokens = choice.logprobs?.content ?? [];
      if (tokens.length && !first) first = performance.now();
      waiting.push(...tokens);
      this.#remember(chunk.id, tokens);
      const text = choice.delta.content ?? "";
      if (text) {
        message.content += text;
        this.#append(box, waiting, text);
        waiting = [];
      }
    }
    if (waiting.length) this.#append(box, waiting, "");
  }

  #summary(usage, reason, toFirst, after) {
    const rate = usage.completion_tokens > 1 ? `, ${((1000 * (usage.completion_tokens - 1)) / after).toFixed(0)} tokens/s` : "";
    const cached = usage.prompt_tokens_details?.cached_tokens ?? 0;
    return `${usage.prompt_tokens} + ${usage.completion_tokens} tokens (${cached} from the prefix cache), first after ${toFirst.toFixed(0)} ms${rate}; end: ${reason}`;
  }

  #remember(id, tokens) {
    if (!this.answers.has(id)) {
      this.answers.set(id, []);
      if (this.answers.size > 50) this.answers.delete(this.answers.keys().next().value);
    }
    this.answers.get(id).push(...tokens.map((one) => one.token));
  }

  /** Tokens and the text they made: a span each where they spell it, one for all where they only do so together. */
  #append(box, tokens, text) {
    const follows = this.log.scrollHeight - this.log.scrollTop - this.log.clientHeight < 40;
    const apart = tokens.map((one) => one.token).join("") === text;
    for (const [shown, entries] of apart ? tokens.map((one) => [one.token, [one]]) : [[text, tokens]]) {
      const span = document.createElement("span");
      const least = Math.min(...entries.map((one) => Math.exp(one.logprob)));
      span.className = `tok t${entries.length ? STEPS.filter((step) => least >= step).length : 3}`;
      span.textContent = shown || entries.map((one) => one.token).join("");
      if (!shown) span.classList.add("silent");
      span.entries = entries;
      box.append(span);
    }
    if (follows) this.#scroll();
  }

  #say(role, name) {
    this.hint.remove();
    const article = document.createElement("article");
    article.className = role;
    const heading = document.createElement("h3"), box = document.createElement("div");
    heading.textContent = name;
    box.className = "text";
    article.append(heading, box);
    this.log.append(article);
    this.#scroll();
    return box;
  }

  #scroll() {
    this.log.scrollTop = this.log.scrollHeight;
  }

  #busy(busy) {
    this.send.hidden = busy;
    this.stop.hidden = !busy;
    this.log.setAttribute("aria-busy", String(busy));
  }

  // -- alternatives

  #point(target) {
    const span = target.closest?.(".tok");
    if (!span?.entries?.length) return this.onTip(null);
    const box = span.getClientRects()[0];
    const rows = span.entries.flatMap((entry) => {
      const others = entry.top_logprobs.filter((one) => one.token !== entry.token);
      return [entry, ...others].map((one, i) => ({ text: visible(one.token), share: Math.exp(one.logprob), value: percent(one.logprob), chosen: i === 0 }));
    });
    rows.sort((a, b) => (span.entries.length > 1 ? 0 : b.share - a.share));
    this.onTip({ title: `Token ${visible(span.textContent)}`, rows, x: box.left, y: box.bottom });
  }

  #key(event) {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (event.key === "Escape") this.#step(null);
    if (!step) return;
    const spans = [...this.log.querySelectorAll(".tok")];
    const at = spans.indexOf(this.current);
    const next = spans[at < 0 ? (step > 0 ? 0 : spans.length - 1) : at + step];
    if (!next) return;
    event.preventDefault();
    this.#step(next);
  }

  #step(span) {
    this.current?.classList.remove("current");
    this.current = span;
    if (!span) return this.onTip(null);
    span.classList.add("current");
    span.scrollIntoView({ block: "nearest" });
    this.#point(span);
  }
}
