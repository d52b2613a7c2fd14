"""Which options of transformers are carried out, which calls are handed back, and what is refused by name."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedModel
from transformers.generation import GenerationMode

from ..cache import keeps_state


def names(text: str) -> frozenset[str]:
    """The words of `text`."""
    return frozenset(text.split())


# Through the logits processors and stopping criteria that transformers makes of them, or in the decoder itself.
_CARRIED_OUT = names(
    """
    max_length max_new_tokens min_length min_new_tokens max_time stop_strings do_sample temperature top_k top_p min_p
    top_h typical_p epsilon_cutoff eta_cutoff repetition_penalty encoder_repetition_penalty no_repeat_ngram_size
    encoder_no_repeat_ngram_size bad_words_ids renormalize_logits forced_bos_token_id forced_eos_token_id
    remove_invalid_values exponential_decay_length_penalty suppress_tokens begin_suppress_tokens sequence_bias
    watermarking_config num_return_sequences output_scores output_logits return_dict_in_generate pad_token_id
    bos_token_id eos_token_id num_assistant_tokens prompt_lookup_num_tokens
    """
)
# Without a meaning for greedy decoding and sampling of a decoder, in transformers as here: options of beam search and
# of encoder-decoder models (beams themselves are handed back), and notes about the file.
_WITHOUT_MEANING = names(
    """
    num_beams num_beam_groups early_stopping length_penalty diversity_penalty low_memory penalty_alpha dola_layers
    constraints force_words_ids decoder_start_token_id disable_compile transformers_version
    """
)
# How transformers' own loops draft and compute; the result is the same whatever they are.
_WITHOUT_EFFECT = names(
    """
    use_cache prefill_chunk_size num_assistant_tokens_schedule assistant_confidence_threshold max_matching_ngram_size
    assistant_lookbehind target_lookbehind
    """
)
# What these may be besides None and transformers' own default.
_HARMLESS: dict[str, tuple[Any, ...]] = {
    "token_healing": (False,),
    "guidance_scale": (1,),
    "output_attentions": (False,),
    "output_hidden_states": (False,),
    "is_assistant": (False,),
    "use_mtp": (False,),
    "cache_implementation": ("dynamic",),
}
# What transformers passes to a decoding loop by itself.
_PREPARED = frozenset(
    ("attention_mask", "position_ids", "cache", "past_key_values", "logits_to_keep", "use_cache", "return_dict")
)
MODES = (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE)


def default(name: str) -> Any:
    """The value that transformers gives an option which nobody set."""
    return GenerationConfig._get_default_generation_params().get(name)


def hand_back_reason(model: PreTrainedModel, mode: GenerationMode) -> str | None:
    """Why a call belongs to transformers' own loop; None if it belongs here."""
    name = type(model).__name__
    # What would start transformers' assisted generation is either taken over or refused by name.
    if mode not in (*MODES, GenerationMode.ASSISTED_GENERATION):
        return f"{mode.value.replace('_', ' ')} is not speculative"
    if model.config.is_encoder_decoder:
        return f"{name} is an encoder-decoder model"
    if keeps_state(model):
        return f"{name} keeps a state that cannot be rolled back"
    if model.training:
        return f"{name} is in training mode"
    if torch.is_autocast_enabled(model.device.type):
        return "autocast is on, and would change the number format within the cache"
    return None


def refuse_options(config: GenerationConfig) -> None:
    """ValueError that names the options of `config` which change what is asked for in a way not carried out here."""
    known = _CARRIED_OUT | _WITHOUT_MEANING | _WITHOUT_EFFECT
    refuse(
        name
        for name in vars(GenerationConfig())
        if not name.startswith("_")
        and name not in known
        and (value := getattr(config, name, None)) is not None
        and value not in (default(name), *_HARMLESS.get(name, ()))
    )


def refuse_inputs(model: PreTrainedModel, inputs: Mapping[str, Any]) -> None:
    """ValueError that names inputs of `model` other than text, and caches that hold tokens already."""
    unknown = [k for k, v in inputs.items() if not (k in _PREPARED or _says_nothing(model, k, v))]
    for name in ("cache", "past_key_values"):
        cache = inputs.get(name)
        if cache is not None and (getattr(cache, "_is_user_defined", False) or cache.get_seq_length() > 0):
            unknown.append(name)
    refuse(unknown)


def _says_nothing(model: PreTrainedModel, name: str, value: Any) -> bool:
    """Whether a model input is absent: multimodal models get an empty mapping, or types that are all text."""
    if name == "token_type_ids" and isinstance(value, torch.Tensor):
        # A text model embeds the types; to a multimodal one 0 is what it takes by itself.
        return model.config.get_text_config() is not model.config and not value.any()
    return value is None or value is False or (isinstance(value, Mapping) and not value)


def whole(name: str, value: Any, least: int) -> int:
    """`value` as an int: transformers takes numbers of numpy, of torch and floats as well; ValueError if it is none."""
    try:
        number = int(value)
    except (TypeError, ValueError, OverflowError):
        number = least - 1
    if number < least or number != value:
        raise ValueError(f"{name} must be a whole number >= {least}, got {value!r}")
    return number


def refuse(options: Iterable[str]) -> None:
    """ValueError for options that are not carried out here."""
    found = sorted(options)
    if found:
        raise ValueError(f"not supported by dsde: {', '.join(found)}; leave out, or use the model without dsde")
