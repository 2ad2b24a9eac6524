"""Mixtures of experts. Shape letters: T tokens, D features, E experts, I an expert's inner features, A active experts."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch

from pagerunner.dist.base import RankSums
from pagerunner.layers.cuts import EXPERTS, Cut, Features, Section, TensorCut, by_inputs, by_outputs, tensor_cuts
from pagerunner.layers.linear import Linear
from pagerunner.layers.mlp import GatedMLP, inner_features
from pagerunner.layers.module import CheckpointTensor, Module
from pagerunner.layers.norm import RMSNorm
from pagerunner.layers.sublayer import FeedForward, ResidualStream
from pagerunner.ops import numerics
from pagerunner.ops.activation import SILU, GatedActivation, add_sigmoid_gated_
from pagerunner.ops.dispatch import Op
from pagerunner.ops.lora import Adapters, FusedExperts
from pagerunner.ops.moe import Shared, moe_experts, pair_routes, reads_groups
from pagerunner.ops.pair_sums import PairSums, add_pairs_
from pagerunner.ops.routing import Here, Routes, Routing, expert_logits, norm_expert_logits, route
from pagerunner.ops.stored import Stored
from pagerunner.ops.unpacked import experts_bytes
from pagerunner.quant.base import ExpertMethod, Mixture, UnquantizedExperts, Weights
from pagerunner.quant.sinks import CopySink


class ExpertSizes(NamedTuple):
    """How many experts there are, features of the residual stream, and an expert's inner features."""

    experts: int
    features: int
    inner: int


class ExpertNames(NamedTuple):
    """What a checkpoint calls the three matrices of an expert."""

    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"


USUAL_NAMES = ExpertNames()


class Experts(Module):
    """Gated feed-forwards, each matrix of all experts together, stored as `method` says.

    A checkpoint holds three matrices per expert, as `3.gate_proj.weight` of the fourth one; or all experts' matrices together,
    `gate_up_proj` [E, 2 I, D] and `down_proj` [E, D, I]. With `transposed` one in floats always holds them together, and with input
    features before output features. Biases are always together: `gate_up_proj_bias` [E, 2 I] and `down_proj_bias` [E, D].

    The rows of `gate_up_proj` are all gates, then all ups; for an activation that is `alternating`, gate 0, up 0, gate 1, up 1.

    Devices may divide the experts' inner features, or whole experts. With whole ones, `own` are the numbers of those that are here; else it is
    None.

    A token's experts are weighted by what their outputs, or with `weigh_inputs` their inputs, are multiplied by.

    `adapted` and `takes_adapters`: see `Linear`. Tokens whose adapter has products of these experts are computed apart, and others as without it.
    """

    adapted: FusedExperts | None = None
    takes_adapters = False

    def __init__(
        self,
        sizes: ExpertSizes,
        dtype: torch.dtype,
        *,
        names: ExpertNames = USUAL_NAMES,
        transposed: bool = False,
        bias: bool = False,
        activation: GatedActivation = SILU,
        weigh_inputs: bool = False,
        method: ExpertMethod | None = None,
    ) -> None:
        super().__init__()
        self.sizes, self.dtype, self.has_bias = sizes, dtype, bias
        self.checkpoint_names, self.activation = names, activation
        self.transposed, self.interleaved = transposed, activation.alternating
        self.weigh_inputs = weigh_inputs
        self.own: range | None = None
        self.ranks = 1
        """How many ranks divide whole experts."""
        self.all = Features(EXPERTS, sizes.experts)
        self.store(method or UnquantizedExperts())

    def keep(self, rank: int, ranks: int, inner: int) -> None:
        """Keep the experts of one of several ranks that divide whole experts, with `inner` features each unless it is 0."""
        self.ranks = ranks
        self.own = range(rank * self.all.count // ranks, (rank + 1) * self.all.count // ranks)
        self.sizes = self.sizes._replace(experts=len(self.own), inner=inner or self.sizes.inner)
        self.store(self.method)

    @property
    def _numbers(self) -> range:
        """The experts' numbers in a checkpoint."""
        return range(self.sizes.experts) if self.own is None else self.own

    def store(self, method: ExpertMethod) -> None:
        """Store the weights as `method` says. They have no memory afterwards."""
        self.method, self.weights = method, {}
        self._names: dict[str, dict[str, str]] = {}
        experts, features, inner = self.sizes
        for matrix, (outputs, inputs) in {"gate_up": (2 * inner, features), "down": (features, inner)}.items():
            own = method.create(experts, outputs, inputs, self.dtype)
            if self.has_bias:
                own["bias"] = torch.empty(experts, outputs, dtype=self.dtype, device="meta")
            self._names[matrix] = {name: f"{matrix}.{name}" for name in own}
            self.weights |= {f"{matrix}.{name}": tensor for name, tensor in own.items()}

    def __call__(self, x_TD: torch.Tensor, routes: Routes) -> torch.Tensor:
        """The weighted sum of the outputs of each token's experts, [T, D]."""
        return self.method.apply(x_TD, routes, self.mixture)

    def run_for_others(self, active: int, most_tokens: int) -> None:
        """Compute for other teams of ranks, while this one has no tokens; see `Module.join`. Tokens have `active` experts."""
        own = next(iter(self.weights.values()))
        weights_TA = torch.empty(0, active, device=own.device)
        routes = Routes(weights_TA, weights_TA.to(torch.int32), most_tokens=most_tokens)
        self(torch.empty(0, self.sizes.features, dtype=self.dtype, device=own.device), routes)

    def add_then(
        self,
        x_TD: torch.Tensor,
        routes: Routes,
        residual_TD: torch.Tensor,
        shared: Shared | None = None,
        adapters: Adapters | None = None,
    ) -> PairSums | RankSums | None:
        """Add that sum to `residual` in place, or return what is still to be added up, and then to be added. The output of `shared` is added."""
        if adapters is None or self.adapted is None or not adapters.experts:
            return self.method.apply_then(x_TD, routes, self.mixture, residual_TD, shared)
        (_, has_T1), (weights_TA, experts_TA) = adapters.apart(), routes[:2]
        if len(experts_TA) == 1 and shared is None and not self.method.summed:
            self._add_adapted_(x_TD, routes, adapters, self.adapted, residual_TD, alone=True)
            return None
        if len(experts_TA) == 1:  # kernels for one token read the experts that it has
            others = routes._replace(weights_TA=weights_TA.masked_fill(has_T1, 0))
        else:
            others = Routes(weights_TA, experts_TA.masked_fill(has_T1, -1), most_tokens=routes.most_tokens)
        sums = self.method.apply_then(x_TD, others, self.mixture, residual_TD, shared)
        out_TD = residual_TD
        if isinstance(sums, RankSums):
            out_TD = sums.part
            if sums.experts is not None:
                out_TD = torch.zeros_like(x_TD)
                add_pairs_(out_TD, PairSums(sums.part, sums.experts))
            elif out_TD.dim() == 3:
                out_TD = out_TD[0].to(x_TD.dtype)
            sums = RankSums(out_TD, sums.comm)
        self._add_adapted_(x_TD, self.method.here(routes), adapters, self.adapted, out_TD)
        return sums

    def _add_adapted_(
        self,
        x_TD: torch.Tensor,
        routes: Routes,
        adapters: Adapters,
        layer: FusedExperts,
        out_TD: torch.Tensor,
        *,
        alone: bool = False,
    ) -> None:
        """Add the sum over the experts here of tokens whose adapter has products of experts to `out` in place, each product with what the adapter adds to it.

        `alone`: of all tokens.
        """
        pairs, weights_TA = adapters.of_pairs(routes.experts_TA, layer, alone=alone), routes.weights_TA
        experts_TA, _, _, *order = pairs.lists
        own = pair_routes(weights_TA, experts_TA, self.sizes.experts, routes.ranks, *order)
        x = x_TD
        if self.weigh_inputs:
            x = (x_TD.unsqueeze(1) * weights_TA.to(x_TD.dtype).unsqueeze(2)).flatten(0, 1)
        gate_up_P2I = self.method.pair_products(x, own, self._weights_of("gate_up"))
        if self.interleaved:  # adapters have gates above ups
            gate_up_P2I = gate_up_P2I.unflatten(1, (-1, 2)).transpose(1, 2).flatten(1)
        pairs.add_(x, layer.gate_up, gate_up_P2I, known=False)
        if self.interleaved:
            gate_up_P2I = gate_up_P2I.unflatten(1, (2, -1)).transpose(1, 2).flatten(1)
        inner_PI = self.activation(gate_up_P2I)
        del gate_up_P2I  # it may be as large as all others together
        out_PD = self.method.pair_products(inner_PI, own, self._weights_of("down"))
        pairs.add_(inner_PI, layer.down, out_PD, known=True)
        if not self.weigh_inputs:
            out_PD.mul_(weights_TA.reshape(-1, 1))
        add_pairs_(out_TD, PairSums(out_PD, own.experts_TA))

    @property
    def mixture(self) -> Mixture:
        """What the form's products take."""
        weights = self._weights_of("gate_up"), self._weights_of("down")
        return Mixture(*weights, self.activation, self.weigh_inputs)

    @property
    def stays_packed(self) -> bool:
        """Whether a CUDA device's kernels read the matrices as they are stored, and unpack none of them at every call."""
        return all(map(reads_groups, self.stored))

    def unpacked_bytes(self, pairs: int) -> int:
        """The most that the layer unpacks at a time for up to so many pairs of a token and an expert on a CUDA device."""
        return experts_bytes(self.stored, self.dtype, -(-pairs // self.ranks))

    def adapted_bytes(self, pairs: int) -> int:
        """The most that `_add_adapted_` holds at once for so many pairs of a token and an expert on a CUDA device, but for what is unpacked."""
        _, features, inner = self.sizes
        products = max(2 * inner + features, (4 if self.interleaved else 3) * inner)
        return int(pairs * (products + features * self.weigh_inputs) * self.dtype.itemsize)

    @property
    def stored(self) -> list[Stored]:
        """The matrices in few bits that products read; none for a form in the model's dtype."""
        return [one for matrix in self._names for one in self.method.matrices(self._weights_of(matrix))]

    def randomize(self, generator: torch.Generator) -> None:
        """See Module."""
        for matrix in self._names:
            self.method.linear.randomize(self._weights_of(matrix), generator)

    def sources(self, prefix: str = "") -> Iterator[tuple[Module, str, str]]:
        """See Module: one expert's matrices after another's, by the names that they have alone."""
        for expert in self._numbers:
            for part in self.checkpoint_names:
                yield self, f"{expert}.{part}", f"{prefix}{expert}.{part}"

    def checkpoint(self, prefix: str = "") -> Iterator[CheckpointTensor]:
        """What the form asks for each expert's matrices, what a checkpoint may hold instead for all experts, and the biases."""
        divided = self.own is None and self._inner_features_divide()
        for matrix, parts in self._matrices().items():
            weights = self._weights_of(matrix)
            separate_cut, stacked_cut = self._matrix_cuts(matrix) if divided else (None, None)
            if self.own is not None:
                stacked_cut = Cut("experts", (Section(self.all),))
            together = f"{prefix}{matrix}_proj"
            stacked = {
                f"{together}{suffix}": sink
                for suffix, sink in self.method.stacked(weights, transposed=self.transposed).items()
            }
            separate: tuple[CheckpointTensor, ...] = ()
            if not self.method.only_stacked(transposed=self.transposed):
                separate = tuple(self._separate(prefix, separate_cut, parts, weights))
            yield from separate
            replaced = tuple(tensor.name for tensor in separate if not tensor.sink.optional)
            needed = [name for name, sink in stacked.items() if not sink.optional]
            cuts, experts = tensor_cuts(stacked, stacked_cut), self._numbers
            for name, sink in stacked.items():
                own = CheckpointTensor(name, sink, self, matrix, cuts[name], experts=experts)
                if replaced and not sink.optional:
                    beside = tuple(other for other in needed if other != name)
                    own = replace(own, instead_of=replaced, beside=beside)
                yield own
            if "bias" in weights:
                bias = CopySink(weights["bias"], ("experts", "outputs"))
                cut = tensor_cuts({"": bias}, stacked_cut)[""]
                once = divided and matrix == "down"
                yield CheckpointTensor(f"{together}_bias", bias, self, matrix, cut, once=once, experts=experts)

    def _weights_of(self, matrix: str) -> Weights:
        """The weights of one of the two matrices, by the names that the form gives them."""
        return {name: self.weights[full_name] for name, full_name in self._names[matrix].items()}

    def _matrices(self) -> dict[str, dict[str, slice]]:
        """The rows of each matrix that the checkpoint's matrices fill, by their names there."""
        (_, features, inner), names = self.sizes, self.checkpoint_names
        gate, up = slice(0, inner), slice(inner, 2 * inner)
        if self.interleaved:
            gate, up = slice(0, 2 * inner, 2), slice(1, 2 * inner, 2)
        return {"gate_up": {names.gate: gate, names.up: up}, "down": {names.down: slice(0, features)}}

    def _separate(
        self, prefix: str, cut: Cut | None, parts: dict[str, slice], weights: dict[str, torch.Tensor]
    ) -> Iterator[CheckpointTensor]:
        """One expert's tensors after another's."""
        cuts: dict[str, dict[str, TensorCut | None]] = {}  # those of the first expert are those of all
        for place, expert in enumerate(self._numbers):
            own = {name: tensor[place] for name, tensor in weights.items()}
            for part, rows in parts.items():
                sinks = self.method.linear.sinks(own, rows)
                if part not in cuts:
                    cuts[part] = tensor_cuts(sinks, cut)
                for name, sink in sinks.items():
                    full_name, number = f"{prefix}{expert}.{part}.{name}", range(expert, expert + 1)
                    yield CheckpointTensor(full_name, sink, self, f"{expert}.{part}", cuts[part][name], experts=number)

    def _matrix_cuts(self, matrix: str) -> tuple[Cut, Cut]:
        """Of one expert's matrix, and of all experts' together, which have gates above ups, or gates and ups in pairs."""
        inner = inner_features(self.sizes.inner)
        if matrix == "down":
            return by_inputs(inner), by_inputs(inner)
        both = by_outputs(inner, 2) if self.interleaved else Cut("outputs", (Section(inner), Section(inner)))
        return by_outputs(inner), both

    def cut_of(self, part: str) -> Cut:
        """Which features of one expert's matrix, as "3.gate_proj", may be divided among devices that don't divide whole experts."""
        down = part.endswith(f".{self.checkpoint_names.down}")
        return self._matrix_cuts("down" if down else "gate_up")[0]

    def _inner_features_divide(self) -> bool:
        """Whether experts can be divided by their inner features: not in a form whose columns are ordered by group."""
        weights = self._weights_of("down")
        sinks = self.method.stacked(weights, transposed=self.transposed)
        if not sinks:
            first = {name: tensor[0] for name, tensor in weights.items()}
            sinks = self.method.linear.sinks(first, slice(0, self.sizes.features))
        return any(sink.fills and sink.along("inputs") for sink in sinks.values())


class Router(Module):
    """Scores every expert for every token, in float32, and chooses.

    Its matrix [E, D] stays in the model's dtype in every format. `bias` is what a checkpoint calls a bias of the logits; `choice_bias` one
    of the scores that counts for the choice alone, in float32. None: there is none.
    `fixed_logits`: scores experts with sums in one order for any number of tokens, and nothing else does; None: what is fastest does.
    """

    def __init__(
        self,
        features: int,
        experts: int,
        dtype: torch.dtype,
        routing: Routing,
        *,
        bias: str | None = None,
        choice_bias: str | None = None,
    ) -> None:
        super().__init__()
        self.experts, self.routing, self.bias, self.choice_bias = experts, routing, bias, choice_bias
        self.fixed_logits: Callable[..., torch.Tensor] | None = None
        self.weights = {"weight": torch.empty(experts, features, dtype=dtype, device="meta")}
        if bias is not None:
            self.weights[bias] = torch.empty(experts, dtype=dtype, device="meta")
        if choice_bias is not None:
            self.weights[choice_bias] = torch.empty(experts, dtype=torch.float32, device="meta")

    def __call__(
        self,
        x_TD: torch.Tensor,
        chosen_TA: torch.Tensor | None = None,
        most_tokens: int = 0,
        row_T: torch.Tensor | None = None,
    ) -> Routes:
        """Where the tokens go. `chosen` are the tokens' experts where something else has chosen them. `most_tokens`: see `ForwardBatch`.

        Tokens whose `row` is negative are padding and go nowhere.
        """
        if x_TD.shape[0] == 1 and not most_tokens:
            row_T = None  # see `of_stream`
        return self._routes(self._logits(x_TD), chosen_TA, row_T)._replace(most_tokens=most_tokens)

    def of_stream(self, stream: ResidualStream, norm: RMSNorm, here: Here | None = None) -> tuple[torch.Tensor, Routes]:
        """The norm of the stream [T, D] with what was pending added to the stream, and where its tokens go. `here`: see `route`."""
        own, row_T = (self.weights["weight"], self._weight(self.bias)), stream.row_T
        if stream.x_TD.shape[0] == 1 and not stream.most_tokens:
            row_T = None  # kernels for one token read the experts that it has
        if isinstance(stream.sums, RankSums) and stream.x_TD.shape[0] <= numerics.FAST.router.most_tokens:
            stream.add_sums()  # so few tokens' norm and logits are one kernel
        if stream.sums is not None or self.fixed_logits is not None:
            normed_TD = stream.normed(norm)
            routes = self._routes(self._logits(normed_TD), None, row_T, here)
            return normed_TD, routes._replace(most_tokens=stream.most_tokens)
        pending_TD = stream.take_pending()
        stream.x_TD, normed_TD, logits_TE = norm_expert_logits(stream.x_TD, norm.parameters, *own, pending_TD)
        return normed_TD, self._routes(logits_TE, None, row_T, here)._replace(most_tokens=stream.most_tokens)

    def _logits(self, x_TD: torch.Tensor) -> torch.Tensor:
        return (self.fixed_logits or expert_logits)(x_TD, self.weights["weight"], self._weight(self.bias))

    def _routes(
        self,
        logits_TE: torch.Tensor,
        chosen_TA: torch.Tensor | None,
        row_T: torch.Tensor | None,
        here: Here | None = None,
    ) -> Routes:
        fixed = self.fixed_logits is not None
        return route(logits_TE, self.routing, self._weight(self.choice_bias), chosen_TA, row_T, here, fixed=fixed)

    @property
    def matrix_ED(self) -> torch.Tensor:
        """What scores the experts."""
        return self.weights["weight"]

    def _weight(self, name: str | None) -> torch.Tensor | None:
        return None if name is None else self.weights[name]


def kernels_of(modules: Iterable[Module]) -> list[Callable[[int], Hashable]]:
    """For each kind of routing in a model, what decides which kernels a number of tokens needs on a CUDA device; see `Op.kernels_for`."""
    found = list(modules)
    kinds = {(m.experts, m.routing.active) for m in found if isinstance(m, Router)}
    here = {(m.sizes.experts, m.ranks, m.method.teams) for m in found if isinstance(m, Experts)}
    products = {(experts, active, ranks, teams) for experts, ranks, teams in here for _, active in kinds}
    routings = [partial(_kernels, route, 1, kind) for kind in kinds]
    summed = {(m.sizes.features, m.dtype): m.method for m in found if isinstance(m, Experts) and m.method.summed}
    sums = [partial(method.leaves_pairs, features=kind[0], dtype=kind[1]) for kind, method in summed.items()]
    return [*routings, *sums, *(partial(_kernels, moe_experts, teams, tuple(kind)) for *kind, teams in products)]


def _kernels(op: Op[..., Any], teams: int, kind: tuple[int, ...], tokens: int) -> Hashable:
    return op.kernels_for(tokens * teams, *kind)


class SparseMLP(FeedForward):
    """A router, the experts to which it sends each token, and a `shared` feed-forward that every token passes if there is one.

    What comes out of the shared one is multiplied by the sigmoid of `shared_gate`, a linear of one feature; that is three small kernels
    behind the experts. `names` are the parts' names in
    the checkpoint where they differ from the attributes'.
    """

    def __init__(
        self,
        router: Router,
        experts: Experts,
        *,
        shared: GatedMLP | None = None,
        shared_gate: Linear | None = None,
        names: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__()
        self.names = dict(names or {})
        self.router, self.experts = router, experts
        self.shared, self.shared_gate = shared, shared_gate
        experts.takes_adapters = True

    def __call__(self, x_TD: torch.Tensor, adapters: Adapters | None = None) -> torch.Tensor:
        """Apply the layer."""
        stream = ResidualStream(torch.zeros_like(x_TD), adapters=adapters)
        stream.sums = self.experts.add_then(x_TD, self.router(x_TD), stream.x_TD, None, adapters)
        self._add_shared(x_TD, stream.whole(), adapters)
        return stream.x_TD

    def add_to(self, stream: ResidualStream, norm: RMSNorm) -> None:
        """See FeedForward. The sum of each token's experts may be pending afterwards."""
        method = self.experts.method
        here = method.only if stream.adapters is None and method.teams == 1 else None  # others read more of the routes
        normed_TD, routes = self.router.of_stream(stream, norm, here)
        beside = self._beside_experts() if stream.adapters is None else None
        if beside is None:
            self._add_shared(normed_TD, stream.x_TD, stream.adapters)
        stream.sums = self.experts.add_then(normed_TD, routes, stream.x_TD, beside, stream.adapters)

    def join(self, most_tokens: int) -> None:
        """See Module."""
        self.experts.run_for_others(self.router.routing.active, most_tokens)

    def _beside_experts(self) -> Shared | None:
        """The shared feed-forward as the experts' products take it; None if it takes more than two matrices and the experts' activation."""
        if self.shared is None or self.shared_gate is not None or self.experts.activation != SILU:
            return None
        matrices = self.shared.matrices()
        return None if matrices is None else Shared(*matrices)

    def _add_shared(self, x_TD: torch.Tensor, residual_TD: torch.Tensor, adapters: Adapters | None) -> None:
        if self.shared is None:
            return
        if self.shared_gate is None:
            self.shared.add_(x_TD, residual_TD, adapters)
        else:
            add_sigmoid_gated_(self.shared(x_TD, adapters), self.shared_gate(x_TD), residual_TD)
