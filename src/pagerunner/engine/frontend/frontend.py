"""The text side of an engine: what turns prompts into requests and updates into outputs. Torch-free."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from pagerunner.config import EngineArgs
from pagerunner.engine.frontend.drafts import DraftLog
from pagerunner.engine.frontend.input_processor import InputProcessor
from pagerunner.engine.frontend.output_processor import OutputProcessor
from pagerunner.engine.startup.speculation import read_options, resolve_speculation
from pagerunner.engine.structured_output.grammar_door import GrammarDoor
from pagerunner.engine.structured_output.options import read_structured_outputs_config
from pagerunner.errors import CheckpointError, ConfigError, InvalidRequestError
from pagerunner.models.configs.base import ModelConfig
from pagerunner.models.configs.pooling import Pooler, read_pooler
from pagerunner.models.configs.reader import read_model_config
from pagerunner.text.chat_template import ChatTemplate
from pagerunner.text.tokenizer import Tokenizer, end_token_ids, tokenizer_file
from pagerunner.types import SamplingParams


@dataclass(frozen=True)
class Frontend:
    """A model's tokenizer, the two processors around the engine core, the checkpoint's default parameters, its pooling."""

    tokenizer: Tokenizer | None
    inputs: InputProcessor
    outputs: OutputProcessor
    default_sampling_params: SamplingParams
    pooler: Pooler | None = None

    def require_tokenizer(self) -> Tokenizer:
        """The tokenizer. Raises ConfigError when the engine was started without one."""
        if self.tokenizer is None:
            raise ConfigError("This engine has no tokenizer: it was started with skip_tokenizer_init=True.")
        return self.tokenizer


def check_options(args: EngineArgs) -> None:
    """Refuse before any weights are loaded what `build_frontend` would refuse after it, if only the arguments say so.

    Raises:
        ConfigError, CheckpointError: the chat template can't be read, or structured_outputs_config or speculative_config is no such JSON.
    """
    if args.chat_template:
        ChatTemplate.from_option(args.chat_template)
    read_structured_outputs_config(args.structured_outputs_config)
    read_options(args.speculative_config)


def check_tokenizer(args: EngineArgs) -> EngineArgs:
    """`args`. A checkpoint without a tokenizer is refused before its weights are read: raises CheckpointError, or ConfigError if the model is unknown, too."""
    if not args.skip_tokenizer_init and (Path(args.model) / "config.json").is_file():
        try:
            tokenizer_file(args.tokenizer or args.model)
        except CheckpointError:
            read_model_config(args.model, hf_overrides=args.hf_overrides, quantization=args.quantization)
            raise  # if it isn't the model itself that can't be run
    return args


def build_frontend(args: EngineArgs, max_model_len: int) -> Frontend:
    """The text side for a core that serves `max_model_len` tokens.

    Raises:
        ConfigError, CheckpointError: the directory's config or tokenizer is missing, broken or unsupported.
    """
    model = read_model_config(args.model, max_model_len, args.hf_overrides, quantization=args.quantization)
    tokenizer = (
        None if args.skip_tokenizer_init else Tokenizer.from_path(args.tokenizer or args.model, args.chat_template)
    )
    return Frontend(
        tokenizer=tokenizer,
        inputs=InputProcessor(
            tokenizer,
            vocab_size=model.vocab_size,
            max_model_len=max_model_len,
            eos_token_ids=end_token_ids(model.eos_token_ids, tokenizer),
            grammars=None if tokenizer is None else _grammar_door(tokenizer, model, args),
            seed=args.seed,
        ),
        outputs=OutputProcessor(tokenizer, new_draft_log=_draft_logs(args, model)),
        default_sampling_params=_default_params(model, args.generation_config),
        pooler=read_pooler(args.model, args.pooler_config),
    )


def _draft_logs(args: EngineArgs, model: ModelConfig) -> Callable[[], DraftLog] | None:
    detail = args.per_request_spec_decode_metrics
    config = None if detail == "none" else resolve_speculation(args, model)
    return None if config is None else partial(DraftLog, config.num_speculative_tokens, detail == "detailed")


def _grammar_door(tokenizer: Tokenizer, model: ModelConfig, args: EngineArgs) -> GrammarDoor:
    ends = end_token_ids(model.eos_token_ids, tokenizer)
    size = max(model.vocab_size, tokenizer.vocab_size)
    config = read_structured_outputs_config(args.structured_outputs_config)
    return GrammarDoor(tokenizer.to_json(), size, ends, disable_any_whitespace=config.disable_any_whitespace)


def _default_params(model: ModelConfig, source: str) -> SamplingParams:
    """What the checkpoint's generation_config.json recommends, over the defaults; `source="vllm"` ignores it."""
    if source == "vllm":
        return SamplingParams()
    try:
        return SamplingParams(**model.sampling_defaults)
    except InvalidRequestError as error:
        raise CheckpointError(
            f"{model.path}/generation_config.json: {error} Mend it or pass generation_config=vllm."
        ) from error
