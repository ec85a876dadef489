"""What other libraries say about a failure reaches the user whole, on one line."""

import subprocess
import sys
from pathlib import Path

import pytest
import tiny
import torch
from huggingface_hub.errors import StrictDataclassFieldValidationError
from jinja2 import Environment, TemplateSyntaxError
from pydantic import ValidationError
from safetensors import SafetensorError, safe_open
from torch import nn

from fcsd.checkpoint import inspect_checkpoint
from fcsd.checkpoint.files import quoted
from fcsd.checkpoint.tokenizer import chat_text, limited_template
from fcsd.config.recipe import Recipe
from fcsd.errors import BadInputError, DiskError
from fcsd.foreign_errors import one_line, reason_in, reason_of, translate


def of_pydantic(_: Path) -> None:
    Recipe.model_validate({"name": 3})


def of_jinja(_: Path) -> None:
    Environment().from_string("{% if messages %}\n{{ messages[0] }}\n{% endfor %}")


def of_safetensors(folder: Path) -> None:
    (folder / "x").write_bytes(b"\x10\x00\x00\x00\x00\x00\x00\x00{}")
    safe_open(folder / "x", "pt").__enter__()


def of_torch(_: Path) -> None:
    nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).load_state_dict(
        nn.Sequential(nn.Linear(8, 4), nn.Linear(4, 8)).state_dict()
    )


def of_transformers(_: Path) -> None:
    tiny.model("mixtral", output_router_logits="yes")


@pytest.mark.parametrize(
    ("fail", "kind", "parts"),
    [
        (of_pydantic, ValidationError, ["validation errors for Recipe", "model Field required", "valid string"]),
        (
            of_jinja,
            TemplateSyntaxError,
            ["unknown tag 'endfor'", "block that needs to be closed is 'if'"],
        ),
        (of_safetensors, SafetensorError, ["Error while deserializing header"]),
        (of_torch, RuntimeError, ["size mismatch for 0.weight", "torch.Size([4, 8])", "size mismatch for 1.weight"]),
        (
            of_transformers,
            StrictDataclassFieldValidationError,
            ["Validation error for field 'output_router_logits'", "expected bool, got str (value: 'yes')"],
        ),
    ],
)
def test_all_lines_of_a_reason_are_said(fail, kind: type[Exception], parts: list[str], tmp_path: Path) -> None:
    with pytest.raises(kind) as caught:
        fail(tmp_path)
    said = reason_of(caught.value)
    assert [part for part in parts if part not in said] == [] and said.isprintable()
    known = translate(caught.value)  # of these, the table knows those of safetensors and of transformers' configs
    assert known is None or str(known).endswith(said)


@pytest.mark.parametrize("out", ["file", "file/below"])
def test_a_file_in_the_place_of_a_directory_is_an_error_of_the_disk(tmp_path: Path, out: str) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(OSError) as caught:
        (tmp_path / out).mkdir(parents=True, exist_ok=True)
    assert isinstance(error := translate(caught.value), DiskError) and str(tmp_path / out) in str(error)


def test_a_reason_is_printable_and_says_how_much_is_left_out() -> None:
    assert reason_of(ValueError("a\r\n\tb\u2028c \x1b[2J")) == "a b c \\u001b[2J"
    assert reason_of(ValueError(" \n")) == "ValueError"
    assert reason_of(ValueError("x" * 501)) == "x" * 500 + "... (1 characters more)"
    assert one_line("y" * 500) == "y" * 500
    assert quoted("z" * 200) == "'" + "z" * 99 + "... (102 characters more)"


def test_the_reason_of_a_process_is_that_of_its_last_exception() -> None:
    def ended(program: str) -> str:
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
        return reason_in(done.stderr)

    chain = "try: {}['a']\nexcept KeyError as error: raise ValueError('two\\n  lines of\\n\\nit') from error"
    inside = "def f():\n" + "".join(f"  {line}\n" for line in chain.splitlines())
    assert ended(f"import sys; print('noise', file=sys.stderr)\n{inside}f()") == "ValueError: two lines of it"
    assert ended(chain) == "ValueError: two lines of it"
    assert ended("def f(:") == "SyntaxError: invalid syntax"
    assert ended("import sys; print('noise', file=sys.stderr); sys.exit('told')") == "told"
    assert ended("import os; os._exit(3)") == ""


def test_the_reason_of_a_config_that_cannot_be_is_in_the_message(tmp_path: Path) -> None:
    tiny.model("mixtral").save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    file.write_text(file.read_text().replace('"output_router_logits": false', '"output_router_logits": "yes"'))
    with pytest.raises(BadInputError, match=r"'output_router_logits': TypeError: Field .* \(value: 'yes'\)\)$"):
        inspect_checkpoint(tmp_path)


def test_the_whole_refusal_of_a_chat_template_is_said() -> None:
    class Tokenizer:
        def apply_chat_template(self, *_: object, **__: object) -> str:
            raise ValueError("A system turn\nmust come first, " + "and " * 60 + "never later")

    with limited_template(Tokenizer()) as template, pytest.raises(BadInputError, match=r"turn must .* never later$"):
        chat_text(template, [], "model")


def test_a_mismatch_of_several_tensors_is_said_in_full() -> None:
    model = nn.Linear(4, 4)
    with pytest.raises(RuntimeError) as caught:
        model.load_state_dict({"weight": torch.zeros(2, 4), "bias": torch.zeros(2)})
    assert reason_of(caught.value).count("size mismatch") == 2
