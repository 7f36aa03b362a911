"""`python -m tilewise`: what it prints and refuses. Real compilations are in tests/compile."""

from __future__ import annotations

import json

import pytest

from tilewise import cli
from tilewise.compile import aot
from tilewise.settings import settings


@pytest.fixture(autouse=True)
def fresh_settings(monkeypatch, tmp_path):
    monkeypatch.setenv("TILEWISE_CACHE_DIR", str(tmp_path / "cache"))
    settings.cache_clear()
    yield
    settings.cache_clear()


def test_doctor_finds_nothing_wrong(capsys):
    pytest.importorskip("filelock")
    assert cli.main(["doctor"]) == 0
    text = capsys.readouterr().out
    for words in ("torch 2", "sm90: for", "cpu: accepted", "0 hits, 0 misses", "nothing is wrong"):
        assert words in text


@pytest.mark.parametrize(
    "name, value, words",
    [
        ("TILEWISE_CACH", "1", "TILEWISE_CACH is no setting"),
        ("TILEWISE_CACHE_MB", "many", "TILEWISE_CACHE_MB: expected a number"),
        ("TILEWISE_LOG", "plans", "no topic 'plans'"),
        ("TILEWISE_KERNELS", "/nowhere/at/all", "neither a folder nor a package"),
    ],
)
def test_doctor_names_what_is_wrong(name, value, words, monkeypatch, capsys):
    monkeypatch.setenv(name, value)
    settings.cache_clear()
    assert cli.main(["doctor"]) == 1
    assert words in capsys.readouterr().out.split("\nwrong\n")[1]


def test_doctor_names_a_cache_that_cannot_be_written(monkeypatch, tmp_path, capsys):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("TILEWISE_CACHE_DIR", str(tmp_path / "file" / "cache"))
    settings.cache_clear()
    assert cli.main(["doctor"]) == 1
    assert "cannot be written" in capsys.readouterr().out


@pytest.mark.parametrize(
    "arguments, words",
    [
        ([], "nothing to compile"),
        (["--preset", "lama"], "preset: expected one of llama"),
        (["--preset", "llama", "--arch", "sm_70"], "arch: expected one of sm_90a"),
        (["--preset", "llama", "-j", "0"], "--jobs"),
        (["--key", "{}"], "key: expected"),
        (["--spec", "/nowhere/spec.json"], "No such file"),
    ],
)
def test_precompile_refuses_in_words(arguments, words, tmp_path, capsys):
    assert cli.main(["precompile", "-o", str(tmp_path), *arguments]) == 2
    assert words in capsys.readouterr().err


@pytest.mark.parametrize("body, words", [("{}", "list of objects"), ("[", "JSON"), ('[{"head": 1}]', "fields of")])
def test_a_spec_that_is_none_is_refused(body, words, tmp_path, capsys):
    (tmp_path / "spec").write_text(body)
    assert cli.main(["precompile", "-o", str(tmp_path), "--spec", str(tmp_path / "spec")]) == 2
    assert words in capsys.readouterr().err


@pytest.mark.parametrize("name", aot.PRESETS)
def test_presets_name_kernels_once(name):
    found, _ = aot.keys(aot.preset_entries(name), "sm_90a")
    assert found and len({k.digest for k in found}) == len(found)


def test_a_list_in_a_spec_is_one_call_each(tmp_path):
    (tmp_path / "spec").write_text(json.dumps([{"head_dim": [64, 128], "causal": [False, True]}]))
    entries = aot.read_spec(tmp_path / "spec")
    found = {(x.head_dim, x.window_right) for x, _ in aot.calls(entries[0])}
    assert found == {(64, None), (64, 0), (128, None), (128, 0)}
