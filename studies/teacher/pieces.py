"""Cuts real text into pieces, for the bundled corpus and for the texts of the capability study."""

CHUNK = 3000  # characters; a document is cut at blank lines into pieces of about this size


def chunks(text: str) -> list[str]:
    """The text cut at blank lines into pieces of about CHUNK characters."""
    pieces, piece = [], ""
    for block in text.split("\n\n"):
        if piece and len(piece) + len(block) > CHUNK:
            pieces.append(piece)
            piece = ""
        piece += ("\n\n" if piece else "") + block
    return [p for p in [*pieces, piece] if len(p) > 200]
