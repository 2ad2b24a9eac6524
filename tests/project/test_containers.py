"""The Dockerfile and the compose file: no daemon is needed to see that they name what is there and start what can start."""

from __future__ import annotations

import json
import re
import shlex

import yaml
from dockerfile_parse import DockerfileParser

from pagerunner.cli.serve import build_parser
from project import checks

INSTRUCTIONS = set("FROM ARG RUN WORKDIR COPY USER ENV VOLUME EXPOSE HEALTHCHECK ENTRYPOINT CMD COMMENT".split())
SERVICE_KEYS = {
    "build",
    "command",
    "deploy",
    "environment",
    "image",
    "ports",
    "restart",
    "stop_grace_period",
    "volumes",
}


def instructions(tmp_path):
    copy = tmp_path / "Dockerfile"
    copy.write_bytes((checks.ROOT / "Dockerfile").read_bytes())
    return [(one["instruction"], one["value"]) for one in DockerfileParser(path=str(copy)).structure]


def values(structure, name):
    return [value for instruction, value in structure if instruction == name]


def test_the_dockerfile_is_understood_and_its_last_user_is_not_root(tmp_path):
    structure = instructions(tmp_path)
    assert {instruction for instruction, _ in structure} <= INSTRUCTIONS
    assert structure[next(i for i, one in enumerate(structure) if one[0] != "COMMENT")][0] == "FROM"
    (base,) = values(structure, "FROM")
    assert re.fullmatch(r"python:3\.1[12]-slim-\w+", base), "a fixed Python that the package supports"
    assert values(structure, "USER") == ["pagerunner"]
    assert not any("curl" in run or "ADD" in run for run in values(structure, "RUN"))


def test_what_the_image_copies_exists_and_is_let_through(tmp_path):
    wanted = [word for value in values(instructions(tmp_path), "COPY") for word in shlex.split(value)[:-1]]
    ignored = (checks.ROOT / ".dockerignore").read_text(encoding="utf-8").split()
    assert wanted and all((checks.ROOT / name).exists() for name in wanted)
    assert ignored[0] == "*" and {f"!{name}" for name in wanted} <= set(ignored)


def test_the_images_pins_leave_out_torch_and_triton_only(tmp_path):
    (run,) = [run for run in values(instructions(tmp_path), "RUN") if "pins.txt" in run]
    pattern = re.search(r"--invert-match '([^']+)' constraints.txt", run)[1]
    pins = (checks.ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    assert [line.partition("==")[0] for line in pins if re.search(pattern, line)] == ["torch", "triton"]


def test_the_images_command_is_one_that_serve_takes(tmp_path):
    structure = instructions(tmp_path)
    assert json.loads(values(structure, "ENTRYPOINT")[0]) == ["pagerunner"]
    verb, *words = json.loads(values(structure, "CMD")[0])
    namespace = build_parser().parse(words)
    assert verb == "serve" and namespace.model_tag == "demo"
    check = json.loads(values(structure, "HEALTHCHECK")[0].partition("CMD ")[2])
    compile(check[2], "healthcheck", "exec")
    assert f":{namespace.port}/health" in check[2] and values(structure, "EXPOSE") == [str(namespace.port)]


def test_the_compose_file_starts_a_server_with_a_key_on_this_machine_only():
    document = yaml.safe_load((checks.ROOT / "compose.yaml").read_text(encoding="utf-8"))
    assert set(document) == {"name", "services", "volumes"}
    (service,) = document["services"].values()
    assert set(service) <= SERVICE_KEYS
    verb, *words = [re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", word) for word in service["command"]]
    namespace = build_parser().parse(words)
    assert verb == "serve" and namespace.model_tag == "Qwen/Qwen3-0.6B"
    assert service["ports"] == [f"127.0.0.1:{namespace.port}:{namespace.port}"]
    assert ":?" in service["environment"]["PAGERUNNER_API_KEY"], "it doesn't start without a key"
    assert all(volume.partition(":")[0] in document["volumes"] for volume in service["volumes"])
    (device,) = service["deploy"]["resources"]["reservations"]["devices"]
    assert device == {"driver": "nvidia", "count": 1, "capabilities": ["gpu"]}
    assert int(service["stop_grace_period"].rstrip("s")) >= namespace.shutdown_timeout + 10
