"""The picture of the capability page: recovery over training tokens, and its extrapolation."""

from pathlib import Path

from studies.capability.scores import Estimate, fit

Point = tuple[float, Estimate]
PAPERS = {"the 500 M tokens of FarSkip Table 2": 500e6, "the 10 B tokens of FarSkip Table 1": 10e9}


def draw(curves: dict[str, list[Point]], path: Path) -> None:
    """A PNG of the missing share over tokens, both logarithmic, with the fits and their ranges."""
    import matplotlib

    matplotlib.use("Agg")
    import numpy as np
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4), layout="constrained")
    for number, (name, points) in enumerate(curves.items()):
        sizes = [at for at, _ in points]
        line, far = fit(points), np.geomspace(min(sizes), max(PAPERS.values()), 60)
        values, low, high = zip(*(line.at(float(size)) for size in far), strict=True)
        color = f"C{number}"
        shares, errors = [100 * s for _, (s, _) in points], [100 * e for _, (_, e) in points]
        axes.errorbar(sizes, shares, errors, fmt="o", color=color, label=name, markersize=4)
        axes.plot(far, [100 * v for v in values], color=color, linewidth=1)
        axes.fill_between(far, [100 * v for v in low], [100 * v for v in high], color=color, alpha=0.15, linewidth=0)
    for size in PAPERS.values():
        axes.axvline(size, color="grey", linestyle="dotted", linewidth=0.8)
    axes.set_xscale("log")
    axes.set_ylim(bottom=0, top=105)
    axes.set_xlabel("training tokens")
    axes.set_ylabel("above chance, % of the teacher")
    axes.legend(fontsize="small", frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)
