"""Agent conversations against an OpenAI-compatible server: tokens computed per new token, first token, wrong answers.

Against a server that runs already (work is counted only where the oracle model runs and its log can be read):

    python3.12 install_and_run.py run scripts/agent_bench.py --url http://127.0.0.1:8080 --model oracle \\
        --oracle-log oracle.jsonl --tokenizer DIR

Everything on the oracle, plain and hybrid, ours and mlx_lm.server's:

    python3.12 install_and_run.py run scripts/agent_bench.py --serve --against mlx_lm --plot --out bench-out
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.table import Table
from tokenizers import Tokenizer

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from scripts.bench import limits, replay, report  # noqa: E402 - the script runs from any folder
from scripts.bench.runner import Result, run_scenario  # noqa: E402
from scripts.bench.scenarios import SCENARIOS  # noqa: E402
from scripts.bench.servers import Server, restarter, served  # noqa: E402
from tests.oracle.build import build_oracle, make_tokenizer  # noqa: E402


def _arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--url", help="a server that runs")
    where.add_argument("--serve", action="store_true", help="start start_llm on the oracle, and stop it at the end")
    parser.add_argument(
        "--against", choices=["mlx_lm"], action="append", default=[], help="with --serve: also this one"
    )
    parser.add_argument("--only-against", action="store_true", help="with --serve: leave start_llm out")
    parser.add_argument("--kinds", default="plain,hybrid", help="with --serve: plain, hybrid, windowed")
    parser.add_argument(
        "--reanchor", choices=["on", "off"], default="off", help="with --serve: REANCHOR (off: all work counts)"
    )
    parser.add_argument("--limits", action="store_true", help="with --serve: also what needs a server set up for it")
    parser.add_argument("--model", default="default_model", help="the model's name at --url")
    parser.add_argument("--key", default="none", help="API key at --url")
    parser.add_argument("--scenarios", default="", help=f"comma-separated, of: {', '.join(SCENARIOS)}; 'none' for none")
    parser.add_argument("--traces", type=Path, help="folder of recorded requests (client/run.jsonl) to replay as well")
    parser.add_argument("--trace-clients", default="", help="comma-separated folders of --traces; all if not given")
    parser.add_argument("--pause", type=float, default=0.0, help="seconds before each request")
    parser.add_argument("--oracle-log", type=Path, help="the ORACLE_LOG of the server at --url")
    parser.add_argument("--oracle-replies", type=Path, help="its ORACLE_REPLIES, for --traces")
    parser.add_argument("--tokenizer", type=Path, help="folder with tokenizer.json; the oracle's if not given")
    parser.add_argument("--restart-command", help="kills and starts the server at --url again; returns")
    parser.add_argument("--out", type=Path, help="folder for JSON, Markdown and PNG")
    parser.add_argument("--plot", action="store_true", help="write agent_bench.png to --out (needs matplotlib)")
    return parser.parse_args(argv)


def _counter(folder: Path | None) -> Callable[[str], int]:
    tokenizer: Any = Tokenizer.from_file(str(folder / "tokenizer.json")) if folder else make_tokenizer()
    return lambda text: len(tokenizer.encode(text, add_special_tokens=False).ids)


def _scenarios(options: argparse.Namespace) -> list[str]:
    if options.scenarios == "none":
        return []
    names = options.scenarios.split(",") if options.scenarios else list(SCENARIOS)
    for name in names:
        if name not in SCENARIOS:
            raise SystemExit(f"--scenarios: {name!r} is none of {', '.join(SCENARIOS)}")
    return names


class Session:
    """All runs of this call: what was measured, by label."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.count = _counter(options.tokenizer)
        self.nonce = f"{time.time_ns():x}"
        self.scenarios: dict[str, list[Result]] = {}
        self.replays: dict[str, list[replay.Replayed]] = {}
        self.limits: dict[str, list[limits.Limit]] = {}

    def measure(self, label: str, server: Server) -> None:
        """Runs scenarios and traces against one server."""
        options = self.options
        results = []
        for name in _scenarios(options):
            results.append(run_scenario(name, server, self.count, self.nonce, options.pause))
            ratio = results[-1].ratio
            print(f"{label}: {name}: {'-' if ratio is None else f'{ratio:.2f}'}", file=sys.stderr, flush=True)
        if results:
            self.scenarios[label] = results
            report.complain(results)

    def measure_traces(self, label: str, server: Server, checkpoint: Path) -> None:
        """Replays the recorded requests against one server, which should be fresh."""
        clients = [name for name in self.options.trace_clients.split(",") if name]
        rows = replay.replay(server, checkpoint, self.options.traces, clients, self.options.pause)
        self.replays[label] = rows
        for row in rows:
            if row.wrong:
                print(f"{label}: {row.run}: {row.wrong}", file=sys.stderr)

    def finish(self) -> int:
        """Prints and writes everything; 1 if an answer was wrong or a miss had no reason."""
        tables: list[Table] = [report.scenario_table(label, results) for label, results in self.scenarios.items()]
        tables += [report.replay_table(f"traces, {label}", rows) for label, rows in self.replays.items()]
        tables += [report.limits_table(f"limits, {label}", found) for label, found in self.limits.items()]
        report.show(tables)
        if self.options.out:
            self._write(self.options.out, tables)
        ours = {label: results for label, results in self.scenarios.items() if not label.startswith("mlx_lm")}
        totals = [report.totals(results) for results in ours.values()]
        broken = [limit for found in self.limits.values() for limit in found if not limit.kept]
        return int(bool(broken) or any(total["wrong"] or total["unexplained"] for total in totals))

    def _write(self, out: Path, tables: list[Table]) -> None:
        scenarios = {
            label: {"total": report.totals(results), "scenarios": [result.as_dict() for result in results]}
            for label, results in self.scenarios.items()
        }
        found = {label: [asdict(limit) for limit in limits_found] for label, limits_found in self.limits.items()}
        traces = {label: replay.as_json(rows) for label, rows in self.replays.items()}
        report.save(out, "agent_bench", {"scenarios": scenarios, "limits": found, "traces": traces})
        (out / "agent_bench.md").write_text("\n\n".join(map(report.markdown, tables)) + "\n", "utf-8")
        if self.options.plot and self.scenarios:
            print(report.plot(out, self.scenarios))


def _serve_all(session: Session, folder: Path) -> None:
    options = session.options
    servers = ([] if options.only_against else ["start_llm"]) + options.against
    for kind in options.kinds.split(","):
        checkpoint = build_oracle(folder / f"oracle-{kind}", kind)
        if options.limits:
            work = folder / f"limits-{kind}"
            session.limits[f"start_llm, {kind}"] = limits.measure(checkpoint, work, session.count, session.nonce)
        for name in servers:
            label = f"{name}, {kind}"
            with served(name, checkpoint, folder / f"{name}-{kind}", options.reanchor) as server:
                session.measure(label, server)
            if options.traces:
                with served(name, checkpoint, folder / f"{name}-{kind}-traces", options.reanchor) as server:
                    session.measure_traces(label, server, checkpoint)


def main(argv: list[str] | None = None) -> int:
    options = _arguments(argv)
    session = Session(options)
    if options.serve:
        with tempfile.TemporaryDirectory(prefix="agent-bench-") as folder:
            _serve_all(session, Path(folder))
        return session.finish()
    restart = restarter(options.restart_command, options.url) if options.restart_command else None
    url = options.url.rstrip("/").removesuffix("/v1")
    server = Server("url", url, options.model, options.key, options.oracle_log, options.oracle_replies, restart)
    session.measure(options.model, server)
    if options.traces:
        if not (options.tokenizer and options.oracle_log and options.oracle_replies):
            raise SystemExit("--traces needs --tokenizer, --oracle-log and --oracle-replies")
        session.measure_traces(options.model, server, options.tokenizer)
    return session.finish()


if __name__ == "__main__":
    sys.exit(main())
