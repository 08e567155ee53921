"""Clients of the service that a module of tests makes in its fixture `service`, with the key `KEY`."""

import asyncio
import gc
import warnings

import httpx
import openai
import pytest

from tests.support.service import KEY


@pytest.fixture(scope="module")
def client(service):
    with openai.OpenAI(base_url=f"{service.url}/v1", api_key=KEY, max_retries=0) as made:
        yield made


@pytest.fixture(scope="module")
def http(service):
    with httpx.Client(base_url=service.url, headers={"Authorization": f"Bearer {KEY}"}, timeout=60) as made:
        yield made


@pytest.fixture
def open_loops():
    """Collect event loops and connections that real clients leave open, so that no later test gets their warnings."""
    yield
    asyncio.set_event_loop(None)
    with warnings.catch_warnings(action="ignore", category=ResourceWarning):
        gc.collect()
