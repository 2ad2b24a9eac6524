"""`pagerunner plan` of published configurations: for another machine's GPU, with sentences that can help."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import tempfile
import types
from pathlib import Path
from typing import Any

import pytest
import torch

from helpers.effort import share_of_the_day
from helpers.published import all_published
from pagerunner.cli import plan
from pagerunner.cli.main import main
from pagerunner.demo import demo_path
from pagerunner.engine.startup import cluster
from pagerunner.engine.startup import resolve as resolving
from pagerunner.engine.startup.machine import DeviceMemory
from pagerunner.errors import ConfigError
from pagerunner.models.configs.reader import read_model_config

PUBLISHED = all_published()


def place(tmp_path: Path, repository: str, **changes: Any) -> str:
    return str(PUBLISHED[repository].place(tmp_path, **changes))


def planned(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    assert main(["plan", *words, "--json", "--quiet"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def refused(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(["plan", *words, "--quiet"]) == 2
    return capsys.readouterr().err


def weights(plan: dict[str, Any]) -> int:
    return next(int(part["bytes"]) for part in plan["other"] if part["name"].startswith("weights"))


def test_host_memory_may_be_asked_for_in_vllms_words(tmp_path, capsys) -> None:
    model = place(tmp_path, "Qwen/Qwen3-8B")
    asked = '{"kv_connector": "OffloadingConnector", "kv_role": "kv_both", "kv_connector_extra_config": {"cpu_bytes_to_use": 1073741824}}'
    one = planned(capsys, model, "--memory", "80GiB", "--kv-transfer-config", asked)
    assert one == planned(capsys, model, "--memory", "80GiB", "--kv-offloading-size", "1")
    assert one["host_bytes"] <= 2**30 and not one["disk_bytes"]


def test_a_disk_is_part_of_the_plan(tmp_path, capsys) -> None:
    model = place(tmp_path, "Qwen/Qwen3-8B")
    tier = {"type": "fs", "root_dir": str(tmp_path), "max_bytes": 10 * 2**30}
    extra = {"cpu_bytes_to_use": 2**30, "secondary_tiers": [tier]}
    asked = json.dumps(
        {"kv_connector": "OffloadingConnector", "kv_role": "kv_both", "kv_connector_extra_config": extra}
    )
    plan = planned(capsys, model, "--memory", "80GiB", "--kv-transfer-config", asked)
    assert plan["disk_bytes"] == 10 * 2**30 and plan["disk_tokens"] == pytest.approx(10 * plan["host_tokens"], rel=0.05)


def test_a_plan_of_several_engines_is_that_of_each(tmp_path, capsys) -> None:
    model = place(tmp_path, "Qwen/Qwen3-8B")
    one, two = (planned(capsys, model, "--memory", "80GiB", "-dp", engines) for engines in ("1", "2"))
    assert {**one, "data_parallel_size": 2} == two, "each has a device of its own"
    half, shared = (
        planned(capsys, model, "--memory", memory, "--device", "cpu", "-dp", engines)
        for memory, engines in (("64GiB", "1"), ("128GiB", "2"))
    )
    assert {**half, "data_parallel_size": 2} == shared
    assert main(["plan", model, "--memory", "128GiB", "-dp", "2", "--device", "cpu"]) == 0
    said = capsys.readouterr().out
    both = f"{2 * half['max_concurrency']:,.2f}"
    assert (
        f"2 engines, which share that memory. The numbers are those of each engine. All of them together hold {both}"
        in said
    )
    said = refused(capsys, model, "-dp", "0")
    assert "data_parallel_size must be a whole number of at least 1, got 0" in said


def test_another_machines_memory_is_a_gpus_and_weights_keep_their_dtype(tmp_path, capsys) -> None:
    model = place(tmp_path, "Qwen/Qwen3-8B")
    plan = planned(capsys, model, "--memory", "80GiB")
    assert (plan["device"], plan["dtype"]) == ("cuda", "bfloat16")
    assert weights(plan) == 16_381_470_720
    assert 10 < plan["max_concurrency"] < 10.2
    on_cpu = planned(capsys, model, "--memory", "80GiB", "--device", "cpu")
    assert (on_cpu["device"], on_cpu["dtype"]) == ("cpu", "float32")
    assert weights(on_cpu) == 2 * 16_381_470_720


def test_ranks_halve_weights_and_pages_until_a_key_value_head_is_left(tmp_path, capsys) -> None:
    model = place(tmp_path, "Qwen/Qwen3-8B")
    one, two, sixteen = (planned(capsys, model, "--memory", "80GiB", "-tp", str(ranks)) for ranks in (1, 2, 16))
    assert [plan["tensor_parallel_size"] for plan in (one, two, sixteen)] == [1, 2, 16]
    assert one["request_bytes"] == 2 * two["request_bytes"] == 8 * sixteen["request_bytes"], (
        "there are 8 of these heads"
    )
    assert weights(one) / 2 < weights(two) < weights(one) / 2 * 1.001, "norms are whole on each rank"
    said = refused(capsys, model, "--memory", "80GiB", "-tp", "3")
    assert "tensor_parallel_size=3: The model's 32 heads can't be divided among 3 ranks." in said
    assert "whole model: 1, 2, 4, 8, 16, 32." in said
    said = refused(capsys, model, "--memory", "80GiB", "-tp", "1" + 14 * "0")
    assert "The model's 151,936 token ids can't be divided among 100,000,000,000,000 ranks." in said
    assert main(["plan", model, "--memory", "80GiB", "-tp", "2"]) == 0
    assert (
        "Divided among 2 ranks, each with a device of its own. The numbers are those of each rank."
        in capsys.readouterr().out
    )
    assert main(["plan", model, "--memory", "80GiB", "-tp", "2", "--device", "cpu"]) == 0
    said = capsys.readouterr().out
    assert "on a CPU with 80.00 GiB\nDivided among 2 ranks, which share that memory. The numbers" in said
    assert re.search(r"total +36\.\d\d GiB\n", said), "0.9 of 40 GiB"


def test_a_plan_for_this_machine_says_how_many_devices_it_lacks(tmp_path, capsys, monkeypatch) -> None:
    monkeypatch.setattr(resolving, "resolve_device", lambda asked: "cuda")
    monkeypatch.setattr(resolving, "device_memory", lambda **_: DeviceMemory(80 * 2**30, 79 * 2**30))
    model = place(tmp_path, "Qwen/Qwen3-8B")
    for count, missing in ((1, True), (2, False)):
        monkeypatch.setattr(torch.cuda, "device_count", lambda count=count: count)
        assert main(["plan", model, "-tp", "2"]) == 0
        said = capsys.readouterr().out
        assert "Divided among 2 ranks, each with a device of its own. The numbers" in said
        sentence = "wouldn't start on this machine: tensor_parallel_size=2 takes 2 CUDA devices, and 1 can be seen"
        assert (sentence in said) == missing


def test_a_plan_for_a_ray_cluster_says_how_many_gpus_it_lacks(tmp_path, capsys, monkeypatch) -> None:
    """It needs no device on this machine."""
    nodes = [{"Alive": True, "NodeManagerAddress": f"10.0.0.{n}", "Resources": {"GPU": 2 - n}} for n in (1, 2)]
    counted = types.SimpleNamespace(
        nodes=lambda: nodes, available_resources=dict, cluster_resources=lambda: {"GPU": 1.0}
    )
    monkeypatch.setattr(cluster, "connected", lambda: counted)
    monkeypatch.setattr(resolving, "cluster_device", lambda asked: ("cuda", DeviceMemory(80 * 2**30, 79 * 2**30)))
    assert main(["plan", place(tmp_path, "Qwen/Qwen3-8B"), "-tp", "2", "--distributed-executor-backend", "ray"]) == 0
    sentence = "in this cluster: 2 ranks take a GPU each, and free are 0 of the cluster's 1 GPUs (10.0.0.1 has 1, 10.0.0.2 has 0)."
    assert f"It wouldn't start {sentence}" in capsys.readouterr().out


def test_stages_have_pages_and_weights_of_the_largest_one(tmp_path, capsys) -> None:
    model = place(tmp_path, "Qwen/Qwen3-8B")
    one, two, five, both = (
        planned(capsys, model, "--memory", "80GiB", "-tp", ranks, "-pp", stages)
        for ranks, stages in (("1", "1"), ("1", "2"), ("1", "5"), ("2", "2"))
    )
    assert [plan["pipeline_parallel_size"] for plan in (one, two, five, both)] == [1, 2, 5, 2]
    layers = zip((one, two, five, both), (36, 18, 8, 9), strict=True)
    assert len({plan["request_bytes"] / own for plan, own in layers}) == 1, (
        "with two ranks a layer's half is a half layer"
    )
    assert [two["waste"], five["waste"]] == [0, pytest.approx(1 - 36 / 5 / 8, abs=1e-5)]
    embedding = 151_936 * 4_096 * 2
    assert weights(one) - 2 * embedding == pytest.approx(2 * (weights(two) - embedding), rel=1e-5)
    assert main(["plan", model, "--memory", "80GiB", "-pp", "5"]) == 0
    said = capsys.readouterr().out
    assert "Stages have the layers 0 to 6, 7 to 13, 14 to 20, 21 to 28, 29 to 35. Pages and weights are planned" in said
    said = refused(capsys, model, "--memory", "80GiB", "-pp", "1" + 14 * "0")
    assert "pipeline_parallel_size=100000000000000: the model has 36 layers, of which each stage needs one." in said


def test_ranks_with_whole_experts_hold_as_much_as_with_parts_of_each(tmp_path, capsys) -> None:
    model = place(tmp_path, "Qwen/Qwen3-30B-A3B")
    parts, whole = (planned(capsys, model, "--memory", "80GiB", "-tp", "4", *flag) for flag in ((), ("-ep",)))
    assert weights(parts) == weights(whole) and not parts["enable_expert_parallel"] and whole["enable_expert_parallel"]
    assert main(["plan", model, "--memory", "80GiB", "-tp", "4", "-ep"]) == 0
    assert (
        "Divided among 4 ranks, each with a device of its own. Each has whole experts. The numbers"
        in capsys.readouterr().out
    )
    teams, ranks = (
        planned(capsys, model, "--memory", "80GiB", *flags, "-ep") for flags in (("-dp", "4"), ("-tp", "4"))
    )
    assert weights(teams) > weights(ranks) > weights(teams) / 1.3, "experts are most of it, and a team has all the rest"
    assert main(["plan", model, "--memory", "80GiB", "-dp", "2", "-tp", "2", "-ep"]) == 0
    said = capsys.readouterr().out
    assert "2 teams, each with requests and pages of its own. All of them together hold" in said
    assert (
        "Divided among 4 ranks, each with a device of its own. Each has whole experts. The numbers are those of each rank."
        in said
    )
    said = refused(capsys, place(tmp_path, "Qwen/Qwen3-8B"), "--memory", "80GiB", "-tp", "2", "-ep")
    assert (
        "tensor_parallel_size=2: enable_expert_parallel divides whole experts among ranks, and the model has none."
        in said
    )


def test_a_number_without_unit_is_asked_back(tmp_path, capsys) -> None:
    model = place(tmp_path, "Qwen/Qwen3-8B")
    said = refused(capsys, model, "--memory", "80")
    assert "80 is 80 B" in said and "80GiB" in said
    assert "0 is 0 B, in which nothing fits (see" in refused(capsys, model, "--memory", "0")
    said = refused(capsys, model, "--memory", "80KiB")
    assert "80KiB is 80.00 KiB, in which nothing fits (see" in said


@pytest.mark.parametrize("memory", ["17TiB", "99999999999999999999GiB", "9" * 400])
def test_more_memory_than_any_device_has_is_refused(tmp_path, capsys, memory) -> None:
    said = refused(capsys, place(tmp_path, "Qwen/Qwen3-8B"), "--memory", memory)
    assert f"{memory} is more than any device has (16.00 TiB at most)" in said


def test_weights_that_do_not_fit_alone_get_advice_that_helps(tmp_path, capsys) -> None:
    said = refused(capsys, place(tmp_path, "meta-llama/Llama-3.1-70B-Instruct"), "--memory", "80GiB")
    assert "131.42 GiB in bfloat16" in said and "59.42 GiB more than" in said
    assert "a device with at least" in said
    assert "whose weights are in fp8 (67.69 GiB) or int4 (36.79 GiB)" in said
    assert "So many ranks with such a device each would hold them (tensor_parallel_size): 2." in said
    for useless in ("max_num_seqs", "max_model_len", "larger gpu_memory_utilization", 'bfloat16", which'):
        assert useless not in said


def test_weights_that_fit_in_no_form_hear_how_many_devices_would_hold_them(tmp_path, capsys) -> None:
    said = refused(capsys, place(tmp_path, "meta-llama/Llama-3.1-405B"), "--memory", "141GiB")
    assert "whose weights are in" not in said
    assert (
        "So many ranks with such a device each would hold them (tensor_parallel_size): 8, or 4 in fp8, or 2 in int4."
        in said
    )


def test_weights_of_several_ranks_are_said_to_be_those_of_each(tmp_path, capsys) -> None:
    model = place(tmp_path, "meta-llama/Llama-3.1-70B-Instruct")
    said = refused(capsys, model, "--memory", "40GiB", "-tp", "2")
    assert "The weights of each of 2 ranks alone take 65.71 GiB in bfloat16." in said
    assert "whose weights are in fp8 (33.85 GiB) or int4 (18.40 GiB)" in said
    assert "would hold them (tensor_parallel_size): 4." in said
    assert weights(planned(capsys, model, "--memory", "40GiB", "-tp", "4", "--max-model-len", "4096")) < 36 * 2**30
    said = refused(capsys, model, "--memory", "40GiB", "-pp", "2")
    assert "The weights of each of 2 ranks alone" in said and "would hold them (tensor_parallel_size): 4." in said
    planned(capsys, model, "--memory", "40GiB", "-pp", "2", "-tp", "2", "--max-model-len", "4096")
    said = refused(capsys, model, "--memory", "256MiB", "-tp", "2")
    assert "Divided among 64 ranks, the most that work, they are still too large for each." in said
    assert "ranks with such" not in refused(capsys, model, "--memory", "40GiB", "-tp", "2", "--device", "cpu")


def test_a_plan_for_a_machine_without_a_gpu_says_how_to_plan_for_one(tmp_path, capsys) -> None:
    model = place(tmp_path, "meta-llama/Llama-3.1-405B")
    hint = "This is for the CPU here; --memory 80GiB plans for a GPU of this size."
    assert refused(capsys, model, "--device", "cpu").rstrip().endswith(hint)
    assert hint not in refused(capsys, model, "--memory", "80GiB")


def test_weights_in_few_bits_are_told_of_still_fewer_if_there_are(tmp_path, capsys) -> None:
    said = refused(capsys, place(tmp_path, "Qwen/Qwen3-32B-FP8"), "--memory", "24GiB")
    assert (
        "The weights (fp8, as stored) alone take 31.97 GiB" in said and "in int4 (" in said and "in fp8 (" not in said
    )
    said = refused(capsys, place(tmp_path, "openai/gpt-oss-120b"), "--memory", "48GiB")
    assert "whose weights are in" not in said and "would hold them (tensor_parallel_size): 2." in said
    on_cpu = refused(capsys, place(tmp_path, "Qwen/Qwen3-8B"), "--memory", "24GiB", "--device", "cpu")
    assert "whose weights are in" not in on_cpu and 'dtype="bfloat16"' in on_cpu


def test_weights_that_fit_with_less_or_with_more_of_the_device_hear_so(tmp_path, capsys) -> None:
    model = place(tmp_path, "Qwen/Qwen3-8B")
    assert 'dtype="bfloat16", which halves them' in refused(capsys, model, "--memory", "24GiB", "--dtype", "float32")
    assert "a larger gpu_memory_utilization" in refused(capsys, model, "--memory", "16GiB")


@pytest.mark.parametrize(
    ("repository", "stored"),
    [
        ("openai/gpt-oss-20b", 13_761_264_768),
        ("openai/gpt-oss-120b", 65_248_815_744),
        ("Qwen/Qwen2.5-7B-Instruct-AWQ", 5_570_000_000),
    ],
)
def test_quantised_weights_are_planned_as_they_are_stored(tmp_path, capsys, repository, stored) -> None:
    model = place(tmp_path, repository)
    plan = planned(capsys, model, "--memory", "141GiB")
    assert weights(plan) == pytest.approx(stored, rel=0.05)
    assert plan["quantization"]["quant_method"] in ("mxfp4", "awq") and plan["refused"] == ""


def test_a_format_of_unknown_size_says_so(tmp_path, capsys) -> None:
    model = place(tmp_path, "Qwen/Qwen3-8B", quantization_config={"quant_method": "hqq"})
    plan = planned(capsys, model, "--memory", "80GiB")
    assert plan["other"][0]["name"] == "weights (hqq: size unknown, counted in bfloat16)"
    assert "these weights can't be served. " in plan["refused"] and "quant_method is 'hqq'" in plan["refused"]
    assert main(["plan", model, "--memory", "80GiB", "--quiet"]) == 0
    said = capsys.readouterr().out
    assert "planned, but these weights can't be served. " in said and "quant_method is 'hqq'; known are" in said
    assert "Use a repository of the model in fp8, AWQ, GPTQ or compressed-tensors" in said
    (tmp_path / "odd").mkdir()
    odd = place(
        tmp_path / "odd", "Qwen/Qwen3-8B", quantization_config={"quant_method": "gptq", "bits": 3, "group_size": 128}
    )
    assert main(["plan", odd, "--memory", "80GiB", "--quiet"]) == 0
    assert "bits is 3; GPTQ is read with 4 or 8" in capsys.readouterr().out
    with pytest.raises(ConfigError, match="quant_method is 'hqq'"):
        read_model_config(model)


NAMES = list(PUBLISHED)


@pytest.mark.parametrize("name", [NAMES[number] for number in share_of_the_day(len(NAMES), 2)])
def test_every_published_config_plans_and_its_weights_take_the_published_bytes(tmp_path, capsys, name) -> None:
    published = PUBLISHED[name]
    plan = planned(capsys, str(published.place(tmp_path)), "--memory", "4TiB", "--max-model-len", "auto")
    assert plan["device"] == "cuda" and plan["tokens"] > 0
    assert weights(plan) == pytest.approx(published.bytes, rel=0.05)


@pytest.mark.parametrize("ranks", ["2", "4"])
def test_whole_experts_of_a_rank_take_as_few_bits_as_parts_of_all_of_them(tmp_path, capsys, ranks) -> None:
    """Of 32 experts the last rank has none whose number is 0, 1 or 10. Four ranks' parts of 2,880 features are unequal, as 32 share a scale."""
    model = str(PUBLISHED["openai/gpt-oss-20b"].place(tmp_path))
    of_parts, of_whole = (
        weights(planned(capsys, model, "--memory", "80GiB", "-tp", ranks, *more)) for more in ((), ("-ep",))
    )
    assert of_whole == pytest.approx(of_parts, rel=0.03)


def test_a_message_names_the_file_that_was_given(tmp_path, capsys) -> None:
    given = tmp_path / "of-a-colleague.json"
    given.write_text(json.dumps({"model_type": "qwen3", "hidden_size": "many"}))
    said = refused(capsys, str(given))
    assert f"{given}: " in said and "config.json" not in said
    made = place(tmp_path, "Qwen/Qwen3-0.6B", quantization_config={"quant_method": "hqq"})
    given.write_text((Path(made) / "config.json").read_text())
    assert main(["plan", str(given), "--memory", "80GiB", "--quiet"]) == 0
    assert f"served. {given}: quantization_config: quant_method" in capsys.readouterr().out


def test_a_file_is_planned_with_what_model_optimizer_wrote_beside_it(tmp_path, capsys) -> None:
    made = Path(place(tmp_path, "Qwen/Qwen3-0.6B"))
    given = made / "of-a-colleague.json"
    (made / "config.json").rename(given)
    plain = weights(planned(capsys, str(given), "--memory", "80GiB"))
    said = {"quantization": {"quant_algo": "FP8", "exclude_modules": ["lm_head"]}}
    (made / "hf_quant_config.json").write_text(json.dumps(said))
    assert weights(planned(capsys, str(given), "--memory", "80GiB")) < 0.8 * plain
    (made / "hf_quant_config.json").write_text(json.dumps({"quantization": {"quant_algo": "FP8", "odd": 1}}))
    assert main(["plan", str(given), "--memory", "80GiB", "--quiet"]) == 0
    assert "odd is 1" in capsys.readouterr().out


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_groups_that_can_not_be_are_refused_on_every_device(tmp_path, capsys, device) -> None:
    said = {"quant_method": "gptq", "bits": 4, "group_size": 100}
    model = place(tmp_path, "Qwen/Qwen3-0.6B", quantization_config=said)
    words = refused(capsys, model, "--memory", "80GiB", "--device", device)
    assert "model.layers.0.self_attn.q_proj can't be stored as quantization_config (gptq) says" in words
    assert "groups of 100 (group_size) don't divide" in words


def test_the_table_begins_with_what_a_person_asks_for(tmp_path, capsys) -> None:
    assert main(["plan", place(tmp_path, "Qwen/Qwen3-8B"), "--memory", "80GiB", "--quiet"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "qwen3 in bfloat16, bfloat16 pages, on a CUDA device with 80.00 GiB"
    names = [line.split()[0] for line in lines if line]
    assert names.index("capacity") < names.index("weights") < names.index("group") < names.index("slabs")


def test_larger_steps_of_an_engine_without_a_server_are_told_of(tmp_path, capsys) -> None:
    model = place(tmp_path, "openai/gpt-oss-20b")
    for memory, more, steps in (("80GiB", (), (8_192, 16_384)), ("40GiB", (), (8_192, 8_192)),
                                ("80GiB", ("--max-num-batched-tokens", "16384"), (16_384, 16_384))):  # fmt: skip
        plan = planned(capsys, model, "--memory", memory, *more)
        assert (plan["max_num_batched_tokens"], plan["max_num_batched_tokens_offline"]) == steps, memory
    assert main(["plan", model, "--memory", "80GiB"]) == 0
    said = capsys.readouterr().out
    assert "Steps have up to 8,192 tokens, as those of `serve`. `LLM` takes steps of 16,384 here" in said


def test_a_plan_counts_the_copies_of_adapters_in_host_memory(tmp_path, capsys) -> None:
    words = place(tmp_path, "Qwen/Qwen3-0.6B"), "--memory", "80GiB", "--enable-lora", "--max-loras", "2"
    two, seven = planned(capsys, *words), planned(capsys, *words, "--max-cpu-loras", "7")
    assert 2 * seven["adapter_copies"] == 7 * two["adapter_copies"] > 0


def test_a_plan_that_is_terminated_leaves_no_directory(tmp_path, monkeypatch):
    """A config file of another name gets a directory for itself, which is there when the signal comes."""
    config = tmp_path / "model.json"
    shutil.copyfile(demo_path() / "config.json", config)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))

    def terminate(namespace, directory):
        assert list(tmp_path.glob("pagerunner-plan-*"))
        os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(plan, "engine_args", terminate)
    handler = signal.getsignal(signal.SIGTERM)
    with pytest.raises(SystemExit) as ended:
        main(["plan", str(config)])
    assert ended.value.code == 143
    assert not list(tmp_path.glob("pagerunner-plan-*")) and signal.getsignal(signal.SIGTERM) == handler
