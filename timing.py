"""How things are timed against each other, and where the results go."""

import json
import platform
import statistics
import time

import torch


def medians(runs, repeats, warm_up=1):
    """{name: a function that may return the seconds that count} -> {name: its median seconds}.

    Rounds alternate between the functions, so that a machine that slows down slows all of them.
    """
    if repeats < 1:
        raise ValueError(f"repeats = {repeats}: it must be at least 1")
    seconds = {name: [] for name in runs}
    for i in range(repeats + warm_up):
        for name, run in runs.items():
            start = time.perf_counter()
            own = run()
            elapsed = time.perf_counter() - start
            if i >= warm_up:
                seconds[name].append(own if isinstance(own, float) else elapsed)
    return {name: statistics.median(times) for name, times in seconds.items()}


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
