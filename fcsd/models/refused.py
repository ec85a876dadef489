"""Why fcsd does not take a ``model_type`` of transformers, and which supported one is nearest: data for messages.

The table has every type that transformers 5.24 builds as a causal LM or as a model of images and text, and some that
people meet elsewhere. ``scripts/write_reference.py`` makes a page of it.
"""

from collections.abc import Mapping
from functools import cache

_ENCODER = "it is an encoder, or its decoder attends to what an encoder returns, and fcsd takes decoders alone"
_CROSS = "some of its layers attend to images alone, and no row describes such a layer"
_PARALLEL = "its attention and its MLP read one stream, which is the wiring parallel already: one exchange serves both"
_STREAMS = "its layers pass on several streams, see docs/hyper_connections.md"
_RECURRENT = "its layers are a recurrence without an MLP of their own, so no second sub-block waits for the first"
_UNTRIED = "it was not tried: nothing has shown yet that fcsd would compute the same"
_INSIDE = "the wrapper was not tried: nothing has shown yet that fcsd would compute the same"
_OLD = "its layers have other names and biases than those that a row can say, and no test has them"
_NEWER = "the type itself takes transformers 5.23 or newer"
_SPEECH = "it also reads or speaks sound, and no test has such a model"
_SAME = ""  # with the nearest type as its model_type in config.json it is supported

# Why -> the types, each with the supported type that is nearest, or without one.
_GROUPS: dict[str, str] = {
    _ENCODER: """bart bert bert-generation big_bird bigbird_pegasus blenderbot blenderbot-small blip camembert
        data2vec-text deberta-v2 distilbert electra ernie florence2 marian mbart megatron-bert modernbert mt5 musicgen
        musicgen_melody mvp pegasus pix2struct
        plbart pp_formulanet prophetnet rembert roberta roberta-prelayernorm roc_bert roformer t5 t5gemma2 trocr udop
        vision-encoder-decoder whisper xlm xlm-roberta xlm-roberta-xl xlnet xmod""",
    _CROSS: "evolla idefics:llama mllama:llama",
    _PARALLEL: """aya_vision:llama codegen:llama cohere:llama cohere2:llama cohere2_moe:mixtral cohere2_vision:llama
        cohere_compass:llama cohere_compass_text:llama falcon:llama gpt_neox:llama gptj:llama phi:llama""",
    _STREAMS: """deepseek_v4:deepseek_v3 glm5_next:glm_moe_dsa hy_v4:hy_v3 hy_v4_vl:hy_v3 qwen4_exp:qwen3_5_moe
        qwen4_exp_text:qwen3_5_moe_text""",
    _RECURRENT: "falcon_mamba mamba mamba2 rwkv xlstm",
    _UNTRIED: """apertus1p5_text:apertus aria_text bamba:granitemoehybrid chameleon dots3_note:dots1
        dots3_note_text:dots1 emu3:llama flint:llama gemma4_unified:gemma4 gemma4_unified_text:gemma4_text
        glm_ocr:glm4v granite_swa:granite granitemoe_swa:granitemoe granitemoeshared:granitemoehybrid
        hunyuan_vl:hunyuan_v1_dense internlm3:llama iquestcoder:llama jais2:llama kolibri1:glm4 lara_mini:qwen3_next
        lfm3:lfm2 molmo2:qwen3 muse_glimmer:gemma2 paddleocr_vl:ernie4_5 phi4_multimodal:phi3 stablelm:llama
        vaultgemma:gemma cosmos3_edge:qwen3 cosmos3_omni:qwen3 mistral_large4:glm_moe_dsa deepseek_ocr2:deepseek_v2
        sarvam_mla:deepseek_v3 unlimited_ocr:deepseek_v2""",
    _INSIDE: """apertus1p5:apertus aria blip-2 deepseek_vl:llama deepseek_vl_hybrid:llama exaone4_5:exaone4
        fast_vlm:qwen2 glmga:glm4v got_ocr2:qwen2 granite4_vision:granite granite_docling:llama
        hyperclovax_vision_v2:hyperclovax idefics2:mistral instructblip instructblipvideo janus:llama lfm3_vl:lfm2
        lighton_ocr:qwen3 llava:llama llava_next_video:llama minicpm_ocr:qwen3_5_text minicpmv4_6:qwen3_5_text
        minicpmv4_7:qwen3_5_text ovis2:qwen2 perception_lm:llama pp_chart2table:qwen2 qianfan_ocr:qwen3
        shieldgemma2:gemma3 video_llama_3:qwen2 video_llava:llama vipllava:llama""",
    _OLD: """biogpt bloom cpmant ctrl fuyu git gpt-sw3 gpt2 gpt_bigcode gpt_neo gpt_neox_japanese kosmos-2 kosmos-2.5
        modernbert-decoder mpt openai-gpt opt persimmon:starcoder2 recurrent_gemma:gemma reformer xglm""",
    _SPEECH: """fun_asr_nano glmasr granite_speech granite_speech_plus kyutai_speech_to_text moshi
        moss_transcribe_diarize:qwen3 nemo_speechlm nemotron_h_omni:nemotron_h qwen2_5_omni:qwen2_5_vl
        qwen2_5_omni_thinker:qwen2_5_vl qwen2_audio:qwen2 qwen3_asr:qwen3 qwen3_omni_moe:qwen3_vl_moe
        qwen3_omni_moe_thinker:qwen3_vl_moe vibevoice_asr:qwen2 voxtral:llama voxtral_realtime:llama""",
    _NEWER: """granitemoehybrid:granitemoe jamba:mixtral lfm2:kimi_linear lfm2_moe:kimi_linear minimax_m3_vl:minimax_m2
        minimax_m3_vl_text:minimax_m2 nemotron_h:mixtral step3p7:solar_open""",
    _SAME: "kimi_k2:deepseek_v3",
    "it was trained with limits of what experts compute, which transformers leaves out": "bailing_hybrid:kimi_linear",
    "its output projections read normalised values": "bitnet:llama",
    "its layers predict and correct several streams from one": "gemma3n:gemma3 gemma3n_text:gemma3_text",
    "it drafts tokens for another model": "gemma4_assistant:gemma4 gemma4_unified_assistant:gemma4",
    "it writes blocks of tokens by diffusion": "diffusion_gemma:gemma4",
    "it moves robots": "pi0:gemma",
    "the tokens of a prompt see each other": "paligemma:gemma",
    "its experts differ by whether a token is text or image": "ernie4_5_vl_moe:ernie4_5_moe",
    "its experts are computed beside the next attention already": "longcat_flash:deepseek_v3",
    "its layers convolve outputs over tokens before they add them": "inkling_mm_model inkling_text",
    "its layers read the sums of earlier blocks by attention": """inkling2 inkling2_loop inkling2_loop_text
        inkling2_text""",
    "its files name its weights otherwise, and no test has such names": "exaone:llama sarvam_moe:glm4_moe",
    "its layers add outputs to a normed stream, which they multiply": "minimax:minimax_m2",
    "its layers multiply the stream by learned numbers": "doge:llama muse_spark:gemma2 zaya:mixtral",
    "its layers multiply the stream by their depth": "beam:gemma2",
    "its attention and its norms are one module": "dbrx:mixtral",
    "its attention has experts, too": "jetmoe:mixtral",
    "its layers have attention and mamba side by side": "falcon_h1:granitemoehybrid",
    "its layers share one attention, which also reads the embeddings": "zamba zamba2",
    "it reads bytes through several models": "blt:llama",
    "it runs its layers several times": "dory:gemma2 hrm_text:llama",
}


@cache
def refused() -> Mapping[str, tuple[str, str]]:
    """Type -> the nearest supported type, or nothing, and why it is not supported.

    A type with a row may be in it: an old transformers lacks some.
    """
    found: dict[str, tuple[str, str]] = {}
    for why, types in _GROUPS.items():
        for entry in types.split():
            model_type, _, near = entry.partition(":")
            assert model_type not in found, model_type
            found[model_type] = near, why
    return found
