"""Paired statistics against simulation, verdicts, tables."""

import json
import math
import random

import numpy as np
import pytest

from fcsd.errors import ConfigError, VerdictError
from fcsd.eval.compare import NO, UNDECIDED, YES, Difference, Requirement, compare_models, not_above_chance
from fcsd.eval.statistics import estimate, paired_difference, share_recovered, spread
from fcsd.eval.tables import answer_table, difference_table, plain_table, report, table_1


def test_stderr_of_a_mean_is_the_usual_one():
    items = [1.0, 0.0, 0.0, 1.0, 1.0]
    value, stderr = estimate(items)
    assert value == 0.6
    assert stderr == pytest.approx(math.sqrt(0.3 / 5))
    assert math.isnan(estimate([1.0])[1])


def test_some_questions_of_many_are_spread_evenly():
    assert spread(10, None) == spread(10, 10) == spread(10, 99) == list(range(10))
    for total, limit in ((10, 3), (10, 7), (10042, 1000)):
        chosen = spread(total, limit)
        assert len(set(chosen)) == limit and chosen == sorted(chosen) and chosen[-1] < total
        steps = {after - before for before, after in zip(chosen, [*chosen[1:], total], strict=True)}
        assert max(steps) - min(steps) <= 1


def test_standard_errors_describe_repeated_experiments():
    """Draw many data sets; the spread of each estimate is what its standard error says."""
    rng = random.Random(0)

    def draw() -> tuple[list, list, list]:
        teacher, untrained, student = [], [], []
        for _ in range(80):
            tokens, hard = rng.randint(5, 40), rng.gauss(0, 0.5)
            teacher.append((tokens * (2.0 + hard + rng.gauss(0, 0.1)), tokens))
            untrained.append((tokens * (4.0 + hard + rng.gauss(0, 0.3)), tokens))
            student.append((tokens * (2.2 + hard + rng.gauss(0, 0.1)), tokens))
        return student, teacher, untrained

    functions = (
        lambda s, t, u: estimate(s),
        lambda s, t, u: paired_difference(s, t),
        lambda s, t, u: share_recovered(s, t, u),
    )
    for function, truth in zip(functions, (2.2, 0.2, 0.9), strict=True):
        results = [function(*draw()) for _ in range(300)]
        values = [value for value, _ in results]
        mean = sum(values) / len(values)
        spread = math.sqrt(sum((v - mean) ** 2 for v in values) / (len(values) - 1))
        assert mean == pytest.approx(truth, abs=4 * spread / math.sqrt(300) + 1e-3)
        assert sum(error for _, error in results) / len(results) == pytest.approx(spread, rel=0.15)


def row(model: str, column: str, items: list, **more) -> dict:
    value, stderr = estimate(items)
    metric = "nll_per_token" if column == "Held-out loss" else "acc"
    return {
        "model": model,
        "column": column,
        "metric": metric,
        "value": value,
        "stderr": stderr,
        "n": len(items),
        "items": items,
        "baseline": model == "teacher",
        "chance": 25.0,
        "settings_sha256": "s",
        "data_sha256": "d",
        "engine": {"dtype": "float32"},
        **more,
    }


def table(n: int = 1000, drop: int = 0) -> list[dict]:
    """A teacher at 80 %, an untrained conversion at 40 %, a student that loses ``drop`` of the teacher's hits."""
    hits = int(0.8 * n)
    scores = {"teacher": hits, "untrained": n * 2 // 5, "student": hits - drop}
    rows = [row(m, c, [1.0] * h + [0.0] * (n - h)) for c in ("A", "B") for m, h in scores.items()]
    losses = {"teacher": 2.0, "untrained": 4.0, "student": 2.2}
    noise = [0.01 * (i % 7) for i in range(20)]
    return rows + [row(m, "Held-out loss", [(10 * v + e, 10) for e in noise], chance=None) for m, v in losses.items()]


def test_comparison_numbers():
    student = next(c for c in compare_models(table(drop=40), untrained="untrained") if c.model == "student")
    assert student.overall is not None and student.loss is not None
    assert [t.points for t in student.tasks] == pytest.approx([-4.0, -4.0])
    assert student.overall.points == pytest.approx(-4.0)
    assert student.overall.stderr == pytest.approx(student.tasks[0].stderr / math.sqrt(2))
    assert student.tasks[0].recovery is not None
    assert student.tasks[0].recovery[0] == pytest.approx(0.9)
    assert student.overall.recovery is not None
    assert student.overall.recovery[0] == pytest.approx(0.9)
    assert student.loss.nats == pytest.approx(0.2)
    assert student.loss.recovery is not None
    assert student.loss.recovery[0] == pytest.approx(0.9)


def test_recovery_is_measured_from_chance_where_the_untrained_model_is_below_it():
    rows = [row("teacher", "A", [1.0] * 75 + [0.0] * 25), row("untrained", "A", [1.0] * 10 + [0.0] * 90)]
    (student,) = compare_models([*rows, row("student", "A", [1.0] * 50 + [0.0] * 50)][::1], untrained="untrained")[1:]
    assert student.tasks[0].recovery is not None
    assert student.tasks[0].recovery[0] == pytest.approx(0.5)


def test_nothing_to_win_back_where_the_teacher_guesses():
    rows = [row("teacher", "A", [1.0] * 26 + [0.0] * 74), row("student", "A", [1.0] * 25 + [0.0] * 75)]
    rows.append(row("untrained", "A", [1.0] * 24 + [0.0] * 76))
    assert [c.tasks[0].recovery for c in compare_models(rows, untrained="untrained")] == [None, None]
    rows = [row(name, "A", [1.0]) for name in ("teacher", "student", "untrained")]  # the error of one answer is NaN
    assert [c.tasks[0].recovery for c in compare_models(rows, untrained="untrained")] == [None, None]


def test_nothing_is_won_back_without_an_untrained_conversion_to_compare_with():
    """An unhealed model that happens to lose nothing would have won back everything."""
    comparisons = compare_models(table())
    assert all(task.recovery is None for c in comparisons for task in (*c.tasks, c.overall, c.loss))
    assert "won back" not in difference_table(comparisons, 1.0)
    assert "won back" in difference_table(compare_models(table(), untrained="untrained"), 1.0)


def test_a_benchmark_on_which_the_baseline_guesses_is_named_and_not_counted():
    """A baseline two standard errors above chance or less; what the model does there cannot change the mean."""
    rows = [*table(drop=40), *(row(m, "C", [1.0] * 27 + [0.0] * 73) for m in ("teacher", "untrained"))]
    rows.append(row("student", "C", [1.0] * 60 + [0.0] * 40))
    student = next(c for c in compare_models(rows) if c.model == "student")
    assert [task.at_chance for task in student.tasks] == [False, False, True]
    numpy_rows = [{**result, "value": np.float64(result["value"])} for result in rows]
    assert json.dumps([found.to_json(1.0) for found in compare_models(numpy_rows)])
    assert student.overall is not None and student.overall.points == pytest.approx(-4.0)
    assert student.sentence(1.0).endswith("not counted, because teacher is not above chance: C")
    assert "+33.0 ± 4.7: at chance, not counted" in difference_table([student], 1.0)
    lines = table_1(rows).splitlines()
    assert " C* " in lines[0] and [line.split("|")[5].strip() for line in lines[2:]] == ["80.0", "40.0", "76.0"]
    guessed = [dict(result, chance=80.0) if result["chance"] else result for result in rows]
    nothing = next(c for c in compare_models(guessed) if c.model == "student")
    assert nothing.overall is None and nothing.sentence(1.0).startswith("student: teacher is not above chance")
    with pytest.raises(VerdictError, match="not above chance"):
        require("within 1.0", [nothing])


def require(text: str, comparisons: list) -> None:
    Requirement.parse(text).check(comparisons)


def test_verdicts():
    assert Difference("A", -0.2, 0.3, low=-0.8, high=0.4).verdict(1.0) == YES
    assert Difference("A", -2.0, 0.3, low=-2.6, high=-1.4).verdict(1.0) == NO
    assert Difference("A", -0.8, 0.3, low=-1.4, high=-0.2).verdict(1.0) == UNDECIDED
    few, many = compare_models(table(n=20)), compare_models(table(n=2000))
    assert few[1].tasks[0].points == 0.0 and few[1].tasks[0].verdict(1.0) == UNDECIDED
    assert many[1].tasks[0].verdict(1.0) == YES
    require("within 1.0", [many[1]])
    with pytest.raises(VerdictError, match="untrained within 1 points of teacher: no"):
        require("within 1.0", many)
    for wrong in ("about 1", "within 1.0,", "each within 3", "within 1, each within x"):
        with pytest.raises(ConfigError, match="is not understood"):
            require(wrong, many)


def questions(right: int, n: int = 1000) -> list[float]:
    return [1.0] * right + [0.0] * (n - right)


def test_a_collapsed_task_is_named_and_refused_only_where_it_is_shown():
    tasks = {"A": (800, 815), "B": (800, 815), "C": (800, 815), "D": (800, 762)}
    rows = [row("teacher", column, questions(score)) for column, (score, _) in tasks.items()]
    (student,) = compare_models(
        [*rows, *(row("student", column, questions(score)) for column, (_, score) in tasks.items())]
    )
    assert student.overall is not None and student.overall.verdict(1.0) == YES
    assert student.sentence(1.0).endswith("; further below on D (-3.8)"), "named although nobody asked for it"
    require("within 1.0", [student])
    require("within 1.0, each within 3.0", [student])  # 3.8 below, but not shown to be more than 3
    with pytest.raises(VerdictError, match=r"more than 2 points below teacher on D \(-3.8, at most -2.9\)"):
        require("within 1.0, each within 2", [student])
    many = compare_models(table(n=2000, drop=0))[1]
    assert "further below" not in many.sentence(1.0)


def test_perplexities_are_compared_in_nats_and_partial_credit_in_points():
    """A perplexity's items are (log-likelihood, words)."""
    texts = {"teacher": [(-100.0 - i % 3, 50) for i in range(30)], "student": [(-102.0 - i % 3, 50) for i in range(30)]}
    credit = {"teacher": [0.75] * 400, "student": [0.7] * 200 + [0.8] * 200}
    rows = [row(model, "PPL", items, metric="word_perplexity") for model, items in texts.items()]
    rows += [row(model, "IFEval", items) for model, items in credit.items()]
    (student,) = compare_models(rows)
    (loss,) = student.perplexities
    assert (loss.column, loss.unit) == ("PPL", "word") and loss.nats == pytest.approx(2 / 50)
    (task,) = student.tasks
    assert task.column == "IFEval" and task.points == pytest.approx(0, abs=1e-9)
    assert -3 < task.low < 0 < task.high < 3, "one point is gained and one lost in 40, as if whole answers changed"
    assert student.to_json(1.0)["perplexities"][0]["nats"] == loss.nats
    lines = difference_table([student], 1.0).splitlines()
    assert lines[-1].split("|")[1].strip() == "PPL, nats per word" and "+0.0400 ±" in lines[-1]


def test_differences_as_a_table():
    header, _, *tasks, overall, loss = difference_table(
        compare_models(table(drop=40), untrained="untrained"), 1.0
    ).splitlines()
    assert [cell.strip() for cell in header.split("|")[1:-1]] == [
        "Minus teacher",
        "untrained",
        "student",
        "won back",
    ]
    cells = [cell.strip() for cell in overall.split("|")[1:-1]]
    assert len(tasks) == 2 and cells[0] == "Avg" and cells[2].startswith("-4.0 ± 0.4: no") and "90.0 ±" in cells[3]
    cells = [cell.strip() for cell in loss.split("|")[1:-1]]
    assert cells[0] == "Held-out loss, nats per token" and cells[2].startswith("+0.2000 ±") and "90.0 ±" in cells[3]
    only_loss = [row for row in table() if row["column"] == "Held-out loss"]
    assert len(difference_table(compare_models(only_loss), 1.0).splitlines()) == 3


def test_a_benchmark_beside_the_mean_is_compared_and_not_counted():
    beside = {"chance": None, "beside": True}
    rows = table(n=2000)[3:6]
    rows += [row(m, "L", questions(n), **beside) for m, n in (("teacher", 300), ("student", 200), ("untrained", 0))]
    untrained, student = compare_models(rows, untrained="untrained")
    assert untrained.overall is not None and untrained.overall.points == pytest.approx(-40)
    assert student.overall is not None and student.overall.points == 0 and student.tasks[1].recovery is not None
    assert student.sentence(1.0).endswith("; further below on L (-10.0); beside the mean: L (-10.0 ± 0.9)")
    require("within 1.0", [student])
    with pytest.raises(VerdictError, match="more than 3 points below teacher on L"):
        require("within 1.0, each within 3", [student])
    lines = [line.split("|")[1].strip() for line in difference_table([student], 1.0).splitlines()[2:]]
    assert lines == ["B", "Avg", "L"]
    header, _, teacher, *_ = [line.split("|")[1:-1] for line in table_1(rows).splitlines()]
    assert [cell.strip() for cell in header] == ["Model", "B", "Avg", "L"] and teacher[2].strip() == "80.0"
    (alone,) = compare_models([r for r in rows if r["column"] == "L" and r["model"] != "untrained"])
    assert alone.overall is None and alone.sentence(1.0).startswith(
        "student: no benchmark that counts in the mean; fur"
    )
    with pytest.raises(VerdictError, match="no benchmark that counts in the mean"):
        require("within 1.0", [alone])


def test_a_model_that_keeps_its_score_and_rambles_is_told_of():
    lengths = {"teacher": (96.0, 0.01), "student": (210.4, 0.125)}
    rows = [
        row(m, c, questions(800), answers={"n": 1000, "tokens": t, "unended": u} if c == "G" else None)
        for c in ("A", "G")
        for m, (t, u) in lengths.items()
    ]
    (student,) = compare_models(rows)
    told = "; answers to G: 210 tokens instead of 96, 12.5 % without an end instead of 1.0 %"
    assert student.overall is not None and student.overall.points == 0 and student.sentence(1.0).endswith(told)
    (answers,) = student.to_json(1.0)["answers"]
    assert answers["column"] == "G" and (answers["tokens"], answers["baseline_unended"]) == (210.4, 0.01)
    lines = answer_table(rows).splitlines()
    assert len(lines) == 3 and "96 tokens, 1.0 % without an end" in lines[2] and "210 tokens, 12.5 %" in lines[2]
    assert answer_table(table()) == "" and "answers to" not in compare_models(table())[0].sentence(1.0)


def test_few_answers_do_not_show_that_a_baseline_is_above_chance():
    """They have no spread if all are right, and one answer has no standard error at all."""
    for right, chance in ((1, 0.0), (1, 25.0), (2, 50.0), (3, 50.0)):
        assert not_above_chance(row("teacher", "A", [1.0] * right, chance=chance)) is True
    assert not_above_chance(row("teacher", "A", [1.0] * 9, chance=50.0)) is False
    assert not_above_chance(row("teacher", "A", [1.0, 0.0, 0.0], chance=None)) is False


def test_unequal_evaluations_are_not_compared():
    for change in ({"data_sha256": "x"}, {"settings_sha256": "x"}, {"engine": {"dtype": "bfloat16"}}):
        rows = [row("teacher", "A", [1.0, 0.0]), row("student", "A", [1.0, 0.0], **change)]
        with pytest.raises(ConfigError, match="differ in"):
            compare_models(rows)
    with pytest.raises(ConfigError, match="same tasks"):
        compare_models([row("teacher", "A", [1.0]), row("student", "B", [1.0])])
    with pytest.raises(ConfigError, match="no baseline"):
        compare_models([row("student", "B", [1.0])])
    with pytest.raises(ConfigError, match="no model 'x'"):
        compare_models(table(), untrained="x")


def test_report_writes_tables_and_a_picture(tmp_path):
    rows = table(drop=40)
    comparisons = compare_models(rows, untrained="untrained")
    report(rows, tmp_path, comparisons)
    assert "| teacher   | 80.0 | 80.0 | 80.0 | 2.003         |" in table_1(rows)
    text = plain_table(rows)
    assert "| A             | acc           | 1000 | 80.0 ± 1.3" in text
    written = (tmp_path / "table.md").read_text()
    assert "student within 1 points of teacher: no" in written
    assert difference_table(comparisons, 1.0) in written
    assert (tmp_path / "bars.png").read_bytes().startswith(b"\x89PNG")
