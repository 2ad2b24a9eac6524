"""The text side of an engine: what turns prompts into requests and updates into outputs. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from pagerunner.config import EngineArgs
from pagerunner.engine.generation_config import default_sampling_params
from pagerunner.engine.input_processor import InputProcessor
from pagerunner.engine.output_processor import OutputProcessor
from pagerunner.errors import ConfigError
from pagerunner.models.config import read_model_config
from pagerunner.models.tokenizer import Tokenizer
from pagerunner.types import SamplingParams


@dataclass(frozen=True)
class Frontend:
    """A model's tokenizer, the two processors around the engine core, and the checkpoint's default parameters."""

    tokenizer: Tokenizer | None
    inputs: InputProcessor
    outputs: OutputProcessor
    default_sampling_params: SamplingParams

    def require_tokenizer(self) -> Tokenizer:
        """The tokenizer. Raises ConfigError when the engine was started without one."""
        if self.tokenizer is None:
            raise ConfigError("This engine has no tokenizer: it was started with skip_tokenizer_init=True.")
        return self.tokenizer


def build_frontend(args: EngineArgs, max_model_len: int) -> Frontend:
    """The text side for a core that serves `max_model_len` tokens.

    Raises:
        ConfigError, CheckpointError: the directory's config or tokenizer is missing, broken or unsupported.
    """
    model = read_model_config(args.model)
    tokenizer = (
        None if args.skip_tokenizer_init else Tokenizer.from_path(args.tokenizer or args.model, args.chat_template)
    )
    return Frontend(
        tokenizer=tokenizer,
        inputs=InputProcessor(
            tokenizer,
            vocab_size=model.vocab_size,
            max_model_len=max_model_len,
            eos_token_ids=model.eos_token_ids,
            seed=args.seed,
        ),
        outputs=OutputProcessor(tokenizer),
        default_sampling_params=default_sampling_params(Path(args.model), args.generation_config),
    )
