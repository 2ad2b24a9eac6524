"""Models by name: the real huggingface_hub client, in a process of its own, against a stand-in of the hub on loopback."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from helpers.checkpoints import make_checkpoint
from helpers.hub import COMMIT, Hub, files_of, serving
from helpers.patience import LONG
from helpers.programs import run_python
from pagerunner.cli.main import main
from pagerunner.config import EngineArgs
from pagerunner.demo import demo_path
from pagerunner.engine.startup.hub import fetch_checkpoint, is_hub_name
from pagerunner.errors import CheckpointError, ConfigError

ROOT = Path(__file__).parents[2]
JUNK = {
    "pytorch_model.bin": b"p",
    "modeling.py": b"p",
    "original/model.safetensors": b"x",
    "consolidated.safetensors": b"x",
}
FETCH = """
import json, sys
from pagerunner.config import EngineArgs
from pagerunner.engine.startup.hub import fetch_checkpoint
from pagerunner.errors import PagerunnerError
for options in json.loads(sys.argv[1]):
    try:
        args = fetch_checkpoint(EngineArgs(**options), show_progress=False)
        found = {"model": args.model, "tokenizer": args.tokenizer, "name": args.served_model_name}
        print(json.dumps(found | ({"drafter": args.speculative_config} if args.speculative_config else {})))
    except PagerunnerError as error:
        print(json.dumps({"error": str(error)}))
"""


@dataclass
class Client:
    """A program that uses names on the hub, with a cache of its own."""

    hub: Hub
    home: Path

    def python(self, code: str, *words: str, **environ: str) -> subprocess.CompletedProcess[str]:
        env = {
            **{name: value for name, value in os.environ.items() if not name.startswith("HF_")},
            "HF_ENDPOINT": self.hub.url,
            "HF_HOME": str(self.home),
            "HF_HUB_DISABLE_XET": "1",
            "HF_HUB_DISABLE_TELEMETRY": "1",
            **environ,
        }
        return run_python(code, words, env)

    def fetch(self, environ: dict[str, str] | None = None, **args: Any) -> dict[str, Any]:
        return self.fetch_each([args], environ)[0]

    def fetch_each(self, several: list[dict[str, Any]], environ: dict[str, str] | None = None) -> list[dict[str, Any]]:
        """What one program finds, or is told, for each of the arguments."""
        done = self.python(FETCH, json.dumps([{"model": "org/tiny", **args} for args in several]), **(environ or {}))
        assert done.returncode == 0, done.stderr
        return [json.loads(line) for line in done.stdout.splitlines()[-len(several) :]]

    def verb(self, *words: str, **environ: str) -> subprocess.CompletedProcess[str]:
        code = "import sys; from pagerunner.cli.main import main; sys.exit(main(sys.argv[1:]))"
        return self.python(code, *words, **environ)


@pytest.fixture
def client(tmp_path: Path) -> Iterator[Client]:
    with serving(Hub({"org/tiny": files_of(demo_path()) | JUNK})) as hub:
        yield Client(hub, tmp_path / "home")


def sharded(tmp_path: Path) -> dict[str, bytes]:
    made = make_checkpoint(tmp_path, "llama", shards=3)
    files = files_of(made)
    # as some makers name their shards
    renamed = {name: name.replace("model-", "model.safetensors-") for name in files if name.startswith("model-")}
    index = files["model.safetensors.index.json"].decode()
    for old, new in renamed.items():
        files[new] = files.pop(old)
        index = index.replace(old, new)
    return {**files, "model.safetensors.index.json": index.encode()}


def test_config_tokenizer_and_safetensors_come_and_nothing_else(client: Client) -> None:
    found = client.fetch()
    assert found["name"] == "org/tiny"
    assert Path(found["model"]).name == COMMIT
    assert client.hub.downloaded() == sorted(set(files_of(demo_path())) - {"README.md"})


def test_the_second_start_and_one_without_network_take_the_cache(client: Client) -> None:
    first = client.fetch()
    client.hub.requests.clear()
    assert client.fetch() == first
    assert client.hub.downloaded() == []
    client.hub.requests.clear()
    assert client.fetch({"HF_HUB_OFFLINE": "1"}) == first
    assert client.hub.requests == []
    client.hub.status = 503
    assert client.fetch() == first


def test_shards_are_those_that_the_index_of_the_same_commit_names(client: Client, tmp_path: Path) -> None:
    client.hub.repositories["org/tiny"] = sharded(tmp_path) | JUNK | {"model-of-somebody-else.safetensors": b"x"}
    directory = Path(client.fetch(revision="v1")["model"])
    names = [name for name in client.hub.downloaded() if name.endswith(".safetensors")]
    assert len(names) == 3 and all(name.startswith("model.safetensors-0000") for name in names)
    assert all((directory / name).is_file() for name in names)
    asked = [path for _, path, _ in client.hub.requests if "/resolve/" in path]
    assert all(f"/resolve/{COMMIT}/" in path for path in asked)


def test_a_drafter_comes_as_a_model_does(client: Client, tmp_path: Path) -> None:
    client.hub.repositories["org/Tiny-eagle3"] = sharded(tmp_path) | JUNK
    wish = {"model": "org/Tiny-eagle3", "num_speculative_tokens": 2}
    client.hub.repositories["org/pickled"] = {"config.json": b"{}", "pytorch_model.bin": b"p"}
    wishes: list[Any] = [
        wish,
        {**wish, "revision": "v1"},
        {"model": "demo"},
        {"model": "org/pickled"},
        {"model": str(tmp_path), "revision": "v1"},
    ]
    one, two, demo, pickled, local = client.fetch_each([{"speculative_config": each} for each in wishes])
    directory = Path(one["drafter"]["model"])
    assert (
        "eagle3" in str(directory)
        and (directory / "model.safetensors-00001-of-00003.safetensors").is_file()
        and two == one
    )
    assert not (directory / "tokenizer.json").exists() and one["drafter"]["num_speculative_tokens"] == 2
    assert demo["drafter"]["model"] == str(demo_path())
    assert "org/pickled on the hub has no model.safetensors. Only safetensors are read" in pickled["error"]
    assert "revision='v1' is of a repository on the hub" in local["error"]


def test_a_drafter_that_names_its_model_stands_for_both(client: Client, tmp_path: Path) -> None:
    config = {"speculators_model_type": "eagle3", "speculators_config": {"verifier": {"name_or_path": "org/tiny"}}}
    client.hub.repositories["org/speculator"] = {"config.json": json.dumps(config).encode(), "model.safetensors": b"x"}
    local, nameless = tmp_path / "local", tmp_path / "nameless"
    for directory, said in ((local, config), (nameless, config | {"speculators_config": {}})):
        directory.mkdir()
        (directory / "config.json").write_text(json.dumps(said))
    named: list[Any] = [{"model": "org/speculator"}, {"model": str(local)}, {"model": str(nameless)}]
    again = {"model": str(local), "speculative_config": {"method": "ngram"}}
    one, two, unnamed, twice = client.fetch_each([*named, again])
    assert one["name"] == "org/speculator" and two["name"] == str(local)
    assert one["model"] == two["model"] and (Path(one["model"]) / "tokenizer.json").is_file()
    assert (Path(one["drafter"]["model"]) / "model.safetensors").is_file() and one["drafter"]["method"] == "eagle3"
    assert two["drafter"]["model"] == str(local)
    assert "doesn't say for which model" in unnamed["error"] and "name org/tiny as the model" in twice["error"]


def test_dummy_weights_are_not_fetched(client: Client) -> None:
    client.fetch(load_format="dummy")
    assert not any(name.endswith(".safetensors") for name in client.hub.downloaded())


def test_a_connection_that_breaks_off_goes_on_where_it_was(client: Client) -> None:
    whole = 24_000_000  # the client writes pieces of 10 MiB
    client.hub.repositories["org/tiny"]["model.safetensors"] = bytes(whole)
    client.hub.cut["model.safetensors"] = whole // 2
    directory = Path(client.fetch()["model"])
    assert (directory / "model.safetensors").stat().st_size == whole
    ranges = {key: value for _, _, headers in client.hub.requests for key, value in headers.items()}
    assert ranges["Range"] == f"bytes={10 * 2**20}-"


def test_a_download_that_failed_keeps_the_files_that_arrived(client: Client) -> None:
    client.hub.cut["model.safetensors"] = 1_000
    client.hub.dies = True
    said = client.fetch()["error"]
    assert "org/tiny" in said and "the next start keeps the files that arrived" in said
    client.hub.status = 0
    client.hub.requests.clear()
    assert "model" in client.fetch()
    assert client.hub.downloaded() == ["model.safetensors"]


def test_an_interrupt_does_not_wait_for_a_file_of_gigabytes(client: Client) -> None:
    client.hub.repositories["org/tiny"]["model.safetensors"] = bytes(20 * 2**20)
    client.hub.seconds = 300.0
    small = "import huggingface_hub.constants as its\nits.DOWNLOAD_CHUNK_SIZE = 2**16\n"  # else a piece takes minutes
    env = {**os.environ, "HF_ENDPOINT": client.hub.url, "HF_HOME": str(client.home), "HF_HUB_DISABLE_XET": "1"}
    words = [sys.executable, "-c", small + FETCH, '[{"model": "org/tiny"}]']
    with subprocess.Popen(words, env={**env, "PYTHONPATH": str(ROOT / "src")}, stderr=subprocess.DEVNULL) as program:
        while "model.safetensors" not in client.hub.downloaded():
            assert program.poll() is None
            time.sleep(0.05)
        time.sleep(0.5)
        begin = time.monotonic()
        program.send_signal(signal.SIGINT)
        assert program.wait(LONG) != 0 and time.monotonic() - begin < LONG


def test_gated_and_private_models_ask_for_a_token(client: Client) -> None:
    client.hub.gated.add("org/tiny")
    said = client.fetch()["error"]
    assert "org/tiny is gated" in said and f"{client.hub.url}/org/tiny" in said and "HF_TOKEN" in said
    assert "model" in client.fetch({"HF_TOKEN": "hf_right"})
    client.hub.private.add("org/tiny")
    said = client.fetch({"HF_TOKEN": "hf_wrong"}, revision="v1")["error"]
    assert "shows no model of this name" in said and "the token in use can't see it" in said


MISSING: list[tuple[dict[str, Any], list[str]]] = [
    (
        {"model": "org/tinny"},
        ["no directory org/tinny here", "shows no model of this name", "HF_TOKEN must be set"],
    ),
    ({"revision": "v9"}, ["has no revision 'v9'"]),
    ({"model": "org/pickled"}, ["org/pickled", "no model.safetensors", "never pickles"]),
    ({"model": "org/empty"}, ["org/empty", "no config.json"]),
    ({"model": "org/escaping"}, ["org/escaping", "weight_map", "plain file names"]),
    ({"tokenizer_revision": "v1"}, ["tokenizer_revision needs tokenizer"]),
]


def test_what_is_not_there_is_one_sentence(client: Client) -> None:
    index = {"weight_map": {"a": "../../../etc/passwd"}}
    client.hub.repositories |= {
        "org/pickled": {"config.json": b"{}", "pytorch_model.bin": b"p"},
        "org/empty": {"README.md": b"hello"},
        "org/escaping": {"config.json": b"{}", "model.safetensors.index.json": json.dumps(index).encode()},
    }
    found = client.fetch_each([args for args, _ in MISSING])
    assert len(found) == len(MISSING)
    for said, (_, words) in zip(found, MISSING, strict=True):
        assert all(word in said["error"] for word in words), said


def test_without_network_or_cache(client: Client) -> None:
    said = client.fetch({"HF_HUB_OFFLINE": "1"})["error"]
    assert "org/tiny is not complete in the cache" in said and "HF_HUB_OFFLINE is set" in said
    said = client.fetch({"HF_ENDPOINT": "http://127.0.0.1:9"})["error"]
    assert "The hub at http://127.0.0.1:9 can't be reached" in said
    client.hub.status = 500
    said = client.fetch()["error"]
    assert "org/tiny" in said and client.hub.url in said


def test_the_cache_may_be_elsewhere(client: Client, tmp_path: Path) -> None:
    found = client.fetch(download_dir=str(tmp_path / "there"))
    assert found["model"].startswith(str(tmp_path / "there"))


def test_a_tokenizer_may_have_a_name_of_its_own(client: Client) -> None:
    client.hub.repositories["org/words"] = client.hub.repositories["org/tiny"]
    found = client.fetch(tokenizer="org/words")
    assert "models--org--words" in found["tokenizer"] and (Path(found["tokenizer"]) / "tokenizer.json").is_file()
    assert not (Path(found["tokenizer"]) / "model.safetensors").exists()


def test_what_older_tools_say_of_quantisation_beside_the_config_is_fetched_and_planned(client: Client) -> None:
    said = {"producer": {"name": "modelopt", "version": "0.23.0"}, "quantization": {"quant_algo": "FP8"}}
    client.hub.repositories["org/tiny"]["hf_quant_config.json"] = json.dumps(said).encode()
    done = client.verb("plan", "org/tiny", "--memory", "1GiB", "--json")
    assert done.returncode == 0, done.stderr
    plan = json.loads(done.stdout)
    assert plan["quantization"]["quant_algo"] == "FP8" and plan["other"][0]["name"] == "weights (modelopt, as stored)"
    assert client.hub.downloaded() == ["config.json", "hf_quant_config.json"]
    assert "hf_quant_config.json" in {file.name for file in Path(client.fetch(load_format="dummy")["model"]).iterdir()}


def test_plan_fetches_the_config_alone(client: Client) -> None:
    done = client.verb("plan", "org/tiny", "--memory", "1GiB", "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["device"] == "cuda"
    assert client.hub.downloaded() == ["config.json"]
    done = client.verb("plan", "org/tinny", "--memory", "1GiB")
    assert done.returncode == 2 and "shows no model of this name" in done.stderr


def test_generate_runs_a_model_by_its_name(client: Client, capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--max-tokens", "4", "--kv-cache-memory-bytes", "16MiB", "--json")
    done = client.verb("generate", "--model", "org/tiny", *words, "12 + 30 =")
    assert done.returncode == 0, done.stderr
    assert main(["generate", "--model", str(demo_path()), *words, "12 + 30 ="]) == 0
    assert json.loads(done.stdout) == json.loads(capsys.readouterr().out)
    assert "looking on the Hugging Face Hub" in done.stderr


def test_a_full_disk_is_said() -> None:
    import errno

    from pagerunner.engine.startup.hub import _said

    with pytest.raises(CheckpointError, match="The disk of the cache /there is full; org/tiny needs more room"):  # noqa: SIM117
        with _said("org/tiny", None, "/there"):
            raise OSError(errno.ENOSPC, "No space left on device")


def test_places_come_before_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert is_hub_name("org/tiny")
    (tmp_path / "org" / "tiny").mkdir(parents=True)
    assert not is_hub_name("org/tiny")
    args = EngineArgs(model="org/tiny")
    assert fetch_checkpoint(args) is args
    for place in ("./org/other", "/org/other", "~/other", "a/b/c", "other", "org/config.json"):
        assert not is_hub_name(place), place
    with pytest.raises(CheckpointError, match="not a name on the hub"):
        fetch_checkpoint(EngineArgs(model="./nowhere", revision="v1"))
    with pytest.raises(ConfigError, match="tokenizer_revision"):
        fetch_checkpoint(EngineArgs(model="org/tiny", tokenizer_revision="v1"))


def test_importing_the_package_opens_no_socket_and_reads_no_hub() -> None:
    code = "import sys, pagerunner, pagerunner.engine.startup.hub; assert 'huggingface_hub' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, env={**os.environ, "PYTHONPATH": str(ROOT / "src")})
