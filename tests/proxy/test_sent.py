"""What was sent to FALLBACK_MODEL: the file that tells it."""

from __future__ import annotations

from pathlib import Path

from start_llm.proxy.sent import RECORD, Sent, SentRecord, read_sent

MODEL = "anthropic/claude-sonnet-4-5"


def test_what_was_sent_is_read_and_goes_on_after_a_restart(tmp_path: Path) -> None:
    assert read_sent(None) == read_sent(tmp_path) == Sent()
    record = SentRecord(tmp_path / RECORD)
    record.add("queue_full", ok=True)
    record.add("queue_full", ok=False)
    sent = read_sent(tmp_path)
    assert sent == record.sent and sent.time > 1e9
    assert (sent.total, sent.failed, sent.reason, sent.ok) == (2, 1, "queue_full", False)
    both = Sent({"queue_full": 1, "out_of_memory": 3}, 0, "out_of_memory", True, 9e9).after(sent)
    assert both.counts == {"queue_full": 3, "out_of_memory": 3} and both.failed == 1 and both.reason == "out_of_memory"
    assert Sent().after(both) == both
    assert both.figures() == {
        "fallbacks": 6.0, "fallbacks_failed": 1.0, "fallbacks_queue_full": 3.0, "fallbacks_out_of_memory": 3.0
    }  # fmt: skip
    assert "own error" in sent.sentence(MODEL) and "own error" not in both.sentence(MODEL)
    (tmp_path / RECORD).write_text("{")
    assert read_sent(tmp_path) == Sent()
