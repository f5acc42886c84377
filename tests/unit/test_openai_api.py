"""The OpenAI client: what it reads from a stream, and what it says when there is nothing to read."""

from __future__ import annotations

import socket

import pytest
from fake_openai_server import COUNT, FakeOpenAiServer, Reply
from hypothesis import given
from hypothesis import strategies as st
from octoserve.openai_api import (
    ApiError,
    Client,
    Usage,
    join_chunks,
    parse_chunk,
    split_lines,
    sse_payloads,
)

ASK = [{"role": "user", "content": "Count from 1 to 50"}]


@given(st.text(), st.data())
def test_lines_do_not_depend_on_where_the_bytes_were_cut(text: str, data: st.DataObject) -> None:
    raw = text.encode()
    cuts = sorted(data.draw(st.lists(st.integers(0, len(raw)))))
    blocks = [raw[a:b] for a, b in zip([0, *cuts], [*cuts, len(raw)])]
    assert list(split_lines(blocks)) == list(split_lines([raw]))


def test_comments_other_fields_and_crlf_are_no_data() -> None:
    lines = [": ping", "", "event: x", "data: one", "", "data:two", "data: lines", "", "data: [DONE]", ""]
    assert list(sse_payloads(lines)) == ["one", "two\nlines"]
    assert list(split_lines([b"data: one\r\n\r", b"\n"])) == ["data: one", ""]


def test_done_without_an_empty_line_is_an_end() -> None:
    assert list(sse_payloads(["data: one", "", "data: [DONE]"])) == ["one"]


@pytest.mark.parametrize("lines", [[], ["data: one", ""], ["data: one"]])
def test_a_stream_without_done_has_died(lines: list[str]) -> None:
    with pytest.raises(EOFError):
        list(sse_payloads(lines))


def test_usage_chunk_has_no_choices() -> None:
    chunk = parse_chunk('{"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 100}}', 1.5)
    assert (chunk.at, chunk.text, chunk.usage) == (1.5, "", Usage(3, 100))


@pytest.mark.parametrize(
    "reply",
    [
        Reply(COUNT),
        Reply(COUNT, empty_first_chunk=False),
        Reply(COUNT, comments=True),
        Reply(COUNT, tokens_per_chunk=2),
        Reply(COUNT, tokens_per_chunk=7, comments=True),
    ],
)
def test_a_stream_gives_the_whole_text_and_usage(reply: Reply) -> None:
    with FakeOpenAiServer(reply) as server:
        answer = join_chunks(Client(server.url).stream_chat(ASK, max_tokens=512))
    assert answer.text == COUNT
    assert answer.usage == Usage(7, 100)
    assert answer.finish_reason == "stop"
    asked = server.requests[0]
    assert (asked["model"], asked["temperature"], asked["max_tokens"]) == ("fake", 0.0, 512)
    assert asked["stream_options"] == {"include_usage": True}


def test_streamed_and_whole_answers_agree() -> None:
    with FakeOpenAiServer(Reply("The capital of France is Paris.")) as server:
        client = Client(server.url + "/v1/")
        whole = client.chat(ASK, max_tokens=64, chat_template_kwargs={"enable_thinking": False})
        streamed = join_chunks(client.stream_chat(ASK, max_tokens=64))
    assert (whole.text, whole.usage) == (streamed.text, streamed.usage)
    assert server.requests[0]["chat_template_kwargs"] == {"enable_thinking": False}


def test_arrival_times_are_those_of_the_server() -> None:
    """Held to the server's own clock, in the best of three streams: a busy machine may delay one."""
    errors = []
    with FakeOpenAiServer(Reply("a b c d e", ttft_s=0.05, token_s=0.02)) as server:
        client = Client(server.url)
        for _ in range(3):
            chunks = client.stream_chat(ASK, max_tokens=64)
            received, *sent = server.sent[-1]
            arrived = [chunk.at for chunk in chunks if chunk.text or chunk.finish_reason]
            assert len(arrived) == len(sent) == 6
            errors.append(max(abs(at - (due - received)) for at, due in zip(arrived, sent)))
    assert min(errors) < 0.01


def test_text_completions_are_read_as_well() -> None:
    with FakeOpenAiServer(Reply("Paris")) as server:
        answer = Client(server.url, model="other").completion("The capital of France is", max_tokens=1)
    assert answer.text == "Paris"
    assert server.requests[0]["model"] == "other"


@pytest.mark.parametrize("die_after", [0, 10])
def test_a_stream_that_dies_is_an_error(die_after: int) -> None:
    with (
        FakeOpenAiServer(Reply(COUNT, die_after=die_after)) as server,
        pytest.raises(ApiError) as caught,
    ):
        Client(server.url).stream_chat(ASK, max_tokens=512)
    assert caught.value.url == server.url + "/v1/chat/completions"


def test_an_error_object_in_the_stream_is_an_error() -> None:
    with (
        FakeOpenAiServer(Reply(COUNT, error_after=3)) as server,
        pytest.raises(ApiError, match="engine died"),
    ):
        Client(server.url).stream_chat(ASK, max_tokens=512)


@pytest.mark.parametrize("status", [401, 429, 500])
def test_a_refusal_names_url_and_status_but_never_the_key(status: int) -> None:
    with FakeOpenAiServer(Reply(status=status)) as server:
        client = Client(server.url, api_key="sk-secret")
        for ask in (client.chat, client.stream_chat):
            with pytest.raises(ApiError) as caught:
                ask(ASK, max_tokens=5)
            assert caught.value.status == status
            assert str(status) in str(caught.value)
            assert server.url in str(caught.value)
            assert "refused" in caught.value.body
            assert "sk-secret" not in str(caught.value)
    assert server.headers[0]["Authorization"] == "Bearer sk-secret"


@pytest.mark.parametrize("body", [b"", b"<html>", b"[]", b"{}", b'{"choices": [3]}', b'{"choices": [null]}'])
def test_an_answer_that_is_none_is_an_error_of_the_api(body: bytes) -> None:
    with FakeOpenAiServer(Reply(raw_body=body)) as server, pytest.raises(ApiError, match="not a completion"):
        Client(server.url).chat(ASK, max_tokens=5)


def test_nobody_listens() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
        with pytest.raises(ApiError) as caught:
            Client(url).models()
    assert caught.value.status is None
    assert url in str(caught.value)


@pytest.mark.parametrize("reply", [Reply("a", ttft_s=1.0), Reply("a b c d e f g h", token_s=0.1)])
def test_every_wait_is_bounded(reply: Reply) -> None:
    with FakeOpenAiServer(reply) as server, pytest.raises(ApiError):
        Client(server.url, model="fake", timeout=0.2).stream_chat(ASK, max_tokens=5)


def test_a_proxy_in_the_environment_is_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    with FakeOpenAiServer(Reply("Paris")) as server:
        assert Client(server.url).chat(ASK, max_tokens=5).text == "Paris"


def test_no_model_served() -> None:
    with FakeOpenAiServer(Reply("a"), models=()) as server, pytest.raises(ApiError, match="no model"):
        Client(server.url).chat(ASK, max_tokens=5)
