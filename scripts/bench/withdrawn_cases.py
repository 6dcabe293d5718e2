"""Sixty questions about lines that are gone from two system texts: ten kinds of lines each, asked for in three ways.

A right answer says that there is none; a wrong one has the old value.
"""

from __future__ import annotations

from collections.abc import Iterator

from scripts.bench.note_cases import TOOLS, Case

FIRST = """You are a coding agent of the Atlas team. Work in small steps, and say what you did in one or two sentences.
Answer from what these instructions say now. If they do not say it, answer: not given.

# Environment
- Working directory: /srv/atlas
- Node version: 22.4
- Region: eu-north-1
- Shell: zsh

<git-status>
On branch feature/oak, two commits ahead
</git-status>

# Rules
1. Sign every commit with the key 7F3A.
2. Ask Milena before a migration.
3. Never print passwords.

| service | port |
| api | 7001 |
| worker | 7452 |

The wiki of the team is at wiki.acme.test/handbook.
The customer Nordwind has priority over all others.
export CONFIG_FILE=/run/conf/atlas.toml
The release is frozen until May 9.
Tests run on four machines.
"""
# Beginning of the line (to the end of the next `count` lines), what it tells, how it is called, how it is asked for.
_LINES = (
    ("- Node version", 1, r"22\.4", "a Node version", "What is the Node version?"),
    ("- Region", 1, r"eu-north", "a region", "In which region does this run?"),
    ("<git-status>", 3, r"feature/oak|\boak\b", "a git branch", "Which git branch is checked out?"),
    ("1. Sign", 1, r"7F3A", "a key for signing commits", "With which key is a commit signed?"),
    ("2. Ask", 1, r"Milena", "a person to ask before a migration", "Who is asked before a migration?"),
    ("| worker", 1, r"7452", "a port of the worker", "On which port does the worker listen?"),
    ("The wiki", 1, r"wiki\.acme|handbook", "an address of a wiki", "Where is the wiki of the team?"),
    ("The customer", 1, r"Nordwind", "a customer with priority", "Which customer has priority?"),
    ("export", 1, r"/run/conf|atlas\.toml", "a configuration file", "Which file is CONFIG_FILE?"),
    ("The release", 1, r"May|\b9\b", "a date until which the release is frozen", "Until when is the release frozen?"),
)
SHOP = """You help the operators of a small shop with their server. Say what you know in one sentence.
What these instructions do not say, you do not know: then say so.

# Shop
**Owner**: Ingeborg Falk
**Opened**: 2019
Currency: CHF
Payment provider: Lumipay
* Courier: Rotkehl
* Return window: 40 days
> On duty: Teodor

# Server
host = kestrel-12.internal
backup_host = osprey-03.internal
  log_level: trace
  timezone: Pacific/Chatham
export STAGE=rehearsal
export EDITOR=micro

| table | rows |
| orders | 58213 |
| carts | 417 |

# Today
1. Ticket: SHOP-2281
2. Reviewer: Quirin
3. Deadline: Thursday 16:00
Build: 4471-falcon
Maintenance: Sunday 03:00
Feature flag gift_cards: on
Voucher code: AMSEL15
"""
_LINES_OF_SHOP = (
    ("**Owner**", 1, r"Ingeborg|Falk", "an owner of the shop", "Who owns the shop?"),
    ("Payment", 1, r"Lumipay", "a payment provider", "Which payment provider does the shop use?"),
    ("* Courier", 1, r"Rotkehl", "a courier", "Which courier brings the parcels?"),
    ("> On duty", 1, r"Teodor", "a person on duty", "Who is on duty?"),
    ("backup_host", 1, r"osprey", "a backup host", "What is the backup host?"),
    ("  timezone", 1, r"Chatham|Pacific", "a time zone", "Which time zone does the server use?"),
    ("export STAGE", 1, r"rehearsal", "a value of STAGE", "What is STAGE set to?"),
    ("| carts", 1, r"\b417\b", "a number of rows of the table carts", "How many rows has the table carts?"),
    ("1. Ticket", 1, r"2281", "a ticket", "What is the number of the ticket?"),
    ("Voucher", 1, r"AMSEL", "a voucher code", "What is the voucher code?"),
)
_NONE = r"\bno\b|not|none|unknown|n't|without"


def _without(first: str, beginning: str, count: int) -> str:
    lines = first.split("\n")
    start = next(n for n, line in enumerate(lines) if line.startswith(beginning))
    return "\n".join(lines[:start] + lines[start + count :])


def withdrawn_cases() -> Iterator[Case]:
    """Asked by its name; asked straight on, without tools; asked straight on, one turn later."""
    for first, lines in ((FIRST, _LINES), (SHOP, _LINES_OF_SHOP)):
        for beginning, count, old, name, question in lines:
            now, label = _without(first, beginning, count), beginning.strip("-<>*| 1234567890.")
            named = f"Do your instructions give {name} now? Say it, or say: no."
            yield Case(label, "gone: named", named, _NONE, old, first=first, role=now)
            yield Case(label, "gone: asked", question, _NONE, old, first=first, role=now, tools=(), at_first=())
            yield Case(label, "gone: later", question, _NONE, old, first=first, role=now, before=(), tools=TOOLS)
