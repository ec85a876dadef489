"""The suites of benchmarks with all their settings. Each suite is a tuple of benchmarks, or a YAML file of a user's.

``paper`` is the setting that best explains the original-model rows of FarSkip Table 1 (arXiv 2511.11505 states
neither harness nor shots): lm-eval, raw prompts without chat template, zero-shot multiple choice, 5-shot
GSM8K. Whether its MMLU had 0 or 5 shots is not known. ``strict`` differs in the code tasks: EvalPlus, base and
plus tests. ``quickstart`` is what a laptop can do with the bundled model.

``ladder`` follows Ladder-Residual (arXiv 2501.06589) section 4.2: accuracy on MMLU and ARC-C, normalised accuracy on
OpenBookQA and HellaSwag, and aggregated accuracy on IFEval, here the mean of lm-eval's four accuracies. For
TruthfulQA the section names normalised accuracy on mc1, which lm-eval does not define; the suite takes mc1's accuracy.
``pretrain-ladder`` follows section 4.1, and ``pretrain-farskip`` FarSkip appendix A.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fcsd.errors import ConfigError, unknown_value

LM_EVAL = "lm_eval"
EVALPLUS = "evalplus"
# Generated programs are lm-eval's prompts and checks, run in fcsd's own sandbox.
SANDBOX = "lm_eval+sandbox"


@dataclass(frozen=True)
class Benchmark:
    """One column of a table of scores, and all settings that its scores depend on.

    Attributes:
        column: the heading, as in Table 1.
        harness: the library that defines prompt and scoring.
        task: the name of the task or group in that harness.
        directory: where lm-eval keeps the task, below its ``tasks`` directory; empty for a task that no suite has.
        version: the task version these settings were chosen for; another installed version is refused.
        shots: examples in the prompt; None for as many as the task's own definition says.
        metric: the reported metric; empty until the definition of a task that no suite has is read.
        filter: lm-eval's filter, which extracts the answer from the model's text; empty as long as ``metric``.
        chat: whether the tokenizer's chat template wraps the prompt.
        generation: settings that override the task's own (``max_gen_toks``); None for none.
        chance: the score of guessing, in points; None where the metric has no such level, or where the questions
            say it by the number of their choices.
        beside: whether the score stands beside the mean over the tasks.
        loss: a metric of lm-eval's that logs the log-likelihood of the right answer, which becomes a second result;
            empty for none.
    """

    column: str
    harness: str
    task: str
    directory: str
    version: float | str | None
    shots: int | None
    metric: str
    filter: str = "none"
    chat: bool = False
    generation: dict[str, int] | None = None
    chance: float | None = None
    beside: bool = False
    loss: str = ""

    @property
    def settings(self) -> dict[str, Any]:
        """What a result records of these fields as its settings."""
        names = ("harness", "task", "version", "shots", "metric", "filter", "chat", "generation")
        return {name: getattr(self, name) for name in names}


def _lm(column: str, task: str, directory: str, version: float | None, metric: str, **more) -> Benchmark:
    return Benchmark(column, LM_EVAL, task, directory, version, more.pop("shots", 0), metric, **more)


PIQA = _lm("PIQA", "piqa", "piqa", 1.0, "acc_norm", chance=50.0)
ARC_E = _lm("ARC-E", "arc_easy", "arc", 1.0, "acc_norm", chance=25.0)
ARC_C = _lm("ARC-C", "arc_challenge", "arc", 1.0, "acc_norm", chance=25.0)
HS = _lm("HS", "hellaswag", "hellaswag", 1.0, "acc_norm", chance=25.0)
CSQA = _lm("CSQa", "commonsense_qa", "commonsense_qa", None, "acc", chance=20.0)
WG = _lm("WG", "winogrande", "winogrande", 1.0, "acc", chance=50.0)
MMLU = _lm("MMLU", "mmlu", "mmlu/default", 2, "acc", chance=25.0)
OBOOK = _lm("OBook", "openbookqa", "openbookqa", 1.0, "acc_norm", chance=25.0)
GSM8K = _lm("GSM-8K", "gsm8k", "gsm8k", 3.0, "exact_match", filter="strict-match", shots=5, chance=0.0)
HEVAL = Benchmark("HEval+", SANDBOX, "humaneval_plus", "humaneval", 1.0, 0, "pass@1", "create_test", chance=0.0)
# The published MBPP+ numbers fit lm-eval's task, which scores the three base asserts and not the plus tests.
MBPP = Benchmark("MBPP+", SANDBOX, "mbpp_plus", "mbpp", 1.0, 3, "pass_at_1", chance=0.0)

# EvalPlus numbers its data sets. Chat mode, sanitised answers, base and plus tests, a corrected rule for HumanEval/32.
HEVAL_STRICT = Benchmark("HEval+", EVALPLUS, "humaneval", "", "v0.1.10", 0, "pass@1", "plus", chat=True, chance=0.0)
MBPP_STRICT = Benchmark("MBPP+", EVALPLUS, "mbpp", "", "v0.2.0", 0, "pass@1", "plus", chat=True, chance=0.0)

BOOLQ = _lm("BoolQ", "boolq", "super_glue/boolq", 2.0, "acc", chance=50.0)
SCIQ = _lm("SciQ", "sciq", "sciq", 1.0, "acc_norm", chance=25.0)
TRUTHFULQA = _lm("TQ", "truthfulqa_mc1", "truthfulqa", 2.0, "acc")
IFEVAL = _lm("IFEval", "ifeval", "ifeval", 4.0, "aggregated_acc", chance=0.0)  # see ifeval.py
WIKITEXT = _lm("Wikitext PPL", "wikitext", "wikitext", 2.0, "word_perplexity")

_TABLE_1 = (PIQA, ARC_E, ARC_C, HS, CSQA, WG, HEVAL, MMLU, OBOOK, GSM8K, MBPP)

# The bundled model's answers to GSM8K take at most 74 tokens, and two examples show it the form.
_SHORT = {"max_gen_toks": 96}

SUITES: dict[str, tuple[Benchmark, ...]] = {
    "paper": _TABLE_1,
    "strict": tuple({HEVAL: HEVAL_STRICT, MBPP: MBPP_STRICT}.get(benchmark, benchmark) for benchmark in _TABLE_1),
    "quickstart": (PIQA, ARC_E, ARC_C, HS, OBOOK, replace(GSM8K, shots=2, generation=_SHORT)),
    "ladder": (
        replace(MMLU, shots=5),
        replace(ARC_C, metric="acc", shots=25),
        OBOOK,
        replace(HS, shots=10),
        TRUTHFULQA,
        replace(GSM8K, shots=8),
        HEVAL_STRICT,
        IFEVAL,
    ),
    "pretrain-farskip": (ARC_C, ARC_E, BOOLQ, HS, MMLU, OBOOK, PIQA, SCIQ, WG),
    "pretrain-ladder": (ARC_C, ARC_E, HS, PIQA, SCIQ, WG, WIKITEXT),
}

# sha256 over lm-eval's task files that these settings were chosen for, by directory; where the installed ones differ,
# a warning says so and the results carry the hash of what was used.
DEFINITIONS = {
    "arc": "64c694dbb3bda5a7533653cf48b4a88192152638ed64d39a741cec111daf521e",
    "commonsense_qa": "067ad5df9e162b11dd2e96e7e8cb9583e11a17c45d8863a067c09308bb9a47ed",
    "gsm8k": "19a762bcce1152822f273a4754fe7c1dacd97a3c9f8e8cfd3c2c048cfb20765c",
    "hellaswag": "d66af7e53345271c2e8c3964066843b90f24ae68cc4eb11ee7276928c9757291",
    "humaneval": "b6d088e042bbaba69c89f6a9c07669da7c0efbd8bbd17febcaadc7554aadc7a5",
    "ifeval": "c2a24afd4c9980e517639265e00233508a193b1a78395d034d0907762f3c3b5d",
    "mbpp": "b3441728faebd1af996ded4a08ca16876810b0e9af4804cdca9d6c3ee04ca2c5",
    "mmlu/default": "cee971f6933a76f40458e550b5db9f4327548866cb5e764e30170d91a92c6fab",
    "openbookqa": "432ce499f005367e9aebb5bb702b36815a993b3c11a8cf93323395b57c110d22",
    "piqa": "8579dc0bba941b381db05439c7e3cfbaee92a959b8f95cc26c63115f1b12bba1",
    "sciq": "075fa984b162416e439f4c8399942eed0f0f80891802006eb7c6a23c33038775",
    "super_glue/boolq": "745f6b1fb389bdc5e719cf7ac1684ec70033dde0c4cdd620c425e9551b971615",
    "truthfulqa": "ce8fb03b45af91879ce6987fe1146c44285c4a84e0f43a2f49b4c5c78a7906ed",
    "wikitext": "48884247fec0001303039e80c9b88511f0a3f6755bec4551b18c850968777669",
    "winogrande": "e9e51515c7e79c3372e0f56a7cd504b3055fd68fc874e8af7f4181a78cfa55c0",
}


def select(suite: str, tasks: Sequence[str] | None = None) -> list[Benchmark]:
    """The benchmarks of a suite, all or those named by column or task (case does not matter).

    Raises:
        ConfigError: a suite or task is unknown, or a task is named twice.
    """
    rows = rows_of(suite)
    if tasks is None:
        return list(rows)
    by_name = _by_name(rows)
    unknown = [task for task in tasks if task.lower() not in by_name]
    if unknown:
        known = ", ".join(f"{benchmark.column} ({benchmark.task})" for benchmark in rows)
        raise ConfigError(f"suite {suite!r} has no task {unknown[0]!r}", f"Its tasks are: {known}")
    return _each_once([by_name[task.lower()] for task in tasks])


def select_any(
    suite: str,
    tasks: Sequence[str] | None = None,
    *,
    num_fewshot: int | None = None,
    apply_chat_template: bool | None = None,
) -> list[Benchmark]:
    """As ``select``, but a task that the suite lacks is taken from lm-eval, with the settings of its definition.

    Args:
        num_fewshot: examples in the prompt of every named task, instead of the suite's or the definition's.
        apply_chat_template: whether the tokenizer's chat template wraps the prompts of every named task.

    Raises:
        ConfigError: an unknown suite, the same task twice, other settings without named tasks, or examples for a task
            of EvalPlus, which shows none.
    """
    rows = rows_of(suite)
    if tasks is None:
        if num_fewshot is not None or apply_chat_template is not None:
            raise ConfigError(
                f"the settings of suite {suite!r} are fixed",
                "name the tasks that --num-fewshot or --apply-chat-template is for by --tasks",
            )
        return list(rows)
    by_name = _by_name(rows)
    chosen = _each_once([by_name.get(task.lower()) or _of_lm_eval(task) for task in tasks])
    changes: dict[str, Any] = {}
    if num_fewshot is not None:
        if evalplus := [benchmark.column for benchmark in chosen if benchmark.harness == EVALPLUS]:
            raise ConfigError(f"{evalplus[0]}: EvalPlus shows no examples in its prompts", "Leave out --num-fewshot.")
        changes["shots"] = num_fewshot
    if apply_chat_template is not None:
        changes["chat"] = apply_chat_template
    return [replace(benchmark, **changes) for benchmark in chosen]


def rows_of(suite: str) -> tuple[Benchmark, ...]:
    """The rows of a suite: one of ``SUITES``, or the file ``NAME.yaml`` (``suite_file.py``).

    Raises:
        ConfigError: there is no such suite or file, or the file is no suite.
    """
    if is_file(suite):
        from fcsd.eval.suite_file import read_tasks

        return tuple(
            replace(
                _of_lm_eval(task.task),
                column=task.column or task.task,
                shots=task.shots,
                metric=task.metric,
                filter=task.filter,
                chat=task.chat,
                generation=None if task.max_tokens is None else {"max_gen_toks": task.max_tokens},
                chance=task.chance,
            )
            for task in read_tasks(Path(suite))
        )
    if suite not in SUITES:
        raise unknown_value("suite", suite, SUITES)
    return SUITES[suite]


def is_file(suite: str) -> bool:
    """Whether a suite is named by its file."""
    return suite.endswith((".yaml", ".yml"))


def _by_name(rows: Sequence[Benchmark]) -> dict[str, Benchmark]:
    by_task = {benchmark.task.lower(): benchmark for benchmark in rows}
    return by_task | {benchmark.column.lower(): benchmark for benchmark in rows}


def _of_lm_eval(task: str) -> Benchmark:
    return Benchmark(
        column=task, harness=LM_EVAL, task=task, directory="", version=None, shots=None, metric="", filter=""
    )


def _each_once(benchmarks: list[Benchmark]) -> list[Benchmark]:
    names = [benchmark.column for benchmark in benchmarks]
    if not names or len(set(names)) < len(names):
        raise ConfigError("--tasks must name at least one task, and no task twice")
    return benchmarks
