"""Documents to make pages of: small ones by hand, larger ones by rule."""

import copy
import itertools
import json
import pathlib

from fusejax import inspection

ROOT = pathlib.Path(__file__).resolve().parents[2]
DATA = ROOT / "tests" / "data" / "jax-0.12.0.1"
MIB = 1 << 20
TARGET = {
    "name": "h200",
    "kind": "deviceless",
    "description": "NVIDIA H200",
    "bandwidth_bytes_per_s": 4.8e12,
    "effective_bandwidth_bytes_per_s": 4e12,
    "flop_per_s": {"multiply:f32": 3.3e13, "matmul:bf16": 8e14},
    "launch_us": 0.0,
    "dispatch_us": 3.2,
    "rates": "measured on NVIDIA H200, 2026-11-30",
}


def kernel(name, *, read=MIB, written=MIB, scopes=(), **known):
    fields = {
        "emitter": "loop", "count": 1, "source": "model.py:7", "direction": "forward",
        "work": None, "flops": 1000, "registers": None, "spill_bytes": None,
        "shared_bytes": None, "threads": None, "grid": None, "occupancy": None,
        "occupancy_limiter": None, "time_us": None, "predicted_us": 2.0,
    }  # fmt: skip
    moved = {"read": read, "written": written, "total": read + written}
    return {"name": name, "scopes": list(scopes), "bytes": moved} | fields | known


def boundary(producer, consumers, *, written=MIB, read=MIB, scopes=(), kind="rule", **known):
    fields = {"dtype": "f32", "shape": [512, 512], "source": "model.py:7", "memory": "device"}
    reason = {"kind": kind, "text": f"because of {producer}", "us_fused": None, "us_unfused": None}
    return {
        "producer": producer, "consumers": list(consumers), "written_bytes": written,
        "read_bytes": read, "scopes": list(scopes), "reason": reason,
    } | fields | known  # fmt: skip


def module(kernels, boundaries=(), *, name="jit_f", target=TARGET, **known):
    read = sum(k["bytes"]["read"] * k["count"] for k in kernels)
    written = sum(k["bytes"]["written"] * k["count"] for k in kernels)
    return {
        "name": name, "file": None, "backend": "gpu",
        "launches": sum(k["count"] for k in kernels),
        "bytes": {"read": read, "written": written, "total": read + written},
        "minimum_bytes": 2 * MIB, "ratio": (read + written) / (2 * MIB),
        "kernels": list(kernels), "boundaries": list(boundaries), "scopes": [], "warnings": [],
        "target": target, "time_us": {"predicted": 2.0 * len(kernels), "predicted_terms": None},
    } | known  # fmt: skip


def inspected(*modules, diff=None):
    return {"schema": "fusejax.inspect/1", "modules": list(modules), "diff": diff}


def of_dumps(*cases, compare=False):
    report = inspection.inspect_paths([str(DATA / case) for case in cases], compare=compare)
    return report.to_json()


def measured():
    """A comparison that a card measured."""
    sweep = ROOT / "evidence" / "bias_gelu_rowsum_8192" / "report.json"
    return json.loads(sweep.read_text())["cells"][0]


def predicted():
    """The same, as if there had been no card; one path refuses."""
    document = copy.deepcopy(measured())
    document |= {"copy_floor_us": None, "clocks": None}
    document["target"] |= {"kind": "deviceless", "name": "h200"}
    for path in document["paths"].values():
        path["time_us"] |= dict.fromkeys(("measured", "low", "high", "end_to_end"))
        path["bytes"]["measured"] = None
        for one in path["kernels"]:
            for field in [field for field in one if field.startswith("measured_")]:
                del one[field]
            one |= {"time_us": None, "predicted_us": 50.0}
    document["verdict"] |= {"basis": "predicted", "summary": "pallas is fastest (predicted)."}
    document["paths"]["pallas_split"] = {
        "status": "unsupported", "reason": "needs rows of 16 bytes", "launches": None,
        "programs": None, "bytes": None, "boundaries": [], "kernels": [],
        "time_us": dict.fromkeys(("predicted", "measured", "low", "high", "end_to_end")),
        "compile_s": {"cold": None, "warm": None}, "executable_bytes": None, "error": None,
    }  # fmt: skip
    return document


def layers(count, *, per_layer=30, name="jit_loss"):
    """A model of equal layers, forward and backward; each kernel hands one tensor to the next."""
    kernels = []
    for direction, order in (("forward", range(count)), ("backward", reversed(range(count)))):
        for layer in order:
            for number in range(per_layer // 2):
                part = ("norm", "attention", "mlp")[number * 6 // per_layer]
                kernels.append(
                    kernel(
                        f"fusion.{len(kernels)}",
                        scopes=(f"Model/Block_{layer}/{part}",),
                        direction=direction,
                        registers=16 + number,
                        occupancy=1.0,
                    )
                )
    names = [one["name"] for one in kernels]
    edges = [
        boundary(a, [b], written=MIB + place, read=MIB + place, scopes=kernels[place]["scopes"])
        for place, (a, b) in enumerate(itertools.pairwise(names))
    ]
    return inspected(module(kernels, edges, name=name))
