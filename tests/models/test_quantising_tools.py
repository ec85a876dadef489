"""Quantising tools on a rewired model: those that call its layers one by one are refused, with the reason.

Run by hand or at night where a tool is installed: none of them goes with the transformers that constraints.txt pins.
"""

from pathlib import Path

import pytest
import tiny
import transformers
from tokenizers import Tokenizer, models

from fcsd.models.archs import ARCHS
from fcsd.models.build import converted_config, model_classes
from fcsd.models.export_template import render
from fcsd.models.wiring import Wiring

pytestmark = pytest.mark.nightly
REFUSED = "got one tensor without the (streams|residuals of ranks)"
WIRINGS = [
    pytest.param(Wiring("ladder", (0, 1, 2, 3)), id="ladder"),
    pytest.param(Wiring("farskip", (1, 2, 3)), id="farskip"),
    pytest.param(Wiring("desync-4x", (0, 1, 2, 3), tp_degree=2), id="desync"),
]


def saved(wiring: Wiring, out: Path) -> Path:
    """A tiny rewired llama with its code and a tokenizer, as anyone would load it."""
    base = tiny.model("llama")
    config = converted_config(base.config, wiring.to_block())
    config.auto_map = ARCHS["llama"].auto_map
    model = model_classes("llama")["AutoModelForCausalLM"](config)
    model.load_state_dict(base.state_dict())
    model.save_pretrained(out)
    words = {f"<{n}>": n for n in range(tiny.VOCAB)}
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(words, unk_token="<3>"))
    )
    tokenizer.pad_token, tokenizer.eos_token = "<0>", "<2>"
    tokenizer.save_pretrained(out)
    for name, text in render(ARCHS["llama"]).items():
        (out / name).write_text(text)
    return out


@pytest.mark.parametrize("wiring", WIRINGS)
def test_auto_round(wiring: Wiring, tmp_path: Path) -> None:
    auto_round = pytest.importorskip("auto_round", reason="pip install --target DIR auto-round")
    folder = saved(wiring, tmp_path)
    rounding = auto_round.AutoRound(
        transformers.AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True),
        tokenizer=transformers.AutoTokenizer.from_pretrained(folder),
        scheme="W4A16",
        group_size=32,
        iters=1,
        nsamples=4,
        seqlen=48,
        batch_size=4,
        dataset=[{"input_ids": tiny.tokens(1, 48, seed)} for seed in range(4)],
        device_map="cpu",
        enable_torch_compile=False,
    )
    with pytest.raises(ValueError, match=REFUSED):
        rounding.quantize()


@pytest.mark.parametrize("wiring", WIRINGS)
def test_gptqmodel(wiring: Wiring, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GPTQMODEL_CPU_WORKERS", "2")  # of which it demands two, whatever the machine has
    gptqmodel = pytest.importorskip("gptqmodel", reason="pip install --target DIR gptqmodel")
    how = gptqmodel.QuantizeConfig(bits=4, group_size=32)
    model = gptqmodel.GPTQModel.load(str(saved(wiring, tmp_path)), how, trust_remote_code=True, backend="torch")
    rows = [{"input_ids": tiny.tokens(1, 48, seed)[0].tolist(), "attention_mask": [1] * 48} for seed in range(4)]
    with pytest.raises(ValueError, match=REFUSED):
        model.quantize(rows, batch_size=4)
