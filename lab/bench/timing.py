"""How things are timed against each other, how much memory they take, how the results are told."""

import platform
import statistics
import sys
import time
from multiprocessing import get_context
from pathlib import Path
from typing import Annotated, TypeVar

import pandas as pd
import torch
from pydantic import AfterValidator

from model import write_json

CPU = torch.device("cpu")


def not_empty(values):
    if not values:
        raise ValueError("needs a value")
    return values


Some = Annotated[tuple[TypeVar("T"), ...], AfterValidator(not_empty)]  # for a flag, Some[int]


# -- Time ------------------------------------------------------------------------------------------


def seconds_of(run, device=CPU, calls=1):
    """Seconds of one call, or what the function itself returns as the seconds that count.

    On CUDA the GPU's own clock says when it began and ended. With several `calls` the host can
    prepare the next one while the GPU is busy, as it does in a training.
    """
    if device.type == "cuda":
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(calls):
            own = run()
        end.record()
        end.synchronize()
        seconds = begin.elapsed_time(end) / 1e3  # it tells milliseconds
    else:
        start = time.perf_counter()
        for _ in range(calls):
            own = run()
        seconds = time.perf_counter() - start
    return own if isinstance(own, float) else seconds / calls


def medians(runs, repeats, warm_up=1, device=CPU, calls=1):
    """{name: a function, see `seconds_of`} -> {name: its median seconds}.

    Rounds alternate between the functions, so that a machine that slows down slows all of them.
    """
    seconds = {name: [] for name in runs}
    for i in range(repeats + warm_up):
        for name, run in runs.items():
            once = seconds_of(run, device, calls)
            if i >= warm_up:
                seconds[name].append(once)
    return {name: statistics.median(times) for name, times in seconds.items()}


def bandwidth(device, size=2**28):
    """Bytes a second that the memory of a device gives, by adding up `size` of them."""
    x = torch.ones(size // 4, device=device)
    return size / medians({"sum": x.sum}, 5, device=device)["sum"]


# -- Memory ----------------------------------------------------------------------------------------


def measure(make, cases, repeats, warm_up, calls=1):
    """Median seconds of each case, its peak memory in MiB (nan where it cannot be told), and why
    others cannot run here: three dicts by name.

    A case is the arguments with which `make` makes a function to run; the last but one is the
    device. `warm_up` is a small case.
    """
    runs, refused = {}, {}
    device = next(iter(cases.values()))[-2]
    for name, case in cases.items():
        try:
            run = make(*case)
            run()
            runs[name] = run
        except Exception as error:  # too little memory; a kernel of others fails in any way
            refused[name] = f"{type(error).__name__}: {str(error).strip()}".splitlines()[0]
    seconds = medians(runs, repeats, 0, device, calls)
    memory = dict.fromkeys(runs, float("nan"))
    if device.type == "cuda":
        memory = {name: peak_on_gpu(run) for name, run in runs.items()}
    elif sys.platform == "linux":
        del run, runs  # and their memory
        tasks = [(make, warm_up, cases[name]) for name in seconds]
        with get_context("spawn").Pool(1, maxtasksperchild=1) as pool:
            memory = dict(zip(seconds, pool.map(peak_memory, tasks, 1), strict=True))
    return seconds, memory, refused


def peak_on_gpu(run):
    """MiB that a run needs beyond what is there before it."""
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    run()
    return (torch.cuda.max_memory_allocated() - before) / 2**20


def peak_memory(arguments):
    """MiB that one run of `make(*case)` needs beyond its inputs, in a process of its own."""
    make, warm_up, case = arguments
    make(*warm_up)()  # loads the libraries
    run = make(*case)
    Path("/proc/self/clear_refs").write_text("5")  # Linux: forget the peak so far
    before = resident("VmRSS")
    run()
    # Linux sums what its threads hold with a delay, which can exceed a need of nothing
    return max(resident("VmHWM") - before, 0)


def resident(field):
    """MiB in memory now (VmRSS) or at the peak (VmHWM), from Linux's account of this process."""
    status = Path("/proc/self/status").read_text()
    return int(status.split(field + ":")[1].split()[0]) / 2**10


# -- Results ---------------------------------------------------------------------------------------


def print_table(rows, columns):
    """Rows (dicts) as text, of columns {title: "key:format"}; a blank where there is no number."""
    cells = {}
    for title, column in columns.items():
        key, _, form = column.partition(":")
        cells[title] = ["" if pd.isna(row[key]) else f"{row[key]:{form}}" for row in rows]
    print(pd.DataFrame(cells).to_string(index=False))


def machine(device):
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor()
    return {
        "device": f"{device.type} {name}".strip(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "time": time.strftime("%Y-%m-%d %H:%M"),
    }


def write_results(file, results):
    file.parent.mkdir(parents=True, exist_ok=True)
    write_json(file, results)
    return file
