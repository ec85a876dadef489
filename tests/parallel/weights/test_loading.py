"""Expert-parallel loading is loading and then sharding, bit for bit, in the memory of a shard."""

import shutil

import pytest
import quantised
import tiny
import torch
from ranks import on_ranks
from safetensors.torch import load_file, save_file

from fcsd.checkpoint import SINGLE
from fcsd.errors import BadInputError, ConfigError
from fcsd.models.archs import ARCHS
from fcsd.models.build import arch_of, converted_config, load_model, model_classes, register
from fcsd.models.wiring import Wiring

MOE = [a for a in tiny.CONFIGS if ARCHS[a].autoep is not None]


def write_checkpoint(folder, arch, dtype=torch.float32, wiring=Wiring("farskip", (1, 2, 3)), **changes):  # noqa: B008
    """A tiny checkpoint directory, with original names, whose buffers hold something, too; plain without a wiring."""
    register()
    model = tiny.llama4_vision() if arch == "llama4" else tiny.model(arch, initializer_range=0.1, **changes)
    for name, buffer in model.named_buffers():
        if "e_score_correction_bias" in name:
            buffer.normal_(std=0.1)
    if wiring:
        block = wiring.to_block(base_model="base", base_revision=None, base_sha256=None)
        wired = model_classes(arch)["AutoModelForCausalLM"](converted_config(model.config, block))
        wired.load_state_dict(model.state_dict())
        model = wired
    (model if dtype == torch.float32 else model.to(dtype)).save_pretrained(folder)
    return folder


def join() -> int:
    """This process in its group, as in a run; its rank."""
    from fcsd.distill.step.engine import import_deepspeed
    from fcsd.launch.world import join_world

    world = join_world()
    import_deepspeed().init_distributed(auto_mpi_discovery=False, verbose=False)
    return world.rank


def _differences(cases, world):
    from fcsd.parallel.expert.autoep import shard_experts
    from fcsd.parallel.expert.blocking import wire_parallel
    from fcsd.parallel.weights.loading import load_expert_parallel

    rank = join()
    found = {}
    for path, dtype in cases:
        expected = load_model(path, dtype=dtype)
        shard_experts(expected, arch_of(expected.config), world)
        block = expected.config.to_dict().get("fcsd")
        wire_parallel(expected, Wiring.from_block(block) if block else Wiring("standard", ()))
        model = load_expert_parallel(path, dtype=dtype, device="cpu", ep_size=world)
        wrong = differences(expected, model)
        ids = tiny.tokens(seed=rank)
        if not torch.equal(expected(ids, use_cache=False).logits, model(ids, use_cache=False).logits):
            wrong.append("logits")
        if expected.generation_config.to_dict() != model.generation_config.to_dict():
            wrong.append("generation config")
        found[path.name] = wrong
    return found


def differences(expected, model) -> list[str]:
    """Names of parameters and buffers that differ: there or not, value, dtype, device, training, AutoEP's marks."""

    def describe(model):
        named = {**dict(model.named_parameters()), **dict(model.named_buffers())}
        return {name: (t, t.dtype, t.device, t.requires_grad, _marks(t)) for name, t in named.items()}

    one, other = describe(expected), describe(model)
    return sorted(one.keys() ^ other.keys()) + [
        name
        for name, (tensor, *rest) in one.items()
        if name in other and (not torch.equal(tensor, other[name][0]) or rest != list(other[name][1:]))
    ]


def _marks(tensor) -> dict:
    """What AutoEP noted on a parameter; transformers and accelerate leave notes of their own."""
    marks = vars(tensor) if isinstance(tensor, torch.nn.Parameter) else {}
    return {key: value for key, value in marks.items() if key not in ("_is_hf_initialized", "requires_grad")}


def test_loading_is_sharding_what_was_loaded(tmp_path):
    cases = [(write_checkpoint(tmp_path / arch, arch), torch.float32) for arch in [*MOE, *tiny.LLAMA4]]
    cases += [
        (write_checkpoint(tmp_path / "plain", "deepseek_v3", wiring=None), torch.bfloat16),
        (write_checkpoint(tmp_path / "stored in bf16", "glm4_moe", torch.bfloat16), torch.bfloat16),
        (write_checkpoint(tmp_path / "tied", "qwen3_moe", tie_word_embeddings=True), torch.float32),
    ]
    for found in on_ranks(2, _differences, cases, 2):
        assert found == {path.name: [] for path, _ in cases}


def test_four_ranks_share_the_experts(tmp_path):
    for found in on_ranks(4, _differences, [(write_checkpoint(tmp_path / "v2", "deepseek_v2"), torch.float32)], 4):
        assert found == {"v2": []}


def _refusals(paths):
    from fcsd.parallel.weights.loading import load_expert_parallel

    join()
    errors = []
    for path in paths:
        with pytest.raises((BadInputError, ConfigError)) as caught:
            load_expert_parallel(path, dtype=torch.float32, device="cpu", ep_size=1)
        errors.append(str(caught.value))
    return errors


def test_what_does_not_match_is_refused_before_it_is_read(tmp_path):
    lacking = write_checkpoint(tmp_path / "lacking", "qwen3_moe")
    misshapen = shutil.copytree(lacking, tmp_path / "misshapen")
    dense = write_checkpoint(tmp_path / "dense", "llama")
    tensors = load_file(lacking / SINGLE)
    gone = "model.layers.1.mlp.experts.3.up_proj.weight"
    save_file({k: v for k, v in tensors.items() if k != gone} | {"stray": torch.ones(1)}, lacking / SINGLE)
    save_file({k: v.T.contiguous() if k == gone else v for k, v in tensors.items()}, misshapen / SINGLE)
    fp8 = quantised.write("deepseek_v3", tmp_path / "fp8")
    untied = write_checkpoint(tmp_path / "untied", "mixtral", tie_word_embeddings=True)
    tensors = load_file(untied / SINGLE)
    save_file({**tensors, "lm_head.weight": -tensors["model.embed_tokens.weight"]}, untied / SINGLE)

    (errors,) = on_ranks(1, _refusals, [lacking, misshapen, fp8, dense, untied])
    assert gone in errors[0] and "1 missing" in errors[0] and "1 unexpected (stray)" in errors[0]
    assert gone in errors[1] and "F32 [64, 32]" in errors[1]
    assert "quantised (fp8)" in errors[2]
    assert "cannot be expert-parallel" in errors[3]
    assert "lm_head.weight differs from model.embed_tokens.weight" in errors[4]
