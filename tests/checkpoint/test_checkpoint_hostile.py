"""Hostile and broken checkpoints: one clear line, exit class 3, nothing written, nothing executed, nothing asked."""

import hashlib
import json
import os
import pickle
import pty
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from gate import edit, open_base, refused, shards, state_of

from fcsd.checkpoint import INDEX, contained, inspect_checkpoint
from fcsd.convert import convert_checkpoint
from fcsd.errors import BadInputError


def test_the_good_one_is_taken(model):
    before = state_of(model)
    base = open_base(str(model))
    assert base.comparison.problems() == {} and set(base.layout.files) == {file.name for file in shards(model)}
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
@pytest.mark.parametrize("call", [open_base, inspect_checkpoint])
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
        (b'{"weight_map": ' + b'{"a":' * 200_000, "nested more than 32 levels deep"),
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


def test_shard_missing_or_damaged(model):
    """convert refuses what inspect reports, and both name the shard."""
    first, second, *rest = shards(model)
    first.unlink()
    refused(model, f"{first.name}: is missing")
    os.truncate(second, second.stat().st_size - 1)
    for file in rest:
        file.write_bytes(b"")
    problems = "\n".join(inspect_checkpoint(str(model)).problems)
    assert f"{first.name}: is missing" in problems
    assert f"{second.name}: is truncated" in problems and f"{rest[-1].name}: is truncated" in problems


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


@pytest.mark.parametrize("name", ["config.json", INDEX, "tokenizer.json"])
@pytest.mark.parametrize("relative", [True, False])
def test_links_out_of_the_directory(model, name, relative):
    file = model / name
    file.touch()
    target = file.rename(model.parent / "outside")
    file.symlink_to("../outside" if relative else target)
    refused(model, "leaves the checkpoint", call=lambda path: contained(Path(path), name))


@pytest.mark.parametrize("relative", [True, False])
def test_linked_weights_are_followed(model, tmp_path, relative):
    """As transformers follows them. A converted model holds the file itself, and the link's target is not changed."""
    before = open_base(str(model)).comparison
    for file in shards(model):
        file.rename(tmp_path / file.name)
        (tmp_path / f"link to {file.name}").symlink_to(tmp_path / file.name)
        file.symlink_to((Path("..") if relative else tmp_path) / f"link to {file.name}")
    assert inspect_checkpoint(model).problems == [] and open_base(str(model)).comparison == before
    contents = {file.name: (tmp_path / file.name).read_bytes() for file in shards(model)}
    convert_checkpoint(model, tmp_path / "out", check=False)
    for name, content in contents.items():
        assert not (tmp_path / "out" / name).is_symlink() and (tmp_path / "out" / name).samefile(tmp_path / name)
        assert (tmp_path / name).read_bytes() == content
    (tmp_path / name).write_text("no weights")
    refused(model, f"{name}: ")
    (tmp_path / name).unlink()
    refused(model, f"{name}: is a link, and ")


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
    (snapshot / "templates").mkdir()
    (snapshot / "templates" / "a.jinja").symlink_to(f"../../../blobs/{blob.name}")
    assert contained(snapshot, "templates", "a.jinja") == blob
    link = tmp_path / "link"
    link.symlink_to(snapshot)
    assert open_base(str(link)).layout.files == base.layout.files
    # So are links into the cache from a directory of the user's.
    (tmp_path / "mine").mkdir()
    for file in snapshot.iterdir():
        (tmp_path / "mine" / file.name).symlink_to(file)
    assert open_base(str(tmp_path / "mine")).layout.files == base.layout.files
    # A file beside the blobs is no part of a model.
    (repo / "other").write_text("canary")
    (snapshot / "LICENSE").symlink_to("../../other")
    refused(snapshot, "leaves the checkpoint", call=lambda path: contained(Path(path), "LICENSE"))


@pytest.mark.parametrize("parts", [("LICENSE",), ("templates", "a.jinja"), ("..", "secret"), ("sub/LICENSE",), ("",)])
def test_other_files_do_not_smuggle(model, tmp_path, parts):
    """A licence or a folder of templates could link to what convert would copy, and push would publish."""
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "a.jinja").write_text("canary")
    (model / "LICENSE").symlink_to(outside / "a.jinja")
    (model / "templates").symlink_to(outside)
    refused(model, call=lambda path: contained(Path(path), *parts))


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
        (["MANIFEST.json", "parts/parts.json"], "is a checkpoint of an fcsd run"),
        (["config.resolved.yaml", "metrics.jsonl", "checkpoints/step-1/MANIFEST.json"], "is an fcsd run"),
    ],
)
@pytest.mark.parametrize("call", [open_base, inspect_checkpoint])
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
    refused(model, f"{name}: auto_map asks for code of its own", call=inspect_checkpoint)
    base = open_base(str(model), trust_remote_code=True)
    assert base.config.model_type == "qwen3_moe" and not canary.exists()


def test_nothing_is_asked_on_a_terminal(model):
    """A pseudo-terminal that somebody could type "y" into: the answer comes without it, with trust or not."""
    canary = plant(model)
    edit(model / "config.json", lambda config: config.update(auto_map=AUTO_MAP))
    program = (
        "import sys; from fcsd.checkpoint import inspect_checkpoint; assert sys.stdin.isatty()\n"
        "for trust in (True, False): print(inspect_checkpoint(sys.argv[1], trust_remote_code=trust).architecture)"
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


def test_the_directory_that_was_meant_is_named(model):
    with pytest.raises(BadInputError, match="no such directory") as caught:
        inspect_checkpoint(str(model.parent / "modle"))
    assert caught.value.hint.startswith(f"Did you mean {model}? ")
    with pytest.raises(BadInputError, match="has no checkpoint") as caught:
        inspect_checkpoint(str(model.parent))
    assert caught.value.hint.startswith(f"Did you mean {model}? ")
