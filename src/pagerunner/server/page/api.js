// Talks to the server. Keys live in this module's memory and nowhere else.

const keys = { api: "", admin: "" };

export function setKeys(api, admin) {
  keys.api = api;
  keys.admin = admin;
}

/** A failed answer, with the server's own sentence. */
export class ApiError extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

async function call(path, options, key) {
  const headers = { ...options.headers };
  if (key) headers.Authorization = `Bearer ${key}`;
  const response = await fetch(path, { ...options, headers, cache: "no-store", credentials: "omit" });
  if (response.ok) return response;
  let message = `${path} answered ${response.status}.`;
  try {
    message = (await response.json()).error.message;
  } catch {
    // not one of the server's own errors: the status has to do
  }
  throw new ApiError(response.status, message);
}

export const get = (path, options = {}) => call(path, options, keys.api);

/** A control endpoint: with the admin key, or with the API key where there is no other. */
export const control = (path) => call(path, { method: "POST" }, keys.admin || keys.api);

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

export const live = async (signal) => events(await get("ui/live", { signal }));

export async function chat(body, signal) {
  const headers = { "Content-Type": "application/json" };
  return events(await call("v1/chat/completions", { method: "POST", body: JSON.stringify(body), headers, signal }, keys.api));
}
