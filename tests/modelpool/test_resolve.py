"""Which model a name means: one model has one entry, whatever it is called and whenever it came to this disk."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import safetensors.numpy
from huggingface_hub import constants

from start_llm.core.errors import BadRequest, NotFound
from start_llm.core.settings import load_settings
from start_llm.modelpool import kinds
from start_llm.modelpool import resolve as names_module
from start_llm.modelpool.resolve import NameResolver
from start_llm.models.adapter import AdapterFolder
from start_llm.models.catalog import EMBEDDED_NAME, stored_models
from start_llm.models.recommended import RECOMMENDED
from tests.oracle import build_oracle


def names(cache: Path, **settings: Any) -> NameResolver:
    return NameResolver(load_settings(None, start_llm_cache_dir=cache, **settings))


def started(cache: Path, main: Path | None = None, **settings: Any) -> NameResolver:
    """Of a server with this main model, or one in the folder "main", which is named as its folder."""
    main = build_oracle(cache / "main") if main is None else main
    found = names(cache, model_path=str(main), **settings)
    found.default_loaded(main.name, str(main), main)
    return found


def listed(found: NameResolver, cache: Path) -> list[str]:
    """Those below `cache`: the machine's own store of models may have more."""
    return [known.name for known in found.all() if known.key.startswith(str(cache.resolve()))]


def write_adapter(cache: Path, name: str, base: str = "") -> None:
    folder = cache / "adapters" / name
    folder.mkdir(parents=True)
    config = {"num_layers": 1, "lora_parameters": {"rank": 1, "scale": 1.0}, "model": base}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    safetensors.numpy.save_file({"x.lora_a": np.zeros((4, 1), np.float32)}, folder / "adapters.safetensors")


def test_a_models_own_file_stands_above_the_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(names_module, "FOLDER", tmp_path / "own")
    for name in ("main", "other", "broken"):
        build_oracle(tmp_path / "models" / name, "plain")
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "main.toml").write_text("thinking = false\n")
    (tmp_path / "own" / "other.toml").write_text("thinking = false\npinned = false\nttl = 7\n")
    (tmp_path / "own" / "broken.toml").write_text("ttl = soon\n")
    found = names(tmp_path, model_path=str(tmp_path / "models" / "main"), pinned_models="other,broken")
    other, broken = found.find("other"), found.find("broken")
    assert (found.is_pinned(other), found.is_pinned(broken)) == (False, True)
    own, usual = found.settings_for(other), found.settings_for(broken)
    assert (own.default_thinking, own.model_ttl_seconds) == (False, 7)
    assert (usual.default_thinking, usual.model_ttl_seconds) == (True, 0), "loading it says what is wrong"
    assert not found.settings_for(found.default).default_thinking


def test_a_main_model_that_was_fetched_at_the_start_is_one_model(tmp_path: Path) -> None:
    late = tmp_path / "models" / "late"
    found = names(tmp_path, model_path=str(late))
    assert listed(found, tmp_path) == []
    build_oracle(late)
    found.default_loaded("late", str(late), late)
    assert listed(found, tmp_path) == [] and found.find("late").default


def test_the_embedded_model_is_not_beside_itself(tmp_path: Path) -> None:
    folder = build_oracle(tmp_path / "models" / f"{EMBEDDED_NAME}-f32-v1")
    found = names(tmp_path)
    found.default_loaded(EMBEDDED_NAME, EMBEDDED_NAME, folder)
    assert listed(found, tmp_path) == [] and found.find(EMBEDDED_NAME).default


def test_another_model_of_the_main_one_s_name_has_a_name_of_its_own(tmp_path: Path) -> None:
    main, other = build_oracle(tmp_path / "mine" / "same"), build_oracle(tmp_path / "models" / "same")
    found = started(tmp_path, main)
    assert listed(found, tmp_path) == [str(other)] and found.find("same").default
    known = found.find(str(other))
    assert known.name == str(other)


@pytest.mark.parametrize("name", ["fast", "quick"])
def test_models_are_preloaded_and_pinned_by_any_of_their_names(tmp_path: Path, name: str) -> None:
    build_oracle(tmp_path / "models" / "quick")
    given = {"preload_models": f"nobody,{name}", "pinned_models": name}
    found = started(tmp_path, model_map="fast=quick", **given)
    assert found.is_preloaded("quick") and not found.is_preloaded("main")
    assert found.is_pinned(found.find("quick")) and not found.is_pinned(found.default)


def test_a_listing_that_fails_leaves_the_last_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    build_oracle(tmp_path / "models" / "quick")
    found = started(tmp_path)
    monkeypatch.setattr("start_llm.modelpool.resolve.LEAST_SECONDS", 0.0)
    monkeypatch.setattr("start_llm.modelpool.resolve.LISTING_SECONDS", 0.0)
    monkeypatch.setattr(
        "start_llm.modelpool.resolve.stored_models", Mock(side_effect=FileNotFoundError("it has just gone"))
    )
    assert listed(found, tmp_path) == ["quick"]
    with pytest.raises(NotFound, match="this server serves 'main', 'quick'"):
        found.find("nobody")


def test_the_main_model_s_own_settings_are_no_other_model_s(tmp_path: Path) -> None:
    main = build_oracle(tmp_path / "main")
    build_oracle(tmp_path / "models" / "quick")
    write_adapter(tmp_path, "titles")
    found = names(tmp_path, model_path=str(main), adapter_path="/mine", model_family="glm4", served_model_name="best")
    found.default_loaded("best", str(main), main)
    quick, titled = found.find("quick"), found.find("default+titles")
    theirs = found.settings_for(quick)
    assert (theirs.adapter_path, theirs.model_family, theirs.served_model_name) == (None, None, "quick")
    assert theirs.model_path == quick.source
    same = found.settings_for(titled)
    assert (same.adapter_path, same.model_family, same.served_model_name) == (None, "glm4", "best+titles")


def test_a_name_may_end_with_an_adapter_s(tmp_path: Path) -> None:
    main, other = build_oracle(tmp_path / "main"), build_oracle(tmp_path / "models" / "quick")
    plus = build_oracle(tmp_path / "models" / "a+b")
    write_adapter(tmp_path, "titles", "org/quick")
    write_adapter(tmp_path, "any")
    table = "small=quick,tiny=small+titles,quick-*=quick+any"
    found = started(tmp_path, main, model_map=table, pinned_models="quick+titles")
    assert [name for name in listed(found, tmp_path) if "+" in name] == [
        *("main+any", "a+b", "a+b+any"),
        *("quick+any", "quick+titles"),
    ]
    meant = {
        "a+b": (str(plus), ""),
        "a+b+any": (str(plus), "any"),
        "quick+titles": (str(other), "titles"),
        "openai/quick+titles": (str(other), "titles"),
        f"{other}+titles": (str(other), "titles"),
        "quick-7b": (str(other), "any"),
        "small+any": (str(other), "any"),
        "claude-opus+any": (str(main), "any"),
        "+any": (str(main), "any"),
    }
    for asked, (folder_of_it, adapter) in meant.items():
        known = found.find(asked)
        assert (str(known.stored.folder), known.adapter.name if known.adapter else "") == (folder_of_it, adapter), asked
    with pytest.raises(NotFound, match="this server serves"):
        found.find("tiny")  # what MODEL_MAP leads to is not looked up in it again: there is no model "small"
    for asked in ("quick-7b+titles", "main+titles", "quick+any+titles", "quick+/etc", "quick+"):
        with pytest.raises(BadRequest):
            found.find(asked)
    assert found.is_pinned(found.find("quick+titles")) and not found.is_pinned(found.find("quick+any"))
    settings = found.settings_for(found.find("quick+titles"))
    assert (settings.model_path, settings.served_model_name, settings.vision) == (str(other), "quick+titles", "off")


def test_the_main_model_is_asked_for_by_its_short_name_and_its_folder(tmp_path: Path) -> None:
    main, named_alike = build_oracle(tmp_path / "main"), tmp_path / "models" / RECOMMENDED[0].short
    build_oracle(named_alike)
    write_adapter(tmp_path, "any")
    short, source = RECOMMENDED[0].short, RECOMMENDED[0].repository
    found = names(tmp_path, model_map=f"fast={short}")
    found.default_loaded("main", source, main)
    for asked in (short, source, f"openai/{source}", "fast", str(main), "main", "default", ""):
        assert found.find(asked).default, asked
        adapted = found.find(f"{asked}+any")
        assert adapted.name == "main+any", asked
    other = found.find(str(named_alike))
    assert other.name == str(named_alike), "no other model is called as the main one is"


@pytest.mark.parametrize("asked", ["quick", "openai/quick", "small", "{other}", "openai/{other}"])
@pytest.mark.parametrize("main", [True, False])
def test_an_adapter_is_pinned_by_every_name_of_its_model(tmp_path: Path, asked: str, main: bool) -> None:
    folder, beside = build_oracle(tmp_path / "models" / "quick"), build_oracle(tmp_path / "models" / "beside")
    write_adapter(tmp_path, "any")
    pinned = f"{asked.format(other=folder)}+any"
    found = names(tmp_path, model_map="small=quick", pinned_models=pinned)
    found.default_loaded(*(("quick", str(folder), folder) if main else ("beside", str(beside), beside)))
    known, other = found.find(pinned), found.find("beside+any")
    assert known.name == "quick+any"
    assert found.is_pinned(known) and not found.is_pinned(other)


def test_a_disk_that_does_not_tell_case_has_one_adapter_of_a_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As disks of Macs are: the folder is found by each spelling, and is listed by its own."""
    write_adapter(tmp_path, "titles")
    os.symlink("titles", tmp_path / "adapters" / "Titles")
    adapters = AdapterFolder(tmp_path / "adapters")
    found = adapters.find("Titles")
    assert found is not None and found.name == "titles" and found.links == ("Titles",), (
        "a link is a name that is listed"
    )
    whole = os.scandir

    @contextmanager
    def listed_once(folder: Path) -> Iterator[list[os.DirEntry[str]]]:
        with whole(folder) as entries:
            yield [each for each in entries if each.name != "Titles"]

    monkeypatch.setattr(os, "scandir", listed_once)
    assert adapters.find("Titles") is None and adapters.find("titles") is not None


def test_a_link_to_a_folder_whose_name_is_none_names_it(tmp_path: Path) -> None:
    write_adapter(tmp_path, ".titles")
    for link in ("first", "second"):
        os.symlink(".titles", tmp_path / "adapters" / link)
    found = AdapterFolder(tmp_path / "adapters").all()
    assert [(each.name, each.links) for each in found] == [("first", ("second",))]


@pytest.mark.parametrize("inside", [True, False])
def test_a_link_to_an_adapter_is_another_name_of_it(tmp_path: Path, inside: bool) -> None:
    """Two entries would load it twice, and the second would find its folder on disk taken."""
    build_oracle(tmp_path / "models" / "quick")
    top = tmp_path if inside else tmp_path / "elsewhere"
    for name in ("titles-v3", "titles-v4"):
        write_adapter(top, name, "quick")
    folder = tmp_path / "adapters"
    folder.mkdir(exist_ok=True)
    for link in ("latest", "stable"):
        (folder / link).symlink_to(top / "adapters" / "titles-v3")
    found = names(tmp_path, pinned_models="quick+stable")
    both = [found.find("quick+latest"), found.find("quick+stable")]
    first = "titles-v3" if inside else "latest"
    assert [known.name for known in both] == [f"quick+{first}"] * 2
    assert both[0] == both[1] and found.is_pinned(both[0])
    others = ["quick+titles-v4"] if inside else []
    assert listed(found, tmp_path) == ["quick", f"quick+{first}", *others]
    (folder / "stable").unlink()
    (folder / "stable").symlink_to(top / "adapters" / "titles-v4")
    moved = found.find("quick+stable")
    assert moved.key != both[0].key


def test_a_model_that_has_just_come_is_found_whatever_it_is_called(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`gpt-*` means the main model only where no model is called so."""
    monkeypatch.setattr("start_llm.modelpool.resolve.SEEN_SECONDS", 0.0)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    found = started(tmp_path, model_map="*-120b=nobody")
    assert found.find("gpt-oss-20b").default and found.find("gpt-4o").default
    build_oracle(tmp_path / "models" / "gpt-oss-20b")
    in_hub = tmp_path / "hub" / "models--org--gpt-oss-120b"
    build_oracle(in_hub / "snapshots" / "0123")
    (in_hub / "refs").mkdir()
    (in_hub / "refs" / "main").write_text("0123", "utf-8")
    for name in ("gpt-oss-20b", "gpt-oss-120b", "org/gpt-oss-120b"):
        known = found.find(name)
        assert known.name == name.rpartition("/")[2]
    assert found.find("gpt-4o").default


def test_a_name_means_the_folder_that_has_it_now(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("start_llm.modelpool.resolve.SEEN_SECONDS", 0.0)
    main, *others = (build_oracle(tmp_path / name) for name in ("main", "one", "two"))
    found = started(tmp_path, main)
    link = tmp_path / "models" / "mine"
    link.parent.mkdir()
    for folder in others:
        link.unlink(missing_ok=True)
        link.symlink_to(folder)
        known = found.find("mine")
        assert known.key == str(folder.resolve())


def test_what_is_loaded_is_what_the_name_meant(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A load may have to wait for room: a link that was changed meanwhile does not put another model under its key."""
    main, *others = (build_oracle(tmp_path / name) for name in ("main", "one", "two"))
    found = started(tmp_path, main)
    link = tmp_path / "models" / "mine"
    link.parent.mkdir()
    link.symlink_to(others[0])
    found.listing.look_again()
    known = found.find("mine")
    link.unlink()
    link.symlink_to(others[1])
    assert str(found.folder_now(known)) == known.key == str(others[0].resolve())
    load = Mock()
    monkeypatch.setitem(kinds._LIBRARIES, "transcription", load)
    monkeypatch.setattr(kinds, "check_installed", Mock())
    heard = replace(known, stored=replace(known.stored, can=("transcription",)))
    kinds.SideModels(Mock(), Mock(), Mock()).read(Mock(known=heard))
    assert load.call_args.args[0] == others[0].resolve()
    adapted = found.find("main").with_adapter(Mock(links=()))
    assert adapted.folder == main.resolve()


def test_who_is_to_look_again_waits_for_another_one_who_looks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What that one sees may be older than the question."""
    monkeypatch.setattr(names_module, "SEEN_SECONDS", 3600.0)
    listing = names_module.ModelListing(load_settings(None, start_llm_cache_dir=tmp_path))
    assert listing.find("quick", look=False) is None
    again = threading.Thread(target=listing.look_again)
    with listing._lock:  # another one looks
        again.start()
        build_oracle(tmp_path / "models" / "quick")
        again.join(0.05)
        assert again.is_alive()
    again.join(60)
    assert listing.find("quick", look=False) is not None


def test_what_could_not_be_listed_once_is_noticed_all_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Somebody moved a model while they were listed."""
    monkeypatch.setattr(names_module, "SEEN_SECONDS", 0.0)
    found = names_module.ModelListing(load_settings(None, start_llm_cache_dir=tmp_path))
    assert found.find("quick") is None
    build_oracle(tmp_path / "models" / "quick")
    with monkeypatch.context() as moved:
        moved.setattr(names_module, "known_models", Mock(side_effect=FileNotFoundError("it was moved")))
        assert found.find("quick") is None
    monkeypatch.setattr(names_module, "LEAST_SECONDS", 3600.0)
    assert found.find("quick") is not None


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "tokenizer.json"])
def test_a_pipe_among_a_models_files_holds_nobody_up(tmp_path: Path, name: str) -> None:
    odd = build_oracle(tmp_path / "models" / "odd")
    build_oracle(tmp_path / "models" / "sound")
    (odd / name).unlink()
    os.mkfifo(odd / name)
    found = started(tmp_path)
    assert listed(found, tmp_path) == ["sound"]
    assert {stored.name: stored.problem for stored in stored_models(tmp_path)}[str(odd)].startswith(
        f"{name} is no file"
    )


def test_a_model_counts_as_the_weights_that_are_read(tmp_path: Path) -> None:
    """Its folder may hold them for other libraries, too."""
    both = build_oracle(tmp_path / "models" / "both")
    (both / "model.gguf").write_bytes(bytes(1 << 20))
    (both / "consolidated.safetensors").write_bytes(bytes(1 << 20))
    found = started(tmp_path)
    known = found.find("both")
    assert known.stored.size > 2 << 20
    assert 0 < found.weights(known).all == (both / "model.safetensors").stat().st_size


def test_a_disk_that_hangs_holds_one_thread_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    build_oracle(tmp_path / "models" / "quick")
    found = started(tmp_path)
    for setting in ("LEAST_SECONDS", "LISTING_SECONDS", "SEEN_SECONDS", "PATIENCE_SECONDS"):
        monkeypatch.setattr(f"start_llm.modelpool.resolve.{setting}", 0.01)
    time.sleep(0.02)
    reached, leave = threading.Event(), threading.Event()

    def hangs(*_: Any) -> list[Any]:
        reached.set()
        leave.wait(60)
        return []

    monkeypatch.setattr("start_llm.modelpool.resolve.stored_models", hangs)
    held = threading.Thread(target=found.all)
    held.start()
    try:
        assert reached.wait(60)
        assert listed(found, tmp_path) == ["quick"] and not found.find("quick").default
    finally:
        leave.set()
        held.join()


def test_a_model_of_another_provider_is_refused_with_where_it_can_be_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "k")
    build_oracle(tmp_path / "models" / "small", "plain")
    found = names(tmp_path, model_map="gpt-5=openai/gpt-5,gpt-oss=openai/small")
    for name in ("gpt-5", "openai/gpt-5"):
        with pytest.raises(NotFound, match=r"openai/gpt-5 is not on this machine; ask the proxy, by the name gpt-5"):
            found.find(name)
    assert found.find("gpt-5-mini") is found.default, "other names mean what they did"
    assert found.find("gpt-oss").name == "small", "another name of a model that is here"
    monkeypatch.delenv("OPENAI_API_KEY")
    assert names(tmp_path, model_map="gpt-5=openai/gpt-5").find("gpt-5").default
