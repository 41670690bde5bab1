"""Where a script runs and how precisely, picked automatically or as asked for; how it ends."""

import os
import sys
import time

import torch


def pick_device(name="auto"):
    """'auto' -> CUDA, else MPS, else CPU. A name is taken if there is such a device here."""
    available = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available()}
    available["cpu"] = True
    if name == "auto":
        name = next(kind for kind, there in available.items() if there)
    if not available.get(name.split(":")[0]):
        there = [kind for kind, found in available.items() if found]
        raise ValueError(f"device {name!r} is not here; there is {', '.join(there)}")
    try:
        return torch.device(name)
    except RuntimeError:
        raise ValueError(f"{name!r} is no device; write cpu, cuda, cuda:1 or mps") from None


def pick_precision(name, device):
    """'auto' -> bfloat16 where its matrix products are fast (on a CPU: measured), else float32."""
    if name != "auto":
        return {"float32": torch.float32, "bfloat16": torch.bfloat16}[name]
    if device.type == "cuda":
        return torch.bfloat16 if torch.cuda.is_bf16_supported() else torch.float32
    if device.type != "cpu":
        return torch.float32

    def seconds(dtype):
        x, times = torch.ones(512, 512, dtype=dtype), []
        for _ in range(5):
            start = time.perf_counter()
            x @ x
            times.append(time.perf_counter() - start)
        return min(times)

    return (
        torch.bfloat16 if 1.5 * seconds(torch.bfloat16) < seconds(torch.float32) else torch.float32
    )


def autocast(device, dtype):
    """The context in which a model computes in `dtype`; its weights stay in float32."""
    return torch.autocast(device.type, dtype, enabled=dtype != torch.float32)


def command_line(main):
    """Run a script: an error that the user can mend is one line, not a stack trace."""
    try:
        main()
    except BrokenPipeError:  # whoever read the output has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(141)
    except (ValueError, OSError) as error:
        sys.exit(f"error: {error}")
    except KeyboardInterrupt:
        print("\ninterrupted", file=sys.stderr)
        sys.exit(130)
