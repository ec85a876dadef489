"""A false "yes" is rarer than it may be, a true one is frequent enough, and few questions never give one."""

import math
from functools import cache

import numpy as np
import pytest

from fcsd.eval.bounds import ALPHA, LEFT_OUT, Counts, count, mean_bounds, mean_low, p_above, task_bounds


@cache
def says_yes(gains: int, losses: int, n: int, margin: float) -> bool:
    return p_above(gains, losses, n, -margin) <= ALPHA


def drawn(n: int, discordance: float, difference: float, trials: int, seed: int) -> np.ndarray:
    """Gains and losses ``[trials, 2]`` of a task whose true difference and discordance these are."""
    shares = [(discordance + difference) / 2, (discordance - difference) / 2, 1 - discordance]
    return np.random.default_rng(seed).multinomial(n, np.clip(shares, 0, 1), size=trials)[:, :2]


@pytest.mark.parametrize(("margin", "n"), [(0.01, 299), (0.03, 99)])
def test_how_many_questions_a_margin_needs_without_any_disagreement(margin: float, n: int) -> None:
    """The chance to see no loss among n questions of which a share of ``margin`` is lost is (1 - margin)^n."""
    assert (1 - margin) ** n <= ALPHA < (1 - margin) ** (n - 1)
    assert task_bounds(Counts(0, 0, n))[0] >= -margin > task_bounds(Counts(0, 0, n - 1))[0]


@pytest.mark.parametrize("n", [5, 30])
@pytest.mark.parametrize("margin", [0.01, 0.03, 0.1])
def test_the_risk_of_a_false_yes_by_every_possible_outcome(n: int, margin: float) -> None:
    """At the margin itself, where a "yes" is only just false, for any discordance."""
    outcomes = [(g, k) for g in range(n + 1) for k in range(n + 1 - g) if says_yes(g, k, n, margin)]
    for discordance in (margin, 1.5 * margin, 0.05, 0.1, 0.2, 0.4, 0.7, 1.0):
        if discordance < margin:
            continue
        gained, lost = (discordance - margin) / 2, (discordance + margin) / 2
        risk = sum(
            math.comb(n, g) * math.comb(n - g, k) * gained**g * lost**k * max(0.0, 1 - gained - lost) ** (n - g - k)
            for g, k in outcomes
        )
        assert risk <= ALPHA


@pytest.mark.parametrize("n", [165, 300])
@pytest.mark.parametrize("discordance", [0.012, 0.05, 0.15])
def test_the_risk_of_a_false_yes_where_it_was_13_to_20_percent(n: int, discordance: float) -> None:
    outcomes = drawn(n, discordance, -0.01, trials=3000, seed=n)
    assert np.mean([says_yes(int(g), int(k), n, 0.01) for g, k in outcomes]) <= 0.06


def test_power() -> None:
    """Two equal models that disagree on 5 % of 1000 questions are found to be within 2 points."""
    outcomes = drawn(1000, 0.05, 0.0, trials=400, seed=0)
    assert np.mean([says_yes(int(g), int(k), 1000, 0.02) for g, k in outcomes]) >= 0.8


def test_five_questions_never_give_a_yes_nor_a_no_within_few_points() -> None:
    for gains in range(6):
        for losses in range(6 - gains):
            low, high = task_bounds(Counts(gains, losses, 5))
            assert low < -0.03 or gains > losses
            assert high > 0.03 or losses > gains
    low, high = mean_bounds([Counts(0, 0, 5)] * 2)
    assert low < -0.2 and high > 0.2


def slow_p(gains: int, losses: int, n: int, level: float) -> float:
    """``p_above`` by its definition: over every outcome and a fine grid of all discordances, none left out."""

    def statistic(g: int, k: int) -> float:
        """Tango's, with the most likely share of losses found by search."""
        lost = np.linspace(max(0, -level), (1 - level) / 2, 20001)[1:-1]
        with np.errstate(divide="ignore", invalid="ignore"):
            terms = [np.where(number > 0, number * np.log(p), 0) for number, p in ((g, lost + level), (k, lost))]
            likelihood = sum(terms) + (n - g - k) * np.log(1 - 2 * lost - level)
        best = lost[np.argmax(likelihood)]
        return (g - k - n * level) / math.sqrt(n * (2 * best + level - level**2))

    every = [(g, k) for g in range(n + 1) for k in range(n + 1 - g)]
    seen = statistic(gains, losses)
    extreme = [(g, k) for g, k in every if statistic(g, k) >= seen - 1e-3]
    worst = 0.0
    for discordance in np.linspace(abs(level), 1, 400):
        a, b = (discordance + level) / 2, (discordance - level) / 2
        probability = sum(
            math.comb(n, g) * math.comb(n - g, k) * a**g * b**k * max(0.0, 1 - a - b) ** (n - g - k) for g, k in extreme
        )
        worst = max(worst, probability)
    return worst


@pytest.mark.parametrize(("gains", "losses", "level"), [(0, 0, -0.1), (2, 1, -0.2), (1, 3, -0.5), (6, 0, 0.1)])
def test_the_exact_p_value_is_that_of_its_definition(gains: int, losses: int, level: float) -> None:
    slow = slow_p(gains, losses, 12, level)
    assert p_above(gains, losses, 12, level) <= slow + LEFT_OUT + 1e-3
    assert p_above(gains, losses, 12, level) >= 0.6 * slow, "the interval of discordances left much out"


def test_no_p_value_is_below_what_its_interval_of_discordances_may_leave_out() -> None:
    """The interval holds the true discordance with this confidence only, so no outcome says more than that."""
    for gains, level in ((12, -0.9), (11, -0.95)):
        assert LEFT_OUT <= p_above(gains, 0, 12, level) < 1.01 * LEFT_OUT


def test_bounds_of_the_exchanged_models_are_the_negative_ones() -> None:
    for counts in (Counts(3, 7, 60), Counts(0, 4, 30), Counts(12, 2, 40)):
        low, high = task_bounds(counts)
        assert (-high, -low) == pytest.approx(task_bounds(Counts(counts.losses, counts.gains, counts.n)))
        assert low < (counts.gains - counts.losses) / counts.n < high
    several = [Counts(3, 7, 60), Counts(0, 4, 30)]
    low, high = mean_bounds(several)
    assert (-high, -low) == pytest.approx(mean_bounds([Counts(c.losses, c.gains, c.n) for c in several]))
    assert mean_bounds(several[:1]) == task_bounds(several[0])


def false_yes(n: list[int], discordance: list[float], difference: list[float], margin: float) -> float:
    """How often the mean is found to be within ``margin`` although it is just at it."""
    assert np.mean(difference) == pytest.approx(-margin)
    settings = zip(n, discordance, difference, strict=True)
    tasks = [drawn(*task, trials=4000, seed=seed) for seed, task in enumerate(settings)]
    gains, losses = (np.stack([task[:, which] for task in tasks], axis=-1).astype(float) for which in (0, 1))
    low = mean_low(gains, losses, np.array(n, float), np.ones(len(n)))
    return float((low >= -margin).mean())


@pytest.mark.parametrize("tasks", [2, 11])
@pytest.mark.parametrize("n", [30, 165])
def test_the_mean_over_tasks_of_equal_size(tasks: int, n: int) -> None:
    for margin, discordance in ((0.01, 0.01), (0.01, 0.3), (0.03, 0.1)):
        assert false_yes([n] * tasks, [discordance] * tasks, [-margin] * tasks, margin) <= 0.06


@pytest.mark.parametrize("noise", [0.0, 0.1])
def test_the_mean_where_one_task_has_all_the_losses(noise: float) -> None:
    sizes = [30, 100, 300, 1000]
    for place in range(len(sizes)):
        difference = [-0.12 if index == place else 0.0 for index in range(len(sizes))]
        discordance = [abs(d) + noise for d in difference]
        assert false_yes(sizes, discordance, difference, 0.03) <= 0.06


def test_the_mean_over_many_tasks_needs_fewer_questions_of_each() -> None:
    low, _ = mean_bounds([Counts(0, 0, 30)] * 11)
    assert -0.0125 < low < -(1 - 0.05 ** (1 / 330)), "close to what 330 questions of one task give"


def test_partial_credit_is_on_the_safe_side() -> None:
    """Answers whose credit falls by 0.03 on average, in steps of a quarter; and whole answers in the same form."""
    rng = np.random.default_rng(0)
    n, wrong = 120, 0
    for _ in range(150):
        baseline = rng.integers(0, 5, n) / 4
        moved = rng.choice([-0.25, 0.0, 0.25], n, p=[0.27, 0.58, 0.15])
        model = np.clip(baseline, 0.25, 0.75) + moved  # so that nothing is cut off
        wrong += task_bounds(count(list(model), list(np.clip(baseline, 0.25, 0.75))))[0] >= -0.03
    assert wrong / 150 <= 0.06
    assert count([1.0, 0.0, 1.0], [0.0, 1.0, 1.0]) == Counts(1.0, 1.0, 3)
    assert count([True, False], [False, False]) == Counts(1.0, 0.0, 2)
    halves = count([1.5, 0.0], [0.0, 0.75])
    assert (halves.gains, halves.losses, halves.scale) == (1.0, 0.5, 1.5)


@pytest.mark.parametrize(
    ("gains", "losses", "n", "low", "high"),
    [(0, 100, 100, -1.0, -0.9409), (1, 99, 100, -0.999, -0.9068), (0, 1000, 1000, -1.0, -0.994)],
)
def test_a_total_collapse_is_a_collapse(gains: int, losses: int, n: int, low: float, high: float) -> None:
    """All answers differ, so the number of disagreements has no room above it."""
    assert task_bounds(Counts(gains, losses, n)) == pytest.approx((low, high), abs=5e-4)


def test_every_size_at_which_all_answers_are_lost_has_a_bound() -> None:
    assert max(task_bounds(Counts(0, n, n))[1] for n in range(30, 400, 7)) < -0.8
