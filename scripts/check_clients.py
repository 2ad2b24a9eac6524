"""Run independent, unmodified clients against a server of the demo model, and check what they print.

    python scripts/check_clients.py [--clients DIR] [--install] [NAME ...]

Each client has a virtual environment of its own under DIR (default: `clients` in the system's temporary directory);
`--install` makes those that are missing. Clients that aren't there are skipped, which is said.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from pagerunner.demo import demo_path
from pagerunner.eval.tasks import make_examples

NAME = "demo"
SECONDS = 300

OPENAI = """
import asyncio, sys, openai
url = sys.argv[1] + "/v1"
client = openai.OpenAI(base_url=url, api_key="none")
question = [{"role": "user", "content": "12 + 30 ="}]
options = {"model": "demo", "messages": question, "temperature": 0, "max_tokens": 20}
print("chat:", client.chat.completions.create(**options).choices[0].message.content)
stream = list(client.chat.completions.create(**options, stream=True, stream_options={"include_usage": True}))
print("stream:", "".join(c.choices[0].delta.content or "" for c in stream if c.choices), stream[-1].usage.total_tokens)
print("responses:", client.responses.create(model="demo", input="12 + 30 =", temperature=0).output_text)
with client.responses.stream(model="demo", input="12 + 30 =", temperature=0) as events:
    print("events:", [event.type for event in events][-1], events.get_final_response().output_text)
print("embeddings:", len(client.embeddings.create(model="demo", input=["a b", "c"]).data[0].embedding))
async def main():
    async with openai.AsyncOpenAI(base_url=url, api_key="none") as client:
        async def one(number):
            options["messages"] = [{"role": "user", "content": f"{number} + 30 ="}]
            return "".join([c.choices[0].delta.content or "" async for c in await client.chat.completions.create(**options, stream=True)])
        return await asyncio.gather(*map(one, range(10, 18)))
print("async:", asyncio.run(main()))
try:
    client.chat.completions.create(**options, extra_body={"best_of": 3})
except openai.BadRequestError as error:
    print("refused:", error.body["message"])
"""

LITELLM = """
import asyncio, os, sys
os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"
import litellm
litellm.suppress_debug_info = True
where = {"model": "hosted_vllm/demo", "api_base": sys.argv[1] + "/v1", "api_key": "none"}
options = {**where, "temperature": 0, "max_tokens": 20}
question = [{"role": "user", "content": "12 + 30 ="}]
first = litellm.completion(messages=question, **options)
print("chat:", first.choices[0].message.content)
talk = [*question, first.choices[0].message, {"role": "user", "content": "12 + 30 ="}]
print("again:", litellm.completion(messages=talk, **options).choices[0].message.content)
try:
    litellm.completion(messages=[{"role": "user", "content": "word " * 9000}], **options)
except litellm.ContextWindowExceededError as error:
    print("too long:", error.message)
chunks = list(litellm.completion(messages=question, stream=True, stream_options={"include_usage": True}, **options))
print("stream:", "".join(c.choices[0].delta.content or "" for c in chunks if c.choices))
async def main():
    return await asyncio.gather(*(litellm.acompletion(messages=question, **options) for _ in range(8)))
print("async:", {answer.choices[0].message.content for answer in asyncio.run(main())})
prompt = "<|bos|><|user|>12 + 30 =<|end|><|assistant|>"
print("text:", litellm.text_completion(prompt=prompt, **options).choices[0].text)
print("embeddings:", len(litellm.embedding(input=["a b", "c"], **where).data[0]["embedding"]))
try:
    litellm.completion(messages=question, best_of=3, **options)
except litellm.BadRequestError as error:
    print("refused:", error.message)
"""

AGENTS = """
import asyncio, sys, agents, openai
from agents import Agent, ModelSettings, Runner, function_tool
agents.set_default_openai_client(openai.AsyncOpenAI(base_url=sys.argv[1] + "/v1", api_key="none"), use_for_tracing=False)
agents.set_tracing_disabled(True)
@function_tool
def add(a: int, b: int) -> str:
    "Add two numbers."
    print("called:", a, b)
    return str(a + b)
settings = ModelSettings(temperature=0, max_tokens=120, tool_choice="required")
agent = Agent(name="sums", instructions="Add.", tools=[add], model="demo", model_settings=settings)
async def main():
    result = await Runner.run(agent, "12 + 30 =")
    print("items:", [item.type for item in result.new_items], repr(result.final_output))
    run = Runner.run_streamed(agent, "12 + 30 =")
    kinds = {event.data.type async for event in run.stream_events() if event.type == "raw_response_event"}
    print("events:", sorted(kinds))
    plain = Agent(name="plain", model="demo", model_settings=ModelSettings(temperature=0))
    print("plain:", (await Runner.run(plain, "12 + 30 =")).final_output)
asyncio.run(main())
"""

ANTHROPIC = """
import sys, anthropic
client = anthropic.Anthropic(base_url=sys.argv[1], api_key="none")
options = {"model": "demo", "max_tokens": 60, "messages": [{"role": "user", "content": "12 + 30 ="}]}
options["extra_body"] = {"temperature": 0}
print("message:", client.messages.create(**options).content[0].text)
with client.messages.stream(**options) as stream:
    print("stream:", "".join(stream.text_stream), stream.get_final_message().stop_reason)
number = {"type": "integer"}
schema = {"type": "object", "properties": {"a": number}, "required": ["a"], "additionalProperties": False}
tools = [{"name": "add", "input_schema": schema}]
answer = client.messages.create(**options, tools=tools, tool_choice={"type": "tool", "name": "add"})
print("tool:", answer.stop_reason, answer.content[0].type, answer.content[0].name)
print("count:", client.messages.count_tokens(model="demo", messages=options["messages"]).input_tokens)
try:
    client.messages.create(**{**options, "model": "nobody"})
except anthropic.NotFoundError as error:
    print("refused:", error.body["error"]["message"])
"""

TASK = """
dataset_path: json
dataset_kwargs: {data_files: {test: %s}}
test_split: test
doc_to_text: "{{prompt}}"
target_delimiter: ""
"""
GENERATE = """
task: demo_generate
output_type: generate_until
doc_to_target: "{{answer}}"
generation_kwargs: {until: ["<|end|>"], max_gen_toks: 48, temperature: 0}
metric_list: [{metric: exact_match}]
"""
CHOOSE = """
task: demo_choose
output_type: multiple_choice
doc_to_choice: "{{choices}}"
doc_to_target: label
metric_list: [{metric: acc}]
"""


class ClientError(Exception):
    """A client failed, or printed something else than it should."""


def run(words: list[str], folder: Path) -> str:
    """What a command prints; raises ClientError when it fails."""
    environ = {**os.environ, "NO_COLOR": "1", "COLUMNS": "200", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        words,
        cwd=folder,
        env=environ,
        capture_output=True,
        text=True,
        timeout=SECONDS,
        stdin=subprocess.DEVNULL,
        check=False,
    )
    if done.returncode:
        raise ClientError(f"exit status {done.returncode}:\n{(done.stdout + done.stderr)[-3000:]}")
    return done.stdout


def expect(text: str, *patterns: str) -> str:
    """The lines of `text` that hold the patterns; each must be there."""
    lines: list[str] = []
    for pattern in patterns:
        found = [line for line in text.splitlines() if re.search(pattern, line)]
        if not found:
            raise ClientError(f"printed nothing like {pattern!r}:\n{text[-3000:]}")
        lines += [line for line in found if line not in lines]
    return "\n".join(lines)


def check_openai(home: Path, url: str, folder: Path) -> str:
    """Chat, streams, responses, embeddings, eight streams at once, and a refusal."""
    text = run([str(home / "bin" / "python"), "-c", OPENAI, url], folder)
    sums = r"async: \['10 \+ 30 = 40', .*'17 \+ 30 = 47'\]"
    return expect(
        text, r"chat: 12 \+ 30 = 42", r"stream: 12 \+ 30 = 42 \d+", r"responses: 12 \+ 30 = 42",
        r"events: response.completed 12 \+ 30 = 42", "embeddings: 192", sums, "refused: .*best_of",
    )  # fmt: skip


def check_litellm(home: Path, url: str, folder: Path) -> str:
    """The same through litellm's hosted_vllm provider."""
    text = run([str(home / "bin" / "python"), "-c", LITELLM, url], folder)
    patterns = [rf"{kind}: .*12 \+ 30 = 42" for kind in ("chat", "stream", "async", "text")]
    return expect(text, *patterns, "again: .+", "too long: .*context", "embeddings: 192", "refused: .*best_of")


def check_agents(home: Path, url: str, folder: Path) -> str:
    """openai-agents over its default API, /v1/responses, with a tool that must be called, streamed and not."""
    text = run([str(home / "bin" / "python"), "-c", AGENTS, url], folder)
    return expect(
        text, r"called: \d+ \d+", r"items: .*tool_call_item.*tool_call_output_item.*message_output_item",
        r"events: .*response.function_call_arguments.delta", r"plain: 12 \+ 30 = 42",
    )  # fmt: skip


def check_anthropic(home: Path, url: str, folder: Path) -> str:
    """Messages, a stream, a forced tool, a count and a refusal."""
    text = run([str(home / "bin" / "python"), "-c", ANTHROPIC, url], folder)
    return expect(
        text, r"message: 12 \+ 30 = 42", r"stream: 12 \+ 30 = 42 end_turn", r"tool: .* tool_use add", r"count: \d+",
        "refused: .*does not exist",
    )  # fmt: skip


def check_lm_eval(home: Path, url: str, folder: Path) -> str:
    """local-completions with the server's tokenizer: generation, and choices by the prompt's log-probabilities."""
    generator = random.Random(0)
    with (folder / "demo.jsonl").open("w", encoding="utf-8") as file:
        for example in make_examples("addition", 32, 0):
            head, _, number = example.answer.rpartition(" ")
            choices = [example.answer, *(f"{head} {int(number) + offset}" for offset in (1, -10, 100))]
            generator.shuffle(choices)
            row = {"prompt": example.prompt, "answer": example.answer, "choices": choices}
            file.write(json.dumps({**row, "label": choices.index(example.answer)}) + "\n")
    for name, task in (("generate", GENERATE), ("choose", CHOOSE)):
        (folder / f"{name}.yaml").write_text(TASK % (folder / "demo.jsonl") + task, encoding="utf-8")
    arguments = f"model={NAME},base_url={url}/v1/completions,num_concurrent=4"
    words = [
        str(home / "bin" / "lm_eval"),
        "--model",
        "local-completions",
        "--model_args",
        arguments,
        "--batch_size",
        "8",
    ]
    text = run([*words, "--include_path", str(folder), "--tasks", "demo_generate,demo_choose"], folder)
    return expect(text, r"demo_choose .*acc .*\|\s+1(\.0+)?\|", r"demo_generate.*exact_match.*\|\s+1(\.0+)?\|")


def check_guidellm(home: Path, url: str, folder: Path) -> str:
    """Sixteen streams, four at a time, with usage in every chunk."""
    report = folder / "report.json"
    words = [str(home / "bin" / "guidellm"), "run", "--backend", f"kind=openai_http,target={url},model={NAME}"]
    words += ["--profile", "kind=concurrent,streams=4", "--constraint", "kind=max_requests,count=16"]
    words += ["--tokenizer", f"kind=huggingface_auto,model={demo_path()}", "--disable-progress"]
    words += ["--data", "kind=synthetic_text,prompt_tokens=64,output_tokens=16", "--output", f"kind=json,path={report}"]
    text = run(words, folder)
    [benchmark] = json.loads(report.read_text(encoding="utf-8"))["benchmarks"]
    totals = benchmark["metrics"]["request_totals"]
    if totals["successful"] < 16 or totals["errored"]:
        raise ClientError(f"requests: {totals}")
    return f"requests: {totals}\n" + expect(text, r"^\| concurrent@4")


def check_aiperf(home: Path, url: str, folder: Path) -> str:
    """Chat streams and embeddings; aiperf resets the prefix cache before and reads /metrics meanwhile."""
    shown: list[str] = []
    for kind, options in (
        ("chat", ["--streaming", "--output-tokens-mean", "16", "--reset-kv-cache"]),
        ("embeddings", []),
    ):
        words = [
            str(home / "bin" / "aiperf"),
            "profile",
            "--model",
            NAME,
            "--url",
            url,
            "--endpoint-type",
            kind,
            *options,
        ]
        words += ["--tokenizer", str(demo_path()), "--request-count", "24", "--concurrency", "6", "--ui", "none"]
        text = run([*words, "--synthetic-input-tokens-mean", "64", "--artifact-dir", str(folder / kind)], folder)
        shown.append(f"{kind}:\n" + expect(text, r"Request Error Rate.* 0\.00", r"Request Count .* 24\.00"))
    metrics = (folder / "chat" / "server_metrics_export.json").read_text(encoding="utf-8")
    wanted = ("vllm:kv_cache_usage_perc", "vllm:num_requests_waiting", "vllm:time_to_first_token_seconds")
    if missing := [name for name in wanted if name not in metrics]:
        raise ClientError(f"found no {missing[0]} at /metrics")
    return "\n".join([*shown, f"server metrics: {', '.join(wanted)}"])


CLIENTS: dict[str, tuple[list[str], Callable[[Path, str, Path], str]]] = {
    "openai": (["openai"], check_openai),
    "litellm": (["litellm"], check_litellm),
    "openai-agents": (["openai-agents"], check_agents),
    "anthropic": (["anthropic"], check_anthropic),
    "lm-eval": (["lm_eval[api]"], check_lm_eval),
    "guidellm": (["torch==2.13.0", "guidellm"], check_guidellm),
    "aiperf": (["aiperf"], check_aiperf),
}


@contextmanager
def demo_server(folder: Path) -> Iterator[str]:
    """The URL of a server of the demo model on a free loopback port."""
    words = [sys.executable, "-m", "pagerunner", "serve", "--port", "0", "--served-model-name", NAME, "--quiet"]
    words += ["--enable-auto-tool-choice", "--tool-call-parser", "hermes"]
    words += ["--num-gpu-blocks-override", "2048", "--pooler-config", '{"pooling_type": "MEAN"}']
    log = (folder / "server.log").open("w", encoding="utf-8")
    with log, subprocess.Popen(words, stdout=subprocess.PIPE, stderr=log, text=True) as process:
        assert process.stdout is not None
        try:
            line = process.stdout.readline()
            if "serves at" not in line:
                raise SystemExit(f"the server did not start:\n{(folder / 'server.log').read_text(encoding='utf-8')}")
            yield line.split()[-1]
        finally:
            process.terminate()


def installed(home: Path, requirements: list[str], install: bool) -> bool:
    """Whether the client is there, after installing it if asked to."""
    if not home.is_dir() and install:
        subprocess.run([sys.executable, "-m", "venv", str(home)], check=True)
        subprocess.run([str(home / "bin" / "pip"), "install", "--quiet", *requirements], check=True)
    return home.is_dir()


def version(home: Path, name: str) -> str:
    """The installed version."""
    code = "import importlib.metadata as m, sys; print(m.version(sys.argv[1]))"
    return subprocess.run(
        [home / "bin" / "python", "-c", code, name], capture_output=True, text=True, check=True
    ).stdout.strip()


def main() -> int:
    """Run the clients; the exit status is the number that failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(CLIENTS)} (default: all)")
    parser.add_argument("--clients", type=Path, default=Path(tempfile.gettempdir()) / "clients", metavar="DIR")
    parser.add_argument("--install", action="store_true", help="install what is missing")
    options = parser.parse_args()
    failed = 0
    with tempfile.TemporaryDirectory() as scratch, demo_server(Path(scratch)) as url:
        for name in options.names or CLIENTS:
            requirements, check = CLIENTS[name]
            home = options.clients / name
            if not installed(home, requirements, options.install):
                print(f"== {name}: skipped, there is no {home} (--install makes it)", flush=True)
                continue
            folder = Path(scratch) / name
            folder.mkdir()
            try:
                print(f"== {name} {version(home, name)}\n{check(home, url, folder)}", flush=True)
            except (ClientError, subprocess.TimeoutExpired) as error:
                failed += 1
                print(f"== {name} FAILED: {error}", flush=True)
    return failed


if __name__ == "__main__":
    sys.exit(main())
