"""Building a model, giving it memory, and filling it from a checkpoint.

The order is: `build_model` (no memory), `weights_bytes`, `materialize` into a region that the caller owns, then
`load_weights` or `dummy_weights`, both of which may be repeated in place.
"""

from __future__ import annotations

import importlib
import logging
import os
import re
import time
from collections import deque
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open

from pagerunner.config import Dtype
from pagerunner.errors import CheckpointError
from pagerunner.layers.embedding import Embedding
from pagerunner.layers.linear import Linear
from pagerunner.layers.module import CheckpointTensor, Module
from pagerunner.layers.moe import Experts
from pagerunner.layers.shares import Share
from pagerunner.life import LIFE
from pagerunner.memory.units import human_bytes
from pagerunner.models.checkpoint.forms import Forms, Held
from pagerunner.models.checkpoint.kv_scales import place_of
from pagerunner.models.checkpoint.weight_copy import copy_now
from pagerunner.models.configs.base import ModelConfig
from pagerunner.models.configs.drafter import EagleConfig, tensor_name
from pagerunner.models.configs.json_files import read_json
from pagerunner.models.decoder import CausalLM
from pagerunner.models.draft_model import SmallerModel
from pagerunner.models.drafting import DraftModel, set_memory
from pagerunner.models.registry import FAMILIES
from pagerunner.quant.sinks import FLOATS, HOLDS_NAN, CopyWeight, Sink, SinkError, beyond, is_damage, name_of

logger = logging.getLogger(__name__)
ALIGNMENT = 256
THREADS = min(4, os.cpu_count() or 1)
"""Threads that copy weights: enough to read from a disk and fill page-locked buffers at once."""
Progress = Callable[[int, int], None]
_SMALL = 2**16  # bytes of a tensor that is copied in less time than a thread is called in
_LONGEST_NAME = 240  # characters of a file's name; file systems take 255 bytes
_INDEX = "model.safetensors.index.json"
# How checkpoints of text and images name the text model's tensors, and how they name the other parts: the files of the
# makers, then those that transformers writes since 4.52.
_TEXT_NAMES = (
    ("language_model.model.", "model."),
    ("language_model.lm_head.", "lm_head."),
    ("model.language_model.", "model."),
)
# What transformers calls the scales of a whole matrix in fp8, and of its activations; others have the second names.
_SCALE_NAMES = ((".weight_scale_inv", ".weight_scale"), (".activation_scale", ".input_scale"))
Model = CausalLM
_EAGLE = {"eagle": ("eagle", "EagleForCausalLM"), "eagle3": ("eagle3", "Eagle3ForCausalLM")}
_IMAGE_NAMES = tuple(
    before + part
    for before in ("", "model.")
    for part in ("vision_tower.", "vision_model.", "visual.", "multi_modal_projector.", "mm_projector.")
)


def build_model(
    config: ModelConfig,
    dtype: Dtype,
    device: str = "cpu",
    *,
    keep_forms: bool | None = None,
    of_files: bool = True,
    layers: range | None = None,
) -> Model:
    """The model of `config`, computing in `dtype`: its weights without memory yet, its few constants on `device`.

    `keep_forms`: quantised weights stay in few bits in memory; otherwise they are unpacked to `dtype` while they are loaded. None
    keeps them on a CUDA device alone. `of_files`: what the checkpoint's files hold decides beside the config; not so for a format that the
    checkpoint isn't in, which a plan only tries. `layers`: the model has these alone, as a stage's (`CausalLM.keep`).
    """
    family = FAMILIES[config.family]
    place = getattr(torch, dtype), torch.device(device)
    model: Model = _class(family.module, family.model)(config, *place)
    keep = device.startswith("cuda") if keep_forms is None else keep_forms
    if config.drafter is not None:
        model.draft_with(_drafter(config, model, *place, keep, of_files))
    if layers is not None:
        model.keep(layers)
    if config.expert_share is not None:
        for module in model.modules():
            if isinstance(module, Experts):
                module.keep(*config.expert_share)
    _store(model, config, place[0], keep, of_files)
    if family.nested:
        model.unused_tensors = (*model.unused_tensors, *_IMAGE_NAMES)
    return model


def _class(module: str, name: str) -> Any:
    return getattr(importlib.import_module(f"pagerunner.models.{module}"), name)


def _store(model: Module, config: ModelConfig, dtype: torch.dtype, keep: bool, of_files: bool) -> None:
    """Give a model's layers the forms of its checkpoint."""
    if config.format is not None:
        held = Held.of(tensor_dtypes(Path(config.path)) if of_files else {}, getattr(torch, config.dtype))
        forms = Forms(config.format, dtype, held, keep)
        forms.store(model.sources())
        model.asked_by = forms.asked_by


def _drafter(
    config: ModelConfig, target: Model, dtype: torch.dtype, device: torch.device, keep: bool, of_files: bool
) -> DraftModel:
    """The drafter of `config` for the model `target`. Its layers' memory follows the target's."""
    own = config.drafter
    assert own is not None
    if isinstance(own, EagleConfig):
        made: DraftModel = _class(*_EAGLE[own.method])(own, target.shared, dtype, device)
        _store(made, own, dtype, keep, of_files)
    elif own.path != config.path:
        smaller = build_model(own, str(dtype).removeprefix("torch."), str(device), keep_forms=keep, of_files=of_files)  # type: ignore[arg-type]
        made = SmallerModel(smaller, target.shared)
    else:
        mtp = FAMILIES[config.family].mtp
        assert mtp is not None, f"{config.family} has no multi-token prediction module"
        made = _class(*mtp[:2])(own, target.shared, dtype, device)
    set_memory(made, len(config.spec_layers))
    return made


def weights_bytes(model: Module) -> int:
    """Bytes of the region that `materialize` needs."""
    return sum(_aligned(tensor.nbytes) for _, tensor in stored_tensors(model))


def stored_tensors(model: Module) -> Iterator[tuple[str, torch.Tensor]]:
    """All weights in the forms in which they are stored, with their modules' names for them, in an order that the config decides."""
    for module in model.modules():
        yield from module.weights.items()


def materialize(model: Model, region: torch.Tensor) -> None:
    """Make every weight a view of `region`, one-dimensional uint8 of at least `weights_bytes(model)`, in a fixed order.

    Called again with another region, it moves the model there; contents are whatever the region holds.
    """
    offset = 0
    for module in model.modules():
        for name, tensor in module.weights.items():
            raw = region[offset : offset + tensor.nbytes]
            module.weights[name] = raw.view(tensor.dtype).view(tensor.shape)
            offset += _aligned(tensor.nbytes)


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


def dummy_weights(model: Model, seed: int = 0, *, divided: bool = False) -> None:
    """Fill the weights with small random values, each as its form says: norms near 1, indices 0, all others near 0.

    `divided`: the model is a rank's part of one. Modules that every rank has whole get the same values on all ranks.
    """
    generator = torch.Generator(_device(model)).manual_seed(seed)
    with torch.inference_mode():  # weights that were made in this mode change only in it
        for number, module in enumerate(model.modules()):
            if divided:
                generator.manual_seed(seed + number)
            module.randomize(generator)
            LIFE.moved()


def load_weights(
    model: Module,
    path: str | Path,
    progress: Progress | None = None,
    copy: CopyWeight = copy_now,
    share: Share | None = None,
) -> None:
    """Fill every weight from the `*.safetensors` of the model directory `path`, as `model.checkpoint()` says.

    With a `share` the model is that of one of several ranks, and it is filled with its parts of the whole model's tensors.

    Scales of fp8 keys and values are no weights: `kv_scales` reads them.

    Files are mapped and looked through in order. `THREADS` threads copy, so one tensor is read from its file while others are
    on their way to the device. `progress(done, total)` is called with bytes of the files' tensors, from the caller's
    thread. `copy` brings a tensor to where its weight is; threads call it at the same time.

    Raises:
        CheckpointError: a file is missing or damaged, or a tensor is missing, unknown or of another shape or dtype; named.
    """
    directory = Path(path)
    filling = Filling(model, share)
    files = checkpoint_files(directory)
    total = sum(file.stat().st_size for file in files)
    started = time.perf_counter()
    with Copies(
        copy, stream_of(model), lambda done: progress(min(done, total), total) if progress is not None else None
    ) as copies:
        for file in files:
            for given, tensor in _tensors(file, files[file]):
                name, sink = filling.claim(file, given, tensor)
                if sink is not None:
                    copies.add(sink, tensor, Place(file, given, name))
                else:
                    copies.count(tensor.nbytes)
    if scales := filling.scales:
        logger.info("%s: %d scales of fp8 keys and values, such as %s.", directory, len(scales), scales[0])
    filling.check_extra()
    if filling.pending:
        raise CheckpointError(f"{directory}: the checkpoint lacks {filling.lacking(filling.pending)}")
    if unused := filling.unused:
        logger.info("%s: %d tensors such as %s are not used by text generation.", directory, len(unused), unused[0])
    if stream_of(model) is not None:
        torch.cuda.empty_cache()  # what packing took is for pages now
    if progress is not None:
        progress(total, total)
    seconds = time.perf_counter() - started
    logger.info(
        "%s: %s in %.2f s, %s/s.", directory, human_bytes(total), seconds, human_bytes(int(total / max(seconds, 1e-9)))
    )


class Filling:
    """What becomes of the tensors that come for a model, each once, in any order. It is good for one load.

    `names` are those of the whole model's tensors, `pending` those of this rank's that are still to come. `scales` and `unused` came, and fill no weights.
    """

    def __init__(self, model: Module, share: Share | None) -> None:
        """With a `share` the model is that of one of several ranks."""
        declared = model.checkpoint() if share is None else share.checkpoint(model)
        self._model = model
        self.known = {tensor.name: tensor for tensor in declared}
        whole = () if share is None else share.whole.checkpoint()
        self._elsewhere = {tensor.name: tensor for tensor in whole if tensor.name not in self.known}  # in other stages
        self.names = self.known.keys() | self._elsewhere
        # a copy of a tied embedding is looked at where that is
        self._looks = share is None or any(isinstance(tensor.owner, Embedding) for tensor in self.known.values())
        self.pending = {
            name for name, tensor in self.known.items() if not tensor.instead_of and not tensor.sink.optional
        }
        self.scales: list[str] = []
        self.unused: list[str] = []
        self._extra: list[tuple[Path, str, torch.Tensor | None]] = []
        self._filled: dict[str, tuple[str, str]] = {}

    def claim(self, file: Path, given: str, tensor: torch.Tensor) -> tuple[str, Sink | None]:
        """The model's name for a tensor of `file`, and what takes it, if anything does. Its numbers aren't read.

        Raises CheckpointError for a tensor that has come already, or has another shape or dtype.
        """
        own = isinstance(self._model, DraftModel) and self._model.shifted  # a head in files of its own
        name = own_name(tensor_name(given) if own else given, self.names)
        if name in self._filled:
            other, first = self._filled[name]
            where = "it" if other == file.name else other
            raise CheckpointError(
                f"{file} holds {given}, and {where} holds {first}: the same tensor of the model twice."
            )
        self._filled[name] = file.name, given
        sink = _take(self.pending, self.known.get(name))
        if sink is not None:
            _check_tensor(file, name, tensor, sink, self._model.asked_by)
        elif name in self._elsewhere:
            _check_tensor(file, name, tensor, self._elsewhere[name].sink, self._model.asked_by)
        elif name.startswith(self._model.unused_tensors):
            self.unused.append(name)
        elif place_of(name) is not None:
            self.scales.append(name)
        # old checkpoints carry the rotary frequencies, which follow from the config
        elif not name.endswith("rotary_emb.inv_freq") and (self._looks or name != "lm_head.weight"):
            self._extra.append((file, name, tensor if name == "lm_head.weight" else None))
        return name, sink

    def check_extra(self) -> None:
        """Raise CheckpointError for a tensor that isn't the model's. To be called when all copies are done."""
        for file, name, tied in self._extra:
            _check_extra(file, name, tied, self.known, self._model.asked_by)

    def lacking(self, missing: Iterable[str]) -> str:
        """Which tensors are missing, and what asks for them: the format, or the model's sizes."""
        names = sorted(missing)
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        said = f"the tensor {names[0]}{more} that "
        drafter = getattr(self._model, "drafter", None)
        if drafter is not None and drafter.prefix and names[0].startswith(drafter.prefix):
            return f"{said}method mtp asks for; the model's multi-token prediction module is what begins with {drafter.prefix}."
        layer = re.match(r".*?layers\.(\d+)\.", names[0])
        if layer and not any(name.startswith(layer[0]) and name in self._filled for name in self.known):
            return f"{said}config.json asks for. No file has a tensor of layer {layer[1]}; is num_hidden_layers right?"
        quantised = isinstance(self.known[names[0]].owner, Linear | Experts)
        return f"{said}{self._model.asked_by if quantised else Module.asked_by} asks for."


def _device(model: Module) -> torch.device:
    """Where the weights are."""
    return next(tensor.device for module in model.modules() for tensor in module.weights.values())


def stream_of(model: Module) -> torch.cuda.Stream | None:
    """The stream that orders what is done to the weights: the caller's current one. None on a CPU."""
    device = _device(model)
    return torch.cuda.current_stream(device) if device.type == "cuda" else None


class Place(NamedTuple):
    """A tensor of a checkpoint: its file, its name there, and the name by which the model knows it; the tensor, if no file holds it."""

    file: Path
    given: str
    name: str
    held: torch.Tensor | None = None

    def __str__(self) -> str:
        return f"{self.file}: {self.name}"


def _damage(place: Place, dtype: torch.dtype) -> str:
    """What is wrong with a tensor that is NaN or infinite somewhere, if not in the file then in `dtype`."""
    numbers = place.held
    if numbers is None:
        with opened(place.file) as tensors:
            numbers = tensors.get_tensor(place.given)
    if numbers.dtype not in FLOATS:
        return HOLDS_NAN
    wrong = (~numbers.isfinite()).nonzero()
    if len(wrong):
        first = tuple(wrong[0].tolist())
        said = f"holds {numbers[first].item():g} at {list(first)}; weights must be finite. The file is damaged."
        return said if place.held is None else said.removesuffix(" The file is damaged.")
    largest = numbers.abs().max().item()
    return f"holds {largest:g}, {beyond(dtype, largest)}"


class Copies:
    """Copies made by threads, of which only a few are begun ahead; `done` is told the bytes that are finished.

    Leaving the context waits for all copies, and raises the first error. After an error no copy is left running.
    """

    def __init__(self, copy: CopyWeight, stream: torch.cuda.Stream | None, done: Callable[[int], None]) -> None:
        self._copy, self._stream, self._done, self._bytes = copy, stream, done, 0
        self._pool = ThreadPoolExecutor(THREADS, thread_name_prefix="weights")
        self._begun: deque[tuple[Future[None], int]] = deque()
        self._looked_at: list[tuple[Place, torch.Tensor]] = []

    def __enter__(self) -> Copies:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            while kind is None and self._begun:
                self._finish()
            if kind is None and self._looked_at:
                self._look()
        finally:
            self._pool.shutdown(cancel_futures=True)

    def _look(self) -> None:
        """Raise CheckpointError for the first tensor of which the evidence shows damage. The host waits once for each dtype."""
        damaged = []
        for dtype in {shown.dtype for _, shown in self._looked_at}:
            own = [(place, shown.flatten()) for place, shown in self._looked_at if shown.dtype == dtype]
            parts = torch.cat([shown for _, shown in own]).cpu().split([len(shown) for _, shown in own])
            damaged += [(place, dtype) for (place, _), part in zip(own, parts, strict=True) if is_damage(part)]
        if damaged:
            place, dtype = min(damaged, key=lambda found: found[0])
            raise CheckpointError(f"{place} {_damage(place, dtype)}")

    def add(self, sink: Sink, source: torch.Tensor, place: Place) -> None:
        """Begin a copy, once there is a thread for it soon. A small one that stays on the host is made at once."""
        if self._copy is copy_now and source.nbytes < _SMALL:
            self._put(sink, source, place)
            self.count(source.nbytes)
            return
        while len(self._begun) >= 2 * THREADS:
            self._finish()
        self._begun.append((self._pool.submit(self._put, sink, source, place), source.nbytes))

    def _put(self, sink: Sink, source: torch.Tensor, place: Place) -> None:
        # A thread has a mode and a current stream of its own. Weights made in this mode change only in it, and what a sink
        # computes must come after the copies that it computes from. Without a stream, torch.cuda would still start CUDA.
        stream = nullcontext() if self._stream is None else torch.cuda.stream(self._stream)
        try:
            with torch.inference_mode(), stream:
                shown = sink.put(source, self._copy)
        except SinkError as error:
            raise CheckpointError(f"{place} {error}") from None
        if shown is not None:
            self._looked_at.append((place, shown))

    def count(self, size: int) -> None:
        """Count bytes that need no copy."""
        self._bytes += size
        LIFE.moved()
        self._done(self._bytes)

    def _finish(self) -> None:
        future, size = self._begun.popleft()
        future.result()
        self.count(size)


def own_name(name: str, known: Container[str]) -> str:
    """The name by which the model knows a tensor of the checkpoint; `name` itself where it doesn't."""
    if name in known:
        return name
    candidates = [f"model.{name}"]  # a checkpoint saved without its head, as embedding models are
    candidates += [ours + name[len(theirs) :] for theirs, ours in _TEXT_NAMES if name.startswith(theirs)]
    for theirs, ours in _SCALE_NAMES:
        if name.endswith(theirs):
            candidates += [one.removesuffix(theirs) + ours for one in (name, *candidates)]
    return next((one for one in candidates if one in known or one == "lm_head.weight"), name)


def _take(pending: set[str], tensor: CheckpointTensor | None) -> Sink | None:
    """What takes a tensor of the checkpoint, if the model knows it and what it stands for is still to be filled.

    The first of several tensors that together stand for others makes all of them required in the others' place.
    """
    if tensor is None:
        return None
    if tensor.name in pending:
        pending.remove(tensor.name)
        return tensor.sink
    if not tensor.instead_of:
        return tensor.sink if tensor.sink.optional else None
    if not pending.issuperset(tensor.instead_of):
        return None
    pending.difference_update(tensor.instead_of)
    pending.update(tensor.beside)
    return tensor.sink


def _check_tensor(file: Path, name: str, tensor: torch.Tensor, sink: Sink, asked_by: str) -> None:
    if sink.dtypes == FLOATS and tensor.dtype not in FLOATS:  # packed numbers have other shapes, too
        raise CheckpointError(
            f"{file}: {name} has dtype {name_of(tensor.dtype)}, as quantised weights have; {asked_by} asks for floats. How a module is "
            "quantised is said in quantization_config (quant_method, with quant_algo or config_groups), and it says nothing of this one."
        )
    if not sink.takes(tuple(tensor.shape)):
        raise CheckpointError(f"{file}: {name} has shape {list(tensor.shape)}; {asked_by} asks for {list(sink.shape)}.")
    if tensor.dtype not in sink.dtypes:
        taken = ", ".join(name_of(dtype) for dtype in sink.dtypes)
        raise CheckpointError(f"{file}: {name} has dtype {name_of(tensor.dtype)}; {asked_by} asks for {taken}.")


def _check_extra(
    file: Path, name: str, tied: torch.Tensor | None, known: Mapping[str, CheckpointTensor], asked_by: str
) -> None:
    """A tied model's file may repeat the embedding as its output weights; nothing else may be left over."""
    tables = ((one.owner.table_VD, one.sink) for one in known.values() if isinstance(one.owner, Embedding))
    embedding, sink = next(tables, (None, None))
    if tied is None or embedding is None or sink is None:
        said = "config.json describes" if asked_by == Module.asked_by else f"config.json describes with {asked_by}"
        raise CheckpointError(f"{file}: the tensor {name} is not part of the model that {said}.")
    own = sink.part_of(tied) if tied.shape == sink.shape else tied
    if own.shape != embedding.shape or not torch.equal(own.to(embedding.dtype).to(embedding.device), embedding):
        raise CheckpointError(
            f"{file}: {name} differs from model.embed_tokens.weight, but config.json says tie_word_embeddings."
        )


def checkpoint_files(directory: Path) -> dict[Path, list[str]]:
    """The checkpoint's files, each with the tensors that the index, if there is one, says it holds.

    Raises:
        CheckpointError: there is none, the index is damaged, or a file that it names is missing.
    """
    index = directory / _INDEX
    if not index.is_file():
        single = directory / "model.safetensors"
        if single.is_file():
            return {single: []}
        others = sorted(x.name for x in directory.glob("*.bin")) + sorted(x.name for x in directory.glob("*.pth"))
        hint = f" {others[0]} is a pickle, which is never read; convert it to safetensors." if others else ""
        raise CheckpointError(f"{directory} has no model.safetensors and no {_INDEX}.{hint}")
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(x, str) for x in weight_map.values()):
        raise CheckpointError(f"{index} has no weight_map of tensor names to file names.")
    found: dict[Path, list[str]] = {}
    for name, file in weight_map.items():
        if Path(file).name != file or len(file) > _LONGEST_NAME or "\0" in file:
            raise CheckpointError(f"{index}: {name} is in {file!r:.120}, which is not a plain file name.")
        found.setdefault(directory / file, []).append(name)
    for path in found:
        if not path.is_file():
            raise CheckpointError(f"{index} names {path.name}, which is not there.")
    return dict(sorted(found.items()))


def tensor_dtypes(directory: Path) -> dict[str, str]:
    """The dtype of every tensor of the checkpoint in `directory`, such as "BF16" or "F8_E4M3"; empty if there is no checkpoint.

    Only the files' headers are read. A checkpoint with a missing or damaged file says nothing: its config can be planned with, and
    whoever loads it hears why it can't be.
    """
    found: dict[str, str] = {}
    try:
        for file in checkpoint_files(directory):
            with opened(file) as tensors:
                found |= {name: tensors.get_slice(name).get_dtype() for name in tensors.keys()}  # noqa: SIM118, no mapping
    except CheckpointError:
        return {}
    return found


def opened(file: Path) -> Any:
    """A file's tensors, to be read in a `with` statement. Raises CheckpointError if it is damaged."""
    try:
        return safe_open(file, framework="pt", device="cpu")
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{file} is not a complete safetensors file: {error}.") from None


def _tensors(file: Path, expected: list[str]) -> Iterator[tuple[str, torch.Tensor]]:
    with opened(file) as tensors:
        names = set(tensors.keys())
        missing = sorted(set(expected) - names)
        if missing:
            raise CheckpointError(f"{file} lacks the tensor {missing[0]}, which {_INDEX} says it holds.")
        for name in sorted(names):
            yield name, tensors.get_tensor(name)
