"""The documentation of Horovod's names, and hvdrun's understanding of horovodrun's options."""

import importlib.util
import re
from pathlib import Path

import pytest

import hvd_keras
from hvd_keras.horovod import PATH, horovodrun, names
from hvd_keras.horovod.horovodrun import EXTENSION
from hvd_keras.launch import job_spec, options
from hvd_keras.launch.errors import UsageError


def parse(given: list[str]):
    return options.parse(given, [EXTENSION])


def test_the_documentation_names_what_the_modules_have() -> None:
    page = Path(__file__).parents[2] / "docs" / "migrating.md"
    table = page.read_text().partition("\n|name|state|")[2].partition("\n\n")[0]
    firsts = " ".join(re.findall(r"^\|(`.*?)\|", table, re.MULTILINE))
    found = [name for name in re.findall(r"`([^`]+)`", firsts) if "…" not in name]  # no methods
    listed = {name.rpartition(".")[2] for name in found}
    assert listed <= {name for homes in names.MODULES.values() for name in homes}
    # What hvd_keras itself lacks.
    for module in ("tensorflow.keras", "tensorflow.keras.callbacks", "spark", "ray"):
        missing = set(names.MODULES[f"horovod.{module}"]) - {*hvd_keras.__all__, *listed}
        assert missing <= {"LearningRateWarmupCallback"}, module


def test_every_home_has_its_names() -> None:
    for module, homes in names.MODULES.items():
        for name, home in homes.items():
            if not home:
                assert name in hvd_keras.__all__, f"{module}.{name}"
            else:
                found = importlib.util.find_spec(f"hvd_keras.{home.partition(':')[0]}")
                assert found, f"{module}.{name}"


@pytest.mark.parametrize(
    ("given", "attribute", "expected", "told"),
    [
        (["-p", "2222"], "ssh_port", 2222, ""),
        (["-i", "key"], "ssh_identity_file", "key", ""),
        (["-hostfile", "hosts"], "hostfile", "hosts", ""),
        (["--min-num-proc", "2"], "min_np", 2, ""),
        (["--max-num-proc", "4"], "max_np", 4, ""),
        (["--slots-per-host", "2"], "per_host", 2, ""),
        (["--reset-limit", "3"], "max_restarts", 3, ""),
        (["--timeline-filename", "t.json"], "timeline", "t.json", ""),
        (["--network-interfaces", "eth0"], "network_interface", "eth0", ""),
        (["--check-build"], "check", True, ""),
        (["--output-filename", "out"], "output_dir", "out", ""),
        (["--elastic-timeout", "7"], "restart_timeout", 7, ""),
        (["--autotune"], "settings", {}, "--autotune of horovodrun has no effect here"),
        (["--blacklist-cooldown-range", "1", "2"], "settings", {}, "has no effect"),
        (["--no-stall-check"], "settings", {"HVD_STALL_WARNING_SECONDS": "0"}, ""),
        (["--fusion-threshold-mb", "2"], "settings", {"HVD_BUCKET_BYTES": "2097152"}, ""),
        (["--log-level", "TRACE"], "settings", {"HVD_LOG_LEVEL": "DEBUG"}, ""),
    ],
)
def test_options_of_horovodrun(given, attribute, expected, told, capsys) -> None:
    parsed = parse(["-np", "2", *given, "python", "--gloo", "-v"])
    assert getattr(parsed, attribute) == expected
    assert parsed.command == ["python", "--gloo", "-v"]
    said = capsys.readouterr().err
    assert told in said
    assert said.count("\n") == bool(told)


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (["--config-file", "f"], "give the options on the command line"),
        (["--jsrun"], "start the script with jsrun"),
        (["--fusion-threshold-mb", "x"], "whole number"),
        (["--log-level", "loud"], "expected debug"),
    ],
)
def test_options_of_horovodrun_that_are_refused(given, told) -> None:
    with pytest.raises(UsageError, match=told):
        parse(["-np", "2", *given, "python"])


def test_an_elastic_command_line_restarts(capsys) -> None:
    elastic = ["--horovod", "-np", "2", "--min-np", "1"]
    assert parse([*elastic, "python"]).max_restarts == 10
    assert "--reset-limit N" in capsys.readouterr().err
    for limit in (0, 3):
        assert parse([*elastic, "--reset-limit", str(limit), "x"]).max_restarts == limit
    assert parse(["--horovod", "--host-discovery-script", "h", "x"]).max_restarts == 10
    assert parse(["--horovod", "-np", "2", "python"]).max_restarts == 0
    assert parse([*elastic[1:], "python"]).max_restarts == 0


def test_more_ranks_than_cores_are_not_refused_with_horovod(capsys) -> None:
    given = ["-np", "999", "true"]
    job_spec.build(parse(["--horovod", *given]))
    assert "hvdrun: 999 ranks share" in capsys.readouterr().err
    with pytest.raises(UsageError, match="--oversubscribe"):
        job_spec.build(parse(given))


@pytest.mark.parametrize(("disable", "expected"), [("0", "5"), ("1", "0")])
def test_the_stall_check_of_horovod_is_disabled(disable, expected) -> None:
    given = {"HOROVOD_STALL_CHECK_TIME_SECONDS": "5", "HOROVOD_STALL_CHECK_DISABLE": disable}
    assert horovodrun.settings(given)["HVD_STALL_WARNING_SECONDS"] == expected


def test_settings_of_horovod_are_translated(monkeypatch, capsys) -> None:
    monkeypatch.setenv("HOROVOD_TIMELINE", "t.json")
    monkeypatch.setenv("HOROVOD_STALL_SHUTDOWN_TIME_SECONDS", "7")
    monkeypatch.setenv("HOROVOD_LOG_LEVEL", "trace")
    monkeypatch.setenv("HOROVOD_FUSION_THRESHOLD", "0")
    monkeypatch.setenv("HOROVOD_STALL_CHECK_TIME_SECONDS", "5")
    monkeypatch.setenv("HVD_STALL_WARNING_SECONDS", "6")
    spec = job_spec.build(parse(["-np", "1", "--horovod", "--log-level", "error", "true"]))
    found = spec.rank_environment(1, Path(), "")
    assert (found["HVD_TIMELINE"], found["HVD_TIMEOUT_SECONDS"]) == ("t.json", "7")
    assert (found["HVD_LOG_LEVEL"], found["HVD_BUCKET_BYTES"]) == ("ERROR", "1")
    assert "HVD_STALL_WARNING_SECONDS" not in found, "hvd_keras's own has precedence"
    assert "HOROVOD_TIMELINE is HVD_TIMELINE=t.json here" in capsys.readouterr().err
    spec = job_spec.build(parse(["-np", "1", "true"]))
    others = spec.rank_environment(1, Path(), "")
    assert "HVD_TIMELINE" not in others
    assert "HVD_TIMELINE" not in horovodrun.settings({"HOROVOD_TIMELINE": "DYNAMIC"})


def test_options_reach_the_ranks() -> None:
    parsed = parse(["-np", "1", "--horovod", "--fusion-threshold-mb", "1", "true"])
    settings = job_spec.build(parsed).rank_environment(1, Path(), "")
    assert settings["HVD_BUCKET_BYTES"] == str(1 << 20)
    assert settings["PYTHONPATH"].split(":")[0] == PATH
