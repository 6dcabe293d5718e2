"""What is proposed behind the newest token of a row that decodes alone. Model thread only.

A proposal comes from the row's text (what stands behind the same words elsewhere), from its grammar (where that leaves
no choice), or from a head. The gate says which one is worth a wider pass. Knows nothing of passes: `verify` computes
them, and tells how much of a proposal was right.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import mlx.core as mx

from start_llm.engine.decode.constraint import GrammarProcessor
from start_llm.engine.decode.draft import FORCED_MATCH, HEAD_MATCH, Proposal, SuffixIndex
from start_llm.engine.decode.gate import MOST_DRAFTED, MOST_HEADED, MOST_WIDE, DraftGate, DraftOption
from start_llm.engine.decode.head import HeadedModel
from start_llm.engine.decode.row import RowState

if TYPE_CHECKING:  # takes seconds to import, and few need it
    from start_llm.engine.decode.quantised import Quantisation


class RowProposals:
    """
    Args:
        state: of the row. Its KV is not changed here.
        gate: where it is missing, nothing is proposed.
        guide: the grammar that the answer follows, if any.
        eos: a draft ends with one of these tokens.
        landmarks: a draft ends with one of these, too, so that a pass does.
        quantisation: a draft does not reach beyond its `start`.

    Attributes:
        text: knows the row's text, once it is there; the row tells it each token.
    """

    def __init__(
        self,
        state: RowState,
        gate: DraftGate | None,
        head: HeadedModel | None,
        guide: GrammarProcessor | None,
        eos: frozenset[int],
        landmarks: frozenset[int],
        quantisation: Quantisation | None,
    ) -> None:
        self._state, self._gate, self._head, self._guide = state, gate, head, guide
        self._ends, self._quantisation = eos | landmarks, quantisation
        self.text: SuffixIndex | None = None

    def draft(self, token: int, carried: Sequence[int], ahead: mx.array | None) -> Proposal | None:
        """What to verify behind this token, the newest one; ``None`` if nothing pays.

        Args:
            carried: tokens that the pass computes before this one, see `verify`.
            ahead: the hidden states behind `carried`, for a head.
        """
        most = self._longest(len(carried))
        if self._gate is None or token in self._ends or most < 1:
            return None
        proposals = [] if (read := self._from_text(token, most)) is None else [read]
        if self._head is not None:
            proposals.append(Proposal([], HEAD_MATCH))  # it is asked only if it is chosen
        if not proposals:
            return None
        options = [DraftOption(one.match, len(one.tokens) or min(most, MOST_HEADED)) for one in proposals]
        index, length = self._gate.choose(options, carried=len(carried), context=len(self._state.tokens))
        chosen = proposals[index]
        if length and chosen.match == HEAD_MATCH:
            chosen = Proposal(self._from_head([*carried, token], ahead, length), HEAD_MATCH)
        draft = self._possible(token, chosen.tokens[:length])
        return Proposal(draft, chosen.match) if draft else None

    def learn(self, proposal: Proposal, right: int) -> None:
        """So many of its tokens were right."""
        assert self._gate is not None
        self._gate.learn(self._state.drafts.counts, proposal, len(proposal.tokens), right)
        if self.text is not None:
            self.text.append(proposal.tokens[:right])

    def _possible(self, token: int, draft: list[int]) -> list[int]:
        """The draft behind `token`, to where the answer may end, a state is to be kept, or the grammar forbids it."""
        end = next((i for i, drafted in enumerate(draft) if drafted in self._ends), len(draft))
        draft = draft[: end + 1]
        return draft if self._guide is None or not draft else draft[: self._guide.allowed(token, draft)]

    def _from_text(self, token: int, most: int) -> Proposal | None:
        """What stands behind the same words elsewhere, or what a grammar leaves no choice about."""
        proposal = self.text.propose(most) if self.text is not None else None
        forced = self._guide.forced(token)[:most] if self._guide is not None else []
        if forced and (proposal is None or proposal.tokens[: len(forced)] != forced):
            return Proposal(forced, FORCED_MATCH)
        return proposal

    def _from_head(self, fed: list[int], ahead: mx.array | None, count: int) -> list[int]:
        """`count` tokens that may follow `fed`, which is in no KV yet."""
        assert self._head is not None and self._gate is not None
        began = self._gate.clock()
        drawn = self._head.propose(self._state.cache, fed, ahead, count, self._state.sampler)
        self._gate.proposed(count, self._gate.clock() - began)
        return drawn

    def _longest(self, carried: int) -> int:
        """The most tokens that a draft may have."""
        width = carried + 1
        most = min(self._state.left - 1, MOST_DRAFTED, MOST_WIDE - width)
        before = 0 if self._quantisation is None else self._quantisation.start - len(self._state.tokens)
        return min(most, before - width) if before > 0 else most
