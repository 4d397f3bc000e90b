"""The one exception of the package: something a user can put right, said in words."""


class PsdError(ValueError):
    """A mistake in input or settings; the message says what was found, where, and what to do."""


def nearest(name: str, known: list[str]) -> str:
    """Return "did you mean …" for the known names closest to `name`, or the whole list if none is close."""
    from difflib import get_close_matches

    close = get_close_matches(name, known, n=3, cutoff=0.5)
    if close:
        return "did you mean " + " or ".join(repr(c) for c in close) + "?"
    return "known: " + ", ".join(known)
