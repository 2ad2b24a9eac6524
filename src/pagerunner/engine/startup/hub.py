"""Models by their names on the Hugging Face Hub: downloaded once into the hub's cache, then read from there.

Config (with what older quantising tools write beside it), tokenizer, chat template, pooling and safetensors are fetched. Pickles and Python
files are never fetched. The small files come first, then the weights that their index names, of the same commit. `huggingface_hub` does the
work and is imported when a name is used; its settings apply: HF_TOKEN, HF_HUB_OFFLINE, HF_ENDPOINT, HF_HOME. Torch-free.
"""

from __future__ import annotations

import errno
import glob
import logging
import re
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import msgspec

from pagerunner.config import EngineArgs
from pagerunner.demo import find_model
from pagerunner.engine.startup.speculation import read_options, with_verifier
from pagerunner.errors import CheckpointError, ConfigError
from pagerunner.models.configs.json_files import read_json

logger = logging.getLogger(__name__)
_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_INDEX = "model.safetensors.index.json"
_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "chat_template.json",
)
_KEPT = "Try again; the next start keeps the files that arrived."
_CONFIG_FILES = ("config.json", "hf_quant_config.json")
_MODEL_FILES = (*_CONFIG_FILES, "generation_config.json", "modules.json", "?_Pooling/config.json", _INDEX)


def is_hub_name(model: str) -> bool:
    """Whether `model` is no place on this machine, and has the form of a name on the hub, such as Qwen/Qwen3-0.6B."""
    return _NAME.fullmatch(model) is not None and not Path(model).exists() and not model.endswith(".json")


def fetch_checkpoint(args: EngineArgs, *, show_progress: bool = True) -> EngineArgs:
    """`args` with directories in place of names on the hub. Files that the cache doesn't have are downloaded.

    A path that exists is never looked up. `served_model_name` keeps the name that the user gave. With load_format="dummy" no
    weights are fetched. A drafter that names its model stands for both, as in vLLM.

    Raises:
        CheckpointError: there is no such repository, revision or file, it can't be had, or the disk is full.
    """
    found: dict[str, Any] = {}
    if is_hub_name(args.model):
        fetched = _fetch(args.model, args.revision, args.download_dir, (*_MODEL_FILES, *_TOKENIZER_FILES))
        directory = _with_config(args.model, fetched)
        if args.load_format != "dummy":
            _fetch_weights(args.model, args.download_dir, directory, show_progress)
        if (pair := with_verifier(args, directory)) is not None:
            return fetch_checkpoint(pair, show_progress=show_progress)
        found |= {"model": str(directory), "served_model_name": args.served_model_name or args.model}
    elif args.revision is not None and not Path(args.model).exists():
        raise CheckpointError(f"There is no model directory {args.model}, and it is not a name on the hub (ORG/NAME).")
    elif (pair := with_verifier(args, Path(args.model))) is not None:
        return fetch_checkpoint(pair, show_progress=show_progress)
    if args.tokenizer is not None and is_hub_name(args.tokenizer):
        revision = args.tokenizer_revision or (args.revision if args.tokenizer == args.model else None)
        found["tokenizer"] = str(
            _fetch(args.tokenizer, revision, args.download_dir, ("config.json", *_TOKENIZER_FILES))
        )
    elif args.tokenizer_revision is not None and args.tokenizer is None:
        raise ConfigError("tokenizer_revision needs tokenizer: the model's own comes with revision.")
    return fetch_drafter(
        msgspec.structs.replace(args, **found) if found else args,
        weights=args.load_format != "dummy",
        show_progress=show_progress,
    )


def fetch_drafter(args: EngineArgs, *, weights: bool, show_progress: bool = False) -> EngineArgs:
    """`args` with the directory of a drafter that speculative_config names as on the hub, or as a demo. Of one on the hub the config comes, and its `weights` if wanted.

    Raises:
        CheckpointError: as `fetch_checkpoint`.
    """
    options = read_options(args.speculative_config)
    if options is None or options.model is None:
        return args
    place, demo = find_model(options.model)
    if demo is None and not is_hub_name(options.model):
        if options.revision is not None:
            raise ConfigError(
                f"speculative_config: revision={options.revision!r} is of a repository on the hub, and model={options.model!r} is none. Leave it out."
            )
        return args
    if demo is None:
        wanted = (*_CONFIG_FILES, _INDEX)
        directory = _with_config(options.model, _fetch(options.model, options.revision, args.download_dir, wanted))
        if weights:
            _fetch_weights(options.model, args.download_dir, directory, show_progress)
        place = str(directory)
    given = {name: value for name, value in msgspec.structs.asdict(options).items() if value is not None}
    return msgspec.structs.replace(args, speculative_config={**given, "model": place, "revision": None})


def fetch_config(model: str, revision: str | None = None, download_dir: str | None = None) -> str:
    """The directory of a hub model's configuration, of which nothing else is fetched; `model` itself where it isn't a name on the hub.

    Raises:
        CheckpointError: as `fetch_checkpoint`.
    """
    if not is_hub_name(model):
        return model
    return str(_with_config(model, _fetch(model, revision, download_dir, _CONFIG_FILES)))


def _with_config(model: str, directory: Path) -> Path:
    if not (directory / "config.json").is_file():
        raise CheckpointError(f"{model} on the hub has no config.json, so it is not a model for this engine.")
    return directory


def _fetch_weights(model: str, download_dir: str | None, directory: Path, show_progress: bool) -> None:
    """Download the weights of the commit that `directory` is a snapshot of."""
    commit = directory.name
    names = {"model.safetensors"}
    if (directory / _INDEX).is_file():
        weight_map = read_json(directory / _INDEX).get("weight_map")
        names = set(weight_map.values()) if isinstance(weight_map, dict) else set()
        if not names or not all(isinstance(name, str) and Path(name).name == name for name in names):
            raise CheckpointError(f"{model}: {_INDEX} has no weight_map of tensor names to plain file names.")
    _fetch(model, commit, download_dir, tuple(map(glob.escape, sorted(names))), show_progress)
    missing = [name for name in sorted(names) if not (directory / name).is_file()]
    if missing:
        raise CheckpointError(
            f"{model} on the hub has no {missing[0]}. Only safetensors are read, never pickles (*.bin, *.pt) or GGUF; "
            "look for a repository of the model that has them."
        )


def _fetch(
    model: str, revision: str | None, download_dir: str | None, patterns: tuple[str, ...], show_progress: bool = False
) -> Path:
    """The snapshot's directory, with the files that match."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.utils.tqdm import tqdm

    interrupted = threading.Event()

    class Bar(tqdm):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            shown = kwargs if show_progress else {**kwargs, "disable": True}
            super().__init__(*args, **shown)  # type: ignore[no-untyped-call]

        def update(self, n: float | None = 1) -> bool | None:
            if interrupted.is_set():
                raise _InterruptedError
            return super().update(n)  # type: ignore[no-any-return]

    with _said(model, revision, download_dir), _told_of_interrupts(interrupted):
        found = snapshot_download(
            model,
            revision=revision,
            cache_dir=download_dir,
            library_name="pagerunner",
            allow_patterns=list(patterns),
            tqdm_class=Bar,
        )
        return Path(found)


class _InterruptedError(Exception):
    """Ends a thread that downloads."""


@contextmanager
def _told_of_interrupts(interrupted: threading.Event) -> Iterator[None]:
    """Set the event at Ctrl-C, for the threads that download.

    Only the main thread gets a Ctrl-C, and it waits for these threads. Without the event they would first finish files of
    gigabytes."""
    before = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(before):
        yield
        return

    def on_interrupt(number: int, frame: FrameType | None) -> None:
        interrupted.set()
        before(number, frame)

    signal.signal(signal.SIGINT, on_interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


@contextmanager
def _said(model: str, revision: str | None, download_dir: str | None) -> Iterator[None]:
    """Turn what can go wrong with a download into one sentence."""
    import httpx
    from huggingface_hub import constants, errors, get_token

    where = constants.ENDPOINT
    cache = download_dir or constants.HF_HUB_CACHE
    short = revision[:8] if revision and re.fullmatch("[0-9a-f]{40}", revision) else revision
    shown = f"{model} (revision {short})" if revision else model
    try:
        yield
    except errors.GatedRepoError:
        said = (
            f"{model} is gated: its makers ask for an agreement. Accept it at {where}/{model}, and set HF_TOKEN to a token of "
            "your account."
        )
    except errors.RepositoryNotFoundError:
        token = "the token in use can't see it" if get_token() else "it is private, for which HF_TOKEN must be set"
        said = (
            f"There is no directory {model} here, and the hub at {where} shows no model of this name. Check the spelling; or "
            f"{token}."
        )
    except errors.RevisionNotFoundError:
        said = f"{model} on the hub has no revision {revision!r}; it is a branch, a tag or a commit."
    except errors.RemoteEntryNotFoundError as error:
        said = f"{shown} on the hub lacks a file that is needed: {_first_line(error)}"
    except (errors.IncompleteSnapshotError, errors.LocalEntryNotFoundError, errors.OfflineModeIsEnabled) as error:
        if constants.HF_HUB_OFFLINE:
            said = (
                f"{shown} is not complete in the cache {cache}, and HF_HUB_OFFLINE is set, so nothing is downloaded. Unset it "
                "once while connected, or give a directory."
            )
        else:
            said = (
                f"The hub at {where} can't be reached, and {shown} is not complete in the cache {cache}: "
                f"{_first_line(error.__cause__ or error)} {_KEPT}"
            )
    except errors.HfHubHTTPError as error:
        status = error.response.status_code if error.response is not None else "no"
        if status in (401, 403):
            said = f"The hub at {where} refuses {shown} (status {status}). Set HF_TOKEN to a token that may read it."
        else:
            said = f"The hub at {where} answered {shown} with status {status}: {_first_line(error)} {_KEPT}"
    except errors.HFValidationError as error:
        said = f"{model!r} is not a name on the hub: {_first_line(error)}"
    except httpx.HTTPError as error:
        said = f"Downloading {shown} from {where} broke off ({type(error).__name__}): {_first_line(error)} {_KEPT}"
    except OSError as error:
        if error.errno != errno.ENOSPC:
            said = f"{shown} can't be downloaded into {cache}: {_first_line(error)}"
        else:
            said = f"The disk of the cache {cache} is full; {shown} needs more room. Free some, or set --download-dir."
    else:
        return
    raise CheckpointError(said)


def _first_line(error: BaseException) -> str:
    """The first line of a message, as a sentence."""
    line = (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")
    return f"{line[:300]}."
