"""Updates of a model that has weights: what may come, what must come together, and that what has come is what a load gives."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from helpers.checkpoints import make_checkpoint
from helpers.quantise import quantise
from pagerunner.errors import CheckpointError, InvalidRequestError
from pagerunner.models.checkpoint.loader import Copies, Model, build_model, load_weights, materialize, weights_bytes
from pagerunner.models.checkpoint.panels import store_in_panels
from pagerunner.models.checkpoint.ranks import build_share
from pagerunner.models.checkpoint.updates import Update, pieces
from pagerunner.models.configs.reader import read_model_config
from pagerunner.types.weights import UpdateWeights, WeightTransferUpdateRequest, read_request

PACKED = ["awq", "gptq zeros permuted", "compressed-tensors channel", "nvfp4"]
SIZES = {"hidden_size": 128, "intermediate_size": 256, "head_dim": 32}


def checkpoint(path: Path, kind: str, seed: int) -> Path:
    made = make_checkpoint(path, "llama", seed=seed, **SIZES)
    if kind in PACKED:
        quantise(made, kind)
    return made


def loaded(path: Path, kind: str, keep: bool) -> tuple[Model, Update]:
    """A model, and an update of it."""
    config = read_model_config(path)
    share = None
    if kind == "rank":
        model, share = build_share(config, "float32", "cpu", 1, 2)
    else:
        model = build_model(config, "float32", keep_forms=keep)
    if kind == "panels":
        store_in_panels(model)
    materialize(model, torch.full((weights_bytes(model),), 255, dtype=torch.uint8))
    load_weights(model, path, share=share)
    return model, Update(model, share, whole=False, quantised=config.format is not None)


def held(model: Model) -> list[torch.Tensor]:
    return [tensor.flatten().view(torch.uint8).clone() for one in model.modules() for tensor in one.weights.values()]


def take(update: Update, tensors: Iterable[tuple[str, torch.Tensor]], packed_bytes: int = 0) -> int:
    """Send tensors as a trainer does; returns how many pieces there were."""
    sent = list(tensors)
    asked = UpdateWeights(
        names=[name for name, _ in sent],
        dtype_names=[str(tensor.dtype).removeprefix("torch.") for _, tensor in sent],
        shapes=[list(tensor.shape) for _, tensor in sent],
        packed=bool(packed_bytes),
        packed_buffer_size_bytes=packed_bytes or 1,
    )
    data = torch.cat([tensor.reshape(-1).view(torch.uint8) for _, tensor in sent])
    claimed = update.claim(asked)
    received: list[int] = []
    room = torch.empty(claimed.largest, dtype=torch.uint8)

    def receive(num_bytes: int) -> torch.Tensor:
        received.append(num_bytes)
        room.fill_(255)  # the piece before, if it is still read, is NaN now
        return room[:num_bytes].copy_(data[sum(received) - num_bytes : sum(received)])

    try:
        update.take(claimed, receive)
    finally:
        assert sum(received) == len(data) and max(received) == len(room)
    return len(received)


@pytest.mark.parametrize(
    ("kind", "keep"),
    [(kind, False) for kind in ("", "panels", "rank", *PACKED)] + [(kind, True) for kind in PACKED],
)
def test_all_tensors_of_another_checkpoint_make_its_model(kind: str, keep: bool, tmp_path: Path) -> None:
    first, second = (checkpoint(tmp_path, kind, seed) for seed in range(2))
    model, update = loaded(first, kind, keep)
    want = held(loaded(second, kind, keep)[0])
    assert not all(map(torch.equal, held(model), want))
    tensors = list(load_file(second / "model.safetensors").items())
    assert take(update, tensors[: len(tensors) // 2]) > 5
    assert take(update, tensors[len(tensors) // 2 :], packed_bytes=60_000) > 1
    update.finish()
    assert all(map(torch.equal, held(model), want))


def test_a_matrix_in_few_bits_comes_with_its_scales(tmp_path: Path) -> None:
    path = checkpoint(tmp_path, "awq", 0)
    _, update = loaded(path, "awq", True)
    name = "model.layers.0.mlp.down_proj"
    tensors = {
        tensor: held for tensor, held in load_file(path / "model.safetensors").items() if tensor.startswith(name)
    }
    assert len(tensors) == 3
    take(update, [(f"{name}.qweight", tensors[f"{name}.qweight"])])
    with pytest.raises(InvalidRequestError, match=rf"lacks the tensor {name}.qzeros and 1 more"):
        update.finish()
    take(update, [one for one in tensors.items() if not one[0].endswith("qweight")])
    update.finish()


@pytest.mark.parametrize(
    ("name", "tensor", "said"),
    [
        ("model.layers.0.mlp.up_proj.weight", torch.ones(1, 128), r"has shape \[1, 128\]"),
        ("model.norm.weight", torch.ones(128, dtype=torch.int8), "has dtype int8"),
        ("model.norm.bias", torch.ones(128), "is not part of the model"),
        ("model.layers.0.self_attn.k_scale", torch.ones(1), "scales keys and values"),
    ],
)
def test_other_tensors_are_refused_before_any_byte_comes(
    name: str, tensor: torch.Tensor, said: str, tmp_path: Path
) -> None:
    model, update = loaded(checkpoint(tmp_path, "", 0), "", False)
    before = held(model)
    with pytest.raises(InvalidRequestError, match=said):
        take(update, [("model.layers.0.input_layernorm.weight", torch.zeros(128)), (name, tensor)])
    assert all(map(torch.equal, held(model), before))


def test_a_tensor_comes_once_and_holds_numbers(tmp_path: Path) -> None:
    _, update = loaded(checkpoint(tmp_path, "", 0), "", False)
    take(update, [("model.norm.weight", torch.ones(128))])
    with pytest.raises(InvalidRequestError, match="the same tensor of the model twice"):
        take(update, [("model.norm.weight", torch.ones(128))])
    bad = torch.ones(512, 128)
    bad[3, 4] = torch.inf
    with pytest.raises(CheckpointError, match=r"lm_head\.weight holds inf at \[3, 4\]; weights must be finite\.$"):
        take(update, [("lm_head.weight", bad)])


@pytest.mark.parametrize("error", [RuntimeError("a copy has failed"), torch.OutOfMemoryError("for a copy")])
def test_all_pieces_are_received_whatever_fails(
    error: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The trainer and other ranks go on, and would wait for this one. The helper looks whether all bytes have come."""
    _, update = loaded(checkpoint(tmp_path, "", 0), "", False)

    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr(Copies, "add", fail)
    layers = [(f"model.layers.{layer}.input_layernorm.weight", torch.ones(128)) for layer in range(2)]
    with pytest.raises(type(error), match="for a copy|a copy has failed"):
        take(update, [("model.norm.weight", torch.ones(128)), *layers])


@pytest.mark.parametrize(
    ("shape", "said"),
    [
        ([2**40, 2**40], r"shapes has \[1099511627776, 1099511627776\] for 'lm_head\.weight'; .* fewer than 2\^48"),
        ([0, 2**40, 2**40], "fewer than 2"),
        ([1] * 9, "length <= 8"),
    ],
)
def test_shapes_that_no_tensor_has_are_refused_when_they_are_read(shape: list[int], said: str) -> None:
    given = {"update_info": {"names": ["lm_head.weight"], "dtype_names": ["float32"], "shapes": [shape]}}
    with pytest.raises(InvalidRequestError, match=said):
        read_request(given, WeightTransferUpdateRequest)


@pytest.mark.parametrize(
    ("most", "found"), [(0, [1, 1, 1, 1]), (5, [2, 2]), (6, [3, 1]), (8, [3, 1]), (9, [4]), (100, [4])]
)
def test_a_piece_ends_with_the_tensor_that_makes_it_too_large(most: int, found: list[int]) -> None:
    assert [len(piece) for piece in pieces([2, 4, 3, 1], most)] == found
    assert [number for piece in pieces([2, 4, 3, 1], most) for number in piece] == [0, 1, 2, 3]
