"""What inspect says, for every architecture, quantised, tied, multimodal, rewired, and as large as they come."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import sparse_checkpoint
import tiny
import torch
import transformers
from gate import open_base

from fcsd.checkpoint import INDEX, inspect_checkpoint, read_layout
from fcsd.errors import BadInputError
from fcsd.models.archs import ARCHS
from fcsd.models.export_template import auto_map
from fcsd.models.wiring import Wiring

# architecture -> (dense layers, MoE layers, experts, per token, shared) of the tiny models; DENSE_SHAPE if it has none
DENSE_SHAPE = (4, 0, 0, 0, 0)
SHAPES = {
    "qwen3_moe": (1, 3, 8, 2, 0),
    "qwen2_moe": (0, 4, 8, 2, 1),
    "mixtral": (0, 4, 8, 2, 0),
    "olmoe": (0, 4, 8, 2, 0),
    "glm4_moe": (1, 3, 8, 2, 1),
    "gpt_oss": (0, 4, 8, 2, 0),
    "deepseek_v2": (1, 3, 8, 2, 2),
    "deepseek_v3": (1, 3, 8, 2, 1),
    "llama4_text": (2, 2, 4, 1, 1),
    "flex_olmo": (0, 4, 8, 2, 0),
    "granitemoe": (0, 4, 8, 2, 0),
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
    assert not report.verified and replace(report, verified=True) == inspect_checkpoint(str(tmp_path), verify=True)
    assert report.problems == [] and report.carried == []
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


@pytest.mark.parametrize("arch, layer", [("deepseek_v3", 61), ("glm4_moe", 46)])
def test_multi_token_prediction_is_carried(arch, layer, tmp_path):
    """What the base class declares as ignored stays in the files; one layer further it is unexpected."""
    tiny.model(arch).save_pretrained(tmp_path)
    tensors = {name: (t.dtype, t.shape) for name, t in read_layout(tmp_path).tensors.items()}
    extra = f"model.layers.{layer}.eh_proj.weight"
    sparse_checkpoint.write_header(tmp_path / "model.safetensors", {**tensors, extra: ("F32", (64, 128))})
    report = inspect_checkpoint(str(tmp_path))
    assert report.carried == [extra] and report.problems == []
    assert replace(report, verified=True) == inspect_checkpoint(str(tmp_path), verify=True)
    assert f"1 tensors, kept as they are ({extra}" in report.to_text()
    extra = f"model.layers.{layer - 1}.eh_proj.weight"
    sparse_checkpoint.write_header(tmp_path / "model.safetensors", {**tensors, extra: ("F32", (64, 128))})
    assert inspect_checkpoint(str(tmp_path), verify=True).problems == [f"1 unexpected ({extra})"]


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


def test_converted_by_fcsd(tmp_path):
    """A rewired checkpoint is described, its own auto_map included."""
    tiny.model("deepseek_v2").save_pretrained(tmp_path)
    block = Wiring("farskip", (1, 2, 3)).to_block(base_model="org/base")
    edit_config(
        tmp_path,
        model_type="fcsd_deepseek_v2",
        architectures=["FcsdDeepseekV2ForCausalLM"],
        auto_map=auto_map(ARCHS["deepseek_v2"]),
        fcsd=block,
    )
    report = inspect_checkpoint(str(tmp_path))
    assert report.rewired == {"by": "fcsd", **block} and report.wirings == [] and report.problems == []
    assert report.model_type == "deepseek_v2" and report.shared_experts == 2
    assert "farskip, layers 1-3, by fcsd" in report.to_text()


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
    with pytest.raises(BadInputError, match="auto_map"):
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
    assert report.wirings == [] and len(report.problems) == 1
    assert "problem       its attention is gated (self_attn.gate_proj)" in report.to_text()
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
        *("model", "revision", "gated", "model_type", "architecture", "layers", "dense_layers", "moe_layers"),
        *("experts", "experts_per_token", "shared_experts", "parameters", "active_parameters", "bytes", "shards"),
        *("dtypes", "quantization", "wirings", "rewired", "carried", "verified", "problems"),
    ]
    text = report.to_text()
    assert "MixtralForCausalLM (mixtral)" in text and "8, 2 per token" in text and "478 k, 183 k active" in text
    assert "standard, farskip, ladder, parallel" in text and len(text.splitlines()) < 12


def test_inspecting_imports_no_torch(tmp_path):
    """Neither for an original nor for a converted model; so `fcsd inspect` answers at once."""
    tiny.model("deepseek_v2").save_pretrained(tmp_path / "original")
    tiny.model("deepseek_v2").save_pretrained(tmp_path / "converted")
    edit_config(
        tmp_path / "converted",
        model_type="fcsd_deepseek_v2",
        architectures=["FcsdDeepseekV2ForCausalLM"],
        fcsd=Wiring("farskip", (1, 2, 3)).to_block(),
    )
    program = (
        "import sys; from fcsd.checkpoint import inspect_checkpoint\n"
        "for path in sys.argv[1:]: assert inspect_checkpoint(path).layers == 4\n"
        "print({'torch', 'transformers', 'huggingface_hub'} & set(sys.modules))"
    )
    command = [sys.executable, "-c", program, *map(str, sorted(tmp_path.iterdir()))]
    run = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert run.stdout.strip() == "set()"


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
