#!/usr/bin/env python3
"""A scripted OpenAI server with the noise of a real one, for measuring the throughput gate: it knows no model.

    python -m tests.gates.noisy_server

Prints its port, then serves on 127.0.0.1 until its stdin ends. One loop in one process, so that many streams at once
cost little. What a server would do is in the model's name, so that many different ones answer side by side:
`rate=57.0,cv=0.1,stalls=0.2,stall_s=0.2,ttft_s=0.08`.
"""

from __future__ import annotations

import asyncio
import json
import random
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
COUNT = [token for number in range(1, 51) for token in (str(number), "\n")][:-1]
SHORTEST_GAP = 0.05  # of the mean: a normal distribution has a tail below zero


@dataclass(frozen=True)
class Noise:
    """How a server answers. ``rate``: tokens a second, 0 for at once; ``cv`` of each token's time; ``stalls``: share of
    the answers that have a stall of ``stall_s`` seconds.
    """

    rate: float = 57.0
    cv: float = 0.1
    stalls: float = 0.2
    stall_s: float = 0.2
    ttft_s: float = 0.08

    @property
    def name(self) -> str:
        """The model's name that asks for it."""
        return ",".join(f"{item.name}={getattr(self, item.name)!r}" for item in fields(self))


#: A server that never hesitates.
EXACT = Noise(cv=0, stalls=0)


def parse(name: str) -> Noise:
    """What a model's name asks for."""
    return Noise(**{key: float(value) for key, value in (part.split("=") for part in name.split(","))})


def schedule(noise: Noise, tokens: int, chosen: random.Random) -> list[float]:
    """When each token is due, in seconds after the request."""
    if noise.rate == 0:
        return [0.0] * tokens
    mean = 1 / noise.rate
    stalled = chosen.randrange(1, tokens) if tokens > 1 and chosen.random() < noise.stalls else -1
    at, due = noise.ttft_s, []
    for n in range(tokens):
        if n:
            at += mean * max(SHORTEST_GAP, chosen.gauss(1, noise.cv)) + (noise.stall_s if n == stalled else 0)
        due.append(at)
    return due


def texts(body: dict[str, Any]) -> tuple[list[str], str]:
    """The answer's tokens, and the finish reason: counting with an end token, or as many words as may be."""
    prompt = body["messages"][-1]["content"]
    if isinstance(prompt, list):  # as `vllm bench serve` writes it
        prompt = "".join(part.get("text", "") for part in prompt)
    if prompt.startswith("Count from 1 to 50"):
        return [*COUNT, ""], "stop"
    return [" w"] * int(body.get("max_tokens") or body["max_completion_tokens"]), "length"


async def answer(body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
    """Stream one answer in vLLM's form: the role with the first token, the finish reason with the last."""
    loop = asyncio.get_running_loop()
    began = loop.time()
    tokens, finish = texts(body)
    if not body.get("stream"):
        usage = {"prompt_tokens": _prompt_tokens(body), "completion_tokens": len(tokens)}
        message = {"role": "assistant", "content": "".join(tokens)}
        choice = {"index": 0, "message": message, "finish_reason": finish}
        await _send(writer, {"choices": [choice], "usage": usage})
        return
    writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n")
    await writer.drain()
    chosen = random.Random()
    for n, due in enumerate(schedule(parse(body["model"]), len(tokens), chosen)):
        wait = began + due - loop.time()
        await (asyncio.sleep(wait) if wait > 0 else writer.drain())
        if n == 0:
            _event(writer, {"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]})
        last = n == len(tokens) - 1
        choice = {"index": 0, "delta": {"content": tokens[n]}, "finish_reason": finish if last else None}
        _event(writer, {"choices": [choice]})
    usage = {"prompt_tokens": _prompt_tokens(body), "completion_tokens": len(tokens), "total_tokens": 0}
    _event(writer, {"choices": [], "usage": usage})
    _chunk(writer, b"data: [DONE]\n\n")
    writer.write(b"0\r\n\r\n")
    await writer.drain()


async def connection(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Answer the requests of one connection."""
    try:
        while head := (await reader.readuntil(b"\r\n\r\n")).decode():
            lines = head.split("\r\n")
            headers = dict(line.lower().split(": ", 1) for line in lines[1:] if ": " in line)
            content = await reader.readexactly(int(headers.get("content-length", 0)))
            if lines[0].startswith("GET"):
                await _send(writer, {"data": [{"id": Noise().name, "max_model_len": 65536}]})
            elif "/chat/completions " not in lines[0]:
                await _send(writer, {"error": {"message": "not found"}}, "404 Not Found")
            else:
                await answer(json.loads(content), writer)
    except (asyncio.IncompleteReadError, ConnectionError):
        pass
    finally:
        writer.close()


def _prompt_tokens(body: dict[str, Any]) -> int:
    return 8 + sum(len(str(message["content"]).split()) for message in body["messages"])


async def _send(writer: asyncio.StreamWriter, content: dict[str, Any], status: str = "200 OK") -> None:
    payload = json.dumps(content).encode()
    head = f"HTTP/1.1 {status}\r\nContent-Type: application/json\r\nContent-Length: {len(payload)}\r\n\r\n"
    writer.write(head.encode() + payload)
    await writer.drain()


def _event(writer: asyncio.StreamWriter, event: dict[str, Any]) -> None:
    _chunk(writer, f"data: {json.dumps(event)}\n\n".encode())


def _chunk(writer: asyncio.StreamWriter, payload: bytes) -> None:
    writer.write(b"%x\r\n%s\r\n" % (len(payload), payload))


async def main() -> None:
    """Serve until stdin ends."""
    server = await asyncio.start_server(connection, "127.0.0.1", 0, backlog=1024, limit=2**22)
    print(server.sockets[0].getsockname()[1], flush=True)
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)


@contextmanager
def serve() -> Iterator[str]:
    """A server in a process of its own; gives its URL."""
    command = [sys.executable, "-m", "tests.gates.noisy_server"]
    with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin
        assert process.stdout
        try:
            yield f"http://127.0.0.1:{int(process.stdout.readline())}"
        finally:
            process.stdin.close()


if __name__ == "__main__":
    asyncio.run(main())
