"""streams_client.py ADDRESS N TOKENS: N streams at once, each a connection of its own. Prints "begun" when
each has a token, then what came of them: {done, lost, p99_ms}. The latter is that of the gaps between the
events of a stream, but for the first, in which it moves to a decode worker."""
import asyncio, collections, json, sys, time

(host, port), n, tokens = sys.argv[1].rsplit(":", 1), int(sys.argv[2]), int(sys.argv[3])
BODY = json.dumps({"model": "tandem-demo", "prompt": [7, 8, 9], "max_tokens": tokens, "ignore_eos": True, "stream": True}).encode()
REQUEST = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%s" % (len(BODY), BODY)
begun, done, lost, gaps, why = 0, 0, 0, [], collections.Counter()


async def stream(gate):
    global begun, done, lost
    n_events, last, writer, last_line = 0, 0, None, b""
    try:
        async with gate:  # of handshakes at once
            reader, writer = await asyncio.open_connection(host, int(port), limit=4096)
        writer.write(REQUEST)
        while line := await reader.readline():
            last_line = line if line != b"\n" else last_line
            if line == b"data: [DONE]\n":
                break
            if line.startswith(b"data: {"):
                now = time.monotonic()
                if n_events > 1:
                    gaps.append(now - last)
                last, n_events = now, n_events + 1
                begun += n_events == 1
                if begun == n and n_events == 1:
                    print("begun", flush=True)
        done, lost = done + (n_events >= tokens), lost + (n_events < tokens)
        why[f"ended after {n_events} events: {last_line!r}"[:150]] += n_events < tokens
    except (OSError, ValueError) as e:
        lost += 1
        why[repr(e)] += 1
    finally:
        if writer:
            writer.close()


async def run():
    gate = asyncio.Semaphore(100)
    await asyncio.gather(*(stream(gate) for _ in range(n)))

asyncio.run(run())
gaps.sort()
print(json.dumps({"done": done, "lost": lost, "p99_ms": round(1000 * gaps[len(gaps) * 99 // 100], 1) if gaps else 0,
                  "why": why.most_common(3)}), flush=True)
