import itertools
import random
import re

import pytest

from demo import corpus, events, facts, words
from demo.corpus import conversations, requests
from demo.grammar import a

COUNT = 2000


@pytest.fixture(scope="module")
def stream():
    return list(itertools.islice(conversations(11), COUNT))


def _contents(stream):
    return [message["content"] for conversation in stream for message in conversation]


def _requests(seed, held_out, count=COUNT):
    rng = random.Random(seed)
    return [corpus._request(rng, held_out) for _ in range(count)]


def test_corpus_depends_only_on_the_seed(stream):
    assert list(itertools.islice(conversations(11), 50)) == stream[:50]
    assert list(itertools.islice(conversations(12), 50)) != stream[:50]


def test_roles_alternate(stream):
    for conversation in stream:
        roles = [message["role"] for message in conversation]
        turns = roles[roles[0] == "system" :]
        assert turns == ["user", "assistant"] * (len(turns) // 2)
        assert turns
    assert 0.05 < sum(conversation[0]["role"] == "system" for conversation in stream) / COUNT < 0.2
    assert sum(len(conversation) > 3 for conversation in stream) > COUNT / 10


def test_text_is_clean(stream):
    for text in _contents(stream):
        assert text.isascii()
        assert text == text.strip()
        assert not re.search(r"[{}]|  |\n\n\n|[.,]{2}|[.!?][A-Z]|\bMEET\b| [.,!?]", text), text


def test_sentences_begin_with_capitals(stream):
    answers = [m["content"] for conversation in stream for m in conversation if m["role"] == "assistant"]
    for answer in answers:
        assert not re.search(r'(?:^|[.!?] |\n)"?[a-z]', answer), answer


def test_articles_in_the_corpus_are_correct(stream):
    vowel = [word for group in (words.THINGS, words.LAND_HEROES["any"], words.THING_WORDS) for word in group]
    vowel = [word for word in vowel if word[0] in "aeiou" and word != "unicorn"]
    text = "\n".join(_contents(stream))
    assert len(vowel) > 8
    assert not re.search(rf"\b[Aa] (?:{'|'.join(vowel)})\b", text)
    assert not re.search(r"\b[Aa]n (?:[bcdfghjklmnpqrstvwxyz]|unicorn)", text)
    assert not re.search(r"\b[Aa]n? (?:an?|the)\b", text)


@pytest.mark.parametrize(
    ("noun", "with_article"), [("owl", "an owl"), ("fox", "a fox"), ("unicorn", "a unicorn"), ("the sea", "the sea")]
)
def test_article_of_a_noun(noun, with_article):
    assert a(noun) == with_article


@pytest.mark.parametrize("held_out", [False, True])
def test_story_contains_the_requested_words(held_out):
    rng = random.Random(5)
    for request in _requests(4, held_out, 1000):
        story = corpus.tell(rng, request)
        assert request.held_out is held_out
        assert request.whole in story.text
        assert story.text.count(request.thing) >= 3
        assert request.thing in story.text.split("\n\n")[2]
        assert story.text.count(request.name) >= 2
        assert story.helper.removeprefix("the ") in story.text
        assert story.text.count("\n\n") == 2
        assert 60 <= len(story.text.split()) <= 220
        other = {"he": r"\b(she|her|herself)\b", "she": r"\b(he|him|his|himself)\b"}[request.they]
        assert not re.search(other, story.text, re.IGNORECASE), story.text


def test_every_slot_of_every_sentence_is_filled():
    """Check all sentences, including rare ones that might not appear in a short stream."""
    rng = random.Random(1)
    request = corpus._request(rng, False)
    slots = corpus._cast(rng, request)
    for event in events.EVENTS.values():
        assert len(event.begins) == 2
        for step in itertools.chain(event.begins, *event.plots, [event.lessons]):
            for line in step:
                assert "  " not in line.format_map(slots)
                assert re.search(r'[.!?]"?$', line), line


def test_held_out_share():
    rng = random.Random(2)
    share = sum(corpus._draw_request(rng).held_out for _ in range(4000)) / 4000
    assert 0.03 < share < 0.07


def test_unseen_requests_are_never_trained_on():
    unseen = requests(3, 200)
    combinations = {(request.hero, request.event, request.thing) for request in unseen}
    trained = {(request.hero, request.event, request.thing) for request in _requests(9, False, 5000)}
    assert len({request.prompt for request in unseen}) == 200
    assert not combinations & trained
    for request in unseen:
        for word in (request.hero, request.thing, request.adjective):
            assert word.lower() in request.prompt.lower()
    assert requests(3, 200) == unseen


def test_unseen_prompts_are_not_in_the_stream(stream):
    prompts = {message["content"] for conversation in stream for message in conversation if message["role"] == "user"}
    assert not prompts & {request.prompt for request in requests(3, 200)}


def test_questions_have_consistent_answers():
    """A fact has one answer, however the question is worded. Only small talk and refusals vary."""
    rng = random.Random(0)
    answers = {}
    for ask in (facts._color, facts._animal, facts._opposite, facts._next, facts._listing, facts._count, facts._sum):
        for _ in range(500):
            question, answer = ask(rng)
            assert answers.setdefault(question, answer) == answer


def test_sums_are_correct():
    rng = random.Random(0)
    for _ in range(200):
        x, word, y, _is, result = facts._sum(rng)[1].rstrip(".").split()
        assert int(result) == (int(x) + int(y) if word == "plus" else int(x) - int(y))


def test_proportions_of_the_corpus(stream):
    stories = sum(any("\n\n" in message["content"] for message in conversation) for conversation in stream)
    assert 0.7 < stories / COUNT < 0.8
    heroes = {
        word
        for group in (words.LAND_HEROES, words.SEA_HEROES, words.SKY_HEROES)
        for kind in group.values()
        for word in kind
    }
    invented = sum(request.hero not in heroes for request in _requests(1, False))
    assert 0.05 < invented / COUNT < 0.2
