"""What verbs that run a model share: the demo checkpoints, opening an engine, and when to draw progress bars."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pagerunner.cli.options import engine_args
from pagerunner.demo import demo_names, demo_path, find_model
from pagerunner.errors import CheckpointError, ConfigError
from pagerunner.threads import settle_threads

if TYPE_CHECKING:
    from pagerunner.config import EngineArgs
    from pagerunner.llm import LLM


def demo_model_path() -> Path:
    """Directory of the demo checkpoint inside the package.

    Raises:
        CheckpointError: the package was installed without it.
    """
    if not demo_names():
        raise CheckpointError("the demo model is missing from this installation; name a model with --model.")
    return demo_path()


def note(namespace: argparse.Namespace, text: str) -> None:
    """Tell the user something on stderr, unless --quiet."""
    if not namespace.quiet:
        print(text, file=sys.stderr, flush=True)


def server_url(url: str) -> str:
    """The address of a server in front of its paths, of one that may be given as OpenAI's clients take it, `http://host:8000/v1`."""
    return url.rstrip("/").removesuffix("/v1")


def show_progress(namespace: argparse.Namespace) -> bool:
    """Whether progress bars make sense: a person watches stderr and didn't ask for quiet."""
    return not namespace.quiet and sys.stderr.isatty()


def resolve_model(namespace: argparse.Namespace) -> tuple[EngineArgs, str | None]:
    """The engine arguments the flags ask for, and the demo's name if a demo is what runs.

    `demo` stands in for a model that wasn't named.
    """
    if namespace.model is None:
        note(namespace, "No model named: using the demo model inside the package (--model DIR runs another).")
        return engine_args(namespace, str(demo_model_path()), served_model_name="demo"), "demo"
    model, demo = find_model(namespace.model)
    args = engine_args(namespace, model, **({"served_model_name": demo} if demo else {}))
    return fetched(namespace, args), demo


def fetched(namespace: argparse.Namespace, args: EngineArgs) -> EngineArgs:
    """`args` with the directories of models that were named as on the hub; tells the user before it downloads."""
    from pagerunner.engine.startup.hub import fetch_checkpoint, is_hub_name

    if is_hub_name(args.model):
        note(namespace, f"{args.model} is no directory here: looking on the Hugging Face Hub.")
    return fetch_checkpoint(args, show_progress=show_progress(namespace))


def one_model(namespace: argparse.Namespace) -> str | None:
    """The model named by position or by --model.

    Raises:
        ConfigError: both are given and differ.
    """
    named: str | None = namespace.model
    tag: str | None = namespace.model_tag
    if named is not None and tag is not None and named != tag:
        raise ConfigError(f"two models are named, {tag!r} and --model {named!r}; give one.")
    return named if named is not None else tag


def open_llm(args: EngineArgs, *, use_tqdm: bool = False) -> LLM:
    """Load a model, with a progress bar if asked; imports torch."""
    settle_threads()
    from pagerunner.llm import LLM

    values: dict[str, Any] = {name: getattr(args, name) for name in args.__struct_fields__}
    return LLM(**values, use_tqdm=use_tqdm)
