"""The events of the bundled model's stories: what can happen to a hero, what goes wrong, who helps and how it ends.

Each file in plots/ has the beginnings of a story, its possible plots, and its lessons, separated by lines with `---`.
A plot consists of steps, separated by blank lines. Each line of a step is one way to tell it, and the step MEET stands
for all ways to meet a helper. The slots `{name}`, `{he}`, `{him}`, `{his}` and `{hero}` stand for the hero, `{obj}`,
`{a_obj}` and `{the_obj}` for the thing, `{fine}` and `{a_fine}` for the thing as requested ("golden key"), and
`{a_helper}` and `{the_helper}` for the helper. A slot with a capital letter, such as `{He}`, capitalizes
its text.
"""

from pathlib import Path
from typing import NamedTuple

Steps = tuple[tuple[str, ...], ...]


class Event(NamedTuple):
    """One kind of story: how it is requested and told, with the variants of each step."""

    verb: str
    past: str
    deeds: tuple[str, ...]
    begins: Steps
    plots: tuple[Steps, ...]
    lessons: tuple[str, ...]


_PLOTS = Path(__file__).parent / "plots"
_MEET = """\
Just then, {a_helper} came by.
After a while, {name} met {a_helper}.
Soon {a_helper} came to see what was the matter.
Then {a_helper} stopped and looked at {him}.
"""


def _steps(text: str) -> Steps:
    text = text.replace("MEET\n", _MEET)
    return tuple(tuple(step.splitlines()) for step in text.strip().split("\n\n"))


def _event(verb: str, past: str, deeds: str, file: str) -> Event:
    text = (_PLOTS / f"{file}.txt").read_text("utf-8")
    begins, *plots, lessons = (_steps(part) for part in text.split("---\n"))
    return Event(verb, past, tuple(deeds.split(" | ")), begins, tuple(plots), lessons[0])


_LOSE = "lost {a_fine} | lost {a_fine} | lost {his} {fine} | could not find {his} {fine}"
_MAKE = "{past} {a_fine} | {past} {a_fine} | wanted to {verb} {a_fine}"
_LEARN = "wanted to {obj} | learned to {obj} | wanted to learn to {obj} | could not {obj}"

EVENTS = {
    "lost": _event("lose", "lost", _LOSE, "lost"),
    "found": _event("find", "found", "found {a_fine} | found {a_fine} | discovered {a_fine}", "found"),
    "wanted": _event("want", "wanted", "wanted {a_fine} | wished for {a_fine} | needed {a_fine}", "wanted"),
    "broke": _event("break", "broke", "broke {a_fine}", "broke"),
    "made": _event("make", "made", _MAKE, "made"),
    "built": _event("build", "built", _MAKE, "made"),
    "baked": _event("bake", "baked", _MAKE, "made"),
    "borrowed": _event("borrow", "borrowed", "borrowed {a_fine}", "borrowed"),
    "stole": _event("steal", "stole", "stole {a_fine}", "stole"),
    "took": _event("take", "took", "took {a_fine}", "stole"),
    "dreamed of": _event("dream of", "dreamed of", "dreamed of {a_fine} | dreamed about {a_fine}", "dreamed"),
    "was afraid of": _event("fear", "feared", "was afraid of {a_fine} | was scared of {a_fine}", "afraid"),
    "hid": _event("hide", "hid", "hid {a_fine} | hid {his} {fine}", "hid"),
    "planted": _event("plant", "planted", "planted {a_fine}", "planted"),
    "sold": _event("sell", "sold", "sold {a_fine} | sold {his} {fine}", "sold"),
    "gave away": _event("give away", "gave away", "gave away {a_fine} | gave away {his} {fine}", "gave"),
    "bought": _event("buy", "bought", "bought {a_fine}", "bought"),
    "met": _event("meet", "met", "met {a_fine}", "met"),
    "learned to": _event("learn to", "learned to", _LEARN, "learned"),
}
