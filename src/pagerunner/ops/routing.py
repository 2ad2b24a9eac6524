"""Which experts a token goes to, with what weight. Shape letters: T tokens, E experts, A chosen experts, G expert groups, P pairs.

A pair is a token and one of its experts; pair `t * A + a` is token t's a-th. All in float32, as in the models' own code.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F

from pagerunner.ops import numerics
from pagerunner.ops.dispatch import gpu_kernel
from pagerunner.ops.linear import Norm
from pagerunner.ops.native import mixture, small


class Routing(NamedTuple):
    """How tokens find `active` experts.

    `scores` are a softmax over all experts, or a sigmoid or the root of a softplus of each logit. The experts with the largest logits
    are chosen; with a bias, those with the largest sums of score and bias. Their scores without the bias are their weights.

    `normalise` makes a token's weights add up to 1. Afterwards they are multiplied by `factor`.

    The experts stand in `groups` equal groups. Only those of the `kept_groups` best groups are eligible. A group counts with its best expert,
    or, where there is a bias, with the sum of its two best ones.

    Families: Qwen3 and DeepSeek-V2 are softmax (Shazeer et al. 2017), gpt-oss is a normalised softmax (the same as a softmax over the
    chosen logits), DeepSeek-V3 is sigmoid with a bias and groups (arXiv 2412.19437, section 2.1.2), DeepSeek-V4 a softplus's root, Llama-4 a sigmoid.
    """

    active: int
    scores: Literal["softmax", "sigmoid", "sqrtsoftplus"] = "softmax"
    normalise: bool = False
    factor: float = 1.0
    groups: int = 1
    kept_groups: int = 1


TILE_PAIRS = 16
"""Pairs of an expert that one program of the experts' products has, where an expert has few."""


class Tiles(NamedTuple):
    """Blocks of up to TILE_PAIRS pairs of an expert, for kernels on a GPU, int32.

    `places` [3, 2 E] are each tile's expert, its first pair in the experts' order, and the end of the expert's pairs. The expert is E where there are
    fewer tiles. Where there are more than 2 E, nothing is there to be read. Kernels count in `counts` [8 E], which holds zeros before and behind them.
    Where `ranks` divide the experts, there is room for E times the ranks, as all pairs may be one rank's.
    """

    places: torch.Tensor
    counts: torch.Tensor


class Routes(NamedTuple):
    """Where the tokens of a step go: float32 weights [T, A] and expert numbers [T, A].

    Number -1 is no expert: the token is a graph's padding. Kernels also say which pairs an expert has: those of expert e are
    `order[starts[e] : starts[e + 1]]`, both int32, and their tiles, unless there is one token.
    Twins leave these out. Experts that are not one of several `ranks`' have number -1, too. `most_tokens`: see `ForwardBatch`.
    """

    weights_TA: torch.Tensor
    experts_TA: torch.Tensor
    order_P: torch.Tensor | None = None
    starts_E1: torch.Tensor | None = None
    tiles: Tiles | None = None
    ranks: int = 1
    most_tokens: int = 0

    @property
    def expected(self) -> int:
        """How many pairs have an expert, on average: kernels are chosen by it. Memory and grids have room for all."""
        return -(-self.experts_TA.numel() // self.ranks)


class Here(NamedTuple):
    """So many experts of one of several `ranks`, from the `first` on."""

    first: int
    count: int
    ranks: int


_counts: list[None] = []  # one element for each measurement that runs


@contextlib.contextmanager
def counting_experts() -> Iterator[None]:
    """Let all threads count the experts that any token of a step was sent to: see `touched_experts`.

    A graph counts if it was captured in here, so a measurement builds its engine in here. Padding of a graph goes to no expert.
    """
    _counts.append(None)
    try:
        yield
    finally:
        _counts.pop()


def counts_experts() -> bool:
    """Whether a measurement counts experts."""
    return bool(_counts)


@functools.cache
def touched_experts(device: torch.device) -> torch.Tensor:
    """How many experts the products on this device have read where they were counted, and in how many calls: int64 [2].

    A measurement reads the difference of two moments.
    """
    with torch.inference_mode(False):  # whoever counts first may be in inference mode, and others not
        return torch.zeros(2, dtype=torch.int64, device=device)


@gpu_kernel("moe.moe_logits")
def expert_logits(
    x_TD: torch.Tensor, weight_ED: torch.Tensor, bias_E: torch.Tensor | None = None, *, fixed: bool = False
) -> torch.Tensor:
    """`x @ weight.T + bias` in float32, [T, E]. `fixed`: on a CUDA device by one product for any number of tokens; see `Fixed` in ops/numerics.py."""
    return F.linear(x_TD.float(), weight_ED.float(), None if bias_E is None else bias_E.float())


expert_logits.on_cpu(mixture.expert_logits)


def few_tokens(tokens: int) -> bool:
    """Whether each of so many tokens has programs of its own in `norm_expert_logits` on a CUDA device."""
    return tokens <= numerics.FAST.router.few_tokens


@gpu_kernel("moe.moe_logits")
def norm_expert_logits(
    x_TD: torch.Tensor,
    norm: Norm,
    weight_ED: torch.Tensor,
    bias_E: torch.Tensor | None = None,
    other_TD: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """`x` [T, D], its norm [T, D], and `expert_logits` of that [T, E]; of `x + other` where there is an `other`.

    The sum may stand in the place of `x` afterwards.
    """
    normed_TD = norm(x_TD) if other_TD is None else norm.add_(other_TD, x_TD)
    return x_TD, normed_TD, expert_logits(normed_TD, weight_ED, bias_E)


@gpu_kernel("moe.moe_routing")
def route(
    logits_TE: torch.Tensor,
    routing: Routing,
    bias_E: torch.Tensor | None = None,
    chosen_TA: torch.Tensor | None = None,
    row_T: torch.Tensor | None = None,
    here: Here | None = None,
    *,
    fixed: bool = False,
) -> Routes:
    """Each token's experts and their weights. Where `chosen` says which experts these are, only their weights are computed.

    Tokens whose `row`, int32, is negative are a graph's padding. They go to no expert: their numbers are -1 and their weights 0.
    `here`: the routes to these experts alone, as `own_experts` says.
    `fixed`: kernels make a token's sums in one order for any number of tokens. The twin's are those of torch.
    """
    scores_TE = _scores(logits_TE.float(), routing.scores)
    if chosen_TA is None:
        choice_TE = logits_TE.float() if bias_E is None else scores_TE + bias_E
        choice_TE = _of_kept_groups(choice_TE, routing, 1 if bias_E is None else 2)
        experts_TA = choice_TE.topk(routing.active, dim=-1).indices
    else:
        experts_TA = chosen_TA
    weights_TA = scores_TE.gather(-1, experts_TA)
    if routing.normalise:
        weights_TA = weights_TA / (weights_TA.sum(-1, keepdim=True) + 1e-20)
    weights_TA = weights_TA * routing.factor
    if row_T is not None:
        padding_T1 = (row_T < 0).unsqueeze(-1)
        weights_TA, experts_TA = weights_TA.masked_fill(padding_T1, 0.0), experts_TA.masked_fill(padding_T1, -1)
    if counts_experts():
        read = experts_TA[experts_TA >= 0].unique()
        touched_experts(logits_TE.device).add_(torch.tensor([len(read), 1], device=logits_TE.device))
    routes = Routes(weights_TA, experts_TA)
    return routes if here is None else own_experts(experts_TA, routes, *here)


@gpu_kernel("moe.moe_routing")
def own_experts(experts_TA: torch.Tensor, routes: Routes, first: int, count: int, ranks: int) -> Routes:
    """The routes to `count` of their `experts` from `first` on, numbered from 0. Other pairs, those of other `ranks`, have no expert, and weight 0."""
    here_TA = (experts_TA >= first) & (experts_TA < first + count)
    own_TA = (experts_TA - first).masked_fill_(~here_TA, -1)
    return Routes(routes.weights_TA.masked_fill(~here_TA, 0.0), own_TA, ranks=ranks)


@route.on_cpu
def _route_on_cpu(
    logits_TE: torch.Tensor,
    routing: Routing,
    bias_E: torch.Tensor | None = None,
    chosen_TA: torch.Tensor | None = None,
    row_T: torch.Tensor | None = None,
    here: Here | None = None,
    *,
    fixed: bool = False,
) -> Routes:
    # a recorded step's rows aren't read here; a CPU's steps have no padding, as each number of rows has a recording
    # of any number of tokens: of equal logits all steps take the first ones, and torch takes others
    choice = chosen_TA is None and logits_TE.is_contiguous()
    if not choice or not small.serves(logits_TE, *(() if bias_E is None else (bias_E,))):
        return NotImplemented
    touched = touched_experts(logits_TE.device) if counts_experts() else None
    routes = Routes(*mixture.route(logits_TE, routing, bias_E, touched))
    return routes if here is None else own_experts(routes.experts_TA, routes, *here)


def _scores(logits_TE: torch.Tensor, kind: str) -> torch.Tensor:
    if kind == "softmax":
        return logits_TE.softmax(-1)
    return logits_TE.sigmoid() if kind == "sigmoid" else F.softplus(logits_TE).sqrt()


def _of_kept_groups(choice_TE: torch.Tensor, routing: Routing, best: int) -> torch.Tensor:
    """The numbers that experts are chosen by, -inf for experts outside each token's kept groups."""
    if routing.kept_groups == routing.groups:
        return choice_TE
    best_TG = choice_TE.unflatten(-1, (routing.groups, -1)).topk(best, dim=-1).values.sum(-1)
    kept_TG = torch.zeros_like(best_TG, dtype=torch.bool)
    kept_TG.scatter_(-1, best_TG.topk(routing.kept_groups, dim=-1).indices, True)
    return choice_TE.masked_fill(~kept_TG.repeat_interleave(choice_TE.shape[-1] // routing.groups, -1), float("-inf"))
