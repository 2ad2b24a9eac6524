"""A program of a user who checks types. mypy reads it with the package's own files; nothing runs it."""

from __future__ import annotations

from pagerunner import LLM, AsyncEngine, EngineArgs, LoRARequest, RequestOutput, SamplingParams, StructuredOutputsParams


def offline() -> list[str]:
    """Lists and tuples are both sequences, and what an output holds has its types."""
    params = SamplingParams(
        stop=["a", "b"], stop_token_ids=[1, 2], bad_words=("x", "y"), allowed_token_ids=[3, 4], logit_bias={5: 1}
    )
    params.stop = "one"
    params.stop = ["one", "two"]
    params.structured_outputs = StructuredOutputsParams(choice=["yes", "no"])
    llm = LLM("demo", max_model_len=256, enable_lora=True)
    outputs: list[RequestOutput] = llm.generate(["a", "b"], [params, params])
    outputs += llm.generate({"prompt_token_ids": [1, 2, 3]}, lora_request=LoRARequest("sql", 1, "/adapters/sql"))
    outputs += llm.chat([[{"role": "user", "content": "a"}], [{"role": "user", "content": "b"}]], params)
    return [step.outputs[0].text for step in llm.stream("a", params)] + [one.outputs[0].text for one in outputs]


async def online() -> str:
    """The text of an answer, as it grows."""
    engine, text = await AsyncEngine.from_args(EngineArgs(model="demo")), ""
    async for step in engine.generate("a", request_id="0", sampling_params=SamplingParams(max_tokens=8)):
        text = step.outputs[0].text
    await engine.shutdown()
    return text
