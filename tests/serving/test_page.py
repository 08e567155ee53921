"""The chat page: its contents, and its behavior in a real browser."""

import json
import re
import urllib.request

import numpy as np
import pytest

from jaxgen.serving.page import page
from tests.support.dialects import KINDS
from tests.support.service import KEY, running

SETTINGS = re.compile(r'<script type="application/json" id="settings">(.*?)</script>', re.DOTALL)
MARKDOWN = """\
# Foxes
A **fox** is a *small* animal: `a <b> c`, 2 * 3 * 4, snake_case_name, \\*plain\\* and **unclosed.
***Both*** and __bold__

3. third
   - nested _one_
continued
4. fourth

   - loose

> quoted
> > twice
---
~~~html
<b>code</b>
  **indented**
~~~
[docs](https://example.org/a_b) ![picture](https://example.org/p.png) https://example.org/bare.
```
unclosed"""
RENDERED = (
    "<h3>Foxes</h3><p>A <strong>fox</strong> is a <em>small</em> animal: <code>a &lt;b&gt; c</code>, 2 * 3 * 4, "
    "snake_case_name, *plain* and **unclosed."
    "\n<strong><em>Both</em></strong> and <strong>bold</strong></p>"
    '<div><ol start="3"><li>third<ul><li>nested <em>one</em>\ncontinued</li></ul></li><li>fourth'
    "<ul><li>loose</li></ul></li></ol></div>"
    "<blockquote><p>quoted</p><blockquote><p>twice</p></blockquote></blockquote><hr>"
    "<div><div>html<button>Copy</button></div><pre>&lt;b&gt;code&lt;/b&gt;\n  **indented**</pre></div>"
    "<p>docs (<a>https://example.org/a_b</a>) picture (<a>https://example.org/p.png</a>) "
    "<a>https://example.org/bare</a>.</p>"
    "<div><div><button>Copy</button></div><pre>unclosed</pre></div>"
)
ATTACKS = """\
<img src="x" onerror="document.title = 'broken'"> <script>document.title = 'broken'</script>
# <iframe src="https://example.org"></iframe>
- <svg onload="document.title = 'broken'">
> <a href="javascript:document.title = 'broken'">here</a>
[a](javascript:document.title='broken') [b](JaVaScRiPt:alert) [c](data:text/html,broken) ![d](javascript:broken)
![e](data:image/png;base64,AAAA) ![f](https://example.org/f.png) [g](https://example.org/"onclick="document.title='broken')
[h](<javascript:document.title='broken'>) [i]( javascript:x) [https://good.example](https://evil.example)
`<img src=x>` **<img src=x>** *<img src=x>*
```"><img src=x onerror="document.title = 'broken'">
</pre></div><script>document.title = 'broken'</script>
```"""
# Replaces the service with one that streams a text in pieces of a few characters.
ANSWER = r"""
const [text, size] = arguments;
window.fetch = async () => {
  const pieces = [];
  for (let start = 0; start < text.length; start += size) pieces.push(text.slice(start, start + size));
  const event = (content) => `data: ${JSON.stringify({choices: [{delta: {content}, finish_reason: "stop"}]})}\n\n`;
  return new Response(pieces.map(event).join("") + "data: [DONE]\n\n");
};
"""
HOSTILE = "</script><script>document.title = 'broken'</script><b>&amp;\u2028 ü"


@pytest.fixture(scope="module")
def service():
    with running() as made:
        yield made


def recorded(answers: list[dict]) -> str:
    return page({"kind": "recorded", "model": HOSTILE, "prompt": HOSTILE, "answers": answers})


def settings_of(html: str) -> dict:
    (found,) = SETTINGS.findall(html)
    return json.loads(found)


def test_a_page_needs_no_other_file():
    html = page({"kind": "chat", "model": "tiny", "alternatives": 5, "needs_key": False})
    assert not re.search(r"""(src|href)=["'](?!data:)|@import|url\(|https?://""", html)


def test_no_text_becomes_html():
    html = page({"kind": "chat", "model": "tiny", "alternatives": 5, "needs_key": False})
    assert not re.search(r"innerHTML|outerHTML|insertAdjacent|document\.write|DOMParser|eval\(|new Function", html)
    assert html.count("<script") == html.count("</script>") == 3


def test_no_text_ends_the_settings():
    html = recorded([{"text": HOSTILE, "tokens": [], "note": HOSTILE}])
    answer = {"text": HOSTILE, "tokens": [], "note": HOSTILE}
    assert settings_of(html) == {"kind": "recorded", "model": HOSTILE, "prompt": HOSTILE, "answers": [answer]}


def test_the_service_has_the_page_and_needs_no_key_for_it():
    with running(keys=[KEY], warm=False) as service, urllib.request.urlopen(service.url) as response:
        assert response.headers["content-type"] == "text/html; charset=utf-8"
        assert response.headers["content-security-policy"] == "frame-ancestors 'none'"
        settings = settings_of(response.read().decode())
    assert settings == {"kind": "chat", "model": "tiny", "alternatives": 5, "needs_key": True}


@pytest.mark.slow
class TestInABrowser:
    @pytest.fixture
    def driver(self):
        from tests.support.browser import browser

        with browser() as driver:
            yield driver

    @staticmethod
    def find(driver, selector):
        return driver.find_element("css selector", selector)

    @staticmethod
    def text(driver, selector):
        return driver.execute_script(f"return document.querySelector({selector!r}).textContent")

    def set(self, driver, name, value):
        field = self.find(driver, f"[name={name}]")
        field.clear()
        field.send_keys(str(value))

    def send(self, driver, text):
        self.find(driver, "#message").send_keys(text, "\n")

    def wait(self, driver, condition, seconds=60):
        from selenium.webdriver.support.wait import WebDriverWait

        return WebDriverWait(driver, seconds, poll_frequency=0.05).until(lambda driver: condition(driver))

    def wait_for_answers(self, driver, count):
        self.wait(driver, lambda driver: len(driver.find_elements("css selector", ".assistant .note")) == count)
        self.wait(driver, lambda driver: self.find(driver, "#send").text == "Send")

    def ask(self, service, messages, **options):
        body = {"messages": messages, "logprobs": True, "top_logprobs": 5, **options}
        return self.post(service, "chat/completions", body)

    def post(self, service, path, body):
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(f"{service.url}/v1/{path}", json.dumps(body).encode(), headers)
        with urllib.request.urlopen(request) as response:
            return json.load(response)["choices"][0]

    def test_a_conversation_has_the_answers_of_the_service(self, service, driver):
        driver.get(service.url)
        options = {"temperature": 0.7, "top_k": 40, "seed": 7, "max_tokens": 30}
        for name, value in options.items():
            self.set(driver, name, value)
        self.set(driver, "system", "Be brief.")
        messages = [{"role": "system", "content": "Be brief."}]
        for number, text in enumerate(["Hello", "And now?"], 1):
            self.send(driver, text)
            self.wait_for_answers(driver, number)
            messages.append({"role": "user", "content": text})
            wanted = self.ask(service, messages, **options)
            shown = driver.execute_script("return [...document.querySelectorAll('.assistant')].at(-1).message.text")
            assert shown == wanted["message"]["content"]
            messages.append({"role": "assistant", "content": shown})
        note = self.text(driver, ".assistant:last-child .note")
        assert re.fullmatch(r"\d+ tokens · (length|stop) · \d+ tokens/s", note)

    def test_a_thought_is_folded_and_not_sent_back(self, driver):
        with running(template=KINDS["R1"]) as service:
            driver.get(service.url)
            for name, value in {"seed": 7, "max_tokens": 8}.items():
                self.set(driver, name, value)
            self.send(driver, "Hello")
            self.wait_for_answers(driver, 1)
            wanted = self.ask(service, [{"role": "user", "content": "Hello"}], seed=7, max_tokens=8)["message"]
            shown = driver.execute_script("return document.querySelector('.thought').textContent")
            assert shown == "Thought" + wanted["reasoning_content"]
            assert not self.find(driver, ".thought").get_attribute("open")
            assert driver.execute_script("return document.querySelector('.assistant').message.text") == ""

    def test_tokens_are_shaded_and_show_their_alternatives(self, service, driver):
        from selenium.webdriver.common.action_chains import ActionChains

        driver.get(service.url)
        for name, value in {"seed": 3, "max_tokens": 20}.items():
            self.set(driver, name, value)
        self.send(driver, "Hello")
        self.wait_for_answers(driver, 1)
        wanted = self.ask(service, [{"role": "user", "content": "Hello"}], seed=3, max_tokens=20)["logprobs"]["content"]
        assert not self.find(driver, ".assistant .tokens").is_displayed()
        self.find(driver, "#shade").click()
        assert not self.find(driver, ".assistant .plain").is_displayed()
        spans = driver.find_elements("css selector", ".assistant .token")
        assert len(spans) == len(wanted)
        shades = [
            float(driver.execute_script("return arguments[0].style.getPropertyValue('--surprise')", s)) for s in spans
        ]
        expected = [min(1.0, -token["logprob"] / np.log(100)) for token in wanted]
        np.testing.assert_allclose(shades, expected, atol=1e-6)
        for place in (0, len(wanted) - 1):
            ActionChains(driver).move_to_element(spans[place]).perform()
            panel = self.wait(driver, lambda driver: self.find(driver, "#panel"))
            assert panel.is_displayed()
            assert f"log-probability {wanted[place]['logprob']:.3f}" in panel.text
            chosen = json.loads(self.text(driver, "#panel tr.chosen td"))
            assert chosen == wanted[place]["token"]
            cells = driver.execute_script(
                "return [...document.querySelectorAll('#panel tr td:first-child')].map(x => x.textContent)"
            )
            assert {token["token"] for token in wanted[place]["top_logprobs"]} <= {json.loads(cell) for cell in cells}
        # The panel also opens with the keyboard.
        self.find(driver, ".assistant .tokens").click()
        ActionChains(driver).send_keys("\ue014").perform()  # the right arrow
        assert self.find(driver, "#panel").is_displayed()

    def test_a_stopped_answer_frees_its_slot(self, driver):
        with running() as service:
            driver.get(service.url)
            service.engine.pause()  # so that the answer does not end before it is stopped
            self.send(driver, "Hello")
            self.wait(driver, lambda _: service.engine.counts().waiting == 1)
            self.find(driver, "#send").click()
            self.wait(driver, lambda driver: self.find(driver, "#send").text == "Send")
            assert self.text(driver, ".assistant .note") == "0 tokens · stopped"
            self.wait(driver, lambda _: service.engine.counts().waiting == 0)
            service.engine.resume()
            self.set(driver, "max_tokens", 3)
            self.send(driver, "Hello again")
            self.wait_for_answers(driver, 2)
            assert service.engine.counts().tokens <= 3

    def test_refusal_is_shown_and_the_text_can_be_sent_again(self, service, driver):
        driver.get(service.url)
        self.send(driver, "x" * 1000)
        self.wait(driver, lambda driver: driver.find_elements("css selector", ".assistant .error"))
        assert "400" in self.text(driver, ".assistant .error")
        assert self.find(driver, "#message").get_attribute("value") == "x" * 1000
        (entry,) = driver.get_log("browser")
        assert "the server responded with a status of 400" in entry["message"]

    def test_without_a_chat_template_texts_are_continued(self, driver):
        with running(template=None) as service:
            driver.get(service.url)
            assert not self.find(driver, "[name=system]").is_displayed()
            for name, value in {"seed": 5, "max_tokens": 12}.items():
                self.set(driver, name, value)
            self.find(driver, "#shade").click()
            self.send(driver, "Hello")
            self.wait_for_answers(driver, 1)
            body = {"prompt": "Hello", "seed": 5, "max_tokens": 12}
            wanted = self.post(service, "completions", body)["text"]
            assert self.text(driver, ".assistant .plain") == wanted
            assert len(driver.find_elements("css selector", ".assistant .token")) == 12

    def test_page_sends_the_key(self, driver):
        with running(keys=[KEY]) as service:
            driver.get(service.url)
            self.set(driver, "key", KEY)
            self.set(driver, "max_tokens", 5)
            self.send(driver, "Hello")
            self.wait_for_answers(driver, 1)
            assert "5 tokens" in self.text(driver, ".assistant .note")

    def show(self, driver, text, size=5):
        """Let the page show an answer, and return its HTML without most attributes."""
        driver.execute_script(ANSWER, text, size)
        self.send(driver, "Hello")
        self.wait_for_answers(driver, 1)
        assert driver.execute_script("return document.querySelector('.assistant').message.text") == text
        html = driver.execute_script("return document.querySelector('.assistant .plain').innerHTML")
        return re.sub(r' (class|href|target|rel|type)=("[^"]*")', "", html)

    def live(self, driver, tmp_path, **changes):
        settings = {"kind": "chat", "model": "tiny", "alternatives": 5, "needs_key": False}
        (tmp_path / "page.html").write_text(page(settings | changes), "utf-8")
        driver.get((tmp_path / "page.html").as_uri())

    @pytest.mark.parametrize("size", [1, 5, 1000])
    def test_answers_are_formatted(self, driver, tmp_path, size):
        self.live(driver, tmp_path)
        assert self.show(driver, MARKDOWN, size) == RENDERED
        links = driver.execute_script("return [...document.querySelectorAll('.plain a')].map(a => a.href)")
        assert links == [f"https://example.org/{path}" for path in ("a_b", "p.png", "bare")]

    def test_no_answer_becomes_html_or_hides_where_a_link_leads(self, driver, tmp_path):
        self.live(driver, tmp_path)
        self.show(driver, ATTACKS)
        assert driver.title == "tiny · jaxgen"
        names = driver.execute_script(
            "return [...new Set([...document.querySelectorAll('.plain *')].map(x => x.localName))].sort()"
        )
        assert names == "a blockquote button code div em h3 li p pre strong ul".split()
        attributes = driver.execute_script(
            "return [...new Set([...document.querySelectorAll('.plain *')].flatMap(x => x.getAttributeNames()))].sort()"
        )
        assert attributes == ["class", "href", "rel", "target", "type"]
        links = driver.execute_script(
            "return [...document.querySelectorAll('.plain a')].map(a => [a.textContent, a.getAttribute('href'), a.rel])"
        )
        assert {rel for _, _, rel in links} == {"noopener noreferrer"}
        assert all(shown == target and target.startswith("https://") for shown, target, _ in links)
        assert {target for _, target, _ in links} >= {"https://evil.example", "https://example.org/f.png"}

    @pytest.mark.parametrize(
        "text", ["*a " * 8000, "*a* " * 60000, "**" * 12000, "`" * 8000 + "a`` " * 4000, "[" * 20000, "> " * 8000]
    )
    def test_hostile_markdown_takes_little_time(self, driver, tmp_path, text):
        self.live(driver, tmp_path)
        seconds = driver.execute_script(
            "const begun = performance.now(); blocksOf(arguments[0]).map((block) => blockOf(block));"
            "return (performance.now() - begun) / 1000",
            text,
        )
        assert seconds < 1

    def test_options_are_collapsed_on_a_phone(self, driver, tmp_path):
        phone = {"width": 390, "height": 800, "deviceScaleFactor": 1, "mobile": True}
        driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", phone)
        self.live(driver, tmp_path, model="a-model-with-a-long-name")
        height = "return document.querySelector(arguments[0]).getBoundingClientRect().height"
        assert driver.execute_script(height, "header") < 60  # one line
        assert driver.execute_script(height, "main") > 600
        assert driver.execute_script("return document.documentElement.scrollWidth") == 390
        temperature = self.find(driver, "[name=temperature]")
        assert not temperature.is_displayed()
        self.find(driver, "#fold").click()
        assert temperature.is_displayed()
        assert self.find(driver, "#fold").get_attribute("aria-expanded") == "true"
        temperature.send_keys("9")  # above the maximum
        self.find(driver, "#fold").click()
        self.send(driver, "Hello")
        assert temperature.is_displayed()
        assert not driver.find_elements("css selector", "article")

    def test_an_example_is_sent_and_answered_again(self, service, driver):
        driver.get(service.url)
        self.set(driver, "max_tokens", 5)
        example = self.find(driver, "#hint button")
        text = example.text
        example.click()
        self.wait_for_answers(driver, 1)
        assert not driver.find_elements("css selector", "#hint")
        driver.execute_script("window.first = document.querySelector('.assistant')")
        self.find(driver, ".again").click()
        self.wait(driver, lambda driver: driver.execute_script("return !first.isConnected && !running"))
        assert self.text(driver, "article:last-child .note").startswith("5 tokens")
        shown = driver.execute_script("return [...document.querySelectorAll('article')].map(x => x.message.text)")
        assert shown == driver.execute_script("return conversation.map(x => x.content)")
        assert (len(shown), shown[0]) == (2, text)
        self.find(driver, "#restart").click()
        assert self.find(driver, "#hint").is_displayed()

    @pytest.mark.parametrize("allowed", [True, False])
    def test_texts_are_copied(self, service, driver, allowed):
        permissions = ["clipboardReadWrite", *["clipboardSanitizedWrite"] * allowed]
        driver.execute_cdp_cmd("Browser.grantPermissions", {"permissions": permissions})
        driver.get(service.url)
        self.show(driver, MARKDOWN)
        read = "navigator.clipboard.readText().then(arguments[0])"
        for selector, text in ((".tools button", MARKDOWN), (".bar button", "<b>code</b>\n  **indented**")):
            self.find(driver, selector).click()
            self.wait(driver, lambda driver, selector=selector: self.text(driver, selector) == "Copied")
            assert driver.execute_async_script(read) == text
        self.wait(driver, lambda driver: self.text(driver, ".bar button") == "Copy")

    def test_a_line_ends_without_the_shade_of_the_next_token(self, driver, tmp_path):
        tokens = [{"token": " word", "logprob": -9.0, "bytes": list(b" word"), "top_logprobs": []}] * 200
        (tmp_path / "page.html").write_text(recorded([{"text": "", "tokens": tokens, "note": ""}]), "utf-8")
        driver.get((tmp_path / "page.html").as_uri())
        boxes = "return [...document.querySelectorAll('.tokens .ink')].map(x => x.getClientRects().length)"
        assert driver.execute_script(boxes) == [1] * 200
        assert driver.execute_script("return document.querySelector('.assistant .tokens').textContent") == " word" * 200
        tops = "return [...document.querySelectorAll('.tokens .ink')].map(x => x.getBoundingClientRect().top)"
        assert len(set(driver.execute_script(tops))) > 5

    def test_a_recorded_page_shows_texts_as_they_are(self, driver, tmp_path):
        one = {"token": "ü", "logprob": -0.5, "bytes": [0xC3, 0xBC], "top_logprobs": []}
        parts = [one | {"token": "\ufffd", "bytes": [byte]} for byte in (0xC3, 0xBC)]
        answers = [{"text": "üü", "tokens": [one, *parts], "note": "3 tokens"}]
        (tmp_path / "page.html").write_text(recorded(answers), "utf-8")
        driver.get((tmp_path / "page.html").as_uri())
        assert driver.title.startswith("</script>")
        assert self.text(driver, ".user .plain") == HOSTILE
        spans = driver.find_elements("css selector", ".assistant .token")
        assert [span.text for span in spans] == ["ü", "·", "ü"]
        assert not self.find(driver, "#ask").is_displayed()
