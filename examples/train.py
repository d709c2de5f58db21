"""Trains a small GPT on the documentation of Python: Flax's layers, fusejax's, or both in turn.

Examples:
  python examples/train.py --model linen --layers flax,fusejax --steps 200 --plot losses.svg
  python examples/train.py --model nnx --layers fusejax --devices 8
  python examples/train.py --layers flax,fusejax --steps 0 --kernels --target h200 \\
      --hidden 4096 --heads 32 --blocks 4 --batch 8 --length 1024 --dtype bfloat16

Both start from the same values and see the same batches: losses must agree, and on a GPU the times
of a step compare. --kernels shows where the compiled steps differ, by module; without a GPU, for
one that is not there (--target). Batches are bytes of text that comes with Python.

With --devices N the batch is spread over N devices (of a GPU host, or made of the CPU), and each
has all parameters. The same over several processes, here two on this machine:

  python examples/train.py --devices 2 --coordinator localhost:9876 --processes 2 --process-id 0 &
  python examples/train.py --devices 2 --coordinator localhost:9876 --processes 2 --process-id 1

Each process of a GPU host uses all GPUs that it sees (CUDA_VISIBLE_DEVICES); on a CPU --devices
are those of each process. Process 0 reports.
"""

import math
import re

from absl import flags

from fusejax import cli
from fusejax.compile import platform
from fusejax.errors import UsageError

_MODEL = flags.DEFINE_enum("model", "linen", ["linen", "nnx"], "The model's framework.")
_LAYERS = flags.DEFINE_list(
    "layers", ["flax", "fusejax"], "flax, fusejax, or both by commas: trained in turn."
)
_HIDDEN = flags.DEFINE_integer("hidden", 128, "Width of the model.", lower_bound=1)
_BLOCKS = flags.DEFINE_integer("blocks", 2, "Transformer blocks.", lower_bound=0)
_HEADS = flags.DEFINE_integer("heads", 4, "Heads of attention.", lower_bound=1)
_VOCABULARY = flags.DEFINE_integer(
    "vocabulary", 256, "Logits of a token; the text has 256.", lower_bound=256
)
_LENGTH = flags.DEFINE_integer(
    "length", 128, "Tokens of a sequence.", lower_bound=1, upper_bound=1 << 16
)
_BATCH = flags.DEFINE_integer("batch", 16, "Sequences of a step, on all devices.", lower_bound=1)
_NORM = flags.DEFINE_enum("norm", "layer", ["layer", "rms"], "LayerNorm or RMSNorm.")
_MLP = flags.DEFINE_enum("mlp", "gelu", ["gelu", "swiglu"], "Dense + GELU, or SwiGLU.")
_ATTENTION = flags.DEFINE_enum(
    "attention", "xla", ["xla", "cudnn", "softmax"],
    "jax.nn.dot_product_attention, by XLA or cuDNN, or products around the Softmax layer.",
)  # fmt: skip
_DTYPE = flags.DEFINE_enum(
    "dtype", "float32", ["float32", "bfloat16"], "Of activations; parameters are float32."
)
_STEPS = flags.DEFINE_integer(
    "steps", 100, "Steps; 0 with --kernels to compile only.", lower_bound=0
)
_EVERY = flags.DEFINE_integer(
    "every", 10, "Steps of a round: after each, losses are printed and a time is taken.",
    lower_bound=1,
)  # fmt: skip
_RATE = flags.DEFINE_float("learning-rate", 1e-3, "AdamW's.", lower_bound=0.0)
_SEED = flags.DEFINE_integer(
    "seed", 0, "Of initial values and batches.", lower_bound=0, upper_bound=2**31 - 1
)
_DEVICES = flags.DEFINE_integer(
    "devices", 1, "Devices to spread the batch over; on a CPU, those of each process.",
    lower_bound=1,
)  # fmt: skip
_COORDINATOR = flags.DEFINE_string(
    "coordinator", None, "host:port of process 0, where there are several processes."
)
_PROCESSES = flags.DEFINE_integer("processes", 1, "How many processes.", lower_bound=1)
_PROCESS_ID = flags.DEFINE_integer("process-id", 0, "Which of them this is.", lower_bound=0)
_KERNELS = flags.DEFINE_boolean(
    "kernels", False, "Compare the kernels of both compiled steps, by module."
)
_TARGET = flags.DEFINE_string(
    "target", "auto", "What --kernels compiles for, as of scripts/compare.py."
)
_JSON = flags.DEFINE_string("json", None, "Also write everything to this file; - for the output.")
_PLOT = flags.DEFINE_string("plot", None, "Draw the losses into this .svg, .png or .pdf.")


def main() -> None:
    """Reads the flags, then trains."""
    platform.prepare_process()
    layers = _layers()
    _check(layers)
    import trainer

    trainer.run(
        trainer.Options(
            model=_MODEL.value,
            layers=layers,
            config={
                "vocabulary": _VOCABULARY.value,
                "hidden": _HIDDEN.value,
                "blocks": _BLOCKS.value,
                "heads": _HEADS.value,
                "length": _LENGTH.value,
                "norm": _NORM.value,
                "mlp": _MLP.value,
                "attention": _ATTENTION.value,
                "dtype": _DTYPE.value,
            },
            batch=_BATCH.value,
            steps=_STEPS.value,
            every=_EVERY.value,
            learning_rate=_RATE.value,
            seed=_SEED.value,
            devices=_DEVICES.value,
            coordinator=_COORDINATOR.value,
            processes=_PROCESSES.value,
            process_id=_PROCESS_ID.value,
            kernels=_KERNELS.value,
            target=_TARGET.value,
            json=_JSON.value,
            plot=_PLOT.value,
        )
    )


def _layers() -> tuple[str, ...]:
    kinds = tuple(dict.fromkeys(kind.strip() for kind in _LAYERS.value))
    for kind in kinds or ("",):
        if kind not in ("flax", "fusejax"):
            raise UsageError(f"--layers {kind!r} is unknown: give flax, fusejax, or flax,fusejax")
    return kinds


def _check(layers: tuple[str, ...]) -> None:
    if _HIDDEN.value % _HEADS.value:
        raise UsageError(
            f"--hidden {_HIDDEN.value} is no multiple of --heads {_HEADS.value}: give one that is"
        )
    if _ATTENTION.value == "cudnn" and (_DTYPE.value != "bfloat16" or not platform.gpu_present()):
        raise UsageError("--attention cudnn needs a GPU and --dtype bfloat16: leave it out here")
    if not math.isfinite(_RATE.value):
        raise UsageError(f"--learning-rate {_RATE.value}: give a finite number")
    total = _DEVICES.value * _PROCESSES.value
    if _BATCH.value % total:
        raise UsageError(
            f"--batch {_BATCH.value} cannot be spread over {total} devices: give a multiple"
        )
    if _PROCESSES.value > 1 and not re.fullmatch(r"\S+:\d{1,5}", _COORDINATOR.value or ""):
        raise UsageError(
            f"--coordinator {_COORDINATOR.value!r}: --processes needs the host:port of process 0"
        )
    if _PROCESS_ID.value >= _PROCESSES.value:
        raise UsageError(
            f"--process-id {_PROCESS_ID.value}: give one below --processes {_PROCESSES.value}"
        )
    if _KERNELS.value and (len(layers) < 2 or total > 1):
        raise UsageError(
            "--kernels compares two steps on one device: give --layers flax,fusejax "
            "and leave --devices out"
        )
    if _COORDINATOR.value is not None and _PROCESSES.value == 1:
        raise UsageError(
            f"--coordinator {_COORDINATOR.value!r} is for several processes: give --processes too"
        )
    if flags.FLAGS["target"].present and not _KERNELS.value:
        raise UsageError(
            f"--target {_TARGET.value!r} is what --kernels compiles for: give --kernels too"
        )
    if not _STEPS.value and not _KERNELS.value:
        raise UsageError("--steps 0 trains nothing: give more, or --kernels")
    if _PLOT.value is not None:
        from fusejax.report.sweep_plot import require_plotting

        if not _STEPS.value:
            raise UsageError("--plot draws losses, and --steps is 0: give more steps")
        require_plotting("--plot", _PLOT.value)
    if _PROCESS_ID.value == 0:
        for flag, path in (("--json", _JSON.value), ("--plot", _PLOT.value)):
            cli.check_writable(flag, path)


if __name__ == "__main__":
    cli.run(main, __doc__)
