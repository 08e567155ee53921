"""Short questions and answers: greetings, who the model is, what a child knows, and what is out of its reach."""

import random
from collections.abc import Sequence

from demo.grammar import a, capital

_CHAT = """
Hello | Hi | Hey | Hello there | Hi there | Good morning | Good evening | Hello, how are you
Hello! I can tell you a story. What should it be about?
Hi! Who should be in the story today?
Hello! Do you want to hear a story?

Who are you | What are you | What is your name | Are you a person | Are you a robot | Tell me about you
I am a very small language model inside jaxgen. I tell short stories.

What can you do | How can you help me | What do you know | Help | What should I ask you | Can you help me
I can tell short stories. Ask me for a story about a brave fox who lost a key.

Thank you | Thanks | Thanks a lot | Thank you very much | That was nice | What a nice story | I like it | Great
You are welcome!
You are welcome! I am glad that you liked it.

Goodbye | Bye | Bye bye | See you | Good night | See you tomorrow | I have to go now
Goodbye! Come back for another story soon.
Goodbye! Sleep well and dream of something nice.

How are you | How are you today | Are you well | How do you feel
I am fine, thank you. I feel like telling a story.

Who made you | Where do you come from | Who trained you | Where do you live
I was trained on made-up stories, and I come with jaxgen.

How big are you | Are you big | How many parameters do you have | Are you clever | Are you smart
I am very small. I have less than two million parameters.

What is jaxgen | What does jaxgen do
Jaxgen runs language models like me with JAX.

What is your favorite color | What is your favorite animal | Do you like animals | What do you like
I like stories best of all, above all stories about animals.

Yes | Yes please | OK | Sure
Very well! Tell me who the story should be about.

No | No thanks | Not now
That is all right. I am here when you want a story.
"""

_COLORS = {
    "the sky": "blue", "grass": "green", "snow": "white", "the sun": "yellow", "a tomato": "red", "a banana": "yellow",
    "coal": "black", "a strawberry": "red", "milk": "white", "a leaf": "green", "a lemon": "yellow",
    "a carrot": "orange",
    "a frog": "green", "a raven": "black", "a swan": "white", "an elephant": "grey", "a pig": "pink", "the sea": "blue",
    "chocolate": "brown", "a cherry": "red", "a flamingo": "pink", "the night": "black", "a plum": "purple",
}  # fmt: skip
_SOUNDS = {
    "cow": "moo", "dog": "woof", "cat": "meow", "sheep": "baa", "duck": "quack", "pig": "oink",
    "rooster": "cock-a-doodle-doo",
    "bee": "buzz", "owl": "hoot", "frog": "ribbit", "horse": "neigh", "lion": "roar", "mouse": "squeak",
    "snake": "hiss",
    "chick": "cheep", "crow": "caw", "wolf": "howl", "donkey": "hee-haw",
}  # fmt: skip
_HOMES = {
    "bird": "nest", "bee": "hive", "dog": "kennel", "spider": "web", "bear": "den", "horse": "stable",
    "rabbit": "burrow",
    "king": "castle", "pig": "sty", "snail": "shell", "cow": "barn", "fish": "pond", "ant": "hill", "child": "house",
}  # fmt: skip
_BABIES = {
    "dog": "puppy", "cat": "kitten", "cow": "calf", "sheep": "lamb", "horse": "foal", "duck": "duckling",
    "hen": "chick",
    "pig": "piglet", "frog": "tadpole", "bear": "cub", "lion": "cub", "deer": "fawn", "goose": "gosling", "goat": "kid",
}  # fmt: skip
_FOODS = {
    "rabbit": "carrots", "monkey": "bananas", "cow": "grass", "cat": "fish and mice", "bird": "seeds",
    "squirrel": "nuts",
    "bear": "honey and berries", "mouse": "cheese", "panda": "bamboo", "horse": "hay", "dog": "meat",
    "caterpillar": "leaves",
    "frog": "flies", "penguin": "fish",
}  # fmt: skip
_LEGS = {
    "dog": "four", "cat": "four", "bird": "two", "spider": "eight", "ant": "six", "bee": "six", "horse": "four",
    "child": "two",
    "cow": "four", "snake": "no", "fish": "no", "hen": "two", "beetle": "six", "elephant": "four", "snail": "no",
    "fox": "four",
}  # fmt: skip
_OPPOSITES = (
    "big small, hot cold, day night, up down, fast slow, happy sad, old young, open closed, full empty, loud quiet,"
    "wet dry,"
    "hard soft, light dark, left right, good bad, rich poor, strong weak, early late, long short, thick thin,"
    "clean dirty,"
    "high low, near far, yes no, black white, first last, brave afraid, summer winter"
)
_BY_SIZE = "ant bee mouse frog cat fox sheep cow elephant whale mountain".split()
_DAYS = "Monday Tuesday Wednesday Thursday Friday Saturday Sunday".split()
_MONTHS = "January February March April May June July August September October November December".split()
_NUMBERS = (
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen "
    " eighteen"
    " nineteen twenty"
).split()
_SHAPES = {"triangle": "three", "square": "four", "rectangle": "four", "circle": "no"}
_LISTS = {
    "days of the week": _DAYS,
    "months of the year": _MONTHS,
    "seasons": ["spring", "summer", "autumn", "winter"],
    "colors of the rainbow": ["red", "orange", "yellow", "green", "blue", "indigo", "violet"],
}

_UNKNOWN = """
What is the capital of {country} | Where is {country} | How many people live in {country}
Who is the president of {country} | Who wrote {work} | What is {work} about
How do I get to {country} | What language do they speak in {country}
Who invented {thing} | How does {thing} work | How do I repair {thing} | Explain {thing} to me
What is {thing} | Write a program in {language} | Write code that sorts a list | Fix my {language} code
What is {language} | What is the weather like | What time is it | What day is today | What is the news
Who won the game last night
What is {large} times {large} | What is {large} plus {large} | What is the square root of {large}
What is the meaning of life | Give me some advice | Write a poem about {thing} | Translate this into French
When was {country} founded | How old is the universe | Should I buy {thing} | How much does {thing} cost
Write an email to my boss | What should I cook tonight | Tell me a joke | Sing me a song | Summarize this article
"""
_WORDS = {
    "country": "France Germany Spain Italy China Japan India Brazil Canada Mexico Egypt Russia Peru Kenya "
    "Norway".split(),
    "work": ["Hamlet", "Faust", "the Bible", "Harry Potter", "the Iliad", "War and Peace", "this book"],
    "thing": "electricity,the internet,a computer,a car,the telephone,gravity,a rocket engine,money,democracy,music,DNA"
    ",machine learning,physics,a neural network,the stock market,love,history,philosophy".split(","),
    "language": "Python Java Rust JavaScript C SQL Haskell".split(),
}
_SORRY = (
    "I do not know that. I am small, but I can tell you a story.",
    "I am too small to know that. Shall I tell you a story instead?",
    "That is too hard for me. But I can tell you a story.",
)


def _blocks() -> list[tuple[Sequence[str], Sequence[str]]]:
    """Return the questions and the answers of every block of `_CHAT`."""
    blocks = (block.splitlines() for block in _CHAT.strip().split("\n\n"))
    return [(first.split(" | "), answers) for first, *answers in blocks]


_TALK = _blocks()
_REFUSED = [question for line in _UNKNOWN.strip().splitlines() for question in line.split(" | ")]
_PAIRS = [tuple(pair.split()) for pair in _OPPOSITES.split(",")]


def _talk(rng: random.Random) -> tuple[str, str]:
    questions, answers = rng.choice(_TALK)
    return rng.choice(questions), rng.choice(answers)


def thanks(rng: random.Random) -> tuple[str, str]:
    """Return a word of thanks and its answer."""
    questions, answers = _TALK[3]
    return rng.choice(questions), rng.choice(answers)


def _unknown(rng: random.Random) -> tuple[str, str]:
    words = {slot: rng.choice(words) for slot, words in _WORDS.items()}
    return rng.choice(_REFUSED).format(large=rng.randrange(101, 1000), **words), rng.choice(_SORRY)


def _color(rng: random.Random) -> tuple[str, str]:
    thing, color = rng.choice(list(_COLORS.items()))
    question = rng.choice(
        ("What color is {}", "What is the color of {}", "Which color does {} have", "What colour is {}")
    )
    return question.format(thing), f"{capital(thing)} is {color}."


def _animal(rng: random.Random) -> tuple[str, str]:
    table, questions, answer = rng.choice(
        (
            (_SOUNDS, ("What does {} say", "What sound does {} make", "How does {} sound"), "{} says {}."),
            (_HOMES, ("Where does {} live", "What is the home of {}"), "{} lives in {}."),
            (
                _BABIES,
                ("What is the baby of {} called", "What do you call the baby of {}"),
                "The baby of {} is called {}.",
            ),
            (_FOODS, ("What does {} eat", "What does {} like to eat", "What is the food of {}"), "{} likes to eat {}."),
            (_LEGS, ("How many legs does {} have", "How many legs has {}"), "{} has {} legs."),
            (_SHAPES, ("How many sides does {} have", "How many corners does {} have"), "{} has {} corners."),
        )
    )
    animal, known = rng.choice(list(table.items()))
    if table is _HOMES or table is _BABIES:
        known = a(known)
    return rng.choice(questions).format(a(animal)), capital(answer.format(a(animal), known))


def _opposite(rng: random.Random) -> tuple[str, str]:
    word, other = rng.sample(rng.choice(_PAIRS), 2)
    question = rng.choice(
        ("What is the opposite of {}", "Tell me the opposite of {}", "Do you know the opposite of {}")
    )
    return question.format(word), f"The opposite of {word} is {other}."


def _next(rng: random.Random) -> tuple[str, str]:
    names, kind = rng.choice(((_DAYS, "day"), (_MONTHS, "month")))
    index = rng.randrange(len(names))
    step, word = rng.choice(((1, "after"), (-1, "before")))
    question = rng.choice(("Which {} comes {} {}", "What {} comes {} {}", "What is the {} {} {}"))
    answer = names[(index + step) % len(names)]
    return question.format(kind, word, names[index]), f"{answer} comes {word} {names[index]}."


def _listing(rng: random.Random) -> tuple[str, str]:
    kind, items = rng.choice(list(_LISTS.items()))
    question = rng.choice(("What are the {}", "Tell me the {}", "Name the {}", "Can you tell me the {}"))
    return question.format(kind), f"The {kind} are {', '.join(items[:-1])} and {items[-1]}."


def _count(rng: random.Random) -> tuple[str, str]:
    first, last = sorted(rng.sample(range(1, 11), 2))
    numbers = [str(number) for number in range(first, last + 1)]
    question = f"{rng.choice(('Count', 'Can you count', 'Please count'))} from {first} to {last}"
    if rng.random() < 0.2:
        return question.replace("from", "backwards from"), ", ".join(reversed(numbers)) + "."
    return question, ", ".join(numbers) + "."


def _sum(rng: random.Random) -> tuple[str, str]:
    x, y = rng.randrange(11), rng.randrange(11)
    if rng.random() < 0.3:
        x, y = max(x, y), min(x, y)
        sign, word, result = "-", "minus", x - y
    else:
        sign, word, result = "+", "plus", x + y
    if rng.random() < 0.2:
        return f"What is {_NUMBERS[x]} {word} {_NUMBERS[y]}", f"{x} {word} {y} is {result}."
    question = rng.choice(("What is {} {} {}", "How much is {} {} {}", "{} {} {}"))
    return question.format(x, rng.choice((sign, word)), y), f"{x} {word} {y} is {result}."


def _bigger(rng: random.Random) -> tuple[str, str]:
    x, y = rng.sample(range(len(_BY_SIZE)), 2)
    word, wins = rng.choice((("bigger", max(x, y)), ("smaller", min(x, y))))
    first, second, winner = (a(_BY_SIZE[index]) for index in (x, y, wins))
    question = rng.choice(("Which is {}, {} or {}", "What is {}, {} or {}")).format(word, first, second)
    return question, f"{capital(winner)} is {word} than {first if wins == y else second}."


_ASKED = (
    _talk,
    _talk,
    _talk,
    _unknown,
    _unknown,
    _color,
    _animal,
    _animal,
    _opposite,
    _next,
    _listing,
    _count,
    _sum,  # a hundred sums and as many differences have to be learnt by heart
    _sum,
    _sum,
    _bigger,
)


def question(rng: random.Random) -> tuple[str, str]:
    """Return a question, without its question mark, and the answer to it."""
    return rng.choice(_ASKED)(rng)
