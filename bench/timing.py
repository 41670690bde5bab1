"""How things are timed against each other, how much memory they take, where the results go."""

import json
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


def not_empty(values):
    if not values:
        raise ValueError("needs a value")
    return values


Some = Annotated[tuple[TypeVar("T"), ...], AfterValidator(not_empty)]  # for a flag, Some[int]


def medians(runs, repeats, warm_up=1):
    """{name: a function that may return the seconds that count} -> {name: its median seconds}.

    Rounds alternate between the functions, so that a machine that slows down slows all of them.
    """
    seconds = {name: [] for name in runs}
    for i in range(repeats + warm_up):
        for name, run in runs.items():
            start = time.perf_counter()
            own = run()
            elapsed = time.perf_counter() - start
            if i >= warm_up:
                seconds[name].append(own if isinstance(own, float) else elapsed)
    return {name: statistics.median(times) for name, times in seconds.items()}


def measure(make, cases, repeats, warm_up):
    """Median seconds of each case and its peak memory in MiB (nan where it cannot be told).

    A case is the arguments with which `make` makes a function to run; the last but one is the
    device. `warm_up` is a small case.
    """
    runs = {name: make(*case) for name, case in cases.items()}
    seconds = medians(runs, repeats)
    del runs
    memory = dict.fromkeys(cases, float("nan"))
    if all(case[-2].type == "cuda" for case in cases.values()) or sys.platform == "linux":
        tasks = [(make, warm_up, case) for case in cases.values()]
        with get_context("spawn").Pool(1, maxtasksperchild=1) as pool:
            memory = dict(zip(cases, pool.map(peak_memory, tasks, 1), strict=True))
    return seconds, memory


def peak_memory(arguments):
    """MiB that one run of `make(*case)` needs beyond its inputs, in a process of its own."""
    make, warm_up, case = arguments
    make(*warm_up)()  # loads the libraries
    run, device = make(*case), case[-2]
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        run()
        return (torch.cuda.max_memory_allocated() - before) / 2**20
    Path("/proc/self/clear_refs").write_text("5")  # Linux: forget the peak so far
    before = resident("VmRSS")
    run()
    return resident("VmHWM") - before


def resident(field):
    """MiB in memory now (VmRSS) or at the peak (VmHWM), from Linux's account of this process."""
    status = Path("/proc/self/status").read_text()
    return int(status.split(field + ":")[1].split()[0]) / 2**10


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
    file.write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")
    return file
