"""A client of an OpenAI completions server that streams: it says when the tokens of each request came."""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Sequence

from fcsd.bench.serve.figures import Answer
from fcsd.errors import FcsdError

MODEL = "model"  # the name under which servers offer the model
_TOGETHER = 5e-4  # seconds between two tokens of an answer that came at once: no step is as short


def ask(
    ports: Sequence[int],
    prompts: Sequence[Sequence[int]],
    new: int,
    at: Sequence[float] | None = None,
    limit: float = 300,
) -> list[Answer]:
    """Send prompts and wait for all answers.

    Args:
        ports: the ports of the servers on this machine, among which the prompts are divided in turn.
        new: tokens of each answer; none ends earlier.
        at: when each prompt is sent, in seconds; None sends all at once.
        limit: seconds that everything may take.

    Raises:
        FcsdError: a server refused a request, closed its connection, or was too slow.
    """
    return asyncio.run(_all(ports, prompts, new, at, limit))


async def _all(
    ports: Sequence[int], prompts: Sequence[Sequence[int]], new: int, at: Sequence[float] | None, limit: float
) -> list[Answer]:
    fields = {"model": MODEL, "max_tokens": new, "temperature": 0, "ignore_eos": True, "stream": True}
    bodies = [json.dumps({**fields, "prompt": prompt, "return_token_ids": True}).encode() for prompt in prompts]
    start = time.perf_counter()
    tasks = [
        _one(ports[n % len(ports)], body, start, 0.0 if at is None else at[n], new) for n, body in enumerate(bodies)
    ]
    try:
        async with asyncio.timeout(limit):
            return list(await asyncio.gather(*tasks))
    except TimeoutError:
        raise FcsdError(f"{len(prompts)} requests were not answered within {limit:.0f} s") from None
    except (OSError, asyncio.IncompleteReadError) as error:
        raise FcsdError(f"the server closed the connection ({type(error).__name__})") from None


async def _one(port: int, body: bytes, start: float, at: float, new: int) -> Answer:
    await asyncio.sleep(max(0.0, start + at - time.perf_counter()))
    sent = time.perf_counter()
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 24)
    try:
        head = f"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nContent-Type: application/json\r\n"
        writer.write(f"{head}Content-Length: {len(body)}\r\nConnection: close\r\n\r\n".encode() + body)
        await writer.drain()
        first, last, tokens, early = 0.0, 0.0, 0, 0
        async for event in _events(reader):
            moment = time.perf_counter() - sent
            count = _tokens(event)
            if count and not tokens:
                first = moment
            if count:
                if early == tokens and (not tokens or moment - last <= _TOGETHER):
                    early += count
                last, tokens = moment, tokens + count
    finally:
        writer.close()
    if tokens < new:
        raise FcsdError(f"the server ended an answer after {tokens} of {new} tokens")
    return Answer(sent - start, first, last, tokens, early)


def _tokens(event: bytes) -> int:
    """How many tokens an event of the stream brings."""
    if event == b"[DONE]":
        return 0
    fields = json.loads(event)
    if "error" in fields:
        error = fields["error"]
        raise FcsdError(f"the server said: {error.get('message', error) if isinstance(error, dict) else error}")
    # A server that does not tell token ids sends one token in each event.
    return sum(len(choice["token_ids"]) if choice.get("token_ids") is not None else 1 for choice in fields["choices"])


async def _events(reader: asyncio.StreamReader) -> AsyncIterator[bytes]:
    """The data of each event of an answer, as soon as it is there."""
    status = (await reader.readline()).split(maxsplit=2)
    if len(status) < 2:
        raise ConnectionResetError
    headers = {}
    while (line := (await reader.readline()).strip()) != b"":
        name, _, value = line.partition(b":")
        headers[name.lower()] = value.strip().lower()
    pieces = _chunks(reader) if headers.get(b"transfer-encoding") == b"chunked" else _rest(reader)
    if status[1] != b"200":
        said = b"".join([piece async for piece in pieces]).decode(errors="replace")
        raise FcsdError(f"the server answered {status[1].decode()}: {' '.join(said.split())[:300]}")
    held = b""
    async for piece in pieces:
        *lines, held = (held + piece).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                yield line[len(b"data:") :].strip()


async def _chunks(reader: asyncio.StreamReader) -> AsyncIterator[bytes]:
    while size := int((await reader.readline()).partition(b";")[0] or b"0", 16):
        yield await reader.readexactly(size)
        await reader.readline()


async def _rest(reader: asyncio.StreamReader) -> AsyncIterator[bytes]:
    while piece := await reader.read(1 << 16):
        yield piece
