"""What published models keep in memory, as spec lists.

The sizes were not read from the models' files: they are the ones that reproduce the page and state sizes that vLLM 0.26
computes for these models. Qwen3.5-397B, Nemotron-3-Nano and DeepSeek-V4-Flash are such models' likenesses: parts of their
configurations were only known from mirrors and notes.

Only memory is described; most of these models need more than their specs to run. bfloat16 unless said otherwise.
"""

from __future__ import annotations

from dataclasses import dataclass

from pagerunner.memory.specs import FullKV, LatentKV, RecurrentState, Spec, WindowKV


@dataclass(frozen=True, slots=True)
class ModelMemory:
    """One model: its pieces of memory in layer order, and the length in tokens that it is planned for."""

    name: str
    specs: tuple[Spec, ...]
    length: int


def gemma3_27b() -> ModelMemory:
    """62 layers, every sixth full, 16 heads of 128, window 1,024 (google/gemma-3-27b-it)."""
    full, window = FullKV(16, 128, "bfloat16"), WindowKV(16, 128, "bfloat16", window=1024)
    return ModelMemory("Gemma-3-27B", tuple(full if (i + 1) % 6 == 0 else window for i in range(62)), 131_072)


def gpt_oss_20b() -> ModelMemory:
    """24 layers, window 128 and full in turn, 8 heads of 64 (openai/gpt-oss-20b)."""
    full, window = FullKV(8, 64, "bfloat16"), WindowKV(8, 64, "bfloat16", window=128)
    return ModelMemory("gpt-oss-20b", (window, full) * 12, 131_072)


def gated_delta(value_heads: int, state_dtype: str, key_heads: int = 16, dim: int = 128) -> RecurrentState:
    """A gated delta rule layer: the last 3 inputs of its convolution, and one matrix per value head."""
    channels = 2 * key_heads * dim + value_heads * dim
    return RecurrentState(((channels, 3), (value_heads, dim, dim)), ("bfloat16", state_dtype))


def _three_to_one(name: str, layers: int, kv_heads: int, state: RecurrentState) -> ModelMemory:
    return ModelMemory(name, (state, state, state, FullKV(kv_heads, 256, "bfloat16")) * (layers // 4), 262_144)


def qwen3_next_80b() -> ModelMemory:
    """48 layers, three of gated delta rule to one of full attention (Qwen/Qwen3-Next-80B-A3B-Instruct)."""
    return _three_to_one("Qwen3-Next-80B", 48, 2, gated_delta(32, "bfloat16"))


def qwen35_27b() -> ModelMemory:
    """64 layers, three to one, state in float32 (Qwen/Qwen3.5-27B)."""
    return _three_to_one("Qwen3.5-27B", 64, 4, gated_delta(48, "float32"))


def qwen35_35b() -> ModelMemory:
    """40 layers, three to one, state in float32 (Qwen/Qwen3.5-35B-A3B)."""
    return _three_to_one("Qwen3.5-35B-A3B", 40, 2, gated_delta(32, "float32"))


def qwen35_397b() -> ModelMemory:
    """60 layers, three to one, 64 value heads, state in float32."""
    return _three_to_one("Qwen3.5-397B", 60, 2, gated_delta(64, "float32"))


def nemotron3_nano() -> ModelMemory:
    """23 Mamba-2 layers (64 heads of 64, 128 state elements, 8 groups, state in float32) and 6 of attention."""
    mamba = RecurrentState(((64 * 64 + 2 * 8 * 128, 3), (64, 64, 128)), ("bfloat16", "float32"))
    return ModelMemory("Nemotron-3-Nano", (mamba,) * 23 + (FullKV(2, 128, "bfloat16"),) * 6, 262_144)


def deepseek_v3() -> ModelMemory:
    """61 latent layers of 512 + 64 (deepseek-ai/DeepSeek-V3)."""
    return ModelMemory("DeepSeek-V3", (LatentKV(512, 64, "bfloat16"),) * 61, 163_840)


def deepseek_v32_fp8() -> ModelMemory:
    """61 latent layers in fp8 with a scale per 128 elements, and indexer keys of 128 with one scale."""
    latent = LatentKV(
        512, 64, "fp8_e4m3", rope_dtype="bfloat16", scale_bytes=16, indexer_dim=128, indexer_scale_bytes=4
    )
    return ModelMemory("DeepSeek-V3.2 (fp8)", (latent,) * 61, 163_840)


def deepseek_v4_flash() -> ModelMemory:
    """43 layers: all with a window of 128; 21 also compress 4 tokens to one (with indexer keys), 20 compress 128.

    Vectors are 448 fp8 elements with 8 bytes of scales, and 64 rotary ones in bfloat16. A compressor
    gathers tokens that don't fill a slot yet, as float32 state of fixed size. Where 4 tokens become one, it holds 8 tokens (two
    overlapping slots) of 2,048 numbers, and of 512 for the indexer keys. Where 128 tokens become one, it holds 128 tokens
    of 1,024 numbers.
    """
    window = LatentKV(448, 64, "fp8_e4m3", rope_dtype="bfloat16", scale_bytes=8, byte_scales=7, window=128)
    few = LatentKV(
        448,
        64,
        "fp8_e4m3",
        compression=4,
        rope_dtype="bfloat16",
        scale_bytes=8,
        byte_scales=7,
        indexer_dim=128,
        indexer_scale_bytes=4,
    )
    many = LatentKV(448, 64, "fp8_e4m3", compression=128, rope_dtype="bfloat16", scale_bytes=8, byte_scales=7)
    few_state = RecurrentState(((8, 2048), (8, 512)), ("float32", "float32"))
    many_state = RecurrentState(((128, 1024),), ("float32",))
    layers: dict[int, tuple[Spec, ...]] = {
        0: (window,),
        4: (window, few, few_state),
        128: (window, many, many_state),
    }
    ratios = [0, 0, 4] + [128, 4] * 20
    return ModelMemory("DeepSeek-V4-Flash (fp8)", tuple(spec for ratio in ratios for spec in layers[ratio]), 1_048_576)


def full_and_window(full: int, window: int) -> ModelMemory:
    """A made-up mix: `full` full layers and `window` layers of window 1,024, 8 heads of 128."""
    specs = (FullKV(8, 128, "bfloat16"),) * full + (WindowKV(8, 128, "bfloat16", window=1024),) * window
    return ModelMemory(f"{full} full + {window} window", specs, 131_072)


def all_models() -> tuple[ModelMemory, ...]:
    """Every model of the memory table."""
    return (
        gemma3_27b(),
        gpt_oss_20b(),
        qwen3_next_80b(),
        qwen35_27b(),
        qwen35_35b(),
        qwen35_397b(),
        nemotron3_nano(),
        deepseek_v3(),
        deepseek_v32_fp8(),
        deepseek_v4_flash(),
        full_and_window(20, 30),
        full_and_window(1, 30),
    )
