"""Section 5: bytes and stamps become replies. Every stream is read whole, byte by byte and cut in two at every place."""
import base64
import json
import unittest
from array import array
from pathlib import Path

import measure_speculative as ms

CASES = Path(__file__).parent / "data" / "cases"
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"


def exchange(pieces, sent_s=0.0, error=None):
    """An exchange in which each (at_s, bytes) piece came."""
    data, ends, at_s = bytearray(), array("Q"), array("d")
    for when, piece in pieces:
        data += piece
        ends.append(len(data))
        at_s.append(when)
    return ms.Exchange(sent_s, None, sent_s, at_s[-1] if at_s else sent_s, data, ends, at_s, error)


def chunked(body):
    return b"%x\r\n%s\r\n" % (len(body), body)


def stream(body):
    """A whole response with this event stream in it."""
    return HEAD + chunked(body) + b"0\r\n\r\n"


def timed(name):
    """A recorded stream with its times, as an exchange."""
    first, *rest = [json.loads(line) for line in (CASES / name).read_text().splitlines()]
    head = "".join(f"{key}: {value}\r\n" for key, value in first["headers"].items())
    pieces = [(0.0, f"HTTP/1.1 {first['status']} OK\r\n{head}Transfer-Encoding: chunked\r\n\r\n".encode())]
    pieces += [(line["at_ms"] / 1000, chunked(base64.b64decode(line["b64"]))) for line in rest]
    pieces.append((pieces[-1][0], b"0\r\n\r\n"))
    return exchange(pieces)


def understood(reply):
    """What a reply says, its stamps aside."""
    return (reply.content, reply.reasoning, reply.tool_calls, reply.finish_reason, reply.completion_tokens, reply.token_source,
            reply.acceptance, reply.error, len(reply.chunk_at_s), reply.damaged, reply.token_ids)


def read(body):
    return ms.read_reply(exchange([(0.1, stream(body))]), "p")


def case(name):
    return read((CASES / name).read_bytes())


class Halves(unittest.TestCase):
    def test_a_pair_in_two_pieces_is_one_character(self):
        """A server that escapes and cuts by UTF-16 units; the same answer in one piece is the same answer."""
        def event(piece):
            return b'data: {"choices":[{"delta":{"content":"%s"},"finish_reason":%s}]}\n\n' % (piece, b'"stop"' if piece == b"!" else b"null")

        cut, whole = (read(b"".join(map(event, pieces))) for pieces in ((b"x\\ud83d", b"\\ude00", b"!"), ("x😀".encode(), b"!")))
        self.assertEqual(cut.content, "x😀!")
        self.assertEqual(ms.differ(whole, cut), None)

    def test_half_a_pair_beside_a_damaged_byte_is_read_back_as_it_was(self):
        """Found by fuzzing: \\ud800 and the byte 0x80, kept as \\udc80, are a pair."""
        reply = read(b'data: {"choices":[{"delta":{"content":"\\ud800\x80"},"finish_reason":"stop"}]}\n\n')
        self.assertTrue(reply.damaged)
        back = ms.reply_from_json(json.loads(ms.json_line(ms.as_json(reply))))
        self.assertEqual(back.content, reply.content)


class EveryCut(unittest.TestCase):
    """Where the network cuts a stream must not matter."""

    def test_streams_read_the_same_however_they_are_cut(self):
        for path in sorted(CASES.glob("*.sse")):
            raw = stream(path.read_bytes())
            whole = ms.read_reply(exchange([(0.0, raw)]), "p")
            with self.subTest(path.name):
                single = ms.read_reply(exchange([(place * 1e-3, raw[place:place + 1]) for place in range(len(raw))]), "p")
                self.assertEqual(understood(single), understood(whole))
                for cut in range(1, len(raw), 1 if len(raw) < 2500 else 7):
                    halves = ms.read_reply(exchange([(0.0, raw[:cut]), (1.0, raw[cut:])]), "p")
                    self.assertEqual(understood(halves), understood(whole), cut)

    def test_framing_finds_the_end_however_it_is_cut(self):
        body = b'data: {"x":"\r\n0\r\n\r\n"}\n\n'        # looks like an end and is none
        raw = HEAD + chunked(body) + chunked(body) + b"0\r\nTrailer: 1\r\n\r\n"
        framing = ms.Framing()
        for end in range(1, len(raw)):
            self.assertFalse(framing.complete(bytearray(raw[:end])), end)
        self.assertTrue(framing.complete(bytearray(raw)))

    def test_the_short_way_through_a_stream_says_what_the_long_one_says(self):
        for path in sorted(CASES.glob("*.sse")):
            body = path.read_bytes()
            plain = ms.plain_events(body)
            if plain is not None:
                with self.subTest(path.name):
                    self.assertEqual([(event.data, event.end) for event in ms.split_events(body)], list(zip(*plain)))


class Time(unittest.TestCase):
    def test_chunks_are_not_tokens(self):
        reply = ms.read_reply(timed("08-chunks-not-tokens.timed.jsonl"), "p")
        self.assertEqual((reply.completion_tokens, len(reply.chunk_at_s)), (40, 12))
        self.assertAlmostEqual(reply.ttft_s, 0.200)
        self.assertAlmostEqual(reply.tpot_s, 0.550 / 39)            # 14.10 ms, not 50 ms a chunk
        self.assertAlmostEqual(reply.decode_tokens_per_s, 70.9, 1)

    def test_the_first_token_is_thought_the_first_answer_comes_later(self):
        reply = ms.read_reply(timed("09-role-then-reasoning.timed.jsonl"), "p")
        self.assertAlmostEqual(reply.ttft_s, 0.400)
        self.assertAlmostEqual(reply.first_answer_s, 1.400)
        self.assertEqual(reply.completion_tokens, 13)

    def test_token_ids_tell_how_many_tokens_the_first_chunk_held(self):
        first = b'data: {"choices":[{"delta":{"content":"a b c"},"token_ids":[1,2,3]}]}\n\n'
        last = (b'data: {"choices":[{"delta":{"content":" d"},"token_ids":[4],"finish_reason":"stop"}]}\n\n'
                b'data: {"choices":[],"usage":{"completion_tokens":4}}\n\ndata: [DONE]\n\n')
        reply = ms.read_reply(exchange([(1.0, HEAD + chunked(first)), (1.5, chunked(last) + b"0\r\n\r\n")]), "p")
        self.assertEqual(reply.token_ids, (1, 2, 3, 4))
        self.assertAlmostEqual(reply.tpot_s, 0.5)       # one token after the first chunk's three

    def test_an_event_has_arrived_when_its_last_byte_has(self):
        event = b'data: {"choices":[{"delta":{"content":"x"},"finish_reason":"stop"}]}\n\n'
        raw = HEAD + chunked(event) + b"0\r\n\r\n"
        for cut in range(len(HEAD) + 1, len(HEAD) + 4 + len(event)):
            reply = ms.read_reply(exchange([(1.0, raw[:cut]), (2.0, raw[cut:])]), "p")
            self.assertEqual(reply.first_s, 2.0, cut)


class Texts(unittest.TestCase):
    def test_escapes_inside_deltas(self):
        expected = json.loads((CASES / "11-escapes.expected.json").read_text())
        for side in ("baseline", "spec"):
            self.assertEqual(case(f"11-escapes.{side}.sse").content, expected.get(side, expected.get("text", expected)), side)

    def test_separators_of_unicode_are_no_line_ends(self):
        expected = json.loads((CASES / "12a-unicode-separators.expected.json").read_text())
        self.assertEqual(case("12a-unicode-separators.sse").content, expected["text"] if isinstance(expected, dict) else expected)

    def test_a_character_split_over_two_reads(self):
        expected = json.loads((CASES / "12b-split-utf8.expected.json").read_text())
        reply = ms.read_reply(timed("12b-split-utf8.timed.jsonl"), "p")
        self.assertEqual(reply.content, expected["text"] if isinstance(expected, dict) else expected)
        self.assertNotIn("\ufffd", reply.content)

    def test_bytes_that_are_no_utf8_are_kept_and_marked(self):
        reply = read(b'data: {"choices":[{"delta":{"content":"a\xff"},"finish_reason":"stop"}]}\n\ndata: [DONE]\n\n')
        self.assertTrue(reply.damaged)
        self.assertEqual(reply.content.encode("utf-8", "surrogateescape"), b"a\xff")

    def test_framing_of_every_legal_kind(self):
        reply = case("13a-framing.sse")
        self.assertEqual((reply.content, reply.completion_tokens, reply.error), ("alpha beta gamma", 3, None))
        self.assertEqual(case("13b-cr-only.sse").content, "alpha beta")

    def test_thinking_that_uses_up_the_tokens_is_a_success(self):
        for name in ("10a-reasoning-only.json", "10b-reasoning-only.json"):
            body = (CASES / name).read_bytes()
            head = f"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n".encode()
            reply = ms.read_reply(exchange([(0.1, head + body)]), "p")
            self.assertEqual((reply.error, reply.completion_tokens, reply.content), (None, 64, ""))
            self.assertTrue(reply.reasoning)
        self.assertEqual(case("10c-reasoning-only.sse").content, "")

    def test_tool_calls_come_in_pieces(self):
        def call(index, **function):
            return b"data: " + json.dumps({"choices": [{"delta": {"tool_calls": [{"index": index, "function": function}]}}]}).encode() + b"\n\n"

        reply = read(call(1, name="b", arguments="{") + call(0, name="a", arguments='{"x"') + call(1, arguments="}") + call(0, arguments=": 1}")
                     + b'data: {"choices":[{"delta":{},"finish_reason":"tool_calls"}]}\n\n')
        self.assertEqual(reply.tool_calls, (ms.ToolCall("a", '{"x": 1}'), ms.ToolCall("b", "{}")))


class Failures(unittest.TestCase):
    def test_errors_inside_a_success_are_failures(self):
        for name in ("14a-error-after-text", "14b-error-before-text", "14c-error-string", "14d-error-event-name"):
            reply = case(f"{name}.sse")
            self.assertIn("the server reported", reply.error or "", name)
        self.assertIn("without finish_reason", case("14e-cut-off.sse").error)

    def test_partial_text_is_kept(self):
        self.assertTrue(case("14a-error-after-text.sse").content)

    def test_absent_usage_is_not_guessed(self):
        for name in ("15a-usage-missing.sse", "15b-usage-null.sse"):
            reply = case(name)
            self.assertEqual((reply.error, reply.completion_tokens, reply.token_source, len(reply.chunk_at_s)), (None, None, None, 8))
        reply = case("15c-timings-only.sse")
        self.assertEqual((reply.completion_tokens, reply.token_source), (25, "timings"))
        self.assertAlmostEqual(reply.acceptance.acceptance_rate, 16 / 24)

    def test_raw_responses_are_one_line_each(self):
        expected = {"24a-503-loading": "HTTP 503: Loading model", "24b-429": "HTTP 429: slow down (Retry-After: 2)",
                    "24c-401": "HTTP 401: Invalid API Key", "24d-404-html": "HTTP 404: an HTML page instead of JSON",
                    "24e-400-param": "HTTP 400: Unsupported parameter: cache_prompt"}
        for name, error in expected.items():
            reply = ms.read_reply(exchange([(0.1, (CASES / f"{name}.http").read_bytes())]), "p")
            self.assertEqual(reply.error, error)

    def test_bodies_that_are_cut_short(self):
        head = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 100\r\n\r\n"
        self.assertIn("cut short: 5 of 100", ms.read_reply(exchange([(0.1, head + b'{"a":')]), "p").error)
        self.assertIn("last chunk is missing", ms.read_reply(exchange([(0.1, HEAD + b"5\r\ndata:\r\n")]), "p").error)
        self.assertIn("no number", ms.read_reply(exchange([(0.1, HEAD + b"zz\r\ndata:\r\n")]), "p").error)

    def test_tls_where_http_was_expected(self):
        framing = ms.Framing()
        self.assertFalse(framing.complete(bytearray(b"\x15\x03\x01\x00\x02\x02\x46")))
        self.assertIn("https://", framing.broken)

    def test_an_endless_head_is_given_up(self):
        framing = ms.Framing()
        self.assertFalse(framing.complete(bytearray(b"HTTP/1.1 200 OK\r\n" + b"x: y\r\n" * 20000)))
        self.assertIn("head is larger", framing.broken)


class Addresses(unittest.TestCase):
    def test_every_form_that_people_paste(self):
        for entry in json.loads((CASES / "22-base-urls.json").read_text()):
            with self.subTest(entry["given"]):
                if entry["chat"] is None:
                    with self.assertRaises(ms.MeasureError) as caught:
                        ms.parse_base_url(entry["given"])
                    self.assertIn("http", caught.exception.hint)
                    continue
                base = ms.parse_base_url(entry["given"])
                self.assertEqual(base.origin.url(base.base_path + "/chat/completions"), entry["chat"])
                self.assertEqual(base.metrics_path and base.origin.url(base.metrics_path), entry["metrics"])

    def test_credentials_are_used_and_never_shown(self):
        base = ms.parse_base_url("http://user:secret@h:8000/v1")
        self.assertNotIn("secret", repr(base))
        self.assertIn(b"Authorization: Basic dXNlcjpzZWNyZXQ=", ms.request_bytes(base.origin, "/v1/models"))
        with self.assertRaises(ms.MeasureError) as caught:
            ms.parse_base_url("http://user:secret@h:99999")
        self.assertNotIn("secret", str(caught.exception))


if __name__ == "__main__":
    unittest.main()
