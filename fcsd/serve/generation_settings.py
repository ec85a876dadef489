"""The settings of a model's ``generation_config.json`` that a command does not apply, and names instead.

A setting that is in none of these tables is applied by ``fcsd chat``, through transformers' own processors of logits or
by fcsd's loop: sampling, penalties, forbidden and forced tokens, lengths, stop strings and tokens that end an answer.
"""

import logging
from collections.abc import Mapping
from functools import cache
from typing import Any

log = logging.getLogger(__name__)

# Settings that fcsd's loop does not apply -> the value that asks for nothing. The loop gives one answer, chooses its
# tokens one at a time, and keeps all keys and values; all ranks end it after the same token, so it reads no clock.
UNKNOWN_TO_THE_LOOP: Mapping[str, Any] = {
    "num_beams": 1,
    "num_beam_groups": 1,
    "num_return_sequences": 1,
    "diversity_penalty": 0.0,
    "constraints": None,
    "force_words_ids": None,
    "penalty_alpha": None,
    "dola_layers": None,
    "low_memory": None,
    "guidance_scale": None,
    "token_healing": None,
    "max_time": None,
    "use_mtp": None,
    "prompt_lookup_num_tokens": None,
    "assistant_early_exit": None,
    "speculation_type": None,
    "is_assistant": None,
    "cache_implementation": None,
    "cache_config": None,
    "max_cache_len": None,
}
# What an evaluation does not apply, since it takes the most likely tokens and a task says how an answer ends. The
# settings of sampling and the longest answer are the task's, too.
NOT_IN_EVALUATIONS: Mapping[str, Any] = UNKNOWN_TO_THE_LOOP | {
    "repetition_penalty": 1.0,
    "encoder_repetition_penalty": 1.0,
    "no_repeat_ngram_size": 0,
    "encoder_no_repeat_ngram_size": 0,
    "bad_words_ids": None,
    "sequence_bias": None,
    "suppress_tokens": None,
    "begin_suppress_tokens": None,
    "forced_bos_token_id": None,
    "forced_eos_token_id": None,
    "exponential_decay_length_penalty": None,
    "min_length": 0,
    "min_new_tokens": None,
    "stop_strings": None,
    "watermarking_config": None,
}
# What ``fcsd write`` does not apply: it draws from the model's whole distribution, at a temperature and up to a length
# of its own options.
NOT_IN_WRITING: Mapping[str, Any] = NOT_IN_EVALUATIONS | {
    "temperature": 1.0,
    "top_k": None,
    "top_p": 1.0,
    "min_p": None,
    "top_h": None,
    "typical_p": 1.0,
    "epsilon_cutoff": 0.0,
    "eta_cutoff": 0.0,
    "max_length": None,
    "max_new_tokens": None,
}
# Settings without a meaning for one answer of the loop: of beams, a second model, what else is returned, and speed.
WITHOUT_EFFECT = (
    *("early_stopping", "length_penalty", "use_cache", "prefill_chunk_size", "compile_config", "disable_compile"),
    *("continuous_batching_config", "num_assistant_tokens", "num_assistant_tokens_schedule", "max_matching_ngram_size"),
    *("assistant_confidence_threshold", "assistant_lookbehind", "target_lookbehind", "assistant_ensemble_weight"),
    *("output_attentions", "output_hidden_states", "output_scores", "output_logits", "return_dict_in_generate"),
    *("decoder_start_token_id", "pad_token_id", "bos_token_id", "transformers_version"),
)


def name_unapplied(model: str, settings: Any, unapplied: Mapping[str, Any]) -> None:
    """Log, once for each model, the settings that are set and not applied.

    Args:
        settings: the model's ``GenerationConfig``.
        unapplied: one of the tables above.
    """
    asked = {name: getattr(settings, name, None) for name in unapplied}
    found = [f"{name} {asked[name]!r:.40}" for name in unapplied if asked[name] not in (None, False, unapplied[name])]
    if found:
        _say_once(model, ", ".join(found))


@cache
def _say_once(model: str, found: str) -> None:
    log.warning("%s: not applied of its generation_config.json: %s", model, found)
