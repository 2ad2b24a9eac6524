// The dialog that asks for keys, and says of each whether the server takes it.

import { ApiError, control, setKeys } from "./api.js";

const NAMES = { api: "API key", admin: "admin key" };

export class KeyDialog {
  /** `tryClient()` calls something that the API key opens; `used()` is told that the server takes what was typed. */
  constructor(dialog, tryClient, used) {
    Object.assign(this, { dialog, tryClient, used });
    this.withoutAdmin = false; // whether the user has gone on without one
    const form = dialog.querySelector("form");
    form.addEventListener("submit", (event) => {
      if (event.submitter?.value === "cancel") return;
      event.preventDefault();
      this.#use(form.querySelector("#use-keys"));
    });
    dialog.addEventListener("close", () => (this.withoutAdmin = !this.#typed("admin")));
  }

  open() {
    for (const which of Object.keys(NAMES)) this.#say(which, "");
    if (!this.dialog.open) this.dialog.showModal();
  }

  /** Open it because of a refusal: an ApiError 401. */
  ask(error) {
    if (!this.dialog.open) this.open();
    this.#refuse(error);
  }

  #typed(which) {
    return this.dialog.querySelector(`#${which}-key`).value.trim();
  }

  #refuse({ which, given }) {
    this.#say(which, given ? `The server does not take this ${NAMES[which]}.` : `The server asks for ${which === "api" ? "an" : "the"} ${NAMES[which]}.`);
    this.dialog.querySelector(`#${which}-key`).focus();
  }

  #say(which, text) {
    const words = this.dialog.querySelector(`#${which}-key-words`);
    words.hidden = !text;
    words.textContent = text;
    this.dialog.querySelector(`#${which}-key`).setAttribute("aria-invalid", String(Boolean(text)));
  }

  /** Keep what the server takes; say what it doesn't, and go on with the keys from before. */
  async #use(button) {
    for (const which of Object.keys(NAMES)) this.#say(which, "");
    const before = setKeys({ api: this.#typed("api"), admin: this.#typed("admin") });
    button.disabled = true;
    try {
      const calls = [this.tryClient(), ...(this.#typed("admin") ? [control("is_sleeping", {})] : [])];
      const refused = (await Promise.allSettled(calls)).map((one) => one.reason).filter((reason) => reason);
      for (const reason of refused.reverse()) {
        if (reason instanceof ApiError && reason.status === 401) this.#refuse(reason);
        else if (reason instanceof TypeError) this.#say("api", "The server cannot be reached.");
      }
      if (this.dialog.querySelector('[aria-invalid="true"]')) setKeys(before);
      else {
        this.withoutAdmin = !this.#typed("admin"); // the dialog's own event comes later than an answer may
        this.dialog.close("ok");
        this.used();
      }
    } finally {
      button.disabled = false;
    }
  }
}
