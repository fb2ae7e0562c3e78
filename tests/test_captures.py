"""Bytes from real engines, with what is known of them: set by the engine (simulated acceptance), told twice by it, or counted by hand."""
import json
import unittest
from pathlib import Path

import measure_speculative as ms
from tests.fuzz import framed
from tests.test_wire import exchange, stream

CAPTURES = Path(__file__).parent / "data" / "captures"


def pages(folder, before="metrics_before.txt", after="metrics_after.txt"):
    return tuple(ms.parse_metrics((CAPTURES / folder / name).read_bytes()) for name in (before, after))


def streamed(path):
    """The reply in the body of a captured stream."""
    return ms.read_reply(exchange([(0.1, stream((CAPTURES / path).read_bytes()))]), "p")


class Sglang(unittest.TestCase):
    """0.5.19 on a GPU: acceptance stands in a chunk of its own (sglext) before the usage; the page counts verify steps only."""

    def measured(self, mode):
        """What the 20 answers of a run tell, and what its two pages tell alone."""
        folder = f"h200-sglang-0.5.19-{mode}"
        replies = []
        for line in (CAPTURES / folder / "answers.c1.jsonl").read_text().splitlines():
            told = json.loads(line)
            tokens = told["usage"]["completion_tokens"]
            replies.append(ms.Reply("p", completion_tokens=tokens, acceptance=ms.acceptance_from_response(told, tokens)))
        before, after = pages(folder, "metrics.c1.before.txt", "metrics.c1.after.txt")
        tokens = sum(reply.completion_tokens for reply in replies)
        counters = ms.acceptance_from_counters(before, after, "smol", len(replies), tokens)
        return ms.acceptance_of_pass(replies, counters, True), counters

    def test_a_simulated_length_of_three(self):
        """Of three proposed tokens exactly two are accepted at every step."""
        found, counters = self.measured("simulated")
        self.assertEqual((found.drafts, found.draft_tokens, found.accepted_tokens, found.completion_tokens), (860, 2580, 1720, 2560))
        self.assertEqual(found.acceptance_rate, 2 / 3)
        self.assertEqual(found.acceptance_length, 3.0)
        self.assertEqual(found.accepted_by_position, (860, 860))
        self.assertEqual(counters.drafts, 860)
        self.assertLess(counters.accepted_tokens, 1720)         # 2560 - 20 - 860: two of each answer's accepted tokens were cut off at its end

    def test_ngrams(self):
        found, counters = self.measured("ngram")
        self.assertEqual((found.drafts, found.draft_tokens, found.accepted_tokens, found.completion_tokens), (1097, 12067, 659, 1739))
        self.assertEqual(counters.drafts, 1097)

    def test_streams(self):
        simulated = streamed("h200-sglang-0.5.19-simulated/stream.sse")
        self.assertEqual((simulated.error, simulated.completion_tokens, simulated.finish_reason), (None, 128, "length"))
        self.assertEqual((simulated.acceptance.drafts, simulated.acceptance.draft_tokens, simulated.acceptance.accepted_tokens), (43, 129, 86))
        ngram = streamed("h200-sglang-0.5.19-ngram/stream.sse")
        self.assertEqual((ngram.error, ngram.token_source), (None, "usage"))
        self.assertEqual((ngram.acceptance.drafts, ngram.acceptance.draft_tokens, ngram.acceptance.accepted_tokens), (4, 44, 39))
        self.assertEqual((ngram.completion_tokens, ngram.finish_reason), (42, "stop"))      # 1 + 4 + 39, less two cut off at its end

    def test_whole_answers_of_an_older_version(self):
        """0.5.17 tells in meta_info, of answers that are not streamed."""
        body = (CAPTURES / "h200-sglang-0.5.17-eagle" / "nonstream.json").read_bytes()
        reply = ms.read_reply(exchange([(0.1, framed(body, kind=b"application/json"))]), "p")
        self.assertEqual((len(reply.token_ids), reply.completion_tokens), (42, 42))
        self.assertEqual((reply.acceptance.drafts, reply.acceptance.draft_tokens, reply.acceptance.accepted_tokens), (41, 123, 0))  # a head of random numbers


class Vllm(unittest.TestCase):
    def test_counters(self):
        found = ms.acceptance_from_counters(*pages("vllm-0.32.0-ngram"), "smollm2", 4, None)
        self.assertEqual((found.drafts, found.draft_tokens, found.accepted_tokens), (30, 119, 45))
        self.assertEqual(found.accepted_by_position, (20, 18, 5, 2))

    def test_labels_that_the_rust_front_end_does_not_escape(self):
        """A model named ti"ny{x},y; the other page tells the same in OpenMetrics, where it is escaped."""
        rust = CAPTURES / "vllm-0.33-rust"
        zeros = ms.parse_metrics(b"vllm:spec_decode_num_drafts_total 0\n")
        for name, expected in (("metrics.txt", (24, 88, 46, (16, 16, 10, 4))), ("om.txt", (18, 64, 29, (10, 10, 7, 2)))):
            with self.subTest(name):
                found = ms.acceptance_from_counters(zeros, ms.parse_metrics((rust / name).read_bytes()), 'ti"ny{x},y', 3, None)
                self.assertEqual((found.drafts, found.draft_tokens, found.accepted_tokens, found.accepted_by_position), expected)


class LlamaCpp(unittest.TestCase):
    def test_counters_from_nothing(self):
        """The counters stand there as 0 before anything was drafted, those of positions do not."""
        found = ms.acceptance_from_counters(*pages("llamacpp-b11434-ngram-simple"), "smollm2", 4, None)
        self.assertEqual((found.drafts, found.draft_tokens, found.accepted_tokens), (16, 77, 15))
        self.assertEqual(found.accepted_by_position, (14, 1, 0, 0, 0, 0, 0, 0))


class TheSameAnswerTwice(unittest.TestCase):
    def test_streamed_and_whole(self):
        """The same request at temperature 0, streamed and not: the same text and count, whatever the pieces were."""
        for folder in ("llamacpp-b11434-ngram-simple", "llamacpp-b11434-draft-simple", "vllm-0.32.0-ngram", "sglang-0.5.20-base"):
            with self.subTest(folder):
                whole = json.loads((CAPTURES / folder / "chat.json").read_text())
                reply = streamed(f"{folder}/chat_stream.sse")
                self.assertEqual(reply.content, whole["choices"][0]["message"]["content"])
                self.assertEqual(reply.completion_tokens, whole["usage"]["completion_tokens"])
                self.assertEqual(reply.finish_reason, whole["choices"][0]["finish_reason"])


if __name__ == "__main__":
    unittest.main()
