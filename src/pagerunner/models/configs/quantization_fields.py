"""What readers of a quantization_config share: lists of modules, sizes of blocks, and what changes nothing. Torch-free."""

from __future__ import annotations

import logging
import re

from pagerunner.models.configs.fields import Fields, log_once
from pagerunner.quant.formats import Names
from pagerunner.quant.patterns import Pattern

ALL = Names("module", ("re:.*",))
# What tools note of how they quantised; none of it changes what the stored numbers mean.
_AUTO_ROUND = (
    "act_bits act_data_type act_dynamic act_group_size act_sym amp autoround_version backend batch_size damp_percent data_type dataset "
    "enable_alg_ext enable_minmax_tuning enable_norm_bias_tuning enable_quanted_input enable_torch_compile gradient_accumulate_steps "
    "iters low_cpu_mem_usage low_gpu_mem_usage lr minmax_lr model_free nsamples provider quant_block_list scale_dtype seed seqlen "
    "static_attention_dtype static_attention_granularity static_groups static_kv_dtype static_kv_granularity super_bits "
    "super_group_size supported_types train_bs true_sequential"
)
NOTES = {
    "fp8": "dequantize",
    "fbgemm_fp8": "activation_scale_ub",
    "modelopt": "has_zero_point",
    "compressed-tensors": "version quantization_status global_compression_ratio run_compressed dequantize "
    "use_optimized_inference",
    "awq": f"{_AUTO_ROUND} do_fuse fuse_max_seq_len modules_to_fuse exllama_config meta sym block_name_to_quantize to_quant_block_names",
    "gptq": f"{_AUTO_ROUND} damp_auto_increment model_name_or_path model_file_base_name meta quantizer cache_block_outputs tokenizer "
    "module_name_preceding_first_block model_seqlen pad_token_id use_cuda_fp16 use_exllama exllama_config max_input_length "
    "disable_exllama act_group_aware hyb_act",
    "auto-round": _AUTO_ROUND,
    "mxfp4": "dequantize swizzle",
}


def read_pages(fields: Fields) -> bool:
    """Whether something is said of keys and values. It changes nothing: pages hold what kv_cache_dtype says.

    Their scales, if they are fp8, are found among the tensors. Other numbers are passed over with a line in the log.
    """
    said = {name: fields.take(name) for name in ("kv_cache_scheme", "kv_cache_quant_algo")}
    for name, value in said.items():
        numbers = (value.get("num_bits"), value.get("type")) if isinstance(value, dict) else str(value).lower()
        if value is not None and numbers not in ((8, "float"), (8, None), "fp8", "static", "none"):
            log_once(
                f"{fields.where}: {name} is {value!r:.160}, which pages can't follow; they hold what kv_cache_dtype says.",
                logging.WARNING,
            )
    return any(value is not None for value in said.values())


def names_in(fields: Fields, *names: str) -> tuple[str, ...]:
    """The entries of a list of names that writers call by several names; none where it is null."""
    entries: list[str] = []
    for name in names:
        value = fields.take(name)
        if value is None:
            continue
        if not isinstance(value, list) or not all(isinstance(entry, str) for entry in value):
            raise fields.error(name, f"must be a list of names, got {value!r:.120}.")
        entries += (checked_entry(fields, name, entry) for entry in value)
    return tuple(entries)


def checked_entry(fields: Fields, name: str, entry: str) -> str:
    """The entry `re:PATTERN` of the field `name`, or any other, if the pattern can be matched."""
    if entry.startswith("re:"):
        try:
            Pattern(entry[3:])
        except ValueError as error:
            raise fields.error(name, f"has {entry!r:.120}, which is no pattern that can be matched: {error}.") from None
    return entry


def block_in(fields: Fields, name: str) -> tuple[int, int] | None:
    """Rows and columns of a block; None where there are none."""
    value = fields.take(name)
    if value is None:
        return None
    if isinstance(value, str) and re.fullmatch(r"\d{1,9}x\d{1,9}", value):
        value = [int(size) for size in value.split("x")]
    if not isinstance(value, list) or len(value) != 2 or not all(type(x) is int and 0 < x < 2**31 for x in value):
        raise fields.error(name, f"must be two whole numbers, rows and columns, got {value!r:.80}.")
    return value[0], value[1]
