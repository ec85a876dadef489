"""``benchmarks/vllm``: the reference of rounded sums, the verdict on a row, tables, and data-parallel ranks."""

import json
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from benchmarks.programs import start
from benchmarks.vllm import cases, engines, exchange, parity, rounded
from benchmarks.vllm.engines import Failed

from fcsd.kernels.bit_split import decode, encode
from fcsd.kernels.bit_split.format import format_of_reduction
from fcsd.parallel.all_reduce.ways import read_ways

pytestmark = pytest.mark.lab

INT8: Any = format_of_reduction("quantised:int8")
IDS = [5, 17, 200, 3, 77, 31]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.mark.parametrize("case", ["llama-ladder", "qwen2_moe-farskip"])
@pytest.mark.parametrize("experts", [False, True])
def test_the_addends_of_ranks_make_the_sums(folder, monkeypatch, case, experts):
    """Without rounding the reference is the model itself: nothing is lost, or added twice, between the ranks."""
    path = parity.made(folder, case)["converted"]
    sent: list[torch.Tensor] = []
    monkeypatch.setattr(rounded, "_rounded", lambda x, format: sent.append(x) or x)
    plain, model = parity.reference(path), parity.reference(path)
    rounded.round_sums(model, INT8, 2, experts)
    expected, found = (parity.logprobs(one, IDS)[0] for one in (plain, model))
    assert (found - expected).abs().max() < 1e-5
    # Two sums of each of three converted layers travel, two ranks each; the last sum of a layer may be vLLM's own.
    assert len(sent) in range(2 * 3, 2 * 2 * 3 + 1) and all(x.abs().max() > 0 for x in sent)
    assert any((one - other).abs().max() > 1e-3 for one, other in zip(sent[::2], sent[1::2], strict=True))


def test_a_sum_is_rounded_rank_by_rank(folder):
    """By hand: the product of half of an MLP's inner dimension is encoded, decoded, and added to the other half's."""
    model = parity.reference(parity.made(folder, "llama-ladder")["converted"])
    layer, x = model.model.layers[2], torch.randn(1, 4, 128, generator=torch.Generator().manual_seed(0))
    weight = layer.mlp.down_proj.weight.data
    inner = layer.mlp.act_fn(layer.mlp.gate_proj(x)) * layer.mlp.up_proj(x)
    halves = [inner[..., part] @ weight[:, part].T for part in (slice(None, 128), slice(128, None))]
    expected = sum(decode(encode(half[0], INT8), INT8, 128, torch.float32) for half in halves)
    rounded.round_sums(model, INT8, 2, False)
    found = layer.fcsd.parts(layer).shared(x)[0]
    assert (found - expected).abs().max() < 1e-5 < (found - sum(halves)[0]).abs().max()


def test_the_verdict_on_a_row_has_teeth(folder):
    paths = parity.made(folder, "llama-ladder")
    coded, plain = (parity.reference(paths["converted"]) for _ in range(2))
    rounded.round_sums(coded, INT8, 2, False)
    plan = dict(case="llama-ladder", role="converted", dtype="float32", ranks=2, experts=False)

    def judged(model: Any, reduce: str) -> dict[str, Any]:
        values = parity.logprobs(model, IDS)[0].tolist()
        return parity.judged(paths, plan, [(IDS[:4], IDS[4:], values)], reduce)

    right = judged(coded, "quantised:int8")
    assert right["right"] and right["rms"] < 1e-6 < right["tolerance"] < right["rms_rounding"]
    assert not judged(plain, "quantised:int8")["right"], "sums that are not rounded"
    assert not judged(coded, "")["right"] and judged(plain, "")["right"]
    assert not judged(plain, "none")["right"], "a bound that is right sends something"
    with pytest.raises(ValueError, match="in float32"):
        parity.judged(paths, plan | dict(dtype="bfloat16"), [], "quantised:int8")


@pytest.mark.parametrize("case", ["deepseek_v2-latent", "llama4_text-farskip"])
def test_the_verdict_on_fp8_knows_the_other_wiring(folder, case):
    paths = parity.made(folder, case)
    asked = parity.prompts(paths["original"], case)
    plan = dict(case=case, role="converted", dtype="fp8", ranks=2, experts=True)
    verdicts = {}
    for role, path in paths.items():
        model = parity.reference(path)
        rounded.round_to_fp8(model)
        said = [(ids[:-4], ids[-4:], parity.logprobs(model, ids)[0].tolist()) for ids in asked]
        verdicts[role] = parity.judged(paths, plan, said, "")
    assert verdicts["converted"]["right"] and not verdicts["original"]["right"]
    right = verdicts["converted"]
    assert right["rms"] == pytest.approx(right["rms_transformers"]) and right["rms"] > 0.01, "weights are rounded"


@pytest.mark.parametrize("case", ["llama-w8a8", "qwen3_moe-fp8-dynamic"])
def test_the_verdict_on_quantised_weights_knows_what_is_rounded(folder, case):
    paths, method = parity.made(folder, case), cases.QUANTISED[case]
    dtype = getattr(torch, parity.ROUNDED_INPUTS[method])
    plan = dict(case=case, role="converted", dtype="bfloat16", kernels="")
    asked = parity.prompts(paths["original"], case)
    verdicts = {}
    for role, path in paths.items():
        model = parity.reference(path)
        rounded.round_inputs(model, dtype)
        said = [(ids[:-4], ids[-4:], parity.logprobs(model, ids)[0].tolist()) for ids in asked]
        verdicts[role] = parity.judged(paths, plan, said, "")
        if role == "converted":  # Marlin's kernels round no inputs, and are nearer
            assert not parity.judged(paths, plan | dict(kernels="marlin"), said, "")["right"]
    assert verdicts["converted"]["right"] and not verdicts["original"]["right"]


def test_zero_points_are_rounded_as_machete_rounds_them(folder):
    """By hand for one group: its products with the codes, and that with the zero point in float16."""
    from safetensors.torch import load_file

    path = parity.made(folder, "llama-awq")["original"]
    exact, model, tensors = (
        parity.reference(path),
        parity.reference(path),
        load_file(path / "model.safetensors"),
    )
    rounded.round_zero_points(model, path, torch.float16)
    whole, found = (one.model.layers[1].mlp.down_proj.weight.data for one in (exact, model))
    name = "model.layers.1.mlp.down_proj"
    codes, zeros = tensors[f"{name}.qweight"][256:384, 1] & 15, tensors[f"{name}.qzeros"][2, 1] & 15  # of row 8
    scale = tensors[f"{name}.scales"][2, 8].float()
    expected = codes * scale - (zeros * scale).half().float()
    assert (found[8, 256:384] - expected).abs().max() < 1e-6 < (found - whole).abs().max()


def test_experts_one_after_the_other_are_those_of_transformers(folder, monkeypatch):
    path = parity.made(folder, "qwen3_moe-fp8-dynamic")["converted"]
    plain, model = parity.reference(path), parity.reference(path)
    monkeypatch.setattr(rounded, "_in_rows", lambda x, dtype: x)
    rounded.round_inputs(model, torch.int8)
    expected, found = (parity.logprobs(one, IDS)[0] for one in (plain, model))
    assert (found - expected).abs().max() < 1e-4


def test_routers_of_quantised_cases_decide_clearly(folder):
    """The last expert that is chosen is far from the first that is not, in logits; and all experts are used."""
    margins: list[float] = []
    chosen: set[int] = set()

    def note(gate: Any, given: Any, _: Any) -> None:
        first = torch.nn.functional.linear(given[0].flatten(0, -2), gate.weight).topk(3, -1)
        margins.append((first.values[:, 1] - first.values[:, 2]).min().item())
        chosen.update(first.indices[:, :2].flatten().tolist())

    for path in parity.made(folder, "qwen3_moe-fp8-dynamic").values():
        model = parity.reference(path)
        for module in model.modules():
            if hasattr(module, "experts"):
                module.gate.register_forward_hook(note)
        model(torch.tensor(cases.prompts(path, "qwen3_moe-fp8-dynamic")))
    assert len(margins) == 2 * 3 and min(margins) > 0.5 and len(chosen) == 8


def test_plans_say_what_the_plugin_is_told(tmp_path):
    assert parity.section_of(tmp_path, "beside+int4", 2) == dict(shared_experts="beside", reduce="quantised:int4")
    told = parity.section_of(tmp_path, "table-int8+beside", 2)
    ways = read_ways(told["reduce"], 2)
    assert [(least, way.reduce, way.travels) for least, way in ways.decode] == [
        (1, "quantised:int8", False), (4, "quantised:int8", True)
    ]  # fmt: skip
    assert parity.format_of(told["reduce"]) == INT8 and told["shared_experts"] == "beside"
    assert parity.format_of(parity.section_of(tmp_path, "table", 2)["reduce"]) is None
    with pytest.raises(KeyError):
        parity.section_of(tmp_path, "no-such", 2)


class Engine:
    """vLLM's engine with one worker, whose group has these communicators."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, fused: bool = False, **communicators: Any) -> None:
        group = SimpleNamespace(device_communicator=SimpleNamespace(ranks=[0, 1], **communicators), device_group=None)
        monkeypatch.setitem(sys.modules, "vllm", ModuleType("vllm"))
        monkeypatch.setitem(sys.modules, "vllm.distributed", SimpleNamespace(get_tp_group=lambda: group))
        monkeypatch.setattr(torch.distributed, "get_backend", lambda group: "nccl")
        compilation = SimpleNamespace(
            pass_config=SimpleNamespace(fuse_allreduce_rms=fused), cudagraph_mode=SimpleNamespace()
        )
        config = SimpleNamespace(
            use_v2_model_runner=True, attention_config=SimpleNamespace(backend=None), compilation_config=compilation,
            parallel_config=SimpleNamespace(tensor_parallel_size=2),
        )  # fmt: skip
        self.llm_engine = SimpleNamespace(vllm_config=config)
        self.collective_rpc = lambda asked: [asked(None), asked(None)]


@pytest.mark.parametrize("on_gpus", [False, True])
def test_a_row_without_peer_access_is_summed_by_nccl_or_fails(monkeypatch, on_gpus):
    """vLLM's custom all-reduce does not read NCCL_P2P_DISABLE: that it is off is asked of vLLM's workers."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: on_gpus)
    on, off = SimpleNamespace(disabled=False), SimpleNamespace(disabled=True)
    monkeypatch.setenv("NCCL_P2P_DISABLE", "1")
    found = parity.facts(Engine(monkeypatch, pynccl_comm=on, ca_comm=off, qr_comm=None))
    assert found["sums"] == ["pynccl_comm nccl"]
    assert parity.facts(Engine(monkeypatch, pynccl_comm=off, ca_comm=None))["sums"] == ["nccl"], "torch's NCCL"
    others = [dict(pynccl_comm=on, ca_comm=on), dict(pynccl_comm=on, a_new_comm=SimpleNamespace()), dict(fused=True)]
    for other in others:
        if on_gpus:
            with pytest.raises(RuntimeError, match="asks for NCCL's sums"):
                parity.facts(Engine(monkeypatch, **other))
        else:
            assert parity.facts(Engine(monkeypatch, **other))["sums"]
    monkeypatch.delenv("NCCL_P2P_DISABLE")
    assert parity.facts(Engine(monkeypatch, **others[0]))["sums"] == ["pynccl_comm ca_comm nccl"]


def answer(path: Path, asked: list, plan: dict, section: dict, share: float) -> Any:
    """In place of vLLM, in the process of a rank."""
    if section.get("fails"):
        raise RuntimeError("no memory")
    return [(ids, [share], [0.0]) for ids in asked], dict(section)


def test_data_parallel_ranks_share_the_prompts(monkeypatch):
    monkeypatch.setattr(exchange, "fill_in", lambda: None)
    given = Path("model"), [[1], [2], [3]], dict(replicas=2), dict(shared_experts="apart")
    found, chosen = exchange.together(answer, *given, ranks=2)
    assert sorted(found) == [([1], [1], [0.0]), ([2], [0.5], [0.0]), ([3], [1], [0.0])], "the last rank stops early"
    assert chosen == dict(shared_experts="apart")
    with pytest.raises(Failed, match=r"rank . has failed: RuntimeError: no memory"):
        exchange.together(answer, Path("model"), [[1], [2]], dict(replicas=2), dict(fails=True), ranks=2)


class Transformers:
    """In place of vLLM's engine: transformers' log-probabilities and likeliest tokens, whatever the kind of engine."""

    def __init__(self, path: str, **options: Any) -> None:
        assert not options["enable_prefix_caching"] and options["enforce_eager"]
        self.model = parity.reference(Path(path))
        compilation = SimpleNamespace(cudagraph_mode="")
        config = SimpleNamespace(use_v2_model_runner=True, compilation_config=compilation)
        config.attention_config = SimpleNamespace(backend=None)
        config.parallel_config = SimpleNamespace(tensor_parallel_size=1)
        self.llm_engine = SimpleNamespace(vllm_config=config)

    def generate(self, prompts: list, how: Any, use_tqdm: bool) -> list:
        return [self.answer(list(prompt["prompt_token_ids"]), how.max_tokens) for prompt in prompts]

    def answer(self, ids: list[int], new: int) -> Any:
        count = len(ids)
        for _ in range(new):
            ids.append(int(self.model(torch.tensor([ids])).logits[0, -1].argmax()))
        values = parity.logprobs(self.model, ids)[0].tolist()
        entries = [{token: SimpleNamespace(logprob=value)} for token, value in zip(ids[1:], values, strict=True)]
        output = SimpleNamespace(token_ids=ids[count:], logprobs=entries[count - 1 :])
        return SimpleNamespace(prompt_logprobs=[None, *entries[: count - 1]], outputs=[output])


def test_plans_are_served_in_forks_and_judged(folder, monkeypatch, capfd):
    module: Any = ModuleType("vllm")
    module.LLM, module.__version__, module.SamplingParams = Transformers, "0.0", lambda **how: SimpleNamespace(**how)
    monkeypatch.setitem(sys.modules, "vllm", module)
    monkeypatch.setattr(engines, "inspect_here", lambda: None)
    monkeypatch.setattr(parity, "release", lambda: None)
    monkeypatch.setattr(parity, "score_by_sigmoid", lambda: None)
    monkeypatch.setattr(exchange, "fill_in", lambda: None)
    for words in (["llama-ladder/float32/eager"], ["--dp", "2", "llama-ladder/float32/eager/ep"]):
        assert not start("benchmarks.vllm", "parity", "serve", str(folder), *words)
        rows = [json.loads(line[4:]) for line in capfd.readouterr().out.splitlines() if line.startswith("ROW ")]
        assert [(row["role"], row["right"], row["runner"]) for row in rows] == [
            ("converted", True, "v2"), ("original", True, "v2")
        ]  # fmt: skip
        tokens = 3 * (cases.LENGTH - 1 + parity.NEW)
        assert {row["tokens"] for row in rows} == {tokens if "--dp" not in words else tokens - parity.NEW // 2}
