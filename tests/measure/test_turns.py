"""Turns of threads and processes that share a card."""

import subprocess
import sys
import tempfile
import threading
import time

import pytest

from fusejax.measure.turns import card_turn, turn

OTHER = """
import pathlib, sys, tempfile
tempfile.tempdir = sys.argv[1]
from fusejax.measure.turns import card_turn
with card_turn():
    print("in", flush=True)
    sys.stdin.readline()
    pathlib.Path(sys.argv[1], "left").touch()
"""


def test_processes_exclude_each_other(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with subprocess.Popen(
        [sys.executable, "-c", OTHER, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as other:
        assert other.stdin is not None
        assert other.stdout is not None
        assert other.stdout.readline() == "in\n"
        entered = threading.Event()
        was_left = []

        def wait_here():
            with card_turn():
                was_left.append((tmp_path / "left").exists())
                entered.set()

        waiting = threading.Thread(target=wait_here)
        waiting.start()
        assert not entered.wait(0.3)
        other.stdin.write("go\n")
        other.stdin.flush()
        assert entered.wait(30)
        waiting.join()
    assert was_left == [True]


@pytest.mark.parametrize("removes", [False, True])
def test_threads_exclude_each_other_though_the_file_is_removed(tmp_path, removes):
    lock = tmp_path / "lock"
    inside, most = [], []

    def often():
        for _ in range(20):
            with turn(lock):
                inside.append(1)
                most.append(len(inside))
                time.sleep(0.001)
                inside.pop()
                if removes:
                    lock.unlink()

    threads = [threading.Thread(target=often) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == [1] * 80
    assert lock.exists() is not removes


def test_a_turn_ends_with_an_exception(tmp_path):
    with pytest.raises(KeyError), turn(tmp_path / "lock"):
        raise KeyError
    with turn(tmp_path / "lock"):
        pass
