"""What readers of a quantization_config share: lists of modules, sizes of blocks, and what changes nothing. Torch-free."""

from __future__ import annotations

from pagerunner.models.configs.fields import Fields
from pagerunner.quant.formats import Names
from pagerunner.quant.patterns import Pattern

ALL = Names("module", ("re:.*",))
# What tools note of how they quantised; none of it changes what the stored numbers mean.
NOTES = {
    "fp8": "dequantize kv_cache_scheme",
    "fbgemm_fp8": "activation_scale_ub",
    "modelopt": "producer kv_cache_quant_algo kv_cache_scheme has_zero_point",
    "compressed-tensors": "version quantization_status global_compression_ratio kv_cache_scheme",
    "awq": "backend do_fuse fuse_max_seq_len modules_to_fuse exllama_config damp_percent",
    "gptq": "damp_percent damp_auto_increment static_groups true_sequential model_name_or_path model_file_base_name meta quantizer "
    "pack_dtype cache_block_outputs batch_size block_name_to_quantize dataset tokenizer module_name_preceding_first_block "
    "model_seqlen pad_token_id use_cuda_fp16 use_exllama exllama_config max_input_length disable_exllama backend act_group_aware hyb_act",
    "auto-round": "autoround_version iters nsamples seqlen lr minmax_lr batch_size train_bs dataset amp enable_minmax_tuning "
    "enable_norm_bias_tuning enable_quanted_input enable_alg_ext enable_torch_compile gradient_accumulate_steps low_gpu_mem_usage "
    "low_cpu_mem_usage scale_dtype backend damp_percent true_sequential static_groups quant_block_list provider seed act_data_type "
    "act_dynamic act_group_size act_sym",
    "mxfp4": "dequantize swizzle",
}


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
    if not isinstance(value, list) or len(value) != 2 or not all(type(size) is int and size > 0 for size in value):
        raise fields.error(name, f"must be two whole numbers, rows and columns, got {value!r:.80}.")
    return value[0], value[1]
