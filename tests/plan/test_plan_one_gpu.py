"""The plan of one GPU counts what an update without ZeRO needs."""

from dataclasses import replace
from pathlib import Path

import tiny

from fcsd.plan import Hardware, Setup, plan_setup
from fcsd.plan.model import MetaModel


def test_one_process_updates_without_copies_of_its_gradients(tmp_path: Path) -> None:
    tiny.config("llama").save_pretrained(tmp_path)
    model = MetaModel(str(tmp_path))
    setup = Setup(world=1, micro_batch_size=2, seq_len=64, batch_tokens=512, tokens=5120)
    alone, zero = (
        {moment.name: moment for moment in plan_setup("x", model, model.numbers, each, Hardware(gpus=1)).memory.moments}
        for each in (setup, replace(setup, alone=False))
    )
    trained = model.numbers.total
    assert alone["optimizer step"].gradients == alone["gradient reduction"].gradients == 2 * trained
    assert alone["gradient reduction"].communication == 0 < zero["gradient reduction"].communication
    assert zero["optimizer step"].gradients > 3 * 2 * trained
    assert alone["optimizer step"].optimizer == zero["optimizer step"].optimizer == 12 * trained
