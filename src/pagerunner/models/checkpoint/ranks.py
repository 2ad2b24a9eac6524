"""The model of one of several ranks: it has the sizes of the rank's share, and computes the whole model's output together with the others.

A rank's model is built from a narrower config. Its files know nothing of ranks: where columns of a matrix, or token ids, are divided, the
layer's form is put into another one that sums up (quant/ranked.py). Logits are those of the rank's own token ids.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from pagerunner.config import Dtype
from pagerunner.dist.base import Comm
from pagerunner.errors import ConfigError
from pagerunner.layers.embedding import Embedding, vocabulary
from pagerunner.layers.linear import Linear
from pagerunner.layers.module import CheckpointTensor, Module
from pagerunner.layers.moe import Experts
from pagerunner.layers.norm import GatedRMSNorm
from pagerunner.layers.shares import Share
from pagerunner.models.checkpoint.loader import Model, build_model
from pagerunner.models.configs.base import ModelConfig
from pagerunner.quant.ranked import OfVocabulary, Summed, SummedExperts


def build_share(
    config: ModelConfig, dtype: Dtype, device: str, rank: int, ranks: int, *, keep_forms: bool | None = None
) -> tuple[Model, Share]:
    """The model of one of `ranks` ranks, as `build_model` makes it, and its share of the whole model `config`.

    Until `join_ranks` its products are those of its part alone.

    Raises:
        ConfigError: the model can't be divided among so many ranks.
    """
    # where matrices may be cut depends on their forms
    keep = device.startswith("cuda") if keep_forms is None else keep_forms
    share = Share.of(build_model(config, dtype, keep_forms=keep), rank, ranks)
    return build_model(config.of_rank(share.counts), dtype, device, keep_forms=keep), share


def configs_of_ranks(config: ModelConfig, dtype: Dtype, device: str, ranks: int) -> list[ModelConfig]:
    """The configs of the models that the ranks have, equal ones once.

    Raises:
        ConfigError: the model can't be divided among so many ranks.
    """
    if ranks == 1:
        return [config]
    whole = build_model(config, dtype, keep_forms=device.startswith("cuda"))
    share = Share.of(whole, 0, ranks)
    found = {repr(own): own for own in (replace(share, rank=rank).counts for rank in range(ranks))}
    return [config.of_rank(own) for own in found.values()]


def join_ranks(model: Model, share: Share, comm: Comm) -> None:
    """Make the layers of a rank's `model` compute what the whole model's do, together with those of the other ranks.

    To be called when layers have their forms, and before they have memory.

    Raises:
        ConfigError: the checkpoint orders columns of a matrix by group, so that ranks would need all of its inputs.
    """
    declared: dict[Module, list[CheckpointTensor]] = {}
    for tensor in model.checkpoint():
        declared.setdefault(tensor.owner, []).append(tensor)
    for layer, tensors in declared.items():
        if isinstance(layer, Experts):
            _check_divided(tensors)
            layer.store(SummedExperts(layer.method, comm))
        elif isinstance(layer, Linear | Embedding) and _has_token_ids(tensors):
            layer.store(OfVocabulary(layer.method, comm, token_ids(share)[comm.rank]))
        elif isinstance(layer, Linear) and layer.cut is not None and layer.cut.axis == "inputs":
            _check_divided(tensors)
            layer.store(Summed(layer.method, comm))
        elif isinstance(layer, GatedRMSNorm):
            layer.comm = comm


def token_ids(share: Share) -> list[range]:
    """The token ids that each rank embeds, and whose logits it computes."""
    (ids,) = (features for features in share.parts if features.name == vocabulary(1).name)
    return [parts[ids] for parts in share.ranks]


def _has_token_ids(tensors: Sequence[CheckpointTensor]) -> bool:
    """Whether the tensors have a row for each token id."""
    cuts = [tensor.cut for tensor in tensors if tensor.cut is not None]
    return any(section.features.name == vocabulary(1).name for cut in cuts for section in cut.sections)


def _check_divided(tensors: Sequence[CheckpointTensor]) -> None:
    if all(tensor.cut is None for tensor in tensors):
        raise ConfigError(
            f"{tensors[0].name}: columns that are ordered by group (desc_act) can't be divided among ranks."
        )
