"""Generated blocks of hand-written pages: what stands between ``<!-- NAME -->`` and ``<!-- end of NAME -->``.

Figures enter a page only in such blocks. ``scripts/write_reference.py`` writes those of README and docs/, and each
study those of its own page. A test beside each writer compares the blocks with what the writer would write now.
"""

from collections.abc import Mapping


def between_marks(page: str, texts: Mapping[str, str]) -> str:
    """The page with each text, which ends with a line feed, between the marks of its name.

    Raises:
        ValueError: the page does not have the two marks of a name once each.
    """
    for name, text in texts.items():
        begin, end = f"<!-- {name} -->\n", f"<!-- end of {name} -->\n"
        if page.count(begin) != 1 or page.count(end) != 1:
            raise ValueError(f"the page needs the lines {begin.strip()} and {end.strip()} once each")
        before, rest = page.split(begin)
        page = before + begin + text + end + rest.split(end)[1]
    return page
