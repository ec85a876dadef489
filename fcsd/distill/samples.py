"""Records answers of student and teacher to the fixed prompts of ``fcsd chat`` during training (FarSkip App. B)."""

import json
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from fcsd.config import Recipe
from fcsd.disk import read_input_text, write_text
from fcsd.distill.run.report import add
from fcsd.distill.teacher.targets import TeacherSource
from fcsd.errors import BadInputError, NonFiniteError
from fcsd.foreign_errors import reason_of
from fcsd.launch.shared_work import ALONE, Team
from fcsd.launch.world import World
from fcsd.serve.chat import PROMPTS, Speaker, answer
from fcsd.terminal import printable

SAMPLES = "samples.jsonl"


class Samples:
    """Writes ``samples.jsonl``, which holds the greedy answers to each prompt at each evaluation.

    Greedy decoding draws no random number, so samples do not change the course of a run.

    Args:
        source: has the teacher, if one is in memory. Its answers do not change and are generated once.
        start: the step from which the run continues. Samples that an earlier attempt took after it are dropped.
    """

    def __init__(
        self,
        run: Path,
        recipe: Recipe,
        world: World,
        tokenizer: PreTrainedTokenizerBase,
        student: PreTrainedModel,
        source: TeacherSource,
        start: int,
    ) -> None:
        self._path, self._world = run / SAMPLES, world
        self._tokens = 0 if recipe.train.draft_head else recipe.train.sample_tokens  # a head answers nothing alone
        # A model whose weights are divided among processes must generate on all of them at the same time.
        self._team = Team(world, lockstep=True) if recipe.parallel.ep_size > 1 else ALONE
        if recipe.parallel.tp_size > 1:
            self._team = Team(world, together_on_all=True)
        self._student = Speaker("student", student, tokenizer)
        self._source = source
        self._known: dict[str, str] = {}
        world.on_first(lambda: self._keep(start))

    def take(self, step: int) -> None:
        """Lets both models answer all prompts and appends the answers to the file. Every rank calls this."""
        if self._tokens == 0 or (self._world.rank and self._team is ALONE):
            return
        if not self._known:
            with self._source.teacher() as model:
                if model is not None:
                    teacher = Speaker("teacher", model, self._student.tokenizer)
                    self._known = {prompt: self._answer(teacher, prompt) for prompt in PROMPTS}
        lines: list[dict[str, Any]] = []
        for prompt in PROMPTS:
            line = {"step": step, "prompt": prompt, "student": self._answer(self._student, prompt)}
            lines.append(line | ({"teacher": self._known[prompt]} if self._known else {}))
        if self._world.rank == 0:
            add(self._path, "".join(printable(json.dumps(line, ensure_ascii=False)) + "\n" for line in lines))

    def _answer(self, speaker: Speaker, prompt: str) -> str:
        training = speaker.model.training
        speaker.model.eval()
        turn = [{"role": "user", "content": prompt}]
        try:
            return answer(speaker, turn, seed=None, max_new_tokens=self._tokens, team=self._team)
        except (BadInputError, NonFiniteError) as error:  # the prompt may be too long for a small model
            return f"({error})"
        finally:
            speaker.model.train(training)

    def _keep(self, start: int) -> None:
        if self._path.exists():
            try:
                *whole, _ = read_input_text(self._path).split("\n")  # a crash may have cut off the last line
                kept = [line for line in whole if json.loads(line)["step"] <= start]
            except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
                hint = "Move it away: the run goes on without its earlier samples."
                raise BadInputError(f"{self._path}: cannot be read: {reason_of(error)}", hint) from error
            write_text(self._path, "".join(f"{line}\n" for line in kept))
