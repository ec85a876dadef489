"""Processes that another launcher starts: who is missed when not all of them come, and what it has to set."""

import signal
import socket
import time
from pathlib import Path

import pytest
import runs
from ranks import fcsd, free_port
from typer.testing import CliRunner

from fcsd.cli.main import app
from fcsd.errors import ConfigError, PeerLostError
from fcsd.launch import preflight
from fcsd.launch import world as launch


def test_the_missing_rank_is_named(tmp_path: Path) -> None:
    runs.write_models(tmp_path)
    runs.resolved(tmp_path)
    where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2", "RANK": "0"}
    run = fcsd("distill", tmp_path / "recipe.yaml", "--join-timeout", "2", **where)
    assert run.returncode == 6, run.stderr
    assert "rank 1 of 2 did not come up within 2 seconds" in run.stderr and "unset WORLD_SIZE" in run.stderr
    assert not (tmp_path / "run").exists()


def test_a_meeting_place_that_is_taken_or_empty() -> None:
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        with pytest.raises(ConfigError, match="is in use"):
            preflight.meet(0, 2, "127.0.0.1", taken.getsockname()[1], serves=True, timeout=2)
    with pytest.raises(PeerLostError, match="nobody answers at"):
        preflight.meet(1, 2, "127.0.0.1", free_port(), serves=False, timeout=1)


def test_ctrl_c_ends_the_waiting() -> None:
    began = time.monotonic()
    before = signal.signal(signal.SIGALRM, signal.default_int_handler)
    for number in range(2):
        signal.setitimer(signal.ITIMER_REAL, 0.3)
        with pytest.raises(KeyboardInterrupt):
            preflight.meet(number, 2, "127.0.0.1", free_port(), serves=number == 0, timeout=60)
    signal.signal(signal.SIGALRM, before)
    assert time.monotonic() - began < 50


WHOLE = {"WORLD_SIZE": "2", "RANK": "1", "MASTER_ADDR": "here", "MASTER_PORT": "29500"}


@pytest.mark.parametrize(
    ("left", "told"),
    [
        ({"RANK": ""}, "WORLD_SIZE=2, no RANK, MASTER_ADDR=here"),
        ({"RANK": "2"}, "RANK=2"),
        ({"MASTER_ADDR": ""}, "no MASTER_ADDR"),
        ({"MASTER_PORT": "http"}, "MASTER_PORT=http"),
        ({"WORLD_SIZE": "two"}, "WORLD_SIZE=two"),
    ],
)
def test_what_a_launcher_left_behind_is_refused_at_once(left, told, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (WHOLE | left).items():
        monkeypatch.setenv(name, value) if value else monkeypatch.delenv(name, raising=False)
    for gpus in (None, 2):
        with pytest.raises(ConfigError, match=told) as refused:
            launch.ensure_world(gpus)
        assert "unset WORLD_SIZE" in str(refused.value.hint)


def test_fewer_processes_than_asked_for_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in WHOLE.items():
        monkeypatch.setenv(name, f" {value}\n" if name == "WORLD_SIZE" else value)
    assert preflight.launched() == (1, 2) and not launch.first_rank()
    launch.ensure_world(2)
    with pytest.raises(ConfigError, match="3 processes are asked for, and WORLD_SIZE=2"):
        launch.ensure_world(3)
    monkeypatch.delenv("WORLD_SIZE")
    assert preflight.launched() == (0, 1) and launch.first_rank(), "a rank alone says nothing"
    monkeypatch.setenv("WORLD_SIZE", "1")
    for name in ("RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name)
    assert preflight.launched() == (0, 1)


def test_a_group_that_a_caller_has_made_needs_no_address(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    for name, value in {"is_initialized": True, "get_rank": 1, "get_world_size": 2}.items():
        monkeypatch.setattr(f"torch.distributed.{name}", lambda value=value: value)
    world = launch.join_world()
    assert (world.rank, world.size) == (1, 2)


def test_a_chat_in_one_process_asks_for_no_launcher(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("WORLD_SIZE", "8")
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).touch()
    alone, divided = (CliRunner().invoke(app, ["chat", str(tmp_path), *more]) for more in ([], ["--gpus", "8"]))
    assert "config.json: " in alone.stderr and "is not that of a launcher" in divided.stderr


def test_who_waits_long_says_for_whom(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(preflight, "_SAY_AFTER", 0.1)
    caplog.set_level("INFO", "fcsd")
    for number, told in ((0, "rank 1 of 2 did not come yet"), (1, "nobody answers yet at 127.0.0.1:")):
        with pytest.raises(PeerLostError):
            preflight.meet(number, 2, "127.0.0.1", free_port(), serves=number == 0, timeout=0.5)
        assert told in caplog.text and "waits up to 0.5 seconds" in caplog.text and "unset WORLD_SIZE" in caplog.text
        caplog.clear()
