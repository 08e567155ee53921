"""The limits of chat templates. tests/convert/test_damaged.py tests hostile templates."""

import sys
import threading

import pytest

from jaxgen.core.text import chat_template, sandbox
from jaxgen.errors import ConfigError, InputError
from tests.support.bounded import bounded
from tests.support.tokenizers import CHATML

LARGE = "{% set s = 'a' * 900000 %}{% set n = 'a' * 400000 + 'b' %}"
USER = [{"role": "user", "content": "hi"}]


def render(template: str, conversation=USER, **variables) -> str:
    return chat_template.render(
        {"default": template},
        conversation,
        tools=None,
        documents=None,
        add_generation_prompt=True,
        variables=variables,
        source="DIR",
    )


@pytest.mark.parametrize(
    ("template", "text"),
    [
        ("{{ 'ab' * 3 }}{{ 2 ** 10 }}{{ [1] * 2 }}{{ 7 % 4 }}", "ababab1024[1, 1]3"),
        ("{{ '%s-%05.1f' % ('a', 2) }}{{ '%d'|format(3) }}{{ '{:>4}{}'.format(1, 'x') }}", "a-002.03   1x"),
        ("{{ ','.join(['a', 'b']) }}{{ ['a', 'b']|join('+') }}{{ [{'x': 1}, {'x': 2}]|join(',', 'x') }}", "a,ba+b1,2"),
        ("{{ 'a-a'.replace('-', '+') }}{{ 'a-a'|replace('a', 'bb') }}{{ 'a b'.split() }}", "a+abb-bb['a', 'b']"),
        ("{{ 'a'.center(5) }}|{{ 'a'|center(3) }}|{{ 'a\nb'|indent(2) }}", "  a  | a |a\n  b"),
        ("{{ {'a': [1, 'ü']}|tojson }}{{ [1]|tojson(indent=2) }}", '{"a": [1, "ü"]}[\n  1\n]'),
        ("{{ messages[0:] | length }}{{ 'abc'[::-1] }}{{ (1, 2) }}", "1cba(1, 2)"),
        ("{% set ns = namespace(n=0) %}{% for i in range(5) %}{% set ns.n = ns.n + i %}{% endfor %}{{ ns.n }}", "10"),
        ("{% macro m(x) %}<{{ x }}>{% endmacro %}{{ m('a') }}{% set b %}{{ 1 }}2{% endset %}{{ b ~ 3 }}", "<a>123"),
        ("{{ [[1, 2], [3]]|map('length')|list }}{{ messages|map(attribute='role')|join }}", "[2, 1]user"),
        ("{{ '{d}'.replace('{d}', 'y' * 900000)|length }}{{ ('y' * 90000).replace('z' * 5000, '')[:1] }}", "900000y"),
        (
            "{{ (['x' * 3000] * 20)|join('y' * 300)|length }}{{ ('-' * 9).join(['x' * 3000] * 20)|length }}",
            "6570060171",
        ),
        ("{{ 'a' ~ 1 ~ none ~ x ~ [2] }}{{ x }}{{ none }}{{ 1 < 2 < 1 }}{{ 7 // 2 - 1 / 2 }}", "a1None[2]NoneFalse2.5"),
        ("{{ '%(a)s %(b)s'|format(a=1, b=2) }}{{ '%04d' % 3 }}{{ '{a:03d}'.format(a=4) }}", "1 20003004"),
        ("{% for a, b in [(1, 2), (3, 4)] %}{{ a }}{{ b }}{{ loop.last }}{% endfor %}", "12False34True"),
        ("{{ x|default(10**9) }}{{ (10**9) is gt(10**8) }}{{ 10**7 * 0.5 }}", "1000000000True5000000.0"),
        ("{{ [1, 2]|sum }}{{ [3, 1]|sort }}{{ 'x' in 'xyz' }}{{ 1.5|round|int }}", "3[1, 3]True2"),
        (
            "{{ {'a': 1, 'b': 2}.items()|list }}{{ {'b': 2, 'a': 1}|dictsort }}",
            "[('a', 1), ('b', 2)][('a', 1), ('b', 2)]",
        ),
    ],
)
def test_ordinary_templates_are_rendered(template, text):
    assert render(template) == text


def test_long_conversations_are_accepted():
    long = [{"role": "user", "content": "word " * 400_000}, *USER * 2000]
    with bounded():
        text = render(CHATML, long)
    assert len(text) > 2_000_000
    accumulating = "{% set ns = namespace(s='') %}{% for m in messages %}{% set ns.s = ns.s ~ m.content %}{% endfor %}"
    assert render(accumulating + "{{ ns.s|length }}", USER * 3000) == "6000"


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        ("{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}", "takes longer than 0.1 s"),
        ("{{ 'a' * 10**12 }}", "creates a value of more than"),
        ("{% set a = 'a' * 999999 %}{{ a }}{{ a }}", "creates a value of more than"),
        ("{% set a = 'a' * 999999 %}" * 60, "in total"),
        ("{{ 3 ** (10 ** 9) }}", "creates an integer of more than"),
        ("{{ [[]]|tojson(indent=9999999) }}", "creates a value of more than"),
        ("{{ ('a' * 900000)|replace(new='b' * 900000, old='a') }}", "creates a value of more than"),
        ("{{ 15|round(-90000000, 'ceil') }}", "creates a value of more than"),
        ("{{ range(99999)|map(attribute='" + "real." * 9000 + "real')|list }}", "takes longer than 0.1 s"),
        ("{{ (['a' * 20] * 8000)|map('list')|sum(start=[])|length }}", "creates a value of more than"),
        ("{{ '%9999d' % 1 }}", "a width of more than 999"),
        ("{{ ('x' * 900000).translate({120: 'x' * 900000}) }}", "creates a value of more than"),
        ("{{ ('é.' * 400000).encode('idna') }}", "encode"),
        ("{{ ('a-' * 400000)|wordwrap(1) }}", "wordwrap"),
        ("{{ '{0.x}{0.x}'.format(namespace(x='a' * 999999)) }}", "attribute"),
        ("{{ '%(a)2500000000s' % {'a': 1} }}", "a width of more than 999"),
        ("{{ '{0[}]:2500000000}'.format({'}': 1}) }}", "an attribute or an item"),
        (LARGE + "{{ ('{0}' * 2500).format({'a': s}.items()) }}", "creates a value of more than"),
        (LARGE + "{{ " + "~".join("s" * 2500) + " }}", "creates a value of more than"),
        (LARGE + "{% set x = [s] %}" + "{{ x }}" * 2500, "creates a value of more than"),
        (LARGE + "{% set y %}" + "{{ s }}" * 2500 + "{% endset %}", "in total"),
        (
            LARGE + "{% for i in range(999) %}" + "{% if n in s %}{% endif %}" * 400 + "{% endfor %}",
            "takes longer than 0.1 s",
        ),
    ],
)
def test_limits_stop_hostile_templates(template, reason, monkeypatch):
    monkeypatch.setattr(sandbox, "SECONDS", 0.1 if "0.1 s" in reason else 60)
    with pytest.raises(ConfigError, match=rf"^the chat template of DIR .*{reason}"):
        render(template)


def test_failing_templates_are_errors():
    with pytest.raises(ConfigError, match="of DIR cannot be compiled: maximum recursion depth"):
        render("{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}")
    with pytest.raises(InputError, match="of DIR fails on this conversation: division by zero"):
        render("{{ 1 / 0 }}")
    with pytest.raises(InputError, match="of DIR fails on this conversation: maximum recursion depth"):
        render("{% set ns = namespace(x=1) %}{% for i in range(9999) %}{% set ns.x = [ns.x] %}{% endfor %}")
    with pytest.raises(ConfigError, match="chat_template has 100,001 characters"):
        chat_template.named("x" * 100_001)


def test_limits_hold_in_any_thread_and_leave_its_tracer_alone(monkeypatch):
    monkeypatch.setattr(sandbox, "SECONDS", 0.1)
    seen = []

    def run():
        for template in (CHATML, "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"):
            try:
                seen.append(render(template))
            except ConfigError as error:
                seen.append(str(error))

    threads = [threading.Thread(target=run) for _ in range(4)]
    before = sys.gettrace()
    for thread in threads:
        thread.start()
    run()
    for thread in threads:
        thread.join()
    assert sys.gettrace() is before
    assert len(seen) == 10
    assert len(set(seen)) == 2
