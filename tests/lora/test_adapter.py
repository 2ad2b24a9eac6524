"""Reading PEFT directories: what each form stands for, and a sentence for everything that isn't computed."""

from __future__ import annotations

import json
import math
import os
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

from helpers.adapters import fused_deltas, pair, products_of, trained, write_adapter
from helpers.checkpoints import make_checkpoint
from helpers.forward import load
from pagerunner.errors import CheckpointError, ConfigError, PagerunnerError
from pagerunner.layers.moe import Experts, ExpertSizes
from pagerunner.lora import config as config_module
from pagerunner.lora import expressions
from pagerunner.lora.adapter import Adapter, Targets, read_adapter
from pagerunner.lora.config import read_config
from pagerunner.lora.tensors import read_all, stored_tensors
from pagerunner.ops.activation import SILU, GatedActivation

Q, K = "model.layers.0.self_attn.q_proj", "model.layers.1.self_attn.k_proj"


@pytest.fixture(scope="module")
def targets(tmp_path_factory: pytest.TempPathFactory) -> Targets:
    model, _ = load(make_checkpoint(tmp_path_factory.mktemp("base"), "qwen3", tokenizer=False))
    return Targets.of(model)


def read(path: Path, targets: Targets, max_rank: int = 64) -> Adapter:
    return read_adapter(path, targets, torch.float32, max_rank)


def two(**changes: Any) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """An adapter of two matrices in two layers."""
    config: dict[str, Any] = {"target_modules": [Q, K], **changes}
    return config, {**pair(Q, 64, 64, 4), **pair(K, 32, 64, 4, seed=1)}


def test_scale_is_in_b(tmp_path: Path, targets: Targets) -> None:
    config, tensors = two()
    adapter = read(write_adapter(tmp_path / "a", config, tensors), targets)
    assert set(products_of(adapter)) == {Q, K} and adapter.rank == 4
    assert torch.equal(products_of(adapter)[Q].a_RI, tensors[f"{Q}.lora_A.weight"])
    assert torch.equal(products_of(adapter)[Q].b_OR, tensors[f"{Q}.lora_B.weight"] * 2.0)


def test_rank_stabilised_scale_comes_after_the_patterns(tmp_path: Path, targets: Targets) -> None:
    config = {"target_modules": ["q_proj", "k_proj"], "layers_to_transform": 0, "use_rslora": True}
    config |= {"rank_pattern": {"layers.0.*k_proj": 9}, "alpha_pattern": {"k_proj": 6}}
    k = "model.layers.0.self_attn.k_proj"
    tensors = {**pair(Q, 64, 64, 4), **pair(k, 32, 64, 9, seed=1)}
    adapter = read(write_adapter(tmp_path / "a", config, tensors), targets)
    assert torch.allclose(products_of(adapter)[k].b_OR, tensors[f"{k}.lora_B.weight"] * (6 / math.sqrt(9)))
    assert torch.allclose(products_of(adapter)[Q].b_OR, tensors[f"{Q}.lora_B.weight"] * (8 / math.sqrt(4)))


REFUSED: dict[str, Any] = {
    "use_dora": True,
    "bias": "lora_only",
    "lora_bias": True,
    "modules_to_save": ["lm_head"],
    "trainable_token_indices": [1],
    "layer_replication": [[0, 2]],
    "fan_in_fan_out": True,
    "ensure_weight_tying": True,
    "alora_invocation_tokens": [1],
    "use_qalora": True,
    "use_bdlora": {"a": 1},
    "arrow_config": {"a": 1},
    "kasa_config": {"a": 1},
    "velora_config": {"a": 1},
    "monteclora_config": {"a": 1},
    "init_lora_weights": "pissa_niter_4",
    "peft_type": "IA3",
    "something_new": 3,
    "r": 0,
    "lora_alpha": "8",
    "use_rslora": 1,
    "rank_pattern": {"(": 4},
    "alpha_pattern": [4],
    "target_modules": [3],
    "exclude_modules": "(",
    "layers_to_transform": ["1"],
    "layers_pattern": ["la.*"],
}


@pytest.mark.parametrize("field", REFUSED)
def test_fields_that_are_not_computed_are_refused_by_name(tmp_path: Path, targets: Targets, field: str) -> None:
    config, tensors = two(**{field: REFUSED[field]})
    with pytest.raises(ConfigError, match=field):
        read(write_adapter(tmp_path / "a", config, tensors), targets)


def test_unused_fields_of_any_name_are_passed_over(tmp_path: Path, targets: Targets) -> None:
    config, tensors = two(
        something_new=False, use_dora=False, modules_to_save=None, lora_dropout=0.1, init_lora_weights="eva"
    )
    assert products_of(read(write_adapter(tmp_path / "a", config, tensors), targets))


def _change(tensors: dict[str, torch.Tensor], name: str, value: torch.Tensor | None) -> None:
    if value is None:
        del tensors[name]
    else:
        tensors[name] = value


BAD_TENSORS: dict[str, tuple[str, torch.Tensor | None, str]] = {
    "half of a pair": (f"{Q}.lora_B.weight", None, "lacks the tensor.*q_proj.lora_B.weight"),
    "other rank": (f"{Q}.lora_A.weight", torch.zeros(5, 64), "q_proj.lora_A.weight has rank 5, and the config says 4"),
    "other inputs": (f"{Q}.lora_A.weight", torch.zeros(4, 63), r"q_proj.lora_A.weight has shape \[4, 63\].*\[4, 64\]"),
    "not a number": (f"{K}.lora_B.weight", torch.full((32, 4), float("nan")), "k_proj.lora_B.weight holds values"),
    "integers": (f"{K}.lora_B.weight", torch.zeros(32, 4, dtype=torch.int8), "k_proj.lora_B.weight has dtype"),
    "DoRA": (f"{Q}.lora_magnitude_vector", torch.zeros(64), "lora_magnitude_vector: DoRA"),
    "bias": (f"{Q}.lora_B.bias", torch.zeros(64), "lora_bias"),
    "embedding": ("model.embed_tokens.lora_embedding_A", torch.zeros(4, 512), "embedding"),
    "base's weight": ("model.embed_tokens.base_layer.weight", torch.zeros(512, 64), "replaces weights"),
    "left over": ("model.something.weight", torch.zeros(2, 2), "model.something.weight.*is no tensor of an adapter"),
}


@pytest.mark.parametrize("case", BAD_TENSORS)
def test_every_tensor_lands_or_is_named(tmp_path: Path, targets: Targets, case: str) -> None:
    name, value, message = BAD_TENSORS[case]
    config, tensors = two()
    _change(tensors, name, value)
    with pytest.raises(CheckpointError, match=message):
        read(write_adapter(tmp_path / "a", config, tensors), targets)


@pytest.mark.parametrize(
    ("alpha", "large", "dtype", "said"),
    [
        (1e30, 1.0, torch.float16, r"lora_B.weight holds .* times the scale 2.5e\+29 \(lora_alpha\) is beyond float16"),
        (8, 1e8, torch.float16, r"lora_A.weight holds 1e\+08, which times the scale 1 .* beyond float16"),
        (1e300, 1.0, torch.float32, "beyond float32"),
        (8, 1e8, torch.bfloat16, ""),
    ],
)
def test_what_lands_is_finite(
    tmp_path: Path, targets: Targets, alpha: float, large: float, dtype: torch.dtype, said: str
) -> None:
    """Numbers of a file may be finite, and not so with the scale, or in the engine's dtype."""
    config, tensors = two(lora_alpha=alpha)
    tensors[f"{K}.lora_A.weight"][0, 0] = large
    path = write_adapter(tmp_path / "a", config, tensors)
    with pytest.raises(CheckpointError, match=said) if said else nullcontext():
        read_adapter(path, targets, dtype, 64)


def test_targets_and_tensors_must_agree(tmp_path: Path, targets: Targets) -> None:
    config, tensors = two(target_modules=["q_proj"])
    with pytest.raises(CheckpointError, match="k_proj.lora_A.weight isn't among target_modules"):
        read(write_adapter(tmp_path / "a", config, tensors), targets)
    config, tensors = two(target_modules=["q_proj", K])
    with pytest.raises(CheckpointError, match="lacks .*layers.1.self_attn.q_proj.lora_A.weight, which target_modules"):
        read(write_adapter(tmp_path / "b", config, tensors), targets)
    unknown = {**pair("model.layers.7.self_attn.q_proj", 64, 64, 4)}
    with pytest.raises(CheckpointError, match="layers.7.*no such matrix"):
        read(write_adapter(tmp_path / "c", {"target_modules": "all-linear"}, unknown), targets)
    head = {**pair("lm_head", 512, 64, 4)}
    with pytest.raises(CheckpointError, match="lm_head can't have an adapter"):
        read(write_adapter(tmp_path / "d", {"target_modules": ["lm_head"]}, head), targets)
    with pytest.raises(CheckpointError, match="no tensors"):
        read(write_adapter(tmp_path / "e", {"target_modules": ["nothing"]}, {}), targets)
    with pytest.raises(ConfigError, match="has no target_modules"):
        read(write_adapter(tmp_path / "f", {}, {}), targets)


TARGETS: dict[str, tuple[dict[str, Any], int]] = {
    "suffixes": ({"target_modules": ["q_proj", "down_proj"]}, 4),
    "an expression": ({"target_modules": r"model\.layers\.\d\.self_attn\.[kv]_proj"}, 4),
    "all": ({"target_modules": "all-linear"}, 14),
    "all but some": ({"target_modules": "all-linear", "exclude_modules": ["o_proj"]}, 12),
    "nothing is excluded": ({"target_modules": ["q_proj"], "exclude_modules": "all-linear"}, 2),
    "excluded by an expression": ({"target_modules": ["q_proj"], "exclude_modules": ".*layers.0.*"}, 1),
    "one layer": ({"target_modules": ["q_proj"], "layers_to_transform": 1}, 1),
    "layers by a pattern": ({"target_modules": ["q_proj"], "layers_to_transform": [1], "layers_pattern": "layers"}, 1),
    "a whole name escapes": ({"target_modules": ["k_proj", Q], "layers_to_transform": [1]}, 2),
}


@pytest.mark.parametrize("case", TARGETS)
def test_forms_of_targets(tmp_path: Path, targets: Targets, case: str) -> None:
    """The config asks for as many matrices as it should: those, all there, are taken; one missing is an error."""
    config, count = TARGETS[case]
    every = {name: one for name, one in targets.matrices.items() if not one.refused}
    write_adapter(tmp_path / "a", config, {})
    asked = [name for name in every if read_config(tmp_path / "a").asks_for(name)]
    assert len(asked) == count
    tensors: dict[str, torch.Tensor] = {}
    for name in asked:
        tensors |= pair(name, every[name].out_features, every[name].in_features, 4)
    path = write_adapter(tmp_path / "a", config, tensors)
    assert set(products_of(read(path, targets))) == set(asked)


def test_rank_above_the_limit_names_the_knob(tmp_path: Path, targets: Targets) -> None:
    config, tensors = two()
    with pytest.raises(ConfigError, match="rank 4.*at most 2.*max_lora_rank"):
        read(write_adapter(tmp_path / "a", config, tensors), targets, max_rank=2)


def test_pickles_and_missing_files(tmp_path: Path, targets: Targets) -> None:
    path = write_adapter(tmp_path / "a", {"target_modules": ["q_proj"]}, {})
    (path / "adapter_model.safetensors").rename(path / "adapter_model.bin")
    with pytest.raises(CheckpointError, match=r"adapter_model.bin is a pickle"):
        read(path, targets)
    (path / "adapter_config.json").unlink()
    with pytest.raises(CheckpointError, match=r"no adapter_config.json"):
        read(path, targets)


def test_digest_is_of_the_content(tmp_path: Path, targets: Targets) -> None:
    config, tensors = two()
    one = read(write_adapter(tmp_path / "a", config, tensors), targets).digest
    assert read(write_adapter(tmp_path / "b", {**config, "lora_dropout": 0.5}, tensors), targets).digest == one
    assert read(write_adapter(tmp_path / "c", {**config, "lora_alpha": 9}, tensors), targets).digest != one
    scaled = {name: tensor * (2 if "lora_B" in name else 1) for name, tensor in tensors.items()}
    same = read(write_adapter(tmp_path / "e", {**config, "lora_alpha": 4}, scaled), targets)
    assert same.digest == one, "the same products"
    tensors[f"{Q}.lora_A.weight"][0, 0] += 1
    assert read(write_adapter(tmp_path / "d", config, tensors), targets).digest != one


EXPERTS = "model.layers.0.mlp.experts"


def experts(inner: int = 6, **options: Any) -> Targets:
    """Three experts of 8 features."""
    owner = Experts(ExpertSizes(3, 8, inner), torch.float32, **options)
    known = Targets({}, {EXPERTS: owner})
    return known


@pytest.mark.parametrize("old", [False, True])
@pytest.mark.parametrize("alternating", [False, True])
def test_experts_together(tmp_path: Path, old: bool, alternating: bool) -> None:
    """A pair for all experts becomes one for each, in both orders of A and B that PEFT has written."""
    known = experts(activation=GatedActivation("clamped_swiglu", 7.0) if alternating else SILU)
    config = {"target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"], "r": 2, "lora_alpha": 2}
    both = pair(f"{EXPERTS}.base_layer", 12, 8, 6) if not old else pair(f"{EXPERTS}.base_layer", 8, 12, 6)
    down = pair(EXPERTS, 8, 6, 6, seed=1) if not old else pair(EXPERTS, 6, 8, 6, seed=1)
    adapter = read(write_adapter(tmp_path / "a", config, {**both, **down}), known)
    assert len(products_of(adapter)) == 9
    for tensors, name in ((both, f"{EXPERTS}.base_layer"), (down, EXPERTS)):
        a, b = tensors[f"{name}.lora_A.weight"], tensors[f"{name}.lora_B.weight"]
        a_ERx, b_xRE = a.view(3, 2, -1), b.view(-1, 2, 3)
        expected_EOI = torch.einsum("ore,eri->eoi", b_xRE, a_ERx)
        if old:
            expected_EOI = expected_EOI.transpose(1, 2)
        for expert in range(3):
            made = {
                part: _delta(adapter, f"{EXPERTS}.{expert}.{part}") for part in ("gate_proj", "up_proj", "down_proj")
            }
            if name == EXPERTS:
                assert torch.allclose(made["down_proj"], expected_EOI[expert], atol=1e-5)
            elif alternating:
                assert torch.allclose(made["gate_proj"], expected_EOI[expert, 0::2], atol=1e-5)
                assert torch.allclose(made["up_proj"], expected_EOI[expert, 1::2], atol=1e-5)
            else:
                together = torch.cat([made["gate_proj"], made["up_proj"]])
                assert torch.allclose(together, expected_EOI[expert], atol=1e-5)


def _delta(adapter: Adapter, name: str) -> torch.Tensor:
    product = products_of(adapter)[name]
    return product.b_OR @ product.a_RI


def test_experts_whose_shape_says_nothing_are_refused(tmp_path: Path) -> None:
    config = {"target_parameters": ["mlp.experts.gate_up_proj"], "r": 2}
    path = write_adapter(tmp_path / "a", config, pair(EXPERTS, 8, 8, 6))
    with pytest.raises(CheckpointError, match=r"PEFT 0\.19\.1"):
        read(path, experts(inner=4))
    with pytest.raises(CheckpointError, match=r"PEFT 0\.19\.1"):
        read(path, experts(inner=4, transposed=True))
    assert read(path, experts(inner=4, transposed=True, activation=GatedActivation("clamped_swiglu", 7.0))).rank == 2


def test_the_version_of_peft_says_what_a_shape_does_not(tmp_path: Path) -> None:
    config = {"target_parameters": ["mlp.experts.gate_up_proj"], "r": 2, "lora_alpha": 2}
    tensors = pair(EXPERTS, 8, 8, 6)
    a_ERI, b_ORE = tensors[f"{EXPERTS}.lora_A.weight"].view(3, 2, 8), tensors[f"{EXPERTS}.lora_B.weight"].view(8, 2, 3)
    expected_EOI = torch.einsum("ore,eri->eoi", b_ORE, a_ERI)
    digests = set()
    for version, want_EOI in (("0.19.0", expected_EOI.transpose(1, 2)), ("0.21.2.dev0", expected_EOI)):
        path = write_adapter(tmp_path / version, {**config, "peft_version": version}, tensors)
        adapter = read(path, experts(inner=4))
        got = torch.cat([_delta(adapter, f"{EXPERTS}.2.{part}") for part in ("gate_proj", "up_proj")])
        assert torch.allclose(got, want_EOI[2], atol=1e-5)
        digests.add(adapter.digest)
    assert len(digests) == 2, "the same tensors, and other products"


def test_experts_tensors_without_their_target(tmp_path: Path) -> None:
    config = {"target_parameters": ["mlp.experts.down_proj"], "r": 2}
    with pytest.raises(CheckpointError, match="isn't among target_parameters"):
        read(write_adapter(tmp_path / "a", config, pair(f"{EXPERTS}.base_layer", 12, 8, 6)), experts())
    both = {"target_parameters": ["gate_up_proj", "down_proj"], "r": 2}
    with pytest.raises(CheckpointError, match="lacks the tensors of .*gate_up_proj"):
        read(write_adapter(tmp_path / "b", both, pair(EXPERTS, 8, 6, 6)), experts())


PEFT: dict[str, dict[str, Any]] = {
    "plain": {"target_modules": ["q_proj", "v_proj", "gate_proj", "down_proj"]},
    "all-linear, rank-stabilised": {"target_modules": "all-linear", "use_rslora": True, "r": 3},
    "patterns": {
        "target_modules": ["q_proj", "o_proj", "up_proj"],
        "rank_pattern": {"up_proj": 7, r"layers\.1\.self_attn\.q_proj": 2},
        "alpha_pattern": {"o_proj": 32},
        "layers_to_transform": [1],
    },
}


@pytest.mark.parametrize("case", PEFT)
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_deltas_are_those_of_peft(tmp_path: Path, family: str, case: str) -> None:
    peft = pytest.importorskip("peft")
    transformers = pytest.importorskip("transformers")
    base = make_checkpoint(tmp_path, family, tokenizer=False)
    model = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    _compare(tmp_path, peft, model, PEFT[case], Targets.of(load(base)[0]))


def _compare(tmp_path: Path, peft: Any, model: Any, config: dict[str, Any], known: Targets) -> None:
    tuned = peft.get_peft_model(model, peft.LoraConfig(**config))
    trained(tuned)
    tuned.save_pretrained(tmp_path / "adapter")
    adapter, expected = read(tmp_path / "adapter", known), fused_deltas(tuned)
    made = {name: product.b_OR @ product.a_RI for name, product in products_of(adapter).items()}
    assert expected
    for name, delta in expected.items():
        owner = known.experts.get(name.rpartition(".")[0])
        if owner is None:
            assert torch.allclose(made.pop(name), delta, atol=1e-5), name
            continue
        where, _, matrix = name.rpartition(".")
        parts = ("down_proj",) if matrix == "down_proj" else ("gate_proj", "up_proj")
        for expert in range(owner.sizes.experts):
            own = torch.cat([made.pop(f"{where}.{expert}.{part}") for part in parts])
            assert torch.allclose(own, delta[expert], atol=1e-5), (name, expert)
    assert not made, "every product is one of PEFT's"


def test_experts_deltas_are_those_of_peft(tmp_path: Path) -> None:
    """Qwen3-MoE of transformers 5, whose experts are two parameters of three dimensions."""
    peft = pytest.importorskip("peft")
    transformers = pytest.importorskip("transformers")
    config = transformers.Qwen3MoeConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, moe_intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=16, num_experts=4, num_experts_per_tok=2,
    )  # fmt: skip
    model = transformers.Qwen3MoeForCausalLM(config)
    model.save_pretrained(tmp_path / "base")
    asked = {
        "target_modules": ["q_proj"],
        "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
        "r": 4,
        "lora_alpha": 6,
        "rank_pattern": {"experts.down_proj": 2},
    }
    _compare(tmp_path, peft, model, asked, Targets.of(load(tmp_path / "base")[0]))


HOSTILE = r"((\w|\.)+)+!"


@pytest.mark.parametrize(
    "config",
    [
        {"rank_pattern": {HOSTILE: 4}},
        {"alpha_pattern": {HOSTILE: 4}},
        {"exclude_modules": HOSTILE},
        {"target_modules": rf"{HOSTILE}|.*layers\.0.*q_proj|.*layers\.1.*k_proj"},
    ],
)
def test_no_expression_takes_for_ever(tmp_path: Path, targets: Targets, config: dict[str, Any]) -> None:
    _, tensors = two()
    path = write_adapter(tmp_path / "a", {"target_modules": [Q, K], **config}, tensors)
    assert set(products_of(read(path, targets))) == {Q, K}


def test_a_config_has_an_end(tmp_path: Path, targets: Targets, monkeypatch: pytest.MonkeyPatch) -> None:
    config, tensors = two(base_model_name_or_path="x" * 300, rank_pattern={HOSTILE: 4})
    path = write_adapter(tmp_path / "a", config, tensors)
    with monkeypatch.context() as some, pytest.raises(ConfigError, match=r"rank_pattern.*takes more than 100 steps"):
        some.setattr(expressions, "MAX_STEPS", 100)
        read(path, targets)
    monkeypatch.setattr(config_module, "MOST_BYTES", 300)
    with pytest.raises(ConfigError, match="adapter_config.json has [0-9]+ bytes, and at most 300"):
        read(path, targets)
    (path / "adapter_config.json").unlink()
    (path / "adapter_config.json").symlink_to("/dev/null")  # /dev/zero has no end, and a FIFO no beginning
    with pytest.raises(ConfigError, match=r"adapter_config.json isn't a file\."):
        read(path, targets)


def test_a_file_takes_no_more_memory_than_an_adapter(
    tmp_path: Path, targets: Targets, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Names and shapes are looked at before any tensor is read. The file is one of 4 TB, of which nothing is on the disk."""
    config, _ = two()
    path = write_adapter(tmp_path / "a", config, {})
    file = path / "adapter_model.safetensors"

    def write(shapes: dict[str, list[int]]) -> None:
        header, at = {}, 0
        for name, shape in shapes.items():
            size = 4 * math.prod(shape)
            header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [at, at + size]}
            at += size
        text = json.dumps(header).encode()
        file.write_bytes(len(text).to_bytes(8, "little") + text)
        os.truncate(file, 8 + len(text) + at)

    write({f"base_model.model.{Q}.lora_A.weight": [4, 2**38], f"base_model.model.{Q}.lora_B.weight": [64, 4]})
    with pytest.raises(CheckpointError, match=r"q_proj.lora_A.weight has shape \[4, 274877906944\]"):
        read(path, targets)
    write({f"base_model.model.{Q}.lora_A.weight": [4, 64], "base_model.model.x.weight": [2**20, 2**20]})
    with pytest.raises(CheckpointError, match=r"x.weight \[1048576, 1048576\] is no tensor of an adapter"):
        read(path, targets)
    write({f"base_model.model.{Q}.lora_A.weight": [4, 64], f"base_model.model.{Q}.lora_B.weight": [64, 4]})
    with stored_tensors(file) as tensors:
        assert len(tensors) == 2
        os.truncate(file, file.stat().st_size - 5)  # a trainer writes the next version
        with pytest.raises(CheckpointError, match=r"ends within .*lora_B.weight.*is being written"):
            read_all(tensors[1:])
    whole = file.stat().st_size + 5
    os.truncate(file, whole + 100)
    with pytest.raises(CheckpointError, match=f"has {whole + 100:,} bytes, and its last tensor ends at byte {whole:,}"):
        read(path, targets)
    file.write_bytes((2**24 + 1).to_bytes(8, "little") + b"{}")
    with pytest.raises(CheckpointError, match="has a header of 16,777,217 bytes, and at most 16,777,216"):
        read(path, targets)
    names = [f"base_model.model.{Q}.lora_{side}.weight" for side in "AB"]
    far = {"dtype": "F32", "data_offsets": [2**70, 2**70 + 1024]}
    text = json.dumps(dict(zip(names, ({**far, "shape": [4, 64]}, {**far, "shape": [64, 4]}), strict=True))).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text)
    with pytest.raises(CheckpointError, match="is not a complete safetensors file"):
        read(path, targets)


@pytest.mark.parametrize(
    "header",
    [
        b"",
        b"[]",
        b'{"a": 1}',
        b'{"a": {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 15]}}',
        b'{"a": {"dtype": "F32", "shape": [-1, -4], "data_offsets": [0, 16]}}',
        b'{"a": {"dtype": "F32", "shape": [2, 2], "data_offsets": [-16, 0]}}',
        b'{"a": {"dtype": "F32", "shape": [2.0, 2], "data_offsets": [0, 16]}}',
        b'{"a": {"dtype": ["F32"], "shape": 4, "data_offsets": [0, 16]}}',
        b'{"a": {"shape": [2, 2]}}',
        b'{"a": {"dtype": "F32", "shape": [[[[[2]]]]], "data_offsets": [0]}}',
        b'{"\xff": {}}',
        b"[" * 100_000,
    ],
)
def test_damaged_headers_are_sentences(tmp_path: Path, targets: Targets, header: bytes) -> None:
    path = write_adapter(tmp_path / "a", two()[0], {})
    (path / "adapter_model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    with pytest.raises(CheckpointError, match="is not a complete safetensors file"):
        read(path, targets)


def test_errors_are_ours(tmp_path: Path, targets: Targets) -> None:
    """A file that is no JSON is a sentence, too."""
    path = write_adapter(tmp_path / "a", {"target_modules": ["q_proj"]}, {})
    (path / "adapter_config.json").write_text(json.dumps([1]), encoding="utf-8")
    with pytest.raises(PagerunnerError, match="adapter_config.json must hold a JSON object"):
        read(path, targets)
