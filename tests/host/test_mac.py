from __future__ import annotations

from collections.abc import Sequence

from start_llm.host.mac import MacFacts, read_mac, remarks

GIB = 2**30
PMSET = "System-wide power settings:\nCurrently in use:\n standby              1\n lowpowermode         1\n"


def stand_in(command: Sequence[str]) -> str:
    return {"pmset -g": PMSET, "sysctl -n iogpu.wired_limit_mb": "20480\n"}[" ".join(command)]


def test_what_the_commands_say_is_read() -> None:
    found = read_mac(stand_in, "26.1")
    assert found == MacFacts("26.1", True, 20480, found.mlx_wheel) and "Tag: " in found.mlx_wheel
    assert read_mac(lambda command: "", "15.0") == MacFacts("15.0", None, None, found.mlx_wheel)
    assert read_mac(lambda command: PMSET.replace("1\n", "0\n"), "15.0").low_power is False


def test_each_remark_has_its_remedy() -> None:
    said = remarks(MacFacts("15.0", True, 0, "macosx_15_0"), "Apple M5", 16 * GIB, 20 * GIB)
    poor = [text for well, text in said if not well]
    assert len(poor) == 3
    assert "Low Power Mode: Never" in poor[0] and "iogpu.wired_limit_mb=21504" in poor[1] and "macOS 26" in poor[2]
    good = list(remarks(MacFacts("26.1", False, 20480, "macosx_26_0_arm64"), "Apple M5 Max", 20 * GIB, 5 * GIB))
    assert all(well for well, _ in good) and "iogpu.wired_limit_mb=20480" in good[1][1]
    assert len(list(remarks(MacFacts("26.1", False, 0), "Apple M4", 20 * GIB))) == 2
    assert [line for _, line in remarks(MacFacts("26.1", False, 0), "Apple M4")] == ["macOS 26.1"]
    assert "21.5 GB" in list(remarks(MacFacts("26.1", False, 20480), "Apple M4"))[1][1]
