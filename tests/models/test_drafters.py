"""Drafters against what section by section their descriptions say, written out in tests/helpers/draft_references.py."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from helpers import packers
from helpers.checkpoints import make_checkpoint
from helpers.checkpoints_compressed import make_compressed_checkpoint
from helpers.checkpoints_drafters import (
    EAGLE,
    add_tensors,
    deepseek_mtp_weights,
    deepseek_v4_mtp_weights,
    eagle_weights,
    qwen_mtp_weights,
    write_drafter,
)
from helpers.checkpoints_hybrid import make_hybrid_checkpoint
from helpers.checkpoints_latent import make_latent_checkpoint
from helpers.deepseek_v4 import fp8, make_published_checkpoint
from helpers.draft_harness import DraftHarness, load_drafting
from helpers.draft_references import DeepseekMTP, DeepseekV4MTP, EagleLayers, QwenMTP, Reference, Weights
from helpers.families import MAKERS
from helpers.forward import load
from helpers.quantise import quantise
from helpers.threads_of_ranks import in_ranks
from pagerunner.dist.gloo import GlooComm
from pagerunner.layers.streams import Streams
from pagerunner.models.checkpoint.drafters import with_drafter
from pagerunner.models.checkpoint.loader import load_weights, materialize, weights_bytes
from pagerunner.models.checkpoint.ranks import build_share, configs_of_ranks, join_ranks, share_of_drafter, token_ids
from pagerunner.models.configs.base import ModelConfig
from pagerunner.models.configs.reader import read_model_config
from pagerunner.models.drafting import Takes
from pagerunner.ops.native import small
from pagerunner.runner.sampling.vocabulary import DividedVocabulary

LENGTHS = (37, 5, 20)
DRAFTS = 4


def check(
    model: Any, config: Any, reference: Reference, taken_size: int, vocabulary: DividedVocabulary | None = None
) -> None:
    """Drafts, inputs of the output weights and hidden states are the reference's: in one go, in pieces of mixed steps, and token by token.

    A rank's logits are gathered by its `vocabulary`.
    """
    generator = torch.Generator().manual_seed(1)
    taken = [torch.randn(length, taken_size, generator=generator) for length in LENGTHS]
    ids = [torch.randint(512, (length,), generator=generator).tolist() for length in LENGTHS]
    wanted = [reference.draft(t, i, DRAFTS) for t, i in zip(taken, ids, strict=True)]
    whole = [[(row, range(length)) for row, length in enumerate(LENGTHS)]]
    pieces = [
        [(0, range(17))],
        [(0, range(17, 18)), (1, range(5)), (2, range(9))],
        [(2, range(9, 20)), (0, range(18, 37))],
    ]
    single = [
        [(row, range(place, place + 1)) for row, length in enumerate(LENGTHS) if place < length] for place in range(37)
    ]
    for steps in (whole, pieces, single):
        harness = DraftHarness(model, config, len(LENGTHS))
        if vocabulary is not None and model.drafter.divided:
            harness.logits = lambda x: vocabulary.whole(model.drafter.compute_logits(x))
        found, inputs, hidden = harness.draft(taken, ids, DRAFTS, steps)
        for row, (drafts, logit_input, left) in enumerate(wanted):
            length = LENGTHS[row]
            torch.testing.assert_close(inputs[row], logit_input[:length], atol=2e-5, rtol=1e-4)
            torch.testing.assert_close(hidden[row], left[:length], atol=2e-5, rtol=1e-4)
            assert found[row] == drafts


EAGLE3_FORMS: dict[str, dict[str, Any]] = {
    "as published": {},
    "qwen3 layer": {"model_type": "qwen3"},
    "norm before the residual": {"norm_before_residual": True},
    "norms before fc": {"norm_before_fc": True, "norm_output": True},
    "a norm of each part": {"fc_norm": True},
    "the whole vocabulary, two layers": {"draft_vocab_size": 512, "num_hidden_layers": 2},
    "one state, which nothing joins": {"eagle_aux_hidden_state_layer_ids": [3]},
}


@pytest.mark.parametrize("form", EAGLE3_FORMS)
def test_eagle3(tmp_path: Path, form: str) -> None:
    target = make_checkpoint(tmp_path, "llama", num_hidden_layers=8, tokenizer=False)
    fields = EAGLE | EAGLE3_FORMS[form]
    parts = len(fields.get("eagle_aux_hidden_state_layer_ids", (1, 2, 3)))
    weights = eagle_weights(fields, parts=parts)
    config = with_drafter(read_model_config(target), "eagle3", str(write_drafter(tmp_path / "head", fields, weights)))
    model = load_drafting(config)
    own = load_file(target / "model.safetensors")
    reference = EagleLayers(weights, fields, own["model.embed_tokens.weight"], own["lm_head.weight"])
    check(model, config, reference, 64 * parts)


@pytest.mark.parametrize("bias", [False, True])
def test_eagle(tmp_path: Path, bias: bool) -> None:
    target = make_checkpoint(tmp_path, "llama", tokenizer=False, tie_word_embeddings=bias)
    fields = {name: value for name, value in EAGLE.items() if name != "draft_vocab_size"}
    weights = eagle_weights(fields, 1, fc_bias=bias)
    path = write_drafter(tmp_path / "head", fields, weights, midlayer=False, prefix="model." if bias else "")
    config = with_drafter(read_model_config(target), "eagle", str(path))
    own = load_file(target / "model.safetensors")
    embed = own["model.embed_tokens.weight"]
    reference = EagleLayers(weights, fields, embed, embed if bias else own["lm_head.weight"], version=1)
    check(load_drafting(config), config, reference, 64)


@pytest.mark.parametrize(
    ("family", "fused"), [("qwen3_next", False), ("qwen3_next_dense", False), ("qwen3_5", False), ("qwen3_5_moe", True)]
)
def test_mtp_of_qwen(tmp_path: Path, family: str, fused: bool) -> None:
    path, _ = make_hybrid_checkpoint(tmp_path, family)
    fields = json.loads((path / "config.json").read_text())
    weights = qwen_mtp_weights(fields, fused=fused)
    add_tensors(path, weights, "mtp.")
    own = load_file(path / "model.safetensors")
    config = with_drafter(read_model_config(path), "mtp")
    reference = QwenMTP(weights, fields, own["model.embed_tokens.weight"], own["lm_head.weight"])
    check(load_drafting(config), config, reference, 48)


@pytest.mark.parametrize("family", ["deepseek_v3", "deepseek_v32"])
def test_mtp_of_deepseek(tmp_path: Path, family: str) -> None:
    options = (
        {"index_topk": 64} if family == "deepseek_v32" else {}
    )  # as many as there are tokens: the choice changes nothing
    path, _ = make_latent_checkpoint(tmp_path, family, **options)
    fields = json.loads((path / "config.json").read_text())
    weights = deepseek_mtp_weights(fields)
    own = load_file(path / "model.safetensors")
    embed, head = own["model.embed_tokens.weight"], own["lm_head.weight"]
    copies = {"embed_tokens.weight": embed.clone(), "shared_head.head.weight": head.clone()}
    add_tensors(path, weights | copies, "model.layers.3.", num_nextn_predict_layers=1)
    config = with_drafter(read_model_config(path), "mtp")
    check(load_drafting(config), config, DeepseekMTP(weights, fields, embed, head), 48)


def test_mtp_of_deepseek_v4(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, _ = make_compressed_checkpoint(tmp_path)
    fields = json.loads((path / "config.json").read_text())
    rope = (
        {"rope_theta": fields["rope_parameters"]["main"]["rope_theta"]}
        if "main" in fields["rope_parameters"]
        else fields["rope_parameters"]
    )
    weights = deepseek_v4_mtp_weights(fields)
    add_tensors(path, weights, "mtp.0.", num_nextn_predict_layers=1)
    own = load_file(path / "model.safetensors")
    config = with_drafter(read_model_config(path), "mtp")
    head = own.get("lm_head.weight", own.get("head.weight"))
    embed = own.get("model.embed_tokens.weight", own.get("embed.weight"))
    reference = DeepseekV4MTP(weights, fields | {"rope_parameters": rope, "qk_rope_head_dim": 8}, embed, head)
    model = load_drafting(config)
    check(model, config, reference, 3 * 48)
    # a graph's padding goes to no expert
    monkeypatch.setattr(small, "serves", lambda *tensors: False)  # CPU kernels, which know no padding
    batch, routed = DraftHarness(model, config, 1).batch([(0, range(4))], torch.arange(4)), []
    batch.rows.row_T[2:] = -1
    experts = model.drafter.layer.ffn.experts.method
    own = experts.apply
    monkeypatch.setattr(experts, "apply", lambda x, routes, *more: routed.append(routes) or own(x, routes, *more))
    with torch.inference_mode():
        model.drafter.first(torch.randn(4, 3 * 48), batch)
    assert [(row < 0).all().item() for row in routed[0].experts_TA] == [False, False, True, True]


def _taken(
    model: Any, config: Any, ids: torch.Tensor, takes: Takes, *, alone: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Hidden states and what is taken of one sequence, in two steps."""
    harness, model.model.takes = DraftHarness(model, config, 1, whole=True), takes
    found = []
    with torch.inference_mode():
        for span in (range(21), range(21, len(ids))):
            batch = replace(harness.batch([(0, span)], ids[span.start : span.stop]), last_alone=alone)
            found.append([part.clone() for part in model.run(batch)])
    hidden, taken = (torch.cat(parts) for parts in zip(*found, strict=True))
    return hidden, taken


@pytest.mark.parametrize("family", ["qwen3", "gpt_oss", "qwen3_next", "qwen3_moe", "deepseek_v3"])
def test_what_is_taken_of_the_target(tmp_path: Path, family: str) -> None:
    import transformers

    path = MAKERS[family](tmp_path)
    reference = transformers.AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager")
    config = read_model_config(path)
    model, layers = load(path)[0], config.num_layers
    ids = torch.randint(config.vocab_size, (40,), generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        states = [state[0] for state in reference(ids[None], output_hidden_states=True).hidden_states]
    some = tuple(dict.fromkeys((1, layers - 1, 0)))  # not in the order of the layers
    hidden, taken = _taken(model, config, ids, some)
    torch.testing.assert_close(taken, torch.cat([states[layer] for layer in some], 1), atol=2e-5, rtol=1e-4)
    torch.testing.assert_close(hidden, states[-1], atol=2e-5, rtol=1e-4)
    final, taken = _taken(model, config, ids, "final")
    assert torch.equal(final, hidden) and torch.equal(taken, hidden)
    # hidden states of sampled tokens alone; all that is taken
    sampled, again = _taken(model, config, ids, some, alone=True)
    torch.testing.assert_close(again, torch.cat([states[layer] for layer in some], 1), atol=2e-5, rtol=1e-4)
    torch.testing.assert_close(sampled, hidden[[20, 39]], atol=2e-5, rtol=1e-4)
    # the last layer's output is wanted of every token: nothing is dropped
    every, last = _taken(model, config, ids, (layers,), alone=True)
    assert len(every) == 40
    torch.testing.assert_close(model.model.norm(last), every, atol=2e-5, rtol=1e-4)


def test_streams_are_taken_before_they_are_one(tmp_path: Path) -> None:
    path, _ = make_compressed_checkpoint(tmp_path)
    model, config = load(path)
    hidden, taken = _taken(model, config, torch.arange(40), "streams", alone=True)
    streams = taken.unflatten(1, (3, 48))
    with torch.inference_mode():
        sampled = model.model.hc_head(Streams(streams[[20, 39]]), model.model.norm)
    torch.testing.assert_close(hidden[[20, 39]], sampled)
    assert len(hidden) == 40  # of every token, though sampled ones alone were asked for


def _check_ranks(config: ModelConfig, reference: Reference, taken_size: int, directory: Path) -> None:
    """Two ranks draft what one does."""

    def act(comm: GlooComm) -> None:
        with torch.inference_mode():
            model, share = build_share(config, "float32", "cpu", comm.rank, comm.size)
            join_ranks(model, share, comm)
            drafter, own = model.drafter, share_of_drafter(share.whole, share)  # type: ignore[arg-type]
            assert drafter is not None and config.drafter is not None
            if not drafter.prefix:
                join_ranks(drafter, own, comm)
            materialize(model, torch.full((weights_bytes(model),), 255, dtype=torch.uint8))
            load_weights(model, config.path, share=share)
            if not drafter.prefix:
                load_weights(drafter, config.drafter.path, share=own)
            (narrow,) = configs_of_ranks(config, "float32", "cpu", comm.size)
            assert narrow.specs("float32") != config.specs("float32") or config.family.startswith("deepseek")
            check(model, narrow, reference, taken_size, DividedVocabulary(comm, token_ids(share)))

    in_ranks(2, directory, act)


@pytest.mark.parametrize("own", [False, True])
def test_ranks_of_eagle3(tmp_path: Path, own: bool) -> None:
    """Heads and inner features are divided, of a drafter with another number of both than the target. `own`: so is its embedding."""
    target = make_checkpoint(tmp_path, "llama", num_hidden_layers=8, tokenizer=False)
    fields = EAGLE | {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 8}
    weights = eagle_weights(fields)
    tensors = load_file(target / "model.safetensors")
    embed = tensors["model.embed_tokens.weight"]
    if own:
        weights["embed_tokens.weight"] = embed = embed + 1
    path = write_drafter(tmp_path / "head", fields, weights)
    config = with_drafter(read_model_config(target), "eagle3", str(path))
    _check_ranks(config, EagleLayers(weights, fields, embed, tensors["lm_head.weight"]), 3 * 64, tmp_path / "ranks")


@pytest.mark.parametrize("family", ["qwen3_5_moe", "deepseek_v3"])
def test_ranks_of_modules(tmp_path: Path, family: str) -> None:
    make: Any = make_hybrid_checkpoint if family.startswith("qwen") else make_latent_checkpoint
    path, _ = make(tmp_path, family)
    fields = json.loads((path / "config.json").read_text())
    weights = qwen_mtp_weights(fields) if family.startswith("qwen") else deepseek_mtp_weights(fields)
    prefix = "mtp." if family.startswith("qwen") else "model.layers.3."
    add_tensors(path, weights, prefix, num_nextn_predict_layers=1)
    own = load_file(path / "model.safetensors")
    reference = (QwenMTP if family.startswith("qwen") else DeepseekMTP)(
        weights, fields, own["model.embed_tokens.weight"], own["lm_head.weight"]
    )
    _check_ranks(with_drafter(read_model_config(path), "mtp"), reference, 48, tmp_path / "ranks")


@pytest.mark.parametrize("recipe", ["fp8 block", "compressed-tensors channel"])
def test_a_module_in_floats_in_a_quantised_checkpoint(tmp_path: Path, recipe: str) -> None:
    """Quantised checkpoints leave the module's first product, or all of the module, in floats; their lists don't say so."""
    path, _ = make_hybrid_checkpoint(tmp_path, "qwen3_5", hidden_size=96, intermediate_size=96)
    fields = json.loads((path / "config.json").read_text())
    weights = qwen_mtp_weights(fields)
    quantise(path, recipe)
    add_tensors(path, weights, "mtp.")
    own = load_file(path / "model.safetensors")
    config = with_drafter(read_model_config(path), "mtp")
    assert config.format is not None
    reference = QwenMTP(weights, fields, own["model.embed_tokens.weight"], own["lm_head.weight"])
    check(load_drafting(config), config, reference, 96)


def test_a_head_in_floats_for_a_quantised_target(tmp_path: Path) -> None:
    target = make_checkpoint(tmp_path, "llama", num_hidden_layers=8, tokenizer=False)
    quantise(target, "compressed-tensors channel")
    weights = eagle_weights(EAGLE)
    config = with_drafter(read_model_config(target), "eagle3", str(write_drafter(tmp_path / "head", EAGLE, weights)))
    own = load_file(target / "model.safetensors")
    reference = EagleLayers(weights, EAGLE, own["model.embed_tokens.weight"], own["lm_head.weight"])
    check(load_drafting(config), config, reference, 3 * 64)


def test_a_quantised_module(tmp_path: Path) -> None:
    """What the file holds of the module in few bits is read as such."""
    path, _ = make_hybrid_checkpoint(tmp_path, "qwen3_5", hidden_size=96, intermediate_size=96)
    fields = json.loads((path / "config.json").read_text())
    add_tensors(path, qwen_mtp_weights(fields), "mtp.")
    meant = quantise(path, "fp8 block")
    weights = {name.removeprefix("mtp."): tensor for name, tensor in meant.items() if name.startswith("mtp.")}
    config = with_drafter(read_model_config(path), "mtp")
    reference = QwenMTP(weights, fields, meant["model.embed_tokens.weight"], meant["lm_head.weight"])
    check(load_drafting(config), config, reference, 96)


def test_a_module_of_published_deepseek_v4(tmp_path: Path) -> None:
    """fp8 blocks and fp4 experts, in the module as in the layers."""
    path, _ = make_published_checkpoint(tmp_path)
    fields = json.loads((path / "config.json").read_text())
    weights = deepseek_v4_mtp_weights(fields)
    tensors: Weights = {}
    for name, weight in weights.items():
        base = name.removesuffix(".weight")
        if ".experts." in name:
            packed, weights[name] = packers.deepseek(weight)
            tensors |= {f"{base}.{suffix}": tensor for suffix, tensor in packed.items()}
        elif re.search(r"(w[oq]_[ab]|wkv|shared_experts.w\d|[eh]_proj).weight$", name):
            tensors[name], tensors[f"{base}.scale"], weights[name] = fp8(weight)
        else:
            tensors[name] = weight
    file = path / "model.safetensors"
    held = load_file(file)
    save_file({name: tensor for name, tensor in held.items() if not name.startswith("mtp.")}, file)
    add_tensors(path, tensors, "mtp.0.", num_nextn_predict_layers=1)
    config = with_drafter(read_model_config(path), "mtp")
    rope = {"rope_theta": fields["rope_parameters"]["main"]["rope_theta"]}
    more = {"rope_parameters": rope, "qk_rope_head_dim": 8}
    reference = DeepseekV4MTP(
        weights, fields | more, held["embed.weight"], held.get("head.weight", held.get("lm_head.weight"))
    )
    check(load_drafting(config), config, reference, 3 * 160)
