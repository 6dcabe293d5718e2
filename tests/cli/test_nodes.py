"""The command ``nodes``."""

from __future__ import annotations

import argparse
import json

import pytest

from start_llm.cli.nodes import main
from start_llm.core.settings import load_settings
from tests.proxy.node_stub import nodes

ALONE = "NODES is not set: the proxy has this server alone.\n"


def show(capsys: pytest.CaptureFixture[str], *, as_json: bool = False, **given: object) -> tuple[int, str]:
    code = main(load_settings(None, **given), argparse.Namespace(json=as_json))
    return code, capsys.readouterr().out


def test_without_nodes_that_is_what_one_reads_first(capsys: pytest.CaptureFixture[str]) -> None:
    with nodes(1) as [stub]:
        port = int(stub.name.partition(":")[2])
        code, said = show(capsys, mlx_port=port)
        assert said.startswith(ALONE) and "ready" in said
        assert json.loads(show(capsys, mlx_port=port, as_json=True)[1])[0]["state"] == "ready"
    assert code == 0
    code, said = show(capsys, mlx_port=port)
    assert (code, said) == (1, f"NODES is not set, and no server answers on port {port}.\n")
    assert json.loads(show(capsys, mlx_port=port, as_json=True)[1])[0]["state"] == "gone"


def test_nodes_are_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    with nodes(2) as stubs:
        given = {"nodes": ",".join(stub.url for stub in stubs), "nodes_self": "off"}
        code, said = show(capsys, **given)
        assert code == 0 and said.startswith("NODE ") and "NODES" not in said
        stubs[0].mode = "locked"
        code, said = show(capsys, **given)
        assert code == 1 and f"{stubs[0].name}: It does not take the key: NODES_API_KEY must be its API_KEY." in said
