"""Conversations that the bundled model is trained on: made-up stories, and short questions and answers.

All is drawn from word lists and sentence variants by one seeded generator, so a seed gives the same text everywhere.
One in twenty combinations of hero, event and thing is held out: no training conversation asks for it, so a model can be
tested on stories that it never saw.
"""

import dataclasses
import random
import zlib
from collections.abc import Iterator
from typing import NamedTuple

from demo import facts, words
from demo.events import EVENTS
from demo.grammar import a, capital
from demo.traits import PLAIN, TRAITS

Conversation = list[dict[str, str]]

_WORLDS = ((words.LAND, words.LAND_HEROES), (words.SEA, words.SEA_HEROES), (words.SKY, words.SKY_HEROES))
_PRONOUNS = {"he": ("he", "him", "his", "himself"), "she": ("she", "her", "her", "herself")}
_MOVABLE = (*words.THINGS, *words.FOODS)
# What is likely to happen to what; any other thing is asked for now and then.
_THINGS = {
    "made": (
        *words.BUILDS,
        "crown",
        "hat",
        "scarf",
        "basket",
        "doll",
        "ball",
        "lantern",
        "candle",
        "map",
        "flute",
        "bowl",
    ),
    "built": words.BUILDS,
    "baked": words.FOODS[:9],
    "planted": words.PLANTS,
    "was afraid of": words.FEARS,
    "wanted": (*words.THINGS, *words.BUILDS, *words.PLANTS),
    "broke": (*words.THINGS, *words.BUILDS),
}
_ASKS = """
Tell me a story about {}|Tell me a story about {}|Write a short story about {}|Write a story about {}|story about {}
Can you tell me a story about {}?|Can you tell me a tale about {}?|I want to hear a story about {}|A story about {}
A story about {} please|Please tell me a story about {}|Tell me about {}|Could you write a story about {}?
I would like a story about {}|Tell a story about {}|Make up a story about {}|Give me a short story about {}
Tell me a short story about {}|Tell me a bedtime story about {}|Tell me the story of {}|Do you know a story about {}?
"""
_AGAIN = (
    "Tell me another story about {}|Another story about {} please|Now tell me a story about {}|And a story about {}"
)
_BARE_ASKS = """
Tell me a story|A story please|Can you tell me a story?|I want to hear a story|Write a story|Tell me a bedtime story
Please tell me something|Do you know a story?|I am bored|Tell me a short story|Story
"""
_OPENINGS = (
    "Once upon a time, there was {a_whole} called {name}. {He} lived {home}.",
    "Once upon a time, {a_whole} named {name} lived {home}.",
    "{Home}, there lived {a_whole} named {name}.",
    "There once was {a_whole} named {name} who lived {home}.",
    "A long time ago, {a_whole} called {name} lived {home}.",
    "This is the story of {name}, {a_whole} who lived {home}.",
    "{name} was {a_whole}. {He} lived {home}.",
)
_CLOSINGS = (
    "And that is the story of the {whole} who {deed}.",
    "So ends the story of {name}, the {whole} who {deed}.",
    "The end.",
)
_QUESTION_WORDS = ("What", "Who", "Where", "When", "Which", "How", "Can", "Do", "Are", "Should")
_SYSTEMS = (
    "You are a helpful assistant.",
    "You are a storyteller.",
    "You are a friendly assistant.",
    "You tell stories to children.",
)


@dataclasses.dataclass(frozen=True)
class Request:
    """Who a story is about and what happens: a hero, an event of `EVENTS` and a thing, each with an adjective or none.

    `they` is the hero's pronoun, "he" or "she"; `world` is the index of where the hero lives: on land, in the sea or in
    the sky; `deed` words the event ("lost a key"). `shown` is what the one who asks mentions besides the hero: some of
    "adjective", "name" and "deed", or "pair" for the thing alone; or "nothing", and then not even the hero.
    """

    hero: str
    event: str
    thing: str
    they: str
    name: str
    adjective: str
    thing_adjective: str
    world: int
    deed: str
    shown: frozenset[str]

    @property
    def held_out(self) -> bool:
        """True if the combination of hero, event and thing is kept out of the training conversations."""
        return zlib.crc32(f"{self.hero} {self.event} {self.thing}".encode()) % 20 == 0

    @property
    def fine(self) -> str:
        """The thing with its adjective."""
        return f"{self.thing_adjective} {self.thing}".strip()

    @property
    def whole(self) -> str:
        """The hero with the adjective."""
        return f"{self.adjective} {self.hero}".strip()

    def subject(self) -> str:
        """Return what follows "a story about", such as "a brave fox who lost a key"."""
        hero = a(self.whole if "adjective" in self.shown else self.hero)
        if "pair" in self.shown:
            return f"{hero} and {a(self.fine)}"
        if "name" in self.shown:
            hero += f" named {self.name}"
        return f"{hero} who {self.deed}" if "deed" in self.shown else hero


class Story(NamedTuple):
    """A story and who helped in it ("the owl")."""

    text: str
    request: Request
    helper: str
    home: str


class Unseen(NamedTuple):
    """A request that no training conversation contains, and the words that a story about it has to have."""

    prompt: str
    hero: str
    thing: str
    adjective: str
    event: str


def _invent(rng: random.Random) -> str:
    """Return a word that does not exist: two halves of words, or syllables."""
    if rng.random() < 0.5:
        first, last = rng.sample((*words.LAND_HEROES["any"], *words.THINGS, *words.PLANTS), 2)
        return first[: len(first) // 2 + 1].split(" ")[0] + last[len(last) // 2 :].split(" ")[-1]
    start = rng.choice(words.SYLLABLE_STARTS) if rng.random() < 0.9 else ""
    vowel = rng.choice(words.SYLLABLE_VOWELS if start else "aeio")
    middle = rng.choice("bdfgklmnprstvz") + rng.choice("aeiou") if rng.random() < 0.6 else ""
    return start + vowel + middle + rng.choice(words.SYLLABLE_ENDS)


def _thing(rng: random.Random, event: str, hero: str) -> str:
    if event == "learned to":
        return rng.choice(words.ACTIVITIES)
    if event == "met":
        return rng.choice([other for other in words.LAND_HEROES["any"] if other != hero])
    if rng.random() < 0.07:
        return rng.choice((*words.THINGS, *words.BUILDS, *words.FOODS, *words.PLANTS))
    return rng.choice(_THINGS.get(event, _MOVABLE))


def _adjective(rng: random.Random) -> str:
    draw = rng.random()
    if draw < 0.1:
        return ""
    if draw < 0.75:
        return rng.choice(list(TRAITS))
    if draw < 0.83:
        return rng.choice(list(TRAITS)) + " little"
    return rng.choice(words.LOOKS)


def _shown(rng: random.Random, event: str) -> frozenset[str]:
    draw = rng.random()
    if draw < 0.04:
        return frozenset({"nothing"})
    if draw < 0.12 and event != "learned to":
        return frozenset({"pair"} | ({"adjective"} if rng.random() < 0.5 else set()))
    shown = {"deed"} if draw < 0.88 else set()
    return frozenset(shown | {part for part, share in (("adjective", 0.75), ("name", 0.12)) if rng.random() < share})


def _draw_request(rng: random.Random) -> Request:
    """Draw any request, to be trained on or held out. Only words that the user says are ever invented."""
    world = rng.choices((0, 1, 2), (90, 7, 3))[0]
    heroes = _WORLDS[world][1]
    they = rng.choice(("he", "she"))
    hero = rng.choice(heroes["any"] + heroes[they])
    event = rng.choice(list(EVENTS))
    thing = _thing(rng, event, hero)
    plain = event == "learned to" or thing.startswith("the ")
    thing_adjective = "" if plain or rng.random() > 0.2 else rng.choice(words.THING_WORDS)
    name = rng.choice(words.NAMES[they])
    adjective = _adjective(rng)
    shown = _shown(rng, event)
    invented = rng.random()
    if world == 0 and invented < 0.12 and "nothing" not in shown:
        hero = _invent(rng)
    if 0.06 < invented < (0.07 if event == "learned to" else 0.18) and shown & {"deed", "pair"}:
        thing = _invent(rng)
    if invented > 0.99 and "adjective" in shown:
        adjective = _invent(rng)
    if invented > 0.7 and "name" in shown:
        name = capital(_invent(rng))
    request = Request(hero, event, thing, they, name, adjective, thing_adjective, world, "", shown)
    return dataclasses.replace(request, deed=rng.choice(EVENTS[event].deeds).format_map(_slots(request)))


def _request(rng: random.Random, held_out: bool) -> Request:
    while (request := _draw_request(rng)).held_out != held_out:
        pass
    return request


def _slots(request: Request) -> dict[str, str]:
    """Return the words of a request for the slots of a sentence."""
    he, him, his, himself = _PRONOUNS[request.they]
    event = EVENTS[request.event]
    thing = request.thing
    return {
        "he": he, "him": him, "his": his, "himself": himself, "name": request.name, "hero": request.hero,
        "adjective": request.adjective, "whole": request.whole, "a_whole": a(request.whole), "obj": thing,
        "a_obj": a(thing), "the_obj": thing if thing.startswith("the ") else f"the {thing}", "fine": request.fine,
        "a_fine": a(request.fine), "deed": request.deed, "verb": event.verb, "past": event.past,
    }  # fmt: skip


def _cast(rng: random.Random, request: Request) -> dict[str, str]:
    """Return all slots of a story: the words of the request, and who and what else is in it."""
    world = _WORLDS[request.world][0]
    helper = rng.choice([helper for helper in world.helpers if helper not in (request.hero, request.thing)])
    spot, spot2 = rng.sample(world.spots, 2)
    day, day2 = rng.sample(words.DAYS, 2)
    slots = _slots(request) | {
        "the_helper": f"the {helper}", "a_helper": a(f"{rng.choice(words.HELPER_WORDS)} {helper}".strip()),
        "home": rng.choice(world.homes), "find": rng.choice(world.finds), "spot": spot, "spot2": spot2,
        "day": day, "day2": day2,
        "little_one": rng.choice([one for one in world.little_ones if one not in (request.hero, request.thing)]),
    }  # fmt: skip
    return slots | {capital(slot): capital(word) for slot, word in slots.items()}


def tell(rng: random.Random, request: Request) -> Story:
    """Tell a story of three paragraphs: the hero, the trouble, and how it ends."""
    event = EVENTS[request.event]
    slots = _cast(rng, request)
    trait = TRAITS.get(request.adjective.removesuffix(" little"), PLAIN)
    hero = [rng.choice(_OPENINGS)]
    begin, trouble = event.begins
    middle = [rng.choice(begin), rng.choice(trouble)]
    end = [rng.choice(step) for step in rng.choice(event.plots)]
    if request.adjective:
        hero.append(rng.choice(trait.shows))
        if rng.random() < 0.55:
            middle.append(trait.trouble)
        if rng.random() < 0.4:
            end.append(trait.end)
    draw = rng.random()
    if draw < 0.25:
        end.append(rng.choice(event.lessons))
    elif draw < 0.55:
        end.append(rng.choice(_CLOSINGS))
    paragraphs = (" ".join(sentences).format_map(slots) for sentences in (hero, middle, end))
    helper = f"the {request.thing}" if request.event == "met" else slots["the_helper"]
    return Story("\n\n".join(capital(paragraph) for paragraph in paragraphs), request, helper, slots["home"])


def _choose(rng: random.Random, wordings: str) -> str:
    return rng.choice(wordings.strip().replace("\n", "|").split("|"))


def _worded(rng: random.Random, text: str, mark: str) -> str:
    """Return what a user says, as users do: with or without a mark at its end, in small letters now and then."""
    if text.endswith("?"):
        text, mark = text[:-1], "?"
    if rng.random() < 0.6:
        text += mark
    return text.lower() if rng.random() < 0.2 else text


def _asked(rng: random.Random, question: str) -> str:
    return _worded(rng, question, "?" if question.startswith(_QUESTION_WORDS) else ".")


def prompt(rng: random.Random, request: Request, asks: str = _ASKS) -> str:
    """Return a request in the words of a user."""
    if "nothing" in request.shown:
        return _worded(rng, _choose(rng, _BARE_ASKS), ".")
    ask = "{}" if rng.random() < 0.05 else _choose(rng, asks)
    return _worded(rng, capital(ask.format(request.subject())), ".")


def _turn(question: str, answer: str) -> Conversation:
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]


def _story_turn(rng: random.Random, held_out: bool, asks: str = _ASKS) -> tuple[Conversation, Story]:
    request = _request(rng, held_out)
    story = tell(rng, request)
    return _turn(prompt(rng, request, asks), story.text), story


def _about(rng: random.Random, story: Story) -> tuple[str, str]:
    """Return a question about a story and its answer."""
    request = story.request
    name, hero = request.name, request.hero
    asked = [
        (f"What was the {hero} called", f"The {hero} was called {name}."),
        (f"What was the name of the {hero}", f"The name of the {hero} was {name}."),
        (f"Who was {name}", f"{name} was {a(request.whole)}."),
        (f"Who helped {name}", f"{capital(story.helper)} helped {name}."),
        ("Who was in the story", f"{name} the {hero} and {story.helper} were in the story."),
        (f"Where did {name} live", f"{name} lived {story.home}."),
        ("What was the story about", f"It was about {a(request.whole)} who {request.deed}."),
    ]
    return rng.choice(asked)


def _conversation(rng: random.Random, held_out: bool) -> Conversation:
    conversation = []
    if rng.random() < 0.12:
        conversation.append({"role": "system", "content": rng.choice(_SYSTEMS)})
    if rng.random() < 0.25:
        for _ in range(rng.choice((1, 1, 2, 3))):
            asked, answer = facts.question(rng)
            conversation += _turn(_asked(rng, asked), answer)
        return conversation
    turn, story = _story_turn(rng, held_out)
    conversation += turn
    draw = rng.random()
    if draw < 0.15:
        asked, answer = _about(rng, story)
        conversation += _turn(_asked(rng, asked), answer)
    if 0.1 < draw < 0.2:
        asked, answer = facts.thanks(rng)
        conversation += _turn(_worded(rng, asked, "!"), answer)
    if 0.2 < draw < 0.24:
        conversation += _story_turn(rng, held_out, _AGAIN)[0]
    return conversation


def conversations(seed: int, held_out: bool = False) -> Iterator[Conversation]:
    """Yield conversations without end, to train on or, if `held_out`, with stories that are never trained on."""
    rng = random.Random(seed)
    while True:
        yield _conversation(rng, held_out)


def requests(seed: int, count: int) -> list[Unseen]:
    """Return different requests for stories that `conversations` never trains on, all of which say what happens."""
    rng = random.Random(seed)
    unseen: dict[str, Unseen] = {}
    while len(unseen) < count:
        request = dataclasses.replace(_request(rng, held_out=True), shown=frozenset({"adjective", "deed"}))
        asked = prompt(rng, request)
        unseen[asked] = Unseen(asked, request.hero, request.thing, request.adjective, request.event)
    return list(unseen.values())
