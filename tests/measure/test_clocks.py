import os

import jax.numpy as jnp
import pytest

from fusejax.comparison import Clocks
from fusejax.measure import clocks
from fusejax.report.units import clock_sentence

LINE = "1425, 1980, 688.23, 700.00, 0x0000000000000004\n"


def test_reads_what_nvidia_smi_says():
    assert clocks.parse(LINE) == Clocks(1425, 1980, 688.23, 700, ("power cap",))


def test_two_bits_of_one_reason_are_one_reason_and_an_idle_card_has_none():
    assert clocks.parse("1, 2, 3, 4, 0x60").limited_by == ("temperature",)
    assert clocks.parse("1, 2, 3, 4, 0x1").limited_by == ()


@pytest.mark.parametrize("answer", ["", "No devices were found", "1425, 1980, [N/A], 700, 0x4"])
def test_what_the_driver_does_not_tell_is_none(answer):
    assert clocks.parse(answer) is None


def test_calls_go_on_while_nvidia_smi_reads(tmp_path, monkeypatch):
    tool = tmp_path / "nvidia-smi"
    tool.write_text(f"#!/bin/sh\nsleep 0.3\nprintf '{LINE.strip()}'\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    calls = []
    found = clocks.under_load(lambda: calls.append(0) or jnp.zeros(1))
    assert found == clocks.parse(LINE)
    assert len(calls) > 20


def test_without_nvidia_smi_there_is_nothing_to_tell(monkeypatch):
    monkeypatch.setenv("PATH", "")
    assert clocks.under_load(lambda: None) is None


def test_the_sentence_names_clock_power_and_what_holds_it_back():
    fields = vars(clocks.parse(LINE))
    told = clock_sentence(fields)
    assert "1,425 of 1,980 MHz" in told
    assert "power cap (688 of 700 W" in told
