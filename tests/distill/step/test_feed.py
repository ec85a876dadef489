"""Micro-batches prepared ahead: the same ones in the same order as without a thread, and none of it outlives a run."""

import threading
from pathlib import Path
from typing import Any

import pytest
import ranks
import runs
import texts
import torch

from fcsd.config import Recipe
from fcsd.distill import loop, prepare
from fcsd.distill.data.corpus import load_corpus
from fcsd.distill.data.of_run import training_rows
from fcsd.distill.data.rows import Mixture
from fcsd.distill.metrics import Meter
from fcsd.distill.run.report import read_metrics
from fcsd.distill.step import feed as feed_module
from fcsd.distill.step.feed import MicroBatch, feeding, gather_step, rows_of_step
from fcsd.distill.step.one_step import Readback, train_step
from fcsd.errors import BadInputError
from fcsd.launch.world import World


def text_of(folder: Path, **changes: Any) -> tuple[Recipe, Mixture]:
    recipe = runs.resolved(folder, **changes).recipe
    return recipe, training_rows(recipe, [load_corpus(recipe.data.sources[0], texts.tokenizer(), 256)])


def tensors(micros: list[MicroBatch]) -> list[Any]:
    return [(m.rows, m.counted.item(), {name: column.tolist() for name, column in m.columns.items()}) for m in micros]


@pytest.mark.parametrize("size", [1, 2, 4])
def test_the_ranks_share_the_micro_batches_of_a_step_which_are_those_of_one(folder: Path, size: int) -> None:
    recipe, step = runs.resolved(folder, train__micro_batch_size=2).recipe, 3
    of_ranks = [rows_of_step(recipe, World(rank, size, torch.device("cpu")), step) for rank in range(size)]
    whole = recipe.rows_per_step
    starts = range(2 * whole, 3 * whole, 2)
    assert sorted(list(rows) for micros in of_ranks for rows in micros) == [[start, start + 1] for start in starts]


@pytest.mark.parametrize("first", [1, 3])
def test_a_feed_gives_the_rows_of_each_step_in_order(folder: Path, first: int) -> None:
    recipe, rows = text_of(folder)
    for rank in range(2):
        world = World(rank, 2, torch.device("cpu"))
        with feeding(rows, recipe, world, first, 4) as feed:
            for step in range(first, 5):
                assert tensors(feed.take()) == tensors(gather_step(rows, recipe, world, step))
        assert feed.waited > 0


def test_an_error_of_the_thread_is_raised_at_the_step_that_needs_the_data(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe, rows = text_of(folder)
    before = threading.active_count()
    real = feed_module.batch

    def damaged(rows: Any, numbers: Any, *others: Any) -> Any:
        if 16 in numbers:
            raise BadInputError("row 16 is damaged")
        return real(rows, numbers, *others)

    monkeypatch.setattr(feed_module, "batch", damaged)
    with feeding(rows, recipe, World(0, 1, torch.device("cpu")), 1, 4) as feed:
        feed.take()
        feed.take()
        with pytest.raises(BadInputError, match="row 16 is damaged"):
            feed.take()
    assert threading.active_count() == before


def test_a_run_that_ends_early_leaves_no_thread(folder: Path) -> None:
    recipe, rows = text_of(folder)
    before = threading.active_count()
    world = World(0, 1, torch.device("cpu"))
    with pytest.raises(KeyboardInterrupt), feeding(rows, recipe, world, 1, 4):
        raise KeyboardInterrupt
    assert threading.active_count() == before


def in_one_thread(resolved: Any) -> tuple[list[dict[str, float]], dict[str, torch.Tensor]]:
    """Metrics and weights of a run whose steps are taken one by one, each awaited before the next."""
    run = prepare.prepare_run(resolved, "auto", World(0, 1, torch.device("cpu")))
    steps = range(run.done + 1, run.recipe.train.steps + 1)
    metrics = [train_step(run.training, run.rows, run.recipe, run.world, step) for step in steps]
    return metrics, {name: tensor.clone() for name, tensor in run.student.state_dict().items()}


def joined(resolved: Any) -> Any:
    from fcsd.launch.world import join_world

    join_world()
    Path(resolved.recipe.output_dir).mkdir()
    return in_one_thread(resolved)


def trained(resolved: Any) -> Any:
    """The weights at the end of a run as users start it."""
    found = {}
    real = loop.publish_model

    def publish(run: Any, tools: Any) -> None:
        found.update({name: tensor.clone() for name, tensor in run.student.state_dict().items()})
        real(run, tools)

    loop.publish_model = publish
    loop.distill_model(resolved)
    return found


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_steps_judged_later_are_those_of_the_plain_loop_bit_for_bit(folder: Path, tmp_path: Path, dtype: str) -> None:
    """Steps 2, 3 and 5 are judged after the next one was launched."""
    changes = {"train__steps": 6, "train__log_every": 4, "checkpoint__every_steps": 0, "train__dtype": dtype}
    (reference,) = ranks.on_ranks(1, joined, runs.resolved(folder, output_dir=str(tmp_path / "plain"), **changes))
    (weights,) = ranks.on_ranks(1, trained, runs.resolved(folder, output_dir=str(tmp_path / "run"), **changes))
    metrics = read_metrics(tmp_path / "run")
    assert [line["step"] for line in metrics] == [1, 4, 6]
    for line in metrics:
        expected = reference[0][line["step"] - 1]
        assert {name: line[name].hex() for name in expected} == {name: x.hex() for name, x in expected.items()}
        assert 0 <= line["data_wait"] <= 1
    assert weights.keys() == reference[1].keys()
    assert all(torch.equal(weights[name], reference[1][name]) for name in weights)


def test_numbers_come_back_by_name_and_exactly() -> None:
    tenth = torch.tensor(0.1)
    found = Readback({"a": tenth, "known": 0.1, "b": torch.tensor(7), "bad": torch.tensor(torch.inf)}).wait()
    assert found == {"a": tenth.item(), "known": 0.1, "b": 7.0, "bad": float("inf")}
    assert list(found) == ["a", "known", "b", "bad"]


def test_numbers_are_read_when_their_copy_has_ended() -> None:
    readback: Any = Readback({"a": torch.tensor(0.0)})

    class Copied:
        """The event behind a copy that ends while the host waits for it."""

        def synchronize(self) -> None:
            readback._host.fill_(0.5)

    readback._copied = Copied()
    assert readback.wait() == {"a": 0.5}


def test_waiting_for_data_is_said_once(folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    recipe, _ = text_of(folder)
    world = World(0, 1, torch.device("cpu"))
    feed: Any = type("Late", (), {"waited": 0.0})()
    meter = Meter(tmp_path, recipe, world, world, 0, feed)
    shares = []
    for step in range(1, 5):
        meter._seconds += 10.0
        feed.waited += 5.0 if step != 2 else 0.0
        shares.append(meter.read(step)["data_wait"])
    assert shares == [0.5, 0.0, 0.5, 0.5]
    assert capfd.readouterr().err.count("50.0% of the time of the last steps was spent waiting for data") == 1
