"""A score in the middle of training: the same on all ranks and as outside, and training never notices."""

import hashlib
import random
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import eval_data
import numpy
import ranks
import torch

from fcsd.config import EarlyStop
from fcsd.errors import FcsdError
from fcsd.eval.code import evalplus_tasks, judge
from fcsd.eval.early_score import Score, score, scorer
from fcsd.eval.harness import Loaded, evaluate_models
from fcsd.models.build import load_model

TASK = {"task": "HEval+", "limit": 2}  # the bundled teacher solves these; its MBPP+ answers would take minutes


def teacher(repo: Path) -> tuple[Any, Any]:
    from transformers import AutoConfig, AutoTokenizer

    directory = repo / "assets/teacher"
    config = AutoConfig.from_pretrained(directory, attention_dropout=0.1)  # so that training draws random numbers
    return load_model(directory, dtype=torch.float32, config=config), AutoTokenizer.from_pretrained(directory)


def fingerprint(engine: Any) -> str:
    """Weights, optimizer state, random number generators and the mode of every module, as this rank has them."""
    digest = hashlib.sha256()
    weights = [getattr(weight, "ds_tensor", weight) for weight in engine.module.state_dict(keep_vars=True).values()]
    for tensor in [*weights, torch.get_rng_state()]:
        digest.update(tensor.detach().contiguous().numpy().tobytes())
    state = engine.optimizer.optimizer.state
    digest.update(repr([float(v.double().sum()) for s in state.values() for v in s.values()]).encode())
    digest.update(repr([random.getstate(), numpy.random.get_state()[1].tolist()]).encode())
    digest.update(repr([module.training for module in engine.module.modules()]).encode())
    return digest.hexdigest()


def train(rank: int, repo: Path, stage: int, scored: bool) -> tuple[str, list[Score]]:
    import deepspeed

    model, tokenizer = teacher(repo)
    model.train().get_decoder().layers[2].eval()
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-5, "torch_adam": True}},
    }
    engine, *_ = deepspeed.initialize(model=model, model_parameters=list(model.parameters()), config=config)
    for generator in (torch.manual_seed, random.seed, numpy.random.seed):
        generator(rank + 1)
    scores = []
    for step in range(1, 4):
        ids = torch.randint(3, 2000, (2, 16))
        engine.backward(engine(input_ids=ids, labels=ids).loss)
        engine.step()
        if scored and step == 2:
            scores.append(score(engine.module, tokenizer, step, None, data_mirror=repo / "assets/mirror", **TASK))
    return fingerprint(engine), scores


def both(rank: int, repo: Path) -> dict[str, Any]:
    """What ZeRO-3 does, whose weights no rank has as a whole."""
    evalplus_tasks.MAX_NEW_TOKENS = 64
    without, _ = train(rank, repo, stage=3, scored=False)
    with_, scores = train(rank, repo, stage=3, scored=True)
    return {"without": without, "with": with_, "scores": scores, "error": broken_scorer(rank, repo)}


def broken_scorer(rank: int, repo: Path) -> list[tuple[str, float]]:
    """What a rank is told, and after how many seconds, when the process that judges programs is killed or hangs."""
    evalplus_tasks.MAX_NEW_TOKENS = 1  # what it is asked to judge does not matter
    model, tokenizer = teacher(repo)
    real, told = subprocess.Popen, []
    for number, silence in ((9, 12.0), (19, 1.0)):  # on a loaded machine a healthy process may be silent for seconds
        judge.SILENCE_S, ill = silence, f"import os; os.kill(os.getpid(), {number})"
        patient = [sys.executable, "-c", ill]
        subprocess.Popen = lambda command, patient=patient, **more: real(
            patient if "fcsd.eval.code.judge_worker" in command else command, **more
        )
        began = time.monotonic()
        try:
            score(model, tokenizer, 1, None, data_mirror=repo / "assets/mirror", **TASK)
        except FcsdError as error:
            told.append((str(error), time.monotonic() - began))
        finally:
            subprocess.Popen = real
    return told


def test_training_is_the_same_to_the_last_bit_and_every_rank_knows_the_score(repo, monkeypatch):
    first, second = ranks.in_group(2, both, repo)
    assert first["with"] == first["without"] and second["with"] == second["without"]
    assert first["with"] != second["with"], "the ranks have random numbers of their own"
    assert first["scores"] == second["scores"] == [Score(1.0, 0.0, 2)]
    assert first["error"][0][0] == second["error"][0][0] and first["error"][1][0] == second["error"][1][0]
    for killed, stopped in (first["error"], second["error"]):
        assert "the judging process failed twice: status -9" in killed[0]
        assert "the judging process failed twice: it sent nothing for 1 s" in stopped[0]
    patience = judge.ATTEMPTS * judge.SILENCE_S
    assert patience < 30 and judge.BEAT_S < judge.SILENCE_S / 4

    monkeypatch.setattr(evalplus_tasks, "MAX_NEW_TOKENS", 64)
    model, tokenizer = teacher(repo)
    alone = score(model, tokenizer, 0, None, data_mirror=repo / "assets/mirror", **TASK)
    (row,) = evaluate_models(
        [Loaded("x", model, tokenizer)],
        suite="strict",
        tasks=["HEval+"],
        limit=2,
        data_mirror=repo / "assets/mirror",
    )
    assert alone == Score(row["value"], row["stderr"], row["n"]) == Score(1.0, 0.0, 2)


def test_a_scorer_knows_what_it_asks_wherever_it_lies(tmp_path: Path) -> None:
    def questions(folder: str, seed: int) -> str | None:
        mirror = eval_data.write_mirror(tmp_path / folder, seed=seed)
        made = scorer(EarlyStop(metric="GSM-8K", suite="paper", data_mirror=str(mirror)))
        assert made is not None
        return made.questions

    first = questions("a", 0)
    assert first is not None and questions("moved", 0) == first
    assert questions("b", 1) != first
