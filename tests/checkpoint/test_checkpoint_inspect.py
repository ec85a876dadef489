"""What inspect says, for every architecture, quantised, tied, multimodal, rewired, and as large as they come."""

import json
from pathlib import Path

import pytest
import sparse_checkpoint
import tiny
import torch
import transformers
from gate import open_base
from safetensors.torch import load_file, save_file

from fcsd.checkpoint import INDEX, inspect_checkpoint, read_layout
from fcsd.convert import convert_checkpoint
from fcsd.errors import BadInputError
from fcsd.models.archs import ARCHS
from fcsd.models.build import load_model
from fcsd.models.wiring import Wiring
from fcsd.plan.model import MetaModel

# architecture -> (dense layers, MoE layers, experts, per token, shared) of the tiny models; DENSE_SHAPE if it has none
DENSE_SHAPE = (4, 0, 0, 0, 0)
SHAPES = {
    "qwen3_moe": (1, 3, 8, 2, 0),
    "qwen2_moe": (0, 4, 8, 2, 1),
    "mixtral": (0, 4, 8, 2, 0),
    "olmoe": (0, 4, 8, 2, 0),
    "glm4_moe": (1, 3, 8, 2, 1),
    "minimax_m2": (0, 4, 8, 2, 0),
    "mimo_v2_flash": (1, 3, 8, 2, 0),
    "mellum": (1, 3, 8, 2, 0),
    "glm4_moe_lite": (1, 3, 8, 2, 1),
    "dots1": (1, 3, 8, 2, 1),
    "ernie4_5_moe": (1, 3, 8, 2, 1),
    "exaone_moe": (1, 3, 8, 2, 1),
    "solar_open": (0, 4, 8, 2, 1),
    "gpt_oss": (0, 4, 8, 2, 0),
    "deepseek_v32": (1, 3, 8, 2, 1),
    "deepseek_v2": (1, 3, 8, 2, 2),
    "deepseek_v3": (1, 3, 8, 2, 1),
    "llama4_text": (2, 2, 4, 1, 1),
    "qwen3_vl_moe": (1, 3, 8, 2, 0),
    "qwen3_5_moe": (0, 4, 8, 2, 1),
    "qwen3_next": (1, 3, 8, 2, 1),
    "qwen3_5_moe_text": (0, 4, 8, 2, 1),
    "flex_olmo": (0, 4, 8, 2, 0),
    "granitemoe": (0, 4, 8, 2, 0),
    "afmoe": (1, 3, 8, 2, 1),
    "hy_v3": (1, 3, 8, 2, 1),
    "laguna": (1, 3, 8, 2, 1),
    "lfm2_moe": (1, 3, 8, 2, 0),
    "kimi_linear": (1, 3, 8, 2, 1),
    "phimoe": (0, 4, 8, 2, 0),
    "granitemoehybrid": (0, 4, 8, 2, 1),
    "jamba": (2, 2, 8, 2, 0),
    "glm_moe_dsa": (1, 3, 8, 2, 1),
    **dict.fromkeys(
        ("mistral4", "glm4v_moe", "kimi_k25"),
        (1, 3, 8, 2, 1),
    ),
    **dict.fromkeys((), (1, 3, 8, 2, 1)),
    "gemma4_text": (0, 4, 8, 2, 0),
    "gemma4": (0, 4, 8, 2, 0),
}


def edit_config(path: Path, **changes) -> None:
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, **changes}))


@pytest.mark.parametrize("arch", tiny.CONFIGS)
def test_every_architecture(arch, tmp_path):
    model = tiny.model(arch)
    model.save_pretrained(tmp_path, max_shard_size="300KB")
    open_base(str(tmp_path))
    report = inspect_checkpoint(str(tmp_path))
    assert report.verified and report.problems == [] and report.carried == []
    dense, moe, experts, per_token, shared = DENSE_SHAPE if ARCHS[arch].dense else SHAPES[arch]
    assert (report.layers, report.dense_layers, report.moe_layers) == (4, dense, moe)
    assert (report.experts, report.experts_per_token, report.shared_experts) == (experts, per_token, shared)

    tensors = model.state_dict()
    total = sum(tensor.numel() for tensor in tensors.values())
    routed = sum(tensor.numel() for name, tensor in tensors.items() if ".experts." in name)
    assert report.parameters == total
    assert report.active_parameters == total - routed + (routed * per_token // experts if experts else 0)
    assert report.dtypes == {"F32": 4 * total}
    assert report.bytes == sum(file.stat().st_size for file in tmp_path.glob("*.safetensors"))
    assert report.wirings == list(ARCHS[arch].wirings) and report.rewired is None


@pytest.mark.parametrize("arch", ["gemma4_text", "gemma4"])
def test_projections_of_layers_that_read_the_keys_of_others_are_carried(arch: str, tmp_path: Path) -> None:
    """As published files hold them."""
    tiny.model(arch).save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    more = {name.replace("layers.0", "layers.2"): x for name, x in tensors.items() if ".0.self_attn.k_" in name}
    more = {name: x.clone() for name, x in more.items() if "vision" not in name}
    save_file({**tensors, **more}, path, metadata={"format": "pt"})
    report = inspect_checkpoint(str(tmp_path))
    assert report.problems == [] and report.carried == sorted(more) and len(more) == 2
    load_model(tmp_path)


def test_llama4_with_vision(tmp_path):
    """The decoder's numbers come from text_config; vision tensors are expected like any other."""
    config = transformers.Llama4Config(
        text_config=tiny.config("llama4_text").to_dict(),
        vision_config=dict(
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=2,
            image_size=28,
            patch_size=14,
            vision_output_dim=32,
            projector_input_dim=32,
            projector_output_dim=32,
        ),
    )
    model = transformers.Llama4ForConditionalGeneration(config)
    model.save_pretrained(tmp_path)
    report = inspect_checkpoint(str(tmp_path))
    assert report.problems == [] and report.model_type == "llama4" and report.layers == 4 and report.moe_layers == 2
    assert report.parameters == sum(tensor.numel() for tensor in model.state_dict().values())
    config = json.loads((tmp_path / "config.json").read_text())
    edit_config(tmp_path, vision_config={**config["vision_config"], "num_hidden_layers": "2"})
    with pytest.raises(BadInputError, match="num_hidden_layers is '2'"):
        inspect_checkpoint(str(tmp_path))


@pytest.mark.parametrize("arch", ["llama", "qwen3_moe"])
def test_tied_embeddings(arch, tmp_path):
    """The tied head may be in the files or not; of another shape it may not."""
    tiny.model(arch, tie_word_embeddings=True).save_pretrained(tmp_path)
    assert "lm_head.weight" not in read_layout(tmp_path).tensors
    open_base(str(tmp_path))
    tensors = {name: (t.dtype, t.shape) for name, t in read_layout(tmp_path).tensors.items()}
    sparse_checkpoint.write_header(
        tmp_path / "model.safetensors", {**tensors, "lm_head.weight": ("F32", (tiny.VOCAB, 64))}
    )
    assert open_base(str(tmp_path)).comparison.unexpected == []
    sparse_checkpoint.write_header(tmp_path / "model.safetensors", {**tensors, "lm_head.weight": ("F32", (1, 64))})
    with pytest.raises(BadInputError, match="lm_head"):
        open_base(str(tmp_path))
    edit_config(tmp_path, tie_word_embeddings=False)
    sparse_checkpoint.write_header(tmp_path / "model.safetensors", tensors)
    with pytest.raises(BadInputError, match=r"1 missing \(lm_head.weight\)"):
        open_base(str(tmp_path))


def test_the_key_of_the_original_config_counts(tmp_path):
    """Qwen's own config.json says num_experts; transformers writes num_local_experts."""
    tiny.model("qwen3_moe").save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["num_experts"] = config.pop("num_local_experts")
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert inspect_checkpoint(str(tmp_path)).experts == 8
    edit_config(tmp_path, num_experts=7)
    with pytest.raises(BadInputError, match="unexpected"):
        open_base(str(tmp_path))


@pytest.mark.parametrize("arch, layer", [("deepseek_v3", 61), ("glm4_moe", 46), ("glm4_moe_lite", 47)])
def test_multi_token_prediction_is_carried(arch, layer, tmp_path):
    """What the base class declares as ignored stays in the files; one layer further it is unexpected."""
    tiny.model(arch).save_pretrained(tmp_path)
    tensors = {name: (t.dtype, t.shape) for name, t in read_layout(tmp_path).tensors.items()}
    extra = f"model.layers.{layer}.eh_proj.weight"
    sparse_checkpoint.write_header(tmp_path / "model.safetensors", {**tensors, extra: ("F32", (64, 128))})
    report = inspect_checkpoint(str(tmp_path))
    assert report.carried == [extra] and report.problems == []
    assert f"1 tensors, kept as they are ({extra}" in report.to_text()
    extra = f"model.layers.{layer - 1}.eh_proj.weight"
    sparse_checkpoint.write_header(tmp_path / "model.safetensors", {**tensors, extra: ("F32", (64, 128))})
    assert inspect_checkpoint(str(tmp_path)).problems == [f"1 unexpected ({extra})"]
    with pytest.raises(BadInputError) as caught:
        open_base(str(tmp_path))
    assert caught.value.hint == f"They predict further tokens, which fcsd does not carry for {arch}: remove them."


@pytest.mark.parametrize(
    "arch, extra",
    [
        ("exaone_moe", "mtp.layers.0.eh_proj.weight"),
        ("mimo_v2_flash", "model.mtp.layers.0.eh_proj.weight"),
        ("ernie4_5_moe", "model.mtp_block.0.eh_proj.weight"),
        ("mellum", "mtp.fc.weight"),
    ],
)
def test_modules_that_predict_further_tokens_are_carried(arch: str, extra: str, tmp_path: Path) -> None:
    tiny.model(arch).save_pretrained(tmp_path)
    tensors = {name: (t.dtype, t.shape) for name, t in read_layout(tmp_path).tensors.items()}
    sparse_checkpoint.write_header(tmp_path / "model.safetensors", {**tensors, extra: ("F32", (64, 128))})
    report = inspect_checkpoint(str(tmp_path))
    assert report.carried == [extra] and report.problems == []


@pytest.mark.parametrize(
    "arch, cls, method, dtype, broken",
    [
        ("gpt_oss", "GptOssForCausalLM", "mxfp4", "U8", "model.layers.1.mlp.experts.down_proj_scales"),
        (
            "deepseek_v3",
            "DeepseekV3ForCausalLM",
            "fp8",
            "F8_E4M3",
            "model.layers.2.mlp.experts.5.up_proj.weight_scale_inv",
        ),
    ],
)
def test_quantised_layouts(arch, cls, method, dtype, broken, tmp_path):
    path = sparse_checkpoint.write(tmp_path / "model", tiny.config(arch), cls, 2, method)
    report = inspect_checkpoint(str(path))
    assert report.problems == [] and report.quantization == method and dtype in report.dtypes
    # Parameters are those of the model, not the bytes they are packed in.
    assert report.parameters == sum(tensor.numel() for tensor in tiny.model(arch).state_dict().values())
    tensors = {name: (t.dtype, t.shape) for name, t in read_layout(path).tensors.items()}
    for file in [*path.glob("*.safetensors"), path / INDEX]:
        file.unlink()
    found, shape = tensors.pop(broken)
    sparse_checkpoint.write_header(path / "model.safetensors", tensors)
    with pytest.raises(BadInputError, match=f"1 missing .{broken}"):
        open_base(str(path))
    sparse_checkpoint.write_header(
        path / "model.safetensors", {**tensors, broken: (found, (*shape[:-1], shape[-1] + 1))}
    )
    with pytest.raises(BadInputError, match=f"1 wrong .{broken} is "):
        open_base(str(path))
    edit_config(path, quantization_config=None)
    sparse_checkpoint.write_header(path / "model.safetensors", {**tensors, broken: (found, shape)})
    with pytest.raises(BadInputError, match="unexpected"):
        open_base(str(path))


def test_a_config_alone_is_described_and_its_weights_are_missing(tmp_path):
    tiny.config("qwen3_moe").save_pretrained(tmp_path)
    report = inspect_checkpoint(tmp_path)
    assert report.problems == [f"no weights: {tmp_path} holds config.json alone"] and not report.verified
    assert report.model_type == "qwen3_moe" and "farskip" in report.wirings and (report.experts, report.bytes) == (8, 0)
    assert report.parameters == sum(tensor.numel() for tensor in tiny.model("qwen3_moe").state_dict().values())
    assert "size" not in report.to_text() and "config.json alone" in report.to_text()
    with pytest.raises(BadInputError, match=r"has no model\.safetensors"):
        open_base(str(tmp_path))
    (tmp_path / "adapter_model.safetensors").touch()
    with pytest.raises(BadInputError, match="is a LoRA adapter"):
        inspect_checkpoint(tmp_path)


def test_a_limit_of_time_steps_may_be_infinite(tmp_path):
    """As in published configs of hybrid models; anywhere else it is no number."""
    tiny.model("granitemoehybrid").save_pretrained(tmp_path)
    edit_config(tmp_path, time_step_limit=[0.0, float("inf")])
    assert "Infinity" in (tmp_path / "config.json").read_text()
    report = inspect_checkpoint(tmp_path)
    assert report.problems == [] and report.verified
    edit_config(tmp_path, rms_norm_eps=float("inf"))
    with pytest.raises(BadInputError, match="Infinity is not a finite number"):
        inspect_checkpoint(tmp_path)


def test_converted_by_fcsd(tmp_path):
    """A rewired checkpoint is described, its own auto_map included."""
    tiny.model("deepseek_v2").save_pretrained(tmp_path)
    block = Wiring("farskip", (1, 2, 3)).to_block(base_model="org/base")
    edit_config(
        tmp_path,
        model_type="fcsd_deepseek_v2",
        architectures=["FcsdDeepseekV2ForCausalLM"],
        auto_map=ARCHS["deepseek_v2"].auto_map,
        fcsd=block,
    )
    report = inspect_checkpoint(str(tmp_path))
    assert report.rewired == {"by": "fcsd", **block} and report.wirings == [] and report.problems == []
    assert report.model_type == "deepseek_v2" and report.shared_experts == 2
    assert "farskip, layers 1-3, by fcsd" in report.to_text()
    assert report.original == "org/base" and "\noriginal      org/base\n" in report.to_text()
    edit_config(tmp_path, fcsd={**block, "layers": [1, 4]})
    assert inspect_checkpoint(str(tmp_path)).problems == [
        "the fcsd block of config.json rewires layer 4, and the model has 4 layers"
    ]


def test_a_converted_model_names_its_original(tmp_path):
    """The original is named by its path here, by its commit on the hub, and by its name if it came from elsewhere."""
    tiny.model("llama").save_pretrained(tmp_path / "original")
    convert_checkpoint(tmp_path / "original", tmp_path / "out", wiring="ladder", check=False)
    path = tmp_path / "original"
    assert inspect_checkpoint(path).original is None and "\noriginal" not in inspect_checkpoint(path).to_text()
    report = inspect_checkpoint(tmp_path / "out")
    assert report.original == str(path) and f"original      {path}\n" in report.to_text()
    path.rename(tmp_path / "moved")
    assert f"original      {path}, which is no longer there\n" in inspect_checkpoint(tmp_path / "out").to_text()
    (tmp_path / "out" / ".fcsd.json").unlink()
    assert inspect_checkpoint(tmp_path / "out").original == "original"
    block = json.loads((tmp_path / "out" / "config.json").read_text())["fcsd"]
    edit_config(tmp_path / "out", fcsd=block | {"base_model": "org/base", "base_revision": "0a1b"})
    assert inspect_checkpoint(tmp_path / "out").original == "org/base@0a1b"


def test_trained_by_amd(tmp_path):
    """AMD's keys on a class of their own: described from config and headers, no class of transformers is built."""
    tiny.model("deepseek_v3").save_pretrained(tmp_path)
    edit_config(
        tmp_path,
        architectures=["InstellaMoEForCausalLM"],
        auto_map={"AutoModelForCausalLM": "modeling_instella_moe.InstellaMoEForCausalLM"},
        farskip=True,
        farskip_start_idx=1,
        farskip_end_idx=1e4,
        attn_only_farskip=True,
        mlp_only_farskip=False,
    )
    report = inspect_checkpoint(str(tmp_path))
    assert report.rewired == {"by": "amd", "wiring": "farskip", "variant": "attn-only", "start": 1, "end": 10_000}
    assert (report.architecture, report.layers, report.moe_layers, report.experts) == (
        "InstellaMoEForCausalLM",
        4,
        3,
        8,
    )
    assert report.parameters is None and report.wirings == []
    assert "farskip (attn-only), layers from 1 up to 10000, by AMD" in report.to_text()
    edit_config(tmp_path, farskip=False)  # the other flag alone changes nothing in AMD's code
    with pytest.raises(BadInputError, match="InstellaMoEForCausalLM"):
        inspect_checkpoint(str(tmp_path))


@pytest.mark.parametrize(
    "keys",
    [
        {"farskip": False, "attn_only_farskip": True},
        {"farskip": False, "mlp_only_farskip": True},
        {"mlp_only_farskip": True},
        {"farskip": True, "attn_only_farskip": True, "mlp_only_farskip": True},
        {"farskip": False, "attn_only_farskip": True, "mlp_only_farskip": True},
    ],
)
def test_amds_keys_that_leave_the_wiring_standard(tmp_path, keys):
    tiny.model("deepseek_v3").save_pretrained(tmp_path)
    edit_config(tmp_path, **keys)
    report = inspect_checkpoint(str(tmp_path))
    assert report.rewired is None and report.wirings == list(ARCHS["deepseek_v3"].wirings) and report.problems == []


def test_gated_attention_is_named(tmp_path):
    tiny.model("deepseek_v3").save_pretrained(tmp_path)
    edit_config(tmp_path, gated_attention=True)
    with pytest.raises(BadInputError, match="its attention is gated"):
        inspect_checkpoint(str(tmp_path))
    edit_config(tmp_path, farskip=True, architectures=["InstellaMoEForCausalLM"])
    report = inspect_checkpoint(str(tmp_path))
    assert report.wirings == [] and report.problems == []
    assert "the model was trained with its own, which `fcsd convert` keeps" in report.to_text()
    edit_config(tmp_path, model_type="instella_moe")  # a type that neither transformers nor fcsd has
    report = inspect_checkpoint(str(tmp_path))
    assert len(report.problems) == 1
    assert "problem       its attention is gated (self_attn.gate_proj)" in report.to_text()
    with pytest.raises(BadInputError, match="its attention is gated"):
        convert_checkpoint(tmp_path, Path(f"{tmp_path}-out"))
    edit_config(tmp_path, farskip=False, model_type="instella_moe", gated_attention=False)
    with pytest.raises(BadInputError, match="its attention is gated"):
        inspect_checkpoint(str(tmp_path))


@pytest.mark.timeout(120)
def test_109b_and_671b(tmp_path):
    """Header-only: hundreds of GB, as sparse files, in seconds and without their memory."""
    scout = sparse_checkpoint.scout(tmp_path / "scout")
    report = inspect_checkpoint(str(scout))
    assert report.problems == [] and report.moe_layers == 48 and report.experts == 16
    assert 108e9 < report.parameters < 109e9 and 16e9 < report.active_parameters < 19e9 and report.bytes > 216e9
    assert sum(file.stat().st_blocks * 512 for file in scout.iterdir()) < 10e6

    deepseek = sparse_checkpoint.write(
        tmp_path / "deepseek", transformers.DeepseekV3Config(), "DeepseekV3ForCausalLM", 163, "fp8"
    )
    report = open_base(str(deepseek)).comparison
    assert 670e9 < sum(torch.Size(shape).numel() for shape in report.parameters.values()) < 672e9


def test_json_is_stable_and_text_is_short(tmp_path):
    tiny.model("mixtral", dtype=torch.bfloat16).save_pretrained(tmp_path)
    report = inspect_checkpoint(str(tmp_path))
    assert list(json.loads(report.to_json())) == [
        *("model", "revision", "gated", "model_type", "family", "hub_id", "architecture", "layers"),
        *("dense_layers", "moe_layers"),
        *("experts", "experts_per_token", "shared_experts", "parameters", "active_parameters", "bytes", "shards"),
        *(
            "dtypes",
            "quantization",
            "stored_as",
            "wirings",
            "rewired",
            "original",
            "carried",
            "tokenizer",
            "verified",
            "problems",
        ),
    ]
    text = report.to_text()
    assert "MixtralForCausalLM (mixtral)" in text and "8, 2 per token" in text and "478 k, 183 k active" in text
    assert "standard, farskip, ladder, parallel" in text and len(text.splitlines()) < 13
    assert "published as  Mixtral\n" in text and report.hub_id is None
    for name, hub_id in (("mistralai/Mixtral-8x7B-v0.1", True), ("/home/me/model", False), ("../mine", False)):
        edit_config(tmp_path, _name_or_path=name)
        report = inspect_checkpoint(str(tmp_path))
        assert report.hub_id == (name if hub_id else None)
        assert (f"published as  Mixtral, here {name}\n" in report.to_text()) == hub_id


def test_a_missing_and_a_damaged_tokenizer_are_named(tmp_path):
    tiny.model("llama").save_pretrained(tmp_path)
    found = inspect_checkpoint(str(tmp_path))
    assert (found.tokenizer, found.problems) == (None, []) and "tokenizer     none: " in found.to_text()
    (tmp_path / "tokenizer.model").write_bytes(b"a")
    assert inspect_checkpoint(str(tmp_path)).tokenizer == "tokenizer.model"
    (tmp_path / "tokenizer.json").write_text('{"version": "1.0", "trunc')
    found = inspect_checkpoint(str(tmp_path))
    assert found.tokenizer == "tokenizer.json" and "tokenizer     " not in found.to_text()
    [problem] = found.problems
    assert "tokenizer.json: is not strict JSON" in problem and f"problem       {problem}" in found.to_text()


def test_a_truncated_single_file_is_named(tmp_path):
    tiny.model("llama").save_pretrained(tmp_path)
    with (tmp_path / "model.safetensors").open("rb+") as file:
        file.truncate(50_000)
    with pytest.raises(BadInputError, match=r"model.safetensors: is truncated"):
        inspect_checkpoint(str(tmp_path))


def test_what_config_leaves_out_is_asked_of_transformers(tmp_path):
    tiny.model("mixtral").save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    del config["num_experts_per_tok"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    report = inspect_checkpoint(str(tmp_path))
    assert report.verified and report.experts_per_token == transformers.MixtralConfig().num_experts_per_tok


def qwen3_vl_2b():
    text = dict(
        vocab_size=151936,
        hidden_size=2048,
        intermediate_size=6144,
        num_hidden_layers=28,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=128,
        rope_parameters={"rope_type": "default", "rope_theta": 5e6, "mrope_section": [24, 20, 20]},
        tie_word_embeddings=True,
    )
    vision = dict(depth=24, hidden_size=1024, intermediate_size=4096, out_hidden_size=2048)
    vision |= dict(deepstack_visual_indexes=[5, 11, 17])
    return transformers.Qwen3VLConfig(text_config=text, vision_config=vision, tie_word_embeddings=True)


def test_qwen3_vl_of_full_size(tmp_path):
    folder = sparse_checkpoint.write(tmp_path / "model", qwen3_vl_2b(), "Qwen3VLForConditionalGeneration", shards=2)
    report = inspect_checkpoint(str(folder))
    assert report.problems == [] and (report.layers, report.moe_layers) == (28, 0)
    assert 2.0e9 < report.parameters < 2.3e9
    numbers = MetaModel(str(folder)).numbers
    assert 1.6e9 < numbers.total < 1.8e9 and len(numbers.layers) == 28, "the decoder alone"


def test_qwen3_5_of_full_size(tmp_path):
    """Most layers have linear attention, and tensors that predict further tokens lie beside the layers."""
    config = transformers.Qwen3_5MoeConfig(
        text_config={"num_hidden_layers": 8}, vision_config={"out_hidden_size": 2048}
    )
    folder = sparse_checkpoint.write(tmp_path / "model", config, "Qwen3_5MoeForConditionalGeneration", shards=2)
    index = json.loads((folder / INDEX).read_text())
    sparse_checkpoint.write_header(folder / "mtp.safetensors", {"mtp.fc.weight": ("BF16", (2048, 4096))})
    index["weight_map"]["mtp.fc.weight"] = "mtp.safetensors"
    (folder / INDEX).write_text(json.dumps(index))
    report = inspect_checkpoint(str(folder))
    assert report.problems == [] and report.carried == ["mtp.fc.weight"]
    assert (report.layers, report.moe_layers, report.experts, report.experts_per_token) == (8, 8, 256, 8)
    assert report.wirings == ["standard", "farskip", "ladder", "parallel"]
    numbers = MetaModel(str(folder)).numbers
    assert numbers.attention == 16 * 512 // 4, "one layer of four has softmax attention"
    edit = {name: file for name, file in index["weight_map"].items() if "layers.2.linear_attn.conv1d" not in name}
    (folder / INDEX).write_text(json.dumps({**index, "weight_map": edit}))
    (problem,) = inspect_checkpoint(str(folder)).problems
    assert "layers.2.linear_attn.conv1d.weight" in problem
