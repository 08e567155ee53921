"""The chat page: its contents, and its behavior in a real browser."""

import json
import re
import urllib.request

import numpy as np
import pytest

from jaxgen.serving.page import page
from tests.support.service import KEY, running

SETTINGS = re.compile(r'<script type="application/json" id="settings">(.*?)</script>', re.DOTALL)
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
            shown = driver.execute_script(
                "return [...document.querySelectorAll('.assistant .plain')].at(-1).textContent"
            )
            assert shown == wanted["message"]["content"]
            messages.append({"role": "assistant", "content": shown})
        note = self.text(driver, ".assistant:last-child .note")
        assert re.fullmatch(r"\d+ tokens · (length|stop) · \d+ tokens/s", note)

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

    def test_what_is_refused_is_said_and_can_be_sent_again(self, service, driver):
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

    def test_keys(self, driver):
        with running(keys=[KEY]) as service:
            driver.get(service.url)
            self.set(driver, "key", KEY)
            self.set(driver, "max_tokens", 5)
            self.send(driver, "Hello")
            self.wait_for_answers(driver, 1)
            assert "5 tokens" in self.text(driver, ".assistant .note")

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
