"""Random models are the same on any number of ranks, initialised by their family, and can be written down."""

import pytest
import tiny
import torch
from benchmarks.random_checkpoint import write_random_checkpoint
from ranks import on_ranks
from test_loading import MOE, differences, join

from fcsd.errors import ConfigError
from fcsd.models.build import arch_of, load_model


def _random(arches, world, folder):
    """Parameters that differ between two ranks' shares, one rank's whole, the plain model and what is written."""
    from fcsd.parallel.expert.autoep import shard_experts
    from fcsd.parallel.weights.loading import load_expert_parallel
    from fcsd.parallel.weights.random_init import random_expert_parallel, random_model

    rank = join()
    wrong = []
    for arch in arches:
        config = tiny.llama4_vision().config if arch == "llama4" else tiny.config(arch)
        deviation = torch.tensor(config.get_text_config().initializer_range)
        plain = random_model(config, dtype=torch.float32, device="cpu", seed=7)
        whole, share = (
            random_expert_parallel(config, dtype=torch.float32, device="cpu", ep_size=size, seed=7)
            for size in (1, world)
        )
        for (name, one), other in zip(whole.named_parameters(), share.parameters(), strict=True):
            own = one.chunk(world)[rank] if ".experts.w" in name else one
            if not torch.equal(own, other) or not one.isfinite().all():
                wrong.append(f"{arch} {name}")
            if ".experts.w" in name and not torch.isclose(one.std(), deviation, rtol=0.1):
                wrong.append(f"{arch} {name} deviates by {one.std()}")
            if ".experts.w" in name and any(torch.equal(one[0], other) for other in one[1:]):
                wrong.append(f"{arch} {name}: two experts are equal")
        shard_experts(plain, arch_of(config), world)
        wrong += differences(plain, share)
        if (folder / arch).exists():
            wrong += differences(
                load_expert_parallel(folder / arch, dtype=torch.float32, device="cpu", ep_size=world), share
            )
    return wrong


def test_weights_do_not_depend_on_the_number_of_ranks(tmp_path):
    written = ("mixtral", "deepseek_v3", "llama4_text")
    for arch in written:
        source = tmp_path / "configs" / arch
        tiny.config(arch).save_pretrained(source)
        write_random_checkpoint(
            source, tmp_path / arch, dtype=torch.float32, device=torch.device("cpu"), seed=7, max_shard=10**5
        )
    assert len(list((tmp_path / "mixtral").glob("*.safetensors"))) > 1
    assert on_ranks(2, _random, [*MOE, *tiny.LLAMA4], 2, tmp_path) == [[], []]


def test_a_random_checkpoint_loads_and_replaces_nothing(tmp_path):
    tiny.config("qwen3", tie_word_embeddings=True).save_pretrained(tmp_path / "config")
    write = {"dtype": torch.bfloat16, "device": torch.device("cpu")}
    write_random_checkpoint(tmp_path / "config", tmp_path / "out", **write)
    model = load_model(tmp_path / "out")
    assert model.dtype == torch.bfloat16 and model(tiny.tokens()).logits.isfinite().all()
    with pytest.raises(ConfigError, match="not empty"):
        write_random_checkpoint(tmp_path / "config", tmp_path / "out", **write)
