"""What speculative_config asks for: vLLM's names, each of which is taken or refused."""

from __future__ import annotations

import difflib
import logging
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import msgspec

from pagerunner.config import EngineArgs, SpeculativeConfig, SpeculativeMethod, as_type, one_of, read_option
from pagerunner.errors import ConfigError
from pagerunner.models.configs.base import ModelConfig
from pagerunner.models.configs.json_files import read_json

logger = logging.getLogger(__name__)

MOST_TOKENS = 32
"""Most drafts of a row in a step."""
SUFFIX_TOKENS = 7
"""Most drafts of suffix decoding unless more are asked for. vLLM takes the depth, 24: logits of 25 tokens for each of 256 rows would be 15 GB."""

_EXAMPLE = '{"method": "ngram", "num_speculative_tokens": 4}'
_OTHER_NAMES: dict[str, SpeculativeMethod] = {"ngram_gpu": "ngram", "[ngram]": "ngram"}
_OLD_MTP = frozenset(
    """deepseek_mtp dots3_note_mtp mimo_mtp mimo_v2_mtp glm4_moe_mtp glm4_moe_lite_mtp glm_ocr_mtp ernie_mtp nemotron_h_mtp exaone_moe_mtp
    exaone4_5_mtp qwen3_next_mtp qwen4_exp_mtp qwen3_5_mtp longcat_flash_mtp bailing_hybrid_v3_mtp minimax_m3_mtp bailing_hybrid_mtp
    kimi_k3_mtp pangu_ultra_moe_mtp step3p5_mtp hy_v3_mtp hy_v4_mtp gemma4_mtp inkling_mtp glm5_next_mtp""".split()
)
METHODS: tuple[SpeculativeMethod, ...] = ("ngram", "suffix", "eagle", "eagle3", "mtp", "draft_model")
_NOT_HERE = {
    "medusa": "its heads guess each token without the one before; eagle3 and mtp do better",
    "mlp_speculator": "eagle3 and mtp are its successors",
    "dflash": "heads that draft a block in one pass aren't here",
    "dspark": "heads that draft a block in one pass aren't here",
    "extract_hidden_states": "it writes hidden states to a file and drafts nothing",
    "custom_class": "it names code to run, which a configuration can't here",
}
_WITH_WEIGHTS = frozenset({"eagle", "eagle3", "mtp", "draft_model"})
_EVERYWHERE = frozenset(
    """method num_speculative_tokens num_speculative_tokens_per_batch_size rejection_sample_method synthetic_acceptance_rates
    synthetic_acceptance_length draft_sample_method disable_eagle_block_drop""".split()
)
_OF_METHOD: dict[str, frozenset[str]] = {
    "ngram": frozenset({"model", "prompt_lookup_min", "prompt_lookup_max"}),
    "suffix": frozenset(
        """model suffix_decoding_max_tree_depth suffix_decoding_max_cached_requests suffix_decoding_max_spec_factor
        suffix_decoding_min_token_prob""".split()
    ),
    **dict.fromkeys(_WITH_WEIGHTS, frozenset({"model", "revision", "draft_tensor_parallel_size"})),
}
_REFUSED: dict[str, tuple[tuple[Any, ...], str]] = {
    "tensor_parallel_size": ((), "a drafter's ranks are draft_tensor_parallel_size"),
    "quantization": ((), "a drafter's weights are read as its own config.json says"),
    "moe_backend": (("auto",), "a drafter's kernels follow from its weights"),
    "attention_backend": (("auto",), "a drafter's layers have the engine's attention_backend"),
    "max_model_len": ((), "tokens are drafted up to the engine's max_model_len"),
    "code_revision": ((), "no code of a checkpoint is run"),
    "draft_load_config": (({},), "a drafter is read as the model is (load_format)"),
    "index_share_for_mtp_iteration": ((False,), "each draft chooses the tokens that it attends to itself"),
    "disable_padded_drafter_batch": ((False,), "drafts are made in the step's graph, whose shapes are fixed"),
    "use_local_argmax_reduction": ((False,), "how ranks find a drafter's most likely token is no choice"),
    "use_heterogeneous_vocab": ((False,), "drafts are token ids, so both models need the same tokenizer"),
    "parallel_drafting": (
        (False,),
        "each draft follows from the one before; heads that draft all of them at once aren't here",
    ),
    "enable_adaptive_verification": ((False,), "it goes with method dspark, which isn't here"),
    "dspark_draft_topk": ((), "it goes with method dspark, which isn't here"),
}
"""Fields of vLLM that ask for what isn't there: values that ask for nothing (None does, too), and the reason."""


class SpeculativeOptions(msgspec.Struct, frozen=True, kw_only=True):
    """vLLM's fields, as the user gives them."""

    method: str | None = None
    model: str | None = None
    num_speculative_tokens: int | None = None
    num_speculative_tokens_per_batch_size: list[Any] | None = None
    draft_tensor_parallel_size: int | None = None
    tensor_parallel_size: int | None = None
    prompt_lookup_max: int | None = None
    prompt_lookup_min: int | None = None
    suffix_decoding_max_tree_depth: int = 24
    suffix_decoding_max_cached_requests: int = 10_000
    suffix_decoding_max_spec_factor: float = 1.0
    suffix_decoding_min_token_prob: float = 0.1
    rejection_sample_method: str = "standard"
    synthetic_acceptance_rates: list[Any] | None = None
    synthetic_acceptance_length: float | None = None
    draft_sample_method: str = "greedy"
    revision: str | None = None
    code_revision: str | None = None
    quantization: str | None = None
    kv_cache_dtype: str | None = None
    max_model_len: int | None = None
    moe_backend: str | None = None
    attention_backend: str | None = None
    draft_load_config: dict[str, Any] | None = None
    enforce_eager: bool | None = None
    disable_padded_drafter_batch: bool | None = None
    disable_eagle_block_drop: bool | None = None
    use_local_argmax_reduction: bool | None = None
    index_share_for_mtp_iteration: bool | None = None
    use_heterogeneous_vocab: bool | None = None
    parallel_drafting: bool | None = None
    enable_adaptive_verification: bool | None = None
    dspark_draft_topk: int | None = None


def read_options(given: str | dict[str, Any] | None) -> SpeculativeOptions | None:
    """The fields of speculative_config; None if there is none. Dashes in names are underscores.

    Raises:
        ConfigError: it isn't a mapping, a field is unknown, or a value is of the wrong type.
    """
    if given is None:
        return None
    asked: dict[str, Any] = read_option("speculative_config", given, dict[str, Any], _EXAMPLE)
    types = {field.name: field.type for field in msgspec.structs.fields(SpeculativeOptions)}
    taken: dict[str, Any] = {}
    for key, value in asked.items():
        name = key.replace("-", "_")
        if name not in types:
            near = difflib.get_close_matches(name, types, n=1)
            hint = (
                f"did you mean {near[0]}?"
                if near
                else f"it knows {', '.join(name for name in types if name not in _REFUSED)}."
            )
            raise ConfigError(f"speculative_config has no {key!r}; {hint}")
        if name in taken:
            raise ConfigError(
                f"speculative_config has {name} twice, with dashes and with underscores; give one of them."
            )
        taken[name] = _as_asked(as_type, name, value, types[name])
    return SpeculativeOptions(**taken)


def with_verifier(args: EngineArgs, directory: Path) -> EngineArgs | None:
    """If `directory`, which `args` name as the model, holds a drafter in the speculators format: arguments for the model that it was made for, with this drafter. None for a model.

    Raises:
        ConfigError: it doesn't say which model that is, or speculative_config names a drafter, too.
    """
    values = read_json(directory / "config.json") if (directory / "config.json").is_file() else {}
    said = values.get("speculators_config")
    if not isinstance(said, dict):
        return None
    verifier = said.get("verifier")
    name = verifier.get("name_or_path") if isinstance(verifier, dict) else None
    if not isinstance(name, str) or not name:
        raise ConfigError(
            f"{args.model} is a drafter, and its config.json doesn't say for which model (speculators_config.verifier.name_or_path): name that as the model, "
            "and this one in speculative_config."
        )
    if args.speculative_config is not None:
        raise ConfigError(
            f"{args.model} is a drafter for {name}, and speculative_config is given as well: name {name} as the model."
        )
    logger.info("%s is a drafter for %s, which is run with it.", args.model, name)
    drafter = {"method": values.get("speculators_model_type"), "model": str(directory)}
    served = args.served_model_name or args.model
    return msgspec.structs.replace(
        args, model=name, revision=None, served_model_name=served, speculative_config=drafter
    )


def _as_asked(check: Callable[..., Any], *arguments: Any) -> Any:
    """What `check` returns; its errors say that the field is one of speculative_config."""
    try:
        return check(*arguments)
    except ConfigError as error:
        raise _wrong(str(error)) from None


def resolve_speculation(args: EngineArgs, model: ModelConfig) -> SpeculativeConfig | None:
    """How the engine of `args` drafts for `model`; None if it doesn't.

    Raises:
        ConfigError: a field or a method isn't there, contradicts another one, or doesn't go with the engine's other arguments.
        CheckpointError: the drafter's config.json can't be read.
    """
    options = read_options(args.speculative_config)
    if options is None:
        return None
    method = _method(options, args)
    _check_fields(options, method, args)
    _check_engine(method, args)
    most = _num_tokens(options, method, model, args)
    smallest, largest = _lookup(options)
    return SpeculativeConfig(
        method=method,
        num_speculative_tokens=most,
        num_speculative_tokens_per_batch_size=_by_rows(options.num_speculative_tokens_per_batch_size, most),
        model=(options.model or args.model) if method in _WITH_WEIGHTS else "",
        prompt_lookup_min=smallest,
        prompt_lookup_max=largest,
        acceptance_rates=_acceptance_rates(options, most),
        **{name: getattr(options, name) for name in SpeculativeConfig.__struct_fields__ if name.startswith("suffix_")},
    )


def _wrong(text: str) -> ConfigError:
    return ConfigError(f"speculative_config: {text}")


def _method(options: SpeculativeOptions, args: EngineArgs) -> SpeculativeMethod:
    asked = options.method
    if options.model is not None and not options.model.strip():
        raise _wrong(
            f"model must be a drafter's directory or hub name, got {options.model!r}. Leave it out where the method needs none."
        )
    if asked in _OLD_MTP:
        logger.warning('speculative_config: method %s is called "mtp" for every family.', asked)
        asked = "mtp"
    if asked is None:
        asked = _guessed(options, args)
    asked = _OTHER_NAMES.get(asked, asked)
    if asked in _NOT_HERE:
        raise _wrong(f"method {asked!r} isn't there: {_NOT_HERE[asked]}. Methods are {', '.join(METHODS)}.")
    _as_asked(one_of, "method", asked, (*METHODS, "ngram_gpu"))
    method = next(name for name in METHODS if name == asked)
    if method in _WITH_WEIGHTS - {"mtp"} and options.model is None:
        raise _wrong(f"method {method!r} needs model, the directory or hub name of the drafter.")
    if method == "mtp" and options.model not in (None, args.model):
        raise _wrong(
            f'method "mtp" takes the layers that come with the model, {args.model}, and model={options.model!r} names '
            "another one. Leave model out."
        )
    if method not in _WITH_WEIGHTS and _OTHER_NAMES.get(options.model or method, options.model or method) != method:
        raise _wrong(f"method {method!r} has no weights, so model={options.model!r} changes nothing; leave it out.")
    return method


def _guessed(options: SpeculativeOptions, args: EngineArgs) -> str:
    """The method that the drafter's name or config.json speaks for, as vLLM guesses it."""
    if options.model is None:
        raise ConfigError(f"speculative_config must say method or model, such as {_EXAMPLE}.")
    name = options.model.lower()
    if name in ("ngram", "[ngram]", "ngram_gpu", "suffix"):
        return name
    for part, method in (("eagle-", "eagle"), ("eagle3", "eagle3"), ("dflash", "dflash"), ("dspark", "dspark")):
        if part in name:
            return method
    values = read_json(Path(options.model) / "config.json")
    family = str(values.get("model_type"))
    if family in _OLD_MTP or (options.model == args.model and _predicted(values)):
        return "mtp"
    return family if family in ("medusa", "mlp_speculator") else "draft_model"


def _check_fields(options: SpeculativeOptions, method: SpeculativeMethod, args: EngineArgs) -> None:
    """Refuse fields that would change nothing, with the reason."""
    defaults = SpeculativeOptions()
    known = _EVERYWHERE | _OF_METHOD[method] | {"enforce_eager", "kv_cache_dtype"}
    for name in SpeculativeOptions.__struct_fields__:
        value = getattr(options, name)
        if value is None or value == getattr(defaults, name):
            continue
        if name in _REFUSED:
            neutral, reason = _REFUSED[name]
            if value not in neutral:
                raise ConfigError(f"speculative_config: {name}={value!r} isn't there: {reason}. Leave it out.")
        elif name not in known:
            raise _wrong(f"{name}={value!r} changes nothing with method {method!r}; leave it out.")
    _as_asked(one_of, "draft_sample_method", options.draft_sample_method, ("greedy", "probabilistic"))
    if options.draft_sample_method == "probabilistic":
        raise _wrong(
            "draft_sample_method=\"probabilistic\" isn't there: the model's own token is drawn at each position and a draft "
            'counts if it is that token, which is most often so for a drafter\'s most likely one. Leave it out ("greedy").'
        )
    ranks = args.tensor_parallel_size
    if options.draft_tensor_parallel_size not in (None, ranks):
        raise _wrong(
            f"draft_tensor_parallel_size={options.draft_tensor_parallel_size} must be tensor_parallel_size={ranks}: drafters are "
            "divided as the model is. Leave it out."
        )
    if options.enforce_eager not in (None, args.enforce_eager):
        raise _wrong(
            f"enforce_eager={options.enforce_eager} must be the engine's, which is {args.enforce_eager}: a drafter runs in the "
            "step's graph. Leave it out."
        )
    if options.kv_cache_dtype not in (None, "auto", args.kv_cache_dtype):
        raise _wrong(
            f"kv_cache_dtype={options.kv_cache_dtype!r} must be the engine's, {args.kv_cache_dtype!r}: a drafter's pages lie beside the "
            "model's. Leave it out."
        )


def _check_engine(method: SpeculativeMethod, args: EngineArgs) -> None:
    """Refuse what doesn't go together with drafts."""
    what = f"speculative_config with method {method!r}"
    if args.pipeline_parallel_size > 1:
        raise ConfigError(
            f"{what} doesn't go with stages so far: pipeline_parallel_size={args.pipeline_parallel_size} must be 1."
        )
    if args.teams > 1:
        raise ConfigError(
            f"{what} doesn't go with several teams of ranks so far: data_parallel_size={args.data_parallel_size} with enable_expert_parallel. "
            "Without enable_expert_parallel there are whole engines, which may draft."
        )
    if args.attention_backend == "flashinfer":
        raise ConfigError(
            f'{what} doesn\'t go with attention_backend="flashinfer", which plans on the host: how many drafts were accepted is known on the '
            'device only. attention_backend="auto" does.'
        )


def _num_tokens(options: SpeculativeOptions, method: SpeculativeMethod, model: ModelConfig, args: EngineArgs) -> int:
    """The most drafts of a row, as asked for or as the drafter was made for."""
    asked = options.num_speculative_tokens
    path = Path(options.model or args.model) / "config.json"
    values = read_json(path) if method in _WITH_WEIGHTS else {}
    layers = _predicted(values)
    made_for = _proposed(values) if layers is None else layers
    if method == "mtp" and made_for == 0:
        raise _wrong(
            f'method "mtp" needs layers that predict, and config.json of {args.model} says that there are none.'
        )
    if asked is None and method == "suffix":
        return min(options.suffix_decoding_max_tree_depth, SUFFIX_TOKENS)
    if asked is None:
        if not made_for:
            if method == "mtp":
                model.mtp()  # if there is no module, that is the reason
            raise _wrong(
                f"method {method!r} needs num_speculative_tokens, the most tokens that are drafted in a step, such as 4."
            )
        if not 1 <= made_for <= MOST_TOKENS:
            raise _wrong(
                f"{path} says that the drafter predicts {made_for} tokens, and it must be from 1 to {MOST_TOKENS}. Give "
                "num_speculative_tokens."
            )
        return made_for
    if not 1 <= asked <= MOST_TOKENS:
        raise _wrong(f"num_speculative_tokens must be from 1 to {MOST_TOKENS}, got {asked}.")
    if method == "suffix" and asked > options.suffix_decoding_max_tree_depth:
        raise _wrong(
            f"num_speculative_tokens={asked} must be at most suffix_decoding_max_tree_depth={options.suffix_decoding_max_tree_depth}: no "
            "more tokens are ever drafted."
        )
    if layers and asked > layers and asked % layers:
        raise _wrong(
            f"num_speculative_tokens={asked} must be a multiple of {layers}, which the drafter's config.json says that it predicts."
        )
    return asked


def _predicted(values: Mapping[str, Any]) -> int | None:
    """How many tokens a checkpoint says that its drafting layers predict; None if it doesn't say."""
    inner = values.get("text_config")
    places: Collection[Mapping[str, Any]] = (values, inner if isinstance(inner, dict) else {})
    for place in places:
        for name in ("n_predict", "num_nextn_predict_layers", "mtp_num_hidden_layers"):
            if type(found := place.get(name)) is int:
                return found
    return None


def _proposed(values: Mapping[str, Any]) -> int | None:
    """How many tokens a drafter in the speculators format proposes to draft, by the method that it proposes; None if it doesn't say."""
    speculators = values.get("speculators_config")
    if not isinstance(speculators, dict):
        return None
    proposals = speculators.get("proposal_methods")
    ways = [way for way in proposals if isinstance(way, dict)] if isinstance(proposals, list) else []
    usual = [way for way in ways if way.get("proposal_type") == speculators.get("default_proposal_method")]
    found = (usual or ways or [{}])[0].get("speculative_tokens")
    return found if type(found) is int else None


def _lookup(options: SpeculativeOptions) -> tuple[int, int]:
    """The shortest and the longest end of a text that is looked for; one of them alone stands for both."""
    smallest, largest = options.prompt_lookup_min, options.prompt_lookup_max
    smallest, largest = smallest or largest or 5, largest or smallest or 5
    for name, value in (
        ("prompt_lookup_min", options.prompt_lookup_min),
        ("prompt_lookup_max", options.prompt_lookup_max),
    ):
        if value is not None and not 1 <= value <= 64:
            raise _wrong(f"{name} must be from 1 to 64, got {value}.")
    if smallest > largest:
        raise _wrong(f"prompt_lookup_min={smallest} must be at most prompt_lookup_max={largest}.")
    for name, least, most in (
        ("suffix_decoding_max_tree_depth", 1, 64),
        ("suffix_decoding_max_cached_requests", 0, 1_000_000),
        ("suffix_decoding_max_spec_factor", 0, 64),
        ("suffix_decoding_min_token_prob", 0, 1),
    ):
        if not least <= (number := getattr(options, name)) <= most:
            raise _wrong(f"{name} must be from {least} to {most:,}, got {number}.")
    return smallest, largest


def _by_rows(table: list[Any] | None, most: int) -> tuple[tuple[int, int], ...]:
    """From how many rows on how many tokens are drafted."""
    if table is None:
        return ()
    name, entry = "speculative_config: num_speculative_tokens_per_batch_size", "[first rows, last rows, drafts]"
    found: list[tuple[int, int]] = []
    before = 0
    for one in table:
        if not isinstance(one, (list, tuple)) or len(one) != 3 or not all(type(number) is int for number in one):
            raise ConfigError(f"{name} must hold lists of three whole numbers, {entry}, got {one!r}.")
        first, last, drafts = one
        if (first != 1 if not found else first <= before) or last < first:
            raise ConfigError(f"{name}: {entry} must begin with 1 and then grow, got {one!r} after {before} rows.")
        if not 0 <= drafts <= most:
            raise ConfigError(
                f"{name}: drafts must be from 0 to num_speculative_tokens={most}, got {drafts} in {one!r}."
            )
        found.append((first, drafts))
        before = last
    if not found:
        raise ConfigError(f"{name} must have an entry, such as [[1, 32, {most}], [33, 1024, 0]].")
    return tuple(found)


def _acceptance_rates(options: SpeculativeOptions, most: int) -> tuple[float, ...] | None:
    """By position the chance that a draft is accepted if all before it were. vLLM's rates are the chances that all up to it are."""
    how, rates, length = (
        options.rejection_sample_method,
        options.synthetic_acceptance_rates,
        options.synthetic_acceptance_length,
    )
    if how == "block":
        raise _wrong(
            'rejection_sample_method="block" isn\'t there: tokens would differ from those without drafts. "standard" gives the same tokens.'
        )
    _as_asked(one_of, "rejection_sample_method", how, ("standard", "synthetic"))
    if how == "standard":
        if rates is not None or length is not None:
            raise _wrong(
                'synthetic_acceptance_rates and synthetic_acceptance_length go with rejection_sample_method="synthetic", for measuring.'
            )
        return None
    if (rates is None) == (length is None):
        raise _wrong(
            'rejection_sample_method="synthetic" needs one of synthetic_acceptance_rates and synthetic_acceptance_length.'
        )
    if length is not None:
        if not 1 <= length <= most + 1:
            raise _wrong(
                f"synthetic_acceptance_length must be from 1 to num_speculative_tokens + 1 = {most + 1}, got {length:g}."
            )
        rates = [min(max(length - 1 - place, 0.0), 1.0) for place in range(most)]  # the least variance
    assert rates is not None
    if len(rates) != most or not all(type(rate) in (int, float) and 0 <= rate <= 1 for rate in rates):
        raise _wrong(
            f"synthetic_acceptance_rates must be num_speculative_tokens={most} numbers from 0 to 1, got {rates}."
        )
    before, found = 1.0, []
    for rate in rates:
        if rate > before:
            raise _wrong(
                f"synthetic_acceptance_rates must not grow, as each is the chance that all drafts up to it are accepted, got {rates}."
            )
        found.append(rate / before if before else 0.0)
        before = rate
    return tuple(found)
