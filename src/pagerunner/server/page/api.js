// Talks to the server. Keys live in this module's memory and nowhere else.

const keys = { api: "", admin: "" };

/** Use these keys from now on; returns those before, in the same form. */
export function setKeys({ api, admin }) {
  const before = { ...keys };
  Object.assign(keys, { api, admin });
  return before;
}

/** A failed answer, with the server's own sentence. `which` is the key that it asked for, `given` whether it had been sent one. */
export class ApiError extends Error {
  constructor(status, message, which) {
    super(message);
    this.status = status;
    this.which = which;
    this.given = Boolean(keys[which]);
  }
}

/** The key for what `which` opens: where a server has one kind of key only, that one is for everything. */
const keyFor = (which) => (which === "admin" ? keys.admin || keys.api : keys.api || keys.admin);

async function call(path, options, which) {
  const headers = { ...options.headers };
  const key = keyFor(which);
  if (key) headers.Authorization = `Bearer ${key}`;
  const response = await fetch(path, { ...options, headers, cache: "no-store", credentials: "omit" });
  if (response.ok) return response;
  let message = `${path} answered ${response.status}.`;
  try {
    message = (await response.json()).error.message;
  } catch {
    // not one of the server's own errors: the status has to do
  }
  throw new ApiError(response.status, message, which);
}

/** What clients may ask for. */
export const get = (path) => call(path, {}, "api");

/** A control endpoint. */
export const control = (path, options = { method: "POST" }) => call(path, options, "admin");

/** The JSON payloads of a stream of server-sent events, until it ends or says [DONE]. */
async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      const parts = (rest + value).split("\n\n");
      rest = parts.pop();
      for (const part of parts) {
        const data = part.replace(/^data: /, "");
        if (data === "[DONE]") return;
        yield JSON.parse(data);
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

/** The frames of one of the server's engines. */
export const live = async (signal, engine) => events(await control(`ui/live?engine=${engine}`, { signal }));

export async function chat(body, signal) {
  const headers = { "Content-Type": "application/json" };
  return events(await call("v1/chat/completions", { method: "POST", body: JSON.stringify(body), headers, signal }, "api"));
}
