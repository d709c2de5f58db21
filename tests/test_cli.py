"""What the scripts do with files and environments that are not as usual."""

import os
import stat

import pytest

from fusejax import cli
from fusejax.compile import platform, targets
from fusejax.compile.cards import CARDS, describe
from fusejax.errors import UsageError


def test_json_follows_links_and_keeps_modes(tmp_path):
    real, link = tmp_path / "real.json", tmp_path / "link.json"
    real.write_text("old")
    real.chmod(0o600)
    link.symlink_to(real)
    cli.write_json("--json", str(link), {"a": 1})
    assert link.is_symlink()
    assert '"a": 1' in real.read_text()
    assert stat.S_IMODE(real.stat().st_mode) == 0o600
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link.json", "real.json"]


def test_json_is_written_into_a_pipe_not_over_it(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        cli.write_json("--json", str(pipe), {"a": 1})
        assert b'"a": 1' in os.read(reader, 100)
    finally:
        os.close(reader)
    assert stat.S_ISFIFO(pipe.stat().st_mode)


@pytest.mark.parametrize("name", ["", "no/such/folder.json", "x" * 300, "."])
def test_unwritable_names_are_refused_before_the_work(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match="--json"):
        cli.check_writable("--json", name)
    assert list(tmp_path.iterdir()) == []


def test_a_writable_name_leaves_nothing_behind(tmp_path):
    cli.check_writable("--json", str(tmp_path / "new.json"))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("field", "value"),
    [("core_count", "0"), ("threads_per_warp", "0"), ("major", "99"), ("memory_bandwidth", "1")],
)
def test_absurd_descriptions_are_refused(field, value, tmp_path):
    right = str(CARDS["h100"].memory_bandwidth) if field == "memory_bandwidth" else None
    text = describe(CARDS["h100"])
    file = tmp_path / "card.txtpb"
    lines = []
    for line in text.splitlines():
        is_field = line.strip().startswith(f"{field}:")
        lines.append(f"  {field}: {value}" if is_field else line)
    file.write_text("\n".join(lines))
    assert right is None or right not in file.read_text()
    with pytest.raises(UsageError, match=field):
        targets.resolve(str(file))


@pytest.mark.parametrize("change", [lambda t: t.replace("\n", " "), lambda t: "\ufeff" + t])
def test_a_description_on_one_line_or_with_a_mark_is_read(change, tmp_path, deviceless):
    file = tmp_path / "card.txtpb"
    file.write_text(change(describe(CARDS["h200"])), encoding="utf-8")
    target, _ = targets.resolve(str(file))
    assert target.bandwidth_bytes_per_s == CARDS["h200"].memory_bandwidth


def test_platforms_that_are_not_here_are_named(monkeypatch):
    monkeypatch.setattr(platform, "gpu_present", lambda: False)
    monkeypatch.setenv("JAX_PLATFORMS", "cuda")
    with pytest.raises(UsageError, match="JAX_PLATFORMS"):
        platform.prepare_process()
    monkeypatch.setenv("JAX_PLATFORMS", "")
    platform.prepare_process()
    assert os.environ["JAX_PLATFORMS"] == "cpu"


def test_arrays_larger_than_the_card_are_refused(deviceless):
    import numpy as np

    from fusejax.compare_ops import compare_op
    from fusejax.ops import OPS

    with pytest.raises(UsageError, match="smaller shape"):
        compare_op(OPS["softmax"](), (10**9, 10**9), np.float16, deviceless("h200"))
