"""A directory that ranks write together is what save_pretrained writes of the whole model."""

import json

import published
import tiny
import torch
from ranks import on_ranks
from safetensors.torch import load_file, save_file
from test_loading import MOE, join, write_checkpoint

from fcsd.checkpoint import INDEX, SINGLE, read_config, read_layout, verify_tensors
from fcsd.models.build import load_model


def _save(cases, ep_size, max_shard, like_source=True):
    """Load and save on every rank, expert-parallel unless ``ep_size`` is 0."""
    from fcsd.parallel.weights.loading import load_expert_parallel
    from fcsd.parallel.weights.saving import own_part, write_part

    rank = join()
    for source, out in cases:
        if ep_size:
            model = load_expert_parallel(source, dtype=torch.float32, device="cpu", ep_size=ep_size)
        else:
            model = load_model(source)
        if rank == 0:
            out.mkdir()
        torch.distributed.barrier()
        write_part(own_part(model), out, source if like_source else None, max_shard)
        torch.distributed.barrier()


def contents(path) -> dict[str, torch.Tensor]:
    """All tensors of a checkpoint, as safetensors' own library reads them."""
    return {name: tensor for file in path.glob("*.safetensors") for name, tensor in load_file(file).items()}


def _assert_same(one, other):
    expected, found = contents(one), contents(other)
    assert expected.keys() == found.keys()
    for name, tensor in expected.items():
        assert tensor.dtype == found[name].dtype and torch.equal(tensor, found[name]), name
    for name in ("config.json", "generation_config.json"):
        assert json.loads((one / name).read_text()) == json.loads((other / name).read_text())
    verify_tensors(read_layout(other), read_config(other))


def test_ranks_write_what_save_pretrained_writes(tmp_path):
    sources = {arch: write_checkpoint(tmp_path / arch, arch) for arch in [*MOE, *tiny.LLAMA4]}
    sources["tied"] = write_checkpoint(tmp_path / "tied", "qwen3_moe", tie_word_embeddings=True)
    sources["plain"] = write_checkpoint(tmp_path / "plain", "mixtral", wiring=None)
    cases = [(source, tmp_path / f"{name} again") for name, source in sources.items()]
    published.write("kimi_k25", tmp_path / "published")
    named = (tmp_path / "published", tmp_path / "published again")
    assert on_ranks(2, _save, [*cases, named], 2, 10**9) == [None, None]
    found = contents(named[1])
    assert found.keys() == contents(named[0]).keys()  # which save_pretrained names in another way
    assert all(torch.equal(tensor, found[name]) for name, tensor in contents(named[0]).items())
    for source, out in cases:
        load_model(source).save_pretrained(tmp_path / f"{source.name} reference")
        assert [file.name for file in out.glob("*.safetensors")] == [SINGLE]
        _assert_same(tmp_path / f"{source.name} reference", out)


def test_without_files_to_follow_the_layout_is_that_of_save_pretrained(tmp_path):
    """The experts of Llama-4 are transposed in files; experts of random weights have no files that say so."""
    source, out = write_checkpoint(tmp_path / "source", "llama4_text"), tmp_path / "out"
    assert on_ranks(2, _save, [(source, out)], 2, 10**9, False) == [None, None]
    load_model(source).save_pretrained(tmp_path / "reference")
    _assert_same(tmp_path / "reference", out)


def test_files_are_split_and_carried_tensors_kept(tmp_path):
    source = write_checkpoint(tmp_path / "source", "deepseek_v3")
    tensors = load_file(source / SINGLE)
    carried = {f"model.layers.61.{name}": torch.randn(3, 5).bfloat16() for name in ("eh_proj.weight", "enorm.weight")}
    save_file(tensors | carried, source / SINGLE, metadata={"format": "pt"})
    for ep_size, world in ((2, 4), (0, 2)):
        out = tmp_path / f"{ep_size} of {world}"
        assert on_ranks(world, _save, [(source, out)], ep_size, 100_000) == [None] * world
        found = contents(out)
        assert found.keys() == tensors.keys() | carried.keys()
        assert all(torch.equal(value, found[name]) for name, value in (tensors | carried).items())
        index = json.loads((out / INDEX).read_text())
        assert index["metadata"]["total_size"] == sum(t.nbytes for t in found.values())
        sizes = [sum(t.nbytes for t in load_file(file).values()) for file in out.glob("*.safetensors")]
        assert len(sizes) > 3 and max(sizes) <= 100_000
        assert load_model(out)(tiny.tokens()).logits.isfinite().all()
