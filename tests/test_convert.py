"""convert: linked shards, nothing touched, nothing half done, parity proven."""

import json
import multiprocessing
import os
import signal
import subprocess
import sys
import textwrap
import types
from pathlib import Path

import hub_server
import pytest
import quantised
import sparse_checkpoint
import tiny
import torch
import transformers
from files import snapshot
from representatives import representatives
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from fcsd import convert as conversion
from fcsd import parity
from fcsd.checkpoint import Checkpoint, fingerprint, read_config, read_layout, staging
from fcsd.cli.main import app
from fcsd.convert import convert_checkpoint
from fcsd.distill import layer_costs
from fcsd.errors import BadInputError, ConfigError, DiskError, FcsdError
from fcsd.models import build
from fcsd.models.archs import ARCHS
from fcsd.models.wiring import Wiring

TOKENIZER_FILES = {
    "tokenizer_config.json": '{"tokenizer_class": "PreTrainedTokenizerFast"}',
    "chat_template.jinja": "{{ messages }}",
    "LICENSE": "A licence.",
    "README.md": "---\nlicense: mit\n---\n# A model",
    "additional_chat_templates/tools.jinja": "{{ tools }}",
}


@pytest.fixture
def original(tmp_path: Path) -> Path:
    """A sharded deepseek_v2 checkpoint with all that surrounds weights, and some that should stay behind."""
    path = tmp_path / "original"
    tiny.model("deepseek_v2").save_pretrained(path, max_shard_size="300KB")
    for name, text in TOKENIZER_FILES.items():
        (path / name).parent.mkdir(exist_ok=True)
        (path / name).write_text(text)
    (path / "original").mkdir()
    (path / "original" / "consolidated.00.pth").write_bytes(b"the same weights, pickled")
    return path


def sharded(path: Path) -> list[str]:
    return sorted(file.name for file in path.glob("*.safetensors"))


@pytest.mark.parametrize("arch", representatives("layer", "moe", "head", of=[*tiny.CONFIGS, *tiny.INSIDE]))
def test_every_architecture_converts_and_loads_wired(arch: str, tmp_path: Path) -> None:
    base = tiny.model(arch)
    base.save_pretrained(tmp_path / "base")
    before = snapshot(tmp_path / "base")
    report = convert_checkpoint(str(tmp_path / "base"), tmp_path / "out", layers="1-3")
    assert (report.parity, report.parity_skipped, report.copied_bytes) == (4, None, 0)
    assert snapshot(tmp_path / "base") == before

    loaded = tiny.aligned(build.load_model(tmp_path / "out"))
    build.wire(base, Wiring("farskip", (1, 2, 3)))
    with torch.no_grad():
        assert torch.equal(loaded(tiny.tokens()).logits, base(tiny.tokens()).logits)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    original = json.loads((tmp_path / "base" / "config.json").read_text())
    own = ("model_type", "architectures", "auto_map", "transformers_weights", "fcsd")
    assert {k: v for k, v in config.items() if k not in own} == {k: v for k, v in original.items() if k not in own}
    assert config["model_type"] == f"fcsd_{arch.partition('+')[0]}"


def test_the_base_class_refuses_a_converted_directory(original: Path, tmp_path: Path) -> None:
    """It would only warn that the model types differ, and compute the base's function with the student's weights."""
    convert_checkpoint(str(original), tmp_path / "out", check=False)
    with pytest.raises(ValueError, match="this model is rewired; load it by an Auto class"):
        transformers.DeepseekV2ForCausalLM.from_pretrained(tmp_path / "out")
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    model.save_pretrained(tmp_path / "saved")
    assert type(transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "saved")) is type(model)


def test_shards_are_linked_and_the_rest_is_copied(original: Path, tmp_path: Path) -> None:
    before = snapshot(original)
    report = convert_checkpoint(str(original), tmp_path / "out", wiring="ladder", layers="50%")
    out = tmp_path / "out"
    assert len(sharded(original)) > 1 and sharded(out) == sharded(original)
    for name in sharded(original):
        assert (out / name).samefile(original / name)
    after = snapshot(out)
    for name in [*TOKENIZER_FILES, "generation_config.json", "model.safetensors.index.json"]:
        assert after[name] == before[name]
        assert not (out / name).samefile(original / name)  # people edit these in place
    assert "original/consolidated.00.pth" not in after
    assert set(report.files) == after.keys() - set(sharded(original))
    block = json.loads((out / "config.json").read_text())["fcsd"]
    assert Wiring.from_block(block) == Wiring("ladder", (2, 3))
    assert block["base_model"] == "original" and block["base_revision"] is None
    assert str(tmp_path) not in (out / "config.json").read_text()
    assert Checkpoint(out).original == str(original)
    assert block["base_sha256"] == fingerprint(read_layout(original))
    assert snapshot(original) == before
    assert list(tmp_path.glob(".*")) == []


def test_a_fingerprint_changes_with_config_and_layout(original: Path) -> None:
    first = fingerprint(read_layout(original))
    assert first == fingerprint(read_layout(original))
    config = original / "config.json"
    config.write_text(config.read_text().replace("0.02", "0.03"))
    assert fingerprint(read_layout(original)) != first


def test_a_hub_snapshot_is_converted_from_its_blobs(original: Path, tmp_path: Path, monkeypatch) -> None:
    with hub_server.running() as hub:
        hub_server.connect(hub, monkeypatch, tmp_path / "cache")
        revision = hub.add("org/model", original)
        planned = convert_checkpoint("org/model", tmp_path / "out", dry_run=True)
        assert not list((tmp_path / "cache").rglob("*.safetensors"))
        report = convert_checkpoint("org/model", tmp_path / "out")
    assert (planned.revision, report.revision) == (revision, revision)
    assert planned.bytes == report.bytes
    for name in sharded(tmp_path / "out"):
        assert not (tmp_path / "out" / name).is_symlink()
        assert (tmp_path / "out" / name).stat().st_nlink == 2
    block = json.loads((tmp_path / "out" / "config.json").read_text())["fcsd"]
    assert (block["base_model"], block["base_revision"]) == ("org/model", revision)


def test_dry_run_says_everything_and_writes_nothing(original: Path, tmp_path: Path) -> None:
    before = snapshot(tmp_path)
    planned = convert_checkpoint(str(original), tmp_path / "new" / "out", layers="last:2", dry_run=True)
    assert snapshot(tmp_path) == before and not (tmp_path / "new").exists()
    done = convert_checkpoint(str(original), tmp_path / "new" / "out", layers="last:2")
    assert planned.dry_run and planned.parity_skipped == "dry run"
    for field in ("model", "out", "wiring", "depth", "shards", "bytes", "files"):
        assert getattr(planned, field) == getattr(done, field)
    assert json.loads(done.to_json())["parity"] == 4
    assert "layers 2-3" in done.to_text() and "bit-identical" in done.to_text()


def test_across_file_systems_shards_are_copied(original: Path, tmp_path: Path, monkeypatch) -> None:
    def refuse(source: object, target: object) -> None:
        raise OSError(18, "Invalid cross-device link")

    monkeypatch.setattr(os, "link", refuse)
    report = convert_checkpoint(str(original), tmp_path / "out")
    assert report.copied_bytes == sum((original / name).stat().st_size for name in sharded(original))
    for name in sharded(original):
        assert (tmp_path / "out" / name).read_bytes() == (original / name).read_bytes()

    monkeypatch.setattr(staging.shutil, "disk_usage", lambda path: staging.shutil._ntuple_diskusage(10, 9, 1))
    with pytest.raises(DiskError, match="do not fit"):
        convert_checkpoint(str(original), tmp_path / "other")
    assert not (tmp_path / "other").exists() and list(tmp_path.glob(".*")) == []


def test_copying_works_where_the_kernel_cannot(original: Path, tmp_path: Path, monkeypatch) -> None:
    def refuse(*args: object) -> None:
        raise OSError(22, "Invalid argument")

    monkeypatch.setattr(os, "copy_file_range", refuse)
    name = sharded(original)[0]
    staging._copy({name: original / name}, tmp_path, 1)
    assert (tmp_path / name).read_bytes() == (original / name).read_bytes()


def test_out_is_refused_before_anything_is_written(original: Path, tmp_path: Path) -> None:
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "thesis.txt").write_text("irreplaceable")
    (tmp_path / "link").symlink_to(original)
    before = snapshot(tmp_path)
    for out, force, message in (
        (mine, False, "is not empty$"),
        (mine, True, "not fcsd's work"),
        (original, True, "overlaps"),
        (original / "inside", True, "overlaps"),
        (tmp_path / "link" / "inside", True, "overlaps"),
        (tmp_path, True, "overlaps"),
        (mine / "thesis.txt", True, "is a file"),
    ):
        with pytest.raises(ConfigError, match=message) as caught:
            convert_checkpoint(str(original), out, force=force)
        assert caught.value.hint
    assert snapshot(tmp_path) == before


def test_force_replaces_what_fcsd_wrote(original: Path, tmp_path: Path) -> None:
    convert_checkpoint(str(original), tmp_path / "out", check=False)
    before = snapshot(original)
    (tmp_path / "out" / "stale.txt").write_text("of the former conversion")
    convert_checkpoint(str(original), tmp_path / "out", wiring="ladder", check=False, force=True)
    assert json.loads((tmp_path / "out" / "config.json").read_text())["fcsd"]["wiring"] == "ladder"
    assert not (tmp_path / "out" / "stale.txt").exists()
    assert snapshot(original) == before and list(tmp_path.glob(".*")) == []


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"wiring": "sideways"}, "has no wiring 'sideways'"),
        ({"wiring": "desync-2x", "tp_degree": 2}, "has no wiring 'desync-2x'"),
        ({"wiring": "parallel", "variant": "attn-only"}, "no variant"),
        ({"wiring": "farskip", "tp_degree": 2}, "has no tp_degree: only desync has one"),
        ({"wiring": "parallel", "border": "partial"}, "has no partial border"),
        ({"border": "half"}, "border is 'full' or 'partial'"),
        ({"variant": "mlp-only", "border": "partial"}, "mlp-only has no border"),
        ({"reduce": "2x"}, "has no reduce: only desync has one"),
        ({"layers": "2-9"}, "the model has 4"),
        ({"layers": "some"}, "is not understood"),
    ],
)
def test_a_wiring_that_does_not_fit_is_refused(original: Path, tmp_path: Path, options: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        convert_checkpoint(str(original), tmp_path / "out", **options)
    assert not (tmp_path / "out").exists()


def test_a_mistyped_wiring_is_guessed(original: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        convert_checkpoint(str(original), tmp_path / "out", wiring="farskp")
    assert caught.value.hint.startswith("Did you mean farskip? One of standard, farskip")


def test_desync_is_tried_before_it_is_written(tmp_path: Path) -> None:
    tiny.model("llama").save_pretrained(tmp_path / "dense")
    with pytest.raises(ConfigError, match="tp_degree 3 does not divide"):
        convert_checkpoint(str(tmp_path / "dense"), tmp_path / "out", wiring="desync-2x", tp_degree=3)
    report = convert_checkpoint(str(tmp_path / "dense"), tmp_path / "out", wiring="desync-4x", tp_degree=2)
    assert report.parity == 4 and "tp_degree 2" in report.to_text()
    assert build.load_model(tmp_path / "out").config.fcsd["tp_degree"] == 2


def test_a_reduce_pattern_is_tried_proven_and_exported(tmp_path: Path) -> None:
    tiny.model("llama").save_pretrained(tmp_path / "dense")
    how = {"wiring": "desync", "tp_degree": 2}
    for degree, reduce, message in [
        (1, "-,m", "desync needs a tp_degree of 2 or more"),
        (2, None, "reduce is 2x, 4x or"),
        (2, "often", "reduce is"),
        (4, "-,m", "key-value"),
    ]:
        with pytest.raises(ConfigError, match=message):
            convert_checkpoint(
                str(tmp_path / "dense"), tmp_path / "out", wiring="desync", tp_degree=degree, reduce=reduce
            )
    assert not (tmp_path / "out").exists()
    report = convert_checkpoint(str(tmp_path / "dense"), tmp_path / "out", **how, reduce="-,m")
    assert report.parity == 4 and "desync (reduce -,m), layers 0-3" in report.to_text()
    pattern = build.load_model(tmp_path / "out")
    convert_checkpoint(str(tmp_path / "dense"), tmp_path / "four", wiring="desync-4x", tp_degree=2, check=False)
    ids = tiny.tokens()
    assert torch.equal(pattern(ids).logits, build.load_model(tmp_path / "four")(ids).logits)


@pytest.mark.parametrize(("wiring", "default"), [("farskip", "full"), ("ladder", "partial")])
def test_the_border_is_chosen_and_exported(original: Path, tmp_path: Path, wiring: str, default: str) -> None:
    for name, border, expected in [("a", None, default), ("b", "full", "full"), ("c", "partial", "partial")]:
        report = convert_checkpoint(
            str(original), tmp_path / name, wiring=wiring, layers="2-3", border=border, check=False
        )
        assert f"{expected} border" in report.to_text()
        assert json.loads((tmp_path / name / "config.json").read_text())["fcsd"]["border"] == expected


@pytest.mark.parametrize(
    "how",
    [{"layers": "all"}, {"layers": "first:2"}, {"layers": "2-3", "variant": "mlp-only"}, {"wiring": "parallel"}],
)
def test_no_border_is_named_where_none_is_read(original: Path, tmp_path: Path, how: dict[str, str]) -> None:
    report = convert_checkpoint(original, tmp_path / "out", **{"wiring": "ladder", "check": False, **how})
    assert "border" not in report.to_text().splitlines()[1]


def test_rewired_models_are_refused(original: Path, tmp_path: Path) -> None:
    convert_checkpoint(str(original), tmp_path / "out", check=False)
    with pytest.raises(BadInputError, match="is converted already") as caught:
        convert_checkpoint(str(tmp_path / "out"), tmp_path / "again")
    assert f"Convert its original instead: {original}" in str(caught.value.hint)
    config = json.loads((original / "config.json").read_text())
    (original / "config.json").write_text(json.dumps(config | {"farskip": True, "farskip_start_idx": 1}))
    with pytest.raises(BadInputError, match="AMD's farskip keys"):
        convert_checkpoint(str(original), tmp_path / "again")
    assert not (tmp_path / "again").exists()


def test_code_in_the_input_is_neither_run_nor_obeyed(original: Path, tmp_path: Path) -> None:
    canary = tmp_path / "canary"
    (original / "modeling_evil.py").write_text(f"open({str(canary)!r}, 'w')\n")
    config = json.loads((original / "config.json").read_text())
    config["auto_map"] = {auto: "modeling_evil.Evil" for auto in ("AutoConfig", "AutoModelForCausalLM")}
    (original / "config.json").write_text(json.dumps(config))
    with pytest.raises(BadInputError, match="auto_map"):
        convert_checkpoint(str(original), tmp_path / "out")
    report = convert_checkpoint(str(original), tmp_path / "out", trust_remote_code=True)
    assert report.parity == 4 and not canary.exists()
    assert "modeling_evil" not in (tmp_path / "out" / "config.json").read_text()


def _truncate(original: Path) -> None:
    os.truncate(original / sharded(original)[0], 100_000)


def _drop_an_expert(original: Path) -> None:
    shard, index = original / sharded(original)[1], original / "model.safetensors.index.json"
    tensors = load_file(shard)
    name = next(name for name in tensors if ".experts." in name)
    del tensors[name]
    save_file(tensors, shard, metadata={"format": "pt"})
    weight_map = {k: v for k, v in json.loads(index.read_text())["weight_map"].items() if k != name}
    index.write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


@pytest.mark.parametrize("spoil", [_truncate, _drop_an_expert])
def test_a_broken_checkpoint_is_refused_before_anything_is_written(original: Path, tmp_path: Path, spoil) -> None:
    spoil(original)
    before = snapshot(tmp_path)
    for dry_run in (True, False):
        with pytest.raises(BadInputError) as caught:
            convert_checkpoint(str(original), tmp_path / "out", dry_run=dry_run)
        assert "\n" not in str(caught.value)
    assert snapshot(tmp_path) == before and not (tmp_path / "out").exists()


def test_a_file_named_like_our_code_does_not_take_its_place(original: Path, tmp_path: Path) -> None:
    (original / "wiring.py").write_text("WRONG = True")
    convert_checkpoint(str(original), tmp_path / "out", check=False)
    assert "WRONG" not in (tmp_path / "out" / "wiring.py").read_text()


# Parity


@pytest.mark.parametrize("arch", representatives("layer", "head"))
def test_parity_in_part_of_the_depth_reads_only_its_tensors(arch: str, tmp_path: Path, monkeypatch) -> None:
    row = ARCHS[arch]
    plain = dict(hidden_size_per_layer_input=0, num_kv_shared_layers=0) if row.spanning else {}
    tiny.model(arch, **plain).save_pretrained(tmp_path / "base", max_shard_size="200KB")
    layout = read_layout(tmp_path / "base")
    config = read_config(tmp_path / "base")
    whole = parity.plan_proof(layout, config, row)
    assert (whole.layers, whole.of) == (4, 4)
    assert whole.read_bytes == sum(tensor.end - tensor.start for tensor in layout.tensors.values())
    assert whole.memory_bytes > whole.read_bytes, "the experts of a layer are in memory twice while they are fused"
    fits = [parity.plan_proof(layout, config, row, free_bytes=free).layers for free in range(0, 4_000_000, 50_000)]
    assert fits == sorted(fits) and set(fits) == {0, 1, 2, 3, 4}

    free = 50_000 * fits.index(2)
    monkeypatch.setattr(parity, "free_memory", lambda: free)
    read: list[str] = []
    wanted = parity._wanted
    monkeypatch.setattr(parity, "_wanted", lambda *args: read.extend(found := wanted(*args)) or found)
    report = convert_checkpoint(str(tmp_path / "base"), tmp_path / "out", layers="1,3")
    assert report.parity == 2 and "first 2 of 4" in report.to_text()
    assert {parity.layer_index(row, name) for name in read} == {None, 0, 1}


def test_a_tensor_with_a_part_for_each_layer_is_proven_with_all_layers_or_none(tmp_path: Path) -> None:
    tiny.model("gemma4_text").save_pretrained(tmp_path)
    read = read_layout(tmp_path), read_config(tmp_path), ARCHS["gemma4_text"]
    fits = [parity.plan_proof(*read, free_bytes=free).layers for free in range(0, 4_000_000, 50_000)]
    assert fits == sorted(fits) and set(fits) == {0, 4}


def test_no_memory_for_one_layer_is_said(original: Path, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(parity, "free_memory", lambda: 1000)
    report = convert_checkpoint(str(original), tmp_path / "out")
    assert report.parity is None and "not one layer fits" in report.to_text()


def test_the_proof_says_beforehand_what_it_takes(original: Path, tmp_path: Path, caplog) -> None:
    caplog.set_level("INFO", "fcsd")
    convert_checkpoint(str(original), tmp_path / "out")
    (line,) = [message for message in caplog.messages if message.startswith("parity:")]
    assert "first 4 of 4 layers" in line and "twice" in line and "free memory" in line


def _spoil_weight(stage: Path) -> None:
    shard = sorted(stage.glob("*.safetensors"))[0]
    tensors = load_file(shard)
    name = next(name for name in tensors if "proj" in name)
    tensors[name][0, 0] += 1
    shard.unlink()
    save_file(tensors, shard, metadata={"format": "pt"})


def _spoil_config(stage: Path) -> None:
    config = json.loads((stage / "config.json").read_text())
    (stage / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 0.1}))


@pytest.mark.parametrize("spoil", [_spoil_weight, _spoil_config])
def test_a_broken_conversion_does_not_pass(original: Path, tmp_path: Path, monkeypatch, spoil) -> None:
    prove = conversion.prove_parity
    monkeypatch.setattr(
        conversion, "prove_parity", lambda layout, stage, *rest: (spoil(stage), prove(layout, stage, *rest))
    )
    before = snapshot(original)
    with pytest.raises(FcsdError, match="with the wiring off, logits differ"):
        convert_checkpoint(str(original), tmp_path / "out")
    assert not (tmp_path / "out").exists() and list(tmp_path.glob(".*")) == []
    assert snapshot(original) == before


def test_a_model_that_is_not_finite_is_named(original: Path, tmp_path: Path) -> None:
    shard = original / sharded(original)[0]
    tensors = load_file(shard)
    for tensor in tensors.values():
        tensor.fill_(float("nan"))
    save_file(tensors, shard, metadata={"format": "pt"})
    with pytest.raises(BadInputError, match="the original itself are not finite"):
        convert_checkpoint(str(original), tmp_path / "out")


# Sorts of checkpoint


@pytest.mark.parametrize("arch", quantised.SCHEMES)
def test_quantised_models_convert_untouched(arch: str, tmp_path: Path) -> None:
    base = quantised.write(arch, tmp_path / "base")
    report = convert_checkpoint(str(base), tmp_path / "out")
    assert report.parity == 4  # dequantised for it
    assert (tmp_path / "out" / "model.safetensors").samefile(base / "model.safetensors")
    block = json.loads((base / "config.json").read_text())["quantization_config"]
    assert json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"] == block


@tiny.with_llama4
def test_llama4_keeps_its_eyes(tmp_path: Path) -> None:
    base = tiny.llama4_vision()
    base.save_pretrained(tmp_path / "base")
    report = convert_checkpoint(str(tmp_path / "base"), tmp_path / "out")
    assert report.parity == 4
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["auto_map"]["AutoModelForImageTextToText"] == "modeling_fcsd.FcsdLlama4ForConditionalGeneration"
    assert config["text_config"]["model_type"] == "llama4_text"

    loaded = build.load_model(tmp_path / "out", auto="AutoModelForImageTextToText")
    assert loaded.state_dict().keys() == base.state_dict().keys()
    ids = tiny.tokens(1)
    ids[ids == 250] = 3
    ids[0, 3:7] = 250  # where the image goes
    pixels = torch.randn(1, 3, 28, 28, generator=torch.Generator().manual_seed(0))
    build.wire(base, Wiring("farskip", (0, 1, 2, 3)))
    with torch.no_grad():
        seen = loaded(input_ids=ids, pixel_values=pixels).logits
        assert torch.equal(seen, base(input_ids=ids, pixel_values=pixels).logits)
        assert not torch.equal(seen, loaded(input_ids=ids, pixel_values=-pixels).logits)
        build.wire(base, build.unwired())
        assert not torch.equal(seen, base(input_ids=ids, pixel_values=pixels).logits)


def test_the_tokenizer_stays_the_same(repo: Path, tmp_path: Path) -> None:
    text = "Hello  world, it's 2024!\n\tx = 3"
    for arch, declared in (("mixtral", "Qwen2Tokenizer"), ("llama", "PreTrainedTokenizerFast"), ("qwen3_moe", None)):
        base, out = tmp_path / arch, tmp_path / f"{arch}-out"
        tiny.model(arch, vocab_size=2048).save_pretrained(base)  # as many as the tokenizer has tokens
        (base / "tokenizer.json").write_bytes((repo / "assets/teacher/tokenizer.json").read_bytes())
        (base / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": declared} if declared else {}))
        convert_checkpoint(str(base), out, check=False)
        theirs, ours = (transformers.AutoTokenizer.from_pretrained(path) for path in (base, out))
        assert ours(text).input_ids == theirs(text).input_ids
        assert declared is None or type(ours) is type(theirs)


# Load and interruption, in processes of their own


def _run(code: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    path = [str(Path(conversion.__file__).parent.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": ":".join(path)},
        capture_output=True,
        text=True,
        timeout=300,
    )


def test_109b_parameters_convert_by_headers_alone(tmp_path: Path) -> None:
    sparse_checkpoint.scout(tmp_path / "scout")
    shards = sorted((tmp_path / "scout").glob("*.safetensors"))
    done = _run(
        """
        import resource
        from pathlib import Path
        from fcsd.convert import convert_checkpoint
        print(convert_checkpoint("scout", "out", check=False).bytes)
        print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
        print(Path("/proc/self/io").read_text().split("rchar:")[1].split()[0])
        """,
        tmp_path,
    )
    assert done.returncode == 0, done.stderr
    weights, memory, read = map(int, done.stdout.split())
    assert weights > 200e9
    assert memory < 2 << 30  # what a memory map touches counts here
    assert read < 1 << 30  # and this is what all else reads, Python's own modules included
    assert all((tmp_path / "out" / shard.name).samefile(shard) for shard in shards)


@pytest.mark.parametrize("kind", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("moment", ["take_over", "write_text", "prove_parity"])
def test_an_interrupted_convert_leaves_no_half_directory(
    original: Path, tmp_path: Path, monkeypatch, kind: signal.Signals, moment: str
) -> None:
    real = getattr(conversion, moment)

    def interrupted(*arguments: object) -> None:
        real(*arguments)
        if kind == signal.SIGINT:
            signal.signal(kind, signal.default_int_handler)  # a shell's background jobs ignore it
        os.kill(os.getpid(), kind)

    before = snapshot(original)
    with monkeypatch.context() as patch:
        patch.setattr(conversion, moment, interrupted)
        arguments = ["convert", str(original), str(tmp_path / "out")]
        child = multiprocessing.get_context("fork").Process(target=app, args=[arguments])
        child.start()
        child.join()
    assert child.exitcode == (-kind if kind == signal.SIGKILL else 128 + kind)
    assert not (tmp_path / "out").exists()
    assert snapshot(original) == before
    assert len(list(tmp_path.glob(".out.tmp-*"))) == (kind == signal.SIGKILL)
    convert_checkpoint(str(original), tmp_path / "out", check=False)  # and the next one sweeps up
    assert list(tmp_path.glob(".*")) == []
    assert snapshot(original) == before


def test_costs_do_not_block_a_command_that_was_interrupted(original, tmp_path, monkeypatch) -> None:
    def interrupted(*_: object, dry_run: bool, **__: object) -> None:
        if not dry_run:
            raise KeyboardInterrupt

    found = types.SimpleNamespace(wiring=types.SimpleNamespace(layers=(1,)), to_json=dict)
    monkeypatch.setattr(conversion, "convert_checkpoint", interrupted)
    monkeypatch.setattr(layer_costs, "choose_by_cost", lambda *_, **__: found)
    options = ["convert", str(original), str(tmp_path / "out"), "--layers", "auto", "--costs", str(tmp_path / "c.json")]
    assert CliRunner().invoke(app, options).exit_code == 130
    assert not (tmp_path / "c.json").exists()
