"""The model of one of several ranks: it has the sizes of the rank's share, and computes the whole model's output together with the others.

A rank's model is built from a narrower config. Its files know nothing of ranks: where columns of a matrix, or token ids, are divided, the
layer's form is put into another one that sums up (quant/ranked.py). Logits are those of the rank's own token ids.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate
from math import prod

from pagerunner.config import Dtype
from pagerunner.dist.base import Comm
from pagerunner.errors import ConfigError
from pagerunner.layers.embedding import Embedding, vocabulary
from pagerunner.layers.linear import Linear
from pagerunner.layers.module import CheckpointTensor, Module
from pagerunner.layers.moe import Experts
from pagerunner.layers.norm import GatedRMSNorm
from pagerunner.layers.shares import Share, shape_of
from pagerunner.models.checkpoint.loader import Model, build_model
from pagerunner.models.configs.base import ExpertShare, ModelConfig
from pagerunner.quant.ranked import ExpertsOfTeams, OfVocabulary, Summed, SummedExperts


def build_share(
    config: ModelConfig,
    dtype: Dtype,
    device: str,
    rank: int,
    ranks: int,
    team: int = 0,
    teams: int = 1,
    *,
    layers: range | None = None,
    keep_forms: bool | None = None,
) -> tuple[Model, Share]:
    """The model of one of the `ranks` ranks of a stage with these `layers`, as `build_model` makes it, and its share of the whole model `config`.

    Of several `teams` each has a rank like this, with other experts. Until `join_ranks` its products are those of its part alone.

    Raises:
        ConfigError: the model can't be divided among so many ranks.
    """
    # where matrices may be cut depends on their forms
    keep = device.startswith("cuda") if keep_forms is None else keep_forms
    whole = build_model(config, dtype, keep_forms=keep)
    share = Share.of(whole, rank, ranks, team, teams)
    return build_model(_of_rank(config, whole, share), dtype, device, keep_forms=keep, layers=layers), share


LAYERS_OF_STAGES = "PAGERUNNER_PP_LAYER_PARTITION"
"""A variable of the environment: how many layers each stage has, as "9,10,9"."""


def layers_of_stages(count: int, stages: int, asked: str = "") -> list[range]:
    """The layers of each stage, of `count` in all: equally many, but that those before the last one have one more where that doesn't come out.

    The last stage has the output weights, too. `asked` is how many layers each stage is to have, as LAYERS_OF_STAGES says.

    Raises:
        ConfigError: there are fewer layers than stages, or `asked` says something else.
    """
    if stages > count:
        raise ConfigError(
            f"pipeline_parallel_size={stages}: the model has {count} layers, of which each stage needs one. Lower it to {count} or less."
        )
    more = range(stages - 1 - count % stages, stages - 1)
    sizes = [count // stages + (stage in more) for stage in range(stages)]
    if asked:
        said = asked.split(",")
        sizes = [int(size) if size.strip().isdecimal() else 0 for size in said]
        if len(sizes) != stages or sum(sizes) != count or min(sizes) < 1:
            raise ConfigError(
                f"{LAYERS_OF_STAGES}={asked!r} must be {stages} numbers of at least 1, one for each stage of pipeline_parallel_size={stages}, "
                f"which add up to the model's {count} layers."
            )
    ends = list(accumulate(sizes))
    return [range(end - size, end) for end, size in zip(ends, sizes, strict=True)]


def _of_rank(config: ModelConfig, whole: Model, share: Share) -> ModelConfig:
    """The config of the model of the share's rank. Raises ConfigError if there are fewer experts than ranks."""
    own, (rank, ranks) = config.of_rank(share.counts), share.of_experts
    if config.drafter is not None:
        own = replace(own, drafter=config.drafter.of_rank(share_of_drafter(whole, share).counts))
    if config.expert_share is None:
        return own
    sizes = {module.sizes for module in whole.modules() if isinstance(module, Experts)}
    if not sizes:
        engines = f" Without it there are {share.teams} whole engines." if share.teams > 1 else ""
        raise ConfigError(f"enable_expert_parallel divides whole experts among ranks, and the model has none.{engines}")
    if ranks > (fewest := min(one.experts for one in sizes)):
        raise ConfigError(
            f"enable_expert_parallel: the model's {fewest} experts can't be divided among {ranks} ranks; at most {fewest} work."
        )
    (inner,) = {one.inner for one in sizes}
    return replace(own, expert_share=ExpertShare(rank, ranks, inner))


def share_of_drafter(whole: Model, share: Share) -> Share:
    """A rank's share of the drafter of the `whole` model, of which it has a `share`. A drafter in the model's own checkpoint is part of that share."""
    drafter = whole.drafter
    assert drafter is not None
    return share if drafter.prefix else Share.of(drafter, share.rank, len(share.ranks))


def configs_of_ranks(config: ModelConfig, dtype: Dtype, device: str, ranks: int, teams: int = 1) -> list[ModelConfig]:
    """The configs of the models that the ranks of each team have, equal ones once. Of ranks with unequally many experts it is one with most.

    Raises:
        ConfigError: the model can't be divided among so many ranks.
    """
    if ranks * teams == 1:
        return [config]
    whole = build_model(config, dtype, keep_forms=device.startswith("cuda"))
    share = Share.of(whole, 0, ranks, teams - 1, teams)  # the last team has most experts
    shares = [replace(share, rank=rank) for rank in range(ranks)]
    # of equal ones the last, for the same reason
    different = {repr(share.counts): share for share in shares}
    return [_of_rank(config, whole, share) for share in different.values()]


def join_ranks(model: Module, share: Share, comm: Comm, teams: Comm | None = None) -> None:
    """Make the layers of a rank's `model` compute what the whole model's do, together with those of the other ranks.

    `comm` joins the ranks of the team, `teams` those of all teams if there are several.
    To be called when layers have their forms, and before they have memory.

    Raises:
        ConfigError: the checkpoint orders columns of a matrix by group, so that ranks would need all of its inputs.
    """
    declared: dict[Module, list[CheckpointTensor]] = {}
    for tensor in model.checkpoint():
        declared.setdefault(tensor.owner, []).append(tensor)
    whole = {tensor.name: tensor for tensor in share.whole.checkpoint()}
    for layer, tensors in declared.items():
        if isinstance(layer, Linear):
            matrices = [whole[one.name] for one in tensors if len(one.sink.shape) == 2]
            layer.most_weights = max(sum(prod(shape_of(one, parts)) for one in matrices) for parts in share.ranks)
        if isinstance(layer, Experts) and teams is not None:
            assert layer.own is not None, "teams divide whole experts"
            layer.store(ExpertsOfTeams(layer.method, teams, layer.own, share.teams))
        elif comm.size == 1:
            continue
        elif isinstance(layer, Experts):
            if layer.own is None:
                _check_divided(tensors)
            layer.store(SummedExperts(layer.method, comm, layer.own))
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
