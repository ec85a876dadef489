"""A rewired model that another tool saves keeps its guard: loaded anywhere, it is itself or it is refused.

Every directory is loaded by transformers in a process of its own, where fcsd can be imported and where it cannot.
``tests/models/test_build.py`` and ``tests/models/test_export_template.py`` do so in processes that import all anew.
"""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import tiny
import torch
from reloads import fork_reloads, run_script
from transformers import LlamaForCausalLM

from fcsd.convert import convert_checkpoint
from fcsd.errors import ConfigError
from fcsd.export.final import export_model
from fcsd.models.build import load_model, unwired, wire
from fcsd.models.config_keys import REFUSAL, WEIGHTS_FILE
from fcsd.models.export_template import CODE_FILES
from fcsd.models.wiring_block import Wiring

LADDER = Wiring("ladder", (1, 2, 3))
IDS = torch.arange(3, 19).unsqueeze(0)

# Arguments: with or without fcsd, a directory, a file for the logits and, if it is given, a directory to save to.
PROGRAM = """
import json, sys
from typing import Any
how, directory, out, *save = sys.argv[1:]
if how == "without":
    sys.modules["fcsd"] = None
else:
    import fcsd
import torch, transformers
trusted = {"trust_remote_code": True} if how == "without" else {}
model = transformers.AutoModelForCausalLM.from_pretrained(directory, **trusted).eval()
with torch.no_grad():
    torch.save(model(torch.arange(3, 19).unsqueeze(0)).logits, out)
for place in save:
    model.save_pretrained(place)
try:
    transformers.LlamaForCausalLM.from_pretrained(directory)
except Exception as error:
    print("refused:", error)
"""


@pytest.fixture(scope="module")
def converted(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("saved")
    tiny.model("llama", initializer_range=0.1).save_pretrained(folder / "base")
    convert_checkpoint(folder / "base", folder / "converted", wiring="ladder", layers="1-3")
    return folder / "converted"


def in_own_process(how: str, directory: Path, tmp_path: Path, *save: Path) -> torch.Tensor:
    """The logits of a directory as a process of its own loads it, in which transformers' own class refuses it."""
    out, program = tmp_path / "logits.pt", tmp_path / "program.py"
    program.write_text(PROGRAM)
    argv = [str(word) for word in (program, how, directory, out, *save)]
    code, _, said = run_script(argv, tmp_path, str(tmp_path / "modules"))
    assert code == 0, said
    assert re.search(rf"^refused:.*{re.escape(REFUSAL)}", said, re.MULTILINE)
    return torch.load(out)


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(IDS).logits


def trained(model: Any) -> Any:
    return model


def merged(model: Any) -> Any:
    """An adapter of PEFT, merged."""
    adapted: Any = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False))
    return adapted.merge_and_unload()


@pytest.mark.parametrize("tool", [trained, merged])
def test_what_is_saved_with_fcsd_loads_anywhere(converted: Path, tmp_path: Path, tool: Callable[[Any], Any]) -> None:
    model = tool(load_model(converted))
    model.save_pretrained(tmp_path / "saved")
    raw = json.loads((tmp_path / "saved" / "config.json").read_text())
    assert raw[WEIGHTS_FILE] == REFUSAL and raw["fcsd"]["wiring"] == "ladder"
    assert {file.name for file in (tmp_path / "saved").glob("*.py")} == CODE_FILES
    for how in ("with", "without"):
        assert torch.equal(in_own_process(how, tmp_path / "saved", tmp_path), logits(model))


def test_what_is_saved_without_fcsd_loads_anywhere(
    converted: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fork_reloads(monkeypatch)
    export_model(converted, tmp_path / "export")
    expected = in_own_process("without", tmp_path / "export", tmp_path, tmp_path / "saved")
    for how in ("with", "without"):
        assert torch.equal(in_own_process(how, tmp_path / "saved", tmp_path), expected)


def test_a_wiring_made_in_memory_is_not_saved_as_if_it_were_none(tmp_path: Path) -> None:
    model: Any = tiny.model("llama")
    wire(model, LADDER)
    with pytest.raises(ConfigError, match="was rewired in memory") as caught:
        model.save_pretrained(tmp_path / "saved")
    assert "`fcsd export`" in str(caught.value.hint)
    assert not (tmp_path / "saved").exists()
    wire(model, unwired())
    model.save_pretrained(tmp_path / "saved")
    assert torch.equal(logits(LlamaForCausalLM.from_pretrained(tmp_path / "saved")), logits(model))


def test_another_wiring_than_that_of_the_config_is_not_saved(converted: Path, tmp_path: Path) -> None:
    model = load_model(converted)
    wire(model, unwired())
    with pytest.raises(ConfigError, match="was rewired in memory"):
        model.save_pretrained(tmp_path / "saved")
    wire(model, LADDER)
    model.save_pretrained(tmp_path / "saved")
    assert torch.equal(logits(load_model(tmp_path / "saved")), logits(model))
