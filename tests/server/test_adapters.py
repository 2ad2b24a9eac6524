"""Adapters over HTTP: named as models, loaded and forgotten while the server runs."""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from helpers.adapters import merged_checkpoint, random_adapter
from helpers.checkpoints import make_checkpoint
from helpers.serving import MODEL, RunningServer, running_server
from pagerunner import LLM, ConfigError, LoRARequest, SamplingParams
from pagerunner.config import EngineArgs
from pagerunner.engine.core.client import DEFAULT_FACTORY
from pagerunner.server.launch import check_modules
from pagerunner.types.lora import parse_module

pytestmark = pytest.mark.usefixtures("forked")

PROMPT = list(range(20, 60))
OPTIONS: dict[str, Any] = {"max_model_len": 256, "num_gpu_blocks_override": 64, "dtype": "float32"}
ADMIN = {"headers": {"Authorization": "Bearer secret"}}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("models"), "qwen3", vocab_size=400)


@pytest.fixture(scope="module")
def paths(base: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("adapters")
    found = [random_adapter(base, folder / f"a{n}", rank=(4, 16, 3)[n], seed=n) for n in range(3)]
    for path in found:  # as PEFT says where the base was; it is no name of this server
        config = json.loads((path / "adapter_config.json").read_text()) | {"base_model_name_or_path": "/trainer/base"}
        (path / "adapter_config.json").write_text(json.dumps(config))
    return found


@pytest.fixture(scope="module")
def expected(base: Path, paths: list[Path], tmp_path_factory: pytest.TempPathFactory) -> list[list[int]]:
    """Tokens of the models with merged weights."""
    found = []
    for path in paths:
        merged = merged_checkpoint(base, path, tmp_path_factory.mktemp("merged"))
        params = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
        [output] = LLM(str(merged), use_tqdm=False, **OPTIONS).generate([PROMPT], params, False)
        found.append(output.outputs[0].token_ids)
    return found


@pytest.fixture(scope="module")
def server(base: Path, paths: list[Path]) -> Iterator[RunningServer]:
    args = EngineArgs(model=str(base), enable_lora=True, max_loras=2, **OPTIONS)
    modules = [LoRARequest("first", 1, str(paths[0]), "a-base")]
    with running_server(args, core_factory=DEFAULT_FACTORY, lora_modules=modules, admin_keys=["secret"]) as server:
        yield server


def tokens(server: RunningServer, model: str, **options: Any) -> list[int]:
    answer = server.openai().completions.create(
        model=model,
        prompt=PROMPT,
        max_tokens=16,
        temperature=0,
        extra_body={"ignore_eos": True, "return_token_ids": True},
        **options,
    )
    assert answer.model == model
    return list(answer.choices[0].model_dump()["token_ids"])


def load(server: RunningServer, name: str, path: Path, **more: Any) -> Any:
    return server.post("/v1/load_lora_adapter", {"lora_name": name, "lora_path": str(path), **more}, **ADMIN)


def test_models_are_adapters_too(server: RunningServer, paths: list[Path], expected: list[list[int]]) -> None:
    cards = {card["id"]: card for card in server.get("/v1/models").json()["data"]}
    assert cards[MODEL]["parent"] is None
    assert (cards["first"]["parent"], cards["first"]["root"]) == ("a-base", str(paths[0]))
    assert server.get("/v1/models/first").json() == cards["first"]
    assert tokens(server, "first") == expected[0] != tokens(server, MODEL)
    chat = server.openai().chat.completions.create(
        model="first", messages=[{"role": "user", "content": "Hi"}], max_tokens=2, temperature=0
    )
    assert chat.model == "first"


def test_the_memory_for_adapters_is_shown(server: RunningServer, expected: list[list[int]]) -> None:
    for _ in range(2):
        assert tokens(server, "first") == expected[0]
    answer = server.get("/memory", **ADMIN).json()
    state, plan = answer["state"]["adapters"], answer["plan"]
    [first] = [one for one in state["there"] if one["names"] == ["first"]]
    page_bytes = plan["groups"][0]["page_bytes"]
    assert 0 < first["num_bytes"] <= page_bytes * plan["adapter_pages"] and first["num_bytes"] % page_bytes == 0
    kept = {"name": "adapters that are kept", "bytes": plan["adapter_copies"]}
    assert kept in plan["other"] and plan["adapter_copies"] > first["num_bytes"], "this one's rank isn't the highest"
    assert (first["slot"], first["requests"], first["used"], first["arriving"]) == (0, 0, False, False)
    assert len(first["digest"]) == 32 and state["max_loras"] == 2
    assert sum(one["num_bytes"] for one in state["there"]) == state["num_bytes"] and not state["used_bytes"]
    cached = sum(count for _, count in answer["state"]["groups"][0]["cached"])
    assert first["num_bytes"] <= cached * page_bytes, "an adapter that nobody uses is cache"
    metrics = {
        line.split("{")[0]: float(line.rpartition(" ")[2])
        for line in server.get("/metrics").text.splitlines()
        if "pagerunner:lora_" in line and line[0] != "#"
    }
    assert metrics["pagerunner:lora_bytes"] == state["num_bytes"] and not metrics["pagerunner:lora_used_bytes"]
    assert (
        metrics["pagerunner:lora_hits_total"] >= 1 and metrics["pagerunner:lora_fill_bytes_total"] >= first["num_bytes"]
    )


def test_loading_and_unloading(server: RunningServer, paths: list[Path], expected: list[list[int]]) -> None:
    answer = load(server, "second", paths[1])
    assert answer.status_code == 200 and answer.text == "Success: LoRA adapter 'second' added successfully."
    assert tokens(server, "second") == expected[1]
    assert server.get("/v1/models/second").json()["parent"] == MODEL
    taken = load(server, "second", paths[2])
    assert taken.status_code == 400 and "load_inplace" in taken.json()["error"]["message"]
    assert load(server, "second", paths[2], load_inplace=True).status_code == 200
    assert tokens(server, "second") == expected[2]
    gone = server.post("/v1/unload_lora_adapter", {"lora_name": "second"}, **ADMIN)
    assert gone.status_code == 200 and "removed successfully" in gone.text
    assert server.post("/v1/unload_lora_adapter", {"lora_name": "second"}, **ADMIN).status_code == 404
    with pytest.raises(openai.NotFoundError, match="first"):
        tokens(server, "second")


@pytest.mark.parametrize(
    ("body", "status", "said"),
    [
        ({"lora_name": "x"}, 400, "lora_path"),
        ({"lora_name": "x", "lora_path": "/nowhere"}, 404, "no directory"),
        ({"lora_name": "x", "lora_path": "/" + "a" * 300}, 404, "can't be read: File name too long"),
        ({"lora_name": "x", "lora_path": "/a" * 3000}, 404, "can't be read: File name too long"),
        ({"lora_name": "x", "lora_path": "/a\0b"}, 404, "lora_path"),
        ({"lora_name": "x", "lora_path": "/etc/passwd"}, 404, "is no directory"),
        ({"lora_name": "x", "lora_path": ""}, 400, "lora_path must be"),
        ({"lora_name": "x", "lora_path": "/"}, 400, "adapter_config.json"),
        ({"lora_name": MODEL, "lora_path": "/"}, 400, "own name"),
        ({"lora_name": "", "lora_path": "/"}, 400, "1 to 256"),
        ({"lora_name": "a,b", "lora_path": "/"}, 400, "without a comma"),
        ({"lora_name": "a\nb", "lora_path": "/"}, 400, "printable"),
        ({"lora_name": "x", "lora_path": "/", "is_3d_lora_weight": "yes"}, 400, "is_3d_lora_weight"),
    ],
)
def test_what_cannot_be_loaded(server: RunningServer, body: dict[str, Any], status: int, said: str) -> None:
    answer = server.post("/v1/load_lora_adapter", body, **ADMIN)
    assert answer.status_code == status and said in answer.json()["error"]["message"]
    assert server.get("/health").status_code == 200


@pytest.mark.parametrize(
    "change",
    [{"\ud800x": 1}, {"x" * 9_999: 1}],
)
def test_no_text_of_a_file_breaks_the_messages(
    server: RunningServer, paths: list[Path], tmp_path: Path, change: dict[str, Any]
) -> None:
    """Half a character can't be sent."""
    path = shutil.copytree(paths[0], tmp_path / "a")
    config = json.loads((path / "adapter_config.json").read_text()) | change
    (path / "adapter_config.json").write_text(json.dumps(config))
    answer = load(server, "hostile", path)
    assert answer.status_code == 400 and "adapter_config.json" in answer.json()["error"]["message"]
    assert len(answer.content) < 3_000
    assert load(server, "hostile", paths[1]).status_code == 200, "the name is free"
    assert server.post("/v1/unload_lora_adapter", {"lora_name": "hostile"}, **ADMIN).status_code == 200


def test_what_runs_goes_on_when_its_name_is_unloaded_and_taken(
    server: RunningServer, paths: list[Path], expected: list[list[int]]
) -> None:
    assert load(server, "changing", paths[0]).status_code == 200
    stream = server.openai().completions.create(
        model="changing", prompt=PROMPT, max_tokens=16, temperature=0, stream=True,
        extra_body={"ignore_eos": True, "return_token_ids": True},
    )  # fmt: skip
    chunks = iter(stream)
    got = [next(chunks)]
    assert server.post("/v1/unload_lora_adapter", {"lora_name": "changing"}, **ADMIN).status_code == 200
    assert load(server, "changing", paths[1]).status_code == 200
    assert tokens(server, "changing") == expected[1]
    got += list(chunks)
    assert [one for chunk in got for one in chunk.choices[0].model_dump().get("token_ids") or []] == expected[0]


def test_the_routes_ask_for_the_admin_key(server: RunningServer, paths: list[Path]) -> None:
    for path in ("/v1/load_lora_adapter", "/v1/unload_lora_adapter"):
        assert server.post(path, {"lora_name": "x", "lora_path": str(paths[0])}).status_code in (401, 403)


def test_metrics_name_running_adapters(server: RunningServer) -> None:
    seen: set[str] = set()
    ended = threading.Event()

    def generate() -> None:
        tokens(server, "first")
        for _ in server.openai().completions.create(
            model="first", prompt=PROMPT, max_tokens=200, stream=True, extra_body={"ignore_eos": True}
        ):
            pass
        ended.set()

    thread = threading.Thread(target=generate)
    thread.start()
    while not ended.is_set():
        lines = [
            line for line in server.get("/metrics").text.splitlines() if line.startswith("vllm:lora_requests_info{")
        ]
        assert len(lines) == 1, "earlier ones are forgotten"
        seen.add(lines[0].rsplit(" ", 1)[0])
    thread.join()
    assert any('running_lora_adapters="first"' in line and 'max_lora="2"' in line for line in seen)


def test_modules_of_the_command_line(base: Path) -> None:
    assert parse_module("sql=/a=b") == LoRARequest("sql") and parse_module("sql=/a=b").lora_path == "/a=b"
    said = {"name": "sql", "path": "/a", "base_model_name": "b", "is_3d_lora_weight": True}
    module = parse_module(json.dumps(said))
    assert (module.lora_name, module.lora_path, module.base_model_name) == ("sql", "/a", "b")
    assert module.is_3d_lora_weight
    for text, said in (("sql", "name=path"), ('{"name": "sql"}', "path"), ('{"name": "a", "path": "/", "x": 1}', "x")):
        with pytest.raises(ConfigError, match=said):
            parse_module(text)
    plain, args = EngineArgs(model=str(base)), EngineArgs(model=str(base), enable_lora=True)
    one = LoRARequest("sql", 1, "/a")
    check_modules(args, {"lora_modules": [one]})
    for engine, options, said in (
        (plain, [one], "--enable-lora"),
        (args, [one, one], "twice"),
        (args, [LoRARequest(str(base), 1, "/a")], "twice"),
    ):
        with pytest.raises(ConfigError, match=said):
            check_modules(engine, {"lora_modules": options})


def test_two_engines_have_one_content_under_a_name(
    base: Path, paths: list[Path], expected: list[list[int]], tmp_path: Path
) -> None:
    """Loaded, not loaded as the files are damaged, changed in place, and unloaded, with two engines' processes."""
    args = EngineArgs(model=str(base), enable_lora=True, data_parallel_size=2, **OPTIONS)
    with running_server(args, core_factory=DEFAULT_FACTORY, admin_keys=["secret"]) as two:

        def both(name: str) -> list[list[int]]:
            return [tokens(two, name, extra_headers={"X-data-parallel-rank": str(rank)}) for rank in range(2)]

        assert load(two, "a", paths[0]).status_code == 200
        assert both("a") == [expected[0]] * 2
        damaged = shutil.copytree(paths[1], tmp_path / "damaged")
        (damaged / "adapter_model.safetensors").write_bytes(b"8")
        assert load(two, "a", damaged, load_inplace=True).status_code == 400
        assert both("a") == [expected[0]] * 2
        assert load(two, "a", paths[1], load_inplace=True).status_code == 200
        assert both("a") == [expected[1]] * 2
        assert two.post("/v1/unload_lora_adapter", {"lora_name": "a"}, **ADMIN).status_code == 200
        for rank in range(2):
            with pytest.raises(openai.NotFoundError):
                tokens(two, "a", extra_headers={"X-data-parallel-rank": str(rank)})
        assert [card["id"] for card in two.get("/v1/models").json()["data"]] == [MODEL]
