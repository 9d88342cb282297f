"""The real `openai` client, over TCP and over the Unix socket, waiting and streaming."""

from collections.abc import AsyncIterator, Iterator

import anyio
import httpx2
import openai
import pytest
from openai.types.chat import ChatCompletionMessageParam

from tests.api.servers import PATIENCE, RunningServer

SAY: list[ChatCompletionMessageParam] = [{"role": "user", "content": "say [[hello häuser 🦄]]"}]
SAID = "hello häuser 🦄"


@pytest.fixture(params=["tcp", "unix"])
def speaker(request: pytest.FixtureRequest, server: RunningServer) -> Iterator[openai.OpenAI]:
    transport = httpx2.HTTPTransport(uds=str(server.uds)) if request.param == "unix" else None
    with (
        httpx2.Client(transport=transport) as http,
        openai.OpenAI(
            base_url=f"{server.url}/v1", api_key="none", http_client=http, max_retries=0, timeout=PATIENCE
        ) as client,
    ):
        yield client


def test_a_whole_answer(speaker: openai.OpenAI) -> None:
    reply = speaker.chat.completions.create(model="fake", messages=SAY, temperature=0)
    assert reply.choices[0].message.content == SAID
    assert reply.choices[0].finish_reason == "stop"
    assert reply.usage is not None
    assert reply.usage.completion_tokens == len(SAID.encode()) + 1
    assert reply.usage.prompt_tokens_details is not None
    assert reply.usage.prompt_tokens_details.cached_tokens in (0, reply.usage.prompt_tokens - 1)


def test_a_streamed_answer(speaker: openai.OpenAI) -> None:
    stream = speaker.chat.completions.create(
        model="fake", messages=SAY, temperature=0, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    assert "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices) == SAID
    assert [choice.finish_reason for chunk in chunks for choice in chunk.choices][-1] == "stop"
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == len(SAID.encode()) + 1


def test_the_clients_own_accumulator_agrees(speaker: openai.OpenAI) -> None:
    with speaker.chat.completions.stream(model="fake", messages=SAY, temperature=0) as stream:
        assert stream.get_final_completion().choices[0].message.content == SAID


def test_text_completions(speaker: openai.OpenAI) -> None:
    reply = speaker.completions.create(model="fake", prompt="[[text]]assistant: ", temperature=0)
    assert reply.choices[0].text == "text"
    stream = speaker.completions.create(model="fake", prompt="[[text]]assistant: ", temperature=0, stream=True)
    assert "".join(chunk.choices[0].text for chunk in stream) == "text"


def test_models(speaker: openai.OpenAI) -> None:
    assert [model.id for model in speaker.models.list()] == ["fake"]
    assert speaker.models.retrieve("fake").id == "fake"


def test_errors_arrive_as_the_clients_own(speaker: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as missing:
        speaker.chat.completions.create(model="other", messages=SAY)
    assert missing.value.code == "model_not_found"
    assert missing.value.request_id
    with pytest.raises(openai.BadRequestError) as bad:
        speaker.chat.completions.create(model="fake", messages=SAY, temperature=3)
    assert bad.value.param == "temperature"


def test_many_at_once_each_get_their_own(server: RunningServer) -> None:
    async def ask(client: openai.AsyncOpenAI, text: str, said: dict[str, str]) -> None:
        messages: list[ChatCompletionMessageParam] = [{"role": "user", "content": f"say [[{text}]]"}]
        stream = await client.chat.completions.create(model="fake", messages=messages, temperature=0, stream=True)
        said[text] = "".join([piece async for piece in _contents(stream)])

    async def main() -> dict[str, str]:
        said: dict[str, str] = {}
        transport = httpx2.AsyncHTTPTransport(uds=str(server.uds))
        async with (
            httpx2.AsyncClient(transport=transport) as http,
            openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", http_client=http) as client,
            anyio.create_task_group() as group,
        ):
            for number in range(24):
                group.start_soon(ask, client, f"answer number {number} " * (number % 4 + 1), said)
        return said

    said = anyio.run(main)
    assert len(said) == 24
    assert all(text == got for text, got in said.items())


async def _contents(stream: openai.AsyncStream[openai.types.chat.ChatCompletionChunk]) -> AsyncIterator[str]:
    async for chunk in stream:
        yield chunk.choices[0].delta.content or ""
