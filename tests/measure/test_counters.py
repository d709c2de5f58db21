import time
import types

import pytest

from fusejax.errors import UsageError
from fusejax.hlo.analysis import Kernel, Traffic
from fusejax.measure import counters

HEADER = (
    '"ID","Process ID","Process Name","Host Name","Kernel Name","Context","Stream","Block Size",'
    '"Grid Size","Device","CC","dram__bytes_read.sum","dram__bytes_write.sum","launch__block_size",'
    '"launch__grid_size","launch__registers_per_thread","launch__shared_mem_per_block_dynamic",'
    '"launch__shared_mem_per_block_static","sm__maximum_warps_per_active_cycle_pct",'
    '"sm__warps_active.avg.pct_of_peak_sustained_active","smsp__inst_executed_op_local_ld.sum",'
    '"smsp__inst_executed_op_local_st.sum"'
)
UNITS = (
    '"","","","","","","","","","","","byte","byte","","","register/thread","byte/block",'
    '"byte/block","%","%","inst","inst"'
)
ROW = (
    '"{id}","77","python3","host","{name}","1","7","(512, 1, 1)","(8192, 1, 1)","0","9.0",'
    '"{read}","113425152","512","8192","30","0","64","100","88.38","0","3"'
)
REPORT = "\n".join(
    [
        "==PROF== Connected to process 77 (/usr/bin/python3)",
        HEADER,
        UNITS,
        ROW.format(id=0, name="input_convert_reduce_fusion", read="268447744"),
        ROW.format(id=1, name="void gemm<float, 2>(float*, int)", read="1,024"),
        ROW.format(id=2, name="broken", read="n/a"),
        "==PROF== Disconnected from process 77",
    ]
)


def test_reads_the_report():
    reduction, gemm = counters.parse(REPORT)
    assert reduction == counters.Counted(
        function="input_convert_reduce_fusion",
        read_bytes=268_447_744,
        written_bytes=113_425_152,
        execution=counters.Execution(
            registers=30,
            local_loads=0,
            local_stores=3,
            static_shared_bytes=64,
            dynamic_shared_bytes=0,
            threads=512,
            blocks=8192,
            occupancy=pytest.approx(0.8838),
            theoretical_occupancy=1.0,
        ),
    )
    assert gemm.function == "void gemm<float, 2>"
    assert gemm.read_bytes == 1024


DETAILS = {
    "smsp__issue_active.avg.pct_of_peak_sustained_active": ("%", "81.5"),
    "dram__throughput.avg.pct_of_peak_sustained_elapsed": ("%", "52.25"),
    "sm__inst_executed_pipe_xu.avg.pct_of_peak_sustained_active": ("%", "12"),
    "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_active": ("%", "90"),
    "lts__t_sector_hit_rate.pct": ("%", "33.3"),
    "smsp__inst_executed.sum": ("inst", "1,234,567"),
    "l1tex__t_sectors_pipe_lsu_mem_local_op_ld.sum": ("sector", "10"),
    "l1tex__t_sectors_pipe_lsu_mem_local_op_st.sum": ("sector", "20"),
    "l1tex__t_sectors_pipe_lsu_mem_local_op_ld_lookup_miss.sum": ("sector", "3"),
    "l1tex__t_sectors_pipe_lsu_mem_local_op_st_lookup_miss.sum": ("sector", "4"),
}


def detailed(details):
    """The report with further counters."""
    lines = [HEADER, UNITS, ROW.format(id=0, name="loop_add_fusion", read="1024")]
    columns = (details, [unit for unit, _ in details.values()], [v for _, v in details.values()])
    return "\n".join(
        ",".join([line, *(f'"{value}"' for value in more)])
        for line, more in zip(lines, columns, strict=True)
    )


def test_details():
    (launch,) = counters.parse(detailed(DETAILS))
    found = launch.execution
    assert found.issue == pytest.approx(0.815)
    assert found.dram == pytest.approx(0.5225)
    assert found.xu_pipe == pytest.approx(0.12)
    assert found.tensor_pipe == pytest.approx(0.9)
    assert found.l2_hits == pytest.approx(0.333)
    assert found.instructions == 1_234_567
    assert found.local_bytes == 30 * 32
    assert found.local_bytes_past_l1 == 7 * 32
    assert found.registers == 30


@pytest.mark.parametrize("missing", DETAILS)
@pytest.mark.parametrize("written", ["", "n/a", "(!) n/a", "nan", None])
def test_a_missing_detail_loses_nothing_else(missing, written):
    details = {**DETAILS, missing: ("", written)}
    if written is None:
        del details[missing]
    (launch,) = counters.parse(detailed(details))
    (whole,) = counters.parse(detailed(DETAILS))
    lost = {
        name
        for name, value in vars(launch.execution).items()
        if value != getattr(whole.execution, name)
    }
    assert len(lost) == 1
    assert getattr(launch.execution, lost.pop()) is None


def test_other_names_of_the_tensor_cores():
    old = {
        "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_active": ("", "n/a"),
        "sm__inst_executed_pipe_tensor.avg.pct_of_peak_sustained_active": ("%", "40"),
    }
    (launch,) = counters.parse(detailed({**DETAILS, **old}))
    assert launch.execution.tensor_pipe == pytest.approx(0.4)


def test_bytes_alone():
    found = counters.parse(REPORT, bytes_only=True)
    assert [launch.execution for launch in found] == [None, None]
    assert [launch.read_bytes for launch in found] == [268_447_744, 1024]
    bytes_alone = "\n".join([
        '"ID","Kernel Name","dram__bytes_read.sum","dram__bytes_write.sum"',
        '"","","byte","byte"',
        '"0","loop_add_fusion","7","8"',
    ])  # fmt: skip
    assert counters.parse(bytes_alone, bytes_only=True) == (
        counters.Counted("loop_add_fusion", 7, 8),
    )
    assert counters.parse(bytes_alone) == ()  # asked for more than was counted


def test_units_are_heeded():
    report = REPORT.replace('"byte","byte"', '"Mbyte","Kbyte"').replace("268447744", "268.4")
    assert counters.parse(report)[0].read_bytes == 268_400_000


@pytest.mark.parametrize("report", ["", "==WARNING== No kernels were profiled.", HEADER])
def test_no_launches(report):
    assert counters.parse(report) == ()


def test_permission():
    reason = counters.refusal(
        "==ERROR== ERR_NVGPUCTRPERM - The user does not have permission to access NVIDIA GPU "
        "Performance Counters on the target device 0."
    )
    assert "ERR_NVGPUCTRPERM" in reason
    assert "\n" not in reason
    assert counters.refusal("==PROF== fine") is None
    assert "LibraryNotLoaded" in counters.refusal(
        "==ERROR== Failed to initialize the profiler: LibraryNotLoaded\n"
    )


def test_missing_ncu(monkeypatch):
    monkeypatch.setattr(counters, "find", lambda: None)
    with pytest.raises(UsageError, match=r"ncu is not on the PATH: install it"):
        counters.run_under_ncu(["true"])


@pytest.fixture
def ncu(tmp_path, monkeypatch):
    """Stands in for ncu: `write(report, code)` has it run the command, log a report and exit."""
    path = tmp_path / "ncu"
    monkeypatch.setattr(counters, "find", lambda: path)

    def write(report, code=0, stderr=""):
        (tmp_path / "report").write_text(report)
        path.write_text(
            "#!/bin/sh\n"
            f'echo "$@" > {tmp_path}/arguments\n'
            'while [ "$1" != "--log-file" ]; do shift; done\nlog="$2"\n'
            'while [ "$1" != "--metrics" ]; do shift; done\nshift 2\n'
            f'"$@" || exit\ncp {tmp_path}/report "$log"\necho "{stderr}" >&2\nexit {code}\n'
        )
        path.chmod(0o755)
        return tmp_path / "arguments"

    return write


def test_runs_the_command(ncu):
    arguments = ncu(REPORT)
    launches = counters.run_under_ncu(["true"])
    assert [launch.execution.threads for launch in launches] == [512, 512]
    assert "launch__registers_per_thread" in arguments.read_text()


def test_unknown_names_are_left_out(tmp_path, monkeypatch):
    path = tmp_path / "ncu"
    monkeypatch.setattr(counters, "find", lambda: path)
    (tmp_path / "report").write_text(REPORT)
    path.write_text(
        "#!/bin/sh\n"
        f'echo run >> {tmp_path}/runs\ncase "$*" in\n'
        '*tensor*) echo "==ERROR== Failed to find metric sm__inst_executed_pipe_tensor.avg"; '
        "exit 1;;\nesac\n"
        f'while [ "$1" != "--log-file" ]; do shift; done\ncp {tmp_path}/report "$2"\n'
    )
    path.chmod(0o755)
    launches = counters.run_under_ncu(["true"])
    assert [launch.execution.tensor_pipe for launch in launches] == [None, None]
    assert [launch.execution.threads for launch in launches] == [512, 512]
    assert (tmp_path / "runs").read_text() == "run\nrun\n"
    path.write_text(f'#!/bin/sh\necho run >> {tmp_path}/runs\necho "==ERROR== No GPU"; exit 1\n')
    with pytest.raises(UsageError, match="No GPU"):
        counters.run_under_ncu(["true"])
    assert (tmp_path / "runs").read_text() == "run\n" * 3


def test_bytes_alone_are_asked_for(ncu):
    arguments = ncu(REPORT)
    assert counters.run_under_ncu(["true"], bytes_only=True)[0].execution is None
    metrics = arguments.read_text().split("--metrics ")[1].split()[0]
    assert metrics == "dram__bytes_read.sum,dram__bytes_write.sum"


def test_tells_what_the_command_writes(ncu):
    ncu(REPORT)
    told = []
    counters.run_under_ncu(["sh", "-c", "echo one; echo two; echo three >&2"], tell=told.append)
    assert told == ["one", "two"]


@pytest.mark.parametrize(
    ("report", "code", "stderr", "message"),
    [
        (REPORT, 3, "last words", r"exited with 3 \(last words\)"),
        ("", 0, "", "counted 0 kernels"),
        ("==ERROR== ERR_NVGPUCTRPERM - no", 1, "", "administrators"),
    ],
)
def test_says_what_went_wrong(ncu, report, code, stderr, message):
    ncu(report, code, stderr)
    with pytest.raises(UsageError, match=message) as caught:
        counters.run_under_ncu(["true"])
    assert "\n" not in str(caught.value)


def test_timeout_stops_the_command_too(ncu, tmp_path):
    ncu(REPORT)
    late = tmp_path / "late"
    with pytest.raises(UsageError, match="longer than 0 s"):
        counters.run_under_ncu(["sh", "-c", f"sleep 1; touch {late}"], timeout_s=0.3)
    time.sleep(1)
    assert not late.exists()


def test_split():
    first, second = counters.parse(REPORT)
    assert counters.split([first, second, first], [2, 1]) == ((first, second), (first,))
    assert counters.split([first], [2]) is None


def test_what_was_counted_goes_to_the_kernels_resources():
    from fusejax.measure.on_machine import _counted_resources

    (launch, other) = counters.parse(REPORT)
    kernel = Kernel("k", "loop", (), None, 1, Traffic(0, 0))
    path = types.SimpleNamespace(kernels=(kernel,), resources={"k": {"threads": 512}})
    measured = {
        "threads": 512,
        "measured_bytes": {"read": 268_447_744, "written": 113_425_152},
        "measured_occupancy": pytest.approx(0.8838),
        "measured_registers": 30,
    }
    found = _counted_resources(path, (launch,))["k"]
    assert measured.items() <= found.items()
    assert found["measured_shared_bytes"] == (
        launch.execution.static_shared_bytes + launch.execution.dynamic_shared_bytes
    )
    assert _counted_resources(path, (launch, other)) == path.resources  # which is which?
    (moved, _) = counters.parse(REPORT, bytes_only=True)
    assert _counted_resources(path, (moved,)) == {
        "k": {key: measured[key] for key in ("threads", "measured_bytes")}
    }


def test_paths_are_told_apart_by_the_marks_between_them():
    from fusejax.measure.counting import by_path

    def launched(*names):
        return [counters.Counted(name, 0, 0) for name in names]

    found = by_path(launched("a", "b", "wrapped_xor", "c", "splitk", "wrapped_xor", "d"), 3)
    assert [[one.function for one in run] for run in found] == [["a", "b"], ["c", "splitk"], ["d"]]
    assert by_path(launched("a", "b"), 2) is None
