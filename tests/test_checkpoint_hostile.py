"""Hostile and broken checkpoints: one clear line, exit class 3, nothing written, nothing executed, nothing asked."""

import hashlib
import json
import os
import pickle
import pty
import random
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import sparse_checkpoint
import tiny

from fcsd.checkpoint import INDEX, companions, inspect, open_base, read_layout
from fcsd.errors import BadInputError


@pytest.fixture(scope="module")
def good(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("good") / "model"
    tiny.model("qwen3_moe").save_pretrained(path, max_shard_size="300KB")
    return path


@pytest.fixture
def model(good, tmp_path) -> Path:
    """A good sharded checkpoint of its own, to be spoilt."""
    return Path(shutil.copytree(good, tmp_path / "model"))


def state_of(root: Path) -> dict[str, str]:
    """Every path below ``root`` with its kind, times and, for regular files of sane size, content."""
    state = {}
    for path in sorted(root.rglob("*")):
        info = path.lstat()
        regular = path.is_file() and not path.is_symlink() and info.st_size < 1 << 24
        content = hashlib.sha256(path.read_bytes()).hexdigest() if regular else ""
        state[str(path)] = f"{info.st_mode:o} {info.st_size} {info.st_mtime_ns} {content}"
    return state


def refused(path: Path, *reasons: str, call: Callable[[str], Any] = open_base) -> str:
    root = path.parent
    before = state_of(root)
    with pytest.raises(BadInputError) as caught:
        call(str(path))
    assert caught.value.exit_code == 3
    message = str(caught.value)
    assert "\n" not in message and len(message) < 1500, message
    for reason in reasons:
        assert reason in message
    assert state_of(root) == before
    return message


def edit(file: Path, change: Callable[[dict], Any]) -> None:
    value = json.loads(file.read_text())
    change(value)
    file.write_text(json.dumps(value))


def shards(path: Path) -> list[Path]:
    return sorted(path.glob("*.safetensors"))


def test_the_good_one_is_taken(model):
    before = state_of(model)
    base = open_base(str(model))
    assert base.comparison.problems() == [] and set(base.layout.files) == {file.name for file in shards(model)}
    assert state_of(model) == before


# --- index and shards (L4)


@pytest.mark.parametrize(
    ("shard", "reason"),
    [
        ("../outside.safetensors", "not a plain file name"),
        ("/etc/outside.safetensors", "not a plain file name"),
        ("sub/outside.safetensors", "not a plain file name"),
        ("C:\\outside.safetensors", "not a plain file name"),
        ("a\0b.safetensors", "not a plain file name"),
        ("a\nb.safetensors", "not a plain file name"),
        ("x" * 300 + ".safetensors", "not a plain file name"),
        ("pytorch_model.bin", "not a .safetensors file"),
        ("", "not a .safetensors file"),
        (None, "not a .safetensors file"),
        (["model.safetensors"], "not a .safetensors file"),
    ],
)
@pytest.mark.parametrize("call", [open_base, inspect])
def test_shard_names(model, shard, reason, call):
    shutil.copy(shards(model)[0], model.parent / "outside.safetensors")
    edit(model / INDEX, lambda index: index["weight_map"].update({"model.norm.weight": shard}))
    refused(model, reason, call=call)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (b"{}", "has no weight_map"),
        (b'{"weight_map": {}}', "has no weight_map"),
        (b'{"weight_map": ["a"]}', "has no weight_map"),
        (b'{"weight_map"', "not strict JSON"),
        (b"[1]", "holds a JSON list"),
        (b'{"weight_map": {"a": "x.safetensors", "a": "y.safetensors"}}', "duplicate key 'a'"),
        (b'{"weight_map": {"a": "\xff.safetensors"}}', "not strict JSON"),
        (b'{"weight_map": ' + b'{"a":' * 200_000, "nested too deeply"),
    ],
)
def test_malformed_index(model, text, reason):
    (model / INDEX).write_bytes(text)
    refused(model, reason)


def test_index_of_a_million_keys(model):
    names = ",".join(f'"{i}":"a.safetensors"' for i in range(1_000_001))
    (model / INDEX).write_text(f'{{"weight_map":{{{names}}}}}')
    refused(model, "lists more than")


def test_index_of_a_gigabyte(model):
    with (model / INDEX).open("wb") as file:
        file.truncate(1 << 30)
    refused(model, "larger than 64 MB")


def test_index_and_single_file_together(model):
    shutil.copy(shards(model)[0], model / "model.safetensors")
    refused(model, "holds both")


def test_index_and_shards_disagree(model):
    first, second, *_ = [file.name for file in shards(model)]
    edit(model / INDEX, lambda index: index["weight_map"].update({"ghost": first}))
    refused(model, "lacks 'ghost'")
    edit(model / INDEX, lambda index: index["weight_map"].pop("ghost"))
    moved = json.loads((model / INDEX).read_text())["weight_map"]
    name = next(name for name, shard in moved.items() if shard == first)
    edit(model / INDEX, lambda index: index["weight_map"].update({name: second}))
    refused(model, name)
    edit(model / INDEX, lambda index: index["weight_map"].pop(name))
    refused(model, "which the index does not list")
    assert name in read_layout(model, allow_unexpected=True).tensors


def test_shard_missing_or_damaged(model):
    """convert refuses what inspect reports, and both name the shard."""
    first, second, third, *_ = shards(model)
    first.unlink()
    refused(model, f"{first.name}: is missing")
    os.truncate(second, second.stat().st_size - 1)
    third.write_bytes(b"")
    problems = "\n".join(inspect(str(model)).problems)
    assert f"{first.name}: is missing" in problems
    assert f"{second.name}: is truncated" in problems and f"{third.name}: is truncated" in problems


@pytest.mark.parametrize("kind", ["fifo", "directory", "cyclic", "device"])
def test_shard_is_no_file(model, kind):
    shard = shards(model)[0]
    shard.unlink()
    {
        "fifo": lambda: os.mkfifo(shard),
        "directory": shard.mkdir,
        "cyclic": lambda: shard.symlink_to(shard.name),
        "device": lambda: shard.symlink_to("/dev/zero"),
    }[kind]()
    refused(model, shard.name)


@pytest.mark.parametrize("name", ["config.json", INDEX, "first shard"])
@pytest.mark.parametrize("relative", [True, False])
def test_links_out_of_the_directory(model, name, relative):
    file = shards(model)[0] if name == "first shard" else model / name
    target = file.rename(model.parent / "outside")
    file.symlink_to("../outside" if relative else target)
    refused(model, "leaves the checkpoint")


def test_links_inside_and_into_the_cache_are_followed(good, tmp_path):
    repo = tmp_path / "models--org--name"
    (repo / "blobs").mkdir(parents=True)
    snapshot = repo / "snapshots" / ("0" * 40)
    snapshot.mkdir(parents=True)
    for file in good.iterdir():
        blob = repo / "blobs" / hashlib.sha256(file.name.encode()).hexdigest()
        shutil.copy(file, blob)
        (snapshot / file.name).symlink_to(f"../../blobs/{blob.name}")
    base = open_base(str(snapshot))
    assert all(file.parent == repo / "blobs" for file in base.layout.files.values())
    link = tmp_path / "link"
    link.symlink_to(snapshot)
    assert open_base(str(link)).layout.files == base.layout.files
    # The same links in a directory that is no snapshot leave it.
    shutil.copytree(snapshot, repo / "elsewhere" / "copy", symlinks=True)
    refused(repo / "elsewhere" / "copy", "leaves the checkpoint")


def test_companions_do_not_smuggle(model, tmp_path):
    secret = tmp_path / "secret"
    secret.write_text("canary")
    (model / "tokenizer.json").write_text("{}")
    assert {"tokenizer.json", "generation_config.json"} == set(companions(model))
    (model / "LICENSE").symlink_to(secret)
    refused(model, "leaves the checkpoint", call=lambda path: companions(Path(path)))
    (model / "LICENSE").unlink()
    os.mkfifo(model / "LICENSE")
    refused(model, "is a FIFO", call=lambda path: companions(Path(path)))


# --- tensors against config (L2)


def rewrite(path: Path, change: Callable[[dict[str, tuple[str, tuple[int, ...]]]], Any]) -> None:
    """Replace the weights by one file of zeros with the changed names, dtypes and shapes."""
    tensors = {name: (t.dtype, t.shape) for name, t in read_layout(path).tensors.items()}
    change(tensors)
    for file in [*shards(path), path / INDEX]:
        file.unlink()
    sparse_checkpoint.write_header(path / "model.safetensors", tensors)


EXPERT = "model.layers.1.mlp.experts.3.up_proj.weight"
ROUTER = "model.layers.1.mlp.gate.weight"


@pytest.mark.parametrize(
    ("change", "reasons"),
    [
        (lambda t: t.pop("model.norm.weight"), ["1 missing (model.norm.weight)"]),
        (lambda t: t.pop("lm_head.weight"), ["1 missing (lm_head.weight)"]),
        (lambda t: t.pop(EXPERT), [f"1 missing ({EXPERT})"]),
        (lambda t: [t.pop(n) for n in list(t) if ".experts.3." in n], ["9 missing", "experts.3.", ", ...)"]),
        (lambda t: t.update(ghost=("F32", (1,))), ["1 unexpected (ghost)"]),
        (lambda t: t.update({"a\n\ud800": ("F32", (1,))}), [r"1 unexpected ('a\n\ud800')"]),
        (lambda t: t.update({EXPERT.replace(".3.", ".8."): t[EXPERT]}), ["1 unexpected", ".experts.8."]),
        (lambda t: t.update({ROUTER: ("F32", (7, 64))}), [ROUTER, "F32 [7, 64], not", "[8, 64]"]),
        (lambda t: t.update({EXPERT: ("F32", (64, 32))}), [EXPERT, "[64, 32], not", "[32, 64]"]),
        (lambda t: t.update({EXPERT: ("U8", (32, 64))}), [EXPERT, "U8 [32, 64], not"]),
        (lambda t: t.update({EXPERT: ("F8_E4M3", (32, 64))}), [EXPERT, "F8_E4M3 [32, 64], not"]),
        (lambda t: t.clear() or t.update(x=("F32", (1,))), ["4 layers, but the files hold only 1 tensors"]),
    ],
)
def test_tensors_that_do_not_match(model, change, reasons):
    rewrite(model, change)
    refused(model, *reasons)
    assert inspect(str(model)).problems if reasons[0][0] != "4" else True


def test_unexpected_tensors_can_be_allowed(model):
    rewrite(model, lambda tensors: tensors.update(ghost=("F32", (1,))))
    assert open_base(str(model), allow_unexpected=True).comparison.unexpected == ["ghost"]


# --- config.json (L5)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"model_type": "qwen4_moe"}, "'qwen4_moe' is not supported; closest: qwen"),
        ({"model_type": "t5"}, "'t5' is not supported"),
        ({"model_type": None}, "has no model_type"),
        ({"model_type": ["llama"]}, "has no model_type"),
        ({"architectures": ["Qwen3MoeForSequenceClassification"]}, "architectures is"),
        ({"architectures": "Qwen3MoeForCausalLM"}, "not a list of class names"),
        ({"architectures": ["a\nb"]}, "not a list of class names"),
        ({"model_type": "a\nb"}, "has no model_type"),
        ({"num_hidden_layers": -1}, "num_hidden_layers is -1"),
        ({"num_hidden_layers": 0}, "num_hidden_layers is 0"),
        ({"num_hidden_layers": "two"}, "num_hidden_layers is 'two'"),
        ({"num_hidden_layers": 4.0}, "num_hidden_layers is 4.0"),
        ({"num_hidden_layers": True}, "num_hidden_layers is True"),
        ({"num_hidden_layers": [4]}, "num_hidden_layers is [4]"),
        ({"num_hidden_layers": 10**12}, "num_hidden_layers is 1000000000000"),
        ({"num_hidden_layers": 9_999}, "9999 layers, but the files hold only"),
        ({"num_hidden_layers": 5}, "missing (model.layers.4."),
        ({"num_hidden_layers": 3}, "unexpected (model.layers.3."),
        ({"num_experts": 0}, "num_experts is 0"),
        ({"num_experts": 1}, "num_experts_per_tok, 2, exceeds num_experts, 1"),
        ({"num_experts": 7}, "num_experts, 7, is not num_local_experts, 8"),
        ({"num_local_experts": 7}, "unexpected"),
        ({"num_local_experts": 9}, "missing (model.layers.0.mlp.experts.8."),
        ({"num_local_experts": 99_999}, "99999 experts in 4 layers"),
        ({"num_experts_per_tok": -2}, "num_experts_per_tok is -2"),
        ({"num_experts_per_tok": 9}, "num_experts_per_tok, 9, exceeds num_local_experts, 8"),
        ({"num_attention_heads": 0}, "num_attention_heads is 0"),
        ({"num_key_value_heads": 3}, "num_key_value_heads, 3, does not divide num_attention_heads, 4"),
        ({"hidden_size": 128}, "wrong ("),
        ({"hidden_size": 2**40}, "hidden_size is 1099511627776"),
        ({"vocab_size": "many"}, "vocab_size is 'many'"),
        ({"mlp_only_layers": [4]}, "mlp_only_layers is not a list of layers from 0 to 3"),
        ({"mlp_only_layers": 7}, "mlp_only_layers is not a list"),
        ({"rms_norm_eps": "small"}, "transformers cannot build"),
        ({"hidden_act": "no_such_function"}, "transformers cannot build"),
        ({"layer_types": ["full_attention"] * 9}, "transformers cannot build"),
        ({"rms_norm_eps": float("1e308") * 10}, "Infinity is not JSON"),
        ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, "quantisation 'gptq' is not supported"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantisation 'fp8' is not supported"),
        ({"quantization_config": {"quant_method": "fp8", "weight_block_size": [0, 128]}}, "not supported"),
        ({"quantization_config": "fp8"}, "quantisation 'None' is not supported"),
        ({"attn_implementation": "org/kernels"}, "asks for code of its own to be run, 'org/kernels'"),
        ({"_attn_implementation": "org/kernels:fn"}, "asks for code of its own to be run"),
        ({"attn_implementation": {"text_config": ["org/kernels"]}}, "asks for code of its own to be run"),
        ({"nested": [{"experts_implementation": "org/kernels"}]}, "asks for code of its own to be run"),
        ({"fcsd": {"version": 1}}, "do not belong together"),
        ({"model_type": "fcsd_qwen3_moe"}, "do not belong together"),
        ({"model_type": "fcsd_qwen3_moe", "fcsd": {"version": 2}}, "version 2"),
        ({"model_type": "fcsd_qwen3_moe", "fcsd": {"version": 1, "wiring": "farskip"}}, "fcsd block keys differ"),
        ({"farskip": "yes"}, "the farskip keys do not hold"),
        ({"farskip": True}, "is already rewired: farskip, layers from 0 up to 10000, by AMD"),
    ],
)
def test_config_values(model, change, reason):
    edit(model / "config.json", lambda config: config.update(change))
    refused(model, reason)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (b"", "not strict JSON"),
        (b"{", "not strict JSON"),
        (b"[]", "holds a JSON list"),
        (b"null", "holds a JSON NoneType"),
        ('{"model_type": "llama"}'.encode("utf-16"), "not strict JSON"),
        (b'\xef\xbb\xbf{"model_type": "llama"}', "not strict JSON"),
        (b'{"model_type": "llama", "model_type": "qwen3"}', "duplicate key 'model_type'"),
        (b'{"rope_theta": NaN}', "NaN is not JSON"),
        (b'{"rope_theta": 1e999}', "'rope_theta' is not finite"),
        (b'{"a":' * 100_000 + b"1" + b"}" * 100_000, "nested too deeply"),
        (b" " * (11 << 20) + b"{}", "larger than 10 MB"),
    ],
)
def test_config_text(model, text, reason):
    (model / "config.json").write_bytes(text)
    refused(model, reason)


def test_config_of_a_gigabyte(model):
    with (model / "config.json").open("wb") as file:
        file.truncate(1 << 30)
    refused(model, "larger than 10 MB")


NASTY = (
    None,
    True,
    -1,
    0,
    1,
    3,
    10**30,
    0.5,
    "",
    "x",
    "org/x",
    [],
    [-1],
    ["x"] * 99,
    {},
    {"rope_type": "x"},
    {"x": {}},
)


def check_config_values(model: Path, cases: list[tuple[str, Any]]) -> int:
    """With each key set to each value in turn, the gate opens or says why not, nothing else; returns how often."""
    text = (model / "config.json").read_text()
    opened = 0
    for key, value in cases:
        (model / "config.json").write_text(json.dumps({**json.loads(text), key: value}))
        for call in (open_base, inspect):
            try:
                call(str(model))
                opened += 1
            except BadInputError as error:
                assert "\n" not in str(error), (key, value)
    return opened


def test_any_value_under_any_key(model):
    keys = sorted(json.loads((model / "config.json").read_text()))
    cases = random.Random(0).sample([(key, value) for key in keys for value in NASTY], 150)
    assert check_config_values(model, cases) > 30


@pytest.mark.nightly
@pytest.mark.parametrize("arch", tiny.CONFIGS)
def test_every_value_under_every_key(arch, tmp_path):
    tiny.model(arch).save_pretrained(tmp_path)
    keys = sorted(json.loads((tmp_path / "config.json").read_text()))
    keys += ["quantization_config", "farskip", "farskip_start_idx", "fcsd", "text_config", "vision_config", "dtype"]
    check_config_values(tmp_path, [(key, value) for key in keys for value in NASTY])


# --- something else (issue: LoRA, GGUF, DeepSpeed, pickles)


class Payload:
    """Unpickling this creates the canary."""

    def __init__(self, canary: Path) -> None:
        self.canary = canary

    def __reduce__(self):
        return Path.touch, (self.canary,)


@pytest.mark.parametrize(
    ("files", "reason"),
    [
        ([], "is empty"),
        (["README.md"], "has no checkpoint"),
        (["config.json"], "has no model.safetensors"),
        (["model.safetensors"], "has no config.json"),
        (["adapter_config.json", "adapter_model.safetensors"], "is a LoRA adapter"),
        (["config.json", "adapter_config.json", "adapter_model.bin"], "is a LoRA adapter"),
        (["model-Q4_K_M.gguf"], "is a GGUF model"),
        (["latest", "zero_to_fp32.py", "global_step100/mp_rank_00_model_states.pt"], "is a DeepSpeed checkpoint"),
        (["mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_optim_states.pt"], "is a DeepSpeed checkpoint"),
        ([".metadata", "__0_0.distcp"], "is a distributed (DCP) checkpoint"),
        (["config.json", "pytorch_model.bin"], "pickled weights"),
        (["config.json", "pytorch_model.bin.index.json", "pytorch_model-00001-of-00002.bin"], "pickled weights"),
        (["params.json", "consolidated.00.pth"], "own format"),
        (["model_index.json", "unet/config.json"], "is a diffusers pipeline"),
        (["config.json", "tf_model.h5"], "is a TensorFlow checkpoint"),
        (["config.json", "flax_model.msgpack"], "is a Flax checkpoint"),
        (["config.resolved.yaml", "metrics.jsonl", "checkpoints/step-1/MANIFEST.json"], "is an fcsd run"),
    ],
)
@pytest.mark.parametrize("call", [open_base, inspect])
def test_other_things(tmp_path, files, reason, call):
    canary, path = tmp_path / "canary", tmp_path / "model"
    path.mkdir()
    for name in files:
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_bytes(pickle.dumps(Payload(canary)))
    refused(path, reason, call=call)
    assert not canary.exists()


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("m.gguf", "is a GGUF model"),
        ("model.safetensors", "is a single weights file"),
        ("m.zip", "is a file"),
        (None, "no such directory"),
    ],
)
def test_not_a_directory(tmp_path, name, reason):
    path = tmp_path / (name or "none")
    if name:
        path.touch()
    refused(path, reason)


@pytest.mark.parametrize(
    "model",
    ["gpt2", "a/b/c", "org/name@", "org/../name", "", "~nobody/x y", "org/na me", "\0", "~no_such_user/x", "x" * 5000],
)
def test_neither_directory_nor_hub_id(model, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(BadInputError) as caught:
        open_base(model)
    assert "\n" not in str(caught.value)


# --- code in the checkpoint (L6)

AUTO_MAP = {"AutoConfig": "evil.Evil", "AutoModelForCausalLM": "evil.Evil", "AutoTokenizer": ["evil.Evil", None]}


def plant(model: Path) -> Path:
    """Code that leaves a canary when imported, beside everything that could make somebody import it."""
    canary = model.parent / "canary"
    (model / "evil.py").write_text(f"open({str(canary)!r}, 'w')\nclass Evil: pass\n")
    (model / "chat_template.jinja").write_text("{{ ''.__class__.__mro__[1].__subclasses__() }}")
    (model / "pytorch_model.bin").write_bytes(pickle.dumps(Payload(canary)))
    return canary


@pytest.mark.parametrize("name", ["config.json", "tokenizer_config.json", "generation_config.json"])
def test_auto_map(model, name):
    canary = plant(model)
    (model / name).touch()
    text = (model / name).read_text() or "{}"
    (model / name).write_text(json.dumps({**json.loads(text), "auto_map": AUTO_MAP}))
    refused(model, f"{name}: auto_map asks for code of its own")
    refused(model, f"{name}: auto_map asks for code of its own", call=inspect)
    base = open_base(str(model), trust_remote_code=True)
    assert base.config.model_type == "qwen3_moe" and not canary.exists()


def test_nothing_is_asked_on_a_terminal(model):
    """A pseudo-terminal that somebody could type "y" into: the answer comes without it, with trust or not."""
    canary = plant(model)
    edit(model / "config.json", lambda config: config.update(auto_map=AUTO_MAP))
    program = (
        "import sys; from fcsd.checkpoint import inspect; assert sys.stdin.isatty()\n"
        "for trust in (True, False): print(inspect(sys.argv[1], trust_remote_code=trust).architecture)"
    )
    ours, theirs = pty.openpty()
    run = subprocess.Popen([sys.executable, "-c", program, str(model)], stdin=theirs, stdout=theirs, stderr=theirs)
    os.close(theirs)
    output = b""
    while True:
        try:
            chunk = os.read(ours, 4096)
        except OSError:  # the other side closed
            break
        if not chunk:
            break
        output += chunk
    assert run.wait(60) == 1
    os.close(ours)
    assert b"Qwen3MoeForCausalLM" in output and b"auto_map asks for code" in output
    assert b"[y/N]" not in output and not canary.exists()
