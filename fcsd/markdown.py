"""Tables in Markdown, as every result and card of fcsd writes them."""

from collections.abc import Sequence


def table(head: Sequence[str], body: Sequence[Sequence[str]], *, left: int = 1) -> str:
    """A Markdown table that is aligned in its source, too, without a line break at its end.

    Args:
        body: rows with as many cells as there are headings; a ``|`` or a line break in a cell is escaped.
        left: how many columns from the left are aligned to the left; the others, to the right.
    """
    rows = [[cell.replace("|", "\\|").replace("\n", " ") for cell in row] for row in [head, *body]]
    # The line below the headings needs a hyphen in each column, beside the colon.
    widths = [max(3, *(len(row[column]) for row in rows)) for column in range(len(head))]
    rule = ["-" * width if column < left else "-" * (width - 1) + ":" for column, width in enumerate(widths)]
    rows.insert(1, rule)
    return "\n".join(
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |" for row in rows
    )
