"""AsyncEngine and parameters that their owner sets anew for the next request."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from helpers import fake_core
from helpers.serving import write_text_side
from pagerunner.config import EngineArgs
from pagerunner.engine.frontend.async_engine import AsyncEngine
from pagerunner.engine.frontend.input_processor import InputProcessor
from pagerunner.errors import InvalidRequestError
from pagerunner.types import SamplingParams


@pytest.mark.usefixtures("forked")
def test_a_request_keeps_the_parameters_of_its_begin_and_the_engine_its_defaults(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A grammar may take seconds to compile, in which stop strings were the old ones and all else was new."""

    async def main() -> None:
        args = EngineArgs(model=str(write_text_side(tmp_path)))
        engine = await AsyncEngine.from_args(args, core_factory=fake_core.FACTORY)
        params = engine.default_sampling_params
        params.max_tokens = 3

        async def prepare(self: InputProcessor, given: SamplingParams) -> None:
            params.max_tokens, params.n = 1, 2

        monkeypatch.setattr(InputProcessor, "prepare", prepare)
        try:
            outputs = [one async for one in engine.generate([5, 6], params, "a")]
            assert [one.token_ids for one in outputs[-1].outputs] == [[5, 6, 5]]
            assert engine.default_sampling_params == SamplingParams()
            with pytest.raises(InvalidRequestError, match="must be a SamplingParams, got"):
                await engine.add_request("b", [5, 6], {"max_tokens": 3})  # type: ignore[arg-type]
        finally:
            await engine.shutdown()

    asyncio.run(main())
