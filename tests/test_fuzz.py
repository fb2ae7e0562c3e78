"""Decoding does not depend on where bytes were cut; no input costs more than its size; what the fuzzer found stays mended."""
from __future__ import annotations

import dataclasses
import json
import os
import random
import tempfile
import time
import unittest
import zlib
from typing import Any, Callable, Dict, Sequence

from tests.drive import m
from tests.fuzz import exchange_of, framed, pages, read_address, read_answer, read_files, read_prompts, read_stream, run_target, streams, targets

SEED = int(os.environ.get("SPEC_TEST_SEED", "7"))
STAMPS = {"first_s": None, "first_answer_s": None, "last_s": None, "chunk_at_s": ()}


class TestSmallFuzz(unittest.TestCase):
    def test_a_few_hundred_inputs_a_reader(self):
        """The long run is `python3 -m tests.fuzz`."""
        chance, findings = random.Random(SEED), []
        with tempfile.TemporaryDirectory() as folder:
            for name, target in targets(folder).items():
                run_target(name, target, 150, chance, folder, 2.0, lambda where, data, error: findings.append((where, data[:300], repr(error))))
        self.assertEqual(findings, [])


class TestCuts(unittest.TestCase):
    """A stream that comes in pieces says what it says whole; only the stamps differ."""

    def read(self, data: bytes, cuts: Sequence[int]) -> m.Reply:
        reply = m.read_reply(exchange_of(data, cuts), "p")
        self.assertIsNone(reply.error)
        return reply

    def check(self, data: bytes, offsets: Sequence[int]) -> None:
        whole = self.read(data, ())
        for cut in offsets:
            framing = m.Framing()
            self.assertFalse(framing.complete(bytearray(data[:cut])), "an answer that has not ended is not taken for whole")
            self.assertTrue(framing.complete(bytearray(data)))
            self.assertEqual(framing.end, len(data))
            reply = self.read(data, (cut,))
            self.assertEqual(dataclasses.replace(reply, **STAMPS), dataclasses.replace(whole, **STAMPS))
            self.assertEqual(len(reply.chunk_at_s), len(whole.chunk_at_s))
            self.assertEqual(list(reply.chunk_at_s), sorted(reply.chunk_at_s))

    def test_every_capture_cut_in_two(self):
        """At every byte around an event's and a chunk's ends, and at every 97th between (SPEC_TEST_EVERY=1: at every byte)."""
        every = int(os.environ.get("SPEC_TEST_EVERY", "397"))
        for number, body in enumerate(body for body in streams() if b'"finish_reason":"' in body and b'"error"' not in body):
            data = framed(body, 61 if number % 2 else 4096)
            middle = len(data) // 2
            near = [*range(0, 200, 3), *range(middle, middle + 120, 2), *range(len(data) - 40, len(data))]
            with self.subTest(number):
                self.check(data, sorted({place for place in [*near, *range(0, len(data), every)] if 0 <= place < len(data)}))

    def test_every_capture_byte_by_byte(self):
        for number, body in enumerate(body for body in streams() if b'"finish_reason":"' in body and b'"error"' not in body):
            data = framed(body, 1000)
            whole, single = self.read(data, ()), self.read(data, range(len(data)))
            with self.subTest(number):
                self.assertEqual(dataclasses.replace(single, **STAMPS), dataclasses.replace(whole, **STAMPS))

    def test_gzip_cut_in_two(self):
        body = streams()[0]
        packer = zlib.compressobj(wbits=31)
        packed = b"".join(packer.compress(body[place:place + 700]) + packer.flush(zlib.Z_SYNC_FLUSH) for place in range(0, len(body), 700)) + packer.flush()
        data = framed(packed, 200).replace(b"Server: test", b"Content-Encoding: gzip")
        self.check(data, range(0, len(data), 29))
        self.assertEqual(self.read(data, ()).content, self.read(framed(body), ()).content)

    def test_a_page_of_metrics_that_is_cut_gives_no_wrong_number(self):
        for page in pages()[:4]:
            whole = {(sample.name, tuple(sorted(sample.labels.items()))): sample.value for sample in m.parse_metrics(page).samples}
            for cut in range(0, len(page), 13):
                if page[cut:cut + 1] == b"\n":
                    for sample in m.parse_metrics(page[:cut]).samples:
                        self.assertEqual(whole[sample.name, tuple(sorted(sample.labels.items()))], sample.value)


def seconds_of(work: Callable[[], Any]) -> float:
    began = time.process_time()
    work()
    return time.process_time() - began


class TestTimeAgainstSize(unittest.TestCase):
    """Twice the input may take about twice as long, never four times; and a megabyte never more than moments."""

    SIZE = int(os.environ.get("SPEC_TEST_SIZE", "12000"))   # the large input is four times that

    def check(self, name: str, work: Callable[[bytes], Any], make: Callable[[int], bytes], size: int = SIZE) -> None:
        with self.subTest(name):
            small, large = make(size), make(4 * size)
            again = seconds_of(lambda: work(large))
            if again > 0.25:        # below that, nothing is slow, and clocks are coarse
                again = min(again, seconds_of(lambda: work(large)))
                first = min(seconds_of(lambda: work(small)) for _ in range(2))
                self.assertLess(again, 9 * max(first, 0.02), f"{len(small)} bytes: {first:.3f} s, {len(large)} bytes: {again:.3f} s")

    NASTY: Dict[str, Callable[[int], bytes]] = {
        "quotes": lambda n: b'"' * n, "braces": lambda n: b"{" * n, "brackets": lambda n: b"[" * n, "closed brackets": lambda n: b"[" * n + b"]" * n,
        "carriage returns": lambda n: b"\r" * n, "line feeds": lambda n: b"\n" * n, "blanks": lambda n: b" " * n, "backslashes": lambda n: b'"' + b"\\" * n,
        "zeros": lambda n: b"\0" * n, "digits": lambda n: b"9" * n, "one long line": lambda n: b"data: " + b"x" * n, "data": lambda n: b"data:" * (n // 5),
        "data lines": lambda n: b"data: {}\n" * (n // 9), "comments": lambda n: b":\n\n" * (n // 3), "empty events": lambda n: b"data: \n\n" * (n // 8),
        "heads of chunks": lambda n: b"\r\n0" * (n // 3), "commas": lambda n: b"," * n, "escapes": lambda n: b'"' + b"\\u0041" * (n // 6),
        "labels": lambda n: b"a{" + b'b="c",' * (n // 6), "label quotes": lambda n: b"a{" + b'b="' * (n // 3) + b"} 1", "samples": lambda n: b'a{b="c"} 1\n' * (n // 11),
        "loose labels": lambda n: (b'a{x="' + b'"q' * 1500 + b'",b="c"} 1\n') * (n // 3000),
        "objects": lambda n: b'{"a":' * (n // 5), "messages": lambda n: b'data: {"choices":[{"delta":{"content":"x"}}]}\n\n' * (n // 46),
    }

    def test_bodies_and_pages(self):
        for name, make in self.NASTY.items():
            chance = random.Random(1)
            self.check(f"stream of {name}", lambda data: m.read_reply(exchange_of(framed(data)), "p"), make)
            self.check(f"answer of {name}", lambda data: m.read_reply(exchange_of(framed(data, kind=b"application/json")), "p"), make)
            self.check(f"chunked {name}", lambda data: m.read_reply(exchange_of(framed(data, 1000), range(0, len(data), 5000)), "p"), make)
            self.check(f"page of {name}", m.parse_metrics, make)
            self.check(f"prompts of {name}", lambda data: read_prompts(data, chance), make, self.SIZE // 4)

    def test_connections(self):
        """Followed in pieces of a connection's size, as they arrive."""
        head = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
        responses: Dict[str, Callable[[int], bytes]] = {
            "interim heads": lambda n: b"HTTP/1.1 100 Continue\r\n\r\n" * (n // 25), "header lines": lambda n: b"HTTP/1.1 200 OK\r\n" + b"a: b\r\n" * (n // 6),
            "trailers": lambda n: head + b"0\r\n" + b"a: b\r\n" * (n // 6), "small chunks": lambda n: head + b"1\r\n0\r\n" * (n // 6),
            "chunks of zeros": lambda n: head + b"".join(b"3\r\n\r\n0\r\n" for _ in range(n // 8)), "no end": lambda n: head + b"ffffff\r\n" + b"x" * n,
            "chunk lines": lambda n: head + b"1" * n, "chunk extensions": lambda n: head + b"1;" + b"x" * n}

        def follow(data: bytes) -> None:
            framing, so_far = m.Framing(), bytearray()
            for start in range(0, len(data), 512):
                so_far += data[start:start + 512]
                if framing.complete(so_far) or framing.broken:
                    break
            m.read_response(exchange_of(bytes(so_far)))

        for name, make in responses.items():
            self.check(name, follow, make, 2 * self.SIZE)
            if name in ("interim heads", "header lines", "trailers", "chunk lines", "chunk extensions"):
                data, framing = make(2 * m.MAX_HEAD_BYTES), m.Framing()
                self.assertFalse(framing.complete(bytearray(data)), name)
                self.assertTrue(framing.broken, f"{name}: what does not end within {m.MAX_HEAD_BYTES >> 10} KiB is given up")

    def test_growing_replies(self):
        """Many small pieces of one reply: token ids, tool calls, engine fields."""
        def stream(piece: Callable[[int], Any]) -> Callable[[int], bytes]:
            return lambda n: b"".join(b"data: " + json.dumps(piece(place)).encode() + b"\n\n" for place in range(n))

        read = lambda data: m.read_reply(exchange_of(framed(data)), "p")    # noqa: E731
        delta = lambda value, **more: {"choices": [{"index": 0, "delta": value, **more}]}   # noqa: E731
        self.check("token ids", read, stream(lambda k: delta({"content": "x"}, token_ids=[k])), self.SIZE // 20)
        self.check("arguments", read, stream(lambda k: delta({"tool_calls": [{"index": 0, "function": {"arguments": "x" * 50}}]})), self.SIZE // 20)
        self.check("calls", read, stream(lambda k: delta({"tool_calls": [{"index": k, "function": {"name": "f"}}]})), self.SIZE // 20)
        self.check("timings", read, stream(lambda k: {"timings": {f"k{k}": k}, "choices": []}), self.SIZE // 20)

    def test_prompt_files(self):
        lines = lambda make: lambda n: b"".join(json.dumps(make(k)).encode() + b"\n" for k in range(n))     # noqa: E731
        read = lambda data: m.parse_prompts(data, "p.jsonl", "w")       # noqa: E731
        self.check("same ids", read, lines(lambda k: {"id": "x", "prompt": f"p{k}"}), self.SIZE // 40)
        self.check("own workloads", read, lines(lambda k: {"id": k, "prompt": f"p{k}", "workload": f"w{k}"}), self.SIZE // 40)
        self.check("recorded answers", lambda data: read_prompts(data, random.Random(1)),
                   lambda n: json.dumps({"messages": [{"role": "user", "content": "x"}] + [{"role": "assistant", "content": "y"}] * n}).encode(), self.SIZE // 4)

    def test_many_kinds_of_failures(self):
        played = m.Played((), 1.0, None, None, False)
        pages_ = m.no_page("none"), m.no_page("none")
        self.check("failures", lambda replies: m.pass_caveats(replies, played, *pages_, "m"),
                   lambda n: [m.Reply(str(k), error=f"HTTP 500: incident {k}") for k in range(n)], self.SIZE // 10)      # type: ignore[arg-type, return-value]


class TestFindings(unittest.TestCase):
    """What was found, by hand and by the fuzzer."""

    def test_addresses(self):
        chance = random.Random(0)
        for text in ("http://us\udc86er:pw@host/", "http://[fe80::1%\udcad]:80/", "http://a..b/", f"http://{'x' * 64}/", "http://[", "http://h:99999/", "http:///v1",
                     "http://[::1", "http://h:p@ss/", "//", "http://\u2100/", "http://h/\udcff", "http://[fe80::1%ж]/"):
            with self.subTest(text):
                read_address(text.encode("utf-8", "surrogateescape"), chance)

    def test_credentials_that_are_not_shown(self):
        for text in ("http://user:hun/ter2@host:x/", "http://user:hun@ter2@host:x/", "ftp://user:hunter2@host/", "http://host/v1?api_key=hunter2",
                     "http://host/v1#hunter2", "http:/user:hunter2@host/", "http://user:hunter2@ho st/", "http://user:hunter2@:80/", "http://user:hunter2@[::1/",
                     "/user:hunter2@host://x", "ftp://user:hun?ter2@host/", "https://user:hunter2https://@host.example:8443/v1", "http://user:80/hunter2@host/v1",
                     "http://user:hunter2:\n:80/chat@/v1", "http://user:1?hunter2@host/v1", "http://user:8#hunter2@host/v1"):
            with self.subTest(text):
                with self.assertRaises(m.MeasureError) as caught:
                    m.parse_base_url(text)
                shown = caught.exception.sentence + caught.exception.hint
                self.assertNotIn("ter2", shown)
                self.assertNotIn("user", shown)

    def test_keys_that_no_header_can_carry(self):
        for key in ("ключ", "a\r\nX-Evil: 1", "two words", "\udc80"):
            with self.assertRaises(m.MeasureError) as caught:
                m.parse_base_url("http://host/", key)
            self.assertNotIn(key, caught.exception.sentence)
        self.assertEqual(m.parse_base_url("http://host/", "key\n").origin.authorization, "Bearer key")

    def test_redirects_that_are_none(self):
        for place in ("http://[bad/", "http://host:port/", "http://\u2100/"):
            with self.assertRaises(m.MeasureError):
                m.redirect_path(m.Origin("http", "host", 80), m.Response(307, {"location": place}, b"", (), (), None))
        moved = m.redirect_path(m.Origin("http", "host", 80), m.Response(307, {"location": "/a b\nX: y?q r"}, b"", (), (), None))
        self.assertNotRegex(moved, r"[\s]")

    def test_objects_within_objects(self):
        """Nesting near every limit of the interpreter: understood or refused, never a RecursionError."""
        for depth in [*range(300, 1100, 40), 5000, 100_000]:
            deep = "[" * depth + "]" * depth
            objects = '{"a":' * depth + "1" + "}" * depth
            with self.subTest(depth):
                for inner in (deep, objects):
                    for body in ('{"error": %s}', '{"choices": [{"message": {"content": "x", "tool_calls": [{"function": {"name": "f", "arguments": %s}}]}}]}',
                                 '{"timings": %s, "choices": [{"message": {"content": "x"}, "finish_reason": "stop"}]}',
                                 '{"timings": {"a": %s}, "metrics": {"a": %s}, "choices": [{"message": {"content": "x"}, "finish_reason": %s}]}'):
                        data = body.replace("%s", inner).encode()
                        read_answer(data, random.Random(1))
                        read_stream(b"data: " + data + b"\n\n", random.Random(1))
                    for line in ('{"prompt": "x", "tools": %s}', '{"messages": [{"role": "user", "content": %s}]}',
                                 '{"prompt": "x", "tools": [{"name": "f", "parameters": {"a": %s}}]}',
                                 '[{"prompt": %s}]', '{"question": %s}'):
                        read_prompts(line.replace("%s", inner).encode(), random.Random(1))
                    with tempfile.TemporaryDirectory() as folder:
                        read_files([('{"record": "run", "settings": %s}\n' % objects).encode(), ('{"record": "reply", "server": "s", "workload": "w", "concurrency": 1, '
                                    '"reply": {"prompt_id": "p", "engine_timings": %s, "content": "x"}}\n' % inner).encode()], random.Random(1), folder)

    def test_half_pairs_and_damaged_bytes(self):
        reply = m.read_reply(exchange_of(framed(b'data: {"choices":[{"delta":{"content":"\\ud800 \xff x"},"finish_reason":"stop"}]}\n\n')), "p")
        self.assertTrue(reply.damaged)
        back = m.reply_from_json(json.loads(m.json_line(m.as_json(reply))))
        self.assertEqual(back.content, "\ud800 \udcff x")
        self.assertEqual(m.without_texts(reply).digests, m.without_texts(back).digests)

    def test_what_is_no_id_of_a_token_is_not_kept(self):
        """It could not be read back out of the run file, and the whole reply with it."""
        for odd in ("-1479", "true", "1.5", '"7"', "null", "1" * 400):
            for body in ('data: {"choices":[{"delta":{"content":"x"},"token_ids":[851, %s]}]}\n\n', '{"choices":[{"message":{"content":"x"},"response_token_ids":[851, %s]}]}'):
                with self.subTest(odd, body=body):
                    kind = b"text/event-stream" if body.startswith("data") else b"application/json"
                    reply = m.read_reply(exchange_of(framed((body % odd).encode(), kind=kind)), "p")
                    self.assertEqual(reply.token_ids, (851,))
                    self.assertEqual(m.reply_from_json(json.loads(m.json_line(m.as_json(reply)))).token_ids, (851,))

    def test_a_digest_that_is_no_text(self):
        prompt = m.Prompt("p", "w", ({"role": "user", "content": "x"},), sha256="\ud800")
        self.assertRegex(m.prompts_sha256([prompt]), r"\A[0-9a-f]{64}\Z")

    def test_gzip_files_of_several_members(self):
        import gzip
        data = gzip.compress(b"one\n") + gzip.compress(b"two\n")
        self.assertEqual([prompt.messages[0]["content"] for prompt in m.parse_prompts(data, "p.gz", "w").prompts], ["one", "two"])
        with self.assertRaises(m.MeasureError):
            m.parse_prompts(data[:-9], "p.gz", "w")

    def test_ids_that_look_like_renamed_ones(self):
        lines = b"".join(json.dumps({"id": identity, "prompt": f"p{place}"}).encode() + b"\n" for place, identity in enumerate(["a", "a", "a-2", "a", "a-2"]))
        self.assertEqual(len({prompt.id for prompt in m.parse_prompts(lines, "p", "w").prompts}), 5)


if __name__ == "__main__":
    unittest.main()
