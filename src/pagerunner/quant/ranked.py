"""Forms around a form, for a rank that holds a part of a matrix: the ranks' products become that of the whole matrix.

Shape letters: T tokens, I input features, O output features, V token ids of the whole model, D features of the residual stream.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from pagerunner.dist.base import Comm, RankSums
from pagerunner.ops.embedding import chosen_within, span_embedding
from pagerunner.ops.linear import linear_parts
from pagerunner.ops.moe import Shared, add_shared_
from pagerunner.ops.pair_sums import PairSums
from pagerunner.ops.routing import Here, Routes, own_experts
from pagerunner.ops.stored import Stored
from pagerunner.quant.base import ExpertMethod, Mixture, Unquantized, WeightMethod, Weights
from pagerunner.quant.sinks import Sink


class Ranked(WeightMethod):
    """A rank's part of a matrix, which is kept as `own` keeps it. Operations that others join are computed one after another."""

    def __init__(self, own: WeightMethod, comm: Comm) -> None:
        self.own, self.comm = own, comm

    def create(self, out_features: int, in_features: int, dtype: torch.dtype) -> Weights:
        """See WeightMethod; of the part."""
        return self.own.create(out_features, in_features, dtype)

    def sinks(self, weights: Mapping[str, torch.Tensor], rows: slice) -> dict[str, Sink]:
        """See WeightMethod; of the part."""
        return self.own.sinks(weights, rows)

    def dense(self, weights: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """See WeightMethod; the part."""
        return self.own.dense(weights)

    def matrices(self, weights: Mapping[str, torch.Tensor]) -> tuple[Stored, ...]:
        """See WeightMethod; of the part."""
        return self.own.matrices(weights)

    def randomize(self, weights: Weights, generator: torch.Generator) -> None:
        """See WeightMethod; the part."""
        self.own.randomize(weights, generator)


class Summed(Ranked):
    """Columns of a matrix. The ranks' products are added up; a bias is one rank's alone, and others have zeros."""

    def apply(self, x_TI: torch.Tensor, weights: Weights) -> torch.Tensor:
        """The whole matrix's output, from this rank's inputs."""
        out_TO = self.own.apply(x_TI, weights)
        self.comm.all_reduce_(out_TO)
        return out_TO

    def matrix(self, weights: Mapping[str, torch.Tensor]) -> torch.Tensor | Stored | None:
        """See WeightMethod; the part, for `SummedExperts`, whose sum has the products of both."""
        return self.own.matrix(weights)

    def part(self, x_TI: torch.Tensor, weights: Weights) -> RankSums | None:
        """See WeightMethod."""
        return RankSums(self.own.apply(x_TI, weights), self.comm)

    def unfinished(self, x_TI: torch.Tensor, weights: Weights) -> RankSums | None:
        """See WeightMethod."""
        own = self.own.matrix(weights)
        if not isinstance(own, torch.Tensor) or weights.get("bias") is not None:
            return self.part(x_TI, weights)
        if not self.takes_parts(x_TI.shape[0], own.shape[0], x_TI.dtype):
            return self.part(x_TI, weights)
        return RankSums(linear_parts(x_TI, own), self.comm)

    def takes_parts(self, tokens: int, features: int, dtype: torch.dtype) -> bool:
        """See WeightMethod."""
        return self.comm.takes_parts(tokens, features, dtype)

    def apply_add_(self, x_TI: torch.Tensor, weights: Weights, residual_TO: torch.Tensor) -> None:
        """See WeightMethod; of the whole matrix's output."""
        self.comm.all_reduce_(self.own.apply(x_TI, weights), residual_TO)


class SummedExperts(ExpertMethod):
    """Inner features of every expert, or whole experts, whose `numbers` are here then. The ranks' outputs are added up once for all of a
    token's experts.
    """

    summed = True

    def __init__(self, own: ExpertMethod, comm: Comm, numbers: range | None = None) -> None:
        super().__init__(own.linear)
        self.own, self.comm = own, comm
        self.only = None if numbers is None else Here(numbers.start, len(numbers), comm.size)

    def create(self, experts: int, out_features: int, in_features: int, dtype: torch.dtype) -> Weights:
        """See ExpertMethod; of the part."""
        return self.own.create(experts, out_features, in_features, dtype)

    def stacked(self, weights: Mapping[str, torch.Tensor], *, transposed: bool) -> dict[str, Sink]:
        """See ExpertMethod; of the part."""
        return self.own.stacked(weights, transposed=transposed)

    def only_stacked(self, *, transposed: bool) -> bool:
        """See ExpertMethod."""
        return self.own.only_stacked(transposed=transposed)

    def matrix(self, weights: Weights) -> torch.Tensor | Stored:
        """See ExpertMethod; the part."""
        return self.own.matrix(weights)

    def matrices(self, weights: Weights) -> tuple[Stored, ...]:
        """See ExpertMethod; of the part."""
        return self.own.matrices(weights)

    def apply(
        self, x_TD: torch.Tensor, routes: Routes, own: Mixture, residual_TD: torch.Tensor | None = None
    ) -> torch.Tensor:
        """See ExpertMethod; of all ranks' experts."""
        return self._summed(self.own.apply(x_TD, self.here(routes), own), residual_TD)

    def apply_then(
        self, x_TD: torch.Tensor, routes: Routes, own: Mixture, residual_TD: torch.Tensor, shared: Shared | None = None
    ) -> PairSums | RankSums | None:
        """See ExpertMethod. Pairs are left where the kernel that adds up the ranks' sums adds them up before. `shared` is the rank's part, too."""
        tokens, features = x_TD.shape
        if shared is None and self.leaves_pairs(tokens, features, x_TD.dtype):
            left = self.own.outputs(x_TD, self.here(routes), own)
            if isinstance(left, PairSums):
                return RankSums(left.out_PD, self.comm, left.experts_TA)
            return RankSums(
                left.float().unsqueeze(0), self.comm
            )  # all ranks' sums go the same way, whatever each of them has
        out_TD = self.own.apply(x_TD, self.here(routes), own)
        if shared is not None:
            add_shared_(x_TD, shared, own.activation, out_TD)
        return RankSums(out_TD, self.comm)

    def leaves_pairs(self, tokens: int, features: int, dtype: torch.dtype) -> bool:
        """See ExpertMethod."""
        return self.comm.takes_pairs(tokens, features, dtype)

    def here(self, routes: Routes) -> Routes:
        """See ExpertMethod."""
        if self.only is None or routes.ranks > 1:
            return routes
        return own_experts(routes.experts_TA, routes, *self.only)

    def _summed(self, out_TD: torch.Tensor, residual_TD: torch.Tensor | None) -> torch.Tensor:
        """The ranks' outputs added up, and to the residual if there is one."""
        self.comm.all_reduce_(out_TD, residual_TD)
        return out_TD if residual_TD is None else residual_TD


class ExpertsOfTeams(SummedExperts):
    """Whole experts of several teams of ranks. The ranks of a team have the same tokens. Every rank gathers the tokens of all teams, and computes its
    experts' outputs for them. The outputs are added up, and each team takes those of its own tokens.

    Ranks gather as many tokens of each team as the fullest one has. Example: teams of two ranks have 5 and 2 tokens. Each of the four ranks tells 3
    tokens, of which those that aren't there go to no expert.
    """

    def __init__(self, own: ExpertMethod, comm: Comm, numbers: range, teams: int) -> None:
        """`comm` joins the ranks of all teams, one team's behind another's."""
        super().__init__(own, comm, numbers)
        self.teams, self._ranks = teams, comm.size // teams

    def apply(
        self, x_TD: torch.Tensor, routes: Routes, own: Mixture, residual_TD: torch.Tensor | None = None
    ) -> torch.Tensor:
        """See ExpertMethod; of all ranks' experts."""
        out_TD = self._of_all(x_TD, routes, own)
        return out_TD if residual_TD is None else residual_TD.add_(out_TD)

    def apply_then(
        self, x_TD: torch.Tensor, routes: Routes, own: Mixture, residual_TD: torch.Tensor, shared: Shared | None = None
    ) -> PairSums | RankSums | None:
        """See ExpertMethod, and SummedExperts. `shared` is the team's alone."""
        residual_TD.add_(self._of_all(x_TD, routes, own, shared))
        return None

    def _of_all(self, x_TD: torch.Tensor, routes: Routes, own: Mixture, shared: Shared | None = None) -> torch.Tensor:
        tokens, active = routes.experts_TA.shape
        each = -(-(routes.most_tokens or tokens) // self._ranks)  # tokens that a rank tells
        team, place = divmod(self.comm.rank, self._ranks)
        told = slice(place * each, (place + 1) * each)
        all_ND, all_routes = _apart(self.comm.all_gather(_packed(x_TD[told], routes, told, each)), x_TD, active)
        out_ND = self.own.apply(all_ND, self.here(all_routes), own)
        first = team * self._ranks * each
        out_TD = out_ND[first : first + tokens]
        if shared is not None:
            add_shared_(x_TD, shared, own.activation, out_TD)
        self.comm.all_reduce_(out_ND)
        return out_TD


def _packed(x_TD: torch.Tensor, routes: Routes, part: slice, rows: int) -> torch.Tensor:
    """So many `rows` of bytes: the tokens' features, and for `part` of the routes the experts' numbers and weights. Rows beyond have no experts."""
    parts = x_TD, routes.experts_TA[part].to(torch.int32), routes.weights_TA[part].float()
    known = torch.cat([one.contiguous().view(torch.uint8) for one in parts], 1)
    found = known.new_zeros(rows, known.shape[1])
    found[known.shape[0] :, x_TD.shape[1] * x_TD.itemsize :].fill_(255)  # -1, and weights that nobody reads
    found[: known.shape[0]] = known
    return found


def _apart(gathered: torch.Tensor, like_TD: torch.Tensor, active: int) -> tuple[torch.Tensor, Routes]:
    """What the ranks have packed, one rank's tokens behind another's."""
    size = like_TD.shape[1] * like_TD.itemsize
    x, experts, weights = gathered.flatten(0, 1).split((size, 4 * active, 4 * active), 1)
    kind = torch.int64 if like_TD.device.type == "cpu" else torch.int32  # as `route` has them
    experts_NA = experts.contiguous().view(torch.int32).to(kind)
    weights_NA = weights.contiguous().view(torch.float32)
    return x.contiguous().view(like_TD.dtype), Routes(weights_NA, experts_NA)


class OfVocabulary(Ranked):
    """Rows of token ids: of an embedding, of output weights, or of both. `ids` are this rank's. Its scores are those of its ids alone."""

    def __init__(self, own: WeightMethod, comm: Comm, ids: range) -> None:
        super().__init__(own, comm)
        self._ids = ids

    def rows(self, numbers_T: torch.Tensor, weights: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Rows of any token ids, [T, D]. Each is one rank's, and others add zeros."""
        if type(self.own) is Unquantized:
            rows_TD = span_embedding(numbers_T, weights["weight"], self._ids.start)
        else:
            places_T, others_T1 = chosen_within(numbers_T - self._ids.start, len(self._ids))
            rows_TD = self.own.rows(places_T, weights).masked_fill(others_T1, 0.0)
        self.comm.all_reduce_(rows_TD)
        return rows_TD

    def apply(self, x_TI: torch.Tensor, weights: Weights) -> torch.Tensor:
        """Scores of this rank's token ids."""
        return self.own.apply(x_TI, weights)
