"""Drafts of rows that decode together: one pass verifies a block of each row. Model thread only.

Each row's block is its newest token and its draft. How wide the pass is follows from what all rows are expected to gain
(`DraftGate.together`); blocks that are shorter are filled up. Each row keeps what was right of its own draft. Rows
whose answer follows a grammar take part without a draft, and so do rows that have no index yet.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from start_llm.engine.decode.batch import BatchRunner
from start_llm.engine.decode.draft import Proposal, RowDrafts, SuffixIndex
from start_llm.engine.decode.gate import MOST_WIDE, DraftGate, DraftOption
from start_llm.engine.decode.row import DecodeRow

MOST_ROWS = 4
_NOTHING = Proposal([], 0)


@dataclass(slots=True)
class _Row:
    """A row of a batch. `proposal`: of what follows its newest token; empty if there is none."""

    uid: int
    drafts: RowDrafts
    drafter: SuffixIndex | None
    tokens: list[int]  # in its KV
    proposal: Proposal


def verify_together(gate: DraftGate, batch: BatchRunner, drafts: Mapping[int, RowDrafts]) -> list[DecodeRow] | None:
    """One pass over blocks of all rows of a batch, which are named by their uids.

    ``None``: no draft pays, or a row is about to end; nothing was computed, and the batch goes on token by token.
    """
    if not 2 <= len(drafts) <= MOST_ROWS or not batch.verifies:
        return None
    rows = [_row(uid, one, batch) for uid, one in drafts.items()]
    context = sum(len(row.tokens) for row in rows)
    width = _propose(rows, gate, batch, context)
    if width == 1:
        return None
    began = gate.clock()
    said, computed = batch.verify({row.uid: row.proposal.tokens[: width - 1] for row in rows})
    gate.observe(computed * len(rows), context, gate.clock() - began)
    for row in rows:
        right, counts = len(said[row.uid]) - 1, row.drafts.counts
        counts.forwards += 1
        gate.learn(counts, row.proposal, min(computed - 1, len(row.proposal.tokens)), right)
        if row.drafter is not None:
            row.drafter.append(row.proposal.tokens[:right])
    return [DecodeRow(uid, token) for uid, tokens in said.items() for token in tokens]


def _propose(rows: Sequence[_Row], gate: DraftGate, batch: BatchRunner, context: int) -> int:
    """Has the rows propose drafts where these may pay. Returns how wide the pass is to be.

    In tokens a row; 1: no draft pays, or a row is about to end. `context`: tokens of all rows.
    """
    most = MOST_WIDE // len(rows) - 1
    outlooks = [DraftOption(0 if row.drafter is None else row.drafter.outlook(), most) for row in rows]
    if gate.together(outlooks, context=context) == 1:
        return 1
    pending = batch.pending()
    if pending is None:
        return 1
    for row in rows:
        newest, left = pending[row.uid]
        if row.drafter is not None:
            if row.drafter.known == len(row.tokens):
                row.drafter.append([newest])
            row.proposal = row.drafter.propose(min(most, left - 2)) or _NOTHING
    options = [DraftOption(row.proposal.match, len(row.proposal.tokens)) for row in rows]
    return gate.together(options, context=context)


def _row(uid: int, drafts: RowDrafts, batch: BatchRunner) -> _Row:
    """With its index and no proposal yet. No index: a grammar holds the row, or it is not built yet."""
    find = drafts.find_drafter if batch.is_free(uid) else None
    drafter, tokens = find() if find is not None else None, batch.tokens(uid)
    if drafter is not None:
        drafter.append(tokens[drafter.known :])
    return _Row(uid, drafts, drafter, tokens, _NOTHING)
