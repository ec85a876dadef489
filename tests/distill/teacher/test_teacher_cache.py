"""The teacher cache: the live teacher's numbers, on any ranks, after a kill; nothing of another teacher or text."""

import json
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import ranks
import runs
import texts
import tiny
import torch

from fcsd.distill import loop
from fcsd.distill.cache_teacher import cache_teacher
from fcsd.distill.run.report import read_metrics
from fcsd.distill.teacher import cache as teacher_cache
from fcsd.errors import BadInputError, ConfigError, NonFiniteError

ARCH = "llama"
VOCAB = tiny.VOCAB
SHARD = 5 * 32 * 8 * 8  # bytes: five rows of 32 positions of 8 words


def recipe(folder: Path, out: Path, top_k: int = 8, **changes: Any) -> Any:
    cache = {"path": str(out / "cache"), "top_k": top_k}
    own = {"output_dir": str(out / "run"), "objective__teacher_cache": cache, "objective__sft": 0.0, **changes}
    return runs.resolved(folder, **own)


def write(resolved: Any) -> Path:
    return cache_teacher(resolved, shard_bytes=SHARD)


def contents(cache: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(cache.iterdir()) if path.name != ".lock"}


@pytest.fixture(scope="module")
def written(folder: Path) -> Path:
    """A directory with the cache of the run's 32 rows, written by two ranks."""
    ranks.results(2, write, recipe(folder, folder / "written"))
    return folder / "written"


@pytest.mark.parametrize("own", [{}, pytest.param({"optim__train": ["2-3", "head"]}, marks=pytest.mark.nightly)])
def test_a_cache_of_all_words_trains_as_the_teacher_does(folder: Path, tmp_path: Path, own: dict[str, Any]) -> None:
    whole = recipe(folder, tmp_path, top_k=VOCAB, **own)
    live = runs.resolved(folder, output_dir=str(tmp_path / "live"), objective__sft=0.0, **own)
    ranks.results(1, three, whole, live)
    cached, direct = read_metrics(tmp_path / "run"), read_metrics(tmp_path / "live")
    assert [line["kl"] for line in cached] == pytest.approx([line["kl"] for line in direct], rel=1e-5)
    assert [line["grad_norm"] for line in cached] == pytest.approx([line["grad_norm"] for line in direct], rel=1e-4)
    assert "held_out_sft" in cached[-1] and "held_out_kl" not in cached[-1]


def three(whole: Any, live: Any) -> None:
    cache_teacher(whole, shard_bytes=SHARD)
    loop.distill_model(whole)
    loop.distill_model(live)


def test_ranks_share_the_work_and_a_cache_trains_on_any_of_them(folder: Path, written: Path, tmp_path: Path) -> None:
    assert len(list(written.glob("cache/shard-*.safetensors"))) == 7
    shutil.copytree(written / "cache", tmp_path / "cache")
    alone = recipe(folder, tmp_path / "alone")
    ranks.results(1, write, alone)
    assert contents(tmp_path / "alone" / "cache") == contents(written / "cache")
    divided = recipe(folder, tmp_path, output_dir=str(tmp_path / "divided"), parallel__zero_stage=3)
    ranks.results(2, both, recipe(folder, tmp_path), divided)
    metrics = read_metrics(tmp_path / "run")
    for one, other in zip(read_metrics(tmp_path / "divided"), metrics, strict=True):
        assert (one["kl"], one["grad_norm"]) == pytest.approx((other["kl"], other["grad_norm"]), rel=1e-6)
    live = runs.resolved(folder, output_dir=str(tmp_path / "live"), objective__sft=0.0)
    ranks.results(1, loop.distill_model, live)
    first = read_metrics(tmp_path / "live")[0]["kl"]
    assert 0 < metrics[0]["kl"] < first, "a lower bound"
    assert metrics[-1]["kl"] < metrics[0]["kl"]


def test_with_a_cache_no_teacher_is_loaded(folder: Path, written: Path, tmp_path: Path) -> None:
    shutil.copytree(written / "cache", tmp_path / "cache")
    gone = recipe(folder, tmp_path, teacher=str(tmp_path / "gone"))
    ranks.results(1, loop.distill_model, gone)
    assert read_metrics(tmp_path / "run")[-1]["step"] == 4
    changed = recipe(folder, tmp_path, teacher=str(tmp_path / "gone"), teacher_sha256="0" * 64)
    with pytest.raises(BadInputError, match="the recipe asks for 0000"):
        ranks.results(1, loop.distill_model, changed)


def test_the_command_caches_a_teacher_whose_experts_are_divided(tmp_path: Path) -> None:
    runs.write_models(tmp_path, "qwen3_moe")
    recipe(tmp_path, tmp_path, top_k=VOCAB, parallel__ep_size=2)
    done = ranks.fcsd("cache-teacher", tmp_path / "recipe.yaml", size=2)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == str(tmp_path / "cache")
    with pytest.raises(ConfigError, match="ep_size 2 does not divide the 1 processes"):
        ranks.results(1, write, recipe(tmp_path, tmp_path, top_k=VOCAB, parallel__ep_size=2))
    once: Any = {"train__steps": 1, "optim__warmup_steps": 0}
    cached = recipe(tmp_path, tmp_path, top_k=VOCAB, **once)
    live = runs.resolved(tmp_path, output_dir=str(tmp_path / "live"), objective__sft=0.0, **once)
    ranks.results(1, both, cached, live)
    (one,), (other,) = read_metrics(tmp_path / "run"), read_metrics(tmp_path / "live")
    assert one["kl"] == pytest.approx(other["kl"], rel=1e-4)


def both(cached: Any, live: Any) -> None:
    loop.distill_model(cached)
    loop.distill_model(live)


def killed(resolved: Any) -> None:
    """A writer that is killed while it commits its fourth shard."""
    real, calls = teacher_cache.write_bytes, []

    def commit(path: Path, data: bytes) -> None:
        calls.append(path)
        if sum(path.suffix == ".safetensors" for path in calls) == 4:
            path.with_name(f".{path.name}.part-0123abcd").write_bytes(data[:100])
            os.kill(os.getpid(), signal.SIGKILL)
        real(path, data)

    teacher_cache.write_bytes = commit
    write(resolved)


def test_a_killed_writer_goes_on_where_it_stopped(folder: Path, written: Path, tmp_path: Path) -> None:
    resolved = recipe(folder, tmp_path)
    assert ranks.exit_code(killed, resolved) == -signal.SIGKILL
    shards = sorted((tmp_path / "cache").glob("shard-*.safetensors"))
    assert len(shards) == 3 and not (tmp_path / "cache" / "MANIFEST.json").exists()
    with pytest.raises(BadInputError, match=r"MANIFEST.json: is missing"):
        ranks.results(1, loop.distill_model, resolved)
    before = [path.stat().st_ino for path in shards]
    ranks.results(1, write, resolved)
    assert [path.stat().st_ino for path in shards] == before, "what was there was not written again"
    assert contents(tmp_path / "cache") == contents(written / "cache")


def test_another_teacher_text_or_setting_is_refused_by_name(folder: Path, written: Path, tmp_path: Path) -> None:
    (tmp_path / "text").mkdir()
    lines = (folder / "corpus.jsonl").read_text()
    (tmp_path / "text" / "corpus.jsonl").write_text(lines + json.dumps({"text": "one more"}) + "\n")
    tiny.model("llama", seed=5, initializer_range=0.1).save_pretrained(tmp_path / "other")
    texts.tokenizer().save_pretrained(tmp_path / "other")
    shutil.copytree(written / "cache", tmp_path / "cache")
    for named, changes in [
        ("teacher.sample was", {"teacher": str(tmp_path / "other")}),
        ("corpus.jsonl", {"data__sources": [{"path": str(tmp_path / "text" / "corpus.jsonl")}]}),
        ("objective.temperature was 1.0 and is now 2.0", {"objective__temperature": 2.0}),
        ("seed was 0 and is now 3", {"seed": 3}),
        ("holds 32 rows, the run needs 40", {"train__steps": 5}),
        (r"top_k was 8 and is now 9", {"top_k": 9}),
    ]:
        resolved = recipe(folder, tmp_path, **changes)
        with pytest.raises(BadInputError, match=named):
            ranks.results(1, loop.distill_model, resolved)
        if "holds" not in named:
            with pytest.raises(BadInputError, match=named):
                ranks.results(1, write, resolved)
    assert contents(tmp_path / "cache") == contents(written / "cache")
    assert not (tmp_path / "run").exists()


def test_damage_and_rows_of_another_text_are_found(folder: Path, written: Path, tmp_path: Path) -> None:
    shutil.copytree(written / "cache", tmp_path / "cache")
    shard = tmp_path / "cache" / "shard-000002.safetensors"
    data = bytearray(shard.read_bytes())
    data[-10] ^= 1
    shard.write_bytes(data)
    with pytest.raises(BadInputError, match=r"shard-000002.safetensors: is missing or damaged"):
        ranks.results(1, loop.distill_model, recipe(folder, tmp_path))
    shard.with_suffix(".json").unlink()  # as the hint says
    ranks.results(1, write, recipe(folder, tmp_path))
    assert contents(tmp_path / "cache") == contents(written / "cache")
    # The key knows the files of the text, not how rows are cut: every row is held against its own hash.
    teacher = teacher_cache.CachedTeacher(tmp_path / "cache", 32)
    row = {name: torch.zeros(1, 32).long() for name in ("input_ids", "position_ids", "labels")}
    with pytest.raises(BadInputError, match="row 7 of the run is not the text"):
        teacher.read(row, [7])


def test_recipes_that_make_no_sense_are_refused(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is for the KL alone"):
        recipe(folder, tmp_path, objective__hidden={"weight": 1.0})
    with pytest.raises(ConfigError, match="names no teacher cache"):
        cache_teacher(runs.resolved(folder))
    with pytest.raises(ConfigError, match="top_k is 300, the vocabulary has 256"):
        ranks.results(1, write, recipe(folder, tmp_path, top_k=300))
    assert not (tmp_path / "cache").exists()


def poisoned(resolved: Any) -> None:
    from fcsd.distill import cache_teacher as module

    real = module.final_hidden
    module.final_hidden = lambda model, micro: real(model, micro) * float("nan")
    write(resolved)


def test_a_teacher_that_is_not_finite_is_not_kept(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(NonFiniteError, match="rows 0 to 5"):
        ranks.results(1, poisoned, recipe(folder, tmp_path))
    assert not list((tmp_path / "cache").glob("shard-*"))
