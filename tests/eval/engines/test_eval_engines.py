"""Other ways to run a model give the same scores: vLLM, a device map, experts spread over ranks; or say why not."""

import os
import sys
from pathlib import Path
from typing import Any

import eval_data
import pytest
import ranks
import tiny
import torch

from fcsd.checkpoint import read_layout
from fcsd.checkpoint.weights import Reader
from fcsd.convert import convert_checkpoint
from fcsd.errors import BadInputError, ConfigError, NonFiniteError
from fcsd.eval.engines.engine import Engine
from fcsd.eval.harness import evaluate_models
from fcsd.models import build
from fcsd.serve.vllm import support

TASKS = ["PIQA", "CSQa", "GSM-8K", "lambada_openai"]
VLLM = Engine(backend="vllm")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("models") / "tiny", tiny.model("deepseek_v2", **SIZES))


SIZES: dict[str, Any] = dict(vocab_size=400, max_position_embeddings=1024)


def write(path: Path, network: Any) -> Path:
    network.save_pretrained(path)
    eval_data.tokenizer().save_pretrained(path)
    return path


@pytest.fixture
def vllm(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The stand-in of ``tests/doubles``, below lm-eval's own code; afterwards it is not installed again."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "doubles"))
    if _loaded:
        monkeypatch.setitem(sys.modules, "vllm", _loaded[0])
    else:
        import vllm  # pyright: ignore[reportMissingImports]

        _loaded.append(vllm)
    _loaded[0].made.clear()
    yield _loaded[0]
    monkeypatch.undo()
    sys.modules.pop("vllm", None)


_loaded: list[Any] = []  # lm-eval's module keeps the first one it saw


def scores(rows: list[dict[str, Any]]) -> list[Any]:
    """What models scored; the losses of last words are rounded."""
    found = [(row["column"], row["value"], row["items"]) for row in rows]
    return [
        (name, round(value, 4), [round(i, 4) for i in own]) if name == "lambada_openai loss" else (name, value, own)
        for name, value, own in found
    ]


def test_vllm_scores_as_transformers_and_resumes(vllm, model, mirror, tmp_path):
    text = tmp_path / "text.jsonl"
    text.write_text('{"text": "river stone lamp"}\n{"text": "garden window bread music"}\n')
    options: dict[str, Any] = dict(tasks=TASKS, data_mirror=mirror, limit=2, held_out=text)
    expected = evaluate_models([str(model)], **options)
    engine = Engine(backend="vllm", gpus=2, max_length=900, dtype="float32", batch_size=8)
    rows = evaluate_models([str(model)], engine=engine, out=tmp_path / "out", **options)
    assert scores(rows[:-1]) == scores(expected[:-1])
    assert rows[-1]["value"] == pytest.approx(expected[-1]["value"], rel=1e-5)
    assert rows[0]["engine"]["name"] == "vllm" and rows[0]["engine"]["version"] == "0.24.0"
    assert rows[0]["versions"]["vllm"] == "0.24.0" and rows[0]["engine"]["tensor_parallel"] == 2
    (made,) = vllm.made
    wanted = {"dtype": "float32", "tensor_parallel_size": 2, "max_model_len": 900, "max_num_seqs": 8, "seed": 0}
    assert {key: made.arguments[key] for key in wanted} == wanted and made.asked > 0
    again = evaluate_models([str(model)], engine=engine, out=tmp_path / "out", **options)
    assert scores(again) == scores(rows) and vllm.made[1].asked == 0, "every answer was kept"
    lengths = [[one.get("answers") for one in each] for each in (expected, rows, again)]
    assert lengths[1] == lengths[2] and [bool(one) for one in lengths[1]] == [bool(one) for one in lengths[0]]
    assert [one["unended"] for one in lengths[1] if one] == [one["unended"] for one in lengths[0] if one] != []


def test_vllm_gives_no_false_score(vllm, model, mirror, tmp_path, monkeypatch):
    with pytest.raises(BadInputError, match="GSM-8K: a prompt needs"):
        evaluate_models(
            [str(model)], tasks=["GSM-8K"], data_mirror=mirror, engine=Engine(backend="vllm", max_length=64)
        )
    network = tiny.model("deepseek_v2", **SIZES)
    with torch.no_grad():
        network.get_decoder().norm.weight.fill_(float("nan"))
    with pytest.raises(NonFiniteError, match="NaN"):
        evaluate_models([str(write(tmp_path / "nan", network))], tasks=["PIQA"], data_mirror=mirror, engine=VLLM)
    convert_checkpoint(model, tmp_path / "rewired", check=False)
    monkeypatch.setattr(support, "entry_points", lambda group: ())
    with pytest.raises(ConfigError, match="converted models only with fcsd's plugin"):
        evaluate_models([str(tmp_path / "rewired")], tasks=["PIQA"], data_mirror=mirror, engine=VLLM)
    assert len(vllm.made) == 2


def test_stored_answers_are_of_the_weights_and_not_of_their_time(model, mirror, tmp_path):
    copied, out = tmp_path / "copied", tmp_path / "out"
    options: dict[str, Any] = dict(tasks=["PIQA"], data_mirror=mirror, limit=4)
    write(copied, tiny.model("deepseek_v2", **SIZES))
    weights = copied / "model.safetensors"
    before = weights.stat()
    evaluate_models([str(copied)], out=out, **options)
    data = bytearray(weights.read_bytes())
    data[-4096:] = data[-8192:-4096]
    weights.write_bytes(data)
    os.utime(weights, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert weights.stat().st_size == before.st_size and weights.stat().st_mtime_ns == before.st_mtime_ns
    (row,) = evaluate_models([str(copied)], out=tmp_path / "other", **options)
    stored = {path.name for path in (tmp_path / "other" / "answers").iterdir()}
    assert not stored & {path.name for path in (out / "answers").iterdir()}, "other weights, other answers"
    os.utime(weights)
    (again,) = evaluate_models([str(copied)], out=tmp_path / "other", **options)
    assert {path.name for path in (tmp_path / "other" / "answers").iterdir()} == stored, "a time says nothing"
    assert again["items"] == row["items"]


def test_a_model_larger_than_memory_scores_the_same(model, mirror, monkeypatch):
    """``--device auto``, where accelerate finds room for the embeddings and two layers only; the rest is on disk."""
    places: dict[str, Any] = {"model.embed_tokens": "cpu", "model.rotary_emb": "cpu", "model.norm": "disk"}
    places |= {"lm_head": "disk", **{f"model.layers.{n}": "cpu" if n < 2 else "disk" for n in range(4)}}
    used, real = [], build.load_model

    def crowded(path: Path, *, device_map: str, **options: Any) -> Any:
        assert device_map == "auto"
        network = real(path, device_map=places, **options)
        used.append(network.hf_device_map)
        return network

    options: dict[str, Any] = dict(tasks=TASKS, data_mirror=mirror, limit=2)
    with eval_data.short_answers():
        expected = evaluate_models([str(model)], **options)
        monkeypatch.setattr(build, "load_model", crowded)
        rows = evaluate_models([str(model)], engine=Engine(device="auto", dtype="float32"), **options)
    assert scores(rows) == scores(expected)
    assert rows[0]["engine"]["devices"] == ["cpu", "disk"] and set(used[0].values()) == {"cpu", "disk"}


def sharded(rank: int, model: Path, rewired: Path, mirror: Path, out: Path) -> list[Any]:
    """Scores twice, the engine's description, and the expert tensors that this rank read."""
    engine = Engine(ep_size=2, batch_size=3, device="cpu")
    options: dict[str, Any] = dict(tasks=TASKS, data_mirror=mirror, limit=3)
    raw, read = Reader.raw, set()

    def noted(self: Reader, name: str, *place: Any) -> Any:
        read.add(name)
        return raw(self, name, *place)

    Reader.raw = noted
    build.load_model = None  # type: ignore[assignment]: a rank that loads the whole model fails
    with eval_data.short_answers():
        rows = evaluate_models([str(model), str(rewired)], engine=engine, out=out, **options)
        again = evaluate_models([str(model)], engine=engine, out=out, **options)
    return [scores(rows), scores(again), rows[0]["engine"], {name for name in read if ".experts." in name}]


def test_experts_spread_over_two_ranks_score_the_same(model, mirror, tmp_path):
    convert_checkpoint(model, tmp_path / "rewired", check=False)
    (first, again, engine, read), (second, _, _, read_by_second) = ranks.in_group(
        2, sharded, model, tmp_path / "rewired", mirror, tmp_path / "out"
    )
    options: dict[str, Any] = dict(tasks=TASKS, data_mirror=mirror, limit=3, engine=Engine(device="cpu"))
    with eval_data.short_answers():
        assert first == second == scores(evaluate_models([str(model), str(tmp_path / "rewired")], **options))
    assert again == first[: len(first) // 2]
    assert engine["ranks"] == 2 and engine["ep_size"] == 2
    # Each rank read its own experts and no others.
    on_disk = {name for name in read_layout(model).tensors if ".experts." in name}
    assert read | read_by_second == on_disk and not read & read_by_second
    assert len(read) == len(read_by_second)


@pytest.mark.parametrize(
    ("engine", "message"),
    [
        (VLLM, r"^--backend vllm needs vllm: pip install 'fcsd\[vllm\]'$"),
        (Engine(backend="tpu"), "unknown backend"),
        (Engine(device="gpu"), "unknown device"),
        (Engine(generation="fast"), "unknown generation"),
        (Engine(ep_size=2), "does not divide 1 processes"),
        (Engine(ep_size=2, device="auto"), "--ep-size needs several processes"),
    ],
)
def test_engines_that_cannot_be_are_refused(engine, message):
    with pytest.raises(ConfigError, match=message):
        evaluate_models(["nowhere"], tasks=["PIQA"], engine=engine)


def test_options_of_the_other_backend_are_refused(vllm):
    for engine in (Engine(backend="vllm", device="cpu"), Engine(backend="vllm", ep_size=2)):
        with pytest.raises(ConfigError, match="is for --backend hf"):
            evaluate_models(["nowhere"], tasks=["PIQA"], engine=engine)
