"""The plugin around its layers: what it reads, refuses and registers, at the border to vLLM, which is doubled."""

import importlib
import json
import pickle
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from importlib.metadata import EntryPoint
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import tiny
import torch
import transformers

import fcsd.serve.vllm
from fcsd.convert import convert_checkpoint
from fcsd.errors import BadInputError, ConfigError
from fcsd.models.archs import ARCHS
from fcsd.models.build import model_classes
from fcsd.models.wiring_block import Wiring
from fcsd.serve.vllm import plugin, support
from fcsd.serve.vllm.checks import check, problems
from fcsd.serve.vllm.config import base_config, parser_for
from fcsd.serve.vllm.reduction import read_settings


class StockParser:
    """vLLM's parser at its interface."""

    def parse(self, model: Any, trust_remote_code: bool, revision: Any = None, code_revision: Any = None, **_: Any):
        raw, _ = transformers.PretrainedConfig.get_config_dict(model)
        return raw, transformers.AutoConfig.from_pretrained(model, trust_remote_code=trust_remote_code)


@pytest.mark.parametrize("arch", ["llama", "deepseek_v2"])
def test_a_converted_config_reaches_vllm_as_its_base(arch, tmp_path):
    base = tiny.model(arch)
    base.save_pretrained(tmp_path / "base")
    convert_checkpoint(tmp_path / "base", tmp_path / "wired", wiring="ladder", layers="1-2", check=False)
    parser = parser_for(StockParser)()
    raw, config = parser.parse(tmp_path / "wired", True, hf_overrides=None)
    assert type(config) is type(base.config) and config.model_type == raw["model_type"] == arch
    assert config.architectures == [f"Fcsd{ARCHS[arch].causal_lm}"]
    assert Wiring.from_block(config.fcsd).layers == (1, 2) and config.name_or_path == str(tmp_path / "wired")
    assert "auto_map" not in raw and "fcsd" not in raw and not hasattr(config, "auto_map")
    assert json.loads(pickle.loads(pickle.dumps(config)).to_json_string(use_diff=False))["fcsd"] == config.fcsd
    raw, config = parser.parse(tmp_path / "base", False)
    assert config.architectures == [ARCHS[arch].causal_lm] and not hasattr(config, "fcsd")


def test_a_block_that_does_not_belong_is_refused():
    block = Wiring("ladder", (1,)).to_block()
    assert base_config({"model_type": "llama"}, "x") is None
    for raw in (
        {"model_type": "llama", "fcsd": block},
        {"model_type": "fcsd_llama"},
        {"model_type": "fcsd_gpt2", "fcsd": block},
        {"model_type": "fcsd_llama", "fcsd": {**block, "version": 2}},
        {"model_type": "fcsd_llama", "fcsd": {**block, "news": 1}},
    ):
        with pytest.raises(BadInputError, match=r"^x: "):
            base_config(raw, "x")


def test_a_family_that_vllm_does_not_have_is_refused_by_name():
    raw = {"model_type": "fcsd_dots1", "fcsd": Wiring("ladder", (1,)).to_block()}
    with pytest.raises(BadInputError, match=r"^x: the vLLM plugin cannot serve dots1: vLLM has no class of its own"):
        base_config(raw, "x")


def test_a_multimodal_type_is_served_with_the_language_models_that_the_plugin_serves():
    raw: dict[str, Any] = {"model_type": "fcsd_mistral3", "fcsd": Wiring("ladder", (1,)).to_block()}
    assert base_config({**raw, "text_config": {"model_type": "mistral"}}, "x") is not None
    with pytest.raises(BadInputError, match=r"^x: the vLLM plugin cannot serve mistral3 with ministral3: vLLM reads"):
        base_config({**raw, "text_config": {"model_type": "ministral3"}}, "x")
    kimi = {**raw, "model_type": "fcsd_kimi_k25", "text_config": {"model_type": "kimi_k2"}}  # as it is published
    found = base_config(kimi, "x")
    assert found is not None and found["architectures"] == ["KimiK25ForConditionalGeneration"]
    with pytest.raises(BadInputError, match="does not have the architecture 'gpt2'"):
        base_config({**kimi, "text_config": {"model_type": "gpt2"}}, "x")


def settings(wiring: Wiring, dtype: torch.dtype = torch.bfloat16, moe: bool = True, **changes: Any) -> Any:
    """vLLM's settings; the changes are to ``parallel_config``, or replace a whole part of the settings."""
    parallel = dict(
        tensor_parallel_size=2, pipeline_parallel_size=1, data_parallel_size=1, decode_context_parallel_size=1,
        prefill_context_parallel_size=1, use_sequence_parallel_moe=False, use_ubatching=False, enable_eplb=False,
        enable_expert_parallel=True, all2all_backend="allgather_reducescatter",
    )  # fmt: skip
    whole: dict[str, Any] = dict(
        quant_config=None, speculative_config=None, lora_config=None, additional_config={}, kv_transfer_config=None
    )
    for name, value in changes.items():
        (parallel if name in parallel else whole)[name] = value
    rope = dict(rope_type="longrope", original_max_position_embeddings=4096)
    rope |= whole.pop("rope", {})
    gated = "quant_config" in changes
    config = SimpleNamespace(
        fcsd=wiring.to_block(), gated_attention=gated, rope_parameters=rope, max_position_embeddings=8192
    )
    return SimpleNamespace(
        model_config=SimpleNamespace(
            hf_config=config,
            dtype=dtype,
            is_moe=moe,
            runner_type=whole.pop("runner_type", "generate"),
            max_model_len=whole.pop("max_model_len", 4096),
        ),
        parallel_config=SimpleNamespace(**parallel),
        cache_config=SimpleNamespace(kv_sharing_fast_prefill=whole.pop("fast_prefill", False)),
        compilation_config=SimpleNamespace(
            pass_config=SimpleNamespace(enable_sp=whole.pop("enable_sp", False)),
            splitting_ops=whole.pop("splitting_ops", None),
            use_inductor_graph_partition=whole.pop("partition", None),
        ),
        **whole,
    )


FARSKIP, DESYNC = Wiring("farskip", (1, 2)), Wiring("desync-2x", (1, 2), tp_degree=4)


REFUSED = [
    (settings(DESYNC), "--tensor-parallel-size 4, not 2"),
    (settings(DESYNC, tensor_parallel_size=4, pipeline_parallel_size=2), "pipeline parallelism of Desync"),
    (settings(Wiring("ladder", (1,), distance=2), pipeline_parallel_size=2), "at a distance of 2 or more"),
    (settings(FARSKIP, dtype=torch.float16), "rescales their stream in float16"),
    (settings(FARSKIP, use_sequence_parallel_moe=True), "sequence-parallel experts"),
    (settings(FARSKIP, fast_prefill=True), "sums in flight would get lost"),
    (settings(FARSKIP, data_parallel_size=2, enable_expert_parallel=False), "data-parallel attention of a model with"),
    (settings(FARSKIP, data_parallel_size=2, pipeline_parallel_size=2), "or with pipeline stages"),
    (settings(FARSKIP, data_parallel_size=2, all2all_backend="deepep_low_latency"), "use allgather_reducescatter"),
    (settings(FARSKIP, additional_config={"fcsd": {"shared_experts": "first"}}), "not 'first'"),
    (settings(FARSKIP, use_ubatching=True), "two-batch overlap"),
    (settings(FARSKIP, enable_eplb=True), "moving experts"),
    (settings(FARSKIP, decode_context_parallel_size=2), "context parallelism"),
    (settings(FARSKIP, enable_sp=True), "async TP by the compiler"),
    (settings(FARSKIP, speculative_config=SimpleNamespace(method="medusa")), "speculation by EAGLE-3"),
    (settings(FARSKIP, speculative_config=SimpleNamespace(method="eagle3")), "use one of eagle, mtp, ngram"),
    (settings(FARSKIP, lora_config=object()), "LoRA adapters: "),
    (settings(FARSKIP, quant_config=object()), "quantised weights with gated attention"),
    (settings(FARSKIP, runner_type="pooling"), "embeddings and scores"),
    (settings(FARSKIP, max_model_len=4097), "use at most original_max_position_embeddings"),
    (settings(FARSKIP, rope={"rope_type": "dynamic"}), "rotary factors that grow with the text"),
    (settings(FARSKIP, kv_transfer_config=object()), "leave --kv-transfer-config out"),
    (settings(FARSKIP, additional_config={"fcsd": {"reduce": "none"}}), "reduce none gives wrong results"),
    (
        settings(FARSKIP, additional_config={"fcsd": {"reduce": "quantised:fp4"}}),
        '"fp4" is not a format',
    ),
    (settings(FARSKIP, additional_config={"fcsd": {"reduce": "quantised"}}), "is not a format"),
    (settings(FARSKIP, additional_config={"fcsd": {"reduce": "fast"}}), "unknown all-reduce backend 'fast'"),
    (
        settings(FARSKIP, additional_config={"fcsd": {"exchange": "in flight"}}),
        'the keys "reduce", "overlap_from", "shared_experts" and "pieces"',
    ),
    (settings(FARSKIP, additional_config={"fcsd": {"pieces": "yes"}}), "pieces is true or false, not 'yes'"),
    (settings(FARSKIP, splitting_ops=[], additional_config={"fcsd": {"pieces": True}}), "leave out pieces, or these"),
    (
        settings(FARSKIP, partition=True, additional_config={"fcsd": {"pieces": True}}),
        "no sum can travel in the pieces",
    ),
    (settings(FARSKIP, additional_config={"fcsd": {"overlap_from": -1}}), "overlap_from is a number of tokens"),
    (settings(FARSKIP, additional_config={"fcsd": {"overlap_from": "2048"}}), "not '2048'; 0 always overlaps"),
    (settings(FARSKIP, additional_config={"fcsd": {"reduce": "no.json"}}), "no.json is not a table of sums for this"),
]


@pytest.mark.parametrize(("config", "named"), REFUSED, ids=lambda value: value if isinstance(value, str) else "")
def test_what_a_converted_model_cannot_do_is_refused_by_name(config, named, monkeypatch):
    monkeypatch.setenv(support.RIGHT_RESULTS, "1")
    with pytest.raises((ConfigError, BadInputError)) as caught:
        check(config, "deepseek_v3")
    assert named in str(caught.value) and "\n" not in str(caught.value)


def test_all_that_is_lost_is_refused(monkeypatch):
    """The plugin's messages and the generated table of docs/serving.md are both made of ``LOST``."""
    monkeypatch.setenv(support.RIGHT_RESULTS, "1")
    said = [problem for config, _ in REFUSED for problem in found_problems(config)]
    for name in support.LOST:
        assert any(problem.startswith(support.refusal(name)) for problem in said), name


def found_problems(config: Any) -> list[str]:
    try:
        return list(problems(config, "deepseek_v3"))
    except (ConfigError, BadInputError):  # the section of fcsd in --additional-config cannot be read at all
        return []


def test_what_it_can_do_is_accepted(monkeypatch):
    monkeypatch.delenv(support.RIGHT_RESULTS, raising=False)
    without = settings(FARSKIP)
    del without.compilation_config.pass_config.enable_sp  # vLLM 0.32 has no such pass
    for config in (
        without,
        settings(FARSKIP, pipeline_parallel_size=2),
        settings(DESYNC, tensor_parallel_size=4),
        settings(FARSKIP, moe=False, data_parallel_size=2, enable_expert_parallel=False),
        settings(FARSKIP, data_parallel_size=2),
        settings(FARSKIP, speculative_config=SimpleNamespace(method="ngram")),
        settings(FARSKIP, speculative_config=SimpleNamespace(method="mtp")),
        settings(FARSKIP, speculative_config=SimpleNamespace(method="eagle")),
        settings(FARSKIP, additional_config={"fcsd": {"reduce": "none"}}),  # by vllm serve itself, for a bound
        settings(FARSKIP, additional_config={"fcsd": {"reduce": "vllm"}, "other": 1}),
        settings(FARSKIP, additional_config={"fcsd": {"reduce": "symmetric", "overlap_from": 0}}),
        settings(FARSKIP, additional_config={"fcsd": {"reduce": "quantised:int4"}}),
    ):
        assert list(problems(config, "deepseek_v3")) == []
    assert list(problems(settings(FARSKIP, dtype=torch.float16), "glm4_moe")) == []
    monkeypatch.setenv(support.RIGHT_RESULTS, "1")
    for section in ({"shared_experts": "apart"}, {"shared_experts": "beside"}):
        assert list(problems(settings(FARSKIP, additional_config={"fcsd": section}), "deepseek_v3")) == []
    assert read_settings({}).shared_experts == "beside"
    other = settings(FARSKIP)
    other.model_config.hf_config.lm_head_bias = False
    assert [problem[:32] for problem in problems(other, "phimoe")] == ["config.json has lm_head_bias Fal"]
    other.model_config.hf_config.qkv_bias = False  # vLLM's biases would be what the memory holds
    assert [problem[:28] for problem in problems(other, "qwen2_moe")] == ["config.json has qkv_bias Fal"]
    (refused,) = problems(settings(FARSKIP, pipeline_parallel_size=2), "granite")
    assert refused == support.refusal("pipeline")


@pytest.mark.parametrize(
    ("asked", "travel"),
    [
        ({}, True),
        ({"additional_config": {"fcsd": {"pieces": False}}}, False),
        ({"splitting_ops": ["vllm::moe_forward"]}, False),
        ({"splitting_ops": [], "additional_config": {"fcsd": {"pieces": False}}}, False),
        ({"additional_config": {"fcsd": {"pieces": True}}}, True),
        ({"partition": True}, False),
    ],
)
def test_sums_travel_in_the_pieces_that_vllm_makes_by_itself_and_in_no_others(asked, travel):
    config = settings(FARSKIP, **asked)
    check(config, "deepseek_v3")
    assert read_settings(config.additional_config).pieces == travel


def test_every_architecture_has_the_name_of_its_export():
    for model_type, arch in ARCHS.items():
        shipped: Any = model_classes(model_type)["AutoModelForCausalLM"]
        assert arch.wired_causal_lm == shipped.__name__ and not shipped.is_backend_compatible(), (
            "vLLM would serve it without the plugin"
        )
        assert (arch.vllm.shared is not None) == (arch.blocks.shared is not None)


def module(name: str, **contents: Any) -> Any:
    found = ModuleType(name)
    vars(found).update(contents)
    return found


@pytest.fixture
def vllm(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The modules of vLLM that ``registration.py`` changes, in an unsupported version unless the test sets another."""

    asked: list[str] = []
    gpt_oss = SimpleNamespace(
        verify_and_update_config=lambda vllm_config: asked.append("config"),
        verify_and_update_model_config=lambda model_config: asked.append("model"),
    )

    models: dict[str, str] = {}
    fakes = {
        "vllm": module("vllm", __version__="0.34.1"),
        "vllm.config": module("vllm.config"),
        "vllm.config.vllm": module(
            "vllm.config.vllm", DEFAULT_V2_MODEL_RUNNER_ARCHITECTURES=frozenset({"LlamaForCausalLM"})
        ),
        "vllm.model_executor": module("vllm.model_executor"),
        "vllm.model_executor.models": module("vllm.model_executor.models"),
        "vllm.model_executor.models.config": module("c", MODELS_CONFIG_MAP={"GptOssForCausalLM": gpt_oss}),
        "vllm.model_executor.models.registry": module(
            "r",
            ModelRegistry=SimpleNamespace(
                register_model=models.__setitem__,
                get_supported_archs=lambda: {"MistralForCausalLM", "TransformersMoEForCausalLM"},
            ),
        ),
        "vllm.transformers_utils": module("vllm.transformers_utils"),
    }
    parsing = module("p", _CONFIG_FORMAT_TO_CONFIG_PARSER={"hf": StockParser})
    fakes["vllm.transformers_utils.config"] = parsing
    fakes["vllm.config"].vllm = fakes["vllm.config.vllm"]
    fakes["vllm"].config = fakes["vllm.config"]
    fakes["vllm.transformers_utils"].config = parsing
    for name, fake in fakes.items():
        monkeypatch.setitem(sys.modules, name, fake)
    # A module that was imported with the doubles of another test is in both places.
    monkeypatch.delitem(sys.modules, "fcsd.serve.vllm.registration", raising=False)
    monkeypatch.delattr(fcsd.serve.vllm, "registration", raising=False)
    yield SimpleNamespace(
        top=fakes["vllm"], models=models, hooks=fakes["vllm.model_executor.models.config"].MODELS_CONFIG_MAP,
        settings=fakes["vllm.config.vllm"], parsers=parsing._CONFIG_FORMAT_TO_CONFIG_PARSER, asked=asked,
    )  # fmt: skip
    sys.modules.pop("fcsd.serve.vllm.registration", None)


def test_an_unsupported_version_changes_nothing_and_says_so(vllm, caplog):
    plugin.register()
    assert vllm.models == {} and vllm.parsers == {"hf": StockParser}
    (record,) = caplog.records
    assert record.levelname == "ERROR" and "needs vLLM >=0.24,<0.34, not 0.34.1" in record.getMessage()


def test_registration_adds_our_names_and_keeps_what_belongs_to_the_base(vllm):
    vllm.top.__version__ = "0.24.0"
    plugin.register()
    wired = [arch.wired_causal_lm for arch in ARCHS.values()]
    assert vllm.models == {name: f"fcsd.serve.vllm.models:{name}" for name in wired}
    parser = vllm.parsers["hf"]
    assert issubclass(parser, StockParser)
    runner = vllm.settings.DEFAULT_V2_MODEL_RUNNER_ARCHITECTURES
    assert runner == {"LlamaForCausalLM", "FcsdLlamaForCausalLM"}
    hooks = vllm.hooks["FcsdGptOssForCausalLM"]
    hooks.verify_and_update_model_config(None)
    hooks.verify_and_update_config(settings(FARSKIP))
    assert vllm.asked == ["model", "config"]
    with pytest.raises(ConfigError, match="enable-eplb"):
        vllm.hooks["FcsdLlamaForCausalLM"].verify_and_update_config(settings(FARSKIP, enable_eplb=True))
    plugin.register()
    assert vllm.parsers["hf"] is parser, "a second call changes nothing"


class Column(torch.nn.Linear):
    """vLLM's ``ColumnParallelLinear`` on one rank."""

    def __init__(self, *sizes: int, bias: bool) -> None:
        super().__init__(*sizes, bias=bias)
        vars(self.weight)["weight_loader"] = lambda weight, tensor: weight.data.copy_(tensor)

    def forward(self, x: torch.Tensor) -> Any:
        return super().forward(x), None


@pytest.fixture
def models(vllm, monkeypatch) -> Iterator[Any]:
    """The plugin's module of model classes."""
    groups = dict.fromkeys(("get_tensor_model_parallel_world_size", "get_tp_group"))
    monkeypatch.setitem(sys.modules, "vllm.distributed", module("d", **groups))
    monkeypatch.setitem(sys.modules, "vllm.model_executor.models.utils", module("u", PPMissingLayer=torch.nn.Identity))
    monkeypatch.setitem(sys.modules, "vllm.model_executor.layers.linear", module("l", ColumnParallelLinear=Column))
    monkeypatch.delitem(sys.modules, "fcsd.serve.vllm.models", raising=False)
    yield importlib.import_module("fcsd.serve.vllm.models")
    sys.modules.pop("fcsd.serve.vllm.models", None)


def test_a_family_that_vllm_runs_by_transformers_is_refused(models):
    """vLLM 0.32 has no class of its own for some families, and transformers' layers cannot be rewired under it."""
    backend = type("TransformersForCausalLM", (), {"__module__": "vllm.model_executor.models.transformers"})
    registry = sys.modules["vllm.model_executor.models.registry"]
    registry.ModelRegistry._try_load_model_cls = lambda name: backend
    for family in ("arcee", "glm", "mellum"):
        with pytest.raises(ImportError, match=f"runs {ARCHS[family].causal_lm} by transformers"):
            getattr(models, ARCHS[family].wired_causal_lm)


def test_the_gates_of_a_checkpoint_reach_the_attentions_and_nothing_else_does(models):
    class Layer(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.self_attn: Any = torch.nn.Module()
            self.self_attn.o_proj = Column(6, 4, bias=False)
            vars(self.self_attn.o_proj).update(input_size=6, output_size=4)

    model: Any = torch.nn.Module()
    model.model = torch.nn.Module()
    model.model.layers = torch.nn.ModuleList([Layer(), torch.nn.Identity()])  # the second is of another stage
    models.add_gates(model, ARCHS["deepseek_v3"].vllm)
    gate, other = torch.ones(6, 4), torch.ones(1)
    names = ["model.layers.0.self_attn.gate_proj.weight", "model.layers.1.self_attn.gate_proj.weight"]
    given = [(names[0], gate), ("model.layers.0.mlp.gate_proj.weight", other), (names[1], gate)]
    loaded: set[str] = set()
    assert list(models.load_gates(model, given, loaded)) == [given[1]] and loaded == {names[0]}
    assert torch.equal(model.model.layers[0].self_attn.gate_proj.weight, gate)


def test_a_converted_model_is_not_built_as_another_architecture(vllm):
    """``--hf-overrides`` renames it, and ``--model-impl transformers`` builds it by vLLM's own backend."""
    vllm.top.__version__ = "0.24.0"
    plugin.register()
    plain = settings(FARSKIP)
    del plain.model_config.hf_config.fcsd
    for name in ("LlamaForCausalLM", "GptOssForCausalLM", "MistralForCausalLM", "TransformersMoEForCausalLM"):
        with pytest.raises(ConfigError, match=f"would build it as {name}.* --hf-overrides"):
            vllm.hooks[name].verify_and_update_config(settings(FARSKIP))
        vllm.hooks[name].verify_and_update_config(plain)
        vllm.hooks[name].verify_and_update_model_config(None)
    assert vllm.asked == ["config", "model"], "GPT-OSS keeps its own"


def test_the_wiring_is_that_of_the_weights_whatever_config_vllm_is_given(vllm, tmp_path):
    """``--hf-overrides '{"fcsd": null}'`` and ``--hf-config-path`` change what vLLM takes for the config."""
    vllm.top.__version__ = "0.24.0"
    plugin.register()
    (tmp_path / "config.json").write_text(json.dumps({"fcsd": FARSKIP.to_block()}))
    own, none, other = settings(FARSKIP), settings(FARSKIP), settings(Wiring("ladder", (1, 2)))
    for given in (own, none, other):
        given.model_config.model = str(tmp_path)
    none.model_config.hf_config.fcsd = None
    with pytest.raises(ConfigError, match=r"would build it as LlamaForCausalLM.* and fcsd in --hf-overrides"):
        vllm.hooks["LlamaForCausalLM"].verify_and_update_config(none)
    check(own, "deepseek_v3")
    with pytest.raises(ConfigError, match=r"its config.json has another wiring; .* --hf-config-path"):
        check(other, "deepseek_v3")


def test_hooks_of_vllm_keep_what_else_they_have(vllm):
    class Own:
        @staticmethod
        def verify_and_update_config(vllm_config: Any) -> None: ...

        @staticmethod
        def verify_and_update_model_config(model_config: Any) -> None: ...

        @staticmethod
        def later() -> str:
            return "kept"

    vllm.hooks["MistralForCausalLM"] = Own
    vllm.top.__version__ = "0.24.0"
    plugin.register()
    assert issubclass(vllm.hooks["MistralForCausalLM"], Own) and vllm.hooks["MistralForCausalLM"].later() == "kept"


def test_later_versions_choose_the_model_runner_without_a_list(vllm, monkeypatch):
    """From 0.29 on vLLM decides by features."""
    vllm.top.__version__ = "0.29.0"
    monkeypatch.delattr(vllm.settings, "DEFAULT_V2_MODEL_RUNNER_ARCHITECTURES")
    plugin.register()
    assert "FcsdLlamaForCausalLM" in vllm.models and issubclass(vllm.parsers["hf"], StockParser)


@pytest.mark.parametrize("missing", ["register_model", "DEFAULT_V2_MODEL_RUNNER_ARCHITECTURES", "hf"])
def test_after_a_registration_that_fails_no_converted_config_can_be_read(vllm, missing, monkeypatch, caplog):
    """The error is logged and vLLM goes on; it must not find a way to serve the model as its base."""
    taught: list[str] = []
    monkeypatch.setattr("fcsd.models.build.register_configs", lambda: taught.append("transformers"))
    vllm.top.__version__ = "0.24.0"
    if missing == "hf":
        vllm.parsers["other"] = vllm.parsers.pop("hf")
    elif missing == "register_model":
        monkeypatch.delattr(sys.modules["vllm.model_executor.models.registry"].ModelRegistry, missing)
    else:
        monkeypatch.delattr(vllm.settings, missing)
    plugin.register()  # vLLM would end if this raised
    (record,) = caplog.records
    assert record.levelname == "ERROR" and missing in record.getMessage() and "\n" not in record.getMessage()
    assert list(vllm.parsers.values()) == [StockParser] and taught == []


@pytest.mark.parametrize(("version", "supported"), [("0.24.0", True), ("0.28.0+cpu", True), ("0.23.9", False)])
def test_versions(version, supported):
    assert (support.why_unsupported(version) is None) == supported
    assert support.why_unsupported("1.0") is not None


def test_the_entry_point_is_the_plugin_and_loads_no_torch(repo):
    project = tomllib.loads((repo / "pyproject.toml").read_text())["project"]
    ((name, value),) = project["entry-points"][support.GROUP].items()
    assert EntryPoint(name, value, support.GROUP).load() is plugin.register
    oldest, too_new = (".".join(map(str, edge)) for edge in (support.OLDEST, support.TOO_NEW))
    assert project["optional-dependencies"]["vllm"] == [f"vllm>={oldest},<{too_new}"]
    code = "import sys, fcsd.serve.vllm.plugin; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=repo, timeout=120).returncode == 0
