"""Reading an adapter from a PEFT directory: every tensor lands on a matrix of the model, or the error names it.

The tensors that are there are the truth; the config's targets must agree with them. Experts come in two forms. Either each expert's
matrices have their own A and B, or one pair is for one matrix of all experts:

    ….experts.3.gate_proj.lora_A.weight    [r, D]        ….experts.3.gate_proj.lora_B.weight    [I, r]
    ….experts.base_layer.lora_A.weight     [E r, D]      ….experts.base_layer.lora_B.weight     [2 I, r E]    gate_up_proj
    ….experts.lora_A.weight                [E r, I]      ….experts.lora_B.weight                [D, r E]      down_proj

Of the second form the reader makes the first one. Shape letters: I input features, O output features, R ranks, E experts.
"""

from __future__ import annotations

import hashlib
from collections.abc import Hashable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import torch

from pagerunner.errors import CheckpointError, ConfigError
from pagerunner.layers.cuts import TensorCut
from pagerunner.layers.linear import Linear
from pagerunner.layers.module import Module
from pagerunner.layers.moe import Experts, Router
from pagerunner.layers.shares import Parts
from pagerunner.lora.config import AdapterConfig, read_config
from pagerunner.lora.pauses import in_turns, pause
from pagerunner.lora.tensors import StoredTensor, read_all, stored_tensors
from pagerunner.models.checkpoint.loader import own_name
from pagerunner.quant.sinks import name_of

TENSORS = "adapter_model.safetensors"
NEW_ORDER = (0, 19, 1)
"""The version of PEFT from which on A of experts together is for their inputs, whichever dimension of the parameter these are."""
HASHERS = 2
"""Threads that hash an adapter's products. More take the processors and the lock from steps."""
_PREFIX = "base_model.model."
_A, _B = ".lora_A.weight", ".lora_B.weight"
_OTHER_TENSORS = {
    ".lora_magnitude_vector": "DoRA isn't supported",
    ".lora_B.bias": "biases of adapters (lora_bias) aren't supported",
    ".lora_embedding_A": "adapters of the embedding aren't supported",
    ".lora_embedding_B": "adapters of the embedding aren't supported",
    ".base_layer.weight": "it replaces weights of the base, which isn't supported",
}
_OTHER_ENDS = tuple(end + more for end in _OTHER_TENSORS for more in ("", ".weight"))


class Target(NamedTuple):
    """A matrix of the model that may have an adapter: the layer that holds it, which part of it, and its sizes. `refused`: why it can't have one."""

    owner: Module
    part: str
    out_features: int
    in_features: int
    refused: str = ""

    @property
    def sizes(self) -> tuple[int, int]:
        """Outputs and inputs."""
        return self.out_features, self.in_features

    def slices(self, parts: Parts) -> list[slice]:
        """Which of its outputs or inputs, whichever ranks divide, one with these parts of the model's features has."""
        assert isinstance(self.owner, Linear | Experts)
        cut = self.owner.cut_of(self.part)
        assert cut is not None, "a part of what ranks don't divide"
        return TensorCut(0, cut.sections).slices(parts)


class Targets(NamedTuple):
    """By names of the checkpoint: every matrix, and every layer's experts."""

    matrices: dict[str, Target]
    experts: dict[str, Experts]

    @classmethod
    def of(cls, model: Module) -> Targets:
        """Those of a model, which needs no memory yet."""
        matrices: dict[str, Target] = {}
        experts: dict[str, Experts] = {}
        drafter = getattr(model, "drafter", None)
        others = set(drafter.modules()) if isinstance(drafter, Module) else set()
        for owner, part, name in model.sources():
            if owner in others:
                continue
            if isinstance(owner, Experts):
                experts[name.removesuffix(f".{part}")] = owner
                _, features, inner = owner.sizes
                down = part.endswith(f".{owner.checkpoint_names.down}")
                why = "" if owner.takes_adapters else "layers of its kind don't take adapters so far"
                matrices[name] = Target(owner, part, *((features, inner) if down else (inner, features)), why)
            elif isinstance(owner, Linear):
                why = "" if owner.takes_adapters else "layers of its kind don't take adapters so far"
                why = "its weights are read as one matrix by products of another shape" if owner.needs_dense else why
                why = "it stays in the model's dtype, as output weights do" if owner.plain else why
                matrices[name] = Target(owner, part, owner.parts[part], owner.in_features, why)
        for tensor in model.checkpoint():
            if isinstance(tensor.owner, Router):
                why = "it is a router, which chooses experts in float32 by its own weights alone"
                matrices[tensor.name.removesuffix(".weight")] = Target(tensor.owner, "", 0, 0, why)
        return cls(matrices, experts)


class Stack(NamedTuple):
    """Products of equal sizes and ranks, one behind the other: those of one matrix of a layer's experts, or a single one.

    A mixture has them by the ten thousand, and Python's work on each takes the interpreter's lock from the steps.
    """

    names: Sequence[str]
    a_PRI: torch.Tensor
    b_POR: torch.Tensor


class Adapter(NamedTuple):
    """An adapter's products, each of another one of the model's matrices. `digest`: equal for equal products, whatever files they come from.

    `separate`: the file has tensors of single experts.
    """

    digest: str
    stacks: Sequence[Stack]
    separate: bool = False

    @property
    def names(self) -> set[str]:
        """Those of the matrices."""
        return {name for stack in self.stacks for name in stack.names}

    @property
    def rank(self) -> int:
        """The largest rank of its products."""
        return max(int(stack.a_PRI.shape[1]) for stack in self.stacks)


def read_adapter(directory: Path, targets: Targets, dtype: torch.dtype, max_rank: int) -> Adapter:
    """Read the adapter in `directory` for the matrices `targets`, in `dtype`.

    Raises:
        CheckpointError: a file is missing or damaged, or a tensor doesn't suit the model; the message names it.
        ConfigError: the config asks for what isn't computed, or for a rank above `max_rank`.
    """
    config = read_config(directory)
    if config.most_rank > max_rank:
        raise ConfigError(
            f"{directory}: the adapter has rank {config.most_rank}, and at most {max_rank} is served; raise max_lora_rank."
        )
    reading = _Reading(directory, config, targets, dtype)
    with stored_tensors(_file(directory)) as tensors:
        reading.take(tensors)
    reading.check_all_there()
    return Adapter(reading.digest(), reading.stacks, reading.separate)


def _file(directory: Path) -> Path:
    file = directory / TENSORS
    if not file.is_file():
        pickles = sorted(one.name for one in directory.glob("adapter_model.bin"))
        hint = f" {pickles[0]} is a pickle, which is never read; convert it to safetensors." if pickles else ""
        raise CheckpointError(f"{directory} has no {TENSORS}.{hint}")
    return file


class _Pair(NamedTuple):
    """Tensors of one matrix of the model, and what B is multiplied by."""

    name: str
    scale: float
    a: StoredTensor
    b: StoredTensor


class _Reading:
    """Lays one file's tensors onto the model's matrices."""

    def __init__(self, directory: Path, config: AdapterConfig, targets: Targets, dtype: torch.dtype) -> None:
        self.file, self.config, self.targets, self.dtype = directory / TENSORS, config, targets, dtype
        self.stacks: list[Stack] = []
        self._landed: set[str] = set()
        self._alike: dict[Hashable, list[_Pair]] = {}
        """Pairs of which a stack is made."""
        self._asked: dict[str, str] = {}
        """Modules and parameters of the model that the file has tensors for, and what the file calls them, which patterns are for."""

    def take(self, tensors: Sequence[StoredTensor]) -> None:
        """All tensors, in pairs. Each is read when all names and shapes are known to be right, so a file takes no more memory than the model's adapter may."""
        pairs: dict[str, dict[str, StoredTensor]] = {}
        for tensor in in_turns(tensors):
            pairs.setdefault(self._module_of(tensor), {})[tensor.name[-len(_A) :]] = tensor
        for theirs, pair in in_turns(pairs.items()):
            for end in (_A, _B):
                if end not in pair:
                    raise CheckpointError(
                        f"{self.file} lacks the tensor {_PREFIX}{theirs}{end}, whose other half it has."
                    )
            self._take_pair(theirs, pair[_A], pair[_B])
        for alike in self._alike.values():
            names, scales, some_a, some_b = zip(*alike, strict=True)
            self._land(names, self._computed(some_a), self._computed(some_b, scales))
        if not self.stacks:
            raise CheckpointError(f"{self.file} has no tensors, so the adapter would do nothing.")

    @property
    def _owners(self) -> set[Module]:
        """Those of the matrices that the file has tensors for, one by one."""
        return {self.targets.matrices[name].owner for name in self._asked if name in self.targets.matrices}

    @property
    def separate(self) -> bool:
        """Whether the file has tensors of single experts."""
        return any(isinstance(owner, Experts) for owner in self._owners)

    def check_all_there(self) -> None:
        """Raise CheckpointError for the first matrix that the config names and the file lacks."""
        one_by_one = self._owners
        for name, target in self.targets.matrices.items():
            if name in self._asked or target.refused:
                continue
            if isinstance(target.owner, Experts) and target.owner not in one_by_one:
                continue  # in the trainer's model these experts may have been no modules
            if self.config.asks_for(name):
                raise CheckpointError(f"{self.file} lacks {_PREFIX}{name}{_A}, which target_modules asks for.")
        for experts in self.targets.experts:
            for matrix in ("gate_up_proj", "down_proj"):
                name = f"{experts}.{matrix}"
                if name not in self._asked and self.config.asks_for_parameter(name):
                    raise CheckpointError(f"{self.file} lacks the tensors of {name}, which target_parameters asks for.")

    def digest(self) -> str:
        """32 hexadecimal digits of what has landed. So whatever decides how a file is read, as its version of PEFT, is in them.

        They are a digest of the products' digests. Several threads find these: each hashes without the interpreter's lock, and waits for it beside steps.
        """
        products = []
        for names, *both in self.stacks:
            sides = [
                (f" {all.dtype} {tuple(all.shape[1:])};", all.view(-1).view(torch.uint8).numpy(), all[0].nbytes)
                for all in both
            ]
            products += [(name, number, sides) for number, name in enumerate(names)]
        pause()
        products.sort()  # 9 ms at most
        found = [b""] * len(products)

        def find(first: int) -> None:
            for at in in_turns(range(first, len(products), HASHERS)):
                (name, number, sides), content = products[at], hashlib.sha256()
                for said, values, size in sides:
                    content.update(f"{name}{said}".encode())
                    content.update(values[number * size : (number + 1) * size])
                found[at] = content.digest()

        with ThreadPoolExecutor(HASHERS) as threads:
            list(threads.map(find, range(HASHERS)))
        return hashlib.sha256(b"".join(found)).hexdigest()[:32]

    def _module_of(self, tensor: StoredTensor) -> str:
        """The module that a tensor belongs to, in the file's words."""
        name = tensor.name
        if name.endswith(_OTHER_ENDS):
            why = next(why for end, why in _OTHER_TENSORS.items() if name.endswith((end, f"{end}.weight")))
            raise CheckpointError(f"{self.file}: {name}: {why}.")
        if not name.startswith(_PREFIX) or not name.endswith((_A, _B)) or len(tensor.shape) != 2:
            raise CheckpointError(
                f"{self.file}: {name} {list(tensor.shape)} is no tensor of an adapter ({_PREFIX}<module>{_A} or {_B})."
            )
        return name[len(_PREFIX) : -len(_A)]

    def _take_pair(self, theirs: str, a: StoredTensor, b: StoredTensor) -> None:
        name = own_name(theirs, self.targets.matrices)
        target = self.targets.matrices.get(name)
        if target is not None:
            if target.refused:
                raise CheckpointError(f"{self.file}: {theirs} can't have an adapter: {target.refused}.")
            if not self.config.asks_for(theirs) and not self.config.asks_for(name):
                raise CheckpointError(f"{self.file}: {_PREFIX}{theirs}{_A} isn't among target_modules.")
            rank = self._rank(theirs, theirs, a.shape[0])
            self._check_shapes(theirs, a, b, (rank, target.in_features), (target.out_features, rank))
            alike = target.owner, target.part.rpartition(".")[2], a.shape, a.dtype, b.dtype
            self._alike.setdefault(alike, []).append(_Pair(name, self.config.scale_of(theirs), a, b))
            self._asked[name] = theirs
            return
        inner = theirs.endswith(".base_layer")
        name = own_name(theirs.removesuffix(".base_layer"), self.targets.experts)
        experts = self.targets.experts.get(name)
        if experts is None:
            raise CheckpointError(f"{self.file}: {_PREFIX}{theirs}{_A}: the model has no such matrix.")
        first = self.targets.matrices.get(f"{name}.0.{experts.checkpoint_names.gate}")
        if first is not None and first.refused:
            raise CheckpointError(f"{self.file}: {theirs} can't have an adapter: {first.refused}.")
        self._take_experts(theirs, name, self._fused_matrix(theirs, name, inner), experts, a, b)

    def _fused_matrix(self, theirs: str, experts: str, inner: bool) -> str:
        """Which matrix of all experts a pair is for. Wrappers are nested in the order of the parameters, gate_up_proj's innermost."""
        asked = [one for one in ("gate_up_proj", "down_proj") if self.config.asks_for_parameter(f"{experts}.{one}")]
        if not asked or (inner and len(asked) == 1):
            raise CheckpointError(f"{self.file}: {_PREFIX}{theirs}{_A} isn't among target_parameters.")
        return asked[0] if inner else asked[-1]

    def _take_experts(
        self, theirs: str, name: str, matrix: str, owner: Experts, a: StoredTensor, b: StoredTensor
    ) -> None:
        """A pair for one matrix of all experts: a pair for each expert and each of its matrices."""
        experts, features, inner = owner.sizes
        down = matrix == "down_proj"
        outputs, inputs = (features, inner) if down else (2 * inner, features)
        asked = f"{theirs.removesuffix('.base_layer')}.{matrix}"
        rank = self._rank(asked, theirs, a.shape[0] / experts)
        swapped = (tuple(a.shape), tuple(b.shape)) == ((experts * rank, outputs), (inputs, rank * experts))
        scale = self.config.scale_of(asked)
        if swapped and (outputs != inputs or self._is_swapped(theirs, owner, inputs)):
            a_ERI = self._computed([b]).view(inputs, rank, experts).permute(2, 1, 0)
            b_EOR = self._computed([a], [scale]).view(experts, rank, outputs).transpose(1, 2)
        else:
            self._check_shapes(theirs, a, b, (experts * rank, inputs), (outputs, rank * experts))
            a_ERI = self._computed([a]).view(experts, rank, inputs)
            b_EOR = self._computed([b], [scale]).view(outputs, rank, experts).permute(2, 0, 1)
        gate, up = slice(0, inner), slice(inner, 2 * inner)
        if owner.interleaved:
            gate, up = slice(0, None, 2), slice(1, None, 2)
        names = owner.checkpoint_names
        parts = {names.down: slice(None)} if down else {names.gate: gate, names.up: up}
        for part, rows in parts.items():
            self._land([f"{name}.{expert}.{part}" for expert in range(experts)], a_ERI, b_EOR[:, rows])
        self._asked[f"{name}.{matrix}"] = asked

    def _is_swapped(self, theirs: str, owner: Experts, inputs: int) -> bool:
        """Whether A and B of square matrices have each other's place. PEFT knows the order of gpt-oss's alone, whose gates and ups alternate."""
        version = self.config.version
        if owner.interleaved:
            return False
        if version is None:
            raise CheckpointError(
                f"{self.file}: {theirs} is of matrices of {inputs} by {inputs}, so its shape doesn't say whether it was written by PEFT 0.19.1 or "
                "later, or before, when A and B had each other's place, nor does peft_version in the config. Save the adapter with a tensor for each expert."
            )
        return (version >= NEW_ORDER) == owner.transposed

    def _rank(self, asked: str, theirs: str, found: float) -> int:
        rank = self.config.rank_of(asked)
        if rank != found:
            raise CheckpointError(
                f"{self.file}: {_PREFIX}{theirs}{_A} has rank {found:g}, and the config says {rank} (r or rank_pattern)."
            )
        return rank

    def _check_shapes(
        self, theirs: str, a: StoredTensor, b: StoredTensor, shape_a: tuple[int, int], shape_b: tuple[int, int]
    ) -> None:
        for end, tensor, shape in ((_A, a, shape_a), (_B, b, shape_b)):
            if tuple(tensor.shape) != shape:
                raise CheckpointError(
                    f"{self.file}: {_PREFIX}{theirs}{end} has shape {list(tensor.shape)}; the model asks for {list(shape)}."
                )

    def _computed(self, stored: Sequence[StoredTensor], scales: Sequence[float] = (1.0,)) -> torch.Tensor:
        """Tensors times their scales, in the dtype that products compute in, which has to have such numbers."""
        read = read_all(stored)
        scaled = read if set(scales) == {1} else read.float() * torch.tensor(scales).view(-1, 1, 1)
        taken = scaled.to(self.dtype)
        if not taken.sum(dtype=torch.float32).isfinite() and not taken.isfinite().all():  # the sum alone is quick
            number = next(number for number, one in enumerate(taken) if not one.isfinite().all())
            tensor, why = read[number], "holds values that are infinite or no numbers"
            if tensor.isfinite().all():
                most, scale, dtype = tensor.abs().max().item(), scales[number % len(scales)], name_of(self.dtype)
                why = f"holds {most:.3g}, which times the scale {scale:.3g} (lora_alpha) is beyond {dtype}, the dtype that the engine computes in"
            raise CheckpointError(f"{self.file}: {stored[number].name} {why}.")
        return taken

    def _land(self, names: Sequence[str], a_PRI: torch.Tensor, b_POR: torch.Tensor) -> None:
        if twice := self._landed.intersection(names):
            raise CheckpointError(f"{self.file} has tensors of {min(twice)} twice, alone and with all experts.")
        self._landed.update(names)
        self.stacks.append(Stack(names, a_PRI.contiguous(), b_POR.contiguous()))
